"""Products of few rows with a matrix, whose bits do not depend on the number of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pdkernels._validation import check_device, check_floats, check_type, fail
from pdkernels.backends import Backend
from pdkernels.ops.library import Draw, call, define
from pdkernels.ops.quantized_linear import quantized_linear
from pdkernels.ops.quantized_weight import QuantizedWeight
from pdkernels.reference import linear as reference

__all__ = ["linear"]

OP = "linear"


def linear(
    x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None = None, *, backend: Backend = "auto"
) -> Tensor:
    """``x @ weight^T + bias`` for decoding: rows are independent, bit for bit.

    The matrix is read once for all rows, so that a forward over 8 rows takes little longer than one over a single row.
    A row's result has the same bits whether it is computed alone, in a batch, on one thread or on many, which
    `torch.nn.functional.linear` does not promise: with it, verifying a draft of 8 tokens may round differently from
    decoding them one at a time.

    Args:
        x: ``(..., width)`` float32, float16 or bfloat16. Rows may be strided; any other layout is copied first.
        weight: ``(outputs, width)`` of the same dtype; with float32 `x` also float16 or bfloat16, which halves what is
            read. Contiguous rows, or it is copied first. Or a `QuantizedWeight`: see `quantized_linear`.
        bias: ``(outputs,)``, dtype of `x`; None adds nothing.
        backend: see `pdkernels.show_config`. The reference takes float64 too, and gradients flow through it.

    Returns:
        ``(..., outputs)``, contiguous, dtype of `x`. Sums are float32, rounded once.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: dtypes that do not fit.
        NotImplementedError: an input that requires a gradient while gradients are recorded.

    Deterministic; the same bits for a row regardless of the other rows. Bits differ between devices and vector widths.

    Source: He and Thinking Machines Lab, "Defeating Nondeterminism in LLM Inference" (2025), on batch invariance.

    Example:
        >>> import torch, pdkernels as pd
        >>> pd.linear(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [1.0, 0.0]]))
        tensor([[11.,  1.]])
    """
    if isinstance(weight, QuantizedWeight):
        return quantized_linear(x, weight, bias, backend=backend)
    out: Tensor = call(linear_op, (x, weight, bias), x, backend)
    return out


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    check_floats(OP, "x", x)
    if x.dim() == 0:
        fail(OP, "x", "have shape (..., width)", ())
    check_floats(OP, "weight", weight)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        fail(OP, "weight", f"have shape (outputs, {int(x.shape[-1])})", tuple(weight.shape))
    check_device(OP, "weight", weight, x.device)
    if weight.dtype != x.dtype:
        mixed_precision = x.dtype == torch.float32 and weight.dtype in (torch.float16, torch.bfloat16)
        check_type(
            mixed_precision, OP, "weight", f"have dtype {x.dtype} like x, or 16 bits under float32", weight.dtype
        )
    if bias is not None:
        check_floats(OP, "bias", bias, weight.shape[:1], like=x)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _triton(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    from pdkernels.triton.linear import forward

    out = forward(x.reshape(x.shape[:-1].numel(), x.shape[-1]), weight, bias)
    return out.view(*x.shape[:-1], weight.shape[0])


def _example(draw: Draw) -> dict[str, Any]:
    return {"x": draw.floats(3, 40), "weight": draw.floats(50, 40), "bias": draw.floats(50)}


linear_op = define(
    f"{OP}(Tensor x, Tensor weight, Tensor? bias=None) -> (Tensor out)",
    fake=_fake,
    reference=reference.linear,
    example=_example,
    triton=_triton,
)
