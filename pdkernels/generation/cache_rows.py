"""A subset of a cache's sequences, for forwards that skip the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pdkernels.cache.stored import stored
from pdkernels.ops.kv_cache import kv_append_


class CacheRows:
    """The sequences `index` ``(batch,)`` of `cache`, as a view that shares its memory.

    A contiguous cache is treated as one page per sequence. Lengths are a snapshot; `cache.commit_` changes
    those of the whole cache.
    """

    def __init__(self, cache: Any, index: Tensor) -> None:
        self.whole, self.index = cache, index
        self.k, self.v, self.capacity, self.layers = cache.k, cache.v, cache.capacity, cache.layers
        self.kv_heads, self.head_dim, self.dtype, self.device = (
            cache.kv_heads,
            cache.head_dim,
            cache.dtype,
            cache.device,
        )
        self.batch = len(index)
        adapters = getattr(cache, "adapters", None)
        self.adapters = None if adapters is None else [adapters[number] for number in index.tolist()]
        self.lengths: Tensor = cache.lengths.index_select(0, index)
        table = cache.block_table
        self.block_table: Tensor = index[:, None] if table is None else table.index_select(0, index)

    def table(self, layer: int) -> Tensor:
        """Like `table` of the whole cache."""
        return self.block_table

    def append_(self, layer: int, k_new: Tensor, v_new: Tensor, counts: Tensor | None = None) -> None:
        """Like `append_` of the whole cache."""
        rows = self.k[layer], self.v[layer], *stored(self.dtype, k_new, v_new), self.lengths
        kv_append_(*rows, counts=counts, block_table=self.block_table)

    def layer(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """Like `layer` of the whole cache, but a copy."""
        k, v = self.whole.layer(layer, length)
        return k.index_select(0, self.index), v.index_select(0, self.index)


def rows_of(cache: Any, sequences: Sequence[int]) -> Any:
    """The cache itself, or some of its sequences, ascending."""
    if len(sequences) == len(cache.lengths):
        return cache
    index = torch.tensor(sequences, dtype=torch.int64, device="cpu").to(cache.lengths.device, non_blocking=True)
    return CacheRows(cache, index)
