"""Starts the Gluon kernels: tensor descriptors, sizes, and which calls they serve."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pdkernels._attention import AttentionArguments, GradientArguments
from pdkernels.gluon.block_sparse_attention import forward_kernel
from pdkernels.gluon.block_sparse_attention_backward import dq_kernel
from pdkernels.gluon.block_sparse_attention_dkv import dkv_kernel
from pdkernels.triton.block_sparse_attention import Passes, Saved
from pdkernels.triton.block_sparse_attention import backward as triton_backward
from pdkernels.triton.blocking import CONTRACTED

ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


class Steps(NamedTuple):
    """How a kernel cuts the keys."""

    block_n: int
    """Keys of a step."""
    stages: int
    """Steps whose keys and values may be in shared memory."""


# By head dimension. Registers and shared memory of each are in the tests that compile them
# (tests/ops/test_*_gluon_compiled.py).
STEPS = {64: Steps(128, 4), 128: Steps(128, 2)}
# Of dQ: a step has two products with 64 columns and one with those of the heads, whose registers 128 keys would exceed.
GRADIENT_STEPS = {64: Steps(64, 4), 128: Steps(64, 3)}
# Of dK and dV, in queries.
KEY_STEPS = {64: Steps(64, 4), 128: Steps(64, 4)}
# Keys and values of the sequences that are worked on at once: half of Hopper's L2 cache.
SECTION_BYTES = 24 * 2**20


def serves(args: AttentionArguments) -> bool:
    """Whether the kernel computes this call; the Triton kernel computes all."""
    q, k, v = args.q, args.k, args.v
    batch, q_len, heads, head_dim = q.shape
    group = heads // k.shape[2]
    return (
        head_dim in STEPS
        and q.dtype in ELEMENTS
        and (args.block_q % 128 == 0 or (args.block_q == 64 and group % 2 == 0))
        and args.block_k % STEPS[head_dim].block_n == 0
        and min(batch, q_len, k.shape[1]) > 0
        and all(describable(x) for x in (q, k, v))
    )


def describable(x: Tensor) -> bool:
    """Whether TMA can address a tensor: 16-byte rows, and no more than its coordinates can say."""
    return (
        x.data_ptr() % 16 == 0
        and x.stride(-1) == 1
        and all(
            0 < stride * x.element_size() < 2**40 and stride * x.element_size() % 16 == 0 for stride in x.stride()[:3]
        )
    )


def describe(x: Tensor, rows: int) -> TensorDescriptor:
    """Blocks of so many tokens of one head of ``(batch, length, heads, head_dim)``."""
    block = [1, rows, 1, x.shape[3]]
    layout = gl.NVMMASharedLayout.get_default_for(block, ELEMENTS[x.dtype])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


class Work(NamedTuple):
    """Which tiles there are, and how they are dealt out to persistent programs."""

    programs: int
    tiles: int
    rows_stride: int
    """Stride of the plan's rows between samples; 0 where all share a plan."""
    lengths: tuple[int, int, int]
    """Numbers of queries, keys and KV heads."""
    order: tuple[int, int, int]
    """Pairs of a sample and a KV head, how many of them are worked on at a time, tiles of 128 rows of all."""

    @classmethod
    def of(cls, args: AttentionArguments) -> Work:
        (batch, q_len, heads, head_dim), (kv_len, kv_heads) = args.q.shape, args.k.shape[1:3]
        tiles, sequences = triton.cdiv(q_len, args.block_q), batch * kv_heads
        items = batch * heads * tiles * args.block_q // 128
        section = max(1, min(sequences, SECTION_BYTES // (2 * kv_len * head_dim * args.q.element_size())))
        rows_stride = args.plan_rows.stride(0) if args.plan_rows.dim() == 3 else 0
        programs = min(items, processors(args.q.device))
        return cls(programs, tiles, rows_stride, (q_len, kv_len, kv_heads), (sequences, section, items))


def constants(args: AttentionArguments, steps: Steps) -> dict[str, int | bool]:
    return {
        "GROUP": args.q.shape[2] // args.k.shape[2],
        "HEAD_DIM": args.q.shape[3],
        "BLOCK_Q": args.block_q,
        "BLOCK_K": args.block_k,
        "BLOCK_N": steps.block_n,
        "STAGES": steps.stages,
        "FOLD_SCALE": args.scale > 0,
        "num_warps": 4,
        **CONTRACTED,
    }


@cache
def processors(device: torch.device) -> int:
    """SMs of a GPU; those of an H100 where there is none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def forward(args: AttentionArguments) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` as `pdkernels.triton.block_sparse_attention.forward` returns them, for a call that the kernel
    `serves`."""
    q, k, v = args.q, args.k, args.v
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(args.lse_shape, dtype=torch.float32, device=q.device)
    steps, work = STEPS[q.shape[3]], Work.of(args)
    forward_kernel[(work.programs,)](
        describe(q, 64), describe(k, steps.block_n), describe(v, steps.block_n), describe(out, 64), lse,
        None if args.sinks is None else args.sinks.contiguous(), *args[3:6], work.rows_stride, work.tiles,
        *work.lengths, *work.order, args.scale * math.log2(math.e), **constants(args, steps),
    )  # fmt: skip
    return out, lse


def serves_gradients(gradients: GradientArguments) -> bool:
    """Whether the kernels of the gradients compute this call; the Triton kernels compute all."""
    args = gradients.forward
    return (
        serves(args) and args.block_k % GRADIENT_STEPS[args.q.shape[3]].block_n == 0 and describable(gradients.grad_out)
    )


def of_queries(gradients: GradientArguments, dq: Tensor, saved: Saved) -> None:
    """Writes dQ and what `of_keys` needs, for a call that the kernels serve."""
    args, grad_lse = gradients.forward, gradients.grad_lse
    steps, work, grad = GRADIENT_STEPS[args.q.shape[3]], Work.of(args), gradients.grad_out
    dq_kernel[(work.programs,)](
        describe(args.q, 64), describe(grad, 64), describe(args.k, steps.block_n), describe(args.v, steps.block_n),
        describe(dq, 64), grad, gradients.out.contiguous(), gradients.lse.contiguous(),
        None if grad_lse is None else grad_lse.contiguous(), *saved, *args[3:6], *grad.stride()[:3], work.rows_stride,
        work.tiles, saved.lse.shape[2], *work.lengths, *work.order, args.scale * math.log2(math.e), args.scale,
        **constants(args, steps),
    )  # fmt: skip


def of_keys(
    gradients: GradientArguments,
    saved: Saved,
    partials: tuple[Tensor, Tensor],
    plan_rows: Tensor,
    pieces: int,
    piece: int,
) -> None:
    """Writes dK and dV, or a sum for each piece of the query heads, from what `of_queries` saved. `plan_rows`: of the
    keys."""
    args, grad = gradients.forward, gradients.grad_out
    (batch, _, heads, head_dim), (kv_len, kv_heads) = args.q.shape, args.k.shape[1:3]
    programs = batch * kv_heads * pieces * plan_rows.shape[-2] * args.block_k // 128
    rows_stride = plan_rows.stride(0) if plan_rows.dim() == 3 else 0
    steps = KEY_STEPS[head_dim]
    dkv_kernel[(programs,)](
        *(describe(x, steps.block_n) for x in (args.q, grad)), *(describe_rows(x, steps.block_n) for x in saved),
        *(describe(x, 64) for x in (args.k, args.v)), *partials, plan_rows, *args[4:6], rows_stride, kv_len, kv_heads,
        batch * kv_heads, pieces, piece, args.scale * math.log2(math.e), args.scale, GROUP=heads // kv_heads,
        HEAD_DIM=head_dim, BLOCK_Q=args.block_q, BLOCK_K=args.block_k, BLOCK_M=steps.block_n, STAGES=steps.stages,
        FOLD_SCALE=args.scale > 0, num_warps=4, **CONTRACTED,
    )  # fmt: skip


def describe_rows(x: Tensor, rows: int) -> TensorDescriptor:
    """So many rows of ``(batch, heads, rows)``."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows], layout)


def backward(gradients: GradientArguments) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)``, as `pdkernels.triton.block_sparse_attention.backward` returns them."""
    return triton_backward(gradients, Passes(of_queries, of_keys, 128))
