"""The fast tests have a part of a large product of cases; the others are slow.

    @pytest.mark.covering                 every value of each parameter occurs in some fast case
    @pytest.mark.covering(2)              every pair of values of two parameters that occurs at all
    @pytest.mark.covering(of=["method"])  every value of these parameters, each with some values of the others
    @pytest.mark.covering(share=3)        every third of these. Which ones depends on the name of the test: where many tests go through
                                          all methods, each has methods of every kind, and each method has a third of the tests

Cases are chosen in order, always the first of those that bring most that is new: the same in every process. Those that are slow
anyway are not among them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import Any
from zlib import crc32

import pytest


def covering(cases: Sequence[dict[str, Any]], strength: int = 1) -> list[int]:
    """The numbers of cases in which every combination of `strength` parameters' values occurs that occurs in any.

    >>> covering([{"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 2, "b": 1}, {"a": 2, "b": 2}])
    [0, 3]
    """
    held = [set(combinations(sorted((name, repr(value)) for name, value in case.items()), strength)) for case in cases]
    chosen, left, missing = [], list(range(len(cases))), set().union(*held)
    while missing:
        best = max(left, key=lambda number: (len(held[number] & missing), -number))
        chosen.append(best)
        left.remove(best)
        missing -= held[best]
    return sorted(chosen)


def mark_the_rest_slow(items: Sequence[pytest.Item]) -> None:
    functions = defaultdict(list)
    for item in items:
        if item.get_closest_marker("covering") and hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            functions[item.nodeid.partition("[")[0]].append(item)
    for cases in functions.values():
        marker = cases[0].get_closest_marker("covering")
        names = marker.kwargs.get("of", cases[0].callspec.params)
        chosen = covering([{name: case.callspec.params[name] for name in names} for case in cases], *marker.args)
        share = marker.kwargs.get("share", 1)
        fast = set(chosen[crc32(cases[0].originalname.encode()) % share :: share] or chosen)
        for number, case in enumerate(cases):
            if number not in fast:
                case.add_marker(pytest.mark.slow)
