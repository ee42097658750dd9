"""Caches that are edited in place: append a draft, commit what was accepted, trim."""

from pdkernels.cache.contiguous import ContiguousKVCache
from pdkernels.cache.hybrid import HybridCache, StateShape
from pdkernels.cache.paged import PagedKVCache
from pdkernels.cache.pool import PagePool
from pdkernels.cache.protocol import Cache
from pdkernels.cache.windowed import WindowedCache
from pdkernels.cache.windowed_pool import PooledWindowedCache, WindowedPool

__all__ = [
    "Cache",
    "ContiguousKVCache",
    "HybridCache",
    "PagePool",
    "PagedKVCache",
    "PooledWindowedCache",
    "StateShape",
    "WindowedCache",
    "WindowedPool",
]
