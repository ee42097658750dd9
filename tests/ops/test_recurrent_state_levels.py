"""The steps of layers with a state at every vector level: see test_block_sparse_attention_levels.py. All have the same bits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pdkernels as pd
from tests.ops.state_cases import DTYPES, LAYERS, bits, random_step


def public(level_ops: Any) -> SimpleNamespace:
    """The raw ops with the arguments of the public functions."""

    def selective(*given: Any, dt_limit: tuple[float, float] = (0.0, float("inf")), **options: Any) -> Any:
        return level_ops.selective_state_(*given, dt_min=dt_limit[0], dt_max=dt_limit[1], **options)

    return SimpleNamespace(
        gated_delta_=level_ops.gated_delta_, selective_state_=selective, short_conv_=level_ops.short_conv_
    )


@pytest.mark.covering
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_every_level_has_the_same_bits(level_ops: object, name: str, dtype: torch.dtype) -> None:
    for seed in range(40):
        cache, rows, options = random_step(seed, name, dtype)
        here = cache.copy()
        found = [cache.step(rows, public(level_ops), **options), cache.state, cache.state_lengths.float()]
        wanted = [here.step(rows, pd, **options), here.state, here.state_lengths.float()]
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(found, wanted)), seed
