"""Quantises matrices: to the formats of GGUF, or to whole numbers in groups."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Protocol, TypeVar, overload

import torch
from torch import Tensor

from pdkernels._quantized_formats import BLOCK, GGUF_LAYOUTS, Layout, Quantized
from pdkernels._validation import check, check_floats, check_type, fail, refuse, refuse_foreign
from pdkernels.ops.quantized_weight import QuantizedWeight

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["quantize"]

OP = "quantize"


class Quantizable(Protocol):
    """A model that can be made again with quantised matrices."""

    def quantized(self, format: str = ..., *, group: int | None = ..., skip: str | Collection[str] = ...) -> Self: ...


Model = TypeVar("Model", bound=Quantizable)


@overload
def quantize(weight: Tensor, format: str = ..., *, group: int | None = ...) -> QuantizedWeight: ...
@overload
def quantize(
    weight: Model, format: str = ..., *, group: int | None = ..., skip: str | Collection[str] = ...
) -> Model: ...
def quantize(
    weight: Tensor | Quantizable, format: str = "int8", *, group: int | None = None, skip: str | Collection[str] = ()
) -> QuantizedWeight | Quantizable:
    """A matrix in a quantised format, rounded to nearest; or a model with all its matrices so.

    The model given stays as it is. The new one shares what stays as numbers with it: norms, biases, adapters and the
    matrices to `skip`.

    Args:
        weight: ``(outputs, width)`` of any float dtype, finite, or ``(matrices, outputs, width)``: the experts of a
            mixture. Or a `pdkernels.models.Transformer`, whose embedding and head are quantised too; or a wrapped model
            of transformers, whose linear layers are.
        format: "int8" and "int4": a scale for `group` columns of an output, codes symmetric around zero.
            "q8_0", "q4_0", "q4_1", "q5_0", "q5_1": GGUF's formats with a scale (and a minimum) for 32 columns, with the
            codes that llama.cpp's quantiser writes.
        group: columns that share a scale, a multiple of 32; 0: the whole width. None: 0 for int8, 32 for int4. Formats
            of GGUF have their own.
        skip: matrices of a model to leave as they are: "embedding", "head", "qkv", "output", "gate_up", "down",
            "experts_gate_up", "experts_down", "shared_gate_up", "shared_down"; of a wrapped model the last parts of its
            modules' names, such as "lm_head" or "mlp.down_proj".

    Returns:
        `QuantizedWeight` on the CPU; or a new model like the one given.

    Raises:
        ValueError: an unknown format, values that are not finite, or a width that is not a multiple of 32 in a format
            of GGUF.
        TypeError: neither a matrix nor such a model, or one in float64.
        NotImplementedError: a model that has packed matrices already.

    Source: `quantize_row_*_ref` of ggml-quants.c in github.com/ggml-org/ggml; for int8 and int4, scale = max / (2^(bits
        - 1) - 1).

    Example:
        >>> import torch, pdkernels as pd
        >>> pd.quantize(torch.tensor([[0.5, -1.0]]), "int8").dequantize()
        tensor([[ 0.5039, -1.0000]])
        >>> model = pd.quantize(pd.models.load("tiny-code"), "q8_0", skip="embedding")
        >>> pd.decoding.generate(model, "import o", max_new_tokens=2).text
        's\\n'
    """
    if not isinstance(weight, Tensor):
        refuse_foreign(OP, "weight", weight)
        expectation = "be a matrix, a Transformer or a wrapped model"
        check_type(hasattr(weight, "quantized"), OP, "weight", expectation, type(weight).__name__)
        return weight.quantized(format, group=group, skip=skip)
    refuse(bool(skip), OP, "skip is for models, and weight is a tensor")
    check_floats(OP, "weight", weight)
    if weight.dim() == 3 and len(weight):
        return QuantizedWeight.stack([_matrix(own, format, group) for own in weight])
    return _matrix(weight, format, group)


def _matrix(weight: Tensor, format: str, group: int | None) -> QuantizedWeight:
    expectation = "have shape (outputs, width) or (matrices, outputs, width)"
    check(weight.dim() == 2, OP, "weight", expectation, tuple(weight.shape))
    values = weight.detach().to("cpu", torch.float32)
    check(bool(values.isfinite().all()), OP, "weight", "be finite", "infinities or NaN")
    outputs, width = values.shape
    if format in ("int8", "int4"):
        return _whole(values, format, (0 if format == "int8" else BLOCK) if group is None else group)
    if format not in _FORMATS:
        fail(OP, "format", f"be one of int8, int4, {', '.join(_FORMATS)}", repr(format))
    check(group is None, OP, "group", f"be None for {format}", group)
    check(width % BLOCK == 0, OP, "weight", f"have a width that is a multiple of {BLOCK} for {format}", width)
    layout = _FORMATS[format]
    codes, fields = _QUANTIZERS[layout.scales](values.view(outputs, width // BLOCK, BLOCK), layout.bits)
    matrix = Quantized(codes.view(outputs, width).to(torch.uint8), fields)
    return QuantizedWeight.pack(format, layout, matrix, width)


def _whole(values: Tensor, format: str, group: int) -> QuantizedWeight:
    check_type(isinstance(group, int) and not isinstance(group, bool), OP, "group", "be an int", type(group).__name__)
    check(group >= 0 and group % BLOCK == 0, OP, "group", f"be a multiple of {BLOCK}", group)
    outputs, width = values.shape
    bits = int(format[3:])
    layout = Layout("float", bits, group // BLOCK)
    padded = torch.nn.functional.pad(values, (0, -width % BLOCK))
    groups = torch.nn.functional.pad(padded, (0, -padded.shape[1] % group if group else 0))
    groups = groups.view(outputs, layout.groups(width), groups.shape[1] // max(layout.groups(width), 1))
    most = 2 ** (bits - 1) - 1
    scale = groups.abs().amax(2, keepdim=True) / most if groups.numel() else groups.new_zeros(*groups.shape[:2], 1)
    codes = torch.where(scale > 0, groups / scale, 0.0).round().clamp(-most, most) + (most + 1)
    codes = codes.flatten(1)[:, : padded.shape[1]].to(torch.uint8)
    return QuantizedWeight.pack(format, layout, Quantized(codes, {"scale": scale}), width)


Blocks = tuple[Tensor, dict[str, Tensor]]


def _largest(blocks: Tensor) -> Tensor:
    """The value of largest magnitude of each block, with its sign; the first of equal ones."""
    return blocks.gather(2, blocks.abs().argmax(2, keepdim=True))


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale != 0, 1 / scale, 0.0)


def _symmetric(blocks: Tensor, bits: int) -> Blocks:
    if bits == 8:
        scale = blocks.abs().amax(2, keepdim=True) / 127
        # Half away from zero, as C's roundf.
        scaled = blocks * _inverse(scale)
        return scaled.sign() * (scaled.abs() + 0.5).floor() + 128, {"scale": scale.half()}
    scale = _largest(blocks) / -(2 ** (bits - 1))
    codes = (blocks * _inverse(scale) + (2 ** (bits - 1) + 0.5)).floor().clamp(max=2**bits - 1)
    return codes, {"scale": scale.half()}


def _between(blocks: Tensor, bits: int) -> Blocks:
    low, high = blocks.amin(2, keepdim=True), blocks.amax(2, keepdim=True)
    scale = (high - low) / (2**bits - 1)
    codes = ((blocks - low) * _inverse(scale) + 0.5).floor().clamp(max=2**bits - 1)
    return codes, {"scale": scale.half(), "minimum": low.half()}


# By the kind of a format's scales.
_QUANTIZERS = {"half": _symmetric, "half_min": _between}
_FORMATS = {name.lower(): layout for name, layout in GGUF_LAYOUTS.items() if layout.scales in _QUANTIZERS}
