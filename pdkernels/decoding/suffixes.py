"""Suffix automata over tokens: the longest end of a text that occurred before, in a few steps per token however long
texts are.

Source: Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985); as drafter: Oliaro et al.,
"SuffixDecoding" (arXiv 2411.04975). A state stands for all strings that occur at the same places. The suffix link of
the state of a whole text is that of the longest suffix that also occurs elsewhere, so the match is there when the token
is added. The plain form is reference/suffix.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from threading import Lock
from typing import Any

from pdkernels._threads import tell_forks
from pdkernels._validation import check, check_type

LEAST = 2
"""Tokens of a match; one is too weak."""
GROWTH = 3
"""Tokens drafted per matching token."""

_END = -1  # after each text
_RENEWED = 64  # shorter matches whose place is renewed with every token


class SuffixIndex:
    """The strings of several texts, and where each occurred last.

    >>> index = SuffixIndex()
    >>> index.begin()
    >>> for token in (1, 2, 3, 1, 2):
    ...     index.append(token)
    >>> index.length, index.followed(6)
    (2, [3, 1, 2, 3, 1, 2])
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link, self._len, self._end = [-1], [0], [0]
        self._last = 0
        self.length, self.place = 0, 0
        """Of the text that is being written: tokens of the longest suffix that occurred before, and the index after it
        there."""

    def begin(self) -> None:
        """Begins another text."""
        if self.tokens and self.tokens[-1] != _END:
            self.tokens.append(_END)
        self._last, self.length, self.place = 0, 0, 0

    def append(self, token: int) -> None:
        """Lengthens the text."""
        state, last = self._last, self._last
        for _ in range(_RENEWED):
            if state <= 0:
                break
            self._end[state] = len(self.tokens)  # the strings that end here are followed by this token
            state = self._link[state]
        self.tokens.append(token)
        following = self._next[last].get(token)
        if following is not None:  # the whole text so far is a part of an earlier one
            self._last = match = self._split(last, following, token)
        else:
            self._last = self._new(self._len[last] + 1, {})
            while last >= 0 and token not in self._next[last]:
                self._next[last][token] = self._last
                last = self._link[last]
            self._link[self._last] = 0 if last < 0 else self._split(last, self._next[last][token], token)
            match = self._link[self._last]
        self.length, self.place = self.match(match, self._len[match])

    def match(self, state: int, length: int) -> tuple[int, int]:
        """Of the strings of a state, `length` tokens long, or of the longest of their suffixes that something followed:
        the length, and the index after the last occurrence; zeros if there is none."""
        while state > 0 and self._end[state] == 0:
            state = self._link[state]
            length = self._len[state]
        return (length, self._end[state]) if state > 0 else (0, 0)

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The state and the length of the longest suffix of another text that occurs here, after one more token."""
        while state > 0 and token not in self._next[state]:
            state = self._link[state]
            length = self._len[state]
        state = self._next[state].get(token, 0)
        return (state, length + 1) if state else (0, 0)

    def after(self, place: int, count: int) -> list[int]:
        """At most `count` tokens of a text from `place` on."""
        following = self.tokens[place : place + count]
        return following[: following.index(_END)] if _END in following else following

    def followed(self, count: int) -> list[int]:
        """`count` tokens that followed the match in the text that is being written; at its end they go on with
        themselves."""
        following = self.after(self.place, count) if self.length else []
        return (following * -(-count // len(following)))[:count] if following else []

    def _new(self, length: int, following: dict[int, int]) -> int:
        self._next.append(following)
        self._link.append(-1)
        self._len.append(length)
        self._end.append(0)
        return len(self._len) - 1

    def _split(self, before: int, state: int, token: int) -> int:
        """The state of the longest string of `before` and `token`, which until now may have shared `state` with longer
        ones."""
        length = self._len[before] + 1
        if self._len[state] == length:
            return state
        shorter = self._new(length, dict(self._next[state]))
        self._link[shorter], self._end[shorter] = self._link[state], self._end[state]
        self._link[state] = shorter
        while before >= 0 and self._next[before].get(token) == state:
            self._next[before][token] = shorter
            before = self._link[before]
        return shorter


class SuffixPool:
    """Earlier texts that the method "suffix" drafts from. Generations that are given the pool add their texts when they
    are done.

    Args:
        max_tokens: about how many tokens it keeps: half of them may be dropped at a time, the oldest first.

    A pool may be shared by threads.

    Example:
        >>> import pdkernels as pd
        >>> pool = pd.decoding.SuffixPool()
        >>> pool.add([1, 2, 3, 4, 5, 6])
        >>> pool.tokens
        6
    """

    def __init__(self, max_tokens: int = 1_000_000) -> None:
        check_type(type(max_tokens) is int, "decoding.SuffixPool", "max_tokens", "be an int", type(max_tokens).__name__)
        check(max_tokens >= 1, "decoding.SuffixPool", "max_tokens", "be at least 1", max_tokens)
        self.max_tokens = max_tokens
        self.lock = Lock()
        self._new, self._old = SuffixIndex(), SuffixIndex()
        tell_forks(self)

    def __reduce__(self) -> tuple[Any, ...]:
        with self.lock:  # while no text is half added
            return _pool_of, (self.max_tokens, *copy.deepcopy(self.indexes))

    def _after_fork(self) -> None:
        # A thread that held the lock may have been in the middle of a change.
        if self.lock.locked():
            self.__init__(self.max_tokens)  # type: ignore[misc]

    @property
    def tokens(self) -> int:
        """How many tokens it holds, with one more between two texts."""
        return len(self._new.tokens) + len(self._old.tokens)

    def add(self, tokens: Iterable[int]) -> None:
        """Adds a text."""
        with self.lock:
            if len(self._new.tokens) > self.max_tokens // 2:
                self._old, self._new = self._new, SuffixIndex()
            self._new.begin()
            for token in tokens:
                self._new.append(int(token))

    @property
    def indexes(self) -> tuple[SuffixIndex, SuffixIndex]:
        """The newer and the older half."""
        return self._new, self._old


def _pool_of(max_tokens: int, newer: SuffixIndex, older: SuffixIndex) -> SuffixPool:
    pool = SuffixPool(max_tokens)
    pool._new, pool._old = newer, older
    return pool


class Reader:
    """A text that is matched with a pool, while it grows.

    >>> pool = SuffixPool()
    >>> pool.add([7, 1, 2, 3, 4])
    >>> reader = Reader(pool)
    >>> for token in (9, 1, 2):
    ...     reader.append(token)
    >>> reader.draft(9)
    [3, 4]
    """

    def __init__(self, pool: SuffixPool | None) -> None:
        self.own = SuffixIndex()
        self._pool, self._known = pool, -1
        self._states: list[tuple[SuffixIndex, int, int]] = []

    def append(self, token: int) -> None:
        """Lengthens the text."""
        self.own.append(token)
        if self._pool is not None:
            with self._pool.lock:
                self._follow(self._pool, token)

    def _follow(self, pool: SuffixPool, token: int) -> None:
        if pool.tokens != self._known:  # others have added texts: states may have been split
            self._known = pool.tokens
            self._states = [(index, 0, 0) for index in pool.indexes]
            text = self.own.tokens
        else:
            text = [token]
        for number, (index, state, length) in enumerate(self._states):
            for each in text:
                state, length = index.step(state, length, each)
            self._states[number] = index, state, length

    def draft(self, count: int) -> list[int]:
        """At most `count` tokens that followed the longest match: in the text itself, or else in the pool's newer or
        older texts.

        A match of n tokens drafts 3 n; one of a single token drafts nothing.
        """
        length, tokens = self.own.length, self.own.followed(min(count, GROWTH * self.own.length))
        if self._pool is not None:
            with self._pool.lock:
                for index, state, matched in self._states:
                    matched, place = index.match(state, matched)
                    if matched > length:
                        length, tokens = matched, index.after(place, min(count, GROWTH * matched))
        return tokens if length >= LEAST else []
