"""Matrices of 4 to 8 bits as the products read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Buffer

from pdkernels import _memory
from pdkernels._host import pack_gguf
from pdkernels._quantized_formats import BLOCK, GGUF_LAYOUTS, ROWS, Layout, Quantized, pack, unpack
from pdkernels._validation import KERNEL_DTYPES, check, check_type, fail, message
from pdkernels.ops.library import OPS, call

__all__ = ["QuantizedWeight"]

OP = "QuantizedWeight"
MAX_PARTS = 8
GGUF_FORMATS = tuple(GGUF_LAYOUTS)
"""Names of the formats in GGUF that stay packed."""
GROUP = BLOCK
"""The columns of a group are a multiple of this."""


class Part(NamedTuple):
    """Some outputs of a matrix in one format."""

    format: str
    layout: Layout
    outputs: int
    data: Tensor
    """Packed codes and scales, ``(layout.nbytes(outputs, width),)`` uint8; those of several matrices follow each
    other."""

    def unpacked(self, width: int) -> Quantized:
        """The codes and scales of a single matrix, on the CPU."""
        return unpack(self.layout, self.data.cpu(), self.outputs, width)


class QuantizedWeight(torch.nn.Module):
    """A matrix `(outputs, width)` of a quantised format: what `linear` and `linear_token_statistics` take as a weight.

    Its codes stay packed in memory, four to eight bits each, and products read them as they are. Matrices of other
    formats can be joined: a model's fused projection of queries, keys and values may have a format for each. A module
    without parameters: its bytes are buffers, so that `state_dict` and `to(device)` work; `to(dtype)` changes nothing.
    How products take rows is no part of a `state_dict`; copies, pickles and joined matrices have it.

    Made by `quantize`, or by loading a quantised checkpoint.

    Products quantise the rows of `x` to 8 bits, unless `with_rows("numbers")` says to leave them as they are.

    With `matrices` it holds so many of one shape and format, `(matrices, outputs, width)`: the experts of a mixture,
    which `grouped_linear` takes.

    Args:
        parts: consecutive outputs with the format of each.
        width: inputs.
        matrices: how many; None: a single one, without a dimension for their number.

    Example:
        >>> import torch, pdkernels as pd
        >>> weight = pd.quantize(torch.eye(32), "q8_0")
        >>> weight.shape, weight.format, weight.nbytes
        (torch.Size([32, 32]), 'q8_0', 1152)
        >>> weight.dequantize()[0, :3]
        tensor([0.9999, 0.0000, 0.0000])
    """

    def __init__(self, parts: Sequence[Part], width: int, matrices: int | None = None) -> None:
        super().__init__()
        check(0 < len(parts) <= MAX_PARTS, OP, "parts", f"be 1 to {MAX_PARTS}", len(parts))
        self.width, self.matrices = width, matrices
        self.formats = [part.format for part in parts]
        self.layouts = [part.layout.number for part in parts]
        self.outputs = [part.outputs for part in parts]
        for i, part in enumerate(parts):
            size = part.layout.nbytes(part.outputs, width) * (1 if matrices is None else matrices)
            check_type(
                part.data.dtype == torch.uint8, OP, f"parts[{i}].data", "have dtype torch.uint8", part.data.dtype
            )
            check(part.data.shape == (size,), OP, f"parts[{i}].data", f"have shape ({size},)", tuple(part.data.shape))
            self.register_buffer(f"part{i}", part.data)

    @classmethod
    def pack(cls, format: str, layout: Layout, matrix: Quantized, width: int) -> QuantizedWeight:
        """From codes and scales, which must be finite."""
        for name, field in matrix.fields.items():
            if field.is_floating_point() and not field.isfinite().all():
                fail(OP, f"{name}s", "be finite", f"{int((~field.isfinite()).sum())} others")
        return cls([Part(format, layout, len(matrix.codes), pack(layout, matrix))], width)

    @classmethod
    def from_gguf(
        cls,
        format: str,
        source: Buffer,
        outputs: int,
        width: int,
        order: Sequence[int] | None = None,
        matrices: int | None = None,
    ) -> QuantizedWeight:
        """From the bytes of a tensor in a GGUF file; no number changes.

        Args:
            format: one of `GGUF_FORMATS`.
            source: the blocks of the rows, one row after the other.
            outputs, width: the tensor's shape, or that of each of its `matrices`.
            order: the row of the file that each output is; None: the same.
            matrices: as of the class.
        """
        check(format in GGUF_LAYOUTS, OP, "format", f"be one of {', '.join(GGUF_LAYOUTS)}", repr(format))
        layout, rows = GGUF_LAYOUTS[format], [] if order is None else order
        count = 1 if matrices is None else matrices
        data = _memory.empty((count * layout.nbytes(outputs, width),), torch.uint8)
        blocks = memoryview(source).cast("B")
        step, wrong = len(blocks) // max(count, 1), 0
        for i, own in enumerate(data.view(count, -1) if data.numel() else ()):
            matrix = blocks[i * step : (i + 1) * step]
            wrong += pack_gguf(format, matrix, rows, outputs, width, _memory.buffer(own))
        check(wrong == 0, OP, "scales", "be finite", f"{wrong} others")
        return cls([Part(format.lower(), layout, outputs, data)], width, matrices)

    @classmethod
    def from_integers(
        cls,
        format: str,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor,
        bits: int,
        group: int,
        matrices: int | None = None,
    ) -> QuantizedWeight:
        """The matrix ``scale * (code - zero)``. Scales are kept exactly.

        Args:
            format: its name.
            codes: ``(outputs, width)`` uint8 of 4 or 8 `bits`; of several matrices one after the other, as are scales
                and zeros.
            scales: ``(outputs, groups)`` float16, bfloat16 or float32, finite.
            zeros: ``(outputs, groups)`` uint8, at most ``2**bits``.
            group: columns that share a scale, a multiple of `GROUP`; 0: all.
            matrices: as of the class.
        """
        most = int(zeros.max()) if zeros.numel() else 0
        check(most <= 2**bits, OP, "zeros", f"be at most {2**bits} for {bits} bits", most)
        width, wide = codes.shape[1], scales.float()
        fields = {"scale": wide[..., None], "zero": zeros[..., None]}
        if torch.equal(wide.half().float(), wide):
            kind = "half_zero"
        else:
            kind = "float" if bool((zeros == 2 ** (bits - 1)).all()) else "float_zero"
        if kind == "float":
            del fields["zero"]
        padded = torch.nn.functional.pad(codes, (0, -width % BLOCK))
        layout, found = Layout(kind, bits, group // BLOCK), []
        if matrices is None:
            return cls.pack(format, layout, Quantized(padded, fields), width)
        outputs = len(codes) // matrices
        for rows in (slice(i * outputs, (i + 1) * outputs) for i in range(matrices)):
            own = Quantized(padded[rows], {name: field[rows] for name, field in fields.items()})
            found.append(cls.pack(format, layout, own, width))
        return cls.stack(found)

    @classmethod
    def join(cls, weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """The outputs of several matrices of one width, one after the other."""
        width, matrices = weights[0].width, weights[0].matrices
        for i, weight in enumerate(weights):
            check(weight.width == width, OP, f"weights[{i}]", f"have width {width} like weights[0]", weight.width)
            same = weight.matrices == matrices
            check(same, OP, f"weights[{i}]", f"hold {matrices} matrices like weights[0]", weight.matrices)
        return cls([part for weight in weights for part in weight.parts()], width, matrices)

    @classmethod
    def stack(cls, weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """Several matrices of one shape and format as one, `(matrices, outputs, width)`."""
        check(len(weights) > 0, OP, "weights", "be at least one", 0)
        first = weights[0]
        like = first.shape, first.layouts, first.outputs
        for i, weight in enumerate(weights):
            same = weight.matrices is None and (weight.shape, weight.layouts, weight.outputs) == like
            check(same, OP, f"weights[{i}]", f"have the format and shape of weights[0], {first}", str(weight))
        parts = []
        for part, *others in zip(*(weight.parts() for weight in weights)):
            data = [part.data, *(other.data for other in others)]
            on_host = part.data.device.type == "cpu"
            whole = _memory.empty((sum(map(len, data)),), torch.uint8) if on_host else None
            parts.append(part._replace(data=torch.cat(data, out=whole)))
        return cls(parts, first.width, len(weights))

    @property
    def shape(self) -> torch.Size:
        matrix = (sum(self.outputs), self.width)
        return torch.Size(matrix if self.matrices is None else (self.matrices, *matrix))

    @property
    def format(self) -> str:
        """The format's name; several are joined by commas."""
        return ", ".join(dict.fromkeys(self.formats))

    @property
    def rows(self) -> str:
        """How products take rows of `x`: "int8", "numbers", or both joined by a comma, see `with_rows`."""
        return ", ".join(dict.fromkeys(piece.layout.rows for piece in self.parts()))

    def with_rows(self, rows: str) -> QuantizedWeight:
        """The same matrix, which shares its memory, for products that take rows of `x` in another way.

        Args:
            rows: "int8" quantises them to 8 bits in blocks of 32 columns, as llama.cpp does, which is fastest on CPUs
                and has the bits of the reference everywhere. "numbers" leaves them as they are (W4A16), as users of AWQ
                and GPTQ expect: a product loses nothing but the rounding of float32 sums. See `quantized_linear`.

        Example:
            >>> import torch, pdkernels as pd
            >>> weight, x = pd.quantize(2 * torch.eye(32), "q4_0"), torch.arange(32.0)
            >>> pd.quantized_linear(x, weight)[:4], pd.quantized_linear(x, weight.with_rows("numbers"))[:4]
            (tensor([0.0000, 1.9528, 3.9055, 5.8583]), tensor([0., 2., 4., 6.]))
        """
        check(rows in ROWS, OP, "rows", f"be one of {', '.join(ROWS)}", repr(rows))
        pieces = [piece._replace(layout=piece.layout._replace(rows=rows)) for piece in self.parts()]
        return QuantizedWeight(pieces, self.width, self.matrices).train(self.training)

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
        return self.shape[0]

    def parts(self) -> Iterator[Part]:
        for format, layout, outputs, data in zip(self.formats, self.layouts, self.outputs, self.data):
            yield Part(format, Layout.of(layout), outputs, data)

    def __getitem__(self, rows: slice | int) -> QuantizedWeight:
        """The outputs of a slice, which must be whole parts; or a matrix of several. Shares the memory."""
        if self.matrices is not None:
            return self._matrix(rows)
        check_type(isinstance(rows, slice), OP, "rows", "be a slice", type(rows).__name__)
        assert isinstance(rows, slice)
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

    def _matrix(self, number: slice | int) -> QuantizedWeight:
        check_type(type(number) is int, OP, "matrix", "be an int", type(number).__name__)
        assert isinstance(number, int)
        count = len(self)
        if not -count <= number < count:
            raise IndexError(message(OP, "matrix", f"be in [-{count}, {count})", number))
        own = [part._replace(data=part.data.view(count, -1)[number]) for part in self.parts()]
        return QuantizedWeight(own, self.width)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix as numbers, of `shape`, each rounded to float32 and then to `dtype`."""
        if self.matrices is not None:
            whole = _memory.empty(self.shape, dtype)
            for number in range(self.matrices):
                whole[number] = self[number].dequantize(dtype)
            return whole.to(self.device)
        ids = torch.arange(len(self), device=self.device)
        computed = dtype if dtype in KERNEL_DTYPES else torch.float32
        arguments = (ids, self.data, self.layouts, self.outputs, self.width, computed)
        numbers: Tensor = call(OPS["quantized_embedding"].overload, arguments, ids, "auto")
        return numbers.to(dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.shape)}, {self.format}, {self.nbytes} bytes"
