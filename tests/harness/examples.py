"""The fast tests draw a part of the examples of a property; `make test-all` draws all that its `max_examples` asks for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis.internal.detection import is_hypothesis_test

# Of each property: this part, and so many at least.
SHARE = 0.1
LEAST = 6


def number_of_fast(examples: int) -> int:
    """
    >>> [number_of_fast(number) for number in (3, 12, 60, 1000)]
    [3, 6, 6, 100]
    """
    return max(min(examples, LEAST), round(SHARE * examples))


def draw_a_part(items: Sequence[pytest.Item]) -> None:
    """Changes the settings of all properties among the tests."""
    tests = [test for item in items if is_hypothesis_test(test := getattr(item, "obj", None))]
    functions = {getattr(test, "__func__", test) for test in tests}
    for function in functions:
        own: settings | None = getattr(function, "_hypothesis_internal_use_settings", None)
        if own is not None:  # a state machine's are those of its class
            fewer = settings(own, max_examples=number_of_fast(own.max_examples))
            function._hypothesis_internal_use_settings = fewer
