"""An empty cache that fits a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from pdkernels._attention import check_head_dim, halves
from pdkernels._validation import KERNEL_DTYPES, check, check_type, integer, sentence
from pdkernels.cache import (
    ContiguousKVCache,
    HybridCache,
    PagedKVCache,
    PagePool,
    PooledWindowedCache,
    WindowedCache,
    WindowedPool,
)
from pdkernels.cache.windowed import PAGE, turns
from pdkernels.models.architectures.windows import Window, Windows


def new_pool(model: Any, num_pages: int, page_size: int, window_pages: Mapping[int, int] | None = None) -> PagePool:
    """Pages for caches of a model that share them, on its device and in the dtype of its caches. Layers with a window
    that `window_pages` names have so many pages of their own (`WindowedPool`)."""
    config, dtype = model.config, getattr(model, "cache_dtype", None) or model.dtype
    layers, heads = _rows_of(config, None)
    where: dict[str, Any] = {"dtype": dtype, "device": model.device}
    if window_pages:
        windows = [None if window is None else window.size for window in windows_of(config)]
        pooled_windows = [window if window in window_pages else None for window in windows]
        apart = getattr(config, "kind_heads", None) if pooled_windows == windows else None
        heads, window_heads = apart or (heads, None)
        return WindowedPool(
            pooled_windows, num_pages, window_pages, page_size, *heads, window_heads=window_heads, **where
        )
    return PagePool(layers, num_pages, page_size, *heads, **where)


def new_cache(
    model: Any,
    batch: int,
    capacity: int,
    kind: Literal["contiguous", "paged"],
    page_size: int,
    slots: int | None = None,
    dtype: torch.dtype | None = None,
    pool: PagePool | None = None,
    windows: Sequence[Window | None] = (),
    drafts: int | None = None,
) -> ContiguousKVCache | PagedKVCache | WindowedCache:
    """For `batch` sequences of up to `capacity` tokens, one slot per layer or `slots`, on the model's device.

    `dtype` is the model's, float16 or int8 (`check_dtype`); None: that of the model's `cache_dtype`, if it has one, else its own. With a `pool`,
    the cache is on its pages, and has its dtype. With `drafts`, layers that have `windows` keep no more rows than they
    need (`WindowedCache`), where that is fewer.
    """
    op, config = f"{type(model).__name__}.new_cache", model.config
    layers, heads = _rows_of(config, slots)
    if isinstance(pool, WindowedPool):
        return PooledWindowedCache(pool, batch, capacity)
    if pool is not None:
        return PagedKVCache.on(pool, batch, capacity)
    check(kind in ("contiguous", "paged"), op, "kind", "be 'contiguous' or 'paged'", repr(kind))
    dtype = dtype or getattr(model, "cache_dtype", None) or model.dtype
    check_dtype(op, "dtype", model, dtype)
    check(page_size >= 1, op, "page_size", "be at least 1", page_size)
    where: dict[str, Any] = {"dtype": dtype, "device": model.device}
    if drafts is not None:
        drafts, size = max(1, integer(op, "drafts", drafts, 0)), page_size if kind == "paged" else None
        if any(kept := _shorter(windows[:layers], drafts, size or PAGE, capacity)):
            apart = (
                getattr(config, "kind_heads", None) if [*map(bool, kept)] == [*map(bool, windows[:layers])] else None
            )
            return WindowedCache(kept, batch, capacity, size, *heads, drafts=drafts, kind_heads=apart, **where)
    if kind == "contiguous":
        return ContiguousKVCache(layers, batch, capacity, *heads, **where)
    pages = -(-capacity // page_size)
    return PagedKVCache(layers, batch, batch * pages, page_size, *heads, max_pages_per_sequence=pages, **where)


def _rows_of(config: Any, slots: int | None) -> tuple[int, tuple[int, int]]:
    """The layers of a model's cache, or `slots`, and the heads of their rows and the size of a head: of those that hold
    any layer's, where these differ (`narrowed`)."""
    layers = getattr(config, "cache_layers", config.layers) if slots is None else slots
    return layers, getattr(config, "cache_heads", (config.kv_heads, config.head_dim))


def windows_of(config: Any) -> Windows:
    """The windows of the layers that have rows in a model's cache; empty: none has one."""
    own: Windows | None = getattr(config, "cache_windows", None)
    return config.windows[: getattr(config, "cache_layers", config.layers)] if own is None else own


def _shorter(windows: Sequence[Window | None], drafts: int, page_size: int, capacity: int) -> list[int | None]:
    """The windows of layers for which fewer pages than those of a text are enough."""
    sizes, pages = (None if window is None else window.size for window in windows), -(-capacity // page_size)
    return [size if size is not None and turns(size, drafts, page_size) < pages else None for size in sizes]


def expect_(cache: Any, rows: int, counts: Tensor | None) -> None:
    """Prepares a cache for a forward over `rows` rows, of which `counts` ``(batch,)`` are stored; None: all."""
    if isinstance(cache, (WindowedCache, HybridCache)):
        cache.expect_(rows, counts)


def rewrite_(cache: Any, starts: Tensor, slots: Tensor) -> None:
    """Prepares a cache for rows that are computed anew, at `slots` ``(batch, rows)`` after `starts`; -1: padding."""
    if isinstance(cache, WindowedCache) and slots.shape[1]:
        cache.rewrite_(starts, torch.where(slots >= 0, starts[:, None] + slots + 1, 0).amax(1))


def check_dtype(op: str, argument: str, model: Any, dtype: torch.dtype) -> None:
    """Refuses a dtype that the caches of a model cannot have."""
    narrower = [torch.int8]
    if model.device.type == "cpu" and halves(model.dtype, torch.float16):
        narrower.insert(0, torch.float16)
    expectation = f"be {model.dtype} like the model, or {' or '.join(map(str, narrower))}"
    check_type(isinstance(dtype, torch.dtype) and dtype in (model.dtype, *narrower), op, argument, expectation, dtype)
    if dtype != model.dtype:
        check_head_dim(op, model.config.head_dim)
        if model.dtype not in KERNEL_DTYPES:
            raise NotImplementedError(sentence(op, f"no kernel of a model in {model.dtype} reads an 8-bit cache"))


def with_cache_dtype(op: str, model: Any, dtype: torch.dtype | None) -> Any:
    """The model, whose `new_cache` makes caches of this dtype from now on; None: as before."""
    if dtype is not None:
        if not hasattr(model, "cache_dtype"):
            fault = f"the caches of a {type(model).__name__} have the dtype of the model"
            raise NotImplementedError(sentence(op, fault, "Pass cache_dtype=None."))
        check_dtype(op, "cache_dtype", model, dtype)
        model.cache_dtype = dtype
    return model
