"""Products of rows sorted by group, each group with a matrix of its own, in Triton.

A tile of rows is of a single group, which its programs find in `ends`, so nothing waits for the host. As many tiles are
launched as there could be, however the rows are divided; those left over end at once. Tiles and sums are those of
`linear` and `quantized_linear`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdkernels.triton.blocking import CONTRACTED
from pdkernels.triton.linear import TABLE, Tiling, product_tile
from pdkernels.triton.quantized_linear import TILE, packed_tile, parts_of, quantized_rows

HALF = Tiling(16, 32, 128, 4, 4)
"""The tiling for 16 bits: groups side by side keep the SMs reading."""


@triton.jit
def group_of(tile, ends, groups, rows, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """The group of a tile of rows, the first of its rows, and where the group's rows end; none past the last tile.

    Ends that do not ascend, which only the CPU refuses, give no row outside of memory.
    """
    group = tl.arange(0, GROUPS)
    end = tl.load(ends + group, mask=group < groups, other=0).to(tl.int64)
    start = tl.load(ends + group - 1, mask=(group > 0) & (group < groups), other=0).to(tl.int64)
    end, start = tl.minimum(end, rows), tl.maximum(start, 0)
    tiles = tl.maximum((end - start + ROWS - 1) // ROWS, 0).to(tl.int32)
    tiles = tl.where(group < groups, tiles, 0)
    last = tl.cumsum(tiles, 0)
    tile_group = tl.sum((last <= tile).to(tl.int32), 0)
    selected = group == tile_group
    before = tl.sum(tl.where(selected, last - tiles, 0), 0)
    first = tl.sum(tl.where(selected, start, 0), 0) + (tile - before).to(tl.int64) * ROWS
    return tile_group.to(tl.int64), first, tl.sum(tl.where(selected, end, 0), 0)


@triton.jit(do_not_specialize=["rows", "row_tiles"])
def _grouped_linear(x, weight, ends, bias, out, rows, groups, outputs, width, row_tiles, x_stride, weight_stride,
                    matrix_stride,
                    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, GROUPS: tl.constexpr):  # fmt: skip
    group, first, end = group_of(tl.program_id(0) % row_tiles, ends, groups, rows, ROWS, GROUPS)
    if first >= end:
        return
    output = (tl.program_id(0) // row_tiles * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    group_bias = bias
    if bias is not None:
        group_bias = bias + group * outputs
    product_tile(
        x, weight + group * matrix_stride, group_bias, out, first + tl.arange(0, ROWS), end, output, outputs, width,
        x_stride, weight_stride, ROWS, OUTPUTS, DEPTH,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "padded", "row_tiles", "blocks", "pairs"])
def _grouped_products(
    codes, numbers, data, scales, ends, bias, out, rows, padded, groups, row_tiles, outputs, blocks, pairs,
    tile_bytes, headers, out_stride, matrix_bytes, SCALES: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    group, first, end = group_of(tl.program_id(0) % row_tiles, ends, groups, rows, ROWS, GROUPS)
    if first >= end:
        return
    output = tl.program_id(0) // row_tiles * OUTPUTS + tl.arange(0, OUTPUTS)
    group_bias = bias
    if bias is not None:
        group_bias = bias + group * out_stride
    packed_tile(
        codes, numbers, data, scales, group_bias, out, first + tl.arange(0, ROWS), end, padded, output, outputs,
        blocks, pairs, tile_bytes, headers, out_stride, group * matrix_bytes, SCALES, BITS, GROUP, ROWS, OUTPUTS,
        STEP,
    )  # fmt: skip


def row_tiles_of(rows: int, groups: int, size: int) -> int:
    """Tiles of `size` rows that suffice, however the rows are divided among the groups."""
    return min(rows, rows // size + min(rows, groups))


def forward(x: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None) -> Tensor:
    """``(rows, width) x (groups, outputs, width) -> (rows, outputs)``, in the tiles of `linear`, each of one group."""
    rows, (groups, outputs, width) = len(x), weight.shape
    out = x.new_empty(rows, outputs)
    if rows == 0 or outputs == 0 or groups == 0:
        return out
    x = x if x.stride(-1) == 1 else x.contiguous()
    weight = weight if weight.stride(-1) == 1 else weight.contiguous()
    tiling = TABLE["fp32"] if x.dtype == torch.float32 else HALF
    row_tiles = row_tiles_of(rows, groups, tiling.rows)
    _grouped_linear[(row_tiles * triton.cdiv(outputs, tiling.outputs),)](
        x, weight, ends.contiguous(), None if bias is None else bias.contiguous(), out, rows, groups, outputs, width,
        row_tiles, x.stride(0), weight.stride(1), weight.stride(0), ROWS=tiling.rows, OUTPUTS=tiling.outputs,
        DEPTH=tiling.depth, GROUPS=triton.next_power_of_2(groups), num_warps=tiling.warps, num_stages=tiling.stages,
        **CONTRACTED,
    )  # fmt: skip
    return out


def quantized_forward(
    x: Tensor,
    weights: Sequence[Tensor],
    layouts: Sequence[int],
    outputs: Sequence[int],
    ends: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """``(rows, width) x (groups, outputs, width) -> (rows, outputs)``, launched like `quantized_linear`; a tile has one
    group."""
    (rows, width), total, groups = x.shape, sum(outputs), len(ends)
    out = x.new_empty(rows, total)
    if rows == 0 or total == 0 or groups == 0:
        return out
    bias, ends = None if bias is None else bias.contiguous(), ends.contiguous()
    if width == 0:
        numbers = torch.searchsorted(ends, torch.arange(rows, device=x.device), right=True)
        return out.zero_() if bias is None else out.copy_(bias[numbers])
    # Tiles for twice the rows that a group has if all have as many. The last tile of a group may read rows after it.
    codes, numbers, padded, blocks, pairs, tiling, constants = quantized_rows(
        x, triton.cdiv(2 * rows, groups), further=1
    )
    row_tiles = row_tiles_of(rows, groups, tiling.rows)
    for weight_part in parts_of(weights, layouts, outputs, blocks, groups):
        _grouped_products[(row_tiles * triton.cdiv(weight_part.outputs, tiling.outputs),)](
            codes, numbers, weight_part.data, weight_part.scales, ends,
            None if bias is None else bias[:, weight_part.first :], out[:, weight_part.first :], rows, padded, groups,
            row_tiles, weight_part.outputs, blocks, pairs, weight_part.tile_bytes, weight_part.headers, total,
            weight_part.tile_bytes * triton.cdiv(weight_part.outputs, TILE.value), **weight_part.kind, **constants,
            GROUPS=triton.next_power_of_2(groups),
        )  # fmt: skip
    return out
