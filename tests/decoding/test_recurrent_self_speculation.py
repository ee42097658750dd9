"""Few recurrences draft, all of them verify: the cycles of the plain reference, and when the tokens are those of static decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels.decoding import generate
from pdkernels.reference.recurrent_self_speculation import recurrent_self_speculation
from tests.support.base import streams
from tests.support.recurrent import RECURRENCES, draws, init_of, models, page_sizes, prompts, seeds, token

METHOD = "recurrent_self_speculation"
BATCH = [[3, 1, 4], [1], [5, 9]]


@settings(max_examples=60, deadline=None)
@given(
    weights=st.tuples(st.sampled_from([1, 2]), st.sampled_from([0.3, 1.0])),
    batch=prompts,
    limit=st.integers(0, 12),
    options=st.fixed_dictionaries(
        {},
        optional=dict(block_size=st.integers(0, 5), draft_recurrences=st.integers(1, 4), recurrences=st.integers(1, 8)),
    ),
    ends=st.lists(token, max_size=2),
    draw=draws,
    seed=seeds,
    page_size=page_sizes,
)
def test_equals_the_reference(weights, batch, limit, options, ends, draw, seed, page_size) -> None:
    model, plain = models(*weights)
    common = dict(zip(("temperature", "top_p", "min_p", "top_k"), draw, strict=True)) | dict(end_tokens=ends, seed=seed)
    result = generate(model, batch, METHOD, max_new_tokens=limit, trace=True, page_size=page_size, **common, **options)
    numbers = {"recurrences": RECURRENCES, **options}
    expected = [
        recurrent_self_speculation(plain, prompt, limit, init=init_of(own["seed"]), **own, **numbers)
        for prompt, own in streams(batch, common)
    ]
    assert [tokens.tolist() for tokens in result.tokens] == [one.tokens for one in expected]
    assert [[tuple(step) for step in steps] for steps in result.stats.trace] == [
        [(step.draft, step.predictions, step.accepted) for step in one.trace] for one in expected
    ]
    if len(batch) == 1:
        assert (result.stats.forwards, result.stats.recurrences) == (expected[0].forwards, expected[0].recurrences)
    if limit:
        assert result.stats.tokens_per_forward == sum(len(one.tokens) for one in expected) / sum(
            one.forwards for one in expected
        )


def same_as_static(weights: tuple[int, float], temperature: float, **options: Any) -> tuple[int, int]:
    """Accepted draft tokens and cycles of a generation whose tokens are those of static decoding."""
    model, depth = models(*weights)[0], options["recurrences"]
    common = {"max_new_tokens": 12, "temperature": temperature}
    static = generate(model, BATCH, "recurrent_static", recurrences=depth, **common)
    result = generate(model, BATCH, METHOD, **common, **options)
    assert all(map(torch.equal, result.tokens, static.tokens))
    accepted = [count for counts in result.stats.accepted for count in counts]
    return sum(accepted) - len(accepted), len(accepted)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_states_have_converged_the_tokens_are_those_of_static_decoding(temperature: float) -> None:
    accepted, _ = same_as_static((2, 0.1), temperature, recurrences=40, draft_recurrences=2, block_size=4)
    assert accepted > 0


def test_one_recurrence_and_no_draft_are_static_decoding_by_construction() -> None:
    accepted, cycles = same_as_static((2, 1.0), 0.0, recurrences=1, draft_recurrences=1, block_size=3)
    assert accepted > cycles  # every draft is right
    assert same_as_static((2, 1.0), 0.0, recurrences=RECURRENCES, block_size=0) == (0, 33)


def test_a_draft_of_all_recurrences_from_converged_states_is_always_right() -> None:
    accepted, cycles = same_as_static((2, 0.1), 0.0, recurrences=40, draft_recurrences=40, block_size=3)
    assert (accepted, cycles) == (8 * 3, 9)
