"""Starts the backward pass of five products, which is used where ``PDKERNELS_GLUON=one-pass`` asks for it."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from pdkernels._attention import GradientArguments
from pdkernels.gluon.block_sparse_attention_one_pass import one_pass_kernel
from pdkernels.gluon.block_sparse_attention_turns import describe_kernel, prepare_kernel
from pdkernels.gluon.launch import Steps, describe, describe_rows, serves_gradients
from pdkernels.triton.block_sparse_attention import Saved, add_pieces, split_group
from pdkernels.triton.blocking import CONTRACTED

# Of queries, for heads of 128: with fewer columns two consumers would share 64 of dQ, whose products then take twice the bytes of shared
# memory that it delivers.
STEPS = {128: Steps(64, 3)}


def serves(gradients: GradientArguments) -> bool:
    """Whether the kernel computes this call; those of two passes compute all that have specialised kernels."""
    return serves_gradients(gradients) and gradients.forward.q.shape[3] in STEPS


def backward(gradients: GradientArguments) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)``, as `pdkernels.gluon.launch.backward` returns them. Keeps dQ in float32 beside them until it has ended."""
    args, grad, grad_lse = gradients.forward, gradients.grad_out, gradients.grad_lse
    (batch, q_len, heads, head_dim), (kv_len, kv_heads) = args.q.shape, args.k.shape[1:3]
    device, steps = args.q.device, STEPS[head_dim]
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=device) for x in args[:3])
    q_tiles, k_tiles = triton.cdiv(q_len, args.block_q), triton.cdiv(kv_len, args.block_k)
    q_blocks = q_tiles * args.block_q // steps.block_n
    blocks = batch * heads * q_blocks
    shared = args.plan_rows.dim() == 2
    rows_stride, plans = (0, 1) if shared else (args.plan_rows.stride(0), batch)
    floats: dict[str, Any] = {"dtype": torch.float32, "device": device}
    saved = Saved(*(torch.empty((batch, heads, q_blocks * steps.block_n), **floats) for _ in range(2)))
    sums = torch.empty(blocks * steps.block_n * head_dim, **floats)
    counters = torch.empty(1 + blocks, dtype=torch.int32, device=device)
    turns = torch.empty((plans, k_tiles, q_tiles, 4), dtype=torch.int32, device=device)
    turns_stride = 0 if shared else turns.stride(0)
    describe_kernel[(plans * k_tiles * q_tiles,)](
        turns, args.plan_rows, args.plan_lists, rows_stride, turns_stride, q_tiles, k_tiles, num_warps=1, **CONTRACTED
    )
    prepare_kernel[(blocks,)](
        grad, gradients.out.contiguous(), gradients.lse.contiguous(), None if grad_lse is None else grad_lse.contiguous(),
        *saved, dq, counters, args.plan_rows, *grad.stride()[:3], rows_stride, q_blocks, q_len, heads, HEAD_DIM=head_dim,
        BLOCK_Q=args.block_q, num_warps=4, **CONTRACTED,
    )  # fmt: skip

    blocks_of_keys = kv_heads * k_tiles * args.block_k // 128
    pieces, piece = split_group(heads // kv_heads, blocks_of_keys)
    partials = (dk, dv)
    if pieces > 1:
        partial_sums = torch.empty((2, pieces, *args.k.shape), **floats)
        partials = (partial_sums[0], partial_sums[1])
    one_pass_kernel[(batch * blocks_of_keys * pieces,)](
        *(describe(x, steps.block_n) for x in (args.q, grad)), *(describe_rows(x, steps.block_n) for x in saved),
        *(describe(x, 64) for x in (args.k, args.v)), dq, *partials, sums, counters,
        args.plan_rows.narrow(-2, q_tiles, k_tiles), args.plan_lists, args.bitmaps, turns, rows_stride, turns_stride, q_tiles,
        q_blocks, q_len, kv_len, kv_heads, batch * kv_heads, pieces, piece, args.scale * math.log2(math.e), args.scale,
        GROUP=heads // kv_heads, HEAD_DIM=head_dim, BLOCK_Q=args.block_q, BLOCK_K=args.block_k, STAGES=steps.stages,
        FOLD_SCALE=args.scale > 0, num_warps=4, **CONTRACTED,
    )  # fmt: skip
    if pieces > 1:
        add_pieces(partials, (dk, dv))
    return dq, dk, dv
