"""Adaptive exits: the recurrences, the measured values and the tokens of the plain reference, alone and in a batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels.decoding import generate
from pdkernels.reference.recurrent_adaptive import THRESHOLDS, recurrent_adaptive
from tests.support.base import streams
from tests.support.recurrent import RECURRENCES, draws, init_of, models, page_sizes, prompts, seeds, token

METHOD = "recurrent_adaptive"
BATCH = [[3, 1, 4], [1], [5, 9]]


@settings(max_examples=60, deadline=None)
@given(
    weights=st.tuples(st.sampled_from([1, 2]), st.sampled_from([0.3, 1.0])),
    batch=prompts,
    limit=st.integers(0, 8),
    criterion=st.sampled_from(sorted(THRESHOLDS)),
    options=st.fixed_dictionaries(
        {},
        optional={
            "threshold": st.sampled_from([0, 1e-3, 0.05, 0.5, 2]),
            "max_recurrences": st.integers(1, 9),
            "min_recurrences": st.integers(0, 4),
            "check_every": st.integers(1, 4),
            "first_check": st.integers(1, 5),
            "recurrences": st.integers(1, 8),
        },
    ),
    ends=st.lists(token, max_size=2),
    draw=draws,
    seed=seeds,
    page_size=page_sizes,
)
def test_equals_the_reference(weights, batch, limit, criterion, options, ends, draw, seed, page_size) -> None:
    model, plain = models(*weights)
    common = dict(zip(("temperature", "top_p", "min_p", "top_k"), draw, strict=True))
    common |= {"end_tokens": ends, "seed": seed, "criterion": criterion}
    result = generate(model, batch, METHOD, max_new_tokens=limit, trace=True, page_size=page_size, **common, **options)
    numbers = {"recurrences": RECURRENCES, **options}
    expected = [
        recurrent_adaptive(plain, prompt, limit, init=init_of(own["seed"]), **own, **numbers)
        for prompt, own in streams(batch, common)
    ]
    assert [tokens.tolist() for tokens in result.tokens] == [one.tokens for one in expected]
    assert result.stats.forwards == max(one.forwards for one in expected)
    for steps, one in zip(result.stats.trace, expected, strict=True):
        for step, other in zip(steps, one.trace, strict=True):
            assert step[:4] == other[:4]
            assert step.values == pytest.approx(other.values, rel=1e-6, abs=1e-9)
    if limit:  # the core runs for the batch as often as for its most demanding sequence
        runs = [
            max(one.trace[n].recurrences for one in expected if n < len(one.trace))
            for n in range(result.stats.forwards - 1)
        ]
        assert result.stats.recurrences == options.get("recurrences", RECURRENCES) + sum(runs)


@pytest.mark.parametrize("criterion", sorted(THRESHOLDS))
def test_sequences_of_a_batch_stop_at_different_depths(criterion: str) -> None:
    stats = generate(
        models(2)[0], BATCH, METHOD, max_new_tokens=8, criterion=criterion, max_recurrences=30, trace=True
    ).stats
    depths = [tuple(step.recurrences for step in steps) for steps in zip(*stats.trace, strict=True)]
    assert any(len(set(step)) > 1 for step in depths)


def test_with_a_threshold_that_nothing_meets_it_is_static_decoding() -> None:
    model = models(2)[0]
    static = generate(model, BATCH, "recurrent_static", max_new_tokens=8)
    adaptive = generate(model, BATCH, METHOD, threshold=0, max_new_tokens=8)
    assert all(map(torch.equal, adaptive.tokens, static.tokens))
    assert adaptive.stats.recurrences == static.stats.recurrences


@pytest.mark.parametrize("threshold", [0.01, 0.1, 0.3])
def test_a_wave_of_one_row_is_adaptive_decoding(threshold: float) -> None:
    """Section 3.5 of the sampler's paper."""
    model = models(2)[0]
    options = {"threshold": threshold, "max_recurrences": 12, "max_new_tokens": 8}
    adaptive = generate(model, BATCH, METHOD, trace=True, **options)
    wave = generate(model, BATCH, "recurrent_diffusion", inner_recurrence=1, max_wavefront=1, trace=True, **options)
    assert all(map(torch.equal, wave.tokens, adaptive.tokens))
    for steps, exits in zip(wave.stats.trace, adaptive.stats.trace, strict=True):
        assert len(steps) == sum(step.recurrences for step in exits)
