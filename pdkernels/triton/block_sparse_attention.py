"""Attention over a tile plan in Triton: forward, dQ and dK/dV.

One program owns one block of rows of the result and walks the plan's list for it: query rows in the forward and dQ
kernels, key rows in the dK/dV kernel. There are no atomics, and a run repeats bit for bit. A plan's tile may be split
into smaller blocks (`Blocking`), each a power of two that divides it.

Where blocks of keys are too few to keep a GPU busy, the query heads that share them are dealt out to several programs
(`split_group`), whose sums a small kernel adds up in order. How many follows from one sample's shape, so that a sample
gets the same bits in any batch.

Ranges of full tiles are counted loops without mask arithmetic and without dependent loads; tiles that need a mask
follow. A branch in one loop would be shorter, but ptxas then serializes all wgmma instructions of the loop (its note
C7515).

For half precision the softmax runs in base 2: exp2 is one instruction, and the scale times log2(e) is folded into the
multiply-add before it. For float32 it runs in base e, since a score in base 2 is larger and so is its rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdkernels._attention import AttentionArguments, GradientArguments
from pdkernels._validation import message
from pdkernels.triton import _blocks as blocks
from pdkernels.triton._blocks import LN_2, LOG2_E, addressable, split_head_dim
from pdkernels.triton.blocking import CONTRACTED, Blocking, choose_blocking


@triton.jit
def _program(rows, rows_stride, num_tiles, kv_heads, GROUP: tl.constexpr, CUTS: tl.constexpr):
    """(batch, kv head, head within its group, tile, cut) of this program; and for its tile the offsets in the plan's
    lists where the ranges start, where the tiles that need a mask start, and where they end.

    Programs of one KV head are adjacent, so that its keys and values stay in the L2 cache; among them the tiles with
    the most visits start first, and the others fill the tail of the wave.
    """
    program = tl.program_id(0)
    in_group = program % GROUP
    program = program // GROUP
    cut = program % CUTS
    program = program // CUTS
    rank = program % num_tiles
    program = program // num_tiles
    # Head offsets in 64 bits: in a view with heads first, their stride spans all tokens.
    kv_head = (program % kv_heads).to(tl.int64)
    batch = (program // kv_heads).to(tl.int64)
    tile, begin, middle, end = _tile(rows + batch * rows_stride, rank)
    return batch, kv_head, in_group, tile, cut, begin, middle, end


@triton.jit
def _tile(rows, rank):
    """The tile with so many of more visits; where its ranges begin, its tiles with a mask, and where they end."""
    tile = tl.load(rows + rank * 4 + 3)
    rows += tile * 4
    return tile, tl.load(rows), tl.load(rows + 1), tl.load(rows + 2)


# Lengths change from call to call and must not be specialized on being 1 or a multiple of 16.
_CHANGING = ["rows_stride", "num_tiles", "q_len", "kv_len"]
# Blocks of keys, counted for each KV head, from which on no head is dealt out: about four for each SM of a large GPU,
# so that the last ones to end keep few waiting.
BLOCKS_ENOUGH = 512


@triton.jit(do_not_specialize=_CHANGING)
def _forward_kernel(
    q, k, v, sinks, out, lse, plan_rows, lists, bitmaps,
    q_stride_b, q_stride, q_stride_h, k_stride_b, k_stride, k_stride_h, v_stride_b, v_stride, v_stride_h,
    rows_stride, num_tiles, q_len, kv_len, kv_heads, score_scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_MASKED: tl.constexpr, BASE_2: tl.constexpr, FOLD_SCALE: tl.constexpr,
):  # fmt: skip
    batch, kv_head, in_group, tile, cut, begin, middle, end = _program(
        plan_rows, rows_stride, num_tiles, kv_heads, GROUP, BLOCK_Q // BLOCK_M
    )
    head = kv_head * GROUP + in_group
    heads = kv_heads * GROUP
    row = cut * BLOCK_M
    start = tile.to(tl.int64) * BLOCK_Q + row
    rows_left = q_len - start
    k += batch * k_stride_b + kv_head * k_stride_h
    v += batch * v_stride_b + kv_head * v_stride_h
    q += batch * q_stride_b + head * q_stride_h + start * q_stride
    query = blocks.load(q, q_stride, rows_left, BLOCK_M, HEAD_DIM, D0, D1, True)
    acc = blocks.zeros(BLOCK_M, D0, D1)
    m_i, l_i = blocks.first_maximum(None if sinks is None else sinks + head, True, BLOCK_M, BASE_2)
    pair = begin
    steps, at, range_end = blocks.first_range(lists, begin, middle, BLOCK_K // BLOCK_N)
    for _ in range(0, steps):
        key_start = at.to(tl.int64) * BLOCK_N
        key = blocks.load(k + key_start * k_stride, k_stride, 0, BLOCK_N, HEAD_DIM, D0, D1, False)
        p, alpha, m_i, l_i = blocks.online_softmax(query, key, None, m_i, l_i, score_scale, D1, BASE_2, FOLD_SCALE)
        value = blocks.load(v + key_start * v_stride, v_stride, 0, BLOCK_N, HEAD_DIM, D0, D1, False)
        acc = blocks.add_weighted(blocks.scale_rows(acc, alpha, D1), p, value, D1)
        pair, at, range_end = blocks.next_step(lists, begin, middle, pair, at, range_end, BLOCK_K // BLOCK_N)
    CUTS: tl.constexpr = BLOCK_K // BLOCK_MASKED
    for step in range(middle * CUTS, end * CUTS):
        column = (step % CUTS) * BLOCK_MASKED
        key_start = tl.load(lists + step // CUTS * 2).to(tl.int64) * BLOCK_K + column
        keys_left = kv_len - key_start
        key = blocks.load(k + key_start * k_stride, k_stride, keys_left, BLOCK_MASKED, HEAD_DIM, D0, D1, True)
        bitmap = tl.load(lists + step // CUTS * 2 + 1)
        mask = blocks.visible(bitmaps, bitmap, row, column, keys_left, BLOCK_Q, BLOCK_K, BLOCK_M, BLOCK_MASKED, False)
        p, alpha, m_i, l_i = blocks.online_softmax(query, key, mask, m_i, l_i, score_scale, D1, BASE_2, FOLD_SCALE)
        value = blocks.load(v + key_start * v_stride, v_stride, keys_left, BLOCK_MASKED, HEAD_DIM, D0, D1, True)
        acc = blocks.add_weighted(blocks.scale_rows(acc, alpha, D1), p, value, D1)

    out += ((batch * q_len + start) * heads + head) * HEAD_DIM
    acc = blocks.divide_rows(acc, l_i, D1)
    blocks.store(out, heads * HEAD_DIM, rows_left, acc, HEAD_DIM, D0, D1)
    rows = tl.arange(0, BLOCK_M)
    lse += (batch * heads + head) * q_len + start
    log_sum = (m_i + tl.log2(l_i)) * LN_2 if BASE_2 else m_i + tl.log(l_i)
    tl.store(lse + rows, log_sum, mask=blocks.first_ones(rows_left, BLOCK_M))


@triton.jit
def _dq_step(query, grad, key, value, mask, acc, row_lse, delta, score_scale, D1: tl.constexpr, BASE_2: tl.constexpr):
    p = blocks.power(BASE_2, blocks.products(query, key, D1) * score_scale - row_lse[:, None])
    if mask is not None:
        p = tl.where(mask, p, 0.0)
    ds = p * (blocks.products(grad, value, D1) - delta[:, None])
    return blocks.add_weighted(acc, ds, key, D1)


@triton.jit(do_not_specialize=_CHANGING)
def _dq_kernel(
    grad_out, q, k, v, out, lse, grad_lse, dq, lse_b, delta, plan_rows, lists, bitmaps,
    grad_stride_b, grad_stride, grad_stride_h, q_stride_b, q_stride, q_stride_h,
    k_stride_b, k_stride, k_stride_h, v_stride_b, v_stride, v_stride_h,
    rows_stride, num_tiles, saved_stride, q_len, kv_len, kv_heads, score_scale, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_MASKED: tl.constexpr, BASE_2: tl.constexpr,
):  # fmt: skip
    """dQ, and for the dK/dV kernel each row's log-sum-exp in the softmax's base and delta = rowsum(dO * O) - dLSE."""
    batch, kv_head, in_group, tile, cut, begin, middle, end = _program(
        plan_rows, rows_stride, num_tiles, kv_heads, GROUP, BLOCK_Q // BLOCK_M
    )
    head = kv_head * GROUP + in_group
    heads = kv_heads * GROUP
    row = cut * BLOCK_M
    start = tile.to(tl.int64) * BLOCK_Q + row
    rows_left = q_len - start
    k += batch * k_stride_b + kv_head * k_stride_h
    v += batch * v_stride_b + kv_head * v_stride_h
    q += batch * q_stride_b + head * q_stride_h + start * q_stride
    grad_out += batch * grad_stride_b + head * grad_stride_h + start * grad_stride
    query = blocks.load(q, q_stride, rows_left, BLOCK_M, HEAD_DIM, D0, D1, True)
    grad = blocks.load(grad_out, grad_stride, rows_left, BLOCK_M, HEAD_DIM, D0, D1, True)
    in_result = ((batch * q_len + start) * heads + head) * HEAD_DIM
    in_rows = (batch * heads + head) * q_len + start
    result = blocks.load(out + in_result, heads * HEAD_DIM, rows_left, BLOCK_M, HEAD_DIM, D0, D1, True)
    row_delta = blocks.row_dots(grad, result, D1)
    rows = tl.arange(0, BLOCK_M)
    if grad_lse is not None:
        row_delta -= blocks.load_rows(grad_lse + in_rows, rows_left, BLOCK_M, 0.0, True)
    row_lse = blocks.load_rows(lse + in_rows, rows_left, BLOCK_M, float("-inf"), True)
    # +inf for rows that saw nothing: their weights come out as 0.
    row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse * LOG2_E if BASE_2 else row_lse)
    in_saved = (batch * heads + head) * saved_stride + start
    # Rows past the end of the sequence as well, whose weights come out as 0 too.
    tl.store(lse_b + in_saved + rows, row_lse)
    tl.store(delta + in_saved + rows, row_delta)

    acc = blocks.zeros(BLOCK_M, D0, D1)
    pair = begin
    steps, at, range_end = blocks.first_range(lists, begin, middle, BLOCK_K // BLOCK_N)
    for _ in range(0, steps):
        key_start = at.to(tl.int64) * BLOCK_N
        key = blocks.load(k + key_start * k_stride, k_stride, 0, BLOCK_N, HEAD_DIM, D0, D1, False)
        value = blocks.load(v + key_start * v_stride, v_stride, 0, BLOCK_N, HEAD_DIM, D0, D1, False)
        acc = _dq_step(query, grad, key, value, None, acc, row_lse, row_delta, score_scale, D1, BASE_2)
        pair, at, range_end = blocks.next_step(lists, begin, middle, pair, at, range_end, BLOCK_K // BLOCK_N)
    CUTS: tl.constexpr = BLOCK_K // BLOCK_MASKED
    for step in range(middle * CUTS, end * CUTS):
        column = (step % CUTS) * BLOCK_MASKED
        key_start = tl.load(lists + step // CUTS * 2).to(tl.int64) * BLOCK_K + column
        keys_left = kv_len - key_start
        key = blocks.load(k + key_start * k_stride, k_stride, keys_left, BLOCK_MASKED, HEAD_DIM, D0, D1, True)
        value = blocks.load(v + key_start * v_stride, v_stride, keys_left, BLOCK_MASKED, HEAD_DIM, D0, D1, True)
        bitmap = tl.load(lists + step // CUTS * 2 + 1)
        mask = blocks.visible(bitmaps, bitmap, row, column, keys_left, BLOCK_Q, BLOCK_K, BLOCK_M, BLOCK_MASKED, False)
        acc = _dq_step(query, grad, key, value, mask, acc, row_lse, row_delta, score_scale, D1, BASE_2)
    acc = blocks.scale_rows(acc, tl.full((BLOCK_M,), scale, tl.float32), D1)
    acc = blocks.zero_rows(acc, row_lse == float("inf"), D1)
    blocks.store(dq + in_result, heads * HEAD_DIM, rows_left, acc, HEAD_DIM, D0, D1)


@triton.jit
def _dkv_step(
    head, start, mask, k, v, dk, dv, grad_out, q, grad_stride, q_stride, grad_stride_h, q_stride_h, lse_b, delta,
    saved_stride, q_len, score_scale,
    HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BLOCK_M: tl.constexpr, BASE_2: tl.constexpr,
):  # fmt: skip
    """Scores are transposed, keys by queries, so that weights are left operands straight from registers."""
    MASKED: tl.constexpr = mask is not None
    rows_left = q_len - start
    q += head * q_stride_h + start * q_stride
    grad_out += head * grad_stride_h + start * grad_stride
    query = blocks.load(q, q_stride, rows_left, BLOCK_M, HEAD_DIM, D0, D1, MASKED)
    grad = blocks.load(grad_out, grad_stride, rows_left, BLOCK_M, HEAD_DIM, D0, D1, MASKED)
    row_lse = blocks.load_rows(lse_b + head * saved_stride + start, rows_left, BLOCK_M, 0.0, False)
    row_delta = blocks.load_rows(delta + head * saved_stride + start, rows_left, BLOCK_M, 0.0, False)
    p = blocks.power(BASE_2, blocks.products(k, query, D1) * score_scale - row_lse[None, :])
    if MASKED:
        p = tl.where(mask, p, 0.0)
    dv = blocks.add_weighted(dv, p, grad, D1)
    ds = p * (blocks.products(v, grad, D1) - row_delta[None, :])
    dk = blocks.add_weighted(dk, ds, query, D1)
    return dk, dv


@triton.jit(do_not_specialize=[*_CHANGING, "batch_size", "pieces", "piece"])
def _dkv_kernel(
    grad_out, q, k, v, lse_b, delta, dk, dv, plan_rows, lists, bitmaps,
    grad_stride_b, grad_stride, grad_stride_h, q_stride_b, q_stride, q_stride_h,
    k_stride_b, k_stride, k_stride_h, v_stride_b, v_stride, v_stride_h,
    rows_stride, num_tiles, saved_stride, q_len, kv_len, kv_heads, batch_size, pieces, piece, score_scale, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_MASKED: tl.constexpr, BASE_2: tl.constexpr,
):  # fmt: skip
    """dK and dV of a block of keys, summed over a piece of the query heads that share it, at most `piece` of them.

    Its loops run over (query head, query tile, cut): loads for the next head are in flight while the last one ends.
    Tiles with the most visits start first, whatever their head: programs have much to do, and the longest decide when
    all are done.
    """
    CUTS_K: tl.constexpr = BLOCK_K // BLOCK_N
    program = tl.program_id(0)
    kv_head = (program % kv_heads).to(tl.int64)
    program = program // kv_heads
    cut = program % CUTS_K
    program = program // CUTS_K
    piece_index = program % pieces
    program = program // pieces
    batch = (program // num_tiles).to(tl.int64)
    tile, begin, middle, end = _tile(plan_rows + batch * rows_stride, program % num_tiles)
    first_head = kv_head * GROUP + piece_index * piece
    num_heads = tl.minimum(piece, GROUP - piece_index * piece)
    column = cut * BLOCK_N
    start = tile.to(tl.int64) * BLOCK_K + column
    keys_left = kv_len - start
    q += batch * q_stride_b + first_head * q_stride_h
    grad_out += batch * grad_stride_b + first_head * grad_stride_h
    lse_b += (batch * kv_heads * GROUP + first_head) * saved_stride
    delta += (batch * kv_heads * GROUP + first_head) * saved_stride
    k += batch * k_stride_b + kv_head * k_stride_h + start * k_stride
    v += batch * v_stride_b + kv_head * v_stride_h + start * v_stride
    key = blocks.load(k, k_stride, keys_left, BLOCK_N, HEAD_DIM, D0, D1, True)
    value = blocks.load(v, v_stride, keys_left, BLOCK_N, HEAD_DIM, D0, D1, True)
    acc_k = blocks.zeros(BLOCK_N, D0, D1)
    acc_v = blocks.zeros(BLOCK_N, D0, D1)
    pair = begin
    steps, at, range_end = blocks.first_range(lists, begin, middle, BLOCK_Q // BLOCK_M)
    divisor = tl.maximum(steps, 1)  # the pipeline's prologue divides even if there are no ranges
    for flat in range(0, steps * num_heads):
        head = (flat // divisor).to(tl.int64)
        acc_k, acc_v = _dkv_step(
            head, at.to(tl.int64) * BLOCK_M, None, key, value, acc_k, acc_v, grad_out, q, grad_stride, q_stride,
            grad_stride_h, q_stride_h, lse_b, delta, saved_stride, q_len, score_scale, HEAD_DIM, D0, D1, BLOCK_M,
            BASE_2,
        )  # fmt: skip
        pair, at, range_end = blocks.next_step(lists, begin, middle, pair, at, range_end, BLOCK_Q // BLOCK_M)
    CUTS: tl.constexpr = BLOCK_Q // BLOCK_MASKED
    steps = (end - middle) * CUTS
    divisor = tl.maximum(steps, 1)
    for flat in range(0, steps * num_heads):
        head = (flat // divisor).to(tl.int64)
        step = middle * CUTS + flat % divisor
        row = (step % CUTS) * BLOCK_MASKED
        query_start = tl.load(lists + step // CUTS * 2).to(tl.int64) * BLOCK_Q + row
        bitmap = tl.load(lists + step // CUTS * 2 + 1)
        mask = blocks.visible(bitmaps, bitmap, row, column, None, BLOCK_Q, BLOCK_K, BLOCK_MASKED, BLOCK_N, True)
        acc_k, acc_v = _dkv_step(
            head, query_start, mask, key, value, acc_k, acc_v, grad_out, q, grad_stride, q_stride, grad_stride_h,
            q_stride_h, lse_b, delta, saved_stride, q_len, score_scale, HEAD_DIM, D0, D1, BLOCK_MASKED, BASE_2,
        )  # fmt: skip
    acc_k = blocks.scale_rows(acc_k, tl.full((BLOCK_N,), scale, tl.float32), D1)
    in_result = (((piece_index * batch_size.to(tl.int64) + batch) * kv_len + start) * kv_heads + kv_head) * HEAD_DIM
    blocks.store(dk + in_result, kv_heads * HEAD_DIM, keys_left, acc_k, HEAD_DIM, D0, D1)
    blocks.store(dv + in_result, kv_heads * HEAD_DIM, keys_left, acc_v, HEAD_DIM, D0, D1)


@triton.jit(do_not_specialize=["size", "pieces"])
def _sum_kernel(partial_k, partial_v, dk, dv, size, pieces, BLOCK: tl.constexpr):
    """dK, or dV, as the sum of its pieces, the first one first."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    partials, result = partial_k, dk
    if tl.program_id(1) == 1:
        partials, result = partial_v, dv
    total = tl.load(partials + at, mask=mask, other=0.0)
    for i in range(1, pieces):
        total += tl.load(partials + i * size.to(tl.int64) + at, mask=mask, other=0.0)
    tl.store(result + at, total.to(result.dtype.element_ty), mask=mask)


def forward(args: AttentionArguments) -> tuple[Tensor, Tensor]:
    """``(out, lse)``: out like q but contiguous; the natural log-sum-exp in float32 ``(batch, q_heads, q_len)``."""
    q, k, v = (addressable(x) for x in (args.q, args.k, args.v))
    batch, q_len, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, q_len), dtype=torch.float32, device=q.device)
    blocking = choose_blocking("forward", q, args.block_q, args.block_k)
    of_q, q_tiles = _side(args.plan_rows, 0, q_len, args.block_q)
    programs = batch * heads * q_tiles * (args.block_q // blocking.block_m)
    if programs:
        _forward_kernel[(programs,)](
            q, k, v, None if args.sinks is None else args.sinks.contiguous(), out, lse, of_q, args.plan_lists,
            args.bitmaps, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], _stride(of_q), q_tiles, *_sizes(args),
            **_constants(args, blocking), FOLD_SCALE=args.scale > 0,
        )  # fmt: skip
    return out, lse


class Saved(NamedTuple):
    """Rows that the dQ kernel writes for that of dK and dV, ``(batch, heads, rows of all tiles)``."""

    lse: Tensor
    """Log-sum-exp in the base of the softmax; +inf for rows that saw nothing."""
    delta: Tensor
    """rowsum(dO * O) - dLSE."""


class Passes(NamedTuple):
    """Other kernels for the two passes of `backward`."""

    of_queries: Callable[[GradientArguments, Tensor, Saved], None]
    """Writes dQ and what is saved."""
    of_keys: Callable[[GradientArguments, Saved, tuple[Tensor, Tensor], Tensor, int, int], None]
    """Writes dK and dV, or a sum for each piece of the query heads: plan rows, number of pieces, heads of each."""
    keys: int
    """Keys of a program of the second pass."""


def backward(gradients: GradientArguments, passes: Passes | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)``, contiguous, from the gradients of what `forward` returned."""
    args, out, lse, grad_lse = gradients.forward, gradients.out, gradients.lse, gradients.grad_lse
    _check_shared_memory(args.q)
    grad_out, q, k, v = (addressable(x) for x in (gradients.grad_out, args.q, args.k, args.v))
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    of_q, q_tiles = _side(args.plan_rows, 0, q.shape[1], args.block_q)
    # All rows of all tiles, which the dK/dV kernel reads without a mask, in whole vectors: otherwise these loads
    # serialize wgmma.
    saved_stride = triton.cdiv(q_tiles * args.block_q, 16) * 16
    saved = Saved(*(lse.new_empty((*lse.shape[:2], saved_stride)) for _ in range(2)))
    inputs = (*grad_out.stride()[:3], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    sizes = _sizes(args)
    batch, _, heads, _ = q.shape
    of_k, k_tiles = _side(args.plan_rows, q_tiles, k.shape[1], args.block_k)

    blocking = choose_blocking("dq", q, args.block_q, args.block_k)
    programs = batch * heads * q_tiles * (args.block_q // blocking.block_m)
    if passes is not None:
        passes.of_queries(gradients, dq, saved)
    elif programs:
        _dq_kernel[(programs,)](
            grad_out, q, k, v, out, lse, None if grad_lse is None else grad_lse.contiguous(), dq, *saved,
            of_q, args.plan_lists, args.bitmaps, *inputs, _stride(of_q), q_tiles, saved_stride, *sizes, args.scale,
            **_constants(args, blocking),
        )  # fmt: skip

    blocking = choose_blocking("dkv", q, args.block_q, args.block_k)
    blocks_of_keys = k.shape[2] * k_tiles * (args.block_k // (blocking.block_n if passes is None else passes.keys))
    pieces, piece = split_group(heads // k.shape[2], blocks_of_keys)
    partials = (dk, dv)
    if pieces > 1:
        sums = torch.empty((2, pieces, *k.shape), dtype=torch.float32, device=k.device)
        partials = (sums[0], sums[1])
    if passes is not None:
        passes.of_keys(gradients, saved, partials, of_k, pieces, piece)
    elif batch * blocks_of_keys:
        _dkv_kernel[(batch * blocks_of_keys * pieces,)](
            grad_out, q, k, v, *saved, *partials, of_k, args.plan_lists, args.bitmaps,
            *inputs, _stride(of_k), k_tiles, saved_stride, *sizes[:3], batch, pieces, piece, sizes[3], args.scale,
            **_constants(args, blocking),
        )  # fmt: skip
    if pieces > 1 and k.numel():
        add_pieces(partials, (dk, dv))
    return dq, dk, dv


def add_pieces(partials: tuple[Tensor, Tensor], results: tuple[Tensor, Tensor]) -> None:
    """Adds up dK and dV of ``(pieces, ...)`` parts of the query heads, in order."""
    pieces, elements = partials[0].shape[0], results[0].numel()
    _sum_kernel[(triton.cdiv(elements, 1024), 2)](
        *partials, *results, elements, pieces, BLOCK=1024, num_warps=4, **CONTRACTED
    )


def _check_shared_memory(q: Tensor) -> None:
    """A step of float32 holds 16 rows of four operands, which is too much for some GPUs (sm_86, 89, 120)."""
    needed = 4 * 16 * sum(split_head_dim(q.shape[3])) * 4 + 1024
    if q.device.type != "cuda" or q.element_size() < 4:
        return
    properties: Any = torch.cuda.get_device_properties(q.device)
    available: int = properties.shared_memory_per_block_optin
    if needed > available:
        expectation = f"be smaller for gradients in float32 on a GPU with {available} bytes of shared memory a block"
        remedy = "Use float16 or bfloat16."
        raise NotImplementedError(message("block_sparse_attention", "head_dim", expectation, q.shape[3], remedy))


def split_group(group: int, blocks_of_keys: int) -> tuple[int, int]:
    """(programs that share the query heads of a KV head, heads of each but the last) for so many blocks of keys.

    >>> split_group(7, 4 * 36), split_group(4, 8 * 64), split_group(4, 8)
    ((4, 2), (1, 4), (4, 1))
    """
    programs = min(group, triton.cdiv(BLOCKS_ENOUGH, max(blocks_of_keys, 1)))
    piece = triton.cdiv(group, programs)
    return triton.cdiv(group, piece), piece


def _side(plan_rows: Tensor, first: int, length: int, block: int) -> tuple[Tensor, int]:
    """The rows of a plan's tiles that cover `length` tokens, and how many there are."""
    tiles = triton.cdiv(length, block)
    return plan_rows.narrow(-2, first, tiles), tiles


def _stride(rows: Tensor) -> int:
    """Stride between samples in words; 0 where all share a plan."""
    return rows.stride(0) if rows.dim() == 3 else 0


def _sizes(args: AttentionArguments) -> tuple[int, int, int, float]:
    """Lengths, KV heads, and the scale in the base of the softmax."""
    scale = args.scale * math.log2(math.e) if _in_base_2(args.q) else args.scale
    return args.q.shape[1], args.k.shape[1], args.k.shape[2], scale


def _in_base_2(q: Tensor) -> bool:
    return q.element_size() == 2


def _constants(args: AttentionArguments, blocking: Blocking) -> dict[str, int | bool]:
    head_dim = args.q.shape[3]
    first, second = split_head_dim(head_dim)
    return {
        "GROUP": args.q.shape[2] // args.k.shape[2],
        "HEAD_DIM": head_dim,
        "D0": first,
        "D1": second,
        "BLOCK_Q": args.block_q,
        "BLOCK_K": args.block_k,
        "BLOCK_M": blocking.block_m,
        "BLOCK_N": blocking.block_n,
        "BLOCK_MASKED": blocking.masked,
        "BASE_2": _in_base_2(args.q),
        "num_warps": blocking.warps,
        "num_stages": blocking.stages,
        **CONTRACTED,
    }
