"""Attention of new tokens over a cached prefix and a planned tail, in Triton.

The query heads that share a KV head are packed into the rows of a tile, token by token: row ``r`` is head ``r % group``
of token ``r // group``. So a tile of rows spans as few tokens as possible, its part of the plan is short, and a key is
read once for the whole group. A program owns one tile of rows, one KV head and one split of the prefix; the last split
in use continues with the tail, walking the plan's lists of the tokens in its rows. A second kernel merges the splits by
their log-sum-exps; a single split writes the result itself. Rows for the cache are stored by the first split's
programs, in equal parts.

The number of splits follows from the cache's capacity, their length from the sequence's own length, which is read on
the device. Neither the host nor the rest of the batch matters: one launch serves every length, and a sequence gets the
same bits in any batch.

The prefix needs no mask except in its last step. The tail is a small part of the work and is masked throughout.
Arithmetic is that of the block-sparse kernels. Of an 8-bit cache, scores are multiplied by the scales of the keys,
whose codes are exact in any dtype, and values are codes times scales, rounded to the dtype of q.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdkernels._attention import SpeculativeArguments
from pdkernels.triton import _blocks as blocks
from pdkernels.triton import blocking as _blocking
from pdkernels.triton._blocks import LN_2, addressable, split_head_dim
from pdkernels.triton.append import append_chunk
from pdkernels.triton.blocking import CONTRACTED, Blocking

FEW_ROWS = 32
# Like the table of the block-sparse kernels, for few and for many packed rows: {(rows, architecture): {largest head
# dimension: blocking}}. `masked` is the width of steps in the last piece of a split and in the tail.
#   - Many rows: masked steps are narrow, which leaves registers for wide ones in the prefix. On Hopper four stages of
#     64 keys: with two of 128 every step waited for the loads it had just issued (tests/ops/test_steady_loops.py). What
#     ptxas spills here is stored before all loops and loaded after them.
#   - Few rows: only the rate at which keys arrive counts. Steps are short with several in flight, and two programs fit
#     an SM.
_TABLE: dict[tuple[str, str], dict[int, Blocking]] = {
    ("many", "sm_90"): {
        128: Blocking(128, 64, 32, 8, 4),
        192: Blocking(128, 64, 32, 8, 2),
        256: Blocking(64, 64, 32, 8, 2),
        512: Blocking(64, 32, 16, 8, 2),
    },
    ("many", "sm_100"): {
        128: Blocking(128, 128, 32, 8, 2),
        256: Blocking(64, 64, 32, 8, 2),
        512: Blocking(64, 32, 16, 8, 2),
    },
    ("many", "sm_80"): {
        64: Blocking(128, 64, 32, 8, 3),
        128: Blocking(64, 64, 32, 8, 2),
        256: Blocking(64, 32, 32, 8, 2),
        512: Blocking(32, 16, 16, 8, 2),
    },
    ("many", "fp32"): {
        64: Blocking(32, 32, 32, 8, 2),
        256: Blocking(16, 32, 32, 8, 2),
        512: Blocking(16, 16, 16, 8, 2),
    },
    ("few", "sm_90"): {
        128: Blocking(FEW_ROWS, 64, 32, 4, 4),
        256: Blocking(FEW_ROWS, 32, 32, 4, 3),
        512: Blocking(FEW_ROWS, 32, 32, 8, 2),
    },
    ("few", "sm_100"): {
        128: Blocking(FEW_ROWS, 64, 32, 4, 4),
        256: Blocking(FEW_ROWS, 32, 32, 4, 3),
        512: Blocking(FEW_ROWS, 32, 32, 8, 2),
    },
    ("few", "sm_80"): {
        128: Blocking(FEW_ROWS, 64, 32, 4, 3),
        256: Blocking(FEW_ROWS, 32, 32, 4, 3),
        512: Blocking(FEW_ROWS, 16, 16, 8, 2),
    },
}

# Keys in the shortest split; lengths of splits are multiples of it.
SHORTEST_SPLIT = tl.constexpr(256)
SPLIT_STEP = tl.constexpr(128)

# Most splits of a prefix.
MAX_SPLITS = 64
# Programs that run at once: an A100 has 108 SMs, an H200 132, a B200 148.
PROGRAMS_AT_ONCE = 132
# Overhead of a split, in keys: writing float32 results and reading them back.
SPLIT_OVERHEAD = 256


@triton.jit
def _splits(lengths, floors, batch, capacity, splits):
    """(length of a sequence, position of its first key, keys per split, splits in use: at least one).

    Lengths out of range are clamped. `floors` None: the first key is at 0."""
    length = tl.minimum(tl.maximum(tl.load(lengths + batch), 0), capacity).to(tl.int32)
    floor = 0
    if floors is not None:
        floor = tl.minimum(tl.maximum(tl.load(floors + batch), 0), length).to(tl.int32) // SPLIT_STEP * SPLIT_STEP
    keys = tl.cdiv(tl.cdiv(length - floor, splits), SPLIT_STEP) * SPLIT_STEP
    keys = tl.maximum(keys, SHORTEST_SPLIT)
    return length, floor, keys, tl.maximum(tl.cdiv(length - floor, keys), 1)


@triton.jit
def _prefix_steps(
    first, last, end, starts, query, acc, m_i, l_i, k, v, k_page, v_page, k_stride, v_stride, table, score_scale,
    HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BASE_2: tl.constexpr, FOLD_SCALE: tl.constexpr, CODES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Positions from `first`, a multiple of BLOCK_N, to `last`, BLOCK_N at a time; those from `end` on are masked, and
    those before a row's own of `starts`, if there are any."""
    for step in range(0, tl.cdiv(last - first, BLOCK_N)):
        start = first + step * BLOCK_N
        keys_left = end - start
        rows = tl.arange(0, BLOCK_N)
        mask = None
        if MASKED:
            mask = rows[None, :] < keys_left
        if starts is not None:
            late = start + rows[None, :] >= starts[:, None]
            mask = mask & late if MASKED else late
        if PAGE_SIZE % BLOCK_N == 0:  # a step lies within one page; a contiguous cache has no pages
            slot = start.to(tl.int64)
            if PAGE_SIZE > 0:
                page = tl.load(table + start // PAGE_SIZE).to(tl.int64)
                slot = slot % PAGE_SIZE
                k_rows = k + page * k_page + slot * k_stride
                v_rows = v + page * v_page + slot * v_stride
            else:
                k_rows = k + slot * k_stride
                v_rows = v + slot * v_stride
            key = blocks.load(k_rows, k_stride, keys_left, BLOCK_N, HEAD_DIM, D0, D1, MASKED)
            value = blocks.load(v_rows, v_stride, keys_left, BLOCK_N, HEAD_DIM, D0, D1, MASKED)
            if CODES:
                k_rows = k_rows + rows * k_stride
                v_rows = v_rows + rows * v_stride
        else:
            pages = table + (start + rows) // PAGE_SIZE
            page = tl.load(pages, mask=rows < keys_left, other=0) if MASKED else tl.load(pages)
            page = page.to(tl.int64)
            slot = ((start + rows) % PAGE_SIZE).to(tl.int64)
            k_rows = k + (page * k_page + slot * k_stride)
            v_rows = v + (page * v_page + slot * v_stride)
            key = blocks.load(k_rows[:, None], 0, keys_left, BLOCK_N, HEAD_DIM, D0, D1, MASKED)
            value = blocks.load(v_rows[:, None], 0, keys_left, BLOCK_N, HEAD_DIM, D0, D1, MASKED)
        key_scales = None
        if CODES:
            key_scales = blocks.load_scales(k_rows, keys_left, BLOCK_N, HEAD_DIM, MASKED)
            value_scales = blocks.load_scales(v_rows, keys_left, BLOCK_N, HEAD_DIM, MASKED)
            key = blocks.from_codes(key, None, query, D1)
            value = blocks.from_codes(value, value_scales, query, D1)
        acc, m_i, l_i = blocks.attention_step(
            query, key, value, mask, acc, m_i, l_i, score_scale, D1, BASE_2, FOLD_SCALE, key_scales
        )
    return acc, m_i, l_i


@triton.jit
def _tail_step(
    tile, column, bitmap, starts, query, acc, m_i, l_i, k, v, k_stride, v_stride, bitmaps, new, row, score_scale,
    HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BASE_2: tl.constexpr, FOLD_SCALE: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """A cut of a tile for the rows of one query tile; `row` is the index of each row in it, out of range for others."""
    in_tile = (row >= 0) & (row < BLOCK_Q)
    start = tile.to(tl.int64) * BLOCK_K + column
    keys_left = new - start
    key = blocks.load(k + start * k_stride, k_stride, keys_left, BLOCK_N, HEAD_DIM, D0, D1, True)
    value = blocks.load(v + start * v_stride, v_stride, keys_left, BLOCK_N, HEAD_DIM, D0, D1, True)
    key_scales = None
    if CODES:
        at = start + tl.arange(0, BLOCK_N)
        key_scales = blocks.load_scales(k + at * k_stride, keys_left, BLOCK_N, HEAD_DIM, True)
        value_scales = blocks.load_scales(v + at * v_stride, keys_left, BLOCK_N, HEAD_DIM, True)
        key = blocks.from_codes(key, None, query, D1)
        value = blocks.from_codes(value, value_scales, query, D1)
    mask = in_tile[:, None] & blocks.first_ones(keys_left, BLOCK_N)[None, :] if bitmap is None else in_tile[:, None]
    if starts is not None:
        mask &= start + tl.arange(0, BLOCK_N)[None, :] >= starts[:, None]
    if bitmap is not None:
        # `visible` counts rows from its argument.
        shift = tl.where(in_tile, row, 0) - tl.arange(0, BLOCK_M)
        mask &= blocks.visible(bitmaps, bitmap, shift, column, keys_left, BLOCK_Q, BLOCK_K, BLOCK_M, BLOCK_N, False)
    return blocks.attention_step(
        query, key, value, mask, acc, m_i, l_i, score_scale, D1, BASE_2, FOLD_SCALE, key_scales
    )


@triton.jit(
    do_not_specialize=[
        "table_stride", "rows_stride", "source_stride_b", "starts_stride_b", "starts_stride", "batch_size", "new", "all_rows", "capacity", "splits", "row_tiles", "append_rows", "pages",
    ]
)  # fmt: skip
def _split_kernel(
    q, k_new, v_new, k_cache, v_cache, lengths, table, plan_rows, lists, bitmaps, out, lse,
    counts, sources, starts, floors, begins, sinks,
    q_stride_b, q_stride, q_stride_h, kn_stride_b, kn_stride, kn_stride_h, vn_stride_b, vn_stride, vn_stride_h,
    kc_stride_b, kc_stride, kc_stride_h, vc_stride_b, vc_stride, vc_stride_h, table_stride, rows_stride,
    source_stride_b, source_stride, starts_stride_b, starts_stride,
    batch_size, new, all_rows, kv_heads, capacity, splits, row_tiles, append_rows, pages, score_scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_LAST: tl.constexpr, BLOCK_TAIL: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BASE_2: tl.constexpr, FOLD_SCALE: tl.constexpr, APPEND: tl.constexpr, STARTS_BY_ROW: tl.constexpr,
    CODES: tl.constexpr, ROW: tl.constexpr, ROW_0: tl.constexpr, ROW_1: tl.constexpr,
):  # fmt: skip
    # Tiles of rows that read the same keys are adjacent, for the L2 cache. The split with the tail starts first.
    program = tl.program_id(0)
    row_start = (program % row_tiles) * BLOCK_M
    program = program // row_tiles
    kv_head = (program % kv_heads).to(tl.int64)
    program = program // kv_heads
    batch = (program % batch_size).to(tl.int64)
    split = splits - 1 - program // batch_size
    length, floor, keys, in_use = _splits(lengths, floors, batch, capacity, splits)
    if split >= in_use:
        return
    # Packed sequences lie one after the other in the only entry of the batch.
    entry = batch
    begin = batch * new
    if begins is not None:
        begin = tl.load(begins + batch).to(tl.int64)
        max_new = new
        new = tl.minimum(tl.load(begins + batch + 1).to(tl.int64) - begin, max_new).to(tl.int32)
        q += begin * q_stride
        k_new += begin * kn_stride
        v_new += begin * vn_stride
        entry = batch * 0
        # The first tile stays: it stores rows, and none of its own where there are none.
        if (row_start >= new * GROUP) & (row_start > 0):
            return

    rows = row_start + tl.arange(0, BLOCK_M)
    rows_left = new * GROUP - row_start
    token = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    q_rows = q + (entry * q_stride_b + token.to(tl.int64) * q_stride + head * q_stride_h)
    query = blocks.load(q_rows[:, None], 0, rows_left, BLOCK_M, HEAD_DIM, D0, D1, True)
    acc = blocks.zeros(BLOCK_M, D0, D1)
    # A sink counts once: in the first split, which is always in use.
    there = (rows >= 0) & (split == 0)
    m_i, l_i = blocks.first_maximum(None if sinks is None else sinks + head, there, BLOCK_M, BASE_2)

    k_cache += kv_head * kc_stride_h
    v_cache += kv_head * vc_stride_h
    if PAGE_SIZE > 0:
        table += batch * table_stride
    else:
        k_cache += batch * kc_stride_b
        v_cache += batch * vc_stride_b
    own_starts = None
    if starts is not None:
        at = begin + token if STARTS_BY_ROW else token.to(tl.int64)
        addresses = starts + (entry if STARTS_BY_ROW else batch) * starts_stride_b + at * starts_stride
        valid = rows < new * GROUP
        own_starts = tl.load(addresses, mask=valid, other=0).to(tl.int64)
    first = floor + split * keys
    end = tl.minimum(first + keys, length)
    if starts is not None:
        # No row of the tile sees what is before its first start.
        first_start = tl.min(tl.where(valid, own_starts, length.to(tl.int64)), 0)
        first = tl.maximum(first, tl.minimum(first_start, length).to(tl.int32) // BLOCK_N * BLOCK_N)
    full_end = first + (end - first) // BLOCK_N * BLOCK_N
    acc, m_i, l_i = _prefix_steps(
        first, full_end, end, own_starts, query, acc, m_i, l_i, k_cache, v_cache, kc_stride_b, vc_stride_b, kc_stride,
        vc_stride, table, score_scale, HEAD_DIM, D0, D1, BLOCK_N, PAGE_SIZE, BASE_2, FOLD_SCALE, CODES, False,
    )  # fmt: skip
    acc, m_i, l_i = _prefix_steps(
        full_end, end, end, own_starts, query, acc, m_i, l_i, k_cache, v_cache, kc_stride_b, vc_stride_b, kc_stride,
        vc_stride, table, score_scale, HEAD_DIM, D0, D1, BLOCK_LAST, PAGE_SIZE, BASE_2, FOLD_SCALE, CODES, True,
    )  # fmt: skip

    k_new += entry * kn_stride_b + kv_head * kn_stride_h
    v_new += entry * vn_stride_b + kv_head * vn_stride_h
    tail_starts = None if starts is None else own_starts - length
    plan_rows += batch * rows_stride
    CUTS: tl.constexpr = BLOCK_K // BLOCK_TAIL
    first_tile = row_start // GROUP // BLOCK_Q
    last_tile = (row_start + tl.minimum(rows_left, BLOCK_M) - 1) // GROUP // BLOCK_Q + 1
    for tile in range(first_tile, tl.where(split == in_use - 1, last_tile, first_tile)):
        middle = tl.load(plan_rows + tile * 4 + 1)
        row = token - tile * BLOCK_Q
        for pair in range(tl.load(plan_rows + tile * 4), middle):
            first_key = tl.load(lists + 2 * pair)
            for step in range(0, (tl.load(lists + 2 * pair + 1) - first_key) * CUTS):
                acc, m_i, l_i = _tail_step(
                    first_key + step // CUTS, step % CUTS * BLOCK_TAIL, None, tail_starts, query, acc, m_i, l_i,
                    k_new, v_new, kn_stride, vn_stride, bitmaps, new, row, score_scale, HEAD_DIM, D0, D1, BLOCK_Q,
                    BLOCK_K, BLOCK_M, BLOCK_TAIL, BASE_2, FOLD_SCALE, CODES,
                )  # fmt: skip
        for step in range(middle * CUTS, tl.load(plan_rows + tile * 4 + 2) * CUTS):
            visit = step // CUTS * 2
            acc, m_i, l_i = _tail_step(
                tl.load(lists + visit), step % CUTS * BLOCK_TAIL, tl.load(lists + visit + 1), tail_starts, query, acc,
                m_i, l_i, k_new, v_new, kn_stride, vn_stride, bitmaps, new, row, score_scale, HEAD_DIM, D0, D1,
                BLOCK_Q, BLOCK_K, BLOCK_M, BLOCK_TAIL, BASE_2, FOLD_SCALE, CODES,
            )  # fmt: skip

    heads = kv_heads * GROUP
    # (splits, batch, new, heads, head_dim) and (splits, batch, heads, new); packed (splits, rows, heads, head_dim),
    # (splits, heads, rows)
    if begins is None:
        result = split * batch_size.to(tl.int64) + batch
        in_results = result * new + token
    else:
        in_results = split * all_rows.to(tl.int64) + begin + token
    out_rows = out + (in_results * heads + head) * HEAD_DIM
    acc = blocks.divide_rows(acc, l_i, D1)
    blocks.store(out_rows[:, None], 0, rows_left, acc, HEAD_DIM, D0, D1)
    log_sum = (m_i + tl.log2(l_i)) * LN_2 if BASE_2 else m_i + tl.log(l_i)
    lse_rows = lse + ((result * heads + head) * new if begins is None else (split * heads + head) * all_rows + begin)
    tl.store(lse_rows + token, log_sum, mask=rows < new * GROUP)
    if APPEND:
        # The first split is always in use, and has the tail only if it is the only one. Nothing reads past the prefix.
        if split == 0:
            if sources is not None:
                sources += batch * source_stride_b
            if begins is not None:
                row_tiles = tl.maximum(tl.cdiv(new * GROUP, BLOCK_M), 1)
                append_rows = new if sources is None else append_rows
            append_chunk(
                row_start // BLOCK_M, row_tiles, lengths, counts, batch, sources, source_stride, append_rows, new,
                capacity, table, pages, k_new, v_new, kn_stride, vn_stride, k_cache, v_cache, kc_stride_b, vc_stride_b,
                kc_stride, vc_stride, ROW, ROW_0, ROW_1, PAGE_SIZE,
            )  # fmt: skip


@triton.jit(do_not_specialize=["batch_size", "new", "all_rows", "capacity", "splits"])
def _merge_kernel(
    partial_out, partial_lse, lengths, floors, begins, out, lse, batch_size, new, all_rows, heads, capacity, splits,
    SPLITS: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The splits' results, each weighted by its share of the total sum of exponentials; SPLITS is at least `splits`."""
    # One dimension of the grid: the others end at 65,535.
    tiles = tl.cdiv(new * heads, ROWS)
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    row_start = tl.program_id(0) % tiles * ROWS
    _, _, _, in_use = _splits(lengths, floors, batch, capacity, splits)
    begin = batch * new
    first_lse = begin * heads
    lse_stride = new
    if begins is not None:
        begin = tl.load(begins + batch).to(tl.int64)
        max_new = new
        new = tl.minimum(tl.load(begins + batch + 1).to(tl.int64) - begin, max_new).to(tl.int32)
        first_lse = begin
        lse_stride = all_rows
    rows = row_start + tl.arange(0, ROWS)
    row_mask = rows < new * heads
    lse_rows = first_lse + (rows % heads).to(tl.int64) * lse_stride + rows // heads
    lse_step = all_rows.to(tl.int64) * heads
    split = tl.arange(0, SPLITS)
    log_sums = tl.load(
        partial_lse + split[:, None] * lse_step + lse_rows[None, :],
        mask=(split[:, None] < in_use) & row_mask[None, :], other=float("-inf"),
    )  # fmt: skip
    m_i = tl.max(log_sums, 0)
    origin = tl.where(m_i == float("-inf"), 0.0, m_i)
    l_i = tl.sum(tl.exp(log_sums - origin[None, :]), 0)

    columns = tl.arange(0, WIDTH)
    offsets = (begin * heads + rows)[:, None] * HEAD_DIM + columns[None, :]
    mask = row_mask[:, None] & (columns[None, :] < HEAD_DIM)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    for index in tl.range(0, in_use, loop_unroll_factor=4):
        weight = tl.exp(tl.load(partial_lse + index * lse_step + lse_rows, mask=row_mask, other=float("-inf")) - origin)
        acc += weight[:, None] * tl.load(partial_out + index * lse_step * HEAD_DIM + offsets, mask=mask, other=0.0)
    acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=mask)
    tl.store(lse + lse_rows, origin + tl.log(l_i), mask=row_mask)


def forward(args: SpeculativeArguments, *, append: bool = False) -> tuple[Tensor, Tensor]:
    """``(out, lse)``: out like q but contiguous, the natural log-sum-exp in float32 ``(batch, q_heads, new)``.

    What lies past a sequence's length, in the cache or in the table, is not read. With `append` the new tokens that
    `source_index` names, None: all, are stored there, the first `counts` of them. Packed sequences have results
    ``(rows, heads, head_dim)`` and ``(q_heads, rows)``.
    """
    q, k_new, v_new, k_cache, v_cache = args[:5]
    cu_seqlens, block_table, starts, counts = (args.cu_seqlens, args.block_table, args.starts, args.counts)
    if cu_seqlens is not None:
        q, k_new, v_new = (x.unsqueeze(0) for x in (q, k_new, v_new))
        cu_seqlens = cu_seqlens.contiguous()
    q, k_new, v_new = (addressable(x) for x in (q, k_new, v_new))  # a cache that is not was refused
    lengths = args.lengths.contiguous()
    counts = None if counts is None else counts.contiguous()
    if block_table is not None and block_table.stride(1) != 1:
        block_table = block_table.contiguous()
    entries, rows_each, heads, head_dim = q.shape
    batch, new = args.batch, args.new
    floors = None
    if starts is not None:
        floors = starts.amin(1)
        if args.starts_by_row and cu_seqlens is not None:
            floors = _first_starts(starts, cu_seqlens, batch)
    starts_strides = (0, 0) if starts is None else (starts.stride(0), 0 if starts.shape[1] == 1 else starts.stride(1))
    kv_heads = k_new.shape[2]
    group = heads // kv_heads
    blocking = choose_decode_blocking(q, new * group)
    row_tiles = triton.cdiv(new * group, blocking.block_m)
    page_size = 0 if block_table is None else k_cache.shape[1]
    append_rows = new if args.source_index is None else args.source_index.shape[1]
    splits = choose_splits(args.capacity, kv_heads * row_tiles)

    out = torch.empty(args.q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(args.lse_shape, dtype=torch.float32, device=q.device)
    partial_out, partial_lse = out, lse
    if splits > 1:
        partial_out = torch.empty((splits, *out.shape), dtype=torch.float32, device=q.device)
        partial_lse = torch.empty((splits, *lse.shape), dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    first, second = split_head_dim(head_dim)
    row = k_cache.shape[3]  # an 8-bit cache has the scale behind the codes
    base_2 = q.element_size() == 2
    _split_kernel[(splits * batch * kv_heads * row_tiles,)](
        q, k_new, v_new, k_cache, v_cache, lengths, block_table, args.plan_rows, args.plan_lists, args.bitmaps,
        partial_out, partial_lse, counts, args.source_index, starts, floors, cu_seqlens,
        None if args.sinks is None else args.sinks.contiguous(),
        *(stride for x in (q, k_new, v_new, k_cache, v_cache) for stride in x.stride()[:3]),
        0 if block_table is None else block_table.stride(0),
        args.plan_rows.stride(0) if args.plan_rows.dim() == 3 else 0,
        *((0, 0) if args.source_index is None else args.source_index.stride()), *starts_strides, batch, new,
        entries * rows_each, kv_heads, args.capacity, splits, row_tiles, append_rows, k_cache.shape[0],
        args.scale * math.log2(math.e) if base_2 else args.scale, GROUP=group, HEAD_DIM=head_dim, D0=first, D1=second,
        BLOCK_Q=args.block_q, BLOCK_K=args.block_k, BLOCK_M=blocking.block_m, BLOCK_N=blocking.block_n,
        BLOCK_LAST=blocking.masked, BLOCK_TAIL=min(blocking.masked, args.block_k & -args.block_k),
        PAGE_SIZE=page_size, BASE_2=base_2, FOLD_SCALE=args.scale > 0, APPEND=append,
        STARTS_BY_ROW=args.starts_by_row, CODES=args.quantized, ROW=row, ROW_0=split_head_dim(row)[0],
        ROW_1=split_head_dim(row)[1], num_warps=blocking.warps, **CONTRACTED,
        # A load by way of the block table takes a stage for the table's entry as well. Short steps would buffer K and V
        # for it, 137 KiB at d=256, more than sm_86 has.
        num_stages=2 * blocking.stages - 1 if page_size and blocking.block_n > 32 else blocking.stages,
    )  # fmt: skip
    if splits > 1:
        merge(partial_out, partial_lse, out, lse, args, lengths, floors, cu_seqlens, splits)
    return out, lse


def merge(
    partial_out: Tensor, partial_lse: Tensor, out: Tensor, lse: Tensor, args: SpeculativeArguments,
    lengths: Tensor, floors: Tensor | None, cu_seqlens: Tensor | None, splits: int,
) -> None:  # fmt: skip
    """Merges the splits' results; the tensors after `args` are contiguous."""
    rows, new, (heads, head_dim) = 4, args.new, args.q.shape[-2:]
    _merge_kernel[(triton.cdiv(new * heads, rows) * args.batch,)](
        partial_out, partial_lse, lengths, floors, cu_seqlens, out, lse, args.batch, new, lse.numel() // heads, heads,
        args.capacity, splits, SPLITS=triton.next_power_of_2(splits), ROWS=rows, HEAD_DIM=head_dim,
        WIDTH=triton.next_power_of_2(head_dim), num_warps=4, **CONTRACTED,
    )  # fmt: skip


def _first_starts(starts: Tensor, cu_seqlens: Tensor, batch: int) -> Tensor:
    """The smallest of each packed sequence's starts, one a row; no sequence without rows has one that matters."""
    rows = torch.arange(starts.shape[1], device=starts.device, dtype=cu_seqlens.dtype)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), rows, right=True).clamp(max=batch - 1)
    none = starts.new_full((batch,), torch.iinfo(starts.dtype).max)
    return none.scatter_reduce_(0, sequence, starts[0], "amin")


def choose_decode_blocking(q: Tensor, rows: int) -> Blocking:
    """The table's blocking for this many packed rows."""
    half = q.element_size() == 2
    limits = _TABLE[
        "few" if half and rows <= FEW_ROWS else "many", _blocking.architecture(q.device) if half else "fp32"
    ]
    entry = limits[min(limit for limit in limits if q.shape[-1] <= limit)]
    return entry._replace(block_m=min(entry.block_m, max(16, triton.next_power_of_2(rows))))


def choose_splits(capacity: int, programs: int) -> int:
    """Splits of a prefix so that the `programs` of a sequence fill a GPU with little overhead.

    >>> [choose_splits(capacity, 24) for capacity in (128, 4096, 65536)]
    [1, 5, 11]
    """
    waves = lambda splits: triton.cdiv(programs * splits, PROGRAMS_AT_ONCE)  # noqa: E731
    max_splits = max(1, min(MAX_SPLITS, capacity // SHORTEST_SPLIT.value))
    return min(range(1, max_splits + 1), key=lambda splits: waves(splits) * (capacity / splits + SPLIT_OVERHEAD))
