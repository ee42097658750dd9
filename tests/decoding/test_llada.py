"""LLaDA's sampler: tokens, forwards and filled positions of the plain reference, alone and in a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels.decoding import generate
from pdkernels.reference.llada import llada
from tests.harness.sessions import open_session, steps_of
from tests.support import masked_promises as shared
from tests.support.base import Plain, seeds, streams
from tests.support.masked import MASK, Scripted, hashed, prompts, small_masked
from tests.support.masked_promises import assert_same

METHOD = "llada"


def reference(model: Any, batch: list[list[int]], limit: int, **options: Any) -> list[Any]:
    return [
        llada(Plain(model), prompt, limit, mask_token=MASK, **options) for prompt, options in streams(batch, options)
    ]


@settings(max_examples=50, deadline=None)
@given(
    model=st.tuples(st.integers(0, 2), st.sampled_from(["own", "own", "next"])),
    batch=prompts,
    limit=st.integers(1, 10),
    block_size=st.sampled_from([None, None, 1, 3, 4]),
    per_block=st.sampled_from([None, 1, 2, 5]),
    options=st.fixed_dictionaries(
        dict(
            temperature=st.sampled_from([0.5, 0.0, 1.5]),
            guidance=st.sampled_from([0, 0.5, 2.0]),
            no_end=st.booleans(),
            remainder=st.sampled_from(["first", "spread"]),
        )
    ),
    order=st.sampled_from([{"late_end": True}, {}, {"remasking": "random"}]),
    ends=st.lists(st.integers(0, MASK - 1), max_size=3),
    seed=seeds,
)
def test_equals_the_reference(model, batch, limit, block_size, per_block, options, order, ends, seed) -> None:
    blocks = -(-limit // (block_size or max(limit, 1)))
    steps = None if per_block is None else per_block * max(blocks, 1)
    options = {"block_size": block_size, "steps": steps, "end_tokens": ends, "seed": seed} | options | order
    transformer = small_masked(*model)
    result = generate(transformer, batch, METHOD, max_new_tokens=limit, trace=True, **options)
    assert_same(result, reference(transformer, batch, limit, **options))


@pytest.mark.parametrize("predicts", ["own", "next"])
@pytest.mark.parametrize(("block_size", "steps"), [(None, 4), (4, 6), (None, None), (5, 3)])
def test_quotas_on_a_scripted_model(block_size: int | None, steps: int | None, predicts: str) -> None:
    """Each forward fills its share, and the head runs for the open positions of the block only."""
    batch, limit = [[1, 2, 3], [4]], 11
    model = Scripted(hashed(5), predicts)
    result = generate(model, batch, METHOD, max_new_tokens=limit, block_size=block_size, steps=steps, trace=True)
    assert_same(result, reference(Scripted(hashed(5), predicts), batch, limit, block_size=block_size, steps=steps))
    shares = {(None, 4): [3, 3, 3, 2], (4, 6): [2, 2, 2, 2, 2, 1], (None, None): [1] * 11, (5, 3): [5, 5, 1]}
    assert result.stats.accepted == [shares[block_size, steps]] * 2
    assert result.stats.tokens_per_forward == 11 / result.stats.forwards
    size = block_size or limit
    open_ = [min(size, limit - first) for first in range(0, limit, size)]
    expected = []
    for share in result.stats.accepted[0]:
        expected.append(open_[0])
        open_[0] -= share
        open_ = open_[1:] if open_[0] == 0 else open_
    assert model.head_rows == expected
    assert model.visible == [[14, 12]] * result.stats.forwards


@pytest.mark.parametrize(("block_size", "steps"), [(None, 4), (4, 6), (None, None), (5, 3), (None, 30)])
def test_a_spread_remainder_is_equation_6(block_size: int | None, steps: int | None) -> None:
    """Of a canvas, of one whose prompt has masks, and of the steps of a running batch."""
    batch, limit = [[1, 2, 3], [4]], 11
    options: dict[str, Any] = {"block_size": block_size, "steps": steps, "remainder": "spread"}
    result = generate(Scripted(hashed(5)), batch, METHOD, max_new_tokens=limit, trace=True, **options)
    assert_same(result, reference(Scripted(hashed(5)), batch, limit, **options))
    shares = {(None, 4): [2, 3, 3, 3], (4, 6): [2, 2, 2, 2, 1, 2], (5, 3): [5, 5, 1]}.get((block_size, steps), [1] * 11)
    assert result.stats.accepted == [shares] * 2
    filled = generate(Scripted(hashed(5)), [[1] + [MASK] * limit], METHOD, max_new_tokens=0, infill=True, **options)
    assert filled.stats.accepted == [shares]
    largest = open_session(Scripted(hashed(5)), [[0]], limit, ())[0]
    assert steps_of(METHOD, largest, **options).schedule[:, 2].tolist() == shares


def test_equal_confidences_fill_from_the_left() -> None:
    model = Scripted(lambda text: [(7, 0.5)] * len(text))
    result = generate(model, [1, 2], METHOD, max_new_tokens=6, steps=3, trace=True)
    assert [sorted(step.committed) for step in result.stats.trace[0]] == [[2, 3], [4, 5], [6, 7]]


def test_blocks_of_one_position_go_from_left_to_right() -> None:
    """The degenerate setting: one position per forward, in order."""
    model = small_masked(0)
    result = generate(model, [3, 1], METHOD, max_new_tokens=7, block_size=1, trace=True)
    assert [list(step.committed) for step in result.stats.trace[0]] == [[position] for position in range(2, 9)]


def test_one_step_is_the_argmax_of_one_forward() -> None:
    model = small_masked(0)
    result = generate(model, [3, 1], METHOD, max_new_tokens=7, steps=1)
    logits = model(torch.tensor([[3, 1] + [MASK] * 7]))[0, 2:]
    logits[:, MASK] = -torch.inf
    assert result.tokens.tolist() == logits.argmax(-1).tolist() and result.stats.forwards == 1


END = 4


def test_end_tokens_late_or_never() -> None:
    """The most probable token is the end token everywhere: with late_end it comes last, with no_end never."""

    def script(text: list[int]) -> list[tuple[int, float]]:
        return [(END if position % 2 else 7, 0.5 + 0.01 * position) for position in range(len(text))]

    model = Scripted(script)
    options: dict[str, Any] = {"max_new_tokens": 6, "end_tokens": (END,), "trace": True}
    first = generate(model, [1], METHOD, **options)
    assert [list(step.committed)[0] for step in first.stats.trace[0]] == [6, 5, 4, 3, 2, 1]
    late = generate(model, [1], METHOD, late_end=True, **options)
    assert [list(step.committed)[0] for step in late.stats.trace[0]] == [6, 4, 2, 1]
    assert late.tokens.tolist() == [END] and late.stats.accepted == [[1, 1, 1, 1]]
    never = generate(model, [1], METHOD, no_end=True, **options)
    assert END not in never.tokens.tolist() and len(never.tokens) == 6


def test_guidance_of_zero_is_no_guidance_and_more_of_it_changes_tokens() -> None:
    model = small_masked(1)
    plain, zero, strong = (
        generate(model, [[3, 1, 4], [5]], METHOD, max_new_tokens=10, **options)
        for options in ({}, {"guidance": 0}, {"guidance": 3.0})
    )
    assert all(map(torch.equal, plain.tokens, zero.tokens))
    assert not all(map(torch.equal, plain.tokens, strong.tokens))
    assert strong.stats.forwards == plain.stats.forwards


def test_no_read_where_the_schedule_alone_decides() -> None:
    """One for the tokens and one for the trace, at the end."""
    options: dict[str, Any] = {"max_new_tokens": 12, "steps": 6}
    assert shared.reads_of_the_device(Scripted(hashed(2)), [[1, 2], [5]], METHOD, **options) == 2


def test_errors() -> None:
    shared.assert_errors(
        METHOD,
        [
            ({"block_size": 0}, "block_size must be at least 1, got 0."),
            ({"remainder": "last"}, "remainder must be one of 'first', 'spread', got 'last'."),
            (
                {"remainder": "spread", "revise": 0.5},
                "remainder must be 'first' with revise, whose shares are equal, got spread.",
            ),
            ({"block_size": 2.0}, "TypeError: block_size must be an int, got float."),
            ({"steps": 0}, "steps must be at least 1, got 0."),
            ({"steps": 3, "block_size": 2}, "steps must be a multiple of the number of blocks (2), got 3."),
            ({"remasking": "low"}, "remasking must be one of 'low_confidence', 'random', got 'low'."),
            ({"guidance": -1}, "guidance must be at least 0, got -1."),
            ({"guidance": float("inf")}, "guidance must be finite, got inf."),
            ({"guidance": "strong"}, "TypeError: guidance must be a number, got str."),
            ({"no_end": 1}, "TypeError: no_end must be a bool, got int."),
            ({"late_end": None}, "TypeError: late_end must be a bool, got NoneType."),
            (
                {"late_end": True, "remasking": "random"},
                "late_end must be False with remasking='random', which ignores confidence, got True.",
            ),
            ({"temperature": -1.0}, "temperature must be finite and at least 0, got -1.0."),
            ({"seed": 1.5}, "TypeError: seed must be an int or a list of ints, got float."),
            ({"mask_token": 13}, "mask_token must be an id in 0 .. 12, got 13."),
        ],
    )
