"""Attention of a batch in which each request has its own number of new tokens, over a paged cache. Independent of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from pdkernels import masks
from pdkernels.masks import TilePlan
from pdkernels.ops import speculative_attention_append_

PADDED = 16  # requests with at most this many new tokens share a call, padded to the longest of them


def grouped(new: Sequence[int], padded: int = PADDED) -> list[tuple[int, list[int]]]:
    """Which requests share a call, and the rows of each in it: all short ones together, longer ones with those of equal length.

    >>> grouped([1, 40, 5, 0, 40, 1], padded=16)
    [(5, [0, 2, 5]), (40, [1, 4])]
    """
    widest = max((n for n in new if n <= padded), default=0)
    groups: dict[int, list[int]] = {}
    for request, n in enumerate(new):
        if n > 0:
            groups.setdefault(widest if n <= padded else n, []).append(request)
    return sorted(groups.items())


@lru_cache(maxsize=64)
def _plan(new: int, causal: bool, device: torch.device) -> TilePlan:
    mask = masks.causal(new) if causal else masks.full(new)
    block = 16 if new <= 16 else 64
    return mask.plan(block, block, device)


@dataclass(frozen=True)
class _Call:
    shape: tuple[int, int]  # requests, rows of each
    rows: slice | Tensor  # of the batch's tokens; shorter requests repeat their last one
    real: tuple[Tensor, Tensor] | None  # which rows are not repetitions, and their tokens; None: all
    counts: Tensor | None
    lengths: Tensor
    pages: Tensor
    plan: TilePlan


class RaggedBatch:
    """The attention layout of one step of a batch, computed once for all layers.

    Args:
        starts: ``requests + 1`` offsets on the host: request i has the tokens ``starts[i] .. starts[i + 1]`` of the batch.
        lengths: ``(requests,)`` int32 or int64, tokens of each request with its new ones.
        block_table: ``(requests, pages of each)`` int32 or int64.
        causal: whether new tokens see only earlier ones among the new; all see the cached ones.
    """

    def __init__(self, starts: Sequence[int], lengths: Tensor, block_table: Tensor, *, causal: bool = True) -> None:
        self.tokens = starts[-1]
        new = [end - start for start, end in zip(starts, starts[1:])]
        # Padding would be seen by the other tokens of its request.
        self.calls = [
            self._call(starts, new, width, requests, lengths, block_table, causal)
            for width, requests in grouped(new, PADDED if causal else 0)
        ]

    @staticmethod
    def _call(
        starts: Sequence[int],
        new: Sequence[int],
        width: int,
        requests: list[int],
        lengths: Tensor,
        table: Tensor,
        causal: bool,
    ) -> _Call:
        device = lengths.device
        first, last = requests[0], requests[-1]
        counts = [new[request] for request in requests]
        even = min(counts) == width
        together = last - first + 1 == len(requests)
        chosen = slice(first, last + 1) if together else torch.tensor(requests, device=device)
        stored = None if even else torch.tensor(counts, dtype=lengths.dtype, device=device)
        real = None
        rows: slice | Tensor = slice(starts[first], starts[last + 1])
        if not (even and together):
            slot = torch.arange(width)
            count = torch.tensor(counts)[:, None]
            begin = torch.tensor([starts[request] for request in requests])[:, None]
            indices = (begin + torch.minimum(slot, count - 1)).flatten()
            rows = indices.to(device)
            if not even:
                kept = (slot < count).flatten().nonzero()[:, 0]
                real = (kept.to(device), indices[kept].to(device))
        return _Call(
            (len(requests), width),
            rows,
            real,
            stored,
            lengths[chosen] - (width if stored is None else stored),
            table[chosen],
            _plan(width, causal, device),
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, out: Tensor, scale: float) -> None:
        """Writes the attention of one layer into `out`, and the new keys and values into `cache`.

        Args:
            query, out: ``(tokens, heads, head_dim)``; rows past the batch's tokens are padding and not written.
            key, value: ``(tokens, kv_heads, head_dim)``.
            cache: ``(pages, kv_heads, page_size, 2 * head_dim)`` of any strides: keys, then values.
            scale: of the scores.
        """
        dim = query.shape[-1]
        k_cache, v_cache = cache[..., :dim].transpose(1, 2), cache[..., dim:].transpose(1, 2)
        for call in self.calls:
            q, k, v = (x[call.rows].unflatten(0, call.shape) for x in (query, key, value))
            result = speculative_attention_append_(
                q,
                k,
                v,
                k_cache,
                v_cache,
                call.lengths,
                call.plan,
                counts=call.counts,
                block_table=call.pages,
                scale=scale,
            ).flatten(0, 1)
            if call.real is None:
                out[call.rows] = result
            else:
                kept, tokens = call.real
                out[tokens] = result[kept]
