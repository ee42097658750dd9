"""Products of rows sorted by group, each group with a matrix of its own: the experts of a mixture."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pdkernels._validation import check_device, check_floats, check_index, check_type, fail
from pdkernels.backends import Backend
from pdkernels.ops.library import Draw, call, define
from pdkernels.ops.quantize import quantize
from pdkernels.ops.quantized_linear import batched, check_parts, refuse_numbers
from pdkernels.ops.quantized_weight import QuantizedWeight
from pdkernels.reference import grouped_linear as reference

__all__ = ["grouped_linear", "quantized_grouped_linear"]

OP = "grouped_linear"
QUANTIZED = "quantized_grouped_linear"


def grouped_linear(
    x: Tensor, weight: Tensor | QuantizedWeight, ends: Tensor, bias: Tensor | None = None, *, backend: Backend = "auto"
) -> Tensor:
    """``x[r] @ weight[g]^T + bias[g]`` for the rows r of group g: the experts of a mixture, each used one read once.

    Rows are sorted by group, and `ends` says on the device where the rows of each group end, so nothing waits for the
    host. A row has the bits that `linear` gives it with the matrix of its group, whatever other rows, groups and
    threads there are.

    Args:
        x: ``(rows, width)`` float32, float16 or bfloat16. Rows may be strided; any other layout is copied first.
        weight: ``(groups, outputs, width)`` of the same dtype; with float32 `x` also float16 or bfloat16. Contiguous
            rows with one stride, or it is copied first. Or a `QuantizedWeight` of this shape: see
            `quantized_grouped_linear`.
        ends: ``(groups,)`` int32 or int64, ascending to `rows`: group g has the rows from ``ends[g - 1]``, or 0, up to
            ``ends[g]``. What `torch.nn.functional.grouped_mm` calls `offs`.
        bias: ``(groups, outputs)``, dtype of `x`; None adds nothing.
        backend: see `pdkernels.show_config`. The reference takes float64 too, and gradients flow through it.

    Returns:
        ``(rows, outputs)``, contiguous, dtype of `x`. Sums are float32, rounded once.

    Raises:
        ValueError: shapes that do not fit; ends that do not ascend to the number of rows. On CUDA, ends are not
            checked: rows after the last one are undefined.
        TypeError: dtypes that do not fit.
        NotImplementedError: an input that requires a gradient while gradients are recorded.

    Deterministic; the same bits for a row regardless of the other rows. Bits differ between devices and vector widths.

    Source: Gale et al., "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts" (2022).

    Example:
        >>> import torch, pdkernels as pd
        >>> experts = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]], [[2.0, 2.0]]])
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        >>> pd.grouped_linear(x, experts, torch.tensor([1, 1, 3]))  # a row for expert 0, two for expert 2
        tensor([[ 1.],
                [14.],
                [22.]])
    """
    if isinstance(weight, QuantizedWeight):
        return quantized_grouped_linear(x, weight, ends, bias, backend=backend)
    out: Tensor = call(grouped_linear_op, (x, weight, ends, bias), x, backend)
    return out


def quantized_grouped_linear(
    x: Tensor, weight: QuantizedWeight, ends: Tensor, bias: Tensor | None = None, *, backend: Backend = "auto"
) -> Tensor:
    """`grouped_linear` with quantised matrices: a row has the bits of `quantized_linear` with the matrix of its group.

    Args:
        x: ``(rows, width)`` float32, float16 or bfloat16, sorted by group.
        weight: `QuantizedWeight` of shape ``(groups, outputs, width)``.
        ends: ``(groups,)`` int32 or int64, ascending to `rows`.
        bias: ``(groups, outputs)``, dtype of `x`; None adds nothing.
        backend: see `pdkernels.show_config`.

    Returns:
        ``(rows, outputs)``, contiguous, dtype of `x`. A row with an infinity or NaN is NaN.

    Raises:
        ValueError: shapes that do not fit; ends that do not ascend to the rows (not checked on CUDA).
        TypeError: dtypes that do not fit.
        NotImplementedError: an input that requires a gradient while gradients are recorded, for every backend; rows
            that stay as they are (`QuantizedWeight.with_rows`) on CUDA.

    Deterministic, and equal to the reference bit for bit.

    Source: the formats of github.com/ggml-org/ggml (ggml-common.h).

    Example:
        >>> import torch, pdkernels as pd
        >>> experts = pd.quantize(torch.stack((torch.eye(32), 2 * torch.eye(32))), "q8_0")
        >>> pd.quantized_grouped_linear(torch.ones(2, 32), experts, torch.tensor([1, 2]))[:, 0]
        tensor([0.9999, 1.9999])
    """
    check_type(isinstance(weight, QuantizedWeight), QUANTIZED, "weight", "be a QuantizedWeight", type(weight).__name__)
    if weight.matrices is None:
        fail(QUANTIZED, "weight", "have shape (groups, outputs, width)", tuple(weight.shape))
    arguments = (x, weight.data, weight.layouts, weight.outputs, ends, bias)
    out: Tensor = call(quantized_grouped_linear_op, arguments, x, backend)
    return out


def _check_rows(op: str, x: Tensor) -> None:
    check_floats(op, "x", x)
    if x.dim() != 2:
        fail(op, "x", "have shape (rows, width)", tuple(x.shape))


def _fake(x: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None = None) -> Tensor:
    _check_rows(OP, x)
    check_floats(OP, "weight", weight)
    if weight.dim() != 3 or weight.shape[2] != x.shape[1]:
        fail(OP, "weight", f"have shape (groups, outputs, {int(x.shape[1])})", tuple(weight.shape))
    check_device(OP, "weight", weight, x.device)
    if weight.dtype != x.dtype:
        mixed_precision = x.dtype == torch.float32 and weight.dtype in (torch.float16, torch.bfloat16)
        check_type(
            mixed_precision, OP, "weight", f"have dtype {x.dtype} like x, or 16 bits under float32", weight.dtype
        )
    check_index(OP, "ends", ends, weight.shape[:1], x.device)
    if bias is not None:
        check_floats(OP, "bias", bias, weight.shape[:2], like=x)
    return x.new_empty((x.shape[0], weight.shape[1]))


def _quantized_fake(
    x: Tensor, weights: list[Tensor], layouts: list[int], outputs: list[int], ends: Tensor, bias: Tensor | None = None
) -> Tensor:
    _check_rows(QUANTIZED, x)
    count = ends.shape[0] if isinstance(ends, Tensor) and ends.dim() == 1 else 0
    check_index(QUANTIZED, "ends", ends, (count,), x.device)
    check_parts(QUANTIZED, x.device, weights, layouts, outputs, x.shape[1], matrices=count)
    if bias is not None:
        check_floats(QUANTIZED, "bias", bias, (count, sum(outputs)), like=x)
    return x.new_empty((x.shape[0], sum(outputs)))


def _triton(x: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None = None) -> Tensor:
    from pdkernels.triton.grouped_linear import forward

    return forward(x, weight, ends, bias)


def _quantized_triton(
    x: Tensor, weights: list[Tensor], layouts: list[int], outputs: list[int], ends: Tensor, bias: Tensor | None = None
) -> Tensor:
    from pdkernels.triton.grouped_linear import quantized_forward

    refuse_numbers(QUANTIZED, layouts)
    return quantized_forward(x, weights, layouts, outputs, ends, bias)


def _example(draw: Draw) -> dict[str, Any]:
    ends = torch.tensor([2, 2, 5])
    return {"x": draw.floats(5, 40), "weight": draw.floats(3, 50, 40), "ends": ends, "bias": draw.floats(3, 50)}


def _quantized_example(draw: Draw) -> dict[str, Any]:
    matrices = [quantize(draw.floats(3, 20, 64), "q4_0"), quantize(draw.floats(3, 30, 64), "q8_0")]
    ends = torch.tensor([2, 2, 5])
    return {"x": draw.floats(5, 64), "weight": QuantizedWeight.join(matrices), "ends": ends, "bias": draw.floats(3, 50)}


grouped_linear_op = define(
    f"{OP}(Tensor x, Tensor weight, Tensor ends, Tensor? bias=None) -> (Tensor out)",
    fake=_fake,
    reference=reference.grouped_linear,
    example=_example,
    triton=_triton,
)
quantized_grouped_linear_op = define(
    f"{QUANTIZED}(Tensor x, Tensor[] weights, int[] layouts, int[] outputs, Tensor ends, Tensor? bias=None) "
    "-> (Tensor out)",
    fake=_quantized_fake,
    reference=reference.quantized_grouped_linear,
    example=_quantized_example,
    triton=_quantized_triton,
    gradients="none",
)
batched(quantized_grouped_linear_op)
