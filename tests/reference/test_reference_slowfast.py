"""SlowFast Sampling: the paper's loop rewritten, and settings that equal other schedules."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels.reference.dllm_cache import FeatureCache
from pdkernels.reference.fast_dllm import fast_dllm
from pdkernels.reference.llada import llada
from pdkernels.reference.masked_model import MaskedTransformerReference, random_weights
from pdkernels.reference.slowfast import slowfast
from tests.support.masked import MASK, Rule, ScriptedMasked, fixed, moody, spreading, word

RULES = {"fixed": fixed([0.3, 0.9, 0.5, 0.95, 0.7, 0.15]), "spreading": spreading, "moody": moody}
rules = st.sampled_from(list(RULES.values()))


@settings(max_examples=50)
@given(
    rule=rules,
    cycle=st.sampled_from(["last", "mean"]),
    limit=st.integers(0, 10),
    block_size=st.one_of(st.none(), st.integers(1, 6)),
    exploration=st.integers(0, 5),
    window=st.integers(1, 3),
    k_slow=st.integers(0, 2),
    k_fast=st.integers(1, 2),
    drop=st.booleans(),
    ends=st.lists(st.integers(0, MASK - 1), max_size=2),
)
def test_the_papers_loop(rule, cycle, limit, block_size, exploration, window, k_slow, k_fast, drop, ends) -> None:
    model = ScriptedMasked(rule)
    run = lambda ends: slowfast(  # noqa: E731
        model,
        [3],
        limit,
        mask_token=MASK,
        block_size=block_size,
        max_exploration=exploration,
        window=window,
        tau_min=0.4,
        tau_high=0.85,
        k_slow=k_slow,
        k_fast=k_fast,
        cycle=cycle,
        drop_suffix=drop,
        end_tokens=ends,
    )
    whole, result = run(()), run(ends)
    first = next((i for i, token in enumerate(whole.tokens) if token in ends), limit)
    assert result.tokens == whole.tokens[: first + 1] and result.trace == whole.trace[: result.forwards]
    assert len(whole.tokens) == limit and MASK not in whole.tokens

    steps = iter(zip(whole.trace, model.calls))
    canvas, size = [3] + [MASK] * limit, block_size or max(limit, 1)

    def check(low: int, high: int, wanted: int | None, rows: int) -> dict[int, float]:
        step, call = next(steps)
        assert call == canvas[:rows] and step.window == (low, high) and step.tokens == canvas
        said = {p: rule(call, p) for p in range(low, high) if canvas[p] == MASK}
        confidence = {p: c for p, (_, c) in said.items()}
        assert step.confidence == pytest.approx(confidence, abs=1e-9)
        best = sorted(confidence, key=lambda p: -step.confidence[p])
        sure = [p for p in best if confidence[p] > 0.85]
        chosen = best[:k_slow] if wanted is None else (sure or best[:wanted])
        assert step.committed == {p: said[p][0] for p in chosen}
        for p in chosen:
            canvas[p] = said[p][0]
        return confidence

    for block in range(1, limit + 1, size):
        stop, start = min(block + size, limit + 1), block
        while MASK in canvas[block:stop]:
            notes: list[int] = []
            flat = False
            for _ in range(exploration):
                if MASK not in canvas[start:stop] or flat:
                    break
                confidence = check(start, stop, None, len(canvas))
                notes.append(1 + max([start, *(p for p, c in confidence.items() if c > 0.4)]))
                seen = torch.tensor(notes[-window:]).double()
                flat = len(notes) >= window and seen.var(correction=0).item() < 1
            end = stop
            if notes:
                end = notes[-1] if flat and cycle == "last" else math.floor(sum(notes[-window:]) / len(notes[-window:]))
            rows = len(canvas)
            while MASK in canvas[start:end]:
                check(start, end, k_fast, rows)
                rows = end if drop else rows
            start = end
    assert next(steps, None) is None


def test_cycles_by_hand() -> None:
    """Prompt [3]; positions are confident up to 4 at first, up to 7 after three tokens, to the end after five."""

    def rule(tokens: list[int], position: int) -> tuple[int, float]:
        written = len(tokens) - tokens.count(MASK) - 1
        reach = 4 if written < 3 else 7 if written < 5 else 10
        return word(position), (0.5 if position <= reach else 0.096) - 0.001 * position

    model = ScriptedMasked(rule)
    result = slowfast(model, [3], 10, mask_token=MASK)
    assert [(step.window, sorted(step.committed), len(call)) for step, call in zip(result.trace, model.calls)] == [
        ((1, 11), [1], 11),
        ((1, 11), [2], 11),  # for both 4 is the last confident position: stable
        ((1, 5), [3], 11),
        ((1, 5), [4], 5),  # after its first forward the fast phase sees nothing past the span
        ((5, 11), [5], 11),  # 7
        ((5, 11), [6], 11),  # 10
        ((5, 11), [7], 11),  # 10: stable
        ((5, 11), [8], 11),
        ((5, 11), [9], 11),
        ((5, 11), [10], 11),
    ]
    mean = slowfast(model, [3], 10, mask_token=MASK, max_exploration=2, cycle="mean")
    # 4 and 4; then 7 and 10, whose mean is 8 after rounding down; then 10 and 10.
    assert [step.window for step in mean.trace] == [(1, 11)] * 2 + [(1, 5)] * 2 + [(5, 11)] * 2 + [(5, 9)] * 2 + [
        (9, 11)
    ] * 2
    sure = ScriptedMasked(lambda tokens, position: (word(position), 0.9))
    assert slowfast(sure, [3], 10, mask_token=MASK).forwards == 3


def test_notes_before_the_window_are_forgotten_and_the_paper_wants_more_than_tau_min() -> None:
    def rule(tokens: list[int], position: int) -> tuple[int, float]:
        written = len(tokens) - tokens.count(MASK) - 1
        return word(position), (0.5 if position <= (4 if 1 <= written < 4 else 8) else 0.096) - 0.001 * position

    result = slowfast(ScriptedMasked(rule), [3], 8, mask_token=MASK)  # candidates 9, 5, 5: the last two are equal
    assert [step.window for step in result.trace[:5]] == [(1, 9)] * 3 + [(1, 5), (5, 9)]

    sure = ScriptedMasked(lambda tokens, position: (word(position), 1.0))
    run = slowfast(sure, [3], 4, mask_token=MASK, tau_min=1.0, tau_high=2.0, max_exploration=2)
    assert [step.window for step in run.trace] == [(1, 5), (1, 5), (2, 5), (2, 5)]  # 1 does not exceed 1: one position


@settings(max_examples=25)
@given(rule=rules, limit=st.integers(1, 9), exploration=st.integers(0, 4), cycle=st.sampled_from(["last", "mean"]))
def test_settings_that_equal_other_schedules(rule: Rule, limit: int, exploration: int, cycle: str) -> None:
    model = ScriptedMasked(rule)
    options = {"mask_token": MASK, "cycle": cycle}
    # Nothing is confident enough and k = 1: one token per forward, whatever the spans.
    single = slowfast(model, [3], limit, tau_high=1.1, max_exploration=exploration, **options)
    assert single.forwards == limit and all(len(step.committed) == 1 for step in single.trace)
    # No exploration: the threshold rule on the whole of a block.
    threshold = fast_dllm(model, [3], limit, mask_token=MASK, cache="none", block_size=limit, threshold=0.85)
    assert slowfast(model, [3], limit, max_exploration=0, **options) == threshold
    # Unlimited exploration: LLaDA, one or two tokens per step.
    for k in (1, 2):
        steps = -(-limit // k)
        slow = slowfast(model, [3], limit, max_exploration=limit, window=limit + 1, k_slow=k, **options)
        if limit % steps == 0:
            assert slow == llada(model, [3], limit, mask_token=MASK, steps=steps)


def test_predicting_the_next_token_and_sampling() -> None:
    own, following = (ScriptedMasked(moody, predicts) for predicts in ("own", "next"))
    assert slowfast(own, [3, 1], 9, mask_token=MASK) == slowfast(following, [3, 1], 9, mask_token=MASK)
    runs = [slowfast(own, [3], 6, mask_token=MASK, temperature=1.0, seed=seed) for seed in range(6)]
    assert runs[0] == slowfast(own, [3], 6, mask_token=MASK, temperature=1.0, seed=0)
    assert len({tuple(run.tokens) for run in runs}) > 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cycle": "first"}, "cycle must be 'last' or 'mean', got 'first'"),
        ({"max_exploration": -1}, "max_exploration must be at least 0, got -1"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"k_slow": -1}, "k_slow must be at least 0, got -1"),
        ({"k_fast": 0}, "k_fast must be at least 1, got 0"),
    ],
)
def test_refusals(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        slowfast(ScriptedMasked(moody), [1], 3, mask_token=MASK, **options)  # type: ignore[arg-type]


MODEL = MaskedTransformerReference(random_weights("llada", layers=3, seed=3), heads=4, names="llada")
CACHED = {"mask_token": 12, "tau_min": 0.4, "tau_high": 0.6}


INTERVALS = [(15, 1, 0.0), (4, 3, 0.25), (100, 100, 0.5)]


@pytest.mark.parametrize("cycle", ["last", "mean"])
@pytest.mark.parametrize("drop", [True, False])
@pytest.mark.parametrize("intervals", INTERVALS)
def test_every_forward_goes_through_the_feature_cache(
    cycle: str, drop: bool, intervals: tuple[int, int, float]
) -> None:
    check_every_forward_goes_through_the_feature_cache(partial(slowfast, cycle=cycle), drop, intervals)


def check_every_forward_goes_through_the_feature_cache(
    sampler: Callable[..., Any], drop: bool, intervals: tuple[int, int, float]
) -> None:
    options = dict(zip(("prompt_interval", "gen_interval", "transfer_ratio"), intervals))
    result = sampler(MODEL, [3, 1, 4], 12, drop_suffix=drop, **options, **CACHED)
    assert len(result.tokens) == 12 and result.forwards == len(result.trace)
    cache = FeatureCache(MODEL, 3, **options)  # type: ignore[arg-type]
    behind, short = False, 0
    for step in result.trace:
        # After its first forward a fast phase ends with its span; the last cycle's slow phase has the same window.
        rows = step.window[1] if drop and behind and step.window[1] < 15 else 15
        distribution = cache(step.tokens[:rows])[:, :12].softmax(-1)
        assert step.confidence == pytest.approx({p: distribution[p].max().item() for p in step.confidence})
        behind, short = step.window[1] < 15, short + (rows < 15)
    assert short or not drop


def test_a_cache_of_intervals_one_changes_nothing() -> None:
    for drop in (True, False):
        plain = slowfast(MODEL, [3, 1, 4], 12, drop_suffix=drop, **CACHED)  # type: ignore[arg-type]
        cached = slowfast(MODEL, [3, 1, 4], 12, drop_suffix=drop, prompt_interval=1, **CACHED)  # type: ignore[arg-type]
        assert cached.tokens == plain.tokens
        assert [step.committed for step in cached.trace] == [step.committed for step in plain.trace]
    with pytest.raises(ValueError, match="must be 1 and 0 without prompt_interval, got 2 and 0.25"):
        slowfast(MODEL, [3], 4, gen_interval=2, transfer_ratio=0.25, **CACHED)  # type: ignore[arg-type]
