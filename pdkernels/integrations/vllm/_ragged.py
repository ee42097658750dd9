"""Attention of a batch in which each request has its own number of new tokens, over a paged cache. Independent of
vLLM."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from pdkernels import masks
from pdkernels.masks import TilePlan
from pdkernels.ops import speculative_attention_append_


@lru_cache(maxsize=64)
def _plan(tiles: int, block: int, causal: bool, device: torch.device) -> TilePlan:
    new = tiles * block
    mask = masks.causal(new) if causal else masks.full(new)
    return mask.plan(block, block, device)


class RaggedBatch:
    """The attention layout of one step of a batch, which all layers share. Nothing here waits for the device.

    Args:
        starts: ``(requests + 1,)`` int32 or int64: request i has the tokens ``starts[i] .. starts[i + 1]`` of the
            batch.
        tokens: ``starts[-1]`` as an int.
        longest: an upper bound of the new tokens of a request.
        lengths: ``(requests,)`` int32 or int64, tokens of each request, including the new ones.
        block_table: ``(requests, pages of each)`` int32 or int64.
        causal: whether attention among the new tokens is causal; all of them see the cached tokens.
    """

    def __init__(
        self, starts: Tensor, tokens: int, longest: int, lengths: Tensor, block_table: Tensor, *, causal: bool = True
    ) -> None:
        self.starts, self.tokens, self.block_table, self.causal = starts, tokens, block_table, causal
        self.cached = lengths - starts.diff().to(lengths.dtype)
        # A shorter request uses the first rows and columns, so a few plans serve all batches.
        block = 16 if longest <= 16 else 64
        self.plan = _plan(-(-longest // block), block, causal, lengths.device)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: Tensor,
        out: Tensor,
        scale: float,
        window: int | None = None,
    ) -> None:
        """Writes the attention of one layer into `out`, and the new keys and values into `cache`.

        Args:
            query, out: ``(tokens, heads, head_dim)``; rows past the batch's tokens are padding and not written.
            key, value: ``(tokens, kv_heads, head_dim)``.
            cache: ``(pages, kv_heads, page_size, 2 * head_dim)`` of any strides: keys, then values.
            scale: of the scores.
            window: the number of positions that a token attends to, including its own; None: all.
        """
        dim = query.shape[-1]
        out[: self.tokens] = speculative_attention_append_(
            query[: self.tokens],
            key[: self.tokens],
            value[: self.tokens],
            cache[..., :dim].transpose(1, 2),
            cache[..., dim:].transpose(1, 2),
            self.cached,
            self.plan,
            cu_seqlens=self.starts,
            window=window,
            block_table=self.block_table,
            scale=scale,
        )
