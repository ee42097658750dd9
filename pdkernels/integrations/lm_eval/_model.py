"""The model "pdkernels" of lm-evaluation-harness."""

from __future__ import annotations

from typing import Any, NoReturn

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from pdkernels import models
from pdkernels._validation import check, integer
from pdkernels.decoding import find, generate, method_options
from pdkernels.integrations.likelihood import Likelihood, log_likelihood, masked_log_likelihood

OP = "HarnessModel"
# Options of tasks for a generation besides its length and stop texts. Neutral values pass.
_NOTHING: dict[str, tuple[Any, ...]] = {"num_beams": (1,), "repetition_penalty": (1, 1.0), "num_return_sequences": (1,)}


@register_model("pdkernels")
class HarnessModel(TemplateLM):  # type: ignore[misc]
    """A model of `pdkernels.models` for lm-evaluation-harness, decoding with any method.

    Generations are those of `pdkernels.decoding.generate`, cut at the first of the task's stop texts. Log-likelihoods are exact
    for causal models; masked-diffusion models give LLaDA's bound (`masked_log_likelihood`).

    Args:
        pretrained: an argument of `pdkernels.models.load`, or a model with a tokenizer.
        method: one of `pdkernels.decoding.available()`.
        batch_size: prompts per generation, and rows per forward for likelihoods.
        max_new_tokens: used if a task sets no length.
        likelihood_samples: samples of the bound; 128 in LLaDA's evaluation.
        check_greedy: for masked-diffusion models, whether to check that a text is also what the model writes, one token per
            forward. As many forwards as the text has tokens; only tasks with the metric "is greedy" (LAMBADA) use it. False:
            none counts as greedy.
        seed: of all draws.
        dtype, device: as in `pdkernels.models.load`.
        **options: of the method.

    Raises:
        ValueError: a model without tokenizer, unknown methods or options.
        NotImplementedError: requests that the model or the method cannot serve, named.

    Example:
        >>> from pdkernels.integrations.lm_eval import HarnessModel
        >>> lm = HarnessModel("tiny-code", method="jacobi", block_size=4)
        >>> lm.tok_encode("ab")
        [97, 98]
    """

    def __init__(
        self,
        pretrained: Any,
        method: str = "autoregressive",
        batch_size: int | str = 8,
        max_new_tokens: int = 256,
        likelihood_samples: int = 128,
        check_greedy: bool = False,
        seed: int = 0,
        dtype: str | None = None,
        device: str | None = None,
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        import torch

        kind = None if dtype is None else getattr(torch, dtype)
        named = isinstance(pretrained, str)
        self.model: Any = models.load(pretrained, dtype=kind, device=device or "cpu") if named else pretrained
        check(self.model.tokenizer is not None, OP, "pretrained", "have a tokenizer", "a model without")
        self.method = find(method)
        unknown = sorted(set(options) - set(method_options(method)))
        check(not unknown, OP, "options", f"be of method {method!r}", ", ".join(unknown))
        self.options = options
        self.batch_size = integer(OP, "batch_size", int(batch_size), 1)
        self.max_new_tokens = integer(OP, "max_new_tokens", int(max_new_tokens), 1)
        self.samples = integer(OP, "likelihood_samples", int(likelihood_samples), 1)
        self.check_greedy, self.seed = bool(check_greedy), int(seed)
        self.masked = getattr(self.model.config, "attention", "causal") == "bidirectional"
        self.tokens = self.forwards = 0

    @property
    def tokens_per_forward(self) -> float:
        """Stats of all generations so far."""
        return self.tokens / max(self.forwards, 1)

    @property
    def tokenizer_name(self) -> str:
        """For the harness's cache of requests."""
        return type(self.model.tokenizer).__name__

    @property
    def eot_token_id(self) -> int:
        """The first end token; also used as the prefix of texts without a context."""
        ends = self.model.tokenizer.end_tokens
        check(bool(ends), OP, "tokenizer", "have an end token for texts without a context", "none")
        return int(ends[0])

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids. The tokenizer decides on special tokens; `add_special_tokens=False` leaves them out."""
        ids, special = (list(self.model.tokenizer.encode(text)) for text in (string, ""))
        plain = add_special_tokens is False and ids[: len(special)] == special
        return ids[len(special) :] if plain else ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a chat, from the checkpoint's template."""
        template = getattr(self.model.tokenizer, "chat_template", None)
        if template is None:
            raise NotImplementedError(f"{OP}: the checkpoint must have a chat template, got none.")
        return str(template.render(chat_history, add_generation_prompt=add_generation_prompt))

    def _likelihoods(self, prefixes: list[list[int]], texts: list[list[int]]) -> list[Likelihood]:
        if not self.masked:
            return log_likelihood(self.model, prefixes, texts, batch_size=self.batch_size)
        bound = masked_log_likelihood(
            self.model, prefixes, texts, samples=self.samples, batch_size=self.batch_size, seed=self.seed
        )
        if not self.check_greedy:
            return bound
        written = [
            generate(self.model, prefix, "llada", max_new_tokens=len(text), end_tokens=()).tokens.tolist()
            for prefix, text in zip(prefixes, texts)
        ]
        return [Likelihood(b.log_prob, w == text) for b, w, text in zip(bound, written, texts)]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        longest = self.model.config.max_positions
        # As in the harness's own models: what does not fit is cut at its start.
        prefixes = [prefix[-max(longest - len(text), 1) :] for _, prefix, text in requests]
        found = self._likelihoods(prefixes, [text for _, _, text in requests])
        answers = [(likelihood.log_prob, likelihood.greedy) for likelihood in found]
        for request, answer in zip(requests, answers):
            self.cache_hook.add_partial("loglikelihood", request[0], answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, for perplexities, in windows of the model's length."""
        if self.masked:
            raise NotImplementedError(
                f"{OP}: a model must be causal for rolling likelihoods, got a masked-diffusion one."
            )
        answers = []
        for request in requests:
            (text,) = request.args
            ids = self.tok_encode(text, add_special_tokens=False)
            windows = get_rolling_token_windows(ids, self.eot_token_id, self.model.config.max_positions, 1)
            pairs = [make_disjoint_window(window) for window in windows]
            found = self._likelihoods([list(a) for a, _ in pairs], [list(b) for _, b in pairs])
            answers.append(sum(likelihood.log_prob for likelihood in found))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answers[-1])
        return answers

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts up to the first stop text of each request."""
        answers: list[str] = [""] * len(requests)
        groups: dict[tuple[int, float | None], list[int]] = {}
        stops: list[list[str]] = []
        for i, request in enumerate(requests):
            until, limit, temperature = self._settings(request.args[1])
            stops.append(until)
            groups.setdefault((limit, temperature), []).append(i)
        for (limit, temperature), members in groups.items():
            for first in range(0, len(members), self.batch_size):
                part = members[first : first + self.batch_size]
                for i, text in zip(part, self._generate([requests[i].args[0] for i in part], limit, temperature)):
                    cuts = [text.find(stop) for stop in stops[i] if stop in text]
                    answers[i] = text[: min(cuts)] if cuts else text
                    self.cache_hook.add_partial("generate_until", requests[i].args, answers[i])
        return answers

    def _generate(self, prompts: list[str], limit: int, temperature: float | None) -> list[str]:
        ids = [self.tok_encode(prompt) for prompt in prompts]
        for prompt in ids:
            fits = len(prompt) + limit <= self.model.config.max_positions
            check(
                fits, OP, "prompt", f"leave room for {limit} tokens of {self.model.config.max_positions}", len(prompt)
            )
        options = dict(self.options)
        if temperature is not None:
            if "temperature" not in method_options(self.method.name):
                _refuse("temperature", temperature, f"Method {self.method.name!r} does not draw.")
            options |= {"temperature": temperature}
        if "seed" in method_options(self.method.name):
            options.setdefault("seed", self.seed)
        result = generate(self.model, ids, self.method, max_new_tokens=limit, **options)
        self.tokens += result.stats.tokens
        self.forwards += result.stats.forwards
        assert result.text is not None
        return list(result.text)

    def _settings(self, asked: dict[str, Any]) -> tuple[list[str], int, float | None]:
        """Stop texts, most new tokens, and a temperature if the task samples."""
        asked = dict(asked)
        until = asked.pop("until", None) or []
        limit = None
        for name in ("max_gen_toks", "max_new_tokens", "max_tokens"):
            value = asked.pop(name, None)
            limit = limit if value is None else int(value)
        draws, temperature = asked.pop("do_sample", None), asked.pop("temperature", None)
        if draws is None:
            draws = bool(temperature)
        for name, value in asked.items():
            if value is not None and value not in _NOTHING.get(name, ()):
                _refuse(name, value, "Give options of the method in model_args.")
        stops = [until] if isinstance(until, str) else [stop for stop in until if stop]
        heat = (1.0 if temperature is None else float(temperature)) if draws else None
        return stops, self.max_new_tokens if limit is None else limit, heat


def _refuse(name: str, value: Any, remedy: str) -> NoReturn:
    raise NotImplementedError(f"{OP}: {name} must be absent from generation_kwargs, got {value!r}. {remedy}")
