"""PyTorch's attention of a forward without a plan: NaN shows in every row that sees it, and in no other."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pdkernels.models import Transformer, TransformerConfig
from pdkernels.models.architectures.attention import Visibility, attend

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [5, 40]


def masks(length: int) -> dict[str, tuple[Visibility, Tensor]]:
    every = torch.ones(length, length, dtype=torch.bool)
    some = torch.rand(length, length, generator=torch.Generator().manual_seed(2)) < 0.5
    some |= torch.eye(length, dtype=torch.bool)
    return {
        "full": (Visibility(None), every),
        "causal": (Visibility(None, causal=True), every.tril()),
        "mask": (Visibility(some[None, None]), some),
    }


def by_rows(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Each row over the keys that it sees, in float64; a row whose scores are all -inf is one that sees nothing, 0."""
    out = torch.empty(q.shape, dtype=torch.float64)
    for row in range(q.shape[1]):
        for head in range(q.shape[2]):
            own = head // (q.shape[2] // k.shape[2])
            keys, values = (x[0, seen[row], own].double() for x in (k, v))
            scores = (keys * q[0, row, head].double()).sum(-1) / math.sqrt(q.shape[3])
            out[0, row, head] = 0 if scores.isneginf().all() else (scores.softmax(-1)[:, None] * values).sum(0)
    return out


@pytest.mark.parametrize("kind", ["full", "causal", "mask"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_see_a_nan(dtype: torch.dtype, kind: str) -> None:
    for length in LENGTHS:
        visibility, seen = masks(length)[kind]
        generator = torch.Generator().manual_seed(length)
        clean = [torch.randn(1, length, heads, 16, generator=generator).to(dtype) for heads in (2, 1, 1)]
        for name in range(3):
            for value in (math.nan, math.inf):
                q, k, v = (x.clone() for x in clean)
                (q, k, v)[name][0, 3, 0, 5] = value
                found, wanted = attend(q, k, v, visibility), by_rows(q, k, v, seen)
                assert torch.equal(found.isnan(), wanted.isnan()), (length, name, value)
                torch.testing.assert_close(found.double(), wanted, rtol=0.05, atol=0.05, equal_nan=True)


def test_scores_that_overflow() -> None:
    """Infinity minus infinity inside a score, though all inputs are finite."""
    q, k, v = (torch.ones(1, 4, 1, 16) for _ in range(3))
    q[0, 2] = 1e30
    k[..., ::2], k[..., 1::2] = 1e30, -1e30
    found = attend(q, k, v, Visibility(None))
    assert found[0, 2].isnan().all() and not found[0, [0, 1, 3]].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_a_nan_in_a_weight_shows_in_all_logits(dtype: torch.dtype) -> None:
    config = TransformerConfig(
        vocab_size=19, hidden_size=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate_size=12
    )
    for name in ("qkv", "output", "gate_up", "down"):
        model = Transformer(config).to(dtype).requires_grad_(False)
        weight = next(x for own, x in model.named_parameters() if name in own and x.dim() == 2)
        weight[3, 7] = math.nan
        assert model(torch.tensor([[3, 1, 4, 1, 5]])).isnan().all(), name
