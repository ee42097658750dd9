"""The vocabulary statistics of every vector unit: see test_block_sparse_attention_levels.py."""

from __future__ import annotations

import pytest
import torch

import pdkernels as pd
from tests.ops.token_cases import DTYPES, check, rows_of


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, width", [(200, 7), (20, 8200)])
def test_every_vector_unit(level_ops: object, rows: int, width: int, dtype: torch.dtype) -> None:
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
