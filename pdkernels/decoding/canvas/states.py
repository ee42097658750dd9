"""Which states of a canvas or a block may come next, so that they can be computed before their step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations

from pdkernels._validation import check

MOST_STATES = 64
_SKIP = 1.5  # a group that is left out costs as much as so many steps
_MOST = 7  # groups of a set


def checked_states(op: str, speculate: int) -> int:
    """The number of further states that a method may be asked for."""
    valid = type(speculate) is int and 0 <= speculate <= MOST_STATES
    check(valid, op, "speculate", f"be an int from 0 to {MOST_STATES}", speculate)
    return speculate


@cache
def ranked_sets(count: int) -> tuple[tuple[int, ...], ...]:
    """The `count` most likely states, each as the groups that are filled by then: numbers of an expected order.

    >>> ranked_sets(4)
    ((0,), (0, 1), (1,), (0, 1, 2))
    """
    sets = [groups for size in range(1, _MOST + 1) for groups in combinations(range(_MOST), size)]
    costs = {groups: len(groups) + _SKIP * (sum(groups) - sum(range(len(groups)))) for groups in sets}
    return tuple(sorted(sets, key=lambda groups: (costs[groups], groups))[:count])


def groups_of(expected: Sequence[tuple[int, int]], quotas: Sequence[int]) -> Iterator[Sequence[tuple[int, int]]]:
    """The positions that each of the coming steps is expected to fill."""
    first = 0
    for quota in quotas:
        if first + quota > len(expected):
            return
        yield expected[first : first + quota]
        first += quota


def following(
    text: Sequence[int], places: Sequence[int], tokens: Sequence[int], scores: Sequence[float], mask: int
) -> list[tuple[int, int]]:
    """Place and token of the guesses for masks of a text, the surest first.

    >>> following([9, 4, 9], places=[0, 1, 2, -1], tokens=[5, 6, 7, 0], scores=[0.2, 0.9, 0.3, 0.0], mask=9)
    [(2, 7), (0, 5)]
    """
    left = [(-score, at, token) for at, token, score in zip(places, tokens, scores) if at >= 0 and text[at] == mask]
    return [(at, token) for _, at, token in sorted(left)]


def most_likely(
    text: tuple[int, ...], expected: Sequence[tuple[int, int]], quotas: Sequence[int], count: int
) -> list[tuple[int, ...]]:
    """A text, and others that may follow it if the coming steps fill so many places each: at most `count` in all.

    >>> most_likely((9, 4, 9), [(2, 7), (0, 5)], quotas=[1, 1], count=4)
    [(9, 4, 9), (9, 4, 7), (5, 4, 7), (5, 4, 9)]
    """
    groups, texts = list(groups_of(expected, quotas)), [text]
    for chosen in ranked_sets(4 * count):
        if len(texts) == count:
            break
        if chosen[-1] < len(groups):
            filled = dict(pair for group in chosen for pair in groups[group])
            texts.append(tuple(filled.get(place, token) for place, token in enumerate(text)))
    return texts
