"""Attention over a tile plan in Triton: forward, dQ and dK/dV.

One program owns one block of rows of the result and walks the plan's list for it: query rows in the forward and dQ
kernels, key rows in the dK/dV kernel. So nothing is summed across programs, there are no atomics, and a run repeats bit
for bit. A plan's tile may be cut into smaller blocks (`Blocking`), each a power of two that divides it.

Each list is walked in two loops: first the leading full tiles, without any mask arithmetic, then the rest. A branch in
one loop would be shorter, but ptxas then serializes all wgmma instructions of the loop (its note C7515). So a list is
quickest with its full tiles first, and right in any order.

For half precision the softmax runs in base 2: exp2 is one instruction, and the scale times log2(e) is folded into the
multiply-add in front of it. For float32 it runs in base e, since a score in base 2 is larger and so is its rounding.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdkernels.triton import _blocks as blocks
from pdkernels.triton._blocking import Blocking, choose_blocking
from pdkernels.triton._blocks import LN_2, LOG2_E, addressable, split_head_dim


@triton.jit
def _program(order, order_stride, num_tiles, kv_heads, GROUP: tl.constexpr, CUTS: tl.constexpr):
    """(batch, kv head, head within its group, tile, cut) of this program.

    Programs of one KV head are neighbours, so that its keys and values stay in the L2 cache; among them the longest
    lists start first, so that short ones fill the end of the wave.
    """
    program = tl.program_id(0)
    in_group = program % GROUP
    program = program // GROUP
    cut = program % CUTS
    program = program // CUTS
    rank = program % num_tiles
    program = program // num_tiles
    kv_head = program % kv_heads
    batch = (program // kv_heads).to(tl.int64)
    tile = tl.load(order + batch * order_stride + rank)
    return batch, kv_head, in_group, tile, cut


@triton.jit
def _forward_steps(
    first, last, q, acc, peak, total, k, v, k_stride, v_stride, tiles, bitmap_ids, bitmaps, kv_len, row, score_scale,
    HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BASE_2: tl.constexpr, FOLD_SCALE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    CUTS: tl.constexpr = BLOCK_K // BLOCK_N
    for step in range(first * CUTS, last * CUTS):
        column = (step % CUTS) * BLOCK_N
        start = tl.load(tiles + step // CUTS).to(tl.int64) * BLOCK_K + column
        key = blocks.load(k + start * k_stride, k_stride, kv_len - start, BLOCK_N, HEAD_DIM, D0, D1, MASKED)
        s = blocks.products(q, key, D1)
        factor = score_scale
        if not FOLD_SCALE:
            s *= score_scale
            factor = 1.0
        if MASKED:
            bitmap = tl.load(bitmap_ids + step // CUTS)
            seen = blocks.visible(bitmaps, bitmap, row, column, BLOCK_Q, BLOCK_K, BLOCK_M, BLOCK_N, False)
            s = tl.where(seen & (tl.arange(0, BLOCK_N)[None, :] < kv_len - start), s, float("-inf"))

        new_peak = tl.maximum(peak, tl.max(s, 1) * factor)
        origin = new_peak
        if MASKED:
            # Rows that have seen nothing yet have a peak of -inf: any finite origin keeps their weights at 0.
            origin = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        p = blocks.power(BASE_2, s * factor - origin[:, None])
        shrink = blocks.power(BASE_2, peak - origin)
        total = total * shrink + tl.sum(p, 1)
        peak = new_peak
        value = blocks.load(v + start * v_stride, v_stride, kv_len - start, BLOCK_N, HEAD_DIM, D0, D1, MASKED)
        acc = blocks.add_weighted(blocks.scale_rows(acc, shrink, D1), p, value, D1)
    return acc, peak, total


@triton.jit
def _forward_kernel(
    q, k, v, out, lse, kv_offsets, kv_tiles, kv_bitmaps, bitmaps, q_order,
    q_stride_b, q_stride, q_stride_h, k_stride_b, k_stride, k_stride_h, v_stride_b, v_stride, v_stride_h,
    offsets_stride, tiles_stride, bitmaps_stride, order_stride, num_tiles, q_len, kv_len, kv_heads, score_scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_MASKED: tl.constexpr, BASE_2: tl.constexpr, FOLD_SCALE: tl.constexpr,
):  # fmt: skip
    batch, kv_head, in_group, tile, cut = _program(
        q_order, order_stride, num_tiles, kv_heads, GROUP, BLOCK_Q // BLOCK_M
    )
    head = kv_head * GROUP + in_group
    heads = kv_heads * GROUP
    row = cut * BLOCK_M
    start = tile.to(tl.int64) * BLOCK_Q + row
    left = q_len - start
    k += batch * k_stride_b + kv_head * k_stride_h
    v += batch * v_stride_b + kv_head * v_stride_h
    tiles = kv_tiles + batch * tiles_stride
    ids = kv_bitmaps + batch * tiles_stride
    bitmaps += batch * bitmaps_stride
    offsets = kv_offsets + batch * offsets_stride + tile
    first = tl.load(offsets)
    last = tl.load(offsets + 1)
    middle = blocks.end_of_full_tiles(tiles, ids, first, last, kv_len, BLOCK_K)

    q += batch * q_stride_b + head * q_stride_h + start * q_stride
    query = blocks.load(q, q_stride, left, BLOCK_M, HEAD_DIM, D0, D1, True)
    acc = blocks.zeros(BLOCK_M, D0, D1)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc, peak, total = _forward_steps(
        first, middle, query, acc, peak, total, k, v, k_stride, v_stride, tiles, ids, bitmaps, kv_len, row, score_scale,
        HEAD_DIM, D0, D1, BLOCK_Q, BLOCK_K, BLOCK_M, BLOCK_N, BASE_2, FOLD_SCALE, False,
    )  # fmt: skip
    acc, peak, total = _forward_steps(
        middle, last, query, acc, peak, total, k, v, k_stride, v_stride, tiles, ids, bitmaps, kv_len, row, score_scale,
        HEAD_DIM, D0, D1, BLOCK_Q, BLOCK_K, BLOCK_M, BLOCK_MASKED, BASE_2, FOLD_SCALE, True,
    )  # fmt: skip

    out += ((batch * q_len + start) * heads + head) * HEAD_DIM
    acc = blocks.scale_rows(acc, 1.0 / tl.where(total == 0.0, 1.0, total), D1)
    blocks.store(out, heads * HEAD_DIM, left, acc, HEAD_DIM, D0, D1)
    rows = tl.arange(0, BLOCK_M)
    lse += (batch * heads + head) * q_len + start
    log_sum = (peak + tl.log2(total)) * LN_2 if BASE_2 else peak + tl.log(total)
    tl.store(lse + rows, log_sum, mask=rows < left)


@triton.jit
def _dq_steps(
    first, last, q, grad, acc, row_lse, delta, k, v, k_stride, v_stride, tiles, bitmap_ids, bitmaps, kv_len, row,
    score_scale,
    HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BASE_2: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    CUTS: tl.constexpr = BLOCK_K // BLOCK_N
    for step in range(first * CUTS, last * CUTS):
        column = (step % CUTS) * BLOCK_N
        start = tl.load(tiles + step // CUTS).to(tl.int64) * BLOCK_K + column
        key = blocks.load(k + start * k_stride, k_stride, kv_len - start, BLOCK_N, HEAD_DIM, D0, D1, MASKED)
        value = blocks.load(v + start * v_stride, v_stride, kv_len - start, BLOCK_N, HEAD_DIM, D0, D1, MASKED)
        p = blocks.power(BASE_2, blocks.products(q, key, D1) * score_scale - row_lse[:, None])
        if MASKED:
            bitmap = tl.load(bitmap_ids + step // CUTS)
            seen = blocks.visible(bitmaps, bitmap, row, column, BLOCK_Q, BLOCK_K, BLOCK_M, BLOCK_N, False)
            p = tl.where(seen & (tl.arange(0, BLOCK_N)[None, :] < kv_len - start), p, 0.0)
        ds = p * (blocks.products(grad, value, D1) - delta[:, None])
        acc = blocks.add_weighted(acc, ds, key, D1)
    return acc


@triton.jit
def _dq_kernel(
    grad_out, q, k, v, out, lse, grad_lse, dq, lse_b, delta, kv_offsets, kv_tiles, kv_bitmaps, bitmaps, q_order,
    grad_stride_b, grad_stride, grad_stride_h, q_stride_b, q_stride, q_stride_h,
    k_stride_b, k_stride, k_stride_h, v_stride_b, v_stride, v_stride_h,
    offsets_stride, tiles_stride, bitmaps_stride, order_stride, num_tiles, q_len, kv_len, kv_heads, score_scale, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_MASKED: tl.constexpr, BASE_2: tl.constexpr,
):  # fmt: skip
    """dQ, and for the dK/dV kernel each row's log-sum-exp in the softmax's base and delta = rowsum(dO * O) - dLSE."""
    batch, kv_head, in_group, tile, cut = _program(
        q_order, order_stride, num_tiles, kv_heads, GROUP, BLOCK_Q // BLOCK_M
    )
    head = kv_head * GROUP + in_group
    heads = kv_heads * GROUP
    row = cut * BLOCK_M
    start = tile.to(tl.int64) * BLOCK_Q + row
    left = q_len - start
    k += batch * k_stride_b + kv_head * k_stride_h
    v += batch * v_stride_b + kv_head * v_stride_h
    tiles = kv_tiles + batch * tiles_stride
    ids = kv_bitmaps + batch * tiles_stride
    bitmaps += batch * bitmaps_stride
    offsets = kv_offsets + batch * offsets_stride + tile
    first = tl.load(offsets)
    last = tl.load(offsets + 1)
    middle = blocks.end_of_full_tiles(tiles, ids, first, last, kv_len, BLOCK_K)

    q += batch * q_stride_b + head * q_stride_h + start * q_stride
    grad_out += batch * grad_stride_b + head * grad_stride_h + start * grad_stride
    query = blocks.load(q, q_stride, left, BLOCK_M, HEAD_DIM, D0, D1, True)
    grad = blocks.load(grad_out, grad_stride, left, BLOCK_M, HEAD_DIM, D0, D1, True)
    in_result = ((batch * q_len + start) * heads + head) * HEAD_DIM
    in_rows = (batch * heads + head) * q_len + start
    result = blocks.load(out + in_result, heads * HEAD_DIM, left, BLOCK_M, HEAD_DIM, D0, D1, True)
    row_delta = blocks.row_dots(grad, result, D1)
    rows = tl.arange(0, BLOCK_M)
    if grad_lse is not None:
        row_delta -= blocks.load_rows(grad_lse + in_rows, left, BLOCK_M, 0.0, True)
    row_lse = blocks.load_rows(lse + in_rows, left, BLOCK_M, float("-inf"), True)
    # +inf for rows that saw nothing: their weights come out as 0.
    row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse * LOG2_E if BASE_2 else row_lse)
    tl.store(lse_b + in_rows + rows, row_lse, mask=rows < left)
    tl.store(delta + in_rows + rows, row_delta, mask=rows < left)

    acc = blocks.zeros(BLOCK_M, D0, D1)
    acc = _dq_steps(
        first, middle, query, grad, acc, row_lse, row_delta, k, v, k_stride, v_stride, tiles, ids, bitmaps, kv_len, row,
        score_scale, HEAD_DIM, D0, D1, BLOCK_Q, BLOCK_K, BLOCK_M, BLOCK_N, BASE_2, False,
    )  # fmt: skip
    acc = _dq_steps(
        middle, last, query, grad, acc, row_lse, row_delta, k, v, k_stride, v_stride, tiles, ids, bitmaps, kv_len, row,
        score_scale, HEAD_DIM, D0, D1, BLOCK_Q, BLOCK_K, BLOCK_M, BLOCK_MASKED, BASE_2, True,
    )  # fmt: skip
    acc = blocks.scale_rows(acc, tl.full((BLOCK_M,), scale, tl.float32), D1)
    blocks.store(dq + in_result, heads * HEAD_DIM, left, acc, HEAD_DIM, D0, D1)


@triton.jit
def _dkv_steps(
    first, last, k, v, dk, dv, grad_out, q, grad_stride, q_stride, grad_stride_h, q_stride_h, lse_b, delta,
    tiles, bitmap_ids, bitmaps, q_len, column, score_scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BASE_2: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Scores stand transposed, keys by queries, so that weights are left operands straight from registers.

    One loop over (query head, tile, cut): loads of the next head are under way while the last one ends.
    """
    CUTS: tl.constexpr = BLOCK_Q // BLOCK_M
    steps = (last - first) * CUTS
    divisor = tl.maximum(steps, 1)  # the pipeline's prologue divides even where the list is empty
    for flat in range(0, steps * GROUP):
        head = (flat // divisor).to(tl.int64)
        step = first * CUTS + flat % divisor
        row = (step % CUTS) * BLOCK_M
        start = tl.load(tiles + step // CUTS).to(tl.int64) * BLOCK_Q + row
        left = q_len - start
        head_q = q + head * q_stride_h + start * q_stride
        head_grad = grad_out + head * grad_stride_h + start * grad_stride
        query = blocks.load(head_q, q_stride, left, BLOCK_M, HEAD_DIM, D0, D1, MASKED)
        grad = blocks.load(head_grad, grad_stride, left, BLOCK_M, HEAD_DIM, D0, D1, MASKED)
        row_lse = blocks.load_rows(lse_b + head * q_len + start, left, BLOCK_M, float("inf"), MASKED)
        row_delta = blocks.load_rows(delta + head * q_len + start, left, BLOCK_M, 0.0, MASKED)
        p = blocks.power(BASE_2, blocks.products(k, query, D1) * score_scale - row_lse[None, :])
        if MASKED:
            bitmap = tl.load(bitmap_ids + step // CUTS)
            seen = blocks.visible(bitmaps, bitmap, row, column, BLOCK_Q, BLOCK_K, BLOCK_M, BLOCK_N, True)
            p = tl.where(seen, p, 0.0)
        dv = blocks.add_weighted(dv, p, grad, D1)
        ds = p * (blocks.products(v, grad, D1) - row_delta[None, :])
        dk = blocks.add_weighted(dk, ds, query, D1)
    return dk, dv


@triton.jit
def _dkv_kernel(
    grad_out, q, k, v, lse_b, delta, dk, dv, q_offsets, q_tiles, q_bitmaps, bitmaps, k_order,
    grad_stride_b, grad_stride, grad_stride_h, q_stride_b, q_stride, q_stride_h,
    k_stride_b, k_stride, k_stride_h, v_stride_b, v_stride, v_stride_h,
    offsets_stride, tiles_stride, bitmaps_stride, order_stride, num_tiles, q_len, kv_len, kv_heads, score_scale, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_MASKED: tl.constexpr, BASE_2: tl.constexpr,
):  # fmt: skip
    """dK and dV of a block of keys, summed over the query heads that share it."""
    batch, kv_head, _, tile, cut = _program(k_order, order_stride, num_tiles, kv_heads, 1, BLOCK_K // BLOCK_N)
    column = cut * BLOCK_N
    start = tile.to(tl.int64) * BLOCK_K + column
    left = kv_len - start
    q += batch * q_stride_b + kv_head * GROUP * q_stride_h
    grad_out += batch * grad_stride_b + kv_head * GROUP * grad_stride_h
    lse_b += (batch * kv_heads + kv_head) * GROUP * q_len
    delta += (batch * kv_heads + kv_head) * GROUP * q_len
    tiles = q_tiles + batch * tiles_stride
    ids = q_bitmaps + batch * tiles_stride
    bitmaps += batch * bitmaps_stride
    offsets = q_offsets + batch * offsets_stride + tile
    first = tl.load(offsets)
    last = tl.load(offsets + 1)
    middle = blocks.end_of_full_tiles(tiles, ids, first, last, q_len, BLOCK_Q)

    k += batch * k_stride_b + kv_head * k_stride_h + start * k_stride
    v += batch * v_stride_b + kv_head * v_stride_h + start * v_stride
    key = blocks.load(k, k_stride, left, BLOCK_N, HEAD_DIM, D0, D1, True)
    value = blocks.load(v, v_stride, left, BLOCK_N, HEAD_DIM, D0, D1, True)
    acc_k = blocks.zeros(BLOCK_N, D0, D1)
    acc_v = blocks.zeros(BLOCK_N, D0, D1)
    acc_k, acc_v = _dkv_steps(
        first, middle, key, value, acc_k, acc_v, grad_out, q, grad_stride, q_stride, grad_stride_h, q_stride_h,
        lse_b, delta, tiles, ids, bitmaps, q_len, column, score_scale,
        GROUP, HEAD_DIM, D0, D1, BLOCK_Q, BLOCK_K, BLOCK_M, BLOCK_N, BASE_2, False,
    )  # fmt: skip
    acc_k, acc_v = _dkv_steps(
        middle, last, key, value, acc_k, acc_v, grad_out, q, grad_stride, q_stride, grad_stride_h, q_stride_h,
        lse_b, delta, tiles, ids, bitmaps, q_len, column, score_scale,
        GROUP, HEAD_DIM, D0, D1, BLOCK_Q, BLOCK_K, BLOCK_MASKED, BLOCK_N, BASE_2, True,
    )  # fmt: skip
    acc_k = blocks.scale_rows(acc_k, tl.full((BLOCK_N,), scale, tl.float32), D1)
    in_result = ((batch * kv_len + start) * kv_heads + kv_head) * HEAD_DIM
    blocks.store(dk + in_result, kv_heads * HEAD_DIM, left, acc_k, HEAD_DIM, D0, D1)
    blocks.store(dv + in_result, kv_heads * HEAD_DIM, left, acc_v, HEAD_DIM, D0, D1)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_offsets: Tensor,
    kv_tiles: Tensor,
    kv_bitmaps: Tensor,
    q_offsets: Tensor,
    q_tiles: Tensor,
    q_bitmaps: Tensor,
    q_order: Tensor,
    k_order: Tensor,
    bitmaps: Tensor,
    block_q: int,
    block_k: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """``(out, lse)``: out like q but contiguous, the natural log-sum-exp in float32 ``(batch, q_heads, q_len)``.

    The plan's tensors are those of a `TilePlan`, in its order; any of them may have a batch dimension in front.
    `q_offsets`, `q_tiles`, `q_bitmaps` and `k_order` serve the backward pass alone.
    """
    q, k, v = (addressable(x) for x in (q, k, v))
    batch, q_len, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, q_len), dtype=torch.float32, device=q.device)
    blocking = choose_blocking("forward", q, block_q, block_k)
    sizes, constants = _sizes(q, k, scale), _constants(q, k, block_q, block_k, blocking)
    programs = batch * heads * q_order.shape[-1] * (block_q // blocking.block_m)
    if programs:
        _forward_kernel[(programs,)](
            q, k, v, out, lse, kv_offsets, kv_tiles, kv_bitmaps, bitmaps, q_order,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *_plan_sizes(kv_offsets, kv_tiles, bitmaps, q_order),
            *sizes, **constants, FOLD_SCALE=scale > 0,
        )  # fmt: skip
    return out, lse


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    kv_offsets: Tensor,
    kv_tiles: Tensor,
    kv_bitmaps: Tensor,
    q_offsets: Tensor,
    q_tiles: Tensor,
    q_bitmaps: Tensor,
    q_order: Tensor,
    k_order: Tensor,
    bitmaps: Tensor,
    block_q: int,
    block_k: int,
    scale: float,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)``, contiguous, from the gradients of what `forward` returned.

    `out` and `lse` are as it returned them.
    """
    grad_out, q, k, v = (addressable(x) for x in (grad_out, q, k, v))
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    lse_b, delta = torch.empty_like(lse), torch.empty_like(lse)
    inputs = (*grad_out.stride()[:3], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    sizes = _sizes(q, k, scale)
    batch, _, heads, _ = q.shape

    blocking = choose_blocking("dq", q, block_q, block_k)
    programs = batch * heads * q_order.shape[-1] * (block_q // blocking.block_m)
    if programs:
        _dq_kernel[(programs,)](
            grad_out, q, k, v, out, lse, None if grad_lse is None else grad_lse.contiguous(), dq, lse_b, delta,
            kv_offsets, kv_tiles, kv_bitmaps, bitmaps, q_order,
            *inputs, *_plan_sizes(kv_offsets, kv_tiles, bitmaps, q_order), *sizes, scale,
            **_constants(q, k, block_q, block_k, blocking),
        )  # fmt: skip

    blocking = choose_blocking("dkv", q, block_q, block_k)
    programs = batch * k.shape[2] * k_order.shape[-1] * (block_k // blocking.block_n)
    if programs:
        _dkv_kernel[(programs,)](
            grad_out, q, k, v, lse_b, delta, dk, dv, q_offsets, q_tiles, q_bitmaps, bitmaps, k_order,
            *inputs, *_plan_sizes(q_offsets, q_tiles, bitmaps, k_order), *sizes, scale,
            **_constants(q, k, block_q, block_k, blocking),
        )  # fmt: skip
    return dq, dk, dv


def _plan_sizes(offsets: Tensor, tiles: Tensor, bitmaps: Tensor, order: Tensor) -> tuple[int, ...]:
    """Batch strides of a plan's tensors, 0 where all sequences share one; and the number of its tiles."""
    shared = ((offsets, 1), (tiles, 1), (bitmaps, 3), (order, 1))
    return *(x.stride(0) if x.dim() > dims else 0 for x, dims in shared), order.shape[-1]


def _sizes(q: Tensor, k: Tensor, scale: float) -> tuple[int, int, int, float]:
    """Lengths, KV heads, and the scale in the base of the softmax."""
    return q.shape[1], k.shape[1], k.shape[2], scale * math.log2(math.e) if _in_base_2(q) else scale


def _in_base_2(q: Tensor) -> bool:
    return q.element_size() == 2


def _constants(q: Tensor, k: Tensor, block_q: int, block_k: int, blocking: Blocking) -> dict[str, int | bool]:
    head_dim = q.shape[3]
    first, second = split_head_dim(head_dim)
    return {
        "GROUP": q.shape[2] // k.shape[2],
        "HEAD_DIM": head_dim,
        "D0": first,
        "D1": second,
        "BLOCK_Q": block_q,
        "BLOCK_K": block_k,
        "BLOCK_M": blocking.block_m,
        "BLOCK_N": blocking.block_n,
        "BLOCK_MASKED": blocking.masked,
        "BASE_2": _in_base_2(q),
        "num_warps": blocking.warps,
        "num_stages": blocking.stages,
    }
