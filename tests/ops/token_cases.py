"""Rows of logits for the tests of token_statistics, and the comparison with the reference."""

from __future__ import annotations

import torch
from torch import Tensor

import pdkernels as pd
from pdkernels.reference.token_statistics import token_statistics as reference
from tests.harness.error_budget import assert_within_budget

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def rows_of(rows: int, width: int, dtype: torch.dtype = torch.float32, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(rows * 10_007 + width)
    return (scale * torch.randn(rows, width, generator=generator)).to(dtype)


def run(impl, logits: Tensor, **options) -> pd.TokenStatistics:
    moved = {name: value.to(impl.device) if isinstance(value, Tensor) else value for name, value in options.items()}
    return pd.TokenStatistics(*(t.cpu() for t in impl.token_statistics(logits.to(impl.device), **moved)))


def check(actual: pd.TokenStatistics, logits: Tensor, **options) -> None:
    """Ids exactly as in double precision; floats within the error budget."""
    options.setdefault("top_k", 5)
    exact, same = reference(logits.double(), **options), reference(logits, **options)
    for name, *tensors in zip(pd.TokenStatistics._fields, actual, exact, same):
        assert_within_budget(*tensors, name=name)
