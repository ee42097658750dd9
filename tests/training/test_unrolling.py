"""Recurrent depth in training: numbers of recurrences with their laws, and gradients through the last recurrences alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from pdkernels.training import draw_recurrences, unrolled_logits

STD = math.sqrt(0.4)


def small() -> Any:
    torch.manual_seed(0)
    config = pd.models.RecurrentDepthConfig(
        vocab_size=17, hidden_size=16, heads=2, head_dim=8, intermediate_size=24,
        prelude_layers=1, core_layers=1, coda_layers=1, mean_recurrence=4, max_positions=64,
    )  # fmt: skip
    return pd.models.RecurrentDepth(config).double()


@pytest.mark.parametrize("mean", [1.0, 4.0, 16.0])
@pytest.mark.parametrize("law", ["lognormal_poisson", "exponential"])
def test_recurrences_have_their_law(law: Any, mean: float) -> None:
    """Variances by the formulas: of a mixed Poisson distribution, and of a geometric one, which is an exponential rounded up."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.tensor([draw_recurrences(mean, generator, law=law) for _ in range(6000)], dtype=torch.float64)
    assert draws.min() >= 1 and abs(draws.mean() - mean) <= 0.05 * mean
    rate = mean - 1
    mixed = rate + rate**2 * (math.exp(0.25) - 1)
    variance = mixed if law == "lognormal_poisson" else mean * rate
    assert abs(draws.var() - variance) <= 0.15 * variance


def test_without_spread_they_are_of_a_poisson_distribution() -> None:
    generator = torch.Generator().manual_seed(1)
    draws = torch.tensor([draw_recurrences(9, generator, spread=0) for _ in range(6000)], dtype=torch.float64)
    assert abs(draws.mean() - 9) < 0.2 and abs(draws.var() - 8) < 0.8


def by_hand(model: Any, tokens: Tensor, states: Tensor, recurrences: int, backward: int) -> Tensor:
    """The whole graph, cut where truncated backpropagation stops."""
    context = model.context(tokens.shape[1])
    term = model.embedding_term(model.prelude(tokens, context))
    for number in range(recurrences):
        if number == recurrences - backward:
            states = states.detach()
        states = model.core(states, term, context)
    return model.coda(states if backward else states.detach(), context)


@pytest.mark.parametrize(("recurrences", "backward"), [(1, 8), (5, 8), (5, 2), (5, 0), (3, 3)])
def test_gradients_go_through_the_last_recurrences(recurrences: int, backward: int) -> None:
    model = small()
    tokens = torch.randint(17, (2, 6), generator=torch.Generator().manual_seed(2))
    states = torch.empty(2, 6, 16, dtype=torch.float64)
    torch.nn.init.trunc_normal_(states, std=STD, a=-3 * STD, b=3 * STD, generator=torch.Generator().manual_seed(3))
    found = []
    for logits in (
        unrolled_logits(model, tokens, recurrences, torch.Generator().manual_seed(3), backward_recurrences=backward),
        by_hand(model, tokens, states, recurrences, backward),
    ):
        model.zero_grad()
        logits.sin().sum().backward()
        found.append((logits.detach(), [None if p.grad is None else p.grad.clone() for p in model.parameters()]))
    (ours, gradients), (theirs, expected) = found
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for a, b in zip(gradients, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    rows = unrolled_logits(model, tokens, recurrences, torch.Generator().manual_seed(3), rows=[1, 4])
    torch.testing.assert_close(rows, ours[:, [1, 4]], rtol=1e-12, atol=1e-12)


def test_what_is_refused() -> None:
    model, generator, tokens = small(), torch.Generator(), torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="mean must be from 1 to 1e6, got 0.5"):
        draw_recurrences(0.5, generator)
    with pytest.raises(ValueError, match="law must be one of"):
        draw_recurrences(2, generator, law="uniform")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="recurrences must be 1 or more, got 0"):
        unrolled_logits(model, tokens, 0, generator)
    with pytest.raises(ValueError, match="backward_recurrences must be 0 or more, got -1"):
        unrolled_logits(model, tokens, 1, generator, backward_recurrences=-1)
    with pytest.raises(ValueError, match=r"tokens must have shape \(batch, T\), got \(3,\)"):
        unrolled_logits(model, tokens[0], 1, generator)
    with pytest.raises(TypeError, match="model must be a RecurrentDepth, got Transformer"):
        unrolled_logits(pd.models.load("tiny-code"), tokens, 1, generator)  # type: ignore[arg-type]
