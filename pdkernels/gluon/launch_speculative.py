"""Starts the Gluon kernel of speculative attention, and says which calls it serves."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from pdkernels._attention import SpeculativeArguments
from pdkernels.gluon.launch import ELEMENTS, STEPS, describable, describe
from pdkernels.gluon.speculative_attention import ROWS, split_kernel
from pdkernels.triton.append import store_rows
from pdkernels.triton.blocking import CONTRACTED
from pdkernels.triton.speculative_attention import FEW_ROWS, choose_splits, merge


def serves(args: SpeculativeArguments) -> bool:
    """Whether the kernel computes this call; the Triton kernel computes all."""
    q, k_new = args.q, args.k_new
    kv_heads, head_dim = k_new.shape[-2], q.shape[-1]
    tensors = [x if x.dim() == 4 else x.unsqueeze(0) for x in args[:5]]
    return (
        not args.quantized  # rows of an 8-bit cache: codes and scales
        and head_dim in STEPS
        and q.dtype in ELEMENTS
        and args.starts is None
        and args.new * (q.shape[-2] // kv_heads) > FEW_ROWS
        and args.block_k % 32 == 0
        # TMA copies a step from one page.
        and (args.block_table is None or args.k_cache.shape[1] % STEPS[head_dim].block_n == 0)
        and all(x.numel() > 0 and describable(x) for x in tensors)
        # cp.async copies 16 bytes, which the compiler must see from the strides.
        and all(stride % 16 == 0 for x in tensors for stride in x.stride()[:-1])
    )


def forward(args: SpeculativeArguments, *, append: bool = False) -> tuple[Tensor, Tensor]:
    """Runs `pdkernels.triton.speculative_attention.forward`'s Gluon form, for a call that the kernel `serves`."""
    q, k_new, v_new, k_cache, v_cache = args[:5]
    begins, table = args.cu_seqlens, args.block_table
    if begins is not None:
        q, k_new, v_new = (x.unsqueeze(0) for x in (q, k_new, v_new))
        begins = begins.contiguous()
    if table is not None and table.stride(1) != 1:
        table = table.contiguous()
    lengths = args.lengths.contiguous()
    entries, rows_each, heads, head_dim = q.shape
    kv_heads, batch, new = k_new.shape[2], args.batch, args.new
    group = heads // kv_heads
    row_tiles = triton.cdiv(new * group, int(ROWS))
    splits = choose_splits(args.capacity, kv_heads * row_tiles)
    page_size = 0 if table is None else k_cache.shape[1]
    steps = STEPS[head_dim]

    out = torch.empty(args.q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(args.lse_shape, dtype=torch.float32, device=q.device)
    partial_out, partial_lse = out, lse
    if splits > 1:
        partial_out = torch.empty((splits, *out.shape), dtype=torch.float32, device=q.device)
        partial_lse = torch.empty((splits, *lse.shape), dtype=torch.float32, device=q.device)
    split_kernel[(splits * batch * kv_heads * row_tiles,)](
        *(describe(x, steps.block_n) for x in (k_cache, v_cache)), q, k_new, v_new, k_cache, v_cache, lengths, table,
        args.plan_rows, args.plan_lists, args.bitmaps, partial_out, partial_lse, begins,
        None if args.sinks is None else args.sinks.contiguous(),
        *(stride for x in (q, k_new, v_new, k_cache, v_cache) for stride in x.stride()[:3]),
        0 if table is None else table.stride(0), args.plan_rows.stride(0) if args.plan_rows.dim() == 3 else 0, batch,
        new, entries * rows_each, kv_heads, args.capacity, splits, row_tiles, args.scale * math.log2(math.e),
        GROUP=group, HEAD_DIM=head_dim, BLOCK_Q=args.block_q, BLOCK_K=args.block_k, BLOCK_N=steps.block_n,
        STAGES=steps.stages, PAGE_SIZE=page_size, WARPS=4, FOLD_SCALE=args.scale > 0, num_warps=4, **CONTRACTED,
    )  # fmt: skip
    if splits > 1:
        merge(partial_out, partial_lse, out, lse, args, lengths, None, begins, splits)
    if append:
        store_rows(args, k_new, v_new, lengths, table, begins)
    return out, lse
