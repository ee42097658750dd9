"""Products of few rows with a matrix, in Triton.

A program owns a tile of rows and a tile of outputs and sums over the whole width in ascending order. A product has 16
rows, however many there are, and a row of it does not read the others: the result of a row does not depend on how many
rows there are. In 16 bits a program takes four tiles of more than 16 rows abreast, one product after the other with the
same weights. One product of 64 rows would be another instruction on Hopper, which may round differently.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdkernels.triton.blocking import CONTRACTED


class Tiling(NamedTuple):
    """Rows and outputs of a program, and the depth of a step along the width."""

    rows: int
    outputs: int
    depth: int
    warps: int
    stages: int
    """Stages of the load pipeline."""


# Programs that run at once on an H100 or H200.
PROGRAMS_AT_ONCE = 132
# 16 rows are the minimum of a tensor core. Few outputs per program, so that small matrices keep many SMs reading.
TABLE = {"16-bit": Tiling(16, 16, 128, 2, 6), "fp32": Tiling(16, 32, 64, 4, 3)}
# Of matrices that give each SM three programs of 32 outputs. On an H200 this reads 14,336 x 4,096 in 34 us, the tiling
# above in 40, cuBLAS in 33; but 4,096 x 14,336 in 47, 38 and 34.
MANY_OUTPUTS = Tiling(16, 32, 128, 2, 5)
# Four tiles of 16 rows abreast. The more outputs of a program, the fewer bytes of rows and weights together come from
# L2. All fit into the 99 KiB of shared memory of small GPUs.
ABREAST = (Tiling(64, 32, 128, 4, 4), Tiling(64, 64, 128, 4, 3), Tiling(64, 128, 64, 8, 4), Tiling(64, 256, 64, 8, 3))


@triton.jit
def product_tile(x, weight, bias, out, row, rows, output, outputs, width, x_stride, weight_stride,
              ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    """Stores the tile of `row` and `output`, those that are below `rows` and `outputs`."""
    real_row, real_output = row < rows, output < outputs
    depth = tl.arange(0, DEPTH)
    x_at = x + row[:, None] * x_stride + depth[None, :]
    weight_at = weight + output[:, None] * weight_stride + depth[None, :]
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, width, DEPTH):
        depth_mask = (depth < width - start)[None, :]
        a = tl.load(x_at + start, mask=real_row[:, None] & depth_mask, other=0.0)
        b = tl.load(weight_at + start, mask=real_output[:, None] & depth_mask, other=0.0).to(a.dtype)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    if bias is not None:
        total += tl.load(bias + output, mask=real_output, other=0.0).to(tl.float32)[None, :]
    tl.store(out + row[:, None] * outputs + output[None, :], total.to(out.dtype.element_ty),
             mask=real_row[:, None] & real_output[None, :])  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _linear(x, weight, bias, out, rows, outputs, width, x_stride, weight_stride,
            ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    # Programs that read the same weights are adjacent. One dimension of the grid: the others end at 65,535.
    row_tiles = tl.cdiv(rows, ROWS)
    row = (tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    output = (tl.program_id(0) // row_tiles * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    product_tile(x, weight, bias, out, row, rows, output, outputs, width, x_stride, weight_stride, ROWS, OUTPUTS, DEPTH)


@triton.jit
def _rows(x, row, rows, start, width, x_stride, DEPTH: tl.constexpr):
    depth = start + tl.arange(0, DEPTH)
    at = x + row[:, None] * x_stride + depth[None, :]
    return tl.load(at, mask=(row < rows)[:, None] & (depth < width)[None, :], other=0.0)


@triton.jit
def _store(total, bias, out, row, rows, output, outputs):
    if bias is not None:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    at = out + row[:, None] * outputs + output[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (output < outputs)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _linear_abreast(x, weight, bias, out, rows, outputs, width, x_stride, weight_stride,
                    OUTPUTS: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    row_tiles = tl.cdiv(rows, 64)
    first = (tl.program_id(0) % row_tiles * 64 + tl.arange(0, 16)).to(tl.int64)
    output = (tl.program_id(0) // row_tiles * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    a = tl.zeros((16, OUTPUTS), tl.float32)
    b, c, d = a, a, a
    for start in range(0, width, DEPTH):
        weights = tl.trans(_rows(weight, output, outputs, start, width, weight_stride, DEPTH))
        a = tl.dot(_rows(x, first, rows, start, width, x_stride, DEPTH), weights, a)
        b = tl.dot(_rows(x, first + 16, rows, start, width, x_stride, DEPTH), weights, b)
        c = tl.dot(_rows(x, first + 32, rows, start, width, x_stride, DEPTH), weights, c)
        d = tl.dot(_rows(x, first + 48, rows, start, width, x_stride, DEPTH), weights, d)
    _store(a, bias, out, first, rows, output, outputs)
    _store(b, bias, out, first + 16, rows, output, outputs)
    _store(c, bias, out, first + 32, rows, output, outputs)
    _store(d, bias, out, first + 48, rows, output, outputs)


def choose_few(outputs: int) -> Tiling:
    """The tiling of up to 16 rows in 16 bits. The order of a sum does not depend on it.

    >>> [choose_few(outputs).outputs for outputs in (4096, 28672)]
    [16, 32]
    """
    return MANY_OUTPUTS if outputs >= 3 * MANY_OUTPUTS.outputs * PROGRAMS_AT_ONCE else TABLE["16-bit"]


def choose_abreast(rows: int, outputs: int) -> Tiling:
    """The tiling with the fewest bytes from L2 on the SM that has most to do.

    >>> [choose_abreast(64, outputs).outputs for outputs in (4096, 28672)]
    [32, 256]
    """

    def most(tiling: Tiling) -> int:
        programs = -(-rows // tiling.rows) * -(-outputs // tiling.outputs)
        return -(-programs // PROGRAMS_AT_ONCE) * (tiling.rows + tiling.outputs)

    return min(ABREAST, key=most)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``(rows, width) x (outputs, width) -> (rows, outputs)``."""
    rows, outputs = len(x), len(weight)
    out = x.new_empty(rows, outputs)
    if rows == 0 or outputs == 0:
        return out
    x = x if x.stride(-1) == 1 else x.contiguous()
    weight = weight if weight.stride(-1) == 1 else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    arguments = (x, weight, bias, out, rows, outputs, x.shape[1], x.stride(0), weight.stride(0))
    half = x.dtype != torch.float32
    tiling = TABLE["fp32"]
    if half:
        tiling = choose_abreast(rows, outputs) if rows > 16 else choose_few(outputs)
    grid = (triton.cdiv(rows, tiling.rows) * triton.cdiv(outputs, tiling.outputs),)
    options = {"num_warps": tiling.warps, "num_stages": tiling.stages, **CONTRACTED}
    if tiling.rows > 16:
        _linear_abreast[grid](*arguments, OUTPUTS=tiling.outputs, DEPTH=tiling.depth, **options)
    else:
        _linear[grid](*arguments, ROWS=tiling.rows, OUTPUTS=tiling.outputs, DEPTH=tiling.depth, **options)
    return out
