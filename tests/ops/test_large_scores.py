"""Attention whose scores are far from 0, up to those that overflow: rows are those of float64, and weights add up to 1.

Inputs are powers of two, so that scores are exact in every dtype: what differs is the softmax alone.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from pdkernels.reference.block_sparse_attention import block_sparse_attention as dense
from tests.ops.attention_cases import DTYPES

# Of a query with all keys, up to signs; float16 has no larger ones than 2^15 * 2^15 * 16.
EXPONENTS = [0, 4, 8, 13, 17, 20, 24, 27, 30, 33, 60, 100, 120]
HEADS, DIM, KEYS = 2, 16, 200


def inputs(dtype: torch.dtype, exponent: int, rows: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of a row are whole multiples of 2^exponent / 8, with ties; those of a few rows are all negative."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.zeros(1, rows, HEADS, DIM)
    q[..., 0] = 2.0 ** (exponent // 2)
    q[:, ::3] *= -1
    k = torch.zeros(1, KEYS, HEADS, DIM)
    k[..., 0] = 2.0 ** (exponent - exponent // 2) * torch.randint(1, 8, (1, KEYS, HEADS), generator=generator) / 8
    v = torch.randn(1, KEYS, HEADS, DIM, generator=generator)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def exponents(dtype: torch.dtype) -> list[int]:
    return [one for one in EXPONENTS if dtype != torch.float16 or one <= 28]


def exact(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return dense(q.double(), k.double(), v.double(), mask, scale)


def tolerance(dtype: torch.dtype, backend: str = "auto") -> float:
    """The reference's weights add up to 1 from a log-sum-exp of 2^14 on; before they are off by half its last bit."""
    if backend == "reference":
        return max(2e-3, tolerance(dtype))
    return {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward(dtype: torch.dtype, rows: int, backend: str) -> None:
    """By tiles of block-sparse attention, and by panels and few lanes of speculative attention."""
    for exponent in exponents(dtype):
        q, k, v = inputs(dtype, exponent, rows)
        mask = pd.masks.full(rows, KEYS)
        expected = exact(q, k, v, torch.ones(rows, KEYS, dtype=torch.bool), 1.0)
        found = [pd.block_sparse_attention(q, k, v, mask.plan(32, 32), scale=1.0, return_lse=True, backend=backend)]
        prefix, tail = KEYS - rows, pd.masks.full(rows).plan(16, 16)
        caches = [torch.cat([x[:, :prefix], torch.full_like(x[:, prefix:], torch.nan)], 1) for x in (k, v)]
        new = [x[:, prefix:] for x in (k, v)]
        lengths = torch.tensor([prefix])
        found.append(
            pd.speculative_attention(q, *new, *caches, lengths, tail, scale=1.0, return_lse=True, backend=backend)
        )
        for out, lse in found:
            assert not out.isnan().any(), exponent
            torch.testing.assert_close(
                out.double(), expected[0], rtol=0, atol=3 * tolerance(dtype, backend), msg=str(exponent)
            )
            torch.testing.assert_close(lse.double(), expected[1].double(), rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_add_up_to_one(dtype: torch.dtype, backend: str) -> None:
    for exponent in exponents(dtype):
        q, k, v = inputs(dtype, exponent, 20)
        out = pd.block_sparse_attention(
            q, k, torch.ones_like(v), pd.masks.full(20, KEYS).plan(32, 32), scale=1.0, backend=backend
        )
        torch.testing.assert_close(out.double(), torch.ones_like(out).double(), rtol=0, atol=tolerance(dtype, backend))


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_of_the_values(dtype: torch.dtype, backend: str) -> None:
    """The gradients of values are sums of weights, whatever the scores are."""
    for exponent in exponents(dtype):
        q, k, v = (x.requires_grad_() for x in inputs(dtype, exponent, 20))
        plan = pd.masks.full(20, KEYS).plan(32, 32)
        out = pd.block_sparse_attention(q, k, v, plan, scale=1.0, backend=backend)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad)
        exact_inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
        wide, _ = dense(*exact_inputs, torch.ones(20, KEYS, dtype=torch.bool), 1.0)
        expected = torch.autograd.grad(wide, exact_inputs, grad.double())
        torch.testing.assert_close(
            dv.double(), expected[2], rtol=0, atol=6 * tolerance(dtype, backend), msg=str(exponent)
        )
        for found, wanted, factor in ((dq, expected[0], k), (dk, expected[1], q)):
            assert found.isfinite().all(), exponent
            atol = 30 * tolerance(dtype, backend) * factor.detach().abs().max().item()
            torch.testing.assert_close(found.double(), wanted, rtol=0, atol=atol, msg=str(exponent))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_that_overflow(dtype: torch.dtype) -> None:
    """Infinite scores leave no weights: NaN in the rows that have one, as in the formula; rows of -inf have no key."""
    q, k, v = inputs(dtype, 0, 4)
    q[0, 0, 0, 0] = q[0, 1, 1, 0] = 1e30
    q[0, 1, 1, 0] *= -1
    k[..., 0] = 1e30
    out, lse = pd.block_sparse_attention(q, k, v, pd.masks.full(4, KEYS).plan(32, 32), scale=1.0, return_lse=True)
    assert out[0, 0, 0].isnan().all() and not out[0, 2:].isnan().any() and not out[0, 1, 0].isnan().any()
    assert not out[0, 1, 1].any() and lse[0, 1, 1] == -torch.inf


def test_scales_at_the_ends_of_float32() -> None:
    for scale in (1e-38, 1e-30, 1e30, 3e38, -3e38, 0.0):
        for dtype in DTYPES:
            q, k, v = inputs(dtype, 0, 5)
            out, lse = pd.block_sparse_attention(
                q, k, v, pd.masks.full(5, KEYS).plan(32, 32), scale=scale, return_lse=True
            )
            expected = exact(q, k, v, torch.ones(5, KEYS, dtype=torch.bool), scale)
            torch.testing.assert_close(out.double(), expected[0], rtol=0, atol=3 * tolerance(dtype), msg=str(scale))
            torch.testing.assert_close(lse.double(), expected[1], rtol=1e-6, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "level", ["avx2", *(pytest.param(level, marks=pytest.mark.slow) for level in ("portable", "avx512", "amx"))]
)
def test_at_every_level_of_this_processor(level: str) -> None:
    """Emulated levels have no fused multiply-add, which is where far scores went wrong."""
    if os.environ.get("PDKERNELS_CPU_ISA"):
        return
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    environment = os.environ | {"PDKERNELS_CPU_ISA": level}
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-2000:]
