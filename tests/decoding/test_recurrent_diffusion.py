"""The diffusion-forcing sampler: step by step the plain reference, in a batch and alone, on every kind of cache."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels.decoding import DecodeResult, default_option, generate
from pdkernels.decoding.recurrent import recurrent_diffusion
from pdkernels.decoding.recurrent._wave import Wave
from pdkernels.models.architectures.recurrent_depth import RecurrentDepth
from pdkernels.reference.recurrent_adaptive import THRESHOLDS
from pdkernels.reference.recurrent_diffusion import recurrent_diffusion as plain_diffusion
from pdkernels.reference.recurrent_sampling import RecurrentResult
from pdkernels.reference.recurrent_self_speculation import recurrent_self_speculation as plain_speculation
from tests.support.base import streams
from tests.support.recurrent import RECURRENCES, draws, init_of, models, page_sizes, prompts, seeds, token

METHOD = "recurrent_diffusion"

sampler_options = st.fixed_dictionaries(
    {},
    optional={
        "inner_recurrence": st.integers(1, 5),
        "threshold": st.sampled_from([0, 1e-3, 0.03, 0.3, 2.0]),
        "exit": st.sampled_from(["latent-diff", "latent-diff", "fixed", "token-stability", "latent-acceleration"]),
        "noise": st.sampled_from([0.0, 0.2, 0.5]),
        "schedule": st.sampled_from(["constant", "linear", "harmonic", "root"]),
        "mixer": st.sampled_from(["linear", "sqrt"]),
        "momentum": st.sampled_from([0, 0.1, 0.6]),
        "headway": st.integers(1, 4),
        "max_wavefront": st.integers(1, 6),
        "rule": st.sampled_from(["prefix", "last"]),
        "new_state": st.sampled_from(["fresh", "copied"]),
        "keep_changed": st.booleans(),
        "recurrences": st.integers(1, 8),
        "max_recurrences": st.integers(1, 20),
        "stability": st.integers(1, 4),
    },
)


def reference(
    weights: tuple[int, float], prompt: list[int], limit: int, ends: list[int], draw: Any, seed: int, options: Any
) -> RecurrentResult:
    temperature, top_p, min_p, top_k = draw
    return plain_diffusion(
        models(*weights)[1],
        prompt,
        limit,
        init=init_of(seed),
        end_tokens=ends,
        temperature=temperature,
        top_p=top_p,
        min_p=min_p,
        top_k=top_k,
        seed=seed,
        **{"recurrences": RECURRENCES, **options},
    )


class WatchedWave(Wave):
    """After every step: the cursors and the widths of the waves; and how many rows the step ran."""

    seen: list[tuple[int, list[int], list[int]]] = []

    def step(self, rows: int, full: bool) -> Any:
        result = super().step(rows, full)
        self.seen.append((rows, self._cache.lengths.tolist(), self.width.tolist()))
        return result


def run(
    weights: tuple[int, float], batch: list[list[int]], limit: int, **options: Any
) -> tuple[DecodeResult, list[Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrent_diffusion, "Wave", WatchedWave)
        patch.setattr(WatchedWave, "seen", [])
        result = generate(models(*weights)[0], batch, METHOD, max_new_tokens=limit, trace=True, **options)
        return result, WatchedWave.seen


def assert_same(result: DecodeResult, expected: list[RecurrentResult], limit: int, inner: int, prefill: int) -> None:
    assert [tokens.tolist() for tokens in result.tokens] == [one.tokens for one in expected]
    stats = result.stats
    assert stats.forwards == max(one.forwards for one in expected)
    assert stats.recurrences == (prefill + inner * (stats.forwards - 1) if limit else 0)
    assert stats.accepted == [[step.frozen for step in one.trace] for one in expected]
    for steps, one in zip(stats.trace, expected, strict=True):
        for step, plain in zip(steps, one.trace, strict=True):
            assert (step.cursor, step.tokens, step.predictions, step.frozen) == (
                plain.cursor,
                plain.tokens,
                plain.predictions,
                plain.frozen,
            )
            assert step.distance == pytest.approx(plain.distance, rel=1e-6, abs=1e-9)
    if limit:
        assert stats.tokens_per_forward == sum(len(one.tokens) for one in expected) / sum(
            one.forwards for one in expected
        )


@settings(max_examples=40, deadline=None)
@given(
    weights=st.tuples(st.sampled_from([1, 2]), st.sampled_from([0.3, 1.0])),
    batch=prompts,
    limit=st.integers(0, 12),
    ends=st.lists(token, max_size=2),
    draw=draws,
    seed=seeds,
    options=sampler_options,
    page_size=page_sizes,
)
def test_equals_the_reference(weights, batch, limit, ends, draw, seed, options, page_size) -> None:
    temperature, top_p, min_p, top_k = draw
    result, seen = run(
        weights,
        batch,
        limit,
        end_tokens=ends,
        temperature=temperature,
        top_p=top_p,
        min_p=min_p,
        top_k=top_k,
        seed=seed,
        page_size=page_size,
        **options,
    )
    alone = [(prompt, own["seed"]) for prompt, own in streams(batch, {"seed": seed})]
    expected = [reference(weights, prompt, limit, ends, draw, own, options) for prompt, own in alone]
    assert_same(result, expected, limit, options.get("inner_recurrence", 4), options.get("recurrences", RECURRENCES))
    # The cursor is the first unfinished position, and no step runs more rows than the widest wave has.
    for number, (rows, cursors, widths) in enumerate(seen):
        now = [one.trace[number] for one in expected if number < len(one.trace)]
        assert rows == max(len(step.tokens) for step in now) <= options.get("max_wavefront", 128)
        for prompt, one, cursor, width in zip(batch, expected, cursors, widths, strict=True):
            assert cursor == len(prompt) + sum(step.frozen for step in one.trace[: number + 1])
            assert width == (len(one.trace[number + 1].tokens) if number + 1 < len(one.trace) else 0)


BATCH = [[3, 1, 4], [1], [5, 9]]


@pytest.mark.covering
@pytest.mark.parametrize("max_wavefront", [1, 2, 128])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_recurrences_in_one_step_are_static_decoding(max_wavefront: int, temperature: float) -> None:
    """Section 3.3: r' = r recovers autoregressive decoding."""
    common = {"max_new_tokens": 9, "temperature": temperature, "seed": 7}
    static = generate(models(2)[0], BATCH, "recurrent_static", **common)
    wave = generate(
        models(2)[0], BATCH, METHOD, exit="fixed", inner_recurrence=RECURRENCES, max_wavefront=max_wavefront, **common
    )
    assert all(map(torch.equal, wave.tokens, static.tokens))
    assert (wave.stats.forwards, wave.stats.recurrences) == (static.stats.forwards, static.stats.recurrences)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"headway": 3, "new_state": "copied"},
        {"rule": "last", "momentum": 0.5, "inner_recurrence": 2},
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ({"headway": 3}, {"rule": "last"}, {"new_state": "copied"})
        ),
    ],
)
def test_a_contraction_gives_the_tokens_of_static_decoding(options: dict[str, Any]) -> None:
    """If a state has a single fixed point, neither the path to it nor the start matters."""
    model, batch = models(2, 0.1)[0], BATCH
    static = generate(model, batch, "recurrent_static", recurrences=60, max_new_tokens=10)
    result = generate(model, batch, METHOD, recurrences=60, threshold=1e-9, max_new_tokens=10, **options)
    assert all(map(torch.equal, result.tokens, static.tokens))
    assert result.stats.recurrences < static.stats.recurrences


def test_a_low_threshold_waits_and_a_high_one_does_not() -> None:
    forwards = [
        generate(
            models(1)[0], [3, 1, 4], METHOD, threshold=threshold, max_new_tokens=10, max_recurrences=40
        ).stats.forwards
        for threshold in (2.0, 0.1, 0.0)
    ]
    assert forwards[0] < forwards[1] < forwards[2]
    assert (
        forwards[0] == 11
    )  # the second step of a row freezes it: one row joins and one freezes in all steps but the first


def test_a_shorter_generation_is_the_beginning_of_a_longer_one() -> None:
    model = models(1)[0]
    long = generate(model, BATCH, METHOD, max_new_tokens=14, temperature=0.8, noise=0.3).tokens
    for limit in (1, 5, 9):
        short = generate(model, BATCH, METHOD, max_new_tokens=limit, temperature=0.8, noise=0.3).tokens
        assert all(torch.equal(a, b[:limit]) for a, b in zip(short, long, strict=True))


@pytest.mark.parametrize("page_size", [None, 3])
def test_poisoned_rows_after_the_text_are_never_read(page_size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a cache holds after the rows that a step wrote does not matter, nor what a step left there."""
    model, original = models(2)[0], RecurrentDepth.new_cache

    def poisoned(self: RecurrentDepth, *sizes: int, **options: Any) -> Any:
        cache = original(self, *sizes, **options)
        cache.k.fill_(77.0), cache.v.fill_(-55.0)
        return cache

    options = {"max_new_tokens": 9, "page_size": page_size, "headway": 2}
    clean = generate(model, BATCH, METHOD, **options).tokens
    monkeypatch.setattr(RecurrentDepth, "new_cache", poisoned)
    assert all(map(torch.equal, generate(model, BATCH, METHOD, **options).tokens, clean))


def test_the_prefix_rule_and_the_last_one_differ() -> None:
    """Equation 3 and line 16 of Algorithm 2: the second freezes rows that are not ready."""
    options = {"inner_recurrence": 1, "threshold": 0.03, "keep_changed": False, "max_recurrences": 30}
    early = {}
    for rule in ("prefix", "last"):
        stats = generate(models(2)[0], BATCH, METHOD, rule=rule, max_new_tokens=10, trace=True, **options).stats
        early[rule] = 0
        for steps in stats.trace:
            seen: Counter[int] = Counter()
            for step in steps:
                seen.update(range(step.cursor, step.cursor + len(step.tokens)))
                early[rule] += sum(step.distance[i] >= 0.03 and seen[step.cursor + i] < 30 for i in range(step.frozen))
    assert early["prefix"] == 0 < early["last"]


@pytest.mark.parametrize("keep_changed", [True, False])
def test_rows_stay_whose_input_changed(keep_changed: bool) -> None:
    """Without it a row may freeze with K and V of a token that is not in the text."""
    stale = 0
    for seed in range(4):
        options = {"threshold": 2.0, "inner_recurrence": 1, "keep_changed": keep_changed, "seed": seed, "headway": 2}
        trace = generate(models(1)[0], BATCH, METHOD, max_new_tokens=16, trace=True, **options).stats.trace
        for step in (step for steps in trace for step in steps):
            stale += sum(step.predictions[i - 1] != step.tokens[i] for i in range(1, step.frozen))
    assert (stale == 0) == keep_changed


def test_the_defaults_are_those_of_section_5() -> None:
    """Of the sampler, of adaptive exits, and of the tuned self-speculation, here and in the plain forms."""
    sampler = {"inner_recurrence": 4, "threshold": 0.03, "noise": 0.0, "momentum": 0.1, "max_wavefront": 128}
    named = [
        (METHOD, plain_diffusion, {**sampler, "rule": "prefix", "exit": "latent-diff", "headway": 1}),
        ("recurrent_self_speculation", plain_speculation, {"block_size": 4, "draft_recurrences": 4}),
    ]
    for method, plain, expected in named:
        signature = inspect.signature(plain).parameters
        for name, value in expected.items():
            assert default_option(method, name) == signature[name].default == value, (method, name)
    assert (
        inspect.signature(plain_diffusion).parameters["schedule"].default == "linear"
        and THRESHOLDS["latent-diff"] == 0.03
    )
