"""Inputs, masks, and ways to run block_sparse_attention, for its tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from pdkernels import masks
from pdkernels.masks import SegmentMask, TilePlan
from pdkernels.reference.block_sparse_attention import block_sparse_attention as reference
from tests.harness.error_budget import assert_within_budget

OP = torch.ops.pdkernels.block_sparse_attention.default
BACKWARD = torch.ops.pdkernels.block_sparse_attention_backward.default
CUDA = ["cuda"] if torch.cuda.is_available() else []
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(params=["reference", "native", *CUDA], scope="session")
def backend(request: pytest.FixtureRequest) -> str:
    """``reference`` and ``native`` on the CPU, ``cuda``: what `auto` means there."""
    return request.param


@pytest.fixture(params=["native", *CUDA], scope="session")
def kernels(request: pytest.FixtureRequest) -> str:
    """Implementations that promise more than PyTorch: bits that depend on the inputs alone."""
    return request.param


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    grad_lse: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Inputs:
        return Inputs(*(function(x) for x in self))


class Results(NamedTuple):
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def make_inputs(
    q_len: int,
    kv_len: int,
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    generator = torch.Generator().manual_seed(q_len + 7 * kv_len)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q, grad_out = (randn(batch, q_len, heads, head_dim).to(dtype) for _ in range(2))
    k, v = (randn(batch, kv_len, kv_heads, head_dim).to(dtype) for _ in range(2))
    return Inputs(q, k, v, grad_out, randn(batch, heads, q_len))


def on_device(backend: str) -> tuple[str, str]:
    """The device and the name to pass for an implementation."""
    return ("cuda", "auto") if backend == "cuda" else ("cpu", backend)


def run(backend: str, inputs: Inputs, plan: TilePlan, scale: float | None = None, through_lse: bool = True) -> Results:
    device, name = on_device(backend)
    q, k, v, grad_out, grad_lse = inputs.map(lambda x: x.to(device))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = pd.block_sparse_attention(*leaves, plan.to(device), scale=scale, return_lse=True, backend=name)
    outputs, gradients = ((out, lse), (grad_out, grad_lse)) if through_lse else ((out,), (grad_out,))
    return Results(*(x.detach().cpu() for x in (out, lse, *torch.autograd.grad(outputs, leaves, gradients))))


def run_dense(
    inputs: Inputs,
    mask: Tensor,
    dtype: torch.dtype,
    scale: float | None = None,
    through_lse: bool = True,
    device: str = "cpu",
) -> Results:
    inputs = inputs.map(lambda x: x.detach().to(device))
    leaves = [x.to(dtype).requires_grad_() for x in inputs[:3]]
    out, lse = reference(*leaves, mask.to(device), scale)
    gradients = (inputs.grad_out.to(dtype), inputs.grad_lse.to(lse.dtype) * through_lse)
    return Results(*(x.detach().cpu() for x in (out, lse, *torch.autograd.grad((out, lse), leaves, gradients))))


def check(
    backend: str, inputs: Inputs, plan: TilePlan, dense: Tensor, scale: float | None = None, through_lse: bool = True
) -> Results:
    """The error is held against PyTorch's on the same device: a GPU adds up in another order than a CPU."""
    actual = run(backend, inputs, plan, scale, through_lse)
    exact = run_dense(inputs, dense, torch.float64, scale, through_lse)
    same = run_dense(inputs, dense, inputs.q.dtype, scale, through_lse, on_device(backend)[0])
    for name, *tensors in zip(Results._fields, actual, exact, same):
        assert_within_budget(*tensors, name=name)
    return actual


NOISE_AWARE = {
    f"noise aware, {conditioning}, {layout}": masks.noise_aware_causal(
        37, 8, 7, conditioning, 3 if conditioning == "window" else None, layout
    )
    for conditioning in ("noisy", "clean", "window")
    for layout in ("streams", "interleaved")
}
DUAL_STREAM = {
    f"dual stream, {clean}, {order}": masks.dual_stream(75, 16, clean, order)
    for clean in ("causal", "block")
    for order in ("noisy_first", "clean_first")
}
MASKS: dict[str, SegmentMask] = {
    **NOISE_AWARE,
    **DUAL_STREAM,
    "block causal": masks.block_causal(130, 24, prefix_len=11),
    "planned": masks.planned([(20, (33, 40, 7), True), (11, (24,), True), (1, (), False)]),
    "planned, sparse": masks.planned([(20, (33, 40, 7), True), (11, (24,), True), (1, (), False)], sparse=True),
    "quadratic": masks.quadratic(11),
    "candidates": masks.candidates(5, 27),
    "tree": masks.tree([max(-1, i - 1 - (i * i) % 7) for i in range(90)]),
    "causal": masks.causal(150),
    "causal, cached": masks.causal(40, 131),
    "full": masks.full(70, 129),
    "full tiles only": masks.full(128, 256),
    "pack": masks.pack([masks.causal(50), masks.dual_stream(30, 8), masks.candidates(2, 20)], length=180),
    "window on a pack": masks.pack([masks.causal(50), masks.dual_stream(30, 8)])[13:100, 5:],
    "nothing": masks.pack([], length=70),
}


def raw(mask: SegmentMask, inputs: Inputs, device: str) -> tuple[tuple, tuple]:
    """Arguments of the two raw ops."""
    q, k, v, grad_out, grad_lse = inputs.map(lambda x: x.to(device))
    plan = mask.plan(32, 48, device)
    rest = (*plan.arguments, 0.2)
    forward = (*(x.requires_grad_() for x in (q, k, v)), *rest)
    out, lse = OP(*forward)
    return forward, (grad_out, grad_lse, *(x.detach() for x in (out, lse, q, k, v)), *rest)
