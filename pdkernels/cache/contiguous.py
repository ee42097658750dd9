"""A KV cache with one stretch of memory per sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdkernels._validation import check
from pdkernels.ops.kv_cache import kv_append_, kv_commit_, kv_trim_


class KVCacheBase:
    """What both caches share. Its tensors are made once and keep their identity, so graphs may capture them."""

    k: Tensor
    v: Tensor
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
        sizes = {"layers": layers, "batch": batch, "kv_heads": kv_heads, "head_dim": head_dim}
        for argument, size in sizes.items():
            check(size >= 1, name, argument, "be 1 or more", size)
        self.layers, self.batch, self.kv_heads, self.head_dim = layers, batch, kv_heads, head_dim
        self.k = torch.zeros(layers, pages, slots, kv_heads, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)

    @property
    def device(self) -> torch.device:
        return self.k.device

    @property
    def dtype(self) -> torch.dtype:
        return self.k.dtype

    def append_(self, layer: int, k_new: Tensor, v_new: Tensor, counts: Tensor | None = None) -> None:
        """Writes the draft rows of one layer behind the committed ones; see `pdkernels.kv_append_`.

        Args:
            layer: which layer.
            k_new, v_new: ``(batch, rows, kv_heads, head_dim)``.
            counts: ``(batch,)`` rows that count, None: all.
        """
        kv_append_(self.k[layer], self.v[layer], k_new, v_new, self.lengths, counts=counts, block_table=self.block_table)

    def commit_(self, counts: Tensor, source_index: Tensor | None = None) -> None:
        """Keeps accepted draft rows of all layers and lengthens the sequences; see `pdkernels.kv_commit_`."""
        kv_commit_(self.k, self.v, self.lengths, counts, source_index, block_table=self.block_table)

    def trim_(self, new_lengths: int | Sequence[int] | Tensor) -> None:
        """Shortens sequences; see `pdkernels.kv_trim_`. A number, one per sequence, or a tensor on the device."""
        kv_trim_(self.lengths, self._per_sequence(new_lengths))

    def _per_sequence(self, values: int | Sequence[int] | Tensor) -> Tensor:
        if isinstance(values, Tensor):
            return values
        values = [values] * self.batch if isinstance(values, int) else list(values)
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def reset_(self) -> None:
        """Empties every sequence."""
        self.trim_(0)


class ContiguousKVCache(KVCacheBase):
    """Room for `capacity` tokens per sequence, fixed when made.

    Args:
        layers, batch, capacity, kv_heads, head_dim: sizes. ``.k`` and ``.v`` have shape
            ``(layers, batch, capacity, kv_heads, head_dim)``; ``.lengths`` is ``(batch,)`` int64 on the device.
        dtype, device: of the rows.

    Raises:
        ValueError: a size below 1.

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
        check(capacity >= 1, "cache.ContiguousKVCache", "capacity", "be 1 or more", capacity)
        self._allocate(layers, batch, batch, capacity, kv_heads, head_dim, dtype, device)
        self.capacity = capacity

    def layer(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer, the first `length` positions: views ``(batch, length, kv_heads, head_dim)``."""
        return self.k[layer, :, :length], self.v[layer, :, :length]
