"""Keys and values of a model whose layers have windows, in memory that does not grow with the text where they have one.

A layer with a window has a few pages for each sequence, which take turns: position ``p`` lives in page
``p // page_size % pages``. Its page table names them over and over, never changes, and places of the text keep their
numbers. So attention reads blocks of the same positions as from a cache that keeps all rows, and a row has the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pdkernels._validation import check, integer, sentence
from pdkernels.cache.adapted import AdaptedSequences
from pdkernels.cache.contiguous import ContiguousKVCache, KVCacheBase
from pdkernels.cache.paged import PagedKVCache
from pdkernels.cache.stored import narrowed, stored
from pdkernels.ops.kv_cache import kv_append_, kv_commit_

BLOCK = 128
"""Attention reads keys in blocks of so many at most, whose first ones may lie before a window: they stay what they were,
since a hidden key adds nothing only as long as its numbers are finite."""

PAGE = 16
"""Rows of a page in layers with a window, if the other layers have no pages."""

_AGAIN = 16
"""Rows by which a copy of a text goes back, for one that ends in another way."""


def turns(window: int, drafts: int, page_size: int) -> int:
    """How many pages of a sequence take turns in a layer with a window.

    Rows up to `drafts` after the longest text may be written while a text that is `drafts` shorter still sees its
    window, from the beginning of a block on.

    >>> turns(window=512, drafts=16, page_size=16)
    43
    """
    return -(-(window - 1 + 2 * drafts + BLOCK - 1) // page_size) + 1


class TurningPages(KVCacheBase):
    """The layers with one window: a part of a `WindowedCache`, whose `lengths` it has.

    `block_table` ``(batch, width)`` is that of the next forward; page ``batch * pages`` is for rows that nobody reads.
    """

    block_table: Tensor

    def __init__(
        self, layers: int, lengths: Tensor, width: int, window: int, drafts: int, like: dict[str, Any]
    ) -> None:
        """`width`: pages of the longest text. `like`: page_size, kv_heads, head_dim, dtype and device."""
        self.window, self.drafts, self.page_size = window, drafts, like["page_size"]
        self.capacity = width * self.page_size
        self.pages = min(turns(window, drafts, self.page_size), width)
        """Of each sequence."""
        batch = len(lengths)
        sizes = like["page_size"], like["kv_heads"], like["head_dim"], like["dtype"], like["device"]
        self._allocate(layers, batch, batch * self.pages + 1, *sizes)
        self.lengths = lengths
        page = torch.arange(width, device=self.device)
        first = torch.arange(batch, device=self.device)[:, None] * self.pages
        self._page, self._table = page, (first + page % self.pages).to(torch.int32)
        self.block_table = self._table

    def expect_(self, counts: Tensor | None) -> None:
        """Where the next forward stores its rows: all in the pages that take turns; or of sequences with `counts`
        ``(batch,)`` above `drafts`, which are empty, the last rows alone."""
        self.block_table = self._table
        if counts is not None:
            first = self.lengths + counts - (self.window - 1 + self.drafts)
            unseen = ((self._page + 1) * self.page_size <= first[:, None]) & (counts > self.drafts)[:, None]
            self.block_table = self._table.masked_fill(unseen, self.batch * self.pages)

    def take_(self, other: TurningPages) -> None:
        """Copies what another one has of the same sequences and layers."""
        rows = other.pages * other.page_size
        at = (self.lengths[:, None] - rows + torch.arange(rows, device=self.device)).clamp(min=0)
        (pages, slots), (from_pages, from_slots) = (
            (each._table.gather(1, at // each.page_size).long(), at % each.page_size) for each in (self, other)
        )
        for target, source in ((self.k, other.k), (self.v, other.v)):
            target[:, pages, slots] = source[:, from_pages, from_slots]


class WindowedCache(AdaptedSequences):
    """A cache of a model some of whose layers have windows: these keep only what rows to come can see.

    It is used as a `PagedKVCache`, whose pages the other layers have, or as a `ContiguousKVCache`. Of a sequence, layers
    with a window keep the last rows: the window, twice `drafts` rows and a block of attention (`turns`). `trim_` goes
    back by `drafts` rows at most, or to 0. A forward over more rows than that makes room for more, unless it is the
    first of its text; of such a one all but the last `drafts` rows have to be committed.

    Args:
        windows: of each layer, how many rows it sees; None: all of them.
        batch, capacity, kv_heads, head_dim, dtype, device: as in `ContiguousKVCache`.
        page_size: as in `PagedKVCache`. None: layers that see all have room for all from the beginning, and `reserve_`
            does nothing.
        drafts: rows of a forward that can be rejected.
        kind_heads: heads and their size of layers that see all rows, and of the others. Then `kv_heads` and `head_dim`
            are those of the row that other caches of the model hold. None: all layers have these two.

    Raises:
        ValueError: a size below 1, or more memory than there is.
        TypeError: a size that is not an int.

    Example:
        >>> import torch
        >>> from pdkernels.cache import WindowedCache
        >>> cache = WindowedCache([4, None], batch=1, capacity=1000, page_size=8, kv_heads=1, head_dim=16, drafts=4)
        >>> cache.reserve_([1000]); cache.table(0)[0, :20].tolist(), cache.table(1)[0, :4].tolist()
        ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 0], [0, 1, 2, 3])
        >>> [len(cache.k[layer]) for layer in (0, 1)]
        [20, 125]
    """

    _least: Tensor | None = None
    """``(batch,)``: how long texts have to be after the next commit; None: it commits what it likes."""

    bounded: Tensor | None = None
    """Counts that are never above `drafts`, whatever is written into this tensor: `expect_` does not read them."""

    def __init__(
        self,
        windows: Sequence[int | None],
        batch: int,
        capacity: int,
        page_size: int | None,
        kv_heads: int,
        head_dim: int,
        *,
        drafts: int = 16,
        kind_heads: tuple[tuple[int, int], tuple[int, int]] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        op = "cache.WindowedCache"
        self.layers, self.batch = integer(op, "windows", len(windows), 1), integer(op, "batch", batch, 1)
        self.page_size = PAGE if page_size is None else integer(op, "page_size", page_size, 1)
        self.drafts = integer(op, "drafts", drafts, 1)
        width = -(-integer(op, "capacity", capacity, 1) // self.page_size)
        self.capacity, self.kv_heads, self.head_dim = width * self.page_size, kv_heads, head_dim
        self.windows = tuple(None if window is None else integer(op, "windows", window, 1) for window in windows)
        self._width, self._kind_heads = width, kind_heads
        full, local = kind_heads or ((kv_heads, head_dim), (kv_heads, head_dim))
        where: dict[str, Any] = {"dtype": dtype, "device": torch.device(device)}
        self._like = {"page_size": self.page_size, "kv_heads": local[0], "head_dim": local[1], **where}
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.furthest = torch.zeros_like(self.lengths)
        """``(batch,)``: each text goes back to `drafts` before this length, or before its own where that is longer. It is
        the longest that a text has been that was cut, and more where less was kept."""
        self.full: KVCacheBase | None = None
        if number := self.windows.count(None):
            if page_size is None:
                self.full = ContiguousKVCache(number, batch, self.capacity, *full, **where)
                if self.full.device.type == "cpu":
                    # What it is to a kernel: a page for each sequence, so that all groups of layers have tables.
                    self.full.block_table = torch.arange(batch, dtype=torch.int32, device="cpu")[:, None]
            else:
                sizes = number, batch, batch * width, page_size, *full
                self.full = PagedKVCache(*sizes, max_pages_per_sequence=width, **where)
            self.full.lengths = self.lengths
        self.turning = {window: self._new_pages(window) for window in self.windows if window is not None}
        """The pages of the layers with each window."""
        self._bind()

    piece = 256
    """Rows of a forward that goes on with a text, at most, where whole prompts run in pieces: there is room for them."""

    def another(self, batch: int, capacity: int) -> WindowedCache:
        """An empty cache of the same layers, for texts that others go on with: where they are, or some rows before. It has
        no pages that have to be reserved."""
        where: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        sizes = self.windows, batch, capacity, None, self.kv_heads, self.head_dim
        return WindowedCache(*sizes, drafts=_AGAIN, kind_heads=self._kind_heads, **where)

    def _new_pages(self, window: int) -> TurningPages:
        layers = self.windows.count(window)
        return TurningPages(layers, self.lengths, self._width, window, self.drafts, self._like)

    def _bind(self) -> None:
        seen: dict[int | None, int] = dict.fromkeys(self.windows, 0)
        self._groups: list[tuple[KVCacheBase, int]] = []
        """Of each layer: where it is, and which of the layers there."""
        for window in self.windows:
            group = self.full if window is None else self.turning[window]
            assert group is not None
            self._groups.append((group, seen[window]))
            seen[window] += 1
        self.parts = list(dict.fromkeys(group for group, _ in self._groups))
        """The caches of layers with the same table, in the order of their first layers."""
        self.part_of = [self.parts.index(group) for group, _ in self._groups]
        """The number of each layer's."""
        alone = self._groups[0][0] if len(seen) == 1 else None
        # One tensor, if all layers are in one: the op of all layers takes no others.
        self.k: Any = alone.k if alone else [group.k[place] for group, place in self._groups]
        self.v: Any = alone.v if alone else [group.v[place] for group, place in self._groups]

    @property
    def block_table(self) -> Tensor | None:
        """That of the layers that see all; if there are none, of the first one."""
        return (self.full or self._groups[0][0]).block_table

    @property
    def device(self) -> torch.device:
        return self.lengths.device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._like["dtype"]
        return dtype

    def table(self, layer: int) -> Tensor | None:
        """The page table of a layer, ``(batch, width)``; None: it has none, as that of a `ContiguousKVCache`."""
        return self._groups[layer][0].block_table

    def reserve_(self, lengths: int | Sequence[int]) -> None:
        """As that of `PagedKVCache`, for the layers that see all. The others have their pages."""
        if isinstance(self.full, PagedKVCache):
            self.full.reserve_(lengths)

    def resize_row_(self, row: int, tokens: int) -> None:
        """As that of `PagedKVCache`, for the layers that see all."""
        if isinstance(self.full, PagedKVCache):
            self.full.resize_row_(row, tokens)

    def reclaim_(self) -> None:
        """As that of `PagedKVCache`, for the layers that see all."""
        if isinstance(self.full, PagedKVCache):
            self.full.reclaim_()

    def reserve_drafts_(self, rows: int) -> None:
        """Makes room for drafts of `rows` rows; what is kept stays. Captured graphs have the old memory."""
        rows = integer("cache.WindowedCache.reserve_drafts_", "rows", rows, 0)
        if rows <= self.drafts:
            return
        # What is gone stays gone: texts go back no further than before.
        torch.maximum(self.furthest, self.lengths, out=self.furthest)
        self.furthest.add_(rows - self.drafts).masked_fill_(self.lengths == 0, 0)
        self.drafts, before = rows, self.turning
        self.turning = {window: self._new_pages(window) for window in before}
        for window, pages in self.turning.items():
            pages.take_(before[window])
        self._bind()

    def expect_(self, rows: int, counts: Tensor | None = None) -> None:
        """Prepares a forward that stores `counts` ``(batch,)`` of `rows` new rows of each sequence; None: all. Reads
        the device if `rows` are more than `drafts`, unless `counts` are `bounded`."""
        self._expect_nothing()
        if rows > 1:  # of a text that begins anew nothing is gone
            self.furthest.masked_fill_(self.lengths == 0, 0)
        if rows <= self.drafts or (counts is not None and counts is self.bounded):
            return
        long = torch.full_like(self.lengths, rows) if counts is None else counts.to(torch.int64)
        self.reserve_drafts_(int(long.masked_fill(self.lengths == 0, 0).max()))
        if int(long.max()) > self.drafts:
            for pages in self.turning.values():
                pages.expect_(long)
            self._least = torch.where(long > self.drafts, self.lengths + long - self.drafts, 0)

    def rewrite_(self, starts: Tensor, ends: Tensor) -> None:
        """Prepares rows that are computed anew, of each sequence from `starts` ``(batch,)`` to `ends` ``(batch,)``, whatever its
        length; `ends` 0: none.

        Raises:
            ValueError: rows more than `drafts` before the end of these, or of those that have been there; nothing changes
                then.
        """
        self._expect_nothing()
        furthest = torch.maximum(self.furthest, ends)
        if self.device.type == "cpu":
            early = (ends > 0) & (starts < furthest - self.drafts)
            expectation = f"be at most {self.drafts} before the furthest row of a text, since earlier ones are gone"
            remedy = "Make the cache with new_cache(drafts=None), or for more drafts."
            check(not bool(early.any()), "cache.WindowedCache.rewrite_", "starts", expectation, starts.tolist(), remedy)
        self.furthest.copy_(furthest)

    def append_(self, layer: int, k_new: Tensor, v_new: Tensor, counts: Tensor | None = None) -> None:
        """As that of `PagedKVCache`, after `expect_`."""
        rows = stored(self.dtype, k_new, v_new)
        kv_append_(self.k[layer], self.v[layer], *rows, self.lengths, counts=counts, block_table=self.table(layer))

    def commit_(self, counts: Tensor, source_index: Tensor | None = None) -> None:
        """As that of `PagedKVCache`.

        Raises:
            ValueError: fewer rows of a long first forward than all but the last `drafts`; nothing changes then.
        """
        before = self.lengths.clone() if source_index is not None or self._least is not None else None
        self.check_commit(counts)
        groups: list[KVCacheBase] = [] if self.full is None else [self.full]
        first, *later = groups + list(self.turning.values())
        first.commit_(counts, source_index)
        if before is None:
            return
        if source_index is not None:
            for group in later:
                table = group.block_table
                kv_commit_(group.k, group.v, before.clone(), counts, source_index, block_table=table)
        if self._least is not None:
            self.furthest.masked_fill_(before == 0, 0)
            fewer = (self._least > 0) & (self.lengths < self._least + self.drafts)
            self.furthest.copy_(torch.where(fewer, self._least + self.drafts, self.furthest))
        self._expect_nothing()

    @property
    def commits_lengths(self) -> bool:
        """Whether a commit of the first rows changes the lengths alone."""
        return self._least is None

    def _expect_nothing(self) -> None:
        if self._least is not None:
            self._least = None
            for pages in self.turning.values():
                pages.expect_(None)

    def check_commit(self, counts: Tensor) -> None:
        """Refuses what `commit_` would, on the CPU."""
        if self._least is not None and self.device.type == "cpu":
            short = self.lengths + counts < self._least
            expectation = f"keep all but the last {self.drafts} rows of a text's first forward"
            remedy = "Call reserve_drafts_ before it."
            check(not bool(short.any()), "cache.WindowedCache.commit_", "counts", expectation, "fewer", remedy)

    def trim_(self, new_lengths: int | Sequence[int] | Tensor) -> None:
        """Shortens sequences, to 0 or by at most `drafts` rows from the longest that they have been.

        Raises:
            ValueError: a length before what is kept; nothing changes then.
        """
        self.check_trim(new_lengths)
        torch.maximum(self.furthest, self.lengths, out=self.furthest)
        group = self.full or self._groups[0][0]
        group.trim_(new_lengths)
        self.furthest.masked_fill_(self.lengths == 0, 0)

    def check_trim(self, new_lengths: int | Sequence[int] | Tensor) -> None:
        """Refuses what `trim_` would, on the CPU."""
        if self.device.type == "cpu":
            numbers = self._numbers("cache.WindowedCache.trim_", "new_lengths", new_lengths)
            for row, length in enumerate(numbers[: self.batch]):
                least = self.earliest(row)
                expectation = f"be 0 or at least {least}, since rows before its windows are gone"
                remedy = "Empty the text and run it again, or call reserve_drafts_ before it is written."
                check(length in (0, int(self.lengths[row])) or length >= least, "cache.WindowedCache.trim_", "new_lengths", expectation, length, remedy)  # fmt: skip

    def _numbers(self, op: str, argument: str, values: int | Sequence[int] | Tensor) -> list[int]:
        return self._groups[0][0]._numbers(op, argument, values)

    def reset_(self) -> None:
        """Empties every sequence."""
        self.trim_(0)

    def earliest(self, row: int) -> int:
        """The shortest length but 0 that a sequence can be cut to. Reads the device."""
        length = int(self.lengths[row])
        return min(length, max(0, int(self.furthest[row]) - self.drafts, length - self.drafts))

    def _earliest(self) -> Tensor:
        """``(batch,)``: `earliest` of each sequence, and what a forward has stored that is not committed yet."""
        earliest = (torch.maximum(self.furthest, self.lengths) - self.drafts).clamp(min=0)
        return earliest if self._least is None else torch.maximum(earliest, self._least)

    def idle_row_(self, row: int) -> None:
        """Leaves a sequence with at most one token, whose content no longer matters."""
        self.lengths[row].clamp_(max=1)
        self.furthest[row].clamp_(max=1)
        self._adapt_row_(row, None)

    def layer(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer in logical order, gathered: ``(batch, length, kv_heads, head_dim)``. Those before what
        is kept are others."""
        pages, table = -(-length // self.k[layer].shape[1]), self.table(layer)
        if table is None:
            return self.k[layer][:, :length], self.v[layer][:, :length]
        places = table[:, :pages].clamp(min=0).to(torch.int64)
        k, v = (side[layer][places].flatten(1, 2)[:, :length] for side in (self.k, self.v))
        return k, v

    def copy_row_(self, row: int, other: Any, other_row: int, length: int) -> None:
        """Replaces sequence `row` by the first `length` tokens of a sequence of another cache of the same layers.

        Raises:
            ValueError: a cache with other layers, heads or dtype, more tokens than there is room for, or a length that
                the other one cannot be cut to.
        """
        op = "cache.WindowedCache.copy_row_"
        kinds = [(cache.layers, cache.kv_heads, cache.head_dim, cache.dtype) for cache in (self, other)]
        check(kinds[0] == kinds[1], op, "other", "have the same layers, heads and dtype", kinds[1])
        room = self.capacity if self.full is None else self.full._row_capacity(row)
        check(0 <= length <= room, op, "length", f"be in [0, {room}]", length)
        if self.device.type == "cpu" and hasattr(other, "earliest"):
            least = other.earliest(other_row)
            check(length == 0 or length >= least, op, "length", f"be 0 or at least {least}", length)
        for layer, window in enumerate(self.windows):
            rows = length if window is None else min(length, window - 1 + BLOCK - 1 + self.drafts)
            at = torch.arange(length - rows, length, device=self.device)
            to_page, to_slot = _places(self, layer, row, at)
            from_page, from_slot = _places(other, layer, other_row, at)
            for target, source in ((self.k, other.k), (self.v, other.v)):
                narrow = narrowed(source[layer], *target[layer].shape[-2:])
                target[layer][to_page, to_slot] = narrow[from_page, from_slot]
        self.lengths[row].fill_(length)
        self.furthest[row].fill_(length)
        if length and isinstance(other, WindowedCache):
            # It goes back no further than the other.
            torch.maximum(self.furthest[row], other._earliest()[other_row] + self.drafts, out=self.furthest[row])
        self._adapt_row_(row, other.adapters[other_row] if other.adapters else None)

    def row(self, row: int, length: int) -> tuple[Tensor, Tensor]:
        """Refused: the layers have different rows. NotImplementedError."""
        fault = "layers with windows have no more than their last rows"
        raise NotImplementedError(sentence("cache.WindowedCache.row", fault, "Copy it with copy_row_ of such a cache."))


def _places(cache: Any, layer: int, row: int, at: Tensor) -> tuple[Any, Tensor]:
    """The pages and slots of positions of a sequence."""
    table = cache.table(layer)
    if table is None:
        return row, at
    page_size = cache.k[layer].shape[1]
    return table[row, at // page_size].long(), at % page_size
