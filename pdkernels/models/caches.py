"""An empty cache that fits a model."""

from __future__ import annotations

from typing import Any, Literal

from pdkernels._validation import check
from pdkernels.cache import ContiguousKVCache, PagedKVCache


def new_cache(
    model: Any,
    batch: int,
    capacity: int,
    kind: Literal["contiguous", "paged"],
    page_size: int,
    slots: int | None = None,
) -> ContiguousKVCache | PagedKVCache:
    """For `batch` sequences of up to `capacity` tokens, one slot per layer or `slots`, in the model's dtype and on its device."""
    op, config = f"{type(model).__name__}.new_cache", model.config
    layers = config.layers if slots is None else slots
    check(kind in ("contiguous", "paged"), op, "kind", "be 'contiguous' or 'paged'", repr(kind))
    if kind == "contiguous":
        return ContiguousKVCache(
            layers, batch, capacity, config.kv_heads, config.head_dim, dtype=model.dtype, device=model.device
        )
    check(page_size >= 1, op, "page_size", "be at least 1", page_size)
    pages = -(-capacity // page_size)
    return PagedKVCache(
        layers,
        batch,
        batch * pages,
        page_size,
        config.kv_heads,
        config.head_dim,
        max_pages_per_sequence=pages,
        dtype=model.dtype,
        device=model.device,
    )
