"""A KV cache in which the slots of a sequence are contiguous in memory."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pdkernels import _memory
from pdkernels._validation import check, check_fits_memory, integer, message
from pdkernels.cache.adapted import AdaptedSequences
from pdkernels.cache.stored import row_width, stored
from pdkernels.ops.kv_cache import kv_append_, kv_commit_, kv_trim_


class KVCacheBase(AdaptedSequences):
    """Base of both caches. The tensors are allocated once and never replaced, so graphs may capture them."""

    k: Tensor
    v: Tensor
    capacity: int
    lengths: Tensor
    block_table: Tensor | None = None

    def _allocate(
        self,
        layers: int,
        batch: int,
        pages: int,
        slots: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        name = f"cache.{type(self).__name__}"
        self.layers, self.batch = integer(name, "layers", layers, 1), integer(name, "batch", batch, 1)
        self.kv_heads, self.head_dim = integer(name, "kv_heads", kv_heads, 1), integer(name, "head_dim", head_dim, 1)
        argument = "capacity" if type(self).__name__ == "ContiguousKVCache" else "page_size"
        width = row_width(name, self.head_dim, dtype)
        nbytes = 2 * self.layers * pages * slots * self.kv_heads * width * dtype.itemsize
        check_fits_memory(name, argument, slots, nbytes, torch.device(device))
        shape = (self.layers, pages, slots, self.kv_heads, width)
        self.k, self.v = (_memory.zeros(shape, dtype, device) for _ in range(2))
        self.lengths = torch.zeros(self.batch, dtype=torch.int64, device=device)

    @property
    def device(self) -> torch.device:
        return self.k.device

    @property
    def dtype(self) -> torch.dtype:
        return self.k.dtype

    def table(self, layer: int) -> Tensor | None:
        """The page table of a layer; None: it has no pages."""
        return self.block_table

    def append_(self, layer: int, k_new: Tensor, v_new: Tensor, counts: Tensor | None = None) -> None:
        """Writes the draft rows of one layer after the committed ones; see `pdkernels.kv_append_`.

        Args:
            layer: which layer.
            k_new, v_new: ``(batch, rows, kv_heads, head_dim)``. An 8-bit cache quantises numbers.
            counts: ``(batch,)`` rows to store, the others are padding. None: all.
        """
        name = f"cache.{type(self).__name__}.append_"
        check(0 <= layer < self.layers, name, "layer", f"be in [0, {self.layers})", layer)
        rows = stored(self.dtype, k_new, v_new)
        kv_append_(self.k[layer], self.v[layer], *rows, self.lengths, counts=counts, block_table=self.block_table)

    def commit_(self, counts: Tensor, source_index: Tensor | None = None) -> None:
        """Keeps accepted draft rows of all layers and lengthens the sequences; see `pdkernels.kv_commit_`."""
        kv_commit_(self.k, self.v, self.lengths, counts, source_index, block_table=self.block_table)

    def trim_(self, new_lengths: int | Sequence[int] | Tensor) -> None:
        """Shortens sequences; see `pdkernels.kv_trim_`. `new_lengths`: an int, one per sequence, or a tensor."""
        if not isinstance(new_lengths, Tensor):
            numbers = self._numbers(f"cache.{type(self).__name__}.trim_", "new_lengths", new_lengths)
            new_lengths = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        kv_trim_(self.lengths, new_lengths)

    def _numbers(self, op: str, argument: str, values: int | Sequence[int] | Tensor) -> list[int]:
        """One int per sequence; a single int applies to all."""
        values = values.tolist() if isinstance(values, Tensor) else values
        try:
            return [
                operator.index(value) for value in (values if isinstance(values, Iterable) else [values] * self.batch)
            ]
        except TypeError:
            raise TypeError(message(op, argument, "be an int, or one per sequence", values)) from None

    def copy_row_(self, row: int, other: Any, other_row: int, length: int) -> None:
        """Replaces sequence `row` by the first `length` tokens of a sequence of another cache, in all layers.

        No other sequence changes, and the host does not wait. A paged cache must have the pages already: `resize_row_`.

        Raises:
            ValueError: a cache with other layers, heads or dtype, or more tokens than both have room for.

        Example:
            >>> import torch
            >>> from pdkernels.cache import ContiguousKVCache
            >>> cache, other = (ContiguousKVCache(1, batch, 4, 1, 2) for batch in (3, 1))
            >>> other.append_(0, torch.ones(1, 2, 1, 2), torch.ones(1, 2, 1, 2))
            >>> cache.copy_row_(1, other, 0, 2); cache.lengths, cache.k[0, :, 0, 0, 0]
            (tensor([0, 2, 0]), tensor([0., 1., 0.]))
        """
        op = f"cache.{type(self).__name__}.copy_row_"
        kinds = [(cache.layers, cache.kv_heads, cache.head_dim, cache.dtype) for cache in (self, other)]
        check(kinds[0] == kinds[1], op, "other", "have the same layers, heads and dtype", kinds[1])
        room = min(self._row_capacity(row), other._row_capacity(other_row))
        check(0 <= length <= room, op, "length", f"be in [0, {room}]", length)
        at, slots = self._index(row, length)
        for target, rows in zip((self.k, self.v), other.row(other_row, length), strict=True):
            target[:, at, slots] = rows
        self.lengths[row].fill_(length)
        self._adapt_row_(row, other.adapters[other_row] if other.adapters else None)

    def idle_row_(self, row: int) -> None:
        """Leaves a sequence with at most one token, whose content no longer matters."""
        self.lengths[row].clamp_(max=1)
        self._adapt_row_(row, None)

    def row(self, row: int, length: int) -> tuple[Tensor, Tensor]:
        """K and V of one sequence, `length` positions in all layers: ``(layers, length, kv_heads, head_dim)``."""
        at, slots = self._index(row, length)
        return self.k[:, at, slots], self.v[:, at, slots]

    def _index(self, row: int, length: int) -> tuple[Any, Any]:
        """Indices of a layer for the first `length` positions of a sequence."""
        return row, slice(length)

    def _row_capacity(self, row: int) -> int:
        """The capacity of a sequence."""
        return self.capacity

    def reset_(self) -> None:
        """Empties every sequence."""
        self.trim_(0)


class ContiguousKVCache(KVCacheBase):
    """A cache of `capacity` tokens per sequence, which is fixed.

    Args:
        layers, batch, capacity, kv_heads, head_dim: sizes. ``.k`` and ``.v`` have shape
            ``(layers, batch, capacity, kv_heads, head_dim)``; ``.lengths`` is ``(batch,)`` int64 on the device.
        dtype, device: of the rows. An int8 cache holds rows of `pdkernels.kv_quantize`, so that the last dimension of
            ``.k`` and ``.v`` is ``head_dim + 4``; it takes about half the memory of one in 16 bits.

    Raises:
        ValueError: a size below 1; an 8-bit cache with a head_dim that is not a multiple of 8 in ``[16, 512]``.
        TypeError: a size that is not an int.

    Example:
        >>> import torch
        >>> from pdkernels.cache import ContiguousKVCache
        >>> cache = ContiguousKVCache(layers=2, batch=1, capacity=8, kv_heads=1, head_dim=4)
        >>> rows = torch.ones(1, 3, 1, 4)
        >>> for layer in range(2):
        ...     cache.append_(layer, rows, rows)
        >>> cache.commit_(torch.tensor([2])); cache.lengths
        tensor([2])
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.capacity = integer("cache.ContiguousKVCache", "capacity", capacity, 1)
        self._allocate(layers, batch, batch, self.capacity, kv_heads, head_dim, dtype, device)

    def layer(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer, the first `length` positions: stored ``(batch, length, kv_heads, head_dim)``."""
        return self.k[layer, :, :length], self.v[layer, :, :length]
