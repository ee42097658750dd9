"""Code that the attention kernels share: head blocks, cuts of a bitmap, walks over ranges, the online softmax.

A *head block* is a tuple of one or two tensors ``(rows, width)``: a head dimension that is not a power of two is split
in two, 96 = 64 + 32, so that no work is wasted on padding. Columns past the head dimension are zero.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2))


def split_head_dim(head_dim: int) -> tuple[int, int]:
    """Widths of the two parts of a head: powers of two from 16 up, the second 0 where one part costs no more.

    >>> [split_head_dim(d) for d in (16, 40, 64, 96, 112, 128)]
    [(16, 0), (32, 16), (64, 0), (64, 32), (128, 0), (128, 0)]
    """
    padded = triton.next_power_of_2(head_dim)
    second = max(16, triton.next_power_of_2(head_dim - padded // 2))
    return (padded, 0) if head_dim == padded or second >= padded // 2 else (padded // 2, second)


def addressable(x: Tensor) -> Tensor:
    """A tensor the kernels can address: last dimension contiguous, a block's row offsets within 32 bits."""
    return x if x.stride(-1) == 1 and abs(x.stride(1)) < 2**23 else x.contiguous()


@triton.jit
def first_ones(limit, COUNT: tl.constexpr):
    """Which of COUNT indices are below `limit`. Compared in 32 bits, though `limit` has 64."""
    return tl.arange(0, COUNT) < tl.minimum(limit, COUNT).to(tl.int32)


@triton.jit
def zeros(ROWS: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    if D1 == 0:
        return (tl.zeros((ROWS, D0), tl.float32),)
    else:
        return (tl.zeros((ROWS, D0), tl.float32), tl.zeros((ROWS, D1), tl.float32))


@triton.jit
def load(matrix, row_stride, rows_left, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
         MASKED: tl.constexpr):  # fmt: skip
    """The first ROWS rows of a matrix as a head block; if `MASKED`, rows from `rows_left` on are zero and not read."""
    if D1 == 0:
        return (_load_part(matrix, row_stride, rows_left, ROWS, HEAD_DIM, 0, D0, MASKED),)
    else:
        return (
            _load_part(matrix, row_stride, rows_left, ROWS, HEAD_DIM, 0, D0, MASKED),
            _load_part(matrix, row_stride, rows_left, ROWS, HEAD_DIM, D0, D1, MASKED),
        )


@triton.jit
def _load_part(matrix, row_stride, rows_left, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, START: tl.constexpr,
               WIDTH: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    rows = tl.arange(0, ROWS)
    columns = START + tl.arange(0, WIDTH)
    pointers = matrix + rows[:, None] * row_stride + columns[None, :]
    if MASKED:
        return tl.load(pointers, mask=first_ones(rows_left, ROWS)[:, None] & (columns[None, :] < HEAD_DIM), other=0.0)
    elif START + WIDTH > HEAD_DIM:
        return tl.load(pointers, mask=columns[None, :] < HEAD_DIM, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store(matrix, row_stride, rows_left, block, HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    """Writes a head block, only the rows before `rows_left`."""
    _store_part(matrix, row_stride, rows_left, block[0], HEAD_DIM, 0)
    if D1 > 0:
        _store_part(matrix, row_stride, rows_left, block[1], HEAD_DIM, D0)


@triton.jit
def _store_part(matrix, row_stride, rows_left, block, HEAD_DIM: tl.constexpr, START: tl.constexpr):
    rows = tl.arange(0, block.shape[0])
    columns = START + tl.arange(0, block.shape[1])
    mask = (rows[:, None] < rows_left) & (columns[None, :] < HEAD_DIM)
    pointers = matrix + rows[:, None] * row_stride + columns[None, :]
    tl.store(pointers, block.to(matrix.dtype.element_ty), mask=mask)


@triton.jit
def load_scales(rows, rows_left, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr):
    """The scales of rows of an 8-bit cache at the addresses `rows`; if `MASKED`, 0 from `rows_left` on."""
    addresses = (rows + HEAD_DIM).to(tl.pointer_type(tl.float32))
    if MASKED:
        return tl.load(addresses, mask=first_ones(rows_left, ROWS), other=0.0)
    else:
        return tl.load(addresses)


@triton.jit
def from_codes(codes, scales, like, D1: tl.constexpr):
    """A head block of codes as numbers in the dtype of the head block `like`, times `scales` unless None. Codes are
    exact in any."""
    if scales is not None:
        if D1 == 0:
            return ((codes[0].to(tl.float32) * scales[:, None]).to(like[0].dtype),)
        else:
            return (
                (codes[0].to(tl.float32) * scales[:, None]).to(like[0].dtype),
                (codes[1].to(tl.float32) * scales[:, None]).to(like[0].dtype),
            )
    elif D1 == 0:
        return (codes[0].to(like[0].dtype),)
    else:
        return (codes[0].to(like[0].dtype), codes[1].to(like[0].dtype))


@triton.jit
def scale_rows(block, factor, D1: tl.constexpr):
    if D1 == 0:
        return (block[0] * factor[:, None],)
    else:
        return (block[0] * factor[:, None], block[1] * factor[:, None])


@triton.jit
def zero_rows(block, rows, D1: tl.constexpr):
    """0 in some rows, whatever they hold."""
    if D1 == 0:
        return (tl.where(rows[:, None], 0.0, block[0]),)
    else:
        return (tl.where(rows[:, None], 0.0, block[0]), tl.where(rows[:, None], 0.0, block[1]))


@triton.jit
def divide_rows(block, l_i, D1: tl.constexpr):
    """Weighted values divided by the sums of their weights. A row without weights is 0, even beside infinities."""
    nothing = l_i == 0.0
    return zero_rows(scale_rows(block, 1.0 / tl.where(nothing, 1.0, l_i), D1), nothing, D1)


@triton.jit
def products(a, b, D1: tl.constexpr):
    """Inner products of the rows of two head blocks, ``(rows of a, rows of b)``."""
    result = tl.dot(a[0], tl.trans(b[0]), input_precision="ieee")
    if D1 > 0:
        result = tl.dot(a[1], tl.trans(b[1]), result, input_precision="ieee")
    return result


@triton.jit
def add_weighted(total, weights, b, D1: tl.constexpr):
    """``total + weights @ b`` for head blocks."""
    weights = weights.to(b[0].dtype)
    if D1 == 0:
        return (tl.dot(weights, b[0], total[0], input_precision="ieee"),)
    else:
        return (
            tl.dot(weights, b[0], total[0], input_precision="ieee"),
            tl.dot(weights, b[1], total[1], input_precision="ieee"),
        )


@triton.jit
def row_dots(a, b, D1: tl.constexpr):
    """Inner products row by row, in float32."""
    result = tl.sum(a[0].to(tl.float32) * b[0].to(tl.float32), 1)
    if D1 > 0:
        result += tl.sum(a[1].to(tl.float32) * b[1].to(tl.float32), 1)
    return result


@triton.jit
def power(BASE_2: tl.constexpr, exponent):
    return tl.exp2(exponent) if BASE_2 else tl.exp(exponent)


@triton.jit
def load_rows(values, rows_left, ROWS: tl.constexpr, OTHER: tl.constexpr, MASKED: tl.constexpr):
    """One value per row; if `MASKED`, OTHER from row `rows_left` on."""
    rows = tl.arange(0, ROWS)
    if MASKED:
        return tl.load(values + rows, mask=first_ones(rows_left, ROWS), other=OTHER)
    else:
        return tl.load(values + rows)


@triton.jit
def visible(bitmaps, bitmap, row, column, columns_left, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
            BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr):  # fmt: skip
    """The part ``[row : row + BLOCK_M, column : column + BLOCK_N]`` of a bitmap as booleans; all True for bitmap -1.
    Columns of the part from `columns_left` on are False, which costs nothing for each element; None: none are.

    Words become bits by a reshape, which costs nothing: the compiler lets each thread load the words of its elements.
    """
    TILE_WORDS: tl.constexpr = (BLOCK_K + 31) // 32
    WORDS: tl.constexpr = (BLOCK_N + 31) // 32
    BITS: tl.constexpr = BLOCK_N // WORDS
    bitmaps += bitmap.to(tl.int64) * (BLOCK_Q * TILE_WORDS)
    rows = row + tl.arange(0, BLOCK_M)
    word = column // 32 + tl.arange(0, WORDS)
    bits = column % 32 + tl.arange(0, BITS)
    if TRANSPOSED:
        loaded = tl.load(bitmaps + rows[None, :] * TILE_WORDS + word[:, None], mask=bitmap >= 0, other=-1)
        spread = tl.reshape((loaded[:, None, :] >> bits[None, :, None]) & 1, (BLOCK_N, BLOCK_M))
    else:
        loaded = tl.load(bitmaps + rows[:, None] * TILE_WORDS + word[None, :], mask=bitmap >= 0, other=-1)
        if columns_left is not None:
            valid_bits = tl.minimum(columns_left, BLOCK_N).to(tl.int32) + column % 32 - 32 * tl.arange(0, WORDS)
            valid_bits = tl.minimum(tl.maximum(valid_bits, 0), 32)
            loaded &= ((1 << valid_bits.to(tl.int64)) - 1).to(tl.int32)[None, :]
        spread = tl.reshape((loaded[:, :, None] >> bits[None, None, :]) & 1, (BLOCK_M, BLOCK_N))
    return spread != 0


@triton.jit
def first_maximum(sinks, mask, ROWS: tl.constexpr, BASE_2: tl.constexpr):
    """The maximum and the sum of each row before its first key: those of its sink. `sinks`: an address, or one for each
    row; None: no row has one; `mask`: which rows count it."""
    m_i = tl.full((ROWS,), float("-inf"), tl.float32)
    if sinks is not None:
        m_i = tl.maximum(m_i, tl.load(sinks, mask=mask, other=float("-inf")), propagate_nan=tl.PropagateNan.ALL)
        if BASE_2:
            m_i *= LOG2_E
    return m_i, tl.where(m_i == float("-inf"), 0.0, 1.0)


@triton.jit
def online_softmax(query, key, mask, m_i, l_i, score_scale, D1: tl.constexpr, BASE_2: tl.constexpr,
          FOLD_SCALE: tl.constexpr, key_scales=None):  # fmt: skip
    """``(p, alpha, m_i, l_i)``: the weights of a step, the factor of what was added up before it, and the running
    maximum and sum of each row. `mask` None: everything is visible. `key_scales`: of keys that are codes."""
    s = products(query, key, D1)
    if key_scales is not None:
        s *= key_scales[None, :]
    factor = score_scale
    if not FOLD_SCALE:
        s *= score_scale
        factor = 1.0
    if mask is not None:
        s = tl.where(mask, s, float("-inf"))
    m_ij = tl.maximum(m_i, tl.max(s, 1) * factor)
    origin = m_ij
    if mask is not None:
        # A row without a visible key so far has the maximum -inf; any finite origin keeps its weights at 0.
        origin = tl.where(m_ij == float("-inf"), 0.0, m_ij)
    p = power(BASE_2, s * factor - origin[:, None])
    alpha = power(BASE_2, m_i - origin)
    return p, alpha, m_ij, l_i * alpha + tl.sum(p, 1)


@triton.jit
def attention_step(query, key, value, mask, acc, m_i, l_i, score_scale,
           D1: tl.constexpr, BASE_2: tl.constexpr, FOLD_SCALE: tl.constexpr, key_scales=None):  # fmt: skip
    """A step of the online softmax and its weighted values."""
    p, alpha, m_i, l_i = online_softmax(query, key, mask, m_i, l_i, score_scale, D1, BASE_2, FOLD_SCALE, key_scales)
    return add_weighted(scale_rows(acc, alpha, D1), p, value, D1), m_i, l_i


@triton.jit
def first_range(lists, begin, middle, CUTS: tl.constexpr):
    """(steps in all ranges of a plan's lists from `begin` to `middle`, first step of the first range, its end).

    A step is one of CUTS cuts of a tile. One loop walks all ranges and carries its position as state: with two nested
    loops ptxas serializes all wgmma instructions. No load in the loop depends on another load, except where a range
    ends.
    """
    tiles = 0
    for pair in range(begin, middle):
        tiles += tl.load(lists + 2 * pair + 1) - tl.load(lists + 2 * pair)
    has_ranges = begin < middle
    first = tl.load(lists + 2 * begin, mask=has_ranges, other=0)
    return tiles * CUTS, first * CUTS, tl.load(lists + 2 * begin + 1, mask=has_ranges, other=0) * CUTS


@triton.jit
def next_step(lists, begin, middle, pair, at, end, CUTS: tl.constexpr):
    """(range, step, end of the range) after step `at` of range `pair`; wraps to the first range after the last."""
    at += 1
    range_done = at >= end
    pair = tl.where(range_done, tl.where(pair + 1 < middle, pair + 1, begin), pair)
    at = tl.where(range_done, tl.load(lists + 2 * pair, mask=range_done, other=0) * CUTS, at)
    end = tl.where(range_done, tl.load(lists + 2 * pair + 1, mask=range_done, other=0) * CUTS, end)
    return pair, at, end
