"""Products with a quantised matrix, and rows of such a matrix as numbers, in Triton.

Three kernels. The first quantises the rows of `x`. The second multiplies: a program owns a tile of outputs and a tile
of rows, walks over the blocks of 32 in ascending order, multiplies codes on the tensor cores and adds each block to
float32 sums. The products of codes are exact and no multiplication is contracted with an addition (`ROUNDED`), so the
result has the bits of the reference, whatever the tiles. The third turns rows of the matrix into numbers.

The matrix is read as csrc/common/quantized_layout.h describes it. A byte of four-bit codes holds columns c and c + 16
of a block, and a tensor core takes 32 columns at a time. So a product takes one half of two neighbouring blocks, of
which `x` has zeros in place of one: all codes are then masked and shifted where they are, and none moves between
threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdkernels import _quantized_formats
from pdkernels._host import QUANTIZED_SCALES
from pdkernels._quantized_formats import FIELDS, Layout
from pdkernels.triton.blocking import ROUNDED

TILE = tl.constexpr(_quantized_formats.TILE)
BLOCK = tl.constexpr(_quantized_formats.BLOCK)
HALF = tl.constexpr(_quantized_formats.BLOCK // 2)
RUN = tl.constexpr(64)
"""Bytes of four columns of a tile."""


def _kinds(field: str, dtype: torch.dtype | None = None, halves: bool = False) -> tl.constexpr:
    """The kinds of scales that have a field, a bit for each. A layout's number has a kind in its low bits."""
    kinds = enumerate(zip(FIELDS.values(), QUANTIZED_SCALES))
    return tl.constexpr(
        sum(
            1 << number
            for number, (fields, (*_, has_halves)) in kinds
            if any(own.name == field and dtype in (None, own.dtype) for own in fields) and has_halves >= halves
        )
    )


FLOAT = _kinds("scale", torch.float32)
MINIMUM = _kinds("minimum")
ZERO = _kinds("zero")
MULTIPLES = _kinds("multiples")
HALVES = _kinds("multiples", halves=True)
"""Multiples of half blocks, signed; the others are of a block's scale and minimum."""


class Tiling(NamedTuple):
    """Rows and outputs of a program, and how many pairs of blocks a step of its loop has at most."""

    rows: int
    outputs: int
    pairs: int
    warps: int
    stages: int
    """Stages of the load pipeline."""


# The first that holds all rows, or the last. Few rows are bound by instructions as much as by memory, so a program
# multiplies no more than it must: 8 rows are the least of a tensor core. Few outputs per program keep many SMs reading
# small matrices.
_TABLE = (Tiling(8, 32, 2, 2, 4), Tiling(32, 64, 1, 4, 4), Tiling(64, 64, 1, 4, 3))
# Blocks of a program of the two other kernels.
BLOCKS = 16


@triton.jit(do_not_specialize=["rows", "padded", "pairs"])
def _quantize_rows(x, codes, numbers, rows, padded, width, pairs, x_stride, BLOCKS: tl.constexpr):
    """Codes `(blocks, padded, 2, 32)`, of each half of a block beside zeros for the other block of the pair; scales,
    sums of the codes and of those of the first half, each `(blocks, padded)`. Rows and blocks past the last one are
    zero."""
    row = (tl.program_id(0) % padded).to(tl.int64)
    block = tl.program_id(0) // padded * BLOCKS + tl.arange(0, BLOCKS)
    at = tl.arange(0, BLOCK)
    column = block[:, None] * BLOCK + at[None, :]
    values = tl.load(x + row * x_stride + column, mask=(column < width) & (row < rows), other=0.0).to(tl.float32)
    largest = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)  # as integers: NaN is above infinity
    most = largest.to(tl.float32, bitcast=True)
    finite = largest < 0x7F800000
    counted = finite & (most >= 2.0**-100)
    divisor = tl.where(counted, most, 1.0)
    inverse = tl.where(counted, tl.div_rn(tl.full((BLOCKS,), 127.0, tl.float32), divisor), 0.0)
    scale = tl.div_rn(divisor, tl.full((BLOCKS,), 127.0, tl.float32))
    scale = tl.where(counted, scale, tl.where(finite, 0.0, float("nan")))
    # 1.5 * 2**23 rounds to whole numbers, ties to even, which are then in the low bits.
    shifted = values * inverse[:, None] + 12582912.0
    found = tl.where(counted[:, None], shifted.to(tl.int32, bitcast=True) - 0x4B400000, 0)
    to = block.to(tl.int64) * padded + row
    real = block < 2 * pairs
    codes_at = codes + (to * (2 * BLOCK))[:, None] + (at // HALF * BLOCK + at % HALF)[None, :]
    side = (block % 2 * HALF)[:, None]
    tl.store(codes_at + side, found.to(tl.int8), mask=real[:, None])
    tl.store(codes_at + (HALF - side), tl.zeros((BLOCKS, BLOCK), tl.int8), mask=real[:, None])
    plane = 2 * pairs.to(tl.int64) * padded
    tl.store(numbers + to, scale.to(tl.int32, bitcast=True), mask=real)
    tl.store(numbers + plane + to, tl.sum(found, 1), mask=real)
    tl.store(numbers + 2 * plane + to, tl.sum(tl.where((at < HALF)[None, :], found, 0), 1), mask=real)


@triton.jit
def _scale_bytes(SCALES: tl.constexpr):
    if FLOAT >> SCALES & 1:
        return 4
    else:
        return 2


@triton.jit
def _zero_at(SCALES: tl.constexpr):
    """Where the header of a group has the codes of zero, after scales and minima."""
    return TILE * (_scale_bytes(SCALES) + 2 * (MINIMUM >> SCALES & 1))


@triton.jit
def _multiples_at(SCALES: tl.constexpr):
    return _zero_at(SCALES) + TILE * (ZERO >> SCALES & 1)


@triton.jit
def _header_bytes(SCALES: tl.constexpr, GROUP: tl.constexpr):
    """Bytes of the header of a group."""
    return _multiples_at(SCALES) + 2 * TILE * GROUP * (MULTIPLES >> SCALES & 1)


@triton.jit
def _group(block, GROUP: tl.constexpr):
    """The group of a block; GROUP 0: the only one."""
    if GROUP == 0:
        return block * 0
    elif GROUP == 1:
        return block
    else:
        return block // GROUP


@triton.jit
def _scale_and_minimum(data, scales, tile_at, lane, block, SCALES: tl.constexpr, GROUP: tl.constexpr):
    """Of a block for each output, without the multiples of half blocks. 0 where there is no minimum."""
    header = tile_at + _group(block, GROUP) * _header_bytes(SCALES, GROUP)
    scale = tl.load(scales + header // _scale_bytes(SCALES) + lane).to(tl.float32)
    minimum = tl.zeros_like(scale)
    if MINIMUM >> SCALES & 1:
        minimum = tl.load(scales + header // 2 + TILE + lane).to(tl.float32)
    if (MULTIPLES & ~HALVES) >> SCALES & 1:
        multiples = data + header + _multiples_at(SCALES) + block % GROUP * (2 * TILE) + lane
        scale = scale * tl.load(multiples).to(tl.float32)
        minimum = -(minimum * tl.load(multiples + TILE).to(tl.float32))
    return scale, minimum


@triton.jit
def _zero(data, tile_at, lane, block, SCALES: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr):
    """The code of zero of a block for each output."""
    if ZERO >> SCALES & 1:
        header = tile_at + _group(block, GROUP) * _header_bytes(SCALES, GROUP)
        return tl.load(data + header + _zero_at(SCALES) + lane).to(tl.int32)
    elif MINIMUM >> SCALES & 1:
        return tl.zeros_like(lane)
    else:
        return tl.zeros_like(lane) + (1 << (BITS - 1))


@triton.jit
def _multiples(data, tile_at, lane, block, half, SCALES: tl.constexpr, GROUP: tl.constexpr):
    """The signed multiples of one of the half blocks."""
    at = data + tile_at + _group(block, GROUP) * _header_bytes(SCALES, GROUP) + _multiples_at(SCALES)
    return tl.load(at + block % GROUP * (2 * TILE) + half * TILE + lane).to(tl.int8, bitcast=True).to(tl.int32)


@triton.jit
def _pair_codes(at, second, BITS: tl.constexpr):
    """Codes of the first halves of two blocks and of their second halves, each `(outputs, 32)` int8; those of 8 bits
    less 128.

    `at`: where the first block's bytes of each output begin; `second`: how far away those of the second block are.
    """
    k = tl.arange(0, BLOCK)
    run = k % HALF // 4
    # The compiler does not see that bytes lie in fours.
    near = tl.max_contiguous(tl.multiple_of(k // HALF * second + run * RUN + k % 4, 4), 4)
    loaded = tl.load(at[:, None] + near[None, :])
    if BITS == 8:
        low, high = loaded ^ 128, tl.load(at[:, None] + (near + 4 * RUN)[None, :]) ^ 128
    else:
        low, high = loaded & 15, loaded >> 4
    if BITS == 5:  # one more bit of each run in the order of the runs
        near = tl.max_contiguous(tl.multiple_of(k // HALF * second + 4 * RUN + k % 4, 4), 4)
        more = tl.load(at[:, None] + near[None, :])
        low |= ((more >> run.to(tl.uint8)[None, :]) & 1) << 4
        high |= ((more >> (4 + run).to(tl.uint8)[None, :]) & 1) << 4
    if BITS == 6:  # two more bits of each run, four runs in a byte
        near = tl.max_contiguous(tl.multiple_of(k // HALF * second + 4 * RUN + k % 4, 4), 4)
        shift = (2 * run).to(tl.uint8)[None, :]
        low |= ((tl.load(at[:, None] + near[None, :]) >> shift) & 3) << 4
        high |= ((tl.load(at[:, None] + (near + RUN)[None, :]) >> shift) & 3) << 4
    return low.to(tl.int8, bitcast=True), high.to(tl.int8, bitcast=True)


@triton.jit
def packed_tile(codes, numbers, data, scales, bias, out, row, rows, padded, output, outputs, blocks, pairs, tile_bytes, headers,
              out_stride, matrix_at, SCALES: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
              ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """Stores the tile of `row` and `output`, those that are below `rows` and `outputs`, of the matrix at so many
    bytes."""
    BLOCK_BYTES: tl.constexpr = TILE * BLOCK // 8 * BITS
    lane = output % TILE
    # Past the last tile it is read again.
    tile_at = tl.minimum(output // TILE, (outputs - 1) // TILE).to(tl.int64) * tile_bytes + matrix_at
    at = data + tile_at + headers + 4 * lane
    plane = 2 * pairs.to(tl.int64) * padded
    k = tl.arange(0, BLOCK)[:, None]
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for first in range(0, pairs, STEP):
        for i in tl.static_range(STEP):
            pair = first + i
            # Past the last block it is read again, and x is zero.
            second = (tl.minimum(2 * pair + 1, blocks - 1) - 2 * pair) * BLOCK_BYTES
            low, high = _pair_codes(at + pair.to(tl.int64) * (2 * BLOCK_BYTES), second, BITS)
            for j in tl.static_range(2):
                block = tl.minimum(2 * pair + j, blocks - 1)
                x_at = (2 * pair + j).to(tl.int64) * padded + row
                x_low = tl.load(codes + (x_at * (2 * BLOCK))[None, :] + k)
                x_high = tl.load(codes + (x_at * (2 * BLOCK))[None, :] + BLOCK + k)
                x_scale = tl.load(numbers + x_at).to(tl.float32, bitcast=True)
                x_sum = tl.load(numbers + plane + x_at)
                scale, minimum = _scale_and_minimum(data, scales, tile_at, lane, block, SCALES, GROUP)
                products = tl.dot(low, x_low, out_dtype=tl.int32)
                if HALVES >> SCALES & 1:
                    x_first = tl.load(numbers + 2 * plane + x_at)
                    others = tl.dot(high, x_high, out_dtype=tl.int32) - (x_sum - x_first)[None, :] * 32
                    first_half = _multiples(data, tile_at, lane, block, 0, SCALES, GROUP)
                    products = (products - x_first[None, :] * 32) * first_half[:, None]
                    products += others * _multiples(data, tile_at, lane, block, 1, SCALES, GROUP)[:, None]
                else:
                    products = tl.dot(high, x_high, products, out_dtype=tl.int32)
                    zero = _zero(data, tile_at, lane, block, SCALES, GROUP, BITS)
                    if BITS == 8:
                        zero -= 128
                    products -= zero[:, None] * x_sum[None, :]
                total += products.to(tl.float32) * x_scale[None, :] * scale[:, None]
                if MINIMUM >> SCALES & 1:
                    total += (x_sum.to(tl.float32) * x_scale)[None, :] * minimum[:, None]
    real = output < outputs
    if bias is not None:
        total += tl.load(bias + output, mask=real, other=0.0).to(tl.float32)[:, None]
    to = out + row.to(tl.int64)[None, :] * out_stride + output[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=(row < rows)[None, :] & real[:, None])


@triton.jit(do_not_specialize=["rows", "padded", "blocks", "pairs"])
def _products(codes, numbers, data, scales, bias, out, rows, padded, outputs, blocks, pairs, tile_bytes, headers, out_stride,
              SCALES: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
              ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    # Programs that read the same weights are adjacent. One dimension of the grid: the others end at 65,535.
    row_tiles = padded // ROWS
    row = tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0) // row_tiles * OUTPUTS + tl.arange(0, OUTPUTS)
    packed_tile(codes, numbers, data, scales, bias, out, row, rows, padded, output, outputs, blocks, pairs, tile_bytes, headers,
              out_stride, 0, SCALES, BITS, GROUP, ROWS, OUTPUTS, STEP)  # fmt: skip


@triton.jit(do_not_specialize=["first", "outputs", "blocks", "chunks"])
def _embedding(ids, data, scales, out, first, outputs, width, blocks, chunks, tile_bytes, headers,
               SCALES: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    row = (tl.program_id(0) // chunks).to(tl.int64)
    output = tl.load(ids + row).to(tl.int64) - first
    if (output < 0) | (output >= outputs):
        return
    # A row of a matrix is a lane of its tile, the same for all blocks.
    block = tl.program_id(0) % chunks * BLOCKS + tl.arange(0, BLOCKS)
    real = block < blocks
    block = tl.where(real, block, 0)
    lane = tl.zeros_like(block) + (output % TILE).to(tl.int32)
    tile_at = output // TILE * tile_bytes
    column = tl.arange(0, BLOCK)[None, :]
    run, byte = column // 4, 4 * lane[:, None] + column % 4
    at = data + tile_at + headers + block.to(tl.int64)[:, None] * (TILE * BLOCK // 8 * BITS) + byte
    if BITS == 8:
        codes = tl.load(at + run * RUN).to(tl.int32)
    else:
        codes = (tl.load(at + run % 4 * RUN).to(tl.int32) >> (run // 4 * 4)) & 15
        if BITS > 4:
            MORE: tl.constexpr = BITS - 4
            EACH: tl.constexpr = 8 // MORE
            high = tl.load(at + (4 + run // EACH) * RUN).to(tl.int32) >> (run % EACH * MORE)
            codes |= (high & ((1 << MORE) - 1)) << 4
    codes -= _zero(data, tile_at, lane, block, SCALES, GROUP, BITS)[:, None]
    scale, minimum = _scale_and_minimum(data, scales, tile_at, lane, block, SCALES, GROUP)
    wide = scale[:, None]
    if HALVES >> SCALES & 1:
        multiples = _multiples(data, tile_at, lane[:, None], block[:, None], column // 16, SCALES, GROUP)
        wide = wide * multiples.to(tl.float32)
    values = wide * codes.to(tl.float32)
    if MINIMUM >> SCALES & 1:
        values += minimum[:, None]
    column = block[:, None] * BLOCK + column
    tl.store(out + row * width + column, values.to(out.dtype.element_ty), mask=real[:, None] & (column < width))


class Part(NamedTuple):
    """Some outputs of a matrix. `scales`: the bytes as the type of their scales; `kind`: what kernels are compiled
    for."""

    data: Tensor
    scales: Tensor
    first: int
    outputs: int
    tile_bytes: int
    headers: int
    kind: dict[str, int]


def parts_of(
    weights: Sequence[Tensor], layouts: Sequence[int], outputs: Sequence[int], blocks: int, matrices: int = 1
) -> list[Part]:
    """The parts that have outputs."""
    found, first = [], 0
    for data, layout, count in zip(weights, layouts, outputs):
        if count > 0:
            scales, bits, group = layout & 15, layout >> 4 & 15, Layout.of(layout).group_blocks
            kind = torch.float32 if FLOAT.value >> scales & 1 else torch.float16
            if data.data_ptr() % 16:
                data = data.clone()
            tile_bytes = data.numel() // (matrices * triton.cdiv(count, TILE.value))
            headers = tile_bytes - blocks * TILE.value * BLOCK.value // 8 * bits
            constants = {"SCALES": scales, "BITS": bits, "GROUP": group}
            found.append(Part(data, data.view(kind), first, count, tile_bytes, headers, constants))
        first += count
    return found


class Rows(NamedTuple):
    """Quantised rows of `x`, and how products take them."""

    codes: Tensor
    numbers: Tensor
    padded: int
    blocks: int
    pairs: int
    tiling: Tiling
    constants: dict[str, int]
    """What kernels are compiled and launched with."""


def quantized_rows(x: Tensor, together: int, further: int = 0) -> Rows:
    """The rows `(rows, width)`, whole tiles of them and `further` tiles; a launch. So many go `together` through one
    matrix."""
    rows, width = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    tiling = next((one for one in _TABLE if together <= one.rows), _TABLE[-1])
    blocks, padded = triton.cdiv(width, BLOCK.value), (triton.cdiv(rows, tiling.rows) + further) * tiling.rows
    pairs = triton.cdiv(blocks, 2)
    codes = x.new_empty(2 * pairs, padded, 2, BLOCK.value, dtype=torch.int8)
    numbers = x.new_empty(3, 2 * pairs, padded, dtype=torch.int32)
    programs = padded * triton.cdiv(2 * pairs, BLOCKS)
    _quantize_rows[(programs,)](
        x, codes, numbers, rows, padded, width, pairs, x.stride(0), BLOCKS=BLOCKS, num_warps=4, **ROUNDED
    )
    step = tiling.pairs
    while pairs % step:
        step //= 2
    constants = {"ROWS": tiling.rows, "OUTPUTS": tiling.outputs, "STEP": step, "num_warps": tiling.warps}
    constants |= {"num_stages": tiling.stages, **ROUNDED}
    return Rows(codes, numbers, padded, blocks, pairs, tiling, constants)


def forward(
    x: Tensor, weights: Sequence[Tensor], layouts: Sequence[int], outputs: Sequence[int], bias: Tensor | None
) -> Tensor:
    """``(rows, width) x (outputs, width) -> (rows, outputs)``: a launch that quantises the rows, and one for each
    part."""
    (rows, width), total = x.shape, sum(outputs)
    out = x.new_empty(rows, total)
    if rows == 0 or total == 0:
        return out
    bias = None if bias is None else bias.contiguous()
    if width == 0:
        return out.zero_() if bias is None else out.copy_(bias.expand(rows, total))
    codes, numbers, padded, blocks, pairs, tiling, constants = quantized_rows(x, rows)
    for part in parts_of(weights, layouts, outputs, blocks):
        _products[(padded // tiling.rows * triton.cdiv(part.outputs, tiling.outputs),)](
            codes,
            numbers,
            part.data,
            part.scales,
            None if bias is None else bias[part.first :],
            out[:, part.first :],
            rows,
            padded,
            part.outputs,
            blocks,
            pairs,
            part.tile_bytes,
            part.headers,
            total,
            **part.kind,
            **constants,
        )
    return out


def rows_of(
    ids: Tensor,
    weights: Sequence[Tensor],
    layouts: Sequence[int],
    outputs: Sequence[int],
    width: int,
    dtype: torch.dtype,
) -> Tensor:
    """The rows `ids` `(count,)` as numbers, ``(count, width)``: a launch for each part. A row out of range stays as it
    was allocated."""
    out = torch.empty(len(ids), width, dtype=dtype, device=ids.device)
    if out.numel() == 0:
        return out
    ids = ids.contiguous()
    blocks = triton.cdiv(width, BLOCK.value)
    chunks = triton.cdiv(blocks, BLOCKS)
    for part in parts_of(weights, layouts, outputs, blocks):
        _embedding[(len(ids) * chunks,)](
            ids,
            part.data,
            part.scales,
            out,
            part.first,
            part.outputs,
            width,
            blocks,
            chunks,
            part.tile_bytes,
            part.headers,
            **part.kind,
            BLOCKS=BLOCKS,
            num_warps=4,
            **ROUNDED,
        )
    return out
