"""Products of few rows with a matrix, in Triton.

A program owns a tile of rows and a tile of outputs and sums over the whole width in ascending order. Tiles depend on the dtype
alone, never from the number of rows, and a row of a tensor-core product does not read the others: the result of a row does not
depend on how many rows there are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Tiling(NamedTuple):
    """Rows and outputs of a program, and the depth of a step along the width."""

    rows: int
    outputs: int
    depth: int
    warps: int
    stages: int
    """Stages of the load pipeline."""


# 16 rows are the minimum of a tensor core. Few outputs per program, so that small matrices keep many SMs reading.
TABLE = {"16-bit": Tiling(16, 32, 128, 4, 4), "fp32": Tiling(16, 32, 64, 4, 3)}


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
        inside = (depth < width - start)[None, :]
        a = tl.load(x_at + start, mask=real_row[:, None] & inside, other=0.0)
        b = tl.load(weight_at + start, mask=real_output[:, None] & inside, other=0.0).to(a.dtype)
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


def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``(rows, width) x (outputs, width) -> (rows, outputs)``."""
    rows, outputs = len(x), len(weight)
    out = x.new_empty(rows, outputs)
    if rows == 0 or outputs == 0:
        return out
    x = x if x.stride(-1) == 1 else x.contiguous()
    weight = weight if weight.stride(-1) == 1 else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    tiling = TABLE["fp32" if x.dtype == torch.float32 else "16-bit"]
    programs = triton.cdiv(rows, tiling.rows) * triton.cdiv(outputs, tiling.outputs)
    _linear[(programs,)](
        x,
        weight,
        bias,
        out,
        rows,
        outputs,
        x.shape[1],
        x.stride(0),
        weight.stride(0),
        ROWS=tiling.rows,
        OUTPUTS=tiling.outputs,
        DEPTH=tiling.depth,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return out
