"""Matrices of 4 to 8 bits as the products read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from typing_extensions import Buffer

from pdkernels import _memory
from pdkernels._host import pack_gguf
from pdkernels._validation import check, check_type, fail
from pdkernels.reference.gguf_blocks import LAYOUTS
from pdkernels.reference.quantized_linear import BLOCK, Layout, Quantized, dequantize, pack

__all__ = ["QuantizedWeight"]

OP = "QuantizedWeight"
MAX_PARTS = 8
GGUF_FORMATS = tuple(LAYOUTS)
"""Names of the formats in GGUF that stay packed."""
GROUP = BLOCK
"""The columns of a group are a multiple of this."""


class Part(NamedTuple):
    """Some outputs of a matrix in one format."""

    format: str
    layout: Layout
    outputs: int
    data: Tensor
    """Packed codes and scales, ``(layout.nbytes(outputs, width),)`` uint8."""


class QuantizedWeight(torch.nn.Module):
    """A matrix `(outputs, width)` of a quantised format: what `linear` and `linear_token_statistics` take as a weight.

    Its codes stay packed in memory, four to eight bits each, and products read them as they are. Matrices of other formats can be
    joined: a model's fused projection of queries, keys and values may have a format for each. A module without
    parameters: its bytes are buffers, so that `state_dict` and `to(device)` work; `to(dtype)` changes nothing.

    Made by `quantize`, or by loading a quantised checkpoint.

    Args:
        parts: consecutive outputs with the format of each.
        width: inputs.

    Example:
        >>> import torch, pdkernels as pd
        >>> weight = pd.quantize(torch.eye(32), "q8_0")
        >>> weight.shape, weight.format, weight.nbytes
        (torch.Size([32, 32]), 'q8_0', 1152)
        >>> weight.dequantize()[0, :3]
        tensor([0.9999, 0.0000, 0.0000])
    """

    def __init__(self, parts: Sequence[Part], width: int) -> None:
        super().__init__()
        check(0 < len(parts) <= MAX_PARTS, OP, "parts", f"be 1 to {MAX_PARTS}", len(parts))
        self.width = width
        self.formats = [part.format for part in parts]
        self.layouts = [part.layout.number for part in parts]
        self.outputs = [part.outputs for part in parts]
        for i, part in enumerate(parts):
            size = part.layout.nbytes(part.outputs, width)
            check_type(
                part.data.dtype == torch.uint8, OP, f"parts[{i}].data", "have dtype torch.uint8", part.data.dtype
            )
            check(part.data.shape == (size,), OP, f"parts[{i}].data", f"have shape ({size},)", tuple(part.data.shape))
            self.register_buffer(f"part{i}", part.data)

    @classmethod
    def pack(cls, format: str, layout: Layout, matrix: Quantized, width: int) -> QuantizedWeight:
        """From codes and scales, see `reference.quantized_linear`. Scales must be finite."""
        for name, field in matrix.fields.items():
            if field.is_floating_point() and not field.isfinite().all():
                fail(OP, f"{name}s", "be finite", f"{int((~field.isfinite()).sum())} others")
        return cls([Part(format, layout, len(matrix.codes), pack(layout, matrix))], width)

    @classmethod
    def from_gguf(
        cls, format: str, source: Buffer, outputs: int, width: int, order: Sequence[int] | None = None
    ) -> QuantizedWeight:
        """From the bytes of a tensor in a GGUF file; no number changes.

        Args:
            format: one of `GGUF_FORMATS`.
            source: the blocks of the rows, one row after the other.
            outputs, width: the tensor's shape.
            order: the row of the file that each output is; None: the same.
        """
        check(format in LAYOUTS, OP, "format", f"be one of {', '.join(LAYOUTS)}", repr(format))
        layout = LAYOUTS[format]
        data = _memory.empty((layout.nbytes(outputs, width),), torch.uint8)
        wrong = pack_gguf(format, source, [] if order is None else order, outputs, width, cast(Any, data.numpy()))
        check(wrong == 0, OP, "scales", "be finite", f"{wrong} others")
        return cls([Part(format.lower(), layout, outputs, data)], width)

    @classmethod
    def from_integers(
        cls, format: str, codes: Tensor, scales: Tensor, zeros: Tensor, bits: int, group: int
    ) -> QuantizedWeight:
        """The matrix ``scale * (code - zero)``. Scales are kept exactly.

        Args:
            format: its name.
            codes: ``(outputs, width)`` uint8 of 4 or 8 `bits`.
            scales: ``(outputs, groups)`` float16, bfloat16 or float32, finite.
            zeros: ``(outputs, groups)`` uint8.
            group: columns that share a scale, a multiple of `GROUP`; 0: all.
        """
        width, wide = codes.shape[1], scales.float()
        fields = {"scale": wide[..., None], "zero": zeros[..., None]}
        if torch.equal(wide.half().float(), wide):
            kind = "half_zero"
        else:
            kind = "float" if bool((zeros == 2 ** (bits - 1)).all()) else "float_zero"
        if kind == "float":
            del fields["zero"]
        padded = torch.nn.functional.pad(codes, (0, -width % BLOCK))
        return cls.pack(format, Layout(kind, bits, group // BLOCK), Quantized(padded, fields), width)

    @classmethod
    def join(cls, weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """The outputs of several matrices of one width, one after the other."""
        width = weights[0].width
        for i, weight in enumerate(weights):
            check(weight.width == width, OP, f"weights[{i}]", f"have width {width} like weights[0]", weight.width)
        return cls([part for weight in weights for part in weight.parts()], width)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((sum(self.outputs), self.width))

    @property
    def format(self) -> str:
        """The format's name; several are joined by commas."""
        return ", ".join(dict.fromkeys(self.formats))

    @property
    def data(self) -> list[Tensor]:
        """The packed bytes of each part."""
        return [getattr(self, f"part{i}") for i in range(len(self.outputs))]

    @property
    def nbytes(self) -> int:
        return sum(data.numel() for data in self.data)

    @property
    def device(self) -> torch.device:
        return self.data[0].device

    def __len__(self) -> int:
        return sum(self.outputs)

    def parts(self) -> Iterator[Part]:
        for format, layout, outputs, data in zip(self.formats, self.layouts, self.outputs, self.data):
            yield Part(format, Layout.of(layout), outputs, data)

    def __getitem__(self, rows: slice) -> QuantizedWeight:
        """The outputs of a slice, which must be whole parts. Shares the memory."""
        check_type(isinstance(rows, slice), OP, "rows", "be a slice", type(rows).__name__)
        first, last, step = rows.indices(len(self))
        check(step == 1, OP, "rows", "be a slice with step 1", rows)
        found, at = [], 0
        for part in self.parts():
            if first <= at and at + part.outputs <= last:
                found.append(part)
            at += part.outputs
        if sum(part.outputs for part in found) != last - first:
            fail(OP, "rows", f"be whole parts, which have {self.outputs} outputs", f"[{first}, {last})")
        return QuantizedWeight(found, self.width)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix as numbers, ``(outputs, width)``, each rounded to float32 and then to `dtype`."""
        parts = [dequantize(part.layout, part.data.cpu(), part.outputs, self.width) for part in self.parts()]
        return torch.cat(parts).to(dtype=dtype, device=self.device)

    def extra_repr(self) -> str:
        return f"{tuple(self.shape)}, {self.format}, {self.nbytes} bytes"
