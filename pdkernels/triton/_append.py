"""Stores rows of new K and V after a sequence's prefix, where no program of the kernel reads.

As in the cache ops, nothing is stored for a sequence with any value out of range; every program checks that by itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pdkernels.triton import _blocks as blocks

# Values checked, and rows stored, at a time.
_CHECKED = tl.constexpr(128)
_STORED = tl.constexpr(16)


@triton.jit
def append_part(
    part, parts, lengths, counts, batch, sources, source_stride, max_count, new, capacity, table, pages,
    k, v, k_stride, v_stride, k_cache, v_cache, k_page, v_page, kc_stride, vc_stride,
    HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Stores one of `parts` parts of the rows of a sequence and KV head; together they store each row once.

    Row ``i`` is new token ``sources[i]``, or `i` without `sources`, and goes to position ``lengths[batch] + i``; there are
    ``counts[batch]`` of them, or `max_count`. The other pointers are those of the sequence and head. PAGE_SIZE 0 means no table.
    """
    length = tl.load(lengths + batch).to(tl.int64)
    count = max_count.to(tl.int64)
    if counts is not None:
        count = tl.load(counts + batch).to(tl.int64)
    fits = (length >= 0) & (count >= 0) & (count <= max_count) & (length <= capacity) & (count <= capacity - length)
    count = tl.where(fits, count, 0)
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
    for first in range(part * _STORED, count, parts * _STORED):
        rows = first + tl.arange(0, _STORED)
        left = count - first
        page, slot, source = _find(rows, rows < count, length, table, sources, source_stride, PAGE_SIZE)
        key = blocks.load((k + source * k_stride)[:, None], 0, left, _STORED, HEAD_DIM, D0, D1, True)
        value = blocks.load((v + source * v_stride)[:, None], 0, left, _STORED, HEAD_DIM, D0, D1, True)
        blocks.store((k_cache + page * k_page + slot * kc_stride)[:, None], 0, left, key, HEAD_DIM, D0, D1)
        blocks.store((v_cache + page * v_page + slot * vc_stride)[:, None], 0, left, value, HEAD_DIM, D0, D1)


@triton.jit
def _find(rows, inside, length, table, sources, source_stride, PAGE_SIZE: tl.constexpr):
    """(page, slot, new token) of rows, in 64 bits; valid values for rows not inside."""
    slot = length + rows
    page = slot * 0
    if PAGE_SIZE > 0:
        page = tl.load(table + slot // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        slot = slot % PAGE_SIZE
    source = tl.where(inside, rows, 0).to(tl.int64)
    if sources is not None:
        source = tl.load(sources + rows * source_stride, mask=inside, other=0).to(tl.int64)
    return page, slot, source
