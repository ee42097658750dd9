"""The vocabulary statistics of every vector unit: see test_block_sparse_attention_levels.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.reference.token_statistics import kept
from tests.ops.token_cases import DTYPES, check, rows_of


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, width", [(200, 7), (20, 8200)])
def test_every_vector_unit(level_ops: Any, rows: int, width: int, dtype: torch.dtype) -> None:
    logits = rows_of(rows, width, dtype)
    check(pd.TokenStatistics(*level_ops.token_statistics(logits)), logits)
    for options in (
        {"temperature": 0.8},
        {"temperature": 0.8, "top_p": 0.9, "distribution": "sampling", "suppress": [3]},
        {"temperature": 0.8, "keep_top_k": 5, "top_p": 0.9, "typical_p": 0.8, "distribution": "sampling"},
    ):
        check(pd.TokenStatistics(*level_ops.token_statistics(logits, **options)), logits, **options)
    own = torch.arange(rows) * 2**33 - 5
    check(pd.TokenStatistics(*level_ops.token_statistics(logits, 0.8, seeds=own)), logits, temperature=0.8, seed=own)


def crowds(width: int) -> dict[str, torch.Tensor]:
    """Rows in which thousands of tokens may pass."""
    flat = rows_of(1, width, scale=1.0)[0]
    few_large, masked, far = flat.clone(), flat.clone(), flat.clone()
    few_large[width // 3] = 12.0
    masked[::3] = -torch.inf
    far[::5] = -1e9
    return {
        "flat": flat,
        "spread": 3 * flat,
        "one large": few_large,
        "ascending": flat.sort().values,
        "masked": masked,
        "far": far,
        "equals": (flat * 4).round() / 4,
        "large": flat + 1e5,
    }


@pytest.mark.parametrize("name", crowds(16))
def test_the_cut_through_thousands_of_tokens(level_ops: Any, name: str) -> None:
    """Of so many, one token more or less changes the log-sum-exp by more than a quarter of its probability."""
    logits = crowds(40_000)[name][None]
    for cut in (
        {"top_p": 0.95},
        {"top_p": 0.5},
        {"top_p": 0.9999},
        {"typical_p": 0.9},
        {"typical_p": 0.3},
        {"keep_top_k": 7000},
        {"keep_top_k": 7000, "top_p": 0.8, "min_p": 0.01},
        {"top_p": 0.9, "min_p": 1e-3, "typical_p": 0.8},
        {"min_p": 0.02},
    ):
        for temperature in (1.0, 0.7):
            stays = kept(
                logits,
                temperature,
                cut.get("top_p", 1.0),
                cut.get("min_p", 0.0),
                int(cut.get("keep_top_k", 0)),
                cut.get("typical_p", 1.0),
            )
            exponents = logits.double()[stays] / temperature
            expected = exponents.logsumexp(0)
            smallest = (exponents.min() - expected).exp().item()
            options = {"temperature": temperature, "distribution": "sampling", **cut}
            found = pd.TokenStatistics(*level_ops.token_statistics(logits, **options))
            rounding = 2e-7 * abs(expected.item())
            if rounding < smallest / 4:
                assert abs(found.logsumexp.item() - expected.item()) < rounding + smallest / 4, (cut, temperature)
            drawn = pd.TokenStatistics(*level_ops.token_statistics(logits, temperature=temperature, **cut))
            assert stays[0, found.ids[0]] and found.ids[0] == drawn.ids[0]
