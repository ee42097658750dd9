"""Inputs and checks that the tests of linear_token_statistics share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

import pdkernels as pd
from pdkernels.reference.linear_token_statistics import linear_token_statistics as reference
from pdkernels.reference.sampling import uniforms
from tests.harness.error_budget import assert_within_budget

DRAWS = [(0.0, "model"), (0.7, "model"), (1.6, "sampling"), (0.0, "sampling")]


def inputs(
    rows: int, width: int, depth: int, dtype: torch.dtype = torch.float32, peak: float = 3.0
) -> tuple[Tensor, Tensor]:
    """Hidden states and a head whose logits have a standard deviation of `peak`."""
    generator = torch.Generator().manual_seed(rows * 10_007 + width * 101 + depth)
    hidden, weight = (torch.randn(size, depth, generator=generator) for size in (rows, width))
    return hidden.to(dtype), (weight * peak / depth**0.5).to(dtype)


def whole_numbers(rows: int, width: int, depth: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """As `inputs`, with small integers: every order of summation gives the same logits, and many are equal."""
    generator = torch.Generator().manual_seed(rows * 10_007 + width * 101 + depth)
    hidden, weight = (torch.randint(-2, 3, (size, depth), generator=generator) for size in (rows, width))
    return hidden.to(dtype), weight.to(dtype)


def check_exactly(found: pd.TokenStatistics, hidden: Tensor, weight: Tensor, **options: Any) -> None:
    """For exact logits: the ids of the reference, floats to some roundings, NaN where it has NaN."""
    exact = pd.TokenStatistics(*reference(hidden.double(), weight.double(), **options))
    for name, actual, wanted in zip(exact._fields, found, exact):
        if not actual.dtype.is_floating_point:
            assert torch.equal(actual, wanted), name
        else:
            torch.testing.assert_close(actual.double(), wanted, rtol=2e-5, atol=2e-6, equal_nan=True)


def check(
    found: pd.TokenStatistics,
    hidden: Tensor,
    weight: Tensor,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    step: int = 0,
    suppress: tuple[int, ...] = (),
    top_k: int = 5,
    distribution: str = "model",
) -> None:
    """Floats by the error budget. In the exact logits the chosen token is below the best by at most the error that two
    logits may have: that of the product in this dtype, by the same budget."""
    options = dict(
        temperature=temperature, seed=seed, step=step, suppress=suppress, top_k=top_k, distribution=distribution
    )
    exact = pd.TokenStatistics(*reference(hidden.double(), weight.double(), **options))
    same = pd.TokenStatistics(*reference(hidden, weight, **options))
    for name in ("top_probs", "margin", "entropy", "logsumexp"):
        assert_within_budget(getattr(found, name), getattr(exact, name), getattr(same, name), name=name)

    logits, plain = linear(hidden.double(), weight.double()), linear(hidden, weight).double()
    error = (
        2 * (logits - plain).abs().max() + torch.finfo(hidden.dtype).eps / 2 * logits.abs().max() + 1e-6 * temperature
    )
    for x in (logits, plain):
        x[:, list(suppress)] = -torch.inf
    rows = torch.arange(len(logits))[:, None]
    scores = logits
    if temperature > 0:
        words = uniforms(seed, step, rows, torch.arange(logits.shape[1]))
        scores = logits - temperature * torch.log(-torch.log(words))
    assert found.ids.dtype == found.top_ids.dtype == torch.int64
    assert (scores.gather(1, found.ids[:, None])[:, 0] >= scores.amax(1) - 2 * error).all()
    ranked = logits.topk(top_k).values
    assert (logits.gather(1, found.top_ids) >= ranked - 2 * error).all()
    assert all(len(set(ids)) == top_k for ids in found.top_ids.tolist())

    divisor = temperature if distribution == "sampling" and temperature > 0 else 1.0
    of_chosen = [torch.softmax(x / divisor, 1).gather(1, found.ids[:, None])[:, 0] for x in (logits, plain)]
    assert_within_budget(found.probs, of_chosen[0], of_chosen[1].float(), name="probs")
