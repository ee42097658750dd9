"""SlowFast as released: the method against its plain form, and that against the loop rewritten with offsets."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.papers.released.plain_slowfast import released_slowfast
from bench.papers.released.slowfast import SLOWFAST
from pdkernels.decoding import generate
from tests.decoding import test_slowfast as ours
from tests.reference.test_reference_slowfast import INTERVALS, check_every_forward_goes_through_the_feature_cache
from tests.support import masked_promises as shared
from tests.support.base import Plain, seeds, streams
from tests.support.errors import kind_of
from tests.support.masked import (
    MASK,
    Rule,
    Scripted,
    ScriptedMasked,
    fixed,
    hashed,
    moody,
    prompts,
    small_masked,
    spreading,
    word,
)
from tests.support.masked_promises import assert_same

RULES = {"fixed": fixed([0.3, 0.9, 0.5, 0.95, 0.7, 0.15]), "spreading": spreading, "moody": moody}
rules = st.sampled_from(list(RULES.values()))
ends_ = st.lists(st.integers(0, MASK - 1), max_size=2)
cycle_options = ours.cycle_options.map(lambda drawn: {name: drawn[name] for name in drawn if name != "cycle"})


def reference(model: Any, batch: list[list[int]], limit: int, **options: Any) -> list[Any]:
    return [
        released_slowfast(Plain(model), prompt, limit, mask_token=MASK, **own)
        for prompt, own in streams(batch, options)
    ]


@settings(max_examples=40, deadline=None)
@given(
    model=st.tuples(st.integers(0, 2), st.sampled_from(["own", "own", "next"])),
    batch=prompts,
    limit=st.integers(1, 14),
    options=cycle_options,
    ends=ends_,
    seed=seeds,
)
def test_equals_the_plain_form(model: Any, batch: Any, limit: int, options: Any, ends: list[int], seed: int) -> None:
    options = {"end_tokens": ends, "seed": seed} | options
    transformer = small_masked(*model)
    result = generate(transformer, batch, SLOWFAST, max_new_tokens=limit, trace=True, **options)
    assert_same(result, reference(transformer, batch, limit, **options))


@settings(max_examples=20, deadline=None)
@given(
    model=st.tuples(st.integers(0, 2), st.sampled_from(["own", "own", "next"])),
    batch=prompts,
    limit=st.integers(1, 14),
    options=cycle_options,
    cache=ours.cache_options,
    ends=ends_,
    seed=seeds,
)
def test_on_a_feature_cache_equals_the_plain_form(
    model: Any, batch: Any, limit: int, options: Any, cache: Any, ends: list[int], seed: int
) -> None:
    # Something has to change between two forwards: otherwise values are equal up to rounding, and their order is undefined.
    options = {"end_tokens": ends, "seed": seed} | options | {"k_slow": 1, "block_size": None}
    transformer = small_masked(*model)
    result = generate(transformer, batch, SLOWFAST, max_new_tokens=limit, trace=True, **options, **cache)
    expected = [
        released_slowfast(ours.Kept(transformer, prompt, cache), prompt, limit, mask_token=MASK, **own)
        for prompt, own in streams(batch, options)
    ]
    assert_same(result, expected)


@settings(max_examples=30, deadline=None)
@given(
    script=st.sampled_from([hashed(1), hashed(2, lambda u: 0.1 + 0.88 * u**3), ours.fading]),
    predicts=st.sampled_from(["own", "next"]),
    batch=prompts,
    limit=st.integers(1, 24),
    options=cycle_options,
    ends=ends_,
)
def test_equals_the_plain_form_on_scripts(
    script: Any, predicts: str, batch: Any, limit: int, options: Any, ends: list[int]
) -> None:
    result = generate(
        Scripted(script, predicts), batch, SLOWFAST, max_new_tokens=limit, end_tokens=ends, trace=True, **options
    )
    assert_same(result, reference(Scripted(script, predicts), batch, limit, end_tokens=ends, **options))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2),
    batch=prompts,
    limit=st.integers(1, 14),
    options=st.fixed_dictionaries(
        {
            "loop": st.sampled_from(["dream", "dream", "llada"]),
            "block_size": st.sampled_from([None, 4]),
            "max_exploration": st.sampled_from([6, 1, 2, 0]),
            "window": st.sampled_from([2, 1, 3]),
            "variance": st.sampled_from([1.0, 5.0]),
            "tau_min": st.sampled_from([0.1, 0.3]),
            "tau_explore": st.sampled_from([0.3, 0.6, 2.0]),
            "tau_high": st.sampled_from([0.4, 0.9]),
            "k_slow": st.sampled_from([1, 2]),
        }
    ),
    ends=ends_,
)
def test_exploring_with_a_threshold_of_its_own(
    seed: int, batch: Any, limit: int, options: Any, ends: list[int]
) -> None:
    options = {"end_tokens": ends, **options}
    result = generate(small_masked(seed), batch, SLOWFAST, max_new_tokens=limit, trace=True, **options)
    assert_same(result, reference(small_masked(seed), batch, limit, **options))


@pytest.mark.parametrize("loop", ["llada", "dream"])
def test_a_sequence_takes_the_same_path_alone_and_in_a_batch(loop: str) -> None:
    shared.assert_alone_as_in_a_batch(SLOWFAST, loop=loop, max_exploration=3)


def test_one_read_of_the_device_per_step() -> None:
    shared.assert_one_read_per_step(SLOWFAST)


def test_errors() -> None:
    for options, words in (
        ({"loop": "median"}, "loop must be one of 'llada', 'dream', got 'median'."),
        ({"tau_explore": -1}, "tau_explore must be at least 0, got -1."),
        ({"cycle": "last"}, "method 'slowfast' has no option 'cycle'"),
    ):
        with pytest.raises(kind_of(words) if ":" in words else (TypeError, ValueError), match=words):
            generate(small_masked(0), [1], SLOWFAST, max_new_tokens=4, **options)


def retold(
    rule: Rule,
    prompt: list[int],
    size: int,
    blocks: int,
    exploration: int,
    window: int,
    deviation: float,
    tau_min: float,
    tau_high: float,
    drop: bool,
) -> tuple[list[int], list[int]]:
    """The released loop as written: offsets in the block, a deque, a single best position. Its tokens, and rows per forward."""
    x = prompt + [MASK] * (size * blocks)
    rows: list[int] = []

    def commit(block: int, low: int, high: int, seen: int) -> list[float]:
        rows.append(seen)
        said = [rule(x[:seen], block + o) if block + o < seen else None for o in range(size)]
        conf = [said[o][1] if x[block + o] == MASK and low <= o < high else -math.inf for o in range(size)]  # type: ignore[index]
        sure = [o for o in range(size) if conf[o] >= tau_high]
        picked = sure if len(sure) >= 2 else [max(range(size), key=lambda o: (conf[o], -o))]
        for o in picked:
            if conf[o] > -math.inf:
                x[block + o] = said[o][0]  # type: ignore[index]
        return conf

    for number in range(blocks):
        block, last = len(prompt) + number * size, 0
        while MASK in x[block : block + size]:
            pushed: deque[int] = deque(maxlen=window)
            actual, frozen = size, False
            for step in range(exploration):
                if MASK not in x:
                    return x[len(prompt) :], rows
                conf = commit(block, last, size, len(x))
                if frozen:
                    continue
                high_enough = [o - last for o in range(last, size) if conf[o] >= tau_min]
                pushed.append(min(max(last + (1 + high_enough[-1] if high_enough else 1), 1), size))
                mean = sum(pushed) / len(pushed)
                if len(pushed) == window and math.sqrt(sum((e - mean) ** 2 for e in pushed) / window) < deviation:
                    actual, frozen = pushed[-1], True
                elif len(pushed) == window or step == exploration - 1:
                    actual = int(mean)
            seen = len(x)
            while MASK in x[block + last : block + actual]:
                commit(block, last, actual, seen)
                seen = block + actual if drop else len(x)
            last = actual
    return x[len(prompt) :], rows


@settings(max_examples=60)
@given(
    rule=rules,
    size=st.integers(1, 9),
    blocks=st.integers(1, 2),
    exploration=st.integers(0, 5),
    window=st.integers(1, 4),
    variance=st.sampled_from([0.5, 1.0, 4.0]),
    tau_min=st.sampled_from([0.2, 0.4, 0.8]),
    tau_high=st.sampled_from([0.6, 0.93, 2.0]),
    drop=st.booleans(),
)
def test_the_released_loop(rule, size, blocks, exploration, window, variance, tau_min, tau_high, drop) -> None:
    model = ScriptedMasked(rule)
    result = released_slowfast(
        model,
        [3, 1],
        size * blocks,
        mask_token=MASK,
        block_size=size,
        max_exploration=exploration,
        window=window,
        variance=variance,
        tau_min=tau_min,
        tau_high=tau_high,
        drop_suffix=drop,
    )
    tokens, rows = retold(rule, [3, 1], size, blocks, exploration, window, math.sqrt(variance), tau_min, tau_high, drop)
    assert result.tokens == tokens
    assert [len(call) for call in model.calls] == rows and result.forwards == len(rows) == len(result.trace)


def test_slow_forwards_fill_what_is_confident_and_equality_reaches_a_threshold() -> None:
    sure = ScriptedMasked(lambda tokens, position: (word(position), 0.9))
    assert released_slowfast(sure, [3], 10, mask_token=MASK).forwards == 1
    sure = ScriptedMasked(lambda tokens, position: (word(position), 1.0))
    options = {"tau_min": 1.0, "tau_high": 2.0, "max_exploration": 2}
    result = released_slowfast(sure, [3], 4, mask_token=MASK, **options)
    assert [step.window for step in result.trace] == [(1, 5)] * 4


@pytest.mark.parametrize("drop", [True, False])
@pytest.mark.parametrize("intervals", INTERVALS)
def test_every_forward_goes_through_the_feature_cache(drop: bool, intervals: tuple[int, int, float]) -> None:
    check_every_forward_goes_through_the_feature_cache(released_slowfast, drop, intervals)
