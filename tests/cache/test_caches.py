"""Both caches against the same model of a cache: a list of rows per sequence."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdkernels._host import PageAllocator
from pdkernels.cache import ContiguousKVCache, PagedKVCache

LAYERS, BATCH, HEADS, DIM, CAPACITY = 2, 3, 2, 4, 12


def make(page_size: int | None) -> ContiguousKVCache | PagedKVCache:
    if page_size is None:
        return ContiguousKVCache(LAYERS, BATCH, CAPACITY, HEADS, DIM)
    pages = -(-CAPACITY // page_size)
    return PagedKVCache(LAYERS, BATCH, BATCH * pages, page_size, HEADS, DIM, max_pages_per_sequence=pages)


def owned_pages(cache: PagedKVCache) -> int:
    """Different pages in the table. `make` has pages for full sequences only, so one that does not come back is missed later."""
    owned = cache.block_table[cache.block_table >= 0].tolist()
    assert len(set(owned)) == len(owned)
    return len(owned)


class CacheMachine(RuleBasedStateMachine):
    """Random append, commit and trim; the model keeps Python lists of row numbers."""

    @initialize(page_size=st.sampled_from([None, 1, 2, 5, 16]))
    def start(self, page_size: int | None) -> None:
        self.cache = make(page_size)
        self.rows: list[list[int]] = [[] for _ in range(BATCH)]
        self.next_row = 1
        self.identity = [t.data_ptr() for t in (self.cache.k, self.cache.v, self.cache.lengths)]

    @rule(data=st.data())
    def draft_and_commit(self, data: st.DataObject) -> None:
        room = [CAPACITY - len(rows) for rows in self.rows]
        width = data.draw(st.integers(1, 5))
        counts = [data.draw(st.integers(0, min(width, free))) for free in room]
        if isinstance(self.cache, PagedKVCache):
            self.cache.reserve_([len(rows) + count for rows, count in zip(self.rows, counts)])
        numbers = torch.arange(self.next_row, self.next_row + BATCH * width).view(BATCH, width)
        self.next_row += BATCH * width
        for layer in range(LAYERS):
            new = (numbers * 10 + layer).float()[..., None, None].repeat(1, 1, HEADS, DIM)
            self.cache.append_(layer, new, -new, torch.tensor(counts))
        picks = [data.draw(st.lists(st.integers(0, count - 1), max_size=count)) if count else [] for count in counts]
        most = max(len(pick) for pick in picks)
        sources = torch.tensor([pick + [0] * (most - len(pick)) for pick in picks], dtype=torch.int64).view(BATCH, most)
        self.cache.commit_(torch.tensor([len(pick) for pick in picks]), sources)
        for b, pick in enumerate(picks):
            self.rows[b] += [int(numbers[b, i]) for i in pick]

    @precondition(lambda self: any(self.rows))
    @rule(data=st.data(), as_tensor=st.booleans())
    def trim(self, data: st.DataObject, as_tensor: bool) -> None:
        wanted = [data.draw(st.integers(0, len(rows))) for rows in self.rows]
        self.cache.trim_(torch.tensor(wanted) if as_tensor else wanted)
        self.rows = [rows[:n] for rows, n in zip(self.rows, wanted)]
        if isinstance(self.cache, PagedKVCache):
            assert owned_pages(self.cache) == sum(-(-n // self.cache.page_size) for n in wanted)

    @rule(data=st.data(), page_size=st.sampled_from([None, 1, 4]))
    def take_over_a_row(self, data: st.DataObject, page_size: int | None) -> None:
        row, length, source = (data.draw(st.integers(0, most)) for most in (BATCH - 1, CAPACITY, BATCH - 1))
        other = make(page_size)
        if isinstance(other, PagedKVCache):
            other.reserve_(CAPACITY)
        numbers = torch.arange(self.next_row, self.next_row + BATCH * CAPACITY).view(BATCH, CAPACITY)
        self.next_row += BATCH * CAPACITY
        for layer in range(LAYERS):
            new = (numbers * 10 + layer).float()[..., None, None].repeat(1, 1, HEADS, DIM)
            other.append_(layer, new, -new)
        if isinstance(self.cache, PagedKVCache):
            before = [pages[:] for pages in self.cache._pages]
            self.cache.resize_row_(row, length)
            assert owned_pages(self.cache) == self.cache.num_pages - self.cache._pool.available
            after = self.cache._pages
            assert len(after[row]) == -(-length // self.cache.page_size)
            assert all(old == new for b, (old, new) in enumerate(zip(before, after, strict=True)) if b != row)
        self.cache.copy_row_(row, other, source, length)
        self.rows[row] = numbers[source, :length].tolist()

    @rule()
    def reset(self) -> None:
        self.cache.reset_()
        self.rows = [[] for _ in range(BATCH)]
        if isinstance(self.cache, PagedKVCache):
            assert owned_pages(self.cache) == 0

    @invariant()
    def holds_the_rows(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert self.cache.lengths.tolist() == [len(rows) for rows in self.rows]
        for layer in range(LAYERS):
            k, v = self.cache.layer(layer, CAPACITY)
            assert k.shape == (BATCH, CAPACITY, HEADS, DIM)
            for b, rows in enumerate(self.rows):
                expected = (torch.tensor(rows) * 10 + layer).float()[:, None, None].expand(-1, HEADS, DIM)
                assert torch.equal(k[b, : len(rows)], expected) and torch.equal(v[b, : len(rows)], -expected)
        assert self.identity == [t.data_ptr() for t in (self.cache.k, self.cache.v, self.cache.lengths)]


CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=12, derandomize=True, deadline=None)
TestCaches = CacheMachine.TestCase


def test_paged_cache_grows_and_runs_out() -> None:
    cache = PagedKVCache(1, 2, num_pages=3, page_size=4, kv_heads=1, head_dim=2)
    cache.reserve_([5, 1])
    assert cache.block_table.tolist() == [[0, 1, -1], [2, -1, -1]]
    with pytest.raises(
        MemoryError, match=r"reserve_: lengths must fit the pool of 3 pages, got 1 more with 0 free\. Trim"
    ):
        cache.reserve_([9, 1])
    assert cache.block_table.tolist() == [[0, 1, -1], [2, -1, -1]]
    cache.reserve_([5, 4])


def test_reclaim_after_lengths_changed_on_the_device() -> None:
    cache = PagedKVCache(1, 1, num_pages=4, page_size=2, kv_heads=1, head_dim=2)
    cache.reserve_([8])
    cache.append_(0, torch.ones(1, 8, 1, 2), torch.ones(1, 8, 1, 2))
    cache.commit_(torch.tensor([3]))
    cache.reclaim_()
    assert cache.block_table.tolist() == [[0, 1, -1, -1]]
    cache.reserve_([8])  # the pool has the other pages again
    assert owned_pages(cache) == 4


def test_a_row_takes_only_free_pages() -> None:
    cache = PagedKVCache(1, 2, num_pages=3, page_size=4, kv_heads=1, head_dim=2)
    cache.reserve_([5, 1])
    with pytest.raises(MemoryError, match=r"resize_row_: tokens must fit the pool of 3 pages, got 1 more pages with 0"):
        cache.resize_row_(1, 8)
    assert cache.block_table.tolist() == [[0, 1, -1], [2, -1, -1]]
    cache.resize_row_(0, 0)
    cache.resize_row_(1, 12)
    assert cache.block_table[0].tolist() == [-1] * 3 and sorted(cache.block_table[1].tolist()) == [0, 1, 2]


def test_rows_that_a_cache_cannot_take_over() -> None:
    cache, paged = make(None), make(4)
    with pytest.raises(
        ValueError, match=r"copy_row_: other must have the same layers, heads and dtype, got \(2, 1, 4,"
    ):
        cache.copy_row_(0, ContiguousKVCache(LAYERS, 1, 4, 1, DIM), 0, 1)
    with pytest.raises(ValueError, match=r"ContiguousKVCache.copy_row_: length must be in \[0, 12\], got 13"):
        cache.copy_row_(0, cache, 1, 13)
    with pytest.raises(ValueError, match=r"PagedKVCache.copy_row_: length must be in \[0, 0\], got 1"):
        paged.copy_row_(0, cache, 0, 1)
    with pytest.raises(ValueError, match=r"resize_row_: tokens must be in \[0, 12\], got 13"):
        paged.resize_row_(0, 13)


def test_writing_without_pages_is_refused() -> None:
    cache = PagedKVCache(1, 1, num_pages=4, page_size=2, kv_heads=1, head_dim=2)
    with pytest.raises(
        ValueError, match=r"block_table\[0, 0\] must be in \[0, 3\], got -1 for sequence 0\. Reserve pages"
    ):
        cache.append_(0, torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2))


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: ContiguousKVCache(1, 1, 0, 1, 1), "ContiguousKVCache: capacity must be 1 or more, got 0"),
        (lambda: ContiguousKVCache(0, 1, 4, 1, 1), "ContiguousKVCache: layers must be 1 or more, got 0"),
        (lambda: PagedKVCache(1, 1, 0, 1, 1, 1), "PagedKVCache: num_pages must be 1 or more, got 0"),
        (lambda: PagedKVCache(1, 1, 4, 0, 1, 1), "PagedKVCache: page_size must be 1 or more, got 0"),
        (lambda: PagedKVCache(1, 2, 4, 2, 1, 1).reserve_([1]), "reserve_: lengths must have 2 entries, got 1"),
        (lambda: PagedKVCache(1, 1, 4, 2, 1, 1).reserve_([9]), r"reserve_: lengths must be in \[0, 8\], got 9"),
    ],
)
def test_bad_sizes(call, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()


@pytest.mark.parametrize(
    "text, call",
    {
        "ContiguousKVCache: layers must be an integer, got bool": lambda: ContiguousKVCache(True, 1, 4, 1, 1),
        "ContiguousKVCache: capacity must be an integer, got float": lambda: ContiguousKVCache(1, 1, 4.0, 1, 1),
        "PagedKVCache: page_size must be an integer, got str": lambda: PagedKVCache(1, 1, 4, "2", 1, 1),
        r"reserve_: lengths must be an int, or one per sequence, got \[1.5, 1\]": lambda: PagedKVCache(
            1, 2, 4, 2, 1, 1
        ).reserve_([1.5, 1]),
        r"trim_: new_lengths must be an int, or one per sequence, got 0.0": lambda: ContiguousKVCache(
            1, 1, 4, 1, 1
        ).trim_(0.0),
    }.items(),
)
def test_sizes_and_lengths_are_ints(call, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        call()


def test_numbers_of_any_integer_type() -> None:
    cache = make(None)
    cache.append_(0, *[torch.ones(BATCH, 3, HEADS, DIM)] * 2)
    cache.commit_(torch.tensor([3, 2, 1]))
    cache.trim_(torch.tensor(1).numpy()[()])
    assert cache.lengths.tolist() == [1, 1, 1]


def test_mistakes_are_named() -> None:
    with pytest.raises(TypeError, match=r"ContiguousKVCache: dtype must be a torch\.dtype, got 'float16'"):
        ContiguousKVCache(1, 1, 4, 1, 2, dtype="float16")
    cache, longer, rows = ContiguousKVCache(1, 1, 4, 1, 2), ContiguousKVCache(1, 1, 9, 1, 2), torch.ones(1, 2, 1, 2)
    for layer in (-1, 1):
        with pytest.raises(ValueError, match=r"append_: layer must be in \[0, 1\)"):
            cache.append_(layer, rows, rows)
    with pytest.raises(ValueError, match=r"copy_row_: length must be in \[0, 4\], got 7"):
        longer.copy_row_(0, cache, 0, 7)


@pytest.mark.parametrize("page_size", [None, 1, 5])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_copies_are_independent(duplicate, page_size: int | None) -> None:
    cache = make(page_size)
    if page_size:
        cache.reserve_([4, 0, 6])
    other = duplicate(cache)
    cache.lengths += 1
    assert other.lengths.tolist() == [0] * BATCH and cache.lengths.tolist() == [1] * BATCH
    if page_size:
        cache.reserve_([6, 1, 6]), other.reserve_([6, 1, 6])
        assert torch.equal(cache.block_table, other.block_table)
        other.trim_([0, 0, 0])
        assert owned_pages(other) == 0 < owned_pages(cache)
        other.reserve_(CAPACITY), cache.reserve_(CAPACITY)
        assert owned_pages(other) == owned_pages(cache) == cache.num_pages


# --- the page allocator ---------------------------------------------------------------------------------------------------


@given(steps=st.lists(st.integers(0, 6), max_size=30), size=st.integers(0, 12))
@settings(max_examples=60)
def test_allocator_never_hands_a_page_out_twice(steps: list[int], size: int) -> None:
    pool, held = PageAllocator(size), []
    for count in steps:
        if count <= pool.available:
            fresh = pool.allocate(count)
            assert fresh == sorted(fresh) and not set(fresh) & set(held)
            held += fresh
        elif held:
            pool.release([held.pop()])
        assert pool.available + len(held) == size == pool.num_pages
    pool.release(held)
    assert pool.allocate(size) == list(range(size))


def test_allocator_errors() -> None:
    pool = PageAllocator(2)
    with pytest.raises(MemoryError):
        pool.allocate(3)
    pages = pool.allocate(2)
    for bad, text in (([5], "got 5"), ([-1], "got -1"), ([0, 0], "distinct")):
        with pytest.raises(ValueError, match=text):
            pool.release(bad)
    assert pool.available == 0
    pool.release(pages)
    with pytest.raises(ValueError, match="in use, got 0"):
        pool.release([0])
    with pytest.raises(ValueError, match="count must be 0 or more"):
        pool.allocate(-1)
    with pytest.raises(ValueError, match="num_pages must be 0 or more"):
        PageAllocator(-1)
