"""The model "pdkernels" of lm-evaluation-harness."""

from __future__ import annotations

import inspect
import logging
import os
from typing import Any, NoReturn

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from pdkernels import models
from pdkernels._validation import check, integer, refuse
from pdkernels.decoding import find, generate, method_options
from pdkernels.decoding.options import suggestion
from pdkernels.generation.params import SETTINGS, SamplingParams, Setting, names_of
from pdkernels.integrations.likelihood import Likelihood, log_likelihood, masked_log_likelihood

OP = "HarnessModel"
_LOG = logging.getLogger(__name__)
_LENGTH = "max_gen_toks"
"""The harness's name of `max_new_tokens`, which comes before others."""
_OTHER_FORMS = ("do_sample", "max_length", "sequence_bias")
"""Aliases whose values are not those of the setting."""


@register_model("pdkernels")
class HarnessModel(TemplateLM):  # type: ignore[misc]
    """A model of `pdkernels.models` for lm-evaluation-harness, decoding with any method.

    Generations are those of `pdkernels.decoding.generate`, cut at the first of the task's stop texts. Log-likelihoods
    are exact for causal models; masked-diffusion models give LLaDA's bound (`masked_log_likelihood`).

    Args:
        pretrained: an argument of `pdkernels.models.load`, or a model with a tokenizer.
        method: one of `pdkernels.decoding.available()`.
        batch_size: prompts per generation, and rows per forward for likelihoods.
        max_new_tokens: used if a task sets no length.
        likelihood_samples: samples of the bound; 128 in LLaDA's evaluation.
        check_greedy: for masked-diffusion models, whether to check that the model itself writes a text, with one token
            per forward. This takes as many forwards as the text has tokens; only tasks with the metric "is greedy"
            (LAMBADA) use it. False: no text counts as greedy.
        seed: of sampling.
        add_bos_token: whether texts begin with the BOS token. None: as the tokenizer does. A text that already begins
            with BOS, as rendered chats do, gets no second one.
        prefix_token_id: the token that precedes texts without a context, and rolling windows. None: BOS, or the end
            token if there is no BOS.
        enable_thinking, chat_template_args: variables of the chat template.
        dtype, device: as in `pdkernels.models.load`, the dtype or its name. With a model in place of a name, None
            or the model's.
        max_batch_size: a limit of `batch_size`.
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
        dtype: Any = None,
        device: str | None = None,
        max_batch_size: int | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        enable_thinking: bool | None = None,
        chat_template_args: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        import torch

        kind = dtype if dtype is None or isinstance(dtype, torch.dtype) else getattr(torch, str(dtype), dtype)
        exists = kind is None or isinstance(kind, torch.dtype)
        check(exists, OP, "dtype", "name a dtype of torch, such as 'bfloat16'", repr(dtype))
        named = isinstance(pretrained, (str, os.PathLike))
        if not named:
            check(
                kind in (None, getattr(pretrained, "dtype", None)), OP, "dtype", "be None, or that of the model", kind
            )
            asked, at = torch.device(device or "meta"), torch.device(getattr(pretrained, "device", "cpu"))
            same = device is None or (asked.type == at.type and asked.index in (None, at.index or 0))
            check(same, OP, "device", "be None, or that of the model", device)
        self.model: Any = models.load(pretrained, dtype=kind, device=device or "cpu") if named else pretrained
        check(self.model.tokenizer is not None, OP, "pretrained", "have a tokenizer", "a model without")
        self.method = find(method)
        unknown = sorted(set(options) - set(method_options(method)))
        known = (*inspect.signature(HarnessModel).parameters, *method_options(method))
        hint = "".join(suggestion(name, known) for name in unknown)
        refuse(bool(unknown), OP, f"method {method!r} has no option {', '.join(unknown)}", hint.strip())
        self.options = options
        number = not isinstance(batch_size, str) or batch_size.isdecimal()
        check(number, OP, "batch_size", "be a number", repr(batch_size), "Sizes are not tried.")
        self.batch_size = integer(OP, "batch_size", int(batch_size), 1)
        if max_batch_size is not None:
            self.batch_size = min(self.batch_size, integer(OP, "max_batch_size", max_batch_size, 1))
        self.max_new_tokens = integer(OP, "max_new_tokens", int(max_new_tokens), 1)
        self.samples = integer(OP, "likelihood_samples", int(likelihood_samples), 1)
        self.check_greedy, self.seed = bool(check_greedy), int(seed)
        self.masked = getattr(self.model.config, "attention", "causal") == "bidirectional"
        self.add_bos_token, self.custom_prefix_token_id = add_bos_token, prefix_token_id
        bos = self.bos_token_id is not None
        refuse(bool(add_bos_token) and not bos, OP, "add_bos_token needs a tokenizer with a BOS token")
        if prefix_token_id is not None:
            size = self.model.config.vocab_size
            in_range = 0 <= integer(OP, "prefix_token_id", prefix_token_id, 0) < size
            check(in_range, OP, "prefix_token_id", f"be an id below {size}", prefix_token_id)
        self.template_variables = dict(chat_template_args or {})
        if enable_thinking is not None:
            self.template_variables["enable_thinking"] = enable_thinking
        self.template_name: str | None = None
        self.tokens, self.forwards = 0, 0.0

    @property
    def tokens_per_forward(self) -> float:
        """New tokens of all generations so far, over the forwards in which their sequences took part.

        As in `DecodeStats`: the batch size does not change it, and 1.0 is one token at a time.
        """
        return self.tokens / self.forwards if self.tokens else 0.0

    @property
    def tokenizer_name(self) -> str:
        """For the harness's cache of requests."""
        return type(self.model.tokenizer).__name__

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text; None if the tokenizer has none."""
        found = getattr(self.model.tokenizer, "bos_token_id", None)
        return None if found is None else int(found)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text: the tokenizer's, or else the model's first one."""
        found = getattr(self.model.tokenizer, "eos_token_id", None)
        ends = (*(() if found is None else (found,)), *getattr(self.model, "end_tokens", ()))
        check(
            bool(ends),
            OP,
            "tokenizer",
            "have an end token for texts without a context",
            "none",
            "Pass prefix_token_id.",
        )
        return int(ends[0])

    @property
    def prefix_token_id(self) -> int:
        """The token that precedes texts without a context, and rolling windows."""
        for found in (self.custom_prefix_token_id, self.bos_token_id):
            if found is not None:
                return int(found)
        return self.eot_token_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids, as the harness's model of transformers has them: with special tokens as the tokenizer adds them,
        `add_bos_token` or `add_special_tokens` says, and without another BOS before a text that begins with it."""
        special = self.add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and self._begins(string):
            special = False
        if special is None or (special and not self.add_bos_token):
            return list(self.model.tokenizer.encode(string))
        ids = self._plain(string)
        return [int(self.bos_token_id or 0), *ids] if special else ids

    def _begins(self, string: str) -> bool:
        tokenizer = self.model.tokenizer
        if self.custom_prefix_token_id is None and self.bos_token_id is None and not self.model.end_tokens:
            return False
        begin = getattr(tokenizer, "decode_all", tokenizer.decode)([self.prefix_token_id])
        return bool(begin) and string.startswith(begin)

    def _plain(self, string: str) -> list[int]:
        """Ids without special tokens around them."""
        encode = self.model.tokenizer.encode
        if "add_special_tokens" in inspect.signature(encode).parameters:
            return list(encode(string, add_special_tokens=False))
        ids, around = list(encode(string)), list(encode(""))
        return ids[len(around) :] if ids[: len(around)] == around else ids

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The source of the template that chats are rendered with; a name chooses one of several."""
        template = getattr(self.model.tokenizer, "chat_template", None)
        if not chat_template or template is None:
            return None if not chat_template else ""
        self.template_name = chat_template if isinstance(chat_template, str) else None
        return str(template.chosen(self.template_name))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a chat, from the checkpoint's template. Without a generation prompt the last message is
        continued."""
        template = getattr(self.model.tokenizer, "chat_template", None)
        if template is None:
            raise NotImplementedError(f"{OP}: the checkpoint has no chat template.")
        settings: dict[str, Any] = {**self.template_variables, "add_generation_prompt": add_generation_prompt}
        settings |= {"continue_final_message": not add_generation_prompt, "chat_template": self.template_name}
        try:
            return str(template.render(chat_history, **settings))
        except ValueError as error:
            rest = [message for message in chat_history if message["role"] != "system"]
            if "TemplateError" not in str(error) or len(rest) == len(chat_history):
                raise
            _LOG.warning("The template refuses the chat; its system message is left out, as the harness does.")
            return str(template.render(rest, **settings))

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
        maximum = max((len(text) for _, _, text in requests), default=0)
        check(maximum <= longest, OP, "text", f"have at most {longest} tokens, the model's positions", maximum)
        # As in the harness's own models, a text that is too long is cut at its start. A causal model does not read the
        # last token.
        max_tokens = longest if self.masked else longest + 1
        prefixes = [prefix[-max(max_tokens - len(text), 1) :] for _, prefix, text in requests]
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
            ids = self.tok_encode(text)
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.model.config.max_positions, 1)
            pairs = [make_disjoint_window(window) for window in windows]
            found = self._likelihoods([list(a) for a, _ in pairs], [list(b) for _, b in pairs])
            answers.append(sum(likelihood.log_prob for likelihood in found))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answers[-1])
        return answers

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts up to the first stop text of each request."""
        answers: list[str] = [""] * len(requests)
        groups: list[tuple[SamplingParams, list[int]]] = []
        for i, request in enumerate(requests):
            params = self._params(request.args[1])
            members = next((members for other, members in groups if other == params), None)
            if members is None:
                groups.append((params, members := []))
            members.append(i)
        for params, members in groups:
            for first in range(0, len(members), self.batch_size):
                part = members[first : first + self.batch_size]
                texts = self._generate([requests[i].args[0] for i in part], params)
                for i, text in zip(part, texts):
                    cuts = [text.find(stop) for stop in params.stop_strings if stop in text]
                    answers[i] = text[: min(cuts)] if cuts else text
                    self.cache_hook.add_partial("generate_until", requests[i].args, answers[i])
        return answers

    def _generate(self, prompts: list[str], params: SamplingParams) -> list[str]:
        longest, limit = self.model.config.max_positions, params.max_new_tokens
        check(limit < longest, OP, _LENGTH, f"leave room for a prompt in {longest} positions", limit)
        ids = [self.tok_encode(prompt) for prompt in prompts]
        if max(map(len, ids)) + limit > longest:
            _LOG.warning("Prompts are cut at their start, as the harness does, to leave room for %d tokens.", limit)
            ids = [prompt[limit - longest :] for prompt in ids]
        options = {name: value for name, value in self.options.items() if name not in SETTINGS}
        result = generate(self.model, ids, self.method, params=params, **options)
        self.tokens += result.stats.tokens
        self.forwards += result.stats.tokens / (result.stats.tokens_per_forward or 1.0)
        assert result.text is not None
        return list(result.text)

    def _params(self, asked: dict[str, Any]) -> SamplingParams:
        """The settings of a task's generation: by their names here, in transformers, or elsewhere; others are
        refused."""
        asked = {name: value for name, value in asked.items() if value is not None}
        until = asked.pop("until", None) or ()
        draws = asked.pop("do_sample", None)
        settings: dict[str, Any] = {}
        for setting in SETTINGS.values():
            if values := [(name, asked.pop(name)) for name in _names(setting) if name in asked]:
                name, value = values[0]
                if setting.effect == "report" and setting.changes(value):
                    _refuse(name, value, "The harness takes one text of a request, and nothing else.")
                settings[setting.name] = _value(setting, value)
        for name, value in asked.items():
            if (name, value) != ("num_beams", 1):
                _refuse(name, value, "Give options of the method in model_args.")
        limit = settings.pop("max_new_tokens", None)
        limit = self.max_new_tokens if limit is None else integer(OP, _LENGTH, int(limit), 1)
        stops = [until] if isinstance(until, str) else until
        stops = [stop for stop in (*stops, *settings.pop("stop_strings", ())) if stop]
        if not (settings.get("temperature") if draws is None else draws):  # filters keep the most probable token
            settings = {
                name: value for name, value in settings.items() if name == "seed" or name not in names_of("draw")
            }
        elif draws:
            settings.setdefault("temperature", 1.0)
        own = {name: value for name, value in self.options.items() if name in SETTINGS}
        chosen = {"seed": self.seed, **own, **settings, "max_new_tokens": limit, "stop_strings": stops}
        return SamplingParams(op=OP, **{name: SETTINGS[name].neutralised(value) for name, value in chosen.items()})


def _names(setting: Setting) -> list[str]:
    """What a task may call a setting; an earlier name wins."""
    names = (_LENGTH, setting.name, setting.wire, setting.transformers, *setting.aliases)
    start = 0 if _LENGTH in setting.aliases else 1
    return [name for name in dict.fromkeys(names[start:]) if name and name not in _OTHER_FORMS]


def _value(setting: Setting, value: Any) -> Any:
    """A value as a task may write it: one string or id instead of a list, numbers as the keys of JSON."""
    if setting.kind in ("integers", "strings") and isinstance(value, (int, str)):
        return [value]
    if setting.kind in ("numbers by token", "tokens by place") and isinstance(value, dict):
        return {int(key) if isinstance(key, str) and key.isdecimal() else key: item for key, item in value.items()}
    return float(value) if setting.name == "temperature" else value


def _refuse(name: str, value: Any, remedy: str) -> NoReturn:
    raise NotImplementedError(f"{OP}: {name} must be absent from generation_kwargs, got {value!r}. {remedy}")
