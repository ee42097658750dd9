"""Which adapter computes the rows of each sequence of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdkernels._validation import check


class AdaptedSequences:
    """Base of caches whose sequences may have adapters."""

    batch: int
    adapters: list[Any] | None = None
    """What computes the rows of each sequence beside the model (`adapt_`), None for the model alone; None: no sequence
    has any."""

    def adapt_(self, adapters: Sequence[Any]) -> None:
        """Says with which adapter the rows of each sequence are computed, None for the model alone; no entries: with
        none. It goes where a row goes.

        Example:
            >>> from pdkernels.cache import ContiguousKVCache
            >>> cache, other = (ContiguousKVCache(1, 2, 4, 1, 2) for _ in range(2))
            >>> cache.adapt_([None, "a"]); other.copy_row_(0, cache, 1, 0); other.adapters
            ['a', None]
        """
        allowed = len(adapters) in (0, self.batch)
        check(allowed, "cache.adapt_", "adapters", f"have {self.batch} entries, or none", len(adapters))
        self.adapters = list(adapters) if any(adapter is not None for adapter in adapters) else None

    def _adapt_row_(self, row: int, adapter: Any) -> None:
        if adapter is not None or self.adapters is not None:
            adapters = self.adapters or [None] * self.batch
            self.adapt_([*adapters[:row], adapter, *adapters[row + 1 :]])
