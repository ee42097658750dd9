"""Dream's sampler: tokens, forwards and filled positions of the plain reference, alone and in a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels.decoding import generate
from pdkernels.reference.dream import dream
from tests.support import masked_promises as shared
from tests.support.base import Plain, seeds, streams
from tests.support.masked import MASK, Scripted, hashed, prompts, small_masked
from tests.support.masked_promises import assert_same

METHOD = "dream"
ALGORITHMS = ["origin", "maskgit_plus", "topk_margin", "entropy"]


def reference(model: Any, batch: list[list[int]], limit: int, **options: Any) -> list[Any]:
    return [
        dream(Plain(model), prompt, limit, mask_token=MASK, **options) for prompt, options in streams(batch, options)
    ]


@settings(max_examples=50, deadline=None)
@given(
    model=st.tuples(st.integers(0, 2), st.sampled_from(["next", "next", "own"])),
    batch=prompts,
    limit=st.integers(1, 10),
    order=st.sampled_from([("origin", 0.0), *((name, heat) for name in ALGORITHMS[1:] for heat in (0.0, 0.3, 2.0))]),
    options=st.fixed_dictionaries(
        {
            "steps": st.sampled_from([None, 1, 3, 4, 7, 12]),
            "eps": st.sampled_from([1e-3, 0.1, 0.6]),
            "temperature": st.sampled_from([0.2, 0.0, 1.0]),
            "top_p": st.sampled_from([0.9, 1.0, 0.4]),
            "top_k": st.sampled_from([None, None, 1, 3, 50]),
        }
    ),
    ends=st.lists(st.integers(0, MASK - 1), max_size=3),
    seed=seeds,
)
def test_equals_the_reference(model, batch, limit, order, options, ends, seed) -> None:
    options = {"algorithm": order[0], "order_temperature": order[1], "end_tokens": ends, "seed": seed} | options
    transformer = small_masked(*model)
    result = generate(transformer, batch, METHOD, max_new_tokens=limit, trace=True, **options)
    assert_same(result, reference(transformer, batch, limit, **options))


@pytest.mark.parametrize("algorithm", ALGORITHMS[1:])
def test_the_head_runs_for_open_positions_only(algorithm: str) -> None:
    batch, limit = [[1, 2, 3], [4]], 12
    model = Scripted(hashed(5), "next")
    result = generate(model, batch, METHOD, max_new_tokens=limit, steps=5, algorithm=algorithm, trace=True)
    assert_same(result, reference(Scripted(hashed(5), "next"), batch, limit, steps=5, algorithm=algorithm))
    assert result.stats.accepted == [[2, 2, 2, 2, 4]] * 2
    assert model.head_rows == [12, 10, 8, 6, 4]


def test_as_many_steps_as_tokens_begin_with_an_idle_one() -> None:
    """1 - s / t of m masks is slightly below 1, whatever m: published as it is here."""
    result = generate(Scripted(hashed(0)), [1], METHOD, max_new_tokens=16)
    assert sum(result.stats.accepted[0]) == 16 and result.stats.accepted[0][-1] == 2


def test_one_step_is_the_argmax_of_one_forward() -> None:
    model = small_masked(0, "next")
    result = generate(model, [3, 1], METHOD, max_new_tokens=7, steps=1)
    logits = model(torch.tensor([[3, 1] + [MASK] * 7]))[0, 1:-1]
    logits[:, MASK] = -torch.inf
    assert result.tokens.tolist() == logits.argmax(-1).tolist() and result.stats.forwards == 1


def test_scores_differ() -> None:
    """The three scores weigh the head and the tail of a distribution differently; entropy depends on all of it."""
    distributions = {1: [0.5, 0.45, 0.05], 2: [0.45, 0.1, 0.1, 0.1, 0.1, 0.1, 0.05], 3: [0.4, 0.2, 0.2, 0.2]}

    class Distributions(Scripted):
        def rows(self, text: list[int]) -> torch.Tensor:
            out = torch.full((len(text), MASK + 1), -1e4, dtype=torch.float64)
            for position, distribution in distributions.items():
                out[position, : len(distribution)] = torch.tensor(distribution, dtype=torch.float64).log()
            return out

    first = {}
    for algorithm in ALGORITHMS[1:]:
        result = generate(
            Distributions(hashed(0)), [1], METHOD, max_new_tokens=3, steps=2, eps=0.3, algorithm=algorithm, trace=True
        )
        first[algorithm] = sorted(result.stats.trace[0][0].committed)
    assert first == {"maskgit_plus": [1], "topk_margin": [2], "entropy": [1]}


def test_order_temperature_draws_the_order() -> None:
    model = small_masked(0, "next")

    def orders(temperature: float) -> set[tuple[int, ...]]:
        options: dict[str, Any] = {"max_new_tokens": 5, "eps": 0.2, "order_temperature": temperature, "trace": True}
        runs = [generate(model, [3], METHOD, seed=seed, **options) for seed in range(4)]
        return {tuple(position for step in run.stats.trace[0] for position in step.committed) for run in runs}

    assert len(orders(0.0)) == len(orders(1e-6)) == 1 and orders(0.0) == orders(1e-6)
    assert len(orders(100.0)) > 2


def test_no_read_where_the_schedule_alone_decides() -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "steps": 6}
    assert shared.reads_of_the_device(Scripted(hashed(2)), [[1, 2], [5]], METHOD, **options) == 2


def test_errors() -> None:
    shared.assert_errors(
        METHOD,
        [
            ({"steps": 0}, "steps must be at least 1, got 0."),
            ({"steps": 2.0}, "TypeError: steps must be an int, got float."),
            (
                {"algorithm": "best"},
                "algorithm must be one of 'origin', 'maskgit_plus', 'topk_margin', 'entropy', 'confidence_threshold', got 'best'.",
            ),
            ({"eps": 1.0}, "eps must lie between 0 and 1, got 1.0."),
            ({"eps": 0}, "eps must lie between 0 and 1, got 0."),
            ({"eps": None}, "TypeError: eps must be a number, got NoneType."),
            ({"top_p": 1.5}, "top_p must be in 0 .. 1, got 1.5."),
            ({"top_k": 0}, "top_k must be at least 1, got 0."),
            ({"order_temperature": -1}, "order_temperature must be at least 0, got -1."),
            (
                {"order_temperature": 0.5, "algorithm": "origin"},
                "order_temperature must be 0 with algorithm 'origin', got 0.5.",
            ),
            ({"temperature": -1.0}, "temperature must be finite and at least 0, got -1.0."),
            ({"seed": 1.5}, "TypeError: seed must be an int or a list of ints, got float."),
            ({"mask_token": 13}, "mask_token must be an id in 0 .. 12, got 13."),
        ],
    )
