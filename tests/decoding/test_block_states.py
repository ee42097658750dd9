"""States of a block that are computed before their step: the tokens, steps and random numbers of the plain sampler."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels import models
from pdkernels.decoding import generate
from pdkernels.grammar import Grammar
from tests.support.base import page_sizes, seeds
from tests.support.tri_mode import prompts, small_transformer

METHOD = "block_diffusion"
SMALL = 13  # ids of the random model, the mask the last


@cache
def small(seed: int) -> Any:
    """In float32: rows of float64 have other bits in another batch."""
    return deepcopy(small_transformer(seed)).float()


def both(model: Any, batch: Any, speculate: int, **options: Any) -> tuple[Any, Any]:
    given = {"threshold": None, "trace": True, **options}
    found = [generate(model, batch, METHOD, speculate=n, **given) for n in (0, speculate)]
    return found[0], found[1]


def assert_same(plain: Any, fast: Any) -> None:
    assert [row.tolist() for row in fast.tokens] == [row.tolist() for row in plain.tokens]
    assert fast.stats.accepted == plain.stats.accepted and fast.stats.trace == plain.stats.trace
    assert fast.stats.forwards <= plain.stats.forwards


@settings(max_examples=40, deadline=None)
@given(
    model=st.integers(0, 2),
    batch=prompts(SMALL),
    speculate=st.integers(1, 9),
    limit=st.integers(1, 14),
    block_size=st.integers(1, 7),
    options=st.fixed_dictionaries(
        dict(
            temperature=st.sampled_from([0.0, 0.5, 1.0]),
            top_k=st.sampled_from([None, 3]),
            refresh=st.sampled_from(["causal", "bidirectional"]),
            steps_per_block=st.sampled_from([None, 1, 2, 3]),
            page_size=page_sizes,
        )
    ),
    ends=st.lists(st.integers(0, SMALL - 2), max_size=3),
    seed=seeds,
)
def test_tokens_of_the_plain_sampler(model, batch, speculate, limit, block_size, options, ends, seed) -> None:
    given = {"block_size": block_size, "end_tokens": ends, "seed": seed, "max_new_tokens": limit}
    assert_same(*both(small(model), batch, speculate, **given, **options))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_half_the_forwards_of_a_trained_model(temperature: float) -> None:
    """In a batch, and alone with other seeds."""
    model = models.load("tiny-trimode")
    texts = [f"{a} + {b} = ?\n" for a in (12, 57, 88) for b in (9, 34)]
    options = {"max_new_tokens": 32, "block_size": 16, "temperature": temperature, "end_tokens": ()}
    assert_same(*both(model, texts, 7, seed=4, **options))
    alone = [both(model, text, 7, seed=seed, **options) for seed, text in enumerate(texts)]
    for plain, fast in alone:
        assert_same(plain, fast)
    assert 2 * sum(fast.stats.forwards for _, fast in alone) <= sum(plain.stats.forwards for plain, _ in alone)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"speculate": -1, "threshold": None}, "speculate must be an int from 0 to 64, got -1"),
        ({"speculate": True, "threshold": None}, "speculate must be an int from 0 to 64, got True"),
        ({"speculate": 65, "threshold": None}, "speculate must be an int from 0 to 64, got 65"),
        (
            {"speculate": 2, "threshold": None, "repetition_penalty": 1.2},
            "speculate must be 0 with a grammar, a bias or pen",
        ),
        ({"speculate": 2}, "threshold must be None with speculate, got 0.9"),
    ],
)
def test_what_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        generate(small(0), torch.tensor([[1, 2]]), METHOD, max_new_tokens=4, **options)


def test_a_grammar_is_refused() -> None:
    options = {"threshold": None, "speculate": 2, "grammar": Grammar.regex("[0-9]{4,12}")}
    with pytest.raises(ValueError, match="speculate must be 0 with a grammar, a bias or penalties, got 2"):
        generate(models.load("tiny-trimode"), "58 + 31 = ?\n", METHOD, max_new_tokens=4, **options)
