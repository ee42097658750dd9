"""A tree of earlier texts over the pages of a pool: each page is a node, named by its tokens and the page before it.

Sources: PagedAttention (arXiv 2309.06180), section 4; RadixAttention (arXiv 2312.07104), section 3, for the tree; what
is forgotten first is that of GreedyDual-Size (Cao and Irani, "Cost-Aware WWW Proxy Caching Algorithms", USENIX 1997).
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from pdkernels._validation import sentence
from pdkernels.cache import PagePool, WindowedPool
from pdkernels.cache.hybrid import SavedStates
from pdkernels.cache.windowed_pool import first_page
from pdkernels.engine.disk import names_of

SHORTEST = 16
"""Tokens that are cheaper to run than to look up."""

Root = tuple[Hashable, ...]
"""What rows depend on besides the tokens: texts of different roots share nothing."""


@dataclass(eq=False)
class Page:
    """A page of an earlier text. Its rows depend on all tokens before it, so its name says these too."""

    number: int
    """-1: it has been forgotten, and is the memory of others."""
    before: Page | None
    """None: it is a root, without tokens and memory."""
    tokens: tuple[int, ...]
    end: int
    """Tokens of the text up to its end."""
    worth: float = 0.0
    """What has the least is forgotten first."""
    after: dict[tuple[int, ...], Page] = field(default_factory=dict)
    states: dict[int, State] = field(default_factory=dict)
    """Recurrent states after as many tokens of the text, which end in this page."""
    windows: dict[int, int] = field(default_factory=dict)
    """The page with the same tokens in the layers with each window, where there is one."""


@dataclass(eq=False)
class State:
    """Recurrent states of an earlier text, which its rows alone do not give."""

    saved: SavedStates
    cost: float
    """Of computing them anew, in the cost of a row for each row whose memory they take."""
    worth: float = 0.0


class CachedPrefix(NamedTuple):
    """The pages of earlier texts that a text begins with."""

    pages: list[int]
    """Whole pages."""
    partial: int | None
    """One that begins with the next tokens, of which the first ones can be copied."""
    length: int
    """Tokens, of all of them."""
    states: SavedStates | None
    """Those to go on with after `length` tokens; None: the model has none."""
    branch: int
    """Where the text leaves an earlier one that has no states or windows there, which are worth keeping when the text
    gets there; 0: nowhere."""
    windows: Mapping[int, Sequence[int]] = {}
    """In the layers with each window, the pages of all tokens, `scratch` where no row to come sees them."""


class PrefixTree:
    """The pages of earlier texts, up to `limit` tokens of them.

    A text shares the whole pages of its beginning with others, and copies the slots of the page in which it leaves
    them.

    A page that is no beginning of another has a worth: the cost of computing one of its rows, which grows with the rows
    before it, plus the worth of what was forgotten last when it was used last. The least is forgotten first, so age and
    cost count. Recurrent states have one too, by the rows that must run again without them, and count as the rows whose
    memory they take.

    Layers with windows keep the last rows before places of a text (`keep`): there, or between them where they overlap,
    other texts may leave it. Their pages are given back first when running requests need them.

    Args:
        pool: of the pages.
        limit: tokens of earlier texts.
        even: rows before it with which a row costs twice what it costs without; those of attention cost as much as
            the rest then.
        state_rows: rows whose K and V take the memory of the states of a text; 0: the model has none.
    """

    def __init__(self, pool: PagePool, limit: int, even: int, state_rows: int = 0) -> None:
        self.pool, self.limit, self.tokens = pool, limit, 0
        self.blocked: int | None = None
        """The number of the oldest request that has found too few pages: no younger one may begin before it."""
        self.forgotten, self.states = 0, 0
        """Tokens that have been forgotten; states that are kept."""
        self._even, self.state_rows = even, state_rows
        self._roots: dict[Root, Page] = {}
        self._age = 0.0
        self._pages: dict[Page, None] = {}  # the least recently used first
        self._lock = threading.Lock()
        self._reading: Page | None = None  # by `copy`, which another thread calls
        self.groups: dict[int, PagePool] = {}
        """The pages of the layers with each window."""
        if isinstance(pool, WindowedPool):
            self.groups, pool.forget = pool.groups, self.forget_windows

    @property
    def every(self) -> int:
        """Tokens of a text after each of which its states are kept: they take no more memory than its rows; or its
        windows, which take a quarter of the memory of its rows in these layers."""
        size = self.pool.page_size
        rows = max(self.state_rows, *(4 * window for window in self.groups), 0)
        return max(8 * size, -(-rows // size) * size)

    @property
    def goes_back(self) -> bool:
        """Whether any beginning of a text is enough to go on from."""
        return not (self.state_rows or self.groups)

    @property
    def _size(self) -> int:
        return self.tokens + self.states * self.state_rows

    def find(self, root: Root, text: Sequence[int]) -> CachedPrefix:
        """The longest known beginning of a text."""
        path, partial, common = self._walk(root, text)
        length, state = self._furthest(root, path, partial, common)
        branch = common if common >= length + SHORTEST else 0
        if state is not None:
            state.worth = self._age + state.cost
        if length < SHORTEST:
            return CachedPrefix([], None, 0, None, branch)
        size = self.pool.page_size
        used = [
            page for page in (*path, *([] if partial is None else [partial])) if page.end - len(page.tokens) < length
        ]
        for page in used:
            self._touch(page)
        whole_pages = used[: length // size]
        last = used[len(whole_pages)].number if length % size else None
        windows = {
            window: [pool.scratch] * (first := first_page(length, window, size))
            + [page.windows[window] for page in used[first:]]
            for window, pool in self.groups.items()
        }
        states = None if state is None else state.saved
        return CachedPrefix([page.number for page in whole_pages], last, length, states, branch, windows)

    def _furthest(
        self, root: Root, path: Sequence[Page], partial: Page | None, length: int
    ) -> tuple[int, State | None]:
        """The longest beginning of the first `length` tokens of these pages to go on from: all windows are there, and
        states; and these."""
        pages, state = [*path, *([] if partial is None else [partial])], None
        while length:
            if self.state_rows:
                length, state = self._states(root, path, partial, length)
            if not self.groups or (there := self._with_windows(pages, length)) == length:
                return length, state
            length = there
        return 0, None

    def _with_windows(self, pages: Sequence[Page], length: int) -> int:
        """The longest beginning of the first `length` tokens of these pages after which all windows are there."""
        size, at = self.pool.page_size, length
        while at >= SHORTEST:
            last = -(-at // size)
            gaps = [
                number
                for window in self.groups
                for number in range(first_page(at, window, size), last)
                if window not in pages[number].windows
            ]
            if not gaps:
                return at
            at = max(gaps) * size
        return 0

    def keep(
        self,
        root: Root,
        text: Sequence[int],
        pages: Sequence[int],
        states: SavedStates | None = None,
        windows: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """Remembers the pages of a text, the last one as far as it is written: those who hold it may write behind
        that.

        `states`: of the whole of the text, or of a beginning to which they go back. `windows`: its pages in the layers
        with each window, `scratch` where there is none.
        """
        size, page, text = self.pool.page_size, self._roots.setdefault(root, Page(-1, None, (), 0)), text[: self.limit]
        if len(text) < SHORTEST:
            return
        for start in range(0, len(text), size):
            tokens = tuple(text[start : start + size])
            page = self._with(page, tokens, pages[start // size])
            if len(page.tokens) == len(tokens):
                for window, numbers in (windows or {}).items():
                    self._hold(page, window, numbers[start // size])
        if states is not None and states.earliest <= len(text):
            self._keep_states(page, len(text), states)
        while self._size > self.limit and self._forget_least():
            pass

    def reclaim(self, count: int) -> bool:
        """Whether `count` pages are free, after forgetting as many earlier texts as it takes."""
        while self.pool.available < count:
            if not self._forget_least(free=True):
                return False
        return True

    def _hold(self, page: Page, window: int, number: int) -> None:
        pool = self.groups[window]
        if number != pool.scratch and window not in page.windows:
            pool.hold([number])
            page.windows[window] = number

    def hold_windows(self, windows: Mapping[int, Sequence[int]]) -> None:
        """Keeps pages of the layers with windows until `release_windows`."""
        for window, numbers in windows.items():
            self.groups[window].hold(numbers)

    def release_windows(self, windows: Mapping[int, Sequence[int]]) -> None:
        """The other way."""
        for window, numbers in windows.items():
            self.groups[window].release(numbers)

    def keeps(self, need: Mapping[int, int]) -> bool:
        """Whether a further request may hold so many pages of the layers with each window. MemoryError: not even if it
        runs alone."""
        if not isinstance(self.pool, WindowedPool):
            return True
        for window, count in need.items():
            if count > (room := self.pool.room(window)):
                fault = f"a request needs {count} pages of {room} in the layers with window {window}"
                raise MemoryError(sentence("Engine", fault, "Use shorter drafts, or raise max_running."))
        return self.pool.keeps(need)

    def forget_windows(self, window: int, count: int) -> bool:
        """Whether `count` pages of the layers with a window are free, after giving back as many of earlier texts as it
        takes."""
        pool = self.groups[window]
        while pool.available < count:
            free = (
                page
                for page in self._pages
                if page is not self._reading and window in page.windows and pool.holders(page.windows[window]) == 1
            )
            page = min(free, key=lambda page: page.worth, default=None)
            if page is None:
                return False
            with self._lock:
                if page is not self._reading:
                    pool.release([page.windows.pop(window)])
                    self._age = max(self._age, page.worth)
        return True

    def whole(self, root: Root, text: Sequence[int]) -> list[Page]:
        """The whole pages that a text begins with. Any thread may ask."""
        size, path, page = self.pool.page_size, list[Page](), self._roots.get(root)
        while page and len(text) - page.end >= size:
            if page := page.after.get(tuple(text[page.end : page.end + size])):
                path.append(page)
        return path

    def path(self, root: Root, text: Sequence[int]) -> list[Page]:
        """The pages that a text begins with, and the one with the rest of it, as far as they are kept."""
        path, partial, length = self._walk(root, text)
        return path if partial is None or length < len(text) else [*path, partial]

    def copy(self, page: Page, count: int) -> dict[str, Tensor] | None:
        """K and V of the first tokens of a page, on the CPU; None: it has been forgotten. One other thread may ask."""
        with self._lock:
            if page.number < 0:
                return None
            self._reading = page
        try:
            return _copied(self.pool, page.number, count, "k", "v")
        finally:
            self._reading = None

    def copy_windows(self, page: Page, count: int) -> dict[str, Tensor] | None:
        """The same of the layers with windows; None: not all are there."""
        with self._lock:
            if page.number < 0 or len(page.windows) < len(self.groups):
                return None
            self._reading = page
        try:
            rows: dict[str, Tensor] = {}
            for window, pool in self.groups.items():
                rows |= _copied(pool, page.windows[window], count, *names_of(window))
            return rows
        finally:
            self._reading = None

    def restore(
        self,
        root: Root,
        text: Sequence[int],
        rows: Sequence[dict[str, Tensor]],
        states: tuple[int, SavedStates] | None = None,
        windows: Sequence[dict[str, Tensor] | None] = (),
    ) -> int:
        """Takes K and V of the pages of a text after its `whole` ones, as far as there is memory for them; the last may
        be a part of a page. Returns their tokens.

        `states`: after as many tokens of the text. `windows`: of each of `rows`, those of the layers with windows.
        """
        size, first_pages, new = self.pool.page_size, [page.number for page in self.whole(root, text)], list[int]()
        self.pool.hold(first_pages)
        end = first = len(first_pages) * size
        in_windows = {window: [pool.scratch] * len(first_pages) for window, pool in self.groups.items()}
        try:
            for number, tensors in enumerate(rows):
                if not self.reclaim(1):
                    break
                new += self.pool.allocate(1)
                _write(self.pool, new[-1], tensors, "k", "v")
                end += tensors["k"].shape[1]
                of_windows = windows[number] if number < len(windows) else None
                for window, pool in self.groups.items():
                    has_page = of_windows is not None and self.forget_windows(window, 1)
                    in_windows[window] += pool.allocate(1) if has_page else [pool.scratch]
                    if of_windows is not None and has_page:
                        _write(pool, in_windows[window][-1], of_windows, *names_of(window))
            self.keep(root, text[:end], pages := [*first_pages, *new], windows=in_windows)
            if states is not None and states[0] <= end:
                self.keep(root, text[: states[0]], pages, states[1])
        finally:
            self.pool.release([*first_pages, *new])
            self.release_windows(in_windows)
        return end - first

    def _walk(self, root: Root, text: Sequence[int]) -> tuple[list[Page], Page | None, int]:
        """The whole pages that a text begins with, one that has some of its next tokens, and the tokens in common."""
        size, path = self.pool.page_size, self.whole(root, text)
        page = path[-1] if path else self._roots.get(root)
        if page is None:
            return path, None, 0
        next_tokens = text[page.end : page.end + size]
        most, partial = 0, None
        for tokens, other in page.after.items():
            if (same := _common(next_tokens, tokens)) > most:
                most, partial = same, other
        return path, partial, page.end + most

    def _states(self, root: Root, path: Sequence[Page], partial: Page | None, length: int) -> tuple[int, State | None]:
        """How far states go into the first `length` tokens of the text of these pages, and those that go furthest.
        The page after them may hold states that were taken earlier in the text."""
        nodes = [page for page in (self._roots.get(root), *path, partial) if page is not None]
        for page in (*(nodes[-1].after.values() if nodes else ()), *reversed(nodes)):
            reached = [
                (min(end, length), state) for end, state in page.states.items() if state.saved.earliest <= length
            ]
            if reached:
                return max(reached, key=lambda pair: pair[0])
        return 0, None

    def _with(self, before: Page, tokens: tuple[int, ...], number: int) -> Page:
        """The page with these tokens after another one, or one that begins with them; a new one has this number."""
        if (page := before.after.get(tokens)) is None:
            longer = (other for other in before.after.values() if other.tokens[: len(tokens)] == tokens)
            page = next(longer, None) if len(tokens) < self.pool.page_size else None
        if page is None:
            page = Page(number, before, tokens, before.end + len(tokens))
            shorter = [
                old for old in before.after.values() if not old.after and tokens[: len(old.tokens)] == old.tokens
            ]
            for old in shorter:
                if self._forget(old):
                    page.states |= old.states
                    self.states += len(old.states)
            self.pool.hold([number])
            before.after[tokens] = page
            self.tokens += len(tokens)
        self._touch(page)
        return page

    def _keep_states(self, page: Page, end: int, saved: SavedStates) -> None:
        """Keeps the states after `end` tokens, in whose page they end."""
        if end not in page.states:
            before, at = 0, page
            while not before and at.before is not None:
                before, at = max((old for old in at.states if old < end), default=0), at.before
            rows = (self._row_cost(before) + self._row_cost(end)) / 2 * (end - before)
            page.states[end] = State(saved, rows / self.state_rows)
            self.states += 1
        page.states[end].worth = self._age + page.states[end].cost

    def _row_cost(self, row: int) -> float:
        """Of computing a row, in those of the first one."""
        return 1 + row / self._even

    def _touch(self, page: Page) -> None:
        page.worth = self._age + self._row_cost(page.end)
        self._pages.pop(page, None)
        self._pages[page] = None

    def _forget_least(self, free: bool = False) -> bool:
        """Forgets what is worth least; with `free`, of the pages that no request holds."""
        ends = (page for page in self._pages if not page.after and page is not self._reading)
        page = min(
            (page for page in ends if not (free and self.pool.holders(page.number) > 1)),
            key=lambda page: page.worth,
            default=None,
        )
        if self.states and not free:
            holder, end = min(
                ((holder, end) for holder in self._pages for end in holder.states),
                key=lambda pair: pair[0].states[pair[1]].worth,
            )
            if page is None or holder.states[end].worth < page.worth:
                self._age = holder.states.pop(end).worth
                self.states -= 1
                return True
        if page is None:
            return False
        if self._forget(page):
            self._age = page.worth
            self.forgotten += len(page.tokens)
        return True

    def _forget(self, page: Page) -> bool:
        """Whether a page could be forgotten: not while it is read."""
        assert page.before is not None
        with self._lock:
            if page is self._reading:
                return False
            number, page.number = page.number, -1
            for window, window_page in page.windows.items():
                self.groups[window].release([window_page])
            page.windows = {}
        del self._pages[page], page.before.after[page.tokens]
        self.states -= len(page.states)
        self.tokens -= len(page.tokens)
        self.pool.release([number])
        return True


def _copied(pool: PagePool, page: int, count: int, *names: str) -> dict[str, Tensor]:
    return {
        name: side[:, page, :count].to("cpu", copy=True) for name, side in zip(names, (pool.k, pool.v), strict=True)
    }


def _write(pool: PagePool, page: int, rows: dict[str, Tensor], *names: str) -> None:
    for side, name in zip((pool.k, pool.v), names, strict=True):
        side[:, page, : rows[name].shape[1]] = rows[name].to(side.device)


def _common(text: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens are the same."""
    different = (at for at, (token, other_token) in enumerate(zip(text, other)) if token != other_token)
    return next(different, min(len(text), len(other)))
