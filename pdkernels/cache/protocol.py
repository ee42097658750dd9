"""The interface of KV caches that models and decoders use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Cache(Protocol):
    """K and V of committed tokens, and free slots for new ones: see `ContiguousKVCache` and `PagedKVCache`."""

    k: Tensor
    v: Tensor
    lengths: Tensor
    batch: int
    capacity: int
    layers: int
    kv_heads: int
    adapters: list[Any] | None
    head_dim: int

    @property
    def block_table(self) -> Tensor | None: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def table(self, layer: int) -> Tensor | None: ...

    def append_(self, layer: int, k_new: Tensor, v_new: Tensor, counts: Tensor | None = None) -> None: ...

    def commit_(self, counts: Tensor, source_index: Tensor | None = None) -> None: ...

    def trim_(self, new_lengths: int | Sequence[int] | Tensor) -> None: ...

    def reset_(self) -> None: ...

    def layer(self, layer: int, length: int) -> tuple[Tensor, Tensor]: ...
