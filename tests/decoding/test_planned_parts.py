"""Parsers, schedules and lengths of planned diffusion: the released tables, and the reference on random arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.papers.released import plain_planned
from bench.papers.released import planned as released
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
    ("tokens", "published", "last"),
    [
        (item(W, 4), [4], [4]),
        (item(W, 1, 2), [12], [12]),
        (item(W, 1, 0, 0), [10], [100]),
        (item(W, X, 1, X, 4), [1], [4]),
        (item(W, X, 1, 0, X, 3), [10], [3]),
        (item(W, 0), [0], [0]),
        (item(W), "no number", "no number"),
        ([OPEN, W, 4], [], "not closed"),
        ([OPEN, W, 4, OPEN, W, 2, CLOSE], [4], "nested"),
        ([W, *item(W, 4), X, *item(X, 2), W], [4, 2], [4, 2]),
        ([*item(W, 9), SYNC, *item(W, 4)], [4], [9, 4]),
        ([W, CLOSE, *item(W, 4)], [4], "not opened"),
        ([], [], []),
        (item(3), [3], [3]),
        (item(W, 3, X), [3], [3]),
    ],
)
def test_the_parsers(tokens: list[int], published: Any, last: Any) -> None:
    for parse in (released.items_as_released, plain_planned.released_items):
        assert numbers(parse, tokens) == published
    for parse in (items_by_last_number, reference.parse_last_number):
        assert numbers(parse, tokens) == last


@given(tokens=st.lists(st.sampled_from([OPEN, CLOSE, SYNC, 0, 1, 2, W, X]), max_size=16))
def test_parsers_equal_the_reference(tokens: list[int]) -> None:
    for mine, plain in (
        (released.items_as_released, plain_planned.released_items),
        (items_by_last_number, reference.parse_last_number),
    ):
        found, expected = numbers(mine, tokens), numbers(plain, tokens)
        assert found == expected
        if isinstance(found, list):
            assert [each.topic for each in mine(tokens, TAGS)] == [each.topic for each in plain(tokens, TAGS)]


SCHEDULES: dict[str, tuple[Any, Any]] = {"even": (_chunks, reference), "released": (released, plain_planned)}


def commits(masks: int, steps: int, schedule: str) -> list[int]:
    found: list[int] = []
    ours, plain = SCHEDULES[schedule]
    while masks:
        found.append(ours.quota(masks, len(found), steps))
        assert found[-1] == plain.quota(masks, len(found) - 1, steps) >= 1
        masks -= found[-1]
    return found


@pytest.mark.parametrize(
    ("ratio", "steps", "longest", "middle"),
    [
        (1.0, 40, [1] * 40, [1] * 20),
        (0.75, 30, [1] * 21 + [2] * 8 + [3], [1] * 20),
        (0.5, 20, [1] + [2] * 18 + [3], [1] * 20),
        (0.25, 10, [3] + [4] * 8 + [5], [1] + [2] * 8 + [3]),
    ],
)
def test_the_released_schedule(ratio: float, steps: int, longest: list[int], middle: list[int]) -> None:
    """Chunks of 40, 20 and 10 tokens."""
    assert released.steps_of(40, ratio) == steps
    assert commits(40, steps, "released") == longest
    assert commits(20, steps, "released") == middle
    assert commits(10, steps, "released") == [1] * 10


def test_a_step_per_token_commits_the_same_with_both_schedules() -> None:
    for longest in range(1, 40):
        for masks in range(1, longest + 1):
            assert commits(masks, longest, "even") == commits(masks, longest, "released") == [1] * masks


def test_even_shares() -> None:
    assert commits(40, 20, "even") == [2] * 20 and commits(40, 30, "even") == [2] * 10 + [1] * 20
    assert commits(7, 3, "even") == [3, 2, 2] and commits(2, 5, "even") == [1, 1]


@given(
    masks=st.integers(0, 60),
    longest=st.integers(0, 60),
    ratio=st.floats(0.01, 1.0),
    schedule=st.sampled_from(list(SCHEDULES)),
    step=st.integers(0, 70),
    refused=st.integers(0, 80),
)
def test_schedules_equal_the_reference(masks, longest, ratio, schedule, step, refused) -> None:
    ours, plain = SCHEDULES[schedule]
    steps = ours.steps_of(longest, ratio)
    assert steps == plain.steps_of(longest, ratio) and (steps >= 1) == (longest >= 1)
    if masks <= longest:
        found = commits(masks, steps, schedule)
        assert sum(found) == masks and len(found) <= steps
    if masks:
        looked_at = released.candidates(masks, step, steps, refused)
        assert 1 <= looked_at == plain_planned.threshold_quota(masks, step, steps, refused) <= masks


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
