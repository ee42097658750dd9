"""Quantised formats, as csrc/common/quantized_formats.h lists them, and how a matrix in one is packed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pdkernels import _memory
from pdkernels._host import QUANTIZED_FORMATS, QUANTIZED_SCALES, pack_quantized, unpack_quantized

TILE, BLOCK = 16, 32
"""Outputs whose codes are interleaved, and columns of a block."""
ROWS = ("int8", "numbers")
"""How products take rows of x: quantised to 8 bits, or as they are."""
ROWS_AT = 56
"""The bit of a layout's number that says which."""


class Field(NamedTuple):
    """Numbers that the header of a group has for each output."""

    name: str
    dtype: torch.dtype
    per_output: int


_DTYPES = {("scale", 4): torch.float32, ("scale", 2): torch.float16, ("minimum", 2): torch.float16}
FIELDS = {
    name: [Field(field, _DTYPES.get((field, size), torch.uint8), count) for field, size, count in fields]
    for name, _, fields, _ in QUANTIZED_SCALES
}
"""The fields of each kind of scales; a layout's number has their places."""
_KINDS = tuple(FIELDS)


class Layout(NamedTuple):
    """How codes and scales lie in memory, as csrc/common/quantized_layout.h describes it.

    `scales`: a key of `FIELDS`. `bits` of a code: 4, 5, 6 or 8. `group_blocks`: blocks of 32 in a group, 0 for the
    whole width. `rows`: one of `ROWS`, how products take rows of x; memory is the same.
    """

    scales: str
    bits: int
    group_blocks: int
    rows: str = "int8"

    @property
    def number(self) -> int:
        """The layout as a schema carries it."""
        rows = ROWS.index(self.rows) << ROWS_AT
        return _KINDS.index(self.scales) | self.bits << 4 | self.group_blocks << 8 | rows

    @classmethod
    def of(cls, number: int) -> Layout:
        group_blocks = (number & 2**ROWS_AT - 1) >> 8
        return cls(_KINDS[number & 15], number >> 4 & 15, group_blocks, ROWS[number >> ROWS_AT])

    @property
    def zero(self) -> int:
        """The code of zero where it is the same everywhere."""
        names = {field.name for field in FIELDS[self.scales]}
        return 0 if names & {"minimum", "zero"} else 2 ** (self.bits - 1)

    def blocks(self, width: int) -> int:
        return -(-width // BLOCK)

    def groups(self, width: int) -> int:
        blocks = self.blocks(width)
        return -(-blocks // (self.group_blocks or blocks)) if blocks else 0

    def nbytes(self, outputs: int, width: int) -> int:
        """Bytes of a packed matrix."""
        header = TILE * sum(count * dtype.itemsize for _, dtype, count in FIELDS[self.scales])
        headers = -(-self.groups(width) * header // 64) * 64
        return -(-outputs // TILE) * (headers + self.blocks(width) * TILE * BLOCK // 8 * self.bits)


GGUF_LAYOUTS = {
    name: Layout(scales, bits, next(blocks for kind, blocks, *_ in QUANTIZED_SCALES if kind == scales))
    for name, scales, bits, _ in QUANTIZED_FORMATS
}
"""The formats of GGUF that stay packed, by their names there."""


class Quantized(NamedTuple):
    """A matrix as codes `(outputs, blocks * 32)` uint8, and the fields of its groups, each `(outputs, groups,
    count)`."""

    codes: Tensor
    fields: dict[str, Tensor]


def pack(layout: Layout, matrix: Quantized) -> Tensor:
    """The bytes of a matrix, ``(nbytes,)`` uint8, on the CPU."""
    outputs, columns = matrix.codes.shape
    packed = _memory.empty((layout.nbytes(outputs, columns),), torch.uint8)
    codes = matrix.codes.to("cpu", torch.uint8).contiguous()
    fields = [matrix.fields[field.name].to("cpu", field.dtype).contiguous() for field in FIELDS[layout.scales]]
    buffers = [_memory.buffer(field) for field in fields]
    pack_quantized(layout.number, _memory.buffer(codes), buffers, outputs, columns, _memory.buffer(packed))
    return packed


def unpack(layout: Layout, packed: Tensor, outputs: int, width: int) -> Quantized:
    """The inverse of `pack`; `packed` is on the CPU."""
    codes = torch.empty(outputs, layout.blocks(width) * BLOCK, dtype=torch.uint8, device="cpu")
    groups = layout.groups(width)
    fields = {
        name: torch.empty(outputs, groups, count, dtype=dtype, device="cpu")
        for name, dtype, count in FIELDS[layout.scales]
    }
    buffers = [_memory.buffer(field) for field in fields.values()]
    source = _memory.buffer(packed.contiguous())
    unpack_quantized(layout.number, source, outputs, width, _memory.buffer(codes), buffers)
    return Quantized(codes, fields)
