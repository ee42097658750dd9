"""Stores rows of new K and V after a sequence's prefix, where no program of the kernel reads.

As in the cache ops, nothing is stored for a sequence with any value out of range; every program checks that by itself.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pdkernels._attention import SpeculativeArguments
from pdkernels.triton import _blocks as blocks
from pdkernels.triton.blocking import ROUNDED

# Values checked, and rows stored, at a time.
_CHECKED = tl.constexpr(128)
_STORED = tl.constexpr(16)


@triton.jit
def append_chunk(
    chunk, chunks, lengths, counts, batch, sources, source_stride, max_count, new, capacity, table, pages,
    k, v, k_stride, v_stride, k_cache, v_cache, k_page, v_page, kc_stride, vc_stride,
    HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Stores one of `chunks` chunks of the rows of a sequence and KV head; together they store each row once.

    Row ``i`` is new token ``sources[i]``, or `i` without `sources`, and goes to position ``lengths[batch] + i``; there
    are ``counts[batch]`` of them, or `max_count`. The other pointers are those of the sequence and head. PAGE_SIZE 0
    means no table.
    """
    length = tl.load(lengths + batch).to(tl.int64)
    count = max_count.to(tl.int64)
    if counts is not None:
        count = tl.load(counts + batch).to(tl.int64)
    valid = (length >= 0) & (count >= 0) & (count <= max_count) & (length <= capacity) & (count <= capacity - length)
    count = tl.where(valid, count, 0)
    # Every program checks the whole sequence: its rows only if something names them, else its pages, if it has any.
    wrong = 0
    if sources is not None:
        for first in range(0, count, _CHECKED):
            rows = first + tl.arange(0, _CHECKED)
            page, _, source = _find(rows, rows < count, length, table, sources, source_stride, PAGE_SIZE)
            wrong += tl.sum(((page < 0) | (page >= pages) | (source < 0) | (source >= new)).to(tl.int32))
    elif PAGE_SIZE > 0:
        # Nothing is read for a length out of range.
        begin = tl.where(count > 0, length // PAGE_SIZE, 0)
        end = tl.where(count > 0, tl.cdiv(length + count, PAGE_SIZE), 0)
        for first in range(begin, end, _CHECKED):
            at = first + tl.arange(0, _CHECKED)
            page = tl.load(table + at, mask=at < end, other=0).to(tl.int64)
            wrong += tl.sum(((page < 0) | (page >= pages)).to(tl.int32))
    count = tl.where(wrong == 0, count, 0)
    for first in range(chunk * _STORED, count, chunks * _STORED):
        rows = first + tl.arange(0, _STORED)
        rows_left = count - first
        page, slot, source = _find(rows, rows < count, length, table, sources, source_stride, PAGE_SIZE)
        key = blocks.load((k + source * k_stride)[:, None], 0, rows_left, _STORED, HEAD_DIM, D0, D1, True)
        value = blocks.load((v + source * v_stride)[:, None], 0, rows_left, _STORED, HEAD_DIM, D0, D1, True)
        blocks.store((k_cache + page * k_page + slot * kc_stride)[:, None], 0, rows_left, key, HEAD_DIM, D0, D1)
        blocks.store((v_cache + page * v_page + slot * vc_stride)[:, None], 0, rows_left, value, HEAD_DIM, D0, D1)


@triton.jit
def _find(rows, mask, length, table, sources, source_stride, PAGE_SIZE: tl.constexpr):
    """(page, slot, new token) of rows, in 64 bits; valid values for rows not inside."""
    slot = length + rows
    page = slot * 0
    if PAGE_SIZE > 0:
        page = tl.load(table + slot // PAGE_SIZE, mask=mask, other=0).to(tl.int64)
        slot = slot % PAGE_SIZE
    source = tl.where(mask, rows, 0).to(tl.int64)
    if sources is not None:
        source = tl.load(sources + rows * source_stride, mask=mask, other=0).to(tl.int64)
    return page, slot, source


@triton.jit(
    do_not_specialize=["table_stride", "source_stride_b", "new", "append_rows", "kv_heads", "capacity", "pages"]
)
def _append_kernel(
    k_new, v_new, k_cache, v_cache, lengths, counts, sources, table, begins, kn_stride_b, kn_stride, kn_stride_h,
    vn_stride_b, vn_stride, vn_stride_h, kc_stride_b, kc_stride, kc_stride_h, vc_stride_b, vc_stride, vc_stride_h,
    table_stride, source_stride_b, source_stride, new, append_rows, kv_heads, capacity, pages, CHUNKS: tl.constexpr,
    HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0) % CHUNKS
    head = (tl.program_id(0) // CHUNKS % kv_heads).to(tl.int64)
    batch = (tl.program_id(0) // CHUNKS // kv_heads).to(tl.int64)
    if begins is None:
        k_new += batch * kn_stride_b
        v_new += batch * vn_stride_b
    else:
        begin = tl.load(begins + batch).to(tl.int64)
        new = tl.minimum(tl.load(begins + batch + 1).to(tl.int64) - begin, new).to(tl.int32)
        append_rows = new if sources is None else append_rows
        k_new += begin * kn_stride
        v_new += begin * vn_stride
    if sources is not None:
        sources += batch * source_stride_b
    if PAGE_SIZE > 0:
        table += batch * table_stride
    else:
        k_cache += batch * kc_stride_b
        v_cache += batch * vc_stride_b
    append_chunk(
        chunk, CHUNKS, lengths, counts, batch, sources, source_stride, append_rows, new, capacity, table, pages,
        k_new + head * kn_stride_h, v_new + head * vn_stride_h, kn_stride, vn_stride,
        k_cache + head * kc_stride_h, v_cache + head * vc_stride_h, kc_stride_b, vc_stride_b, kc_stride, vc_stride,
        HEAD_DIM, D0, D1, PAGE_SIZE,
    )  # fmt: skip


def store_rows(
    args: SpeculativeArguments,
    k_new: Tensor,
    v_new: Tensor,
    lengths: Tensor,
    table: Tensor | None,
    begins: Tensor | None,
) -> None:
    """Stores rows in a launch of its own, for an attention kernel that does not; `args` are the op's."""
    k_cache, v_cache, sources = args.k_cache, args.v_cache, args.source_index
    first, second = blocks.split_head_dim(k_new.shape[3])
    rows = args.new if sources is None else sources.shape[1]
    chunks = min(4, max(1, triton.cdiv(rows, _STORED.value)))
    _append_kernel[(args.batch * k_new.shape[2] * chunks,)](
        k_new, v_new, k_cache, v_cache, lengths, None if args.counts is None else args.counts.contiguous(), sources,
        table, begins, *(stride for x in (k_new, v_new, k_cache, v_cache) for stride in x.stride()[:3]),
        0 if table is None else table.stride(0), *((0, 0) if sources is None else sources.stride()), args.new, rows,
        k_new.shape[2], args.capacity, k_cache.shape[0], CHUNKS=chunks, HEAD_DIM=k_new.shape[3], D0=first, D1=second,
        PAGE_SIZE=0 if table is None else k_cache.shape[1], num_warps=4, **ROUNDED,
    )  # fmt: skip
