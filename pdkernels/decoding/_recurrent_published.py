"""The diffusion-forcing sampler as its authors' code runs it, slips included: for comparison, not for use.

The steps are those of reference/recurrent_published.py, which lists the slips; here the parts of a `RecurrentDepth` model run them,
on a KV cache. One sequence, and the sampler itself works on the host: a step reads the device after each part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pdkernels.decoding._recurrent import Sampling
from pdkernels.decoding._sampling import random_words
from pdkernels.decoding._session import Session
from pdkernels.decoding.result import RecurrentStep
from pdkernels.models.recurrent_depth import STATE_STD, ForwardContext, RecurrentDepth
from pdkernels.reference.recurrence import initial_state
from pdkernels.reference.recurrent_published import FREEZES, recurrent_published

__all__ = ["FREEZES", "decode_published"]


def decode_published(session: Session, sampling: Sampling, page_size: int | None, **options: Any) -> int:
    """Fill `session`, whose batch is 1, at its end; `options` are the reference's. The text is cut at `max_new_tokens`."""
    model: RecurrentDepth = session.model
    limit = session.max_new_tokens
    # The last freeze may go beyond the tokens asked for by a wave, and the wave behind it is a wave long.
    cache = session.new_cache(page_size, room=2 * options["max_wavefront"])

    def init(step: int, positions: torch.Tensor) -> torch.Tensor:
        return initial_state(torch.tensor(step), positions, model.config.hidden_size, sampling.seed, STATE_STD).to(
            model.dtype
        )

    def sample(logits: torch.Tensor, positions: Sequence[int]) -> list[int]:
        return sampling.draw(logits[None], torch.tensor([list(positions)]))[0].tolist()

    def guess(step: int, count: int) -> list[int]:
        words = random_words(sampling.seed, step, torch.zeros(1, dtype=torch.int64), count)
        return (words[0] % model.config.vocab_size).tolist()

    result = recurrent_published(
        _Parts(model, cache),
        session.prompts[0],
        limit,
        init=init,
        sample=sample,
        guess=guess,
        stop_tokens=session.end_tokens,
        max_positions=model.config.max_positions,
        **options,
    )
    session.forwards = result.forwards
    session.recurrences = options["recurrences"] + options["inner_recurrence"] * len(result.trace)
    session.accepted[0] += [step.frozen for step in result.trace]
    if session.trace is not None:
        session.trace[0] += [RecurrentStep(*step) for step in result.trace]
    session.emit(0, result.tokens[:limit], 0)
    return result.forwards


class _Past:
    """Frozen rows: those of a cache, or none at all. Rows of a forward stand behind them."""

    def __init__(self, model: RecurrentDepth, cache: Any) -> None:
        self.model, self.cache, self.length = model, cache, 0
        self._context: tuple[tuple[int, int], ForwardContext] | None = None

    def context(self, rows: int) -> ForwardContext:
        """Made once for all the parts of a step."""
        if self._context is None or self._context[0] != (self.length, rows):
            self._context = (self.length, rows), self.model.context(rows, self.cache)
        return self._context[1]

    def freeze(self, rows: int) -> None:
        self.cache.commit_(torch.full_like(self.cache.lengths, rows))
        self.length += rows


class _Parts:
    """A `RecurrentDepth` model as the reference's samplers know one: without batch, with tensors on the host."""

    def __init__(self, model: RecurrentDepth, cache: Any) -> None:
        self.model, self.caches = model, [cache]

    def new_past(self) -> _Past:
        """The cache is the first one's; one more is asked for where a prelude is to see nothing of it."""
        return _Past(self.model, self.caches.pop() if self.caches else None)

    def prelude(self, tokens: torch.Tensor, start: int, past: _Past) -> torch.Tensor:
        return self._host(self.model.prelude(self._device(tokens), past.context(len(tokens))))

    def core(self, state: torch.Tensor, e: torch.Tensor, start: int, past: _Past) -> torch.Tensor:
        term = self.model.embedding_term(self._device(e))
        return self._host(self.model.core(self._device(state), term, past.context(len(state))))

    def coda(self, state: torch.Tensor, start: int, past: _Past) -> torch.Tensor:
        return self._host(self.model.coda(self._device(state), past.context(len(state))))

    def _device(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[None].to(self.model.device)

    def _host(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[0].cpu()
