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

from pdkernels._attention import AttentionArguments
from pdkernels.gluon.block_sparse_attention import forward_kernel

ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


class Steps(NamedTuple):
    """How a kernel cuts the keys."""

    block_n: int
    """Keys of a step."""
    stages: int
    """Steps whose keys and values may be in shared memory."""


# By head dimension. Registers and shared memory of each are in tests/gluon_budgets.json.
STEPS = {64: Steps(128, 4), 128: Steps(128, 2)}
# Keys and values of the sequences that are worked on at once: half of Hopper's L2 cache.
SECTION_BYTES = 24 * 2**20


def serves(given: AttentionArguments) -> bool:
    """Whether the kernel computes this call; the Triton kernel computes all."""
    q, k, v = given.q, given.k, given.v
    batch, q_len, heads, head_dim = q.shape
    group = heads // k.shape[2]
    return (
        head_dim in STEPS
        and q.dtype in ELEMENTS
        and (given.block_q % 128 == 0 or (given.block_q == 64 and group % 2 == 0))
        and given.block_k % STEPS[head_dim].block_n == 0
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


@cache
def processors(device: torch.device) -> int:
    """SMs of a GPU; those of an H100 where there is none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def forward(given: AttentionArguments) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` as `pdkernels.triton.block_sparse_attention.forward` returns them, for a call that the kernel `serves`."""
    q, k, v = given.q, given.k, given.v
    batch, q_len, heads, head_dim = q.shape
    kv_len, kv_heads = k.shape[1:3]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, q_len), dtype=torch.float32, device=q.device)
    steps, tiles = STEPS[head_dim], triton.cdiv(q_len, given.block_q)
    sequences = batch * kv_heads
    items = batch * heads * tiles * given.block_q // 128
    section = max(1, min(sequences, SECTION_BYTES // (2 * kv_len * head_dim * q.element_size())))
    forward_kernel[(min(items, processors(q.device)),)](
        describe(q, 64), describe(k, steps.block_n), describe(v, steps.block_n), describe(out, 64), lse,
        None if given.sinks is None else given.sinks.contiguous(),
        given.plan_rows, given.plan_lists, given.bitmaps, given.plan_rows.stride(0) if given.plan_rows.dim() == 3 else 0,
        tiles, q_len, kv_len, kv_heads, sequences, section, items, given.scale * math.log2(math.e),
        GROUP=heads // kv_heads, HEAD_DIM=head_dim, BLOCK_Q=given.block_q, BLOCK_K=given.block_k,
        BLOCK_N=steps.block_n, STAGES=steps.stages, FOLD_SCALE=given.scale > 0, num_warps=4,
    )  # fmt: skip
    return out, lse
