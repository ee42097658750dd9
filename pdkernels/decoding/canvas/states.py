"""Which states of a canvas or a block may come next, so that they can be computed before their step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations

_SKIP = 1.5  # a group that is left out costs as much as so many steps
_MOST = 7  # groups of a set


@cache
def ranked_sets(count: int) -> tuple[tuple[int, ...], ...]:
    """The `count` most likely states, each as the groups that are filled by then: numbers of an expected order.

    >>> ranked_sets(4)
    ((0,), (0, 1), (1,), (0, 1, 2))
    """
    sets = [groups for size in range(1, _MOST + 1) for groups in combinations(range(_MOST), size)]
    costs = {groups: len(groups) + _SKIP * (sum(groups) - sum(range(len(groups)))) for groups in sets}
    return tuple(sorted(sets, key=lambda groups: (costs[groups], groups))[:count])


def groups_of(expected: Sequence[int], quotas: Sequence[int]) -> Iterator[Sequence[int]]:
    """The positions that each of the coming steps is expected to fill."""
    first = 0
    for quota in quotas:
        if first + quota > len(expected):
            return
        yield expected[first : first + quota]
        first += quota
