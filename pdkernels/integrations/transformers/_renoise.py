"""DiffusionGemma's sampler on our kernels: uniform diffusion with an entropy budget.

Source: the sampler in transformers for it; the plain form is reference/renoise.py. One pass over the logits of a step
gives the draw, the entropy and the likeliest token of every position; a row's tokens do not depend on the other rows of
its batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from pdkernels._philox import random_words
from pdkernels._validation import check, check_type, integer
from pdkernels.generation.noise import Seed, checked_seeds
from pdkernels.integrations.transformers._cache_names import cache_argument
from pdkernels.integrations.transformers._experts import NAME
from pdkernels.integrations.transformers._given import ids_of
from pdkernels.integrations.transformers._model import register
from pdkernels.ops.token_statistics import token_statistics

OP = "renoise"
NOISE = 3  # the fourth word of the counter; tokens, latent noise and unmasking orders use others
# Defaults where neither the caller nor the checkpoint sets anything, as in transformers.
DEFAULTS = {
    "max_new_tokens": 256,
    "max_denoising_steps": 48,
    "entropy_bound": 0.1,
    "t_min": 0.4,
    "t_max": 0.8,
    "stability_threshold": 1,
    "confidence_threshold": 0.005,
}


class RenoiseDraws(Protocol):
    """External random numbers, for comparisons."""

    def noise(self, rows: int, length: int) -> Tensor:
        """Ids ``(rows, length)``, uniform over the vocabulary."""
        ...

    def tokens(self, probabilities: Tensor) -> Tensor:
        """Ids ``(rows, length)`` drawn from ``(rows, length, vocabulary)``."""
        ...


@dataclass(frozen=True, eq=False)
class RenoiseResult:
    """Result of `renoise`. It equals only itself.

    Attributes:
        sequences: int64 ``(batch, prompt + new)``; new is a multiple of the canvas, pad tokens follow an end token.
        forwards: int64 ``(batch,)``, forwards over canvases in which each sequence took part.
        tokens_per_forward: float ``(batch,)``, new tokens other than padding, over `forwards`.
    """

    sequences: Tensor
    forwards: Tensor
    tokens_per_forward: Tensor


@torch.no_grad()
def renoise(
    model: Any,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    max_new_tokens: int | None = None,
    max_denoising_steps: int | None = None,
    entropy_bound: float | None = None,
    t_min: float | None = None,
    t_max: float | None = None,
    stability_threshold: int | None = None,
    confidence_threshold: float | None = None,
    seed: Seed = 0,
    draws: RenoiseDraws | None = None,
) -> RenoiseResult:
    """Generates with a DiffusionGemma of transformers, canvas by canvas, with our attention.

    A canvas begins as uniform noise. Each step samples a token for every position from the tempered logits. In
    ascending order of entropy it accepts positions as long as the entropies of the earlier ones add up to at most
    `entropy_bound`; all others become fresh noise. Nothing is committed. A canvas ends when its most probable tokens
    have been the same for `stability_threshold` steps and its mean entropy is below `confidence_threshold`, or after
    `max_denoising_steps`; these tokens are the answer. Options have the names of transformers' generation config and
    default to the model's values, then to those of transformers.

    Args:
        model: a ``DiffusionGemmaForBlockDiffusion``. Its `attn_implementation` becomes "pdkernels".
        input_ids: ``(batch, prompt)`` integers; shorter prompts are padded on the left.
        attention_mask: ``(batch, prompt)``, 0 for padding; None: none.
        max_new_tokens: rounded up to whole canvases.
        max_denoising_steps: N, at least 1.
        entropy_bound: in nats, above 0.
        t_min, t_max: temperature with n steps to go: ``t_min + (t_max - t_min) n / N``; 0 < t_min < t_max.
        stability_threshold: in steps; 0: no such test.
        confidence_threshold: in nats, above 0.
        seed: of sampling; an int, from which each sequence derives its own stream, or a list with one seed per
            sequence.
        draws: random numbers to use instead of ours, in the order in which transformers draws them.

    Raises:
        TypeError: another model.
        ValueError: shapes that do not fit, options out of range.

    Example:
        >>> from pdkernels.integrations.transformers import renoise  # doctest: +SKIP
        >>> model = DiffusionGemmaForBlockDiffusion.from_pretrained(folder)  # doctest: +SKIP
        >>> result = renoise(model, tokenizer(text, return_tensors="pt").input_ids, seed=1)  # doctest: +SKIP
    """
    known = hasattr(model, "config") and hasattr(model.config, "canvas_length") and hasattr(model, "lm_head")
    check_type(known, OP, "model", "be a DiffusionGemmaForBlockDiffusion", type(model).__name__)
    register()
    model.set_attn_implementation(NAME)
    given = {
        "max_new_tokens": max_new_tokens,
        "max_denoising_steps": max_denoising_steps,
        "entropy_bound": entropy_bound,
        "t_min": t_min,
        "t_max": t_max,
        "stability_threshold": stability_threshold,
        "confidence_threshold": confidence_threshold,
    }
    options = _Options(**_settings(model, given))
    check(
        input_ids.dim() == 2 and input_ids.shape[1] > 0, OP, "input_ids", "be (batch, prompt)", tuple(input_ids.shape)
    )
    if attention_mask is not None:
        same_shape = attention_mask.shape == input_ids.shape
        check(same_shape, OP, "attention_mask", f"have the shape {tuple(input_ids.shape)}", tuple(attention_mask.shape))
    batch, length = input_ids.shape
    size, device = int(model.config.canvas_length), input_ids.device
    numbers = _Numbers(checked_seeds(OP, seed, batch).to(device), int(model.config.get_text_config().vocab_size))
    generation = model.generation_config
    ends, pad = ids_of(generation.eos_token_id), generation.pad_token_id

    text = input_ids.to(torch.int64)
    visible = torch.ones_like(text, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    caches = {cache_argument(model.forward): DynamicCache(config=model.config.get_text_config(decoder=True))}
    finished = torch.zeros(batch, dtype=torch.bool, device=device)
    forwards = torch.zeros(batch, dtype=torch.int64, device=device)
    fresh = text
    for number in range(-(-options.max_new_tokens // size)):
        first = text.shape[1] - fresh.shape[1]
        positions = torch.arange(first, text.shape[1], device=device)[None]
        model.model.encoder(input_ids=fresh, attention_mask=visible, position_ids=positions, **caches)
        numbers.step = number * (options.max_denoising_steps + 1)
        canvas = _Canvas(options, size, numbers if draws is None else draws, numbers, text.shape[1])
        fresh = canvas.denoise(model, caches, visible, finished, forwards)
        text = torch.cat([text, fresh], 1)
        visible = torch.cat([visible, visible.new_ones(batch, size)], 1)
        if ends:
            ended = torch.isin(fresh, torch.tensor(ends, device=device))
            if pad is not None:
                past_end = ended.cumsum(1) - ended.long() > 0
                text[:, -size:] = torch.where(past_end | finished[:, None], pad, fresh)
                fresh = text[:, -size:]
            finished = finished | ended.any(1)
            if bool(finished.all()):
                break
    new = text[:, length:]
    counted = (new != pad).sum(1) if pad is not None else torch.full_like(forwards, new.shape[1])
    return RenoiseResult(text, forwards, counted / forwards)


@dataclass(frozen=True)
class _Options:
    max_new_tokens: int
    max_denoising_steps: int
    entropy_bound: float
    t_min: float
    t_max: float
    stability_threshold: int
    confidence_threshold: float

    def __post_init__(self) -> None:
        integer(OP, "max_new_tokens", self.max_new_tokens, 1)
        integer(OP, "max_denoising_steps", self.max_denoising_steps, 1)
        integer(OP, "stability_threshold", self.stability_threshold, 0)
        for name in ("entropy_bound", "t_min", "confidence_threshold"):
            check(getattr(self, name) > 0, OP, name, "be above 0", getattr(self, name))
        check(self.t_max > self.t_min, OP, "t_max", f"be above t_min ({self.t_min})", self.t_max)


def _settings(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The caller's options, else those of the model's generation config, else the defaults."""
    stored = model.generation_config
    own = {name: getattr(stored, name, None) for name in DEFAULTS}
    own["entropy_bound"] = getattr(getattr(stored, "sampler_config", None), "entropy_bound", None)
    return {
        name: next(value for value in (given[name], own[name], default) if value is not None)
        for name, default in DEFAULTS.items()
    }


class _Numbers:
    """Random numbers of each sequence, keyed by seed, step and position: the same alone, in a batch and on every
    device."""

    def __init__(self, seeds: Tensor, vocabulary: int) -> None:
        self.seeds, self.vocabulary = seeds[:, None], vocabulary
        self.step, self.positions = 0, seeds

    def noise(self, rows: int, length: int) -> Tensor:
        words = random_words(self.seeds.expand(rows, length), self.step, self.positions.expand(rows, length), 1, NOISE)
        return words[..., 0] * self.vocabulary >> 32


class _Canvas:
    """One canvas of every sequence, from noise to its answer."""

    def __init__(self, options: _Options, size: int, draws: Any, numbers: _Numbers, first: int) -> None:
        self.options, self.size, self.draws, self.numbers = options, size, draws, numbers
        numbers.positions = torch.arange(first, first + size, device=numbers.seeds.device)

    def denoise(
        self, model: Any, caches: dict[str, Any], visible: Tensor, finished: Tensor, forwards: Tensor
    ) -> Tensor:
        """The answers ``(batch, size)``; `caches` is the cache by its argument's name, and `forwards` is incremented
        for those that are neither done nor `finished`."""
        options, batch = self.options, len(visible)
        canvas: Tensor = self.draws.noise(batch, self.size)
        mask = None if bool(visible.all()) else torch.cat([visible, visible.new_ones(batch, self.size)], 1)
        positions = self.numbers.positions
        done = torch.zeros_like(finished)
        before: Tensor | None = None
        answer: Tensor = canvas
        history: list[Tensor] = []
        for left in range(options.max_denoising_steps, 0, -1):
            forwards += ~(done | finished)
            logits = model(
                decoder_input_ids=canvas,
                self_conditioning_logits=before,
                decoder_attention_mask=mask,
                decoder_position_ids=positions[None],
                **caches,
            ).logits
            temperature = options.t_min + (options.t_max - options.t_min) * (left / options.max_denoising_steps)
            tempered = logits / temperature
            self.numbers.step += 1
            drawn, entropy, likeliest = self._look(tempered, positions)
            renewed = self.draws.noise(batch, self.size)
            following = torch.where(within_budget(entropy, options.entropy_bound), drawn, renewed)
            # Finished sequences keep their canvas, answer and self-conditioning.
            kept = done[:, None]
            canvas, answer = torch.where(kept, canvas, following), torch.where(kept, answer, likeliest)
            conditioning = (
                tempered if before is None else torch.where(kept[..., None], before.to(tempered.dtype), tempered)
            )
            before = conditioning.to(model.dtype)
            history.append(answer)
            steps = options.stability_threshold
            if len(history) > steps:
                same = [(old == answer).all(1) for old in history[-1 - steps : -1]]
                unchanged = torch.stack(same).all(0) if same else torch.ones_like(done)
                done = done | (unchanged & (entropy.mean(1) < options.confidence_threshold))
                history = history[-steps:] if steps else []
            if bool(done.all()):
                break
        return answer

    def _look(self, tempered: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A sample for each position, its entropy in nats, and its most probable token, in one pass over the logits."""
        batch, numbers = len(tempered), self.numbers
        found = token_statistics(
            tempered,
            temperature=1.0,
            seed=numbers.seeds.expand(batch, self.size).contiguous(),
            step=numbers.step,
            positions=positions.expand(batch, self.size).contiguous(),
            top_k=1,
            distribution="sampling",
        )
        drawn: Tensor = found.ids if self.draws is numbers else self.draws.tokens(torch.softmax(tempered.float(), -1))
        return drawn, found.entropy, found.top_ids[..., 0]


def within_budget(entropy: Tensor, budget: float) -> Tensor:
    """The accepted positions, ``(batch, length)`` bool: those whose lower entropies add up to at most `budget`."""
    ranked, order = entropy.sort(-1)
    drawn = ranked.cumsum(-1) - ranked <= budget
    return torch.zeros_like(drawn).scatter(-1, order, drawn)
