"""Log-probabilities of the tokens of texts: by a pass of the model over finished ones, or as their tokens are
written."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pdkernels.generation.result import LogProbs
from pdkernels.models.protocols import keeps_windows


class WrittenLogProbs:
    """Log-probabilities of the tokens of a batch in the forwards that write them, for methods whose rows do not depend
    on the text before them alone. Tokens may be written again: the last time counts."""

    def __init__(self, count: int, batch: int, length: int, vocabulary: int, device: torch.device) -> None:
        """For texts of at most `length` tokens, prompts included; with the `count` most probable tokens of each
        place."""
        self.count, self._none = min(count, vocabulary), length
        self._own = torch.full((batch, length + 1), torch.nan, dtype=torch.float32, device=device)
        self._top = torch.full((batch, length + 1, self.count), torch.nan, dtype=torch.float32, device=device)
        self._ids = torch.zeros(batch, length + 1, self.count, dtype=torch.int64, device=device)

    def write_(self, logits: Tensor, ids: Tensor, positions: Tensor, where: Tensor) -> None:
        """Row r of `logits` ``(batch, R, V)`` gives the token ``ids[b, r]`` at ``positions[b, r]``, where ``where[b,
        r]``."""
        if hasattr(logits, "full_tensor"):
            logits = logits.full_tensor()
        log_probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        at = torch.where(where & (positions < self._none), positions, self._none)
        chosen, top = log_probs.gather(-1, ids.clamp(min=0)[..., None])[..., 0], log_probs.topk(self.count, -1)
        self._own.scatter_(1, at, chosen.to(self._own.dtype))
        slots = at[..., None].expand(-1, -1, self.count)
        self._top.scatter_(1, slots, top.values.to(self._top.dtype))
        self._ids.scatter_(1, slots, top.indices)

    def of(self, prompts: Sequence[list[int]], texts: Sequence[list[int]]) -> list[LogProbs]:
        """The log-probabilities of `texts`, which follow `prompts`; NaN for tokens that no forward wrote."""
        rows = [slice(len(prompt), len(prompt) + len(text)) for prompt, text in zip(prompts, texts, strict=True)]
        columns = [tensor.cpu() for tensor in (self._own, self._ids, self._top)]
        return [LogProbs(*(column[n, places] for column in columns)) for n, places in enumerate(rows)]


CHUNK = 64
"""Tokens per forward of the pass: logits of this many rows are in memory at once."""


def scored(
    model: Any,
    prompts: Sequence[list[int]],
    texts: Sequence[list[int]],
    run: Callable[..., Any] | None = None,
    adapters: Sequence[Any] | None = None,
    restore: Callable[[Any], int] | None = None,
    piece: int | None = None,
) -> Iterator[tuple[int, Any, int]]:
    """The logits that predict each token of `texts`, which follow `prompts`: the number of the first token, logits
    ``(batch, R, V)``, and how many tokens of a text have run for them; rows past the end of a text are padding.

    Args:
        model: whose logits they are.
        prompts, texts: tokens.
        run: replaces the call of the model.
        adapters: of each text.
        restore: puts K and V of the first tokens of all prompts into a cache; returns how many, not the last ones.
        piece: tokens per forward, at most `CHUNK`, of prompts, too; after each piece of them but the last come logits
            without rows. None: prompts run whole.
    """
    run, width = model if run is None else run, max(map(len, prompts))
    size = min(CHUNK, piece or CHUNK)
    longest = max(map(len, texts))
    if longest == 0:
        return
    few = {"drafts": CHUNK} if keeps_windows(model) else {}
    cache = model.new_cache(len(prompts), width + longest, **few)
    done = 0 if restore is None else restore(cache)
    if adapters is not None:
        cache.adapt_(adapters)
    device = cache.lengths.device
    packed = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts], device=device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    while piece is not None and min(map(len, prompts)) - done > size:
        counts = torch.full_like(lengths, size)
        logits = run(packed[:, done : done + size].contiguous(), cache=cache, counts=counts, rows=(counts - 1)[:, None])
        cache.commit_(counts)
        done += size
        yield 0, logits[:, :0], size
    lengths = lengths - done
    rows = (lengths - 1)[:, None]
    yield 0, run(packed[:, done:].contiguous(), cache=cache, counts=lengths, rows=rows), width - done
    cache.commit_(lengths)
    remaining = torch.tensor([max(0, len(text) - 1) for text in texts], device=device)
    padded = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=device)
    for first in range(0, longest - 1, size):
        tokens = padded[:, first : min(first + size, longest - 1)].contiguous()
        counts = (remaining - first).clamp(0, tokens.shape[1])
        yield first + 1, run(tokens, cache=cache, counts=counts), tokens.shape[1]
        cache.commit_(counts)


def log_probs(
    model: Any,
    prompts: Sequence[list[int]],
    texts: Sequence[list[int]],
    count: int,
    adapters: Sequence[Any] | None = None,
) -> list[LogProbs]:
    """The log-probabilities of each text's tokens, and the `count` largest of each place, under the model's own
    distribution."""
    steps = steps_of(scored(model, prompts, texts, adapters=adapters), texts, count)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: list[LogProbs] = end.value
            return result


def steps_of(
    logits: Iterator[tuple[int, Any, int]], texts: Sequence[list[int]], count: int
) -> Generator[int, None, list[LogProbs]]:
    """Those of `log_probs`, from what `scored` yields, a step for each forward, which yields the tokens that it ran."""
    chunks: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in texts]
    for first, rows, count_run in logits:
        if hasattr(rows, "full_tensor"):
            rows = rows.full_tensor()
        distribution = rows.to(torch.promote_types(rows.dtype, torch.float32)).log_softmax(-1)
        top = distribution.topk(min(count, distribution.shape[-1]), -1)
        for row, text, chunk in zip(range(len(texts)), texts, chunks, strict=True):
            ids = torch.tensor(
                text[first : first + distribution.shape[1]], dtype=torch.int64, device=distribution.device
            )
            chosen = distribution[row, : len(ids)].gather(-1, ids[:, None])[:, 0]
            chunk.append((chosen.cpu(), top.indices[row, : len(ids)].cpu(), top.values[row, : len(ids)].cpu()))
        yield count_run
    none = torch.zeros(0, count, dtype=torch.float32, device="cpu")
    empty = none.new_zeros(0), none.long(), none
    return [LogProbs(*(torch.cat(column) for column in zip(*(chunk or [empty]), strict=True))) for chunk in chunks]
