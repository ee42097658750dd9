"""Products with a quantised matrix, and its layout in memory, as plain PyTorch.

A row of `x` is quantised to 8 bits in blocks of 32: ``scale = max / 127`` and ``code = round(x * (127 / max))``, ties to even, for the
largest magnitude `max` of a block. A block whose magnitudes are below 2**-100 counts as zero; one with an infinity or NaN has the
scale NaN. The products of a block's codes are whole numbers and exact. With the weight's ``scale * (code - zero) + minimum``:

    y[o] = sum over blocks b, in ascending order, of
           round(round(I[o, b] * x_scale[b]) * scale[o, b]) + round(round(S[b] * x_scale[b]) * minimum[o, b])
    I[o, b] = sum over the block of x_code * (code - zero),   S[b] = sum over the block of x_code

Every product and sum is rounded to float32 on its own, so that any device can compute the same bits.

A layout whose `rows` are "numbers" leaves `x` as it is, in float32:

    y[o] = sum over blocks b, in ascending order, of round(P[o, b] * scale[o, b]) + round(X[b] * minimum[o, b])
    P[o, b] = P0 + P1 of the halves of the block,   P0 = (c0 + c1) + (c2 + c3)
    c_i = sum, in ascending order, over the columns of the half that are i modulo 4 of round(x * (code - zero))

with X the same sums of x alone. With multiples of half blocks each half is scaled and added by itself. For `x` of 16 bits the products
are exact. CUDA has this up to the order of sums, which the tensor cores choose.

Source of the formats: ggml-common.h and ggml-quants.c of github.com/ggml-org/ggml.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

TILE, BLOCK = 16, 32
ROWS = ("int8", "numbers")
SCALES = ("half", "half_min", "super", "super16", "float", "half_zero", "float_zero")


@dataclass(frozen=True)
class Layout:
    """How codes and scales lie in memory; csrc/common/quantized_layout.h has the same in C++.

    `rows`: whether products quantise rows of x to 8 bits ("int8") or leave them as they are ("numbers"); memory is the same.

    `scales`: "half" and "float" (a group's scale), "half_min" (scale and minimum), "half_zero" and "float_zero" (scale and the code
    of zero), "super" (a scale and minus a minimum for 256 columns, each times 8 bits a block), "super16" (a scale for 256 columns,
    times 8 signed bits a half block). `bits` of a code: 4, 5, 6 or 8. `group_blocks`: blocks of 32 in a group, 0 for the whole width.
    """

    scales: str
    bits: int
    group_blocks: int
    rows: str = "int8"

    @property
    def number(self) -> int:
        """As a schema carries it."""
        return SCALES.index(self.scales) | self.bits << 4 | self.group_blocks << 8 | ROWS.index(self.rows) << 56

    @classmethod
    def of(cls, number: int) -> Layout:
        return cls(SCALES[number & 15], number >> 4 & 15, (number & 2**56 - 1) >> 8, ROWS[number >> 56])

    @property
    def zero(self) -> int:
        """The code of zero where it is the same everywhere."""
        return 2 ** (self.bits - 1) if self.scales in ("half", "float", "super16") else 0

    def header(self) -> list[tuple[str, torch.dtype, int]]:
        """The fields of a group: name, dtype and how many for each output."""
        scale = torch.float32 if self.scales.startswith("float") else torch.float16
        fields = [("scale", scale, 1)]
        if self.scales in ("half_min", "super"):
            fields.append(("minimum", torch.float16, 1))
        if self.scales.endswith("_zero"):
            fields.append(("zero", torch.uint8, 1))
        if self.scales in ("super", "super16"):
            fields.append(("multiples", torch.uint8, 16))
        return fields

    def blocks(self, width: int) -> int:
        return -(-width // BLOCK)

    def groups(self, width: int) -> int:
        blocks = self.blocks(width)
        return -(-blocks // (self.group_blocks or blocks)) if blocks else 0

    def headers_bytes(self, width: int) -> int:
        each = sum(TILE * count * torch.empty((), dtype=dtype).element_size() for _, dtype, count in self.header())
        return -(-self.groups(width) * each // 64) * 64

    def tile_bytes(self, width: int) -> int:
        return self.headers_bytes(width) + self.blocks(width) * TILE * BLOCK // 8 * self.bits

    def nbytes(self, outputs: int, width: int) -> int:
        return -(-outputs // TILE) * self.tile_bytes(width)


class Quantized(NamedTuple):
    """A matrix as codes `(outputs, blocks * 32)` uint8, and the fields of its groups, each `(outputs, groups, count)`."""

    codes: Tensor
    fields: dict[str, Tensor]


def pack(layout: Layout, matrix: Quantized) -> Tensor:
    """The bytes of a matrix, ``(nbytes,)`` uint8: tiles of 16 outputs, see csrc/common/quantized_layout.h."""
    outputs, columns = matrix.codes.shape
    tiles, blocks = -(-outputs // TILE), columns // BLOCK
    data = torch.zeros(tiles, layout.tile_bytes(columns), dtype=torch.uint8)
    if tiles == 0 or blocks == 0:
        return data.view(-1)
    headers = [
        _by_tile(matrix.fields[name].to(dtype), tiles).transpose(1, 2).transpose(2, 3).contiguous().view(torch.uint8)
        for name, dtype, _ in layout.header()
    ]  # (tiles, groups, count, 16 x bytes)
    header = torch.cat([field.flatten(2) for field in headers], 2).flatten(1)
    data[:, : header.shape[1]] = header
    codes = _by_tile(matrix.codes.view(outputs, blocks, 8, 4), tiles).permute(0, 2, 3, 1, 4)
    data[:, layout.headers_bytes(columns) :] = _planes(codes.reshape(tiles, blocks, 8, 64), layout.bits).flatten(1)
    return data.view(-1)


def unpack(layout: Layout, data: Tensor, outputs: int, width: int) -> Quantized:
    """The inverse of `pack`."""
    tiles, blocks, groups = -(-outputs // TILE), layout.blocks(width), layout.groups(width)
    data = data.view(tiles, layout.tile_bytes(width))
    fields, first = {}, 0
    sizes = [TILE * count * torch.empty((), dtype=dtype).element_size() for _, dtype, count in layout.header()]
    headers = data[:, : groups * sum(sizes)].reshape(tiles, groups, sum(sizes))
    for (name, dtype, count), size in zip(layout.header(), sizes):
        field = headers[:, :, first : first + size].contiguous().view(dtype).view(tiles, groups, count, TILE)
        fields[name] = field.permute(0, 3, 1, 2).reshape(tiles * TILE, groups, count)[:outputs]
        first += size
    planes = data[:, layout.headers_bytes(width) :].reshape(tiles, blocks, layout.bits, 64)
    codes = _codes(planes, layout.bits).view(tiles, blocks, 8, TILE, 4).permute(0, 3, 1, 2, 4)
    return Quantized(codes.reshape(tiles * TILE, blocks * BLOCK)[:outputs], fields)


def _by_tile(rows: Tensor, tiles: int) -> Tensor:
    """`(tiles, 16, ...)`, zeros after the last row."""
    padded = rows.new_zeros(tiles * TILE, *rows.shape[1:])
    padded[: len(rows)] = rows
    return padded.view(tiles, TILE, *rows.shape[1:])


def _planes(codes: Tensor, bits: int) -> Tensor:
    """Codes `(..., 8, 64)` as they are stored: bytes, or halves of bytes and then what is above four bits."""
    if bits == 8:
        return codes
    low = codes & 15
    found = [low[..., :4, :] | low[..., 4:, :] << 4]
    if bits > 4:
        each = 8 // (bits - 4)
        high = (codes >> 4).unflatten(-2, (-1, each))
        found.append(sum(high[..., i, :] << ((bits - 4) * i) for i in range(each)))
    return torch.cat(found, -2)


def _codes(planes: Tensor, bits: int) -> Tensor:
    """The inverse of `_planes`."""
    if bits == 8:
        return planes
    codes = torch.cat((planes[..., :4, :] & 15, planes[..., :4, :] >> 4), -2)
    if bits > 4:
        more, each = bits - 4, 8 // (bits - 4)
        high = [planes[..., 4 + i // each, :] >> (more * (i % each)) & (2**more - 1) for i in range(8)]
        codes |= torch.stack(high, -2) << 4
    return codes


def scales_of(layout: Layout, matrix: Quantized) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Scale and minimum of every block, `(outputs, blocks)` float32, and multiples `(outputs, blocks, 2)` of half blocks."""
    blocks = matrix.codes.shape[1] // BLOCK
    size = layout.group_blocks or blocks
    scale, minimum = (
        None if field is None else field.float()[..., 0].repeat_interleave(size, 1)[:, :blocks]
        for field in (matrix.fields["scale"], matrix.fields.get("minimum"))
    )
    assert scale is not None
    if layout.scales == "super":
        assert minimum is not None
        multiples = matrix.fields["multiples"].unflatten(2, (8, 2)).flatten(1, 2).float()
        return scale * multiples[..., 0], -(minimum * multiples[..., 1]), None
    if layout.scales == "super16":
        multiples = matrix.fields["multiples"].view(torch.int8).unflatten(2, (8, 2)).flatten(1, 2)
        return scale, None, multiples
    return scale, minimum, None


def zeros_of(layout: Layout, matrix: Quantized) -> Tensor | int:
    """The code of zero of every block, `(outputs, blocks)`, or of all."""
    if "zero" not in matrix.fields:
        return layout.zero
    blocks = matrix.codes.shape[1] // BLOCK
    return matrix.fields["zero"][..., 0].int().repeat_interleave(layout.group_blocks or blocks, 1)[:, :blocks]


def dequantize(layout: Layout, data: Tensor, outputs: int, width: int) -> Tensor:
    """The matrix in float32, ``(outputs, width)``: ``scale * (code - zero) + minimum``, each operation rounded."""
    matrix = unpack(layout, data, outputs, width)
    scale, minimum, multiples = scales_of(layout, matrix)
    zero = zeros_of(layout, matrix)
    codes = matrix.codes.unflatten(1, (layout.blocks(width), BLOCK)).int()
    codes = codes - (zero if isinstance(zero, int) else zero[..., None])
    scale = scale[..., None]
    if multiples is not None:
        scale = (scale * multiples.float()).repeat_interleave(BLOCK // 2, 2)
    values = scale * codes.float()
    return (values if minimum is None else values + minimum[..., None]).flatten(1)[:, :width]


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes `(rows, blocks, 32)` int32 and scales `(rows, blocks)` float32 of `x` `(rows, width)`, any float dtype."""
    wide = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % BLOCK)).unflatten(1, (-(-x.shape[1] // BLOCK), BLOCK))
    bits = wide.contiguous().view(torch.int32) & 0x7FFFFFFF
    largest = bits.amax(2).view(torch.float32)
    finite = largest < float("inf")
    counted = finite & (largest >= 2.0**-100)
    most = torch.full_like(largest, 127)  # of a tensor: `127 / largest` would round a reciprocal first
    other = torch.zeros_like(largest).masked_fill(~finite, torch.nan)
    scales = torch.where(counted, largest / most, other)
    inverse = torch.where(counted, most / largest, 0.0)
    codes = torch.where(counted[..., None], (wide * inverse[..., None]).round(), 0.0)
    return codes.int(), scales


def quantized_linear(
    x: Tensor, weights: list[Tensor], layouts: list[int], outputs: list[int], bias: Tensor | None = None
) -> Tensor:
    """``x @ weight^T + bias``, ``(..., outputs)``, of a matrix in parts; rounded to the dtype of `x` at the end."""
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    codes, x_scales = quantize_rows(rows)
    found = []
    for data, number, count in zip(weights, layouts, outputs):
        layout = Layout.of(number)
        if layout.rows == "numbers":
            found.append(_part_of_numbers(rows, layout, data, count))
        else:
            found.append(_part(codes, x_scales, layout, data, count, x.shape[-1]))
    out = torch.cat(found, 1)
    return (out if bias is None else out + bias.float()).to(x.dtype).view(*x.shape[:-1], sum(outputs))


def _part(codes: Tensor, x_scales: Tensor, layout: Layout, data: Tensor, outputs: int, width: int) -> Tensor:
    matrix = unpack(layout, data, outputs, width)
    scale, minimum, multiples = scales_of(layout, matrix)
    zero = zeros_of(layout, matrix)
    total = torch.zeros(len(codes), outputs, dtype=torch.float32, device=codes.device)
    for b in range(codes.shape[1]):
        own = matrix.codes[:, b * BLOCK : (b + 1) * BLOCK].double()
        own = own - (zero if isinstance(zero, int) else zero[:, b, None])
        if multiples is not None:
            own = own * multiples[:, b].double().repeat_interleave(BLOCK // 2, 1)
        products = (codes[:, b].double() @ own.T).float()  # whole numbers below 2**24
        x_scale = x_scales[:, b, None]
        total = total + products * x_scale * scale[:, b]
        if minimum is not None:
            total = total + codes[:, b].sum(1, keepdim=True).float() * x_scale * minimum[:, b]
    return total


def _part_of_numbers(rows: Tensor, layout: Layout, data: Tensor, outputs: int) -> Tensor:
    width = rows.shape[1]
    matrix = unpack(layout, data, outputs, width)
    scale, minimum, multiples = scales_of(layout, matrix)
    zero = zeros_of(layout, matrix)
    blocks = layout.blocks(width)
    # Half blocks of four runs of four columns.
    x = torch.nn.functional.pad(rows.float(), (0, -width % BLOCK)).view(len(rows), 1, blocks, 2, 4, 4)
    codes = matrix.codes.int().view(outputs, blocks, BLOCK)
    codes = codes - (zero if isinstance(zero, int) else zero[..., None])
    values = codes.float().view(1, outputs, blocks, 2, 4, 4)
    total = torch.zeros(len(rows), outputs, dtype=torch.float32, device=rows.device)
    for b in range(blocks):
        products = _halves(x[:, :, b] * values[:, :, b])
        if multiples is not None:
            for half in range(2):
                total = total + products[..., half] * (scale[:, b] * multiples[:, b, half].float())
        else:
            total = total + (products[..., 0] + products[..., 1]) * scale[:, b]
        if minimum is not None:
            sums = _halves(x[:, :, b])
            total = total + (sums[..., 0] + sums[..., 1]) * minimum[:, b]
    return total


def _halves(products: Tensor) -> Tensor:
    """The sums of each half of ``(..., 2, 4, 4)``, ``(..., 2)``."""
    columns = torch.zeros_like(products[..., 0, :])
    for run in range(4):
        columns = columns + products[..., run, :]
    return (columns[..., 0] + columns[..., 1]) + (columns[..., 2] + columns[..., 3])


def quantized_embedding(
    ids: Tensor, weights: list[Tensor], layouts: list[int], outputs: list[int], width: int, dtype: torch.dtype
) -> Tensor:
    """The rows `ids` of a matrix in parts, ``(*ids.shape, width)``."""
    wrong = ids[(ids < 0) | (ids >= sum(outputs))]
    if wrong.numel():
        last = sum(outputs) - 1
        raise ValueError(f"pdkernels.quantized_embedding: ids must be in [0, {last}], got {int(wrong[0])}.")
    parts = [
        dequantize(Layout.of(layout), data, count, width) for data, layout, count in zip(weights, layouts, outputs)
    ]
    return torch.cat(parts)[ids].to(dtype)
