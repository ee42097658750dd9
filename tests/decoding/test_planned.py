"""Planned diffusion: tokens, rounds, forwards and filled positions of the plain reference, alone and in batches, on both caches."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels.decoding import generate
from pdkernels.decoding.planned import planned
from tests.support.base import page_sizes, seeds
from tests.support.plans import END, MASK, assert_same, planning_model, references

METHOD = "planned"
PROMPTS = [[END], [10, END], [11, 3, END], [12, 12, 12, END], [18, 10, 3, END], [5, 20, 11, 7]]
prompt_lists = st.lists(
    st.one_of(st.sampled_from(PROMPTS), st.lists(st.integers(0, MASK - 1), min_size=1, max_size=6)),
    min_size=1,
    max_size=3,
)
rules = st.sampled_from(
    [
        {},
        {},
        {"order": "margin"},
        {"order": "confidence"},
        {"order": "uniform"},
        {"threshold": 0.0},
        {"threshold": 0.3},
        {"threshold": 0.2},
        {"threshold": 1.5},
    ]
)
draws = st.sampled_from(
    [{}, {}, {"temperature": 0.7}, {"temperature": 0.6, "top_p": 0.8}, {"temperature": 1.0, "top_k": 4}]
)


@settings(max_examples=20)
@given(
    weights=st.integers(0, 2),
    predicts=st.sampled_from(["own", "next"]),
    batch=prompt_lists,
    limit=st.integers(0, 48),
    kind=st.sampled_from([(False, "exact"), (True, "exact"), (True, "drop_finished"), "autoregressive"]),
    steps_ratio=st.sampled_from([1.0, 1.0, 0.75, 0.5, 0.25, 0.01]),
    rule=rules,
    distribution=draws,
    sizes=st.sampled_from([{}, {"unit": 1}, {"length_scale": 1.5}, {"length_scale": 0.5}, {"length_scale": 0.0}]),
    max_rounds=st.sampled_from([None, None, 1, 2]),
    seed=seeds,
    page_size=page_sizes,
)
def test_equals_the_reference(
    weights, predicts, batch, limit, kind, rule, distribution, sizes, page_size, **options
) -> None:
    options |= distribution | sizes
    given = {"max_new_tokens": limit, "trace": True, "page_size": page_size}
    if kind == "autoregressive":
        options |= {"chunks": kind, "steps_ratio": 1.0}
    else:
        options |= {"sparse": kind[0]} | rule
        given["cache"] = kind[1]
    model = planning_model(weights, predicts)
    result = generate(model, batch, METHOD, **given, **options)
    assert_same(result, references(model, batch, limit, **options))


def test_what_the_models_of_these_tests_write() -> None:
    """Most cases occur."""
    reasons, rounds, chunks = Counter[str](), Counter[int](), Counter[int]()
    for weights in range(2):
        for expected in references(planning_model(weights), PROMPTS[:4], 48, temperature=0.7, seed=1):
            reasons[expected.reason] += 1
            rounds[len(expected.rounds)] += 1
            chunks += Counter(len(each.chunks) for each in expected.rounds)
    assert {"end", "length"} <= set(reasons) and max(rounds) >= 3 and {0, 1, 3} <= set(chunks)


def test_one_plans_while_another_fills_and_a_third_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one step; each gives what it gives alone."""
    texts: list[planned.PlannedText] = []
    seen: set[tuple[str, ...]] = set()

    class Watched(planned.PlannedText):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            texts.append(self)

        def quotas(self, live: Any) -> list[int]:
            seen.add(tuple(text.phase for text in texts))
            return super().quotas(live)

    monkeypatch.setattr(planned, "PlannedText", Watched)
    model, batch = planning_model(1), [[11, 3, END], [12, 12, 12, END], [10, END]]
    options: dict[str, Any] = {"temperature": 0.7, "seed": 1, "sparse": True}
    given = {"max_new_tokens": 64, "trace": True, "page_size": 3, "cache": "drop_finished"}
    result = generate(model, batch, METHOD, **given, **options)
    assert any(len(set(phases)) == 3 for phases in seen)
    assert_same(result, references(model, batch, 64, **options))
