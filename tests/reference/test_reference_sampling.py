"""The draws of the reference decoders, and the examples in the docstrings of all reference modules."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pdkernels.reference
from pdkernels.reference.autoregressive import autoregressive
from pdkernels.reference.philox import random_words
from pdkernels.reference.sampling import OWN, distribution, draw, sampled_autoregressive, uniforms, without
from tests.support.base import follows, sequence_distribution
from tests.support.causal import SCRIPTS
from tests.support.tri_mode import ScriptedTriMode, Table

MODULES = sorted(module.name for module in pkgutil.iter_modules(pdkernels.reference.__path__))


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    module = importlib.import_module(f"pdkernels.reference.{name}")
    assert doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE).failed == 0


@given(seed=st.integers(0, 2**64 - 1), step=st.integers(0, 2**32 - 1), row=st.integers(0, 2**32 - 1))
def test_uniforms_are_the_words(seed: int, step: int, row: int) -> None:
    columns = torch.arange(6)
    u = uniforms(seed, step, torch.tensor(row), columns)
    assert u.dtype == torch.float64 and ((0 < u) & (u < 1)).all()
    words = random_words(seed, torch.tensor(step), torch.tensor(row), columns)
    assert torch.equal(u * 2**32, words.double() + 0.5)


@given(seed=st.integers(0, 2**64 - 1), temperature=st.sampled_from([0.0, 0.5, 2.0]), first=st.integers(0, 90))
def test_a_row_draws_the_same_alone(seed: int, temperature: float, first: int) -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(first))
    together = draw(logits, range(first, first + 5), temperature, seed, 3)
    assert together == [draw(logits[row : row + 1], [first + row], temperature, seed, 3)[0] for row in range(5)]
    if temperature == 0:
        assert together == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_draws_follow_their_distribution(temperature: float) -> None:
    logits = torch.tensor([[1.0, -torch.inf, 0.2, -0.5]])
    p = distribution(logits, temperature)[0]
    assert abs(p.sum().item() - 1) < 1e-12 and p[1] == 0
    counts = Counter((token,) for token in draw(logits.expand(4000, 4), range(4000), temperature, 11, OWN))
    assert follows(counts, {(v,): p[v].item() for v in (0, 2, 3)})
    other = distribution(logits, temperature + 0.5)[0]
    assert not follows(counts, {(v,): other[v].item() for v in (0, 2, 3)})


def test_distribution_at_temperature_zero_and_ties() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 5.0]])
    assert distribution(logits, 0.0).tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    assert draw(logits, [0, 1], 0.0, 9, OWN) == [1, 0]


def test_without_leaves_its_argument_alone() -> None:
    logits = torch.zeros(2, 3)
    assert without(logits, 1)[:, 1].isinf().all() and not logits.any()
    assert draw(without(logits, 0), [0, 1], 0.0, 0, OWN) == [1, 1]


def test_sampled_autoregressive() -> None:
    model = ScriptedTriMode(SCRIPTS["history"])
    assert sampled_autoregressive(model, [3, 1], 9, temperature=0.0) == autoregressive(model, [3, 1], 9)
    table = Table(4, seed=1)
    expected = sequence_distribution(table, [1], 2, 1.1)
    runs = [tuple(sampled_autoregressive(table, [1], 2, temperature=1.1, seed=seed).tokens) for seed in range(250)]
    assert follows(Counter(runs), expected) and not follows(Counter(runs), sequence_distribution(table, [1], 2, 0.6))
    # Continuing from where a run stopped, with its seed, is the same run.
    whole = sampled_autoregressive(table, [1], 6, temperature=1.1, seed=4).tokens
    assert sampled_autoregressive(table, [1, *whole[:2]], 4, temperature=1.1, seed=4).tokens == whole[2:]
    ended = sampled_autoregressive(table, [1], 6, temperature=1.1, end_tokens=[whole[1]], seed=4)
    assert ended.tokens == whole[: whole.index(whole[1]) + 1] and ended.forwards == len(ended.tokens)
