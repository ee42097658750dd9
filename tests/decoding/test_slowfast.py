"""SlowFast Sampling: tokens, forwards and filled positions of the plain reference, alone and in a batch."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pdkernels as pd
from pdkernels.decoding import generate
from pdkernels.reference.dllm_cache import FeatureCache
from pdkernels.reference.slowfast import slowfast
from tests.support import masked_promises as shared
from tests.support.base import Plain, seeds, streams
from tests.support.masked import MASK, Scripted, hashed, prompts, small_masked, with_parts
from tests.support.masked_promises import assert_same

METHOD = "slowfast"

cycle_options = st.fixed_dictionaries(
    {
        "cycle": st.sampled_from(["last", "mean"]),
        "block_size": st.sampled_from([None, None, 1, 4, 7]),
        "max_exploration": st.sampled_from([3, 0, 1, 2, 5, 8]),
        "window": st.sampled_from([2, 1, 3, 4]),
        "variance": st.sampled_from([1.0, 0, 0.3, 5.0]),
        "tau_min": st.sampled_from([0.2, 0.0, 0.4, 0.7]),
        "tau_high": st.sampled_from([0.5, 0.3, 0.8, 2.0]),
        "k_slow": st.sampled_from([1, 2, 0]),
        "k_fast": st.sampled_from([1, 2, 3]),
        "drop_suffix": st.sampled_from([True, True, False]),
        "temperature": st.sampled_from([0.0, 0.0, 0.8]),
    }
)
cache_options = st.fixed_dictionaries(
    {
        "prompt_interval": st.integers(1, 7),
        "gen_interval": st.integers(1, 4),
        "transfer_ratio": st.sampled_from([0, 0.3, 0.5, 1.0]),
    }
)
ends_ = st.lists(st.integers(0, MASK - 1), max_size=2)


def reference(model: Any, batch: list[list[int]], limit: int, **options: Any) -> list[Any]:
    return [
        slowfast(Plain(model), prompt, limit, mask_token=MASK, **options) for prompt, options in streams(batch, options)
    ]


@settings(max_examples=60, deadline=None)
@given(
    model=st.tuples(st.integers(0, 2), st.sampled_from(["own", "own", "next"])),
    batch=prompts,
    limit=st.integers(1, 14),
    options=cycle_options,
    ends=ends_,
    seed=seeds,
)
def test_equals_the_reference(
    model: tuple[int, str], batch: list[list[int]], limit: int, options: Any, ends: list[int], seed: int
) -> None:
    options = {"end_tokens": ends, "seed": seed} | options
    transformer = small_masked(*model)
    result = generate(transformer, batch, METHOD, max_new_tokens=limit, trace=True, **options)
    assert_same(result, reference(transformer, batch, limit, **options))


class Kept:
    """A reference model whose forwards go through a feature cache, for one sequence."""

    predicts = "own"  # its rows have been moved to their positions

    def __init__(self, model: Any, prompt: list[int], options: Any) -> None:
        self._cache = FeatureCache(with_parts(model), len(prompt), **options)

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self._cache(tokens[0].tolist())[None]


@settings(max_examples=60, deadline=None)
@given(
    model=st.tuples(st.integers(0, 2), st.sampled_from(["own", "own", "next"])),
    batch=prompts,
    limit=st.integers(1, 14),
    options=cycle_options,
    cache=cache_options,
    ends=ends_,
    seed=seeds,
)
def test_on_a_feature_cache_equals_the_reference(
    model: tuple[int, str], batch: list[list[int]], limit: int, options: Any, cache: Any, ends: list[int], seed: int
) -> None:
    """Every forward of either phase counts for the intervals; one without the suffix leaves the suffix's rows as they were."""
    options = {"end_tokens": ends, "seed": seed} | options
    # Something has to change between two forwards: otherwise all values are equal up to rounding, and their order is
    # undefined.
    if options["k_slow"] == 0:
        options |= {"k_slow": 1, "block_size": None}
    transformer = small_masked(*model)
    result = generate(transformer, batch, METHOD, max_new_tokens=limit, trace=True, **options, **cache)
    expected = [
        slowfast(Kept(transformer, prompt, cache), prompt, limit, mask_token=MASK, **options)
        for prompt, options in streams(batch, options)
    ]
    assert_same(result, expected)


def test_a_cache_that_keeps_nothing_changes_nothing() -> None:
    model = small_masked(1)
    plain, cached = (
        generate(model, [[3, 1, 4], [5]], METHOD, max_new_tokens=12, trace=True, **options)
        for options in ({}, {"prompt_interval": 1})
    )
    assert all(map(torch.equal, plain.tokens, cached.tokens)) and plain.stats.accepted == cached.stats.accepted


def fading(text: list[int]) -> list[tuple[int, float]]:
    """Confident at the front, less so further on, and more so the more is known."""
    written = sum(token != MASK for token in text)
    sure = [min(0.95, max(0.15, 1.1 - 0.1 * abs(position - written))) for position in range(len(text))]
    return [((position * 5 + written) % MASK, sure[position] - 0.003 * position) for position in range(len(text))]


@settings(max_examples=60, deadline=None)
@given(
    script=st.sampled_from([hashed(1), hashed(2, lambda u: 0.1 + 0.88 * u**3), fading]),
    predicts=st.sampled_from(["own", "next"]),
    batch=prompts,
    limit=st.integers(1, 24),
    options=cycle_options,
    ends=ends_,
)
def test_equals_the_reference_on_scripts(
    script: Any, predicts: str, batch: list[list[int]], limit: int, options: Any, ends: list[int]
) -> None:
    """Confidences of all levels; every forward shows each sequence what it should, and the head runs for open positions only."""
    model, plain = Scripted(script, predicts), Scripted(script, predicts)
    result = generate(model, batch, METHOD, max_new_tokens=limit, end_tokens=ends, trace=True, **options)
    expected = reference(plain, batch, limit, end_tokens=ends, **options)
    assert_same(result, expected)
    for number, (shown, rows) in enumerate(zip(model.visible, model.head_rows, strict=True)):
        now = [one.trace[number] if number < len(one.trace) else None for one in expected]
        assert rows == max(len(step.confidence) for step in now if step is not None)
        for prompt, step, end in zip(batch, now, shown, strict=True):
            if step is None:
                assert end <= len(prompt)
            else:
                assert step.window[1] <= end <= len(prompt) + limit


def step_like(edge: int) -> Any:
    """Confidence up to `edge`, none after it; high at every third position."""

    def script(text: list[int]) -> list[tuple[int, float]]:
        return [
            (7, (0.9 if position % 3 == 0 else 0.5 - 0.01 * position) if position < edge else 0.05)
            for position in range(len(text))
        ]

    return script


def test_a_cycle_by_hand() -> None:
    """Two slow steps agree on the span; its fast steps take the confident positions, then two at a time; the first includes the suffix."""
    model = Scripted(step_like(8))
    result = generate(model, [1, 2], METHOD, max_new_tokens=10, k_fast=2, tau_min=0.3, trace=True)
    steps = result.stats.trace[0]
    assert [sorted(step.committed) for step in steps[:4]] == [[3], [6], [2, 4], [5, 7]]
    assert [step.window for step in steps[:5]] == [(2, 12), (2, 12), (2, 8), (2, 8), (8, 12)]
    assert model.visible[:5] == [[12], [12], [12], [8], [12]]


def test_exploring_continues_until_the_end_is_stable() -> None:
    """The furthest confident position moves by `wander` positions per step; a variance of 1 of two candidates tolerates one position."""

    def wandering(wander: int) -> Any:
        def script(text: list[int]) -> list[tuple[int, float]]:
            edge = 4 + wander * sum(token != MASK for token in text)
            return [(7, 0.5 - 0.001 * position if position < edge else 0.01) for position in range(len(text))]

        return script

    def slow_steps(wander: int, method: Any = METHOD, **options: Any) -> tuple[int, tuple[int, int]]:
        result = generate(Scripted(wandering(wander)), [1], method, max_new_tokens=40, trace=True, **options)
        windows = [step.window for step in result.stats.trace[0]]
        first_fast = next(number for number, window in enumerate(windows) if window != (1, 41))
        return first_fast, windows[first_fast]

    # With n known positions the candidate is position 4 + wander * n; n is 1 before the first step.
    assert slow_steps(1) == (2, (1, 6))
    assert slow_steps(3) == (8, (1, 26))  # the mean of 25 and 28, rounded down
    assert slow_steps(3, variance=2.5) == (2, (1, 10))
    assert slow_steps(3, variance=2.5, cycle="mean") == (2, (1, 8))
    assert slow_steps(3, max_exploration=3) == (3, (1, 11))
    assert slow_steps(1, window=3, cycle="mean") == (3, (1, 6))


def test_without_exploration_it_is_decoding_by_threshold() -> None:
    """Each forward fills all positions above `tau_high`, or the most confident one: LLaDA's steps if nothing is that confident."""
    model = small_masked(1)
    batch, options = [[3, 1, 4], [5]], {"max_new_tokens": 12, "max_exploration": 0}
    llada = generate(model, batch, "llada", max_new_tokens=12, trace=True)
    ours = generate(model, batch, METHOD, tau_high=2.0, drop_suffix=False, trace=True, **options)
    assert ours.stats.trace == llada.stats.trace and all(map(torch.equal, ours.tokens, llada.tokens))
    at_once = generate(model, batch, METHOD, tau_high=0, **options)
    assert at_once.stats.forwards == 1 and at_once.stats.accepted == [[12], [12]]


def test_only_exploring_is_llada() -> None:
    """No span is ever stable or over: one position per step, the most confident of all."""
    model = small_masked(1)
    llada = generate(model, [3, 1, 4], "llada", max_new_tokens=12, trace=True)
    ours = generate(model, [3, 1, 4], METHOD, max_new_tokens=12, max_exploration=12, variance=0, trace=True)
    assert ours.stats.trace == llada.stats.trace


def test_confidences_that_equal_a_threshold() -> None:
    """They must exceed it."""

    def flat(text: list[int]) -> list[tuple[int, float]]:
        return [(7, 0.5)] * len(text)

    sure = generate(Scripted(flat), [1], METHOD, max_new_tokens=1, trace=True).stats.trace[0][0].confidence[1]
    options: dict[str, Any] = {"max_new_tokens": 6, "tau_high": sure, "max_exploration": 0}
    assert generate(Scripted(flat), [1], METHOD, **options).stats.forwards == 6


def test_a_trained_model_adds() -> None:
    """One token per forward is right; SlowFast takes a fraction of the forwards, and agrees where the model is confident."""
    model = pd.models.load("tiny-masked")
    prompts = ["482 + 967 = ?\n", "58 + 31 = ?\n"]
    careful, quick = (generate(model, prompts, method, max_new_tokens=96) for method in ("llada", METHOD))
    assert [text.split()[-1] for text in careful.text] == ["1449", "89"]
    assert quick.stats.forwards < careful.stats.forwards / 3
    assert all(a[:15] == b[:15] for a, b in zip(careful.text, quick.text, strict=True))


def test_errors() -> None:
    shared.assert_errors(
        METHOD,
        [
            ({"block_size": 0}, "block_size must be at least 1, got 0."),
            ({"max_exploration": -1}, "max_exploration must be at least 0, got -1."),
            ({"window": 0}, "window must be at least 1, got 0."),
            ({"window": 2.0}, "TypeError: window must be an int, got float."),
            ({"k_slow": -1}, "k_slow must be at least 0, got -1."),
            ({"k_fast": 0}, "k_fast must be at least 1, got 0."),
            ({"variance": -1}, "variance must be at least 0, got -1."),
            ({"tau_min": "low"}, "TypeError: tau_min must be a number, got str."),
            ({"tau_high": -0.5}, "tau_high must be at least 0, got -0.5."),
            ({"cycle": "median"}, "cycle must be one of 'last', 'mean', got 'median'."),
            ({"prompt_interval": 0}, "prompt_interval must be at least 1, got 0."),
            ({"prompt_interval": 2, "gen_interval": 0}, "gen_interval must be at least 1, got 0."),
            ({"prompt_interval": 2, "transfer_ratio": 2.0}, "transfer_ratio must be in 0 .. 1, got 2.0."),
            ({"gen_interval": 4}, "gen_interval must be 1 without a cache, got 4. Pass a prompt_interval."),
            ({"transfer_ratio": 0.5}, "transfer_ratio must be 0 without a cache, got 0.5. Pass a prompt_interval."),
            ({"drop_suffix": 1}, "TypeError: drop_suffix must be a bool, got int."),
            ({"temperature": -1.0}, "temperature must be finite and at least 0, got -1.0."),
            ({"seed": 1.5}, "TypeError: seed must be an int or a list of ints, got float."),
            ({"mask_token": 13}, "mask_token must be an id in 0 .. 12, got 13."),
        ],
    )
