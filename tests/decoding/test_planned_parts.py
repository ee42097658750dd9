"""Parser, schedule and lengths of planned diffusion, against the reference on random arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkernels.decoding.planned import _chunks
from pdkernels.decoding.planned.outline import BadPlan, fitted, items_by_last_number, text_pieces
from pdkernels.reference import planned as reference
from tests.support.plans import CLOSE, OPEN, SYNC, TAGS

W, X = 10, 11  # words


def numbers(parse: Callable[..., Any], tokens: list[int]) -> list[int] | str:
    try:
        return [item.number for item in parse(tokens, TAGS)]
    except (BadPlan, reference.BadPlan) as bad:
        return str(bad)


def item(*tokens: int) -> list[int]:
    return [OPEN, *tokens, CLOSE]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (item(W, 4), [4]),
        (item(W, 1, 2), [12]),
        (item(W, 1, 0, 0), [100]),
        (item(W, X, 1, X, 4), [4]),
        (item(W, X, 1, 0, X, 3), [3]),
        (item(W, 0), [0]),
        (item(W), "no number"),
        ([OPEN, W, 4], "not closed"),
        ([OPEN, W, 4, OPEN, W, 2, CLOSE], "nested"),
        ([W, *item(W, 4), X, *item(X, 2), W], [4, 2]),
        ([*item(W, 9), SYNC, *item(W, 4)], [9, 4]),
        ([W, CLOSE, *item(W, 4)], "not opened"),
        ([], []),
        (item(3), [3]),
        (item(W, 3, X), [3]),
    ],
)
def test_the_parsers(tokens: list[int], expected: Any) -> None:
    for parse in (items_by_last_number, reference.parse_last_number):
        assert numbers(parse, tokens) == expected


@given(tokens=st.lists(st.sampled_from([OPEN, CLOSE, SYNC, 0, 1, 2, W, X]), max_size=16))
def test_the_parser_equals_the_reference(tokens: list[int]) -> None:
    items, expected = numbers(items_by_last_number, tokens), numbers(reference.parse_last_number, tokens)
    assert items == expected
    if isinstance(items, list):
        topics = [each.topic for each in reference.parse_last_number(tokens, TAGS)]
        assert [each.topic for each in items_by_last_number(tokens, TAGS)] == topics


def commits(masks: int, steps: int) -> list[int]:
    found: list[int] = []
    while masks:
        found.append(_chunks.quota(masks, len(found), steps))
        assert found[-1] == reference.quota(masks, len(found) - 1, steps) >= 1
        masks -= found[-1]
    return found


def test_a_step_per_token_commits_one_each() -> None:
    for longest in range(1, 40):
        for masks in range(1, longest + 1):
            assert commits(masks, longest) == [1] * masks


def test_even_shares() -> None:
    assert commits(40, 20) == [2] * 20 and commits(40, 30) == [2] * 10 + [1] * 20
    assert commits(7, 3) == [3, 2, 2] and commits(2, 5) == [1, 1]


@given(masks=st.integers(0, 60), longest=st.integers(0, 60), ratio=st.floats(0.01, 1.0))
def test_the_schedule_equals_the_reference(masks, longest, ratio) -> None:
    steps = _chunks.steps_of(longest, ratio)
    assert steps == reference.steps_of(longest, ratio) and (steps >= 1) == (longest >= 1)
    if masks <= longest:
        shares = commits(masks, steps)
        assert sum(shares) == masks and len(shares) <= steps


@given(lengths=st.lists(st.integers(0, 30) | st.just(10**9), max_size=6), room=st.integers(0, 80))
def test_lengths_that_fit(lengths: list[int], room: int) -> None:
    cut = fitted(lengths, room)
    assert cut == reference.fitted(lengths, room)
    if cut is not None and cut != lengths:
        assert sum(cut) + 2 * len(cut) == room


def test_text_without_plans() -> None:
    begin, end, pad = TAGS.chunk_open, TAGS.chunk_close, TAGS.pad
    assert text_pieces([W, X, 3], TAGS, ()) == [[W, X, 3]]
    assert text_pieces([*item(W, 1), begin, pad, pad, end], TAGS, ()) == []
    assert text_pieces([W, *item(X, 1), X, begin, W, pad, W, end, SYNC, 3], TAGS, ()) == [[W], [X], [W, W], [3]]
    assert text_pieces([W, 15, X], TAGS, {15}) == [[W, X]]
