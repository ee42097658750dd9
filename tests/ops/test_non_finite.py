"""A NaN or an infinity shows in every result that depends on it, and in no other: all ops, dtypes and implementations."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from pdkernels._attention import AttentionArguments, GradientArguments, SpeculativeArguments
from pdkernels.ops.library import OPS
from tests.harness.triton_interpreter import dot_dtypes, requires_triton
from tests.ops.examples import PUBLIC, floats_of
from tests.ops.implementations import emulated_ops, simulated_ops
from tests.ops.non_finite import IN_BYTES, RANKED, check_infinities, check_nan, function_of

FLOATS = [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
# Attention is last: it takes longest, and the fast cases have the first ops in every dtype.
WITH_FLOATS = sorted(
    (op for op in OPS if floats_of(op) and op not in RANKED | IN_BYTES), key=lambda op: "attention" in op
)
FORWARD = [op for op in WITH_FLOATS if op in PUBLIC]
# The module of each op that has a Triton kernel, and what calls it on the arguments of the raw op.
TRITON = {
    "block_sparse_attention": ("block_sparse_attention", "_triton"),
    "block_sparse_attention_backward": ("block_sparse_attention", "_triton_backward"),
    "linear": ("linear", "_triton"),
    "quantized_linear": ("quantized_linear", "_triton"),
    "grouped_linear": ("grouped_linear", "_triton"),
    "quantized_grouped_linear": ("grouped_linear", "_quantized_triton"),
    "gated_delta_": ("recurrent_state", "_delta_triton"),
    "selective_state_": ("recurrent_state", "_selective_triton"),
    "short_conv_": ("recurrent_state", "_conv_triton"),
    "linear_token_statistics": ("linear_token_statistics", "_triton"),
    "speculative_attention": ("speculative_attention", "by_triton"),
    "speculative_attention_append_": ("speculative_attention", "by_triton"),
}
STRUCTURES: dict[str, Callable[..., Any]] = {
    "block_sparse_attention": AttentionArguments,
    "block_sparse_attention_backward": GradientArguments.of,
    "speculative_attention": SpeculativeArguments,
    "speculative_attention_append_": SpeculativeArguments,
}


def on_cpu(op: str) -> Callable[..., Any]:
    return OPS[op].overload


def plain(op: str) -> Callable[..., Any]:
    return OPS[op].reference


def simulated(op: str) -> Callable[..., Any]:
    return getattr(simulated_ops()[1], op)  # type: ignore[no-any-return]


def in_triton(op: str) -> Callable[..., Any]:
    module, name = TRITON[op]
    found = getattr(importlib.import_module(f"pdkernels.ops.{module}"), name)
    if name == "by_triton":
        found = partial(found, op)
    return (lambda *arguments: found(STRUCTURES[op](*arguments))) if op in STRUCTURES else found


@pytest.mark.covering
@pytest.mark.parametrize("find", [on_cpu, plain])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", WITH_FLOATS)
def test_nan(op: str, dtype: torch.dtype, find: Callable[[str], Any]) -> None:
    check_nan(function_of(op, find), op, dtype)


@pytest.mark.covering
@pytest.mark.parametrize("find", [on_cpu, plain])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", FORWARD)
def test_infinities(op: str, dtype: torch.dtype, find: Callable[[str], Any]) -> None:
    check_infinities(function_of(op, find), op, dtype)


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", [op for op in WITH_FLOATS if not OPS[op].composed])
def test_at_every_vector_level(op: str, dtype: torch.dtype, level_ops: object, request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["level_ops"] == "amx":
        dtype = torch.bfloat16
    check_nan(function_of(op, partial(getattr, emulated_ops())), op, dtype, 1)
    if op in FORWARD:
        check_infinities(function_of(op, partial(getattr, emulated_ops())), op, dtype, 1)


@pytest.mark.parametrize("op", [op for op in WITH_FLOATS if op not in TRITON])
def test_in_the_cuda_sources(op: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check_nan(simulated(op), op, dtype, 1)
        if op in FORWARD:
            check_infinities(simulated(op), op, dtype, 1)


@pytest.mark.slow
@requires_triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize("op", TRITON)
def test_in_triton(op: str) -> None:
    """Its attention multiplies the values that a mask hides by 0 (docs/ops/block_sparse_attention.md)."""
    dtype = torch.float32 if torch.float32 in dot_dtypes() else dot_dtypes()[0]
    check_nan(function_of(op, in_triton), op, dtype, 1, spreads="attention" in op)
