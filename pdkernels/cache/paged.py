"""A KV cache whose sequences own pages of a shared pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pdkernels._host import PageAllocator
from pdkernels._validation import check, integer, message
from pdkernels.cache.contiguous import KVCacheBase
from pdkernels.cache.pool import PagePool

_REMEDY = "Trim, or raise num_pages."


class PagedKVCache(KVCacheBase):
    """A cache of pages of `page_size` tokens, assigned to growing sequences from a pool of `num_pages`.

    Position ``p`` of sequence ``b`` lives in page ``block_table[b, p // page_size]``, slot ``p % page_size``. Any page
    size works with partial acceptance, because a commit moves single slots. Pages are managed on the host: call
    `reserve_` before rows are written. `trim_` returns pages if the lengths are known on the host, `reclaim_` after
    lengths changed on the device.

    Args:
        layers, batch, num_pages, page_size, kv_heads, head_dim: sizes. ``.k`` and ``.v`` have shape
            ``(layers, num_pages, page_size, kv_heads, head_dim)``; ``.lengths`` is ``(batch,)`` int64 and
            ``.block_table`` ``(batch, max_pages_per_sequence)`` int32, both on the device; -1 marks a missing page.
        max_pages_per_sequence: width of the block table; None: `num_pages`.
        dtype, device: of the rows; int8 as in `ContiguousKVCache`.

    Raises:
        ValueError: a size below 1.
        TypeError: a size that is not an int.

    Example:
        >>> import torch
        >>> from pdkernels.cache import PagedKVCache
        >>> cache = PagedKVCache(layers=1, batch=2, num_pages=4, page_size=2, kv_heads=1, head_dim=4)
        >>> cache.reserve_([3, 1]); cache.block_table.tolist()
        [[0, 1, -1, -1], [2, -1, -1, -1]]
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        *,
        max_pages_per_sequence: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        op = "cache.PagedKVCache"
        num_pages, page_size = integer(op, "num_pages", num_pages, 1), integer(op, "page_size", page_size, 1)
        width = (
            num_pages
            if max_pages_per_sequence is None
            else integer(op, "max_pages_per_sequence", max_pages_per_sequence, 1)
        )
        self._allocate(layers, batch, num_pages, page_size, kv_heads, head_dim, dtype, device)
        self._share(num_pages, page_size, width, PageAllocator(num_pages), -1)

    @classmethod
    def on(cls, pool: PagePool, batch: int, capacity: int) -> PagedKVCache:
        """A cache of `batch` sequences of up to `capacity` tokens, whose pages come from a shared pool.

        A row without pages has the pool's `scratch` page everywhere, so a forward may run it. Example: `PagePool`.
        """
        op = "cache.PagedKVCache.on"
        batch, capacity = integer(op, "batch", batch, 1), integer(op, "capacity", capacity, 1)
        cache = cls.__new__(cls)
        cache.k, cache.v, cache.batch = pool.k, pool.v, batch
        cache.layers, cache.kv_heads, cache.head_dim = len(pool.k), pool.k.shape[3], pool.head_dim
        cache.lengths = torch.zeros(batch, dtype=torch.int64, device=pool.k.device)
        cache._share(pool.num_pages, pool.page_size, -(-capacity // pool.page_size), pool, pool.scratch)
        return cache

    def _share(
        self, num_pages: int, page_size: int, width: int, pool: PageAllocator | PagePool, idle_page: int
    ) -> None:
        self.num_pages, self.page_size, self.capacity = num_pages, page_size, width * page_size
        self.block_table: Tensor = torch.full((self.batch, width), idle_page, dtype=torch.int32, device=self.device)
        self._pool, self._absent = pool, idle_page
        self._pages: list[list[int]] = [[] for _ in range(self.batch)]

    @property
    def shared_pool(self) -> PagePool | None:
        """The pool that other caches use too (`on`); None: the pages are this cache's own."""
        return self._pool if isinstance(self._pool, PagePool) else None

    def pages(self, row: int) -> list[int]:
        """The pages of a sequence."""
        return list(self._pages[row])

    def hold_row_(self, row: int, pages: Sequence[int]) -> None:
        """Gives a sequence pages of the shared pool that others hold too, which it may only read."""
        pool = self.shared_pool
        check(pool is not None, "cache.PagedKVCache.hold_row_", "cache", "be on a PagePool", "one with its own pages")
        assert pool is not None
        pool.hold(pages)
        pool.release(self._pages[row])
        self._pages[row] = list(pages)
        self._publish()

    def move_row_(self, row: int, other: PagedKVCache, other_row: int, length: int) -> None:
        """Takes the pages of a sequence of `length` tokens from another cache on the same pool."""
        pool = self.shared_pool
        same_pool = pool is not None and pool is other.shared_pool
        check(same_pool, "cache.PagedKVCache.move_row_", "other", "be on the same PagePool", "another")
        self._pool.release(self._pages[row])
        self._pages[row], other._pages[other_row] = other._pages[other_row], []
        self._publish()
        other._publish()
        self.lengths[row].fill_(length)
        self._adapt_row_(row, other.adapters[other_row] if other.adapters else None)
        other.idle_row_(other_row)

    def __getstate__(self) -> dict[str, Any]:
        """State for copies and pickling. The free pages are derived from the owned ones."""
        owns_pool = isinstance(self._pool, PageAllocator)
        return {name: value for name, value in vars(self).items() if name != "_pool" or not owns_pool}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if "_pool" in state:
            return
        self._pool = PageAllocator(self.num_pages)
        owned = {page for pages in self._pages for page in pages}
        self._pool.release([page for page in self._pool.allocate(self.num_pages) if page not in owned])

    def reserve_(self, lengths: int | Sequence[int]) -> None:
        """Makes sure that sequence ``b`` owns pages for ``lengths[b]`` tokens; an int is for all. Never frees pages.

        Raises:
            ValueError: more tokens than the block table can name.
            MemoryError: the pool is too small; no page is allocated then.
        """
        op = "cache.PagedKVCache.reserve_"
        lengths = self._numbers(op, "lengths", lengths)
        check(len(lengths) == self.batch, op, "lengths", f"have {self.batch} entries", len(lengths))
        for length in lengths:
            check(
                0 <= length <= self.capacity,
                op,
                "lengths",
                f"be in [0, {self.capacity}]",
                length,
                "Raise max_pages_per_sequence.",
            )
        new_pages = [max(0, -(-n // self.page_size) - len(pages)) for n, pages in zip(lengths, self._pages)]
        if sum(new_pages) > self._pool.available:
            actual = f"{sum(new_pages)} more with {self._pool.available} free"
            raise MemoryError(message(op, "lengths", f"fit the pool of {self.num_pages} pages", actual, _REMEDY))
        for pages, count in zip(self._pages, new_pages):
            pages += self._pool.allocate(count)
        if any(new_pages):
            self._publish()

    def resize_row_(self, row: int, tokens: int) -> None:
        """Makes sequence `row` own exactly the pages that `tokens` tokens need. Other sequences keep theirs.

        Raises:
            ValueError: more tokens than the block table can name.
            MemoryError: the pool is too small; no page is allocated then.

        Example:
            >>> from pdkernels.cache import PagedKVCache
            >>> cache = PagedKVCache(layers=1, batch=2, num_pages=3, page_size=2, kv_heads=1, head_dim=4)
            >>> cache.reserve_([3, 1]); cache.resize_row_(0, 2); cache.resize_row_(1, 4); cache.block_table.tolist()
            [[0, -1, -1], [2, 1, -1]]
        """
        op, pages = "cache.PagedKVCache.resize_row_", self._pages[row]
        check(0 <= tokens <= self.capacity, op, "tokens", f"be in [0, {self.capacity}]", tokens)
        page_count = -(-tokens // self.page_size)
        if page_count - len(pages) > self._pool.available:
            actual = f"{page_count - len(pages)} more pages with {self._pool.available} free"
            raise MemoryError(message(op, "tokens", f"fit the pool of {self.num_pages} pages", actual, _REMEDY))
        if page_count == len(pages):
            return
        self._pool.release(pages[page_count:])
        self._pages[row] = pages[:page_count] + self._pool.allocate(max(0, page_count - len(pages)))
        self._publish()

    def trim_(self, new_lengths: int | Sequence[int] | Tensor) -> None:
        """Shortens sequences. Pages past the new lengths return to the pool.

        With a tensor on a GPU only the lengths change, without a sync; `reclaim_` returns the pages later.
        """
        super().trim_(new_lengths)
        if not (isinstance(new_lengths, Tensor) and new_lengths.is_cuda):
            self._release_after(self._numbers("cache.PagedKVCache.trim_", "new_lengths", new_lengths))

    def reclaim_(self) -> None:
        """Frees the pages past the current lengths. Reads the lengths: one sync on a GPU."""
        self._release_after(self.lengths.tolist())

    def layer(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer in logical order, gathered: ``(batch, length, kv_heads, head_dim)``.

        Positions without a page hold rows of page 0; they are past every length.
        """
        pages = -(-length // self.page_size)
        table = self.block_table[:, :pages].clamp(min=0).to(torch.int64)
        k, v = (side[layer][table].flatten(1, 2)[:, :length] for side in (self.k, self.v))
        return k, v

    def _index(self, row: int, length: int) -> tuple[Any, Any]:
        at = torch.arange(length, device=self.device)
        return self.block_table[row, at // self.page_size].long(), at % self.page_size

    def _row_capacity(self, row: int) -> int:
        return len(self._pages[row]) * self.page_size

    def _release_after(self, lengths: Sequence[int]) -> None:
        before = self._pool.available
        for pages, length in zip(self._pages, lengths):
            count = -(-length // self.page_size)
            self._pool.release(pages[count:])
            del pages[count:]
        if self._pool.available != before:
            self._publish()

    def _publish(self) -> None:
        table = torch.full(self.block_table.shape, self._absent, dtype=torch.int32, device="cpu")
        for row, pages in zip(table, self._pages):
            row[: len(pages)] = torch.tensor(pages, dtype=torch.int32, device="cpu")
        self.block_table.copy_(table)
