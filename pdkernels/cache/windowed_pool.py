"""Pages that sequences of several caches share, for a model whose layers have windows.

Layers that see all rows have the pages of a `PagePool`. Layers with one window have pages of their own, of which a
sequence holds those that rows to come can see: it takes a page where its text begins one, and gives it back when the
last row that sees it is past. Places of the text keep their numbers, and the page table names the `scratch` page where
there is none, so attention reads blocks of the same positions as from a cache that keeps all rows.

Source: the groups of layers are those of vLLM's hybrid KV cache manager (docs.vllm.ai, design/hybrid_kv_cache_manager).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pdkernels._validation import check, check_type, integer, message, sentence
from pdkernels.cache.paged import PagedKVCache
from pdkernels.cache.pool import PagePool
from pdkernels.cache.windowed import BLOCK, WindowedCache
from pdkernels.ops.kv_cache import kv_commit_

PIECE = 256
"""Rows of a forward that goes on with a text, at most: a longer prompt runs in pieces."""

SPARE = 2
"""Pages of a group that no sequence is promised: one of an earlier text whose first slots are copied for a sequence, and
one that is written to a folder meanwhile."""


def first_page(length: int, window: int, page_size: int) -> int:
    """The first page that rows from position `length` on read in a layer with a window.

    >>> first_page(length=1000, window=128, page_size=64)
    11
    """
    return max(0, length - (window - 1) - (BLOCK - 1)) // page_size


def most_pages(window: int, rows: int, page_size: int) -> int:
    """How many pages of a sequence are there at a time in a layer with a window, if a forward has `rows` rows.

    >>> most_pages(window=512, rows=256, page_size=64)
    15
    """
    return -(-(window - 1 + BLOCK - 1 + rows - 1) // page_size) + 1


class WindowedPool(PagePool):
    """A `PagePool` of the layers that see all rows, and one of each group of layers with one window.

    Args:
        windows: of each layer, how many rows it sees; None: all of them.
        num_pages: for the layers that see all.
        window_pages: for those of each window. They are of as many layers as have this window.
        page_size, kv_heads, head_dim, dtype, device: as of `PagePool`.
        window_heads: `kv_heads` and `head_dim` of the layers with a window; None: as the others'.

    Raises:
        ValueError: a size below 1, or a window without pages.
        TypeError: a size that is not an int.

    Example:
        >>> from pdkernels.cache import WindowedPool
        >>> pool = WindowedPool([8, None, 8], 100, {8: 20}, page_size=4, kv_heads=1, head_dim=16)
        >>> pool.k.shape[:2], pool.groups[8].k.shape[:2], pool.available, pool.groups[8].available
        (torch.Size([1, 101]), torch.Size([2, 21]), 100, 20)
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        num_pages: int,
        window_pages: Mapping[int, int],
        page_size: int,
        kv_heads: int,
        head_dim: int,
        *,
        window_heads: tuple[int, int] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        op = "cache.WindowedPool"
        integer(op, "windows", len(windows), 1)
        self.windows = tuple(None if window is None else integer(op, "windows", window, 1) for window in windows)
        self._allocate(op, self.windows.count(None), num_pages, page_size, kv_heads, head_dim, dtype, device)
        sizes = sorted({window for window in self.windows if window is not None})
        check(sorted(window_pages) == sizes, op, "window_pages", f"name the windows {sizes}", sorted(window_pages))
        self.groups = {
            window: PagePool(
                self.windows.count(window),
                window_pages[window],
                page_size,
                *(window_heads or (kv_heads, head_dim)),
                dtype=dtype,
                device=device,
            )
            for window in sizes
        }
        """The pages of the layers with each window."""
        self.promised = dict.fromkeys(sizes, 0)
        """Pages that running sequences may hold at a time, whether they do or not: a step then never lacks one."""
        self.forget: Callable[[int, int], Any] | None = None
        """Gives back pages of the layers with a window that no sequence holds, until so many are free."""

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(group.nbytes for group in self.groups.values())

    def room(self, window: int) -> int:
        """How many pages of a group running sequences may hold together."""
        return self.groups[window].num_pages - SPARE

    def keeps(self, need: Mapping[int, int]) -> bool:
        """Whether a further sequence may hold so many pages of each group."""
        return all(self.promised[window] + pages <= self.room(window) for window, pages in need.items())

    def promise(self, need: Mapping[int, int]) -> None:
        """Counts them; MemoryError, if they are too many."""
        for window, pages in need.items():
            promised = self.promised[window]
            if promised + pages > self.room(window):
                actual = f"{pages} beside {promised} of {self.room(window)}"
                fault = message("cache.WindowedPool", "pages", f"fit those of window {window}", actual)
                raise MemoryError(fault)
        for window, pages in need.items():
            self.promised[window] += pages

    def take_back(self, need: Mapping[int, int]) -> None:
        """The other way."""
        for window, pages in need.items():
            self.promised[window] -= pages

    def take(self, window: int, count: int) -> list[int]:
        """Pages of a group, with one holder."""
        group = self.groups[window]
        if group.available < count and self.forget is not None:
            self.forget(window, count)
        return group.allocate(count)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "forget": None}


class PooledWindowedCache(WindowedCache):
    """A cache of `batch` sequences of up to `capacity` tokens, whose pages come from a `WindowedPool`.

    It is used as a `PagedKVCache` on a `PagePool`; `slide_` says where a sequence goes on. `trim_` goes back to 0, or
    to where all windows are still there (`earliest`).

    Example:
        >>> from pdkernels.cache import PooledWindowedCache, WindowedPool
        >>> pool = WindowedPool([8, None], 100, {8: 80}, page_size=4, kv_heads=1, head_dim=16)
        >>> cache = PooledWindowedCache(pool, batch=1, capacity=400)
        >>> cache.resize_row_(0, 302); cache.slide_(0, 300, 302)
        >>> len(cache.pages(0)), sum(page < 80 for page in cache.window_pages(0)[8]), cache.earliest(0)
        (76, 35, 298)
    """

    full: PagedKVCache
    """That of the layers that see all; of no layers, if there are none."""

    def __init__(self, pool: WindowedPool, batch: int, capacity: int) -> None:
        op = "cache.PooledWindowedCache"
        check_type(isinstance(pool, WindowedPool), op, "pool", "be a WindowedPool", type(pool).__name__)
        self.pool, self.windows, self.layers = pool, pool.windows, len(pool.windows)
        self.batch, self.page_size = integer(op, "batch", batch, 1), pool.page_size
        self.full = full = PagedKVCache.on(pool, batch, capacity)
        self.turning: dict[int, Any] = {
            window: PagedKVCache.on(group, batch, capacity) for window, group in pool.groups.items()
        }
        self.capacity, self.kv_heads, self.head_dim = full.capacity, full.kv_heads, full.head_dim
        self._like = {"dtype": pool.k.dtype}
        self.lengths = full.lengths
        for group in self.turning.values():
            group.lengths = self.lengths
        self.drafts = 1
        self.piece = PIECE
        """Rows of a forward that goes on with a text, at most."""
        self._needs: list[dict[int, int]] = [{} for _ in range(batch)]
        self._bind()

    @property
    def shared_pool(self) -> WindowedPool:
        """The pool that other caches use too."""
        return self.pool

    @property
    def block_table(self) -> Tensor | None:
        """That of the layers that see all; if there are none, of the first one."""
        return self.full.block_table if self.full.layers else self.table(0)

    def reserve_drafts_(self, rows: int) -> None:
        """Says how many rows of a forward may be rejected: `need` counts them."""
        self.drafts = max(self.drafts, integer("cache.PooledWindowedCache.reserve_drafts_", "rows", rows, 0))

    def expect_(self, rows: int, counts: Tensor | None = None) -> None:
        """Nothing: `slide_` has made room."""

    def rewrite_(self, starts: Tensor, ends: Tensor) -> None:
        """Refused: what a sequence holds there follows its length. NotImplementedError."""
        fault = "rows of a cache on a pool with windows are not computed anew"
        raise NotImplementedError(sentence("cache.PooledWindowedCache.rewrite_", fault, "Make it without a pool."))

    commits_lengths = True

    def pages(self, row: int) -> list[int]:
        """The pages of a sequence in the layers that see all."""
        return self.full.pages(row)

    def window_pages(self, row: int) -> dict[int, list[int]]:
        """Its pages in the layers with each window; `scratch` of the group, where there is none."""
        return {window: group.pages(row) for window, group in self.turning.items()}

    def need(self, tokens: int) -> dict[int, int]:
        """How many pages of each group a sequence of so many tokens holds at a time, at most."""
        all_pages, rows = -(-tokens // self.page_size), max(self.piece, self.drafts) + self.drafts
        return {window: min(all_pages, most_pages(window, rows, self.page_size)) for window in self.turning}

    def promise_row_(self, row: int, need: Mapping[int, int]) -> None:
        """Makes sure that a sequence finds so many pages of each group in `slide_` (`need`). MemoryError, if it may
        not."""
        self.pool.take_back(self._needs[row])
        self._needs[row] = {}
        self.pool.promise(need)
        self._needs[row] = dict(need)

    def hold_row_(self, row: int, pages: Sequence[int]) -> None:
        """Gives a sequence pages that others hold too, which it may only read, in the layers that see all."""
        self.full.hold_row_(row, pages)

    def hold_windows_(
        self, row: int, windows: Mapping[int, Sequence[int]], length: int, need: Mapping[int, int]
    ) -> None:
        """The same in the layers with each window, for the first `length` tokens of a sequence that may hold `need`
        pages of each at a time. Of a page that these end in the sequence has a copy."""
        self.promise_row_(row, need)
        whole_pages, slots = divmod(length, self.page_size)
        for window, group in self.turning.items():
            numbers = windows.get(window, ())
            group.hold_row_(row, numbers[:whole_pages])
            if slots:
                (page,) = self.pool.take(window, 1)
                group._pages[row].append(page)
                group._publish()
                self.pool.groups[window].copy_slots_(page, numbers[whole_pages], slots)

    def resize_row_(self, row: int, tokens: int) -> None:
        """Makes a sequence own exactly the pages that `tokens` tokens need in the layers that see all; with 0 tokens, in
        no layer."""
        self.full.resize_row_(row, tokens)
        if tokens == 0:
            for group in self.turning.values():
                group.resize_row_(row, 0)
            self.pool.take_back(self._needs[row])
            self._needs[row] = {}

    def slide_(self, row: int, length: int, room: int) -> None:
        """Prepares layers with windows for rows of a sequence from position `length` to `room`: pages that no row from
        there on can see are given back, others taken.

        Raises:
            MemoryError: the group has too few, which does not happen to a sequence with a promise.
            ValueError: rows before what is kept, or past the capacity.
        """
        op = "cache.PooledWindowedCache.slide_"
        check(0 <= length <= room <= self.capacity, op, "room", f"be in [{length}, {self.capacity}]", room)
        for window, group in self.turning.items():
            pool, pages = self.pool.groups[window], group._pages[row]
            first, end = first_page(length, window, self.page_size), -(-room // self.page_size)
            if first < len(pages) and pages[first] == pool.scratch:
                fault = f"rows before the window of position {length} are gone"
                raise ValueError(sentence(op, fault, "Empty the text and run it again."))
            gone = [page for page in pages[:first] if page != pool.scratch]
            added = max(0, end - max(first, len(pages)))
            if gone or added:
                pool.release(gone)
                group._pages[row] = [pool.scratch] * first + pages[first:]
                try:
                    group._pages[row] += self.pool.take(window, added)
                finally:
                    group._publish()

    def move_row_(self, row: int, other: PooledWindowedCache, other_row: int, length: int) -> None:
        """Takes over a sequence of `length` tokens from another cache on the same pool, with its pages."""
        self.resize_row_(row, 0)
        for group, source in zip(
            (self.full, *self.turning.values()), (other.full, *other.turning.values()), strict=True
        ):
            group.move_row_(row, source, other_row, length)
        self._needs[row], other._needs[other_row] = other._needs[other_row], {}
        self._adapt_row_(row, other.adapters[other_row] if other.adapters else None)
        other.idle_row_(other_row)

    def idle_row_(self, row: int) -> None:
        """Leaves a sequence with at most one token, whose content no longer matters."""
        self.lengths[row].clamp_(max=1)
        self._adapt_row_(row, None)

    def commit_(self, counts: Tensor, source_index: Tensor | None = None) -> None:
        """As that of `PagedKVCache`."""
        first, *later = (group for group in (self.full, *self.turning.values()) if group.layers)
        before = None if source_index is None else self.lengths.clone()
        first.commit_(counts, source_index)
        if before is not None:
            for group in later:
                table = group.block_table
                kv_commit_(group.k, group.v, before.clone(), counts, source_index, block_table=table)

    def trim_(self, new_lengths: int | Sequence[int] | Tensor) -> None:
        """Shortens sequences, to 0 or to where all windows are still there.

        Raises:
            ValueError: a length before that; nothing changes then.
        """
        op = "cache.PooledWindowedCache.trim_"
        on_host = not (isinstance(new_lengths, Tensor) and new_lengths.is_cuda)
        numbers = self.full._numbers(op, "new_lengths", new_lengths)[: self.batch] if on_host else []
        if self.device.type == "cpu":
            for row, length in enumerate(numbers):
                least = self.earliest(row)
                expectation = f"be 0 or at least {least}, since rows before its windows are gone"
                remedy = "Empty the text and run it again."
                allowed = length in (0, int(self.lengths[row])) or length >= least
                check(allowed, op, "new_lengths", expectation, length, remedy)
        self.full.trim_(new_lengths)
        for row, length in enumerate(numbers):
            if length == 0:
                for group in self.turning.values():
                    group.resize_row_(row, 0)

    def earliest(self, row: int) -> int:
        """The shortest length but 0 that a sequence can be cut to."""
        least = 0
        for window, group in self.turning.items():
            pages, scratch = group._pages[row], self.pool.groups[window].scratch
            first = next((at for at, page in enumerate(pages) if page != scratch), len(pages))
            if first:
                least = max(least, first * self.page_size + window - 1 + BLOCK - 1)
        return least

    def copy_row_(self, row: int, other: Any, other_row: int, length: int) -> None:
        """Refused: sequences on a pool move with their pages (`move_row_`). NotImplementedError."""
        fault = "sequences on a pool of pages move, they are not copied"
        raise NotImplementedError(sentence("cache.PooledWindowedCache.copy_row_", fault, "Call move_row_."))
