"""Jacobi decoding on recurrent-depth models: exact with one recurrence, and not promised with more."""

from __future__ import annotations

import pytest
import torch

from pdkernels.decoding import generate
from pdkernels.models import RecurrentDepth, RecurrentDepthConfig


def random_model(recurrences: int, seed: int) -> RecurrentDepth:
    torch.manual_seed(seed)
    sizes = dict(vocab_size=13, hidden_size=16, heads=2, head_dim=8, intermediate_size=24)
    layers = dict(prelude_layers=1, core_layers=1, coda_layers=1)
    config = RecurrentDepthConfig(**sizes, **layers, mean_recurrence=recurrences)
    return RecurrentDepth(config).double().requires_grad_(False)


def differences(recurrences: int, temperature: float, draft: str, models: int) -> int:
    """Of random models and seeds, those whose tokens are not the ones that `autoregressive` draws."""
    found = 0
    for seed in range(models):
        model = random_model(recurrences, seed % 5)
        given = {"max_new_tokens": 16, "temperature": temperature, "seed": 2**63 + seed}
        one = generate(model, [1, 2, 3, 1, 2], "autoregressive", **given)
        other = generate(model, [1, 2, 3, 1, 2], "jacobi", draft=draft, **given)
        found += not torch.equal(one.tokens, other.tokens)
    return found


@pytest.mark.covering
@pytest.mark.parametrize("draft", ["model", "lookup"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_one_recurrence_is_exact(temperature: float, draft: str) -> None:
    assert differences(1, temperature, draft, 5) == 0


def test_more_recurrences_are_not_even_at_temperature_0() -> None:
    """What docs/recurrent_depth.md says: should this fail, the sentence there has to go."""
    assert differences(2, 0.0, "model", 10) or differences(4, 0.0, "lookup", 10)
