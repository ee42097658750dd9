"""Products of few rows with a quantised matrix, and rows of such a matrix as numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pdkernels._quantized_formats import ROWS, Layout
from pdkernels._validation import KERNEL_DTYPES, check_device, check_floats, check_index, check_type, fail
from pdkernels.backends import Backend
from pdkernels.ops.library import LIBRARY, Draw, call, define
from pdkernels.ops.quantize import quantize
from pdkernels.ops.quantized_weight import QuantizedWeight
from pdkernels.reference import quantized_linear as reference

__all__ = ["QuantizedWeight", "quantize", "quantized_embedding", "quantized_linear"]

OP = "quantized_linear"
EMBEDDING = "quantized_embedding"


def quantized_linear(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, *, backend: Backend = "auto"
) -> Tensor:
    """``x @ weight^T + bias`` with a quantised matrix: the same bits for a row in any batch, at every level of the CPU.

    The matrix is read once for all rows, as it lies in memory. Each row of `x` is quantised to 8 bits in blocks of 32,
    its products with the codes of the matrix are exact whole numbers, and the blocks of an output are added up in
    ascending order in float32; the reference states the formula. So neither the other rows, nor threads, nor the
    processor's instructions change a result.

    With ``weight.with_rows("numbers")`` rows stay as they are: products of their elements with codes, in float32, whose
    sums over 32 columns are multiplied with the scales. On the CPU that has the reference's order of sums, at every
    level; on CUDA the tensor cores choose an order of theirs, the same for any batch.

    Args:
        x: ``(..., width)`` float32, float16 or bfloat16. Rows may be strided; any other layout is copied first.
        weight: `QuantizedWeight` of shape ``(outputs, width)``.
        bias: ``(outputs,)``, dtype of `x`; None adds nothing.
        backend: see `pdkernels.show_config`.

    Returns:
        ``(..., outputs)``, contiguous, dtype of `x`: float32 sums, rounded once. A row with an infinity or NaN is NaN,
        or nothing finite if rows stay as they are.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: dtypes that do not fit.
        NotImplementedError: an input that requires a gradient while gradients are recorded, for every backend; rows
            that stay as they are in Triton, which serves CUDA in builds without nvcc.

    Deterministic, and equal to the reference bit for bit, but on CUDA for rows that stay as they are.

    Source: the formats of github.com/ggml-org/ggml (ggml-common.h); integer products as in Dettmers et al.,
        "LLM.int8()" (2022).

    Example:
        >>> import torch, pdkernels as pd
        >>> weight = pd.quantize(2 * torch.eye(32), "q4_0")
        >>> pd.quantized_linear(torch.arange(32.0), weight)[:4]
        tensor([0.0000, 1.9528, 3.9055, 5.8583])
    """
    check_matrix(OP, weight)
    out: Tensor = call(quantized_linear_op, (x, weight.data, weight.layouts, weight.outputs, bias), x, backend)
    return out


def quantized_embedding(
    ids: Tensor, weight: QuantizedWeight, dtype: torch.dtype = torch.float32, *, backend: Backend = "auto"
) -> Tensor:
    """The rows `ids` of a quantised matrix as numbers: an embedding that stays packed.

    Args:
        ids: int tensor of any shape, in ``[0, outputs)``.
        weight: `QuantizedWeight` of shape ``(outputs, width)``.
        dtype: of the result.
        backend: see `pdkernels.show_config`.

    Returns:
        ``(*ids.shape, width)``: ``scale * (code - zero) + minimum``, each operation rounded to float32, then to
        `dtype`.

    Raises:
        ValueError: an id out of range; on CUDA such a row is undefined.
        TypeError: dtypes that do not fit.

    Deterministic, and equal to the reference bit for bit.

    Source: the formats of github.com/ggml-org/ggml (ggml-common.h).

    Example:
        >>> import torch, pdkernels as pd
        >>> weight = pd.quantize(torch.eye(32), "q8_0")
        >>> pd.quantized_embedding(torch.tensor([1]), weight)[0, :3]
        tensor([0.0000, 0.9999, 0.0000])
    """
    check_matrix(EMBEDDING, weight)
    check_type(isinstance(dtype, torch.dtype), EMBEDDING, "dtype", "be a torch.dtype", type(dtype).__name__)
    arguments = (ids, weight.data, weight.layouts, weight.outputs, weight.width, dtype)
    out: Tensor = call(quantized_embedding_op, arguments, ids, backend)
    return out


def check_matrix(op: str, weight: QuantizedWeight) -> None:
    check_type(isinstance(weight, QuantizedWeight), op, "weight", "be a QuantizedWeight", type(weight).__name__)
    if weight.matrices is not None:
        remedy = "grouped_linear multiplies with several matrices."
        fail(op, "weight", "have shape (outputs, width)", tuple(weight.shape), remedy)


def refuse_numbers(op: str, layouts: list[int]) -> None:
    if any(Layout.of(layout).rows != ROWS[0] for layout in layouts):
        text = f"pdkernels.{op}: Triton has no product of rows that stay numbers. Use weight.with_rows({ROWS[0]!r})."
        raise NotImplementedError(text)


def check_parts(
    op: str,
    device: torch.device,
    weights: list[Tensor],
    layouts: list[int],
    outputs: list[int],
    width: int,
    matrices: int = 1,
) -> None:
    """The parts of a matrix, or of so many matrices of one shape."""
    if not len(weights) == len(layouts) == len(outputs) > 0:
        fail(op, "weights, layouts and outputs", "have one length", (len(weights), len(layouts), len(outputs)))
    for i, (data, layout, count) in enumerate(zip(weights, layouts, outputs)):
        check_type(data.dtype == torch.uint8, op, f"weights[{i}]", "have dtype torch.uint8", data.dtype)
        check_device(op, f"weights[{i}]", data, device)
        size = matrices * Layout.of(layout).nbytes(count, width)
        if data.shape != (size,):
            fail(op, f"weights[{i}]", f"have shape ({size},) for rows of width {width}", tuple(data.shape))


def _fake(
    x: Tensor, weights: list[Tensor], layouts: list[int], outputs: list[int], bias: Tensor | None = None
) -> Tensor:
    check_floats(OP, "x", x)
    if x.dim() == 0:
        fail(OP, "x", "have shape (..., width)", ())
    check_parts(OP, x.device, weights, layouts, outputs, x.shape[-1])
    if bias is not None:
        check_floats(OP, "bias", bias, (sum(outputs),), like=x)
    return x.new_empty((*x.shape[:-1], sum(outputs)))


def _embedding_fake(
    ids: Tensor, weights: list[Tensor], layouts: list[int], outputs: list[int], width: int, dtype: torch.dtype
) -> Tensor:
    check_index(EMBEDDING, "ids", ids, tuple(ids.shape) if isinstance(ids, Tensor) else (), None)
    check_type(dtype in KERNEL_DTYPES, EMBEDDING, "dtype", "be float32, float16 or bfloat16", dtype)
    check_parts(EMBEDDING, ids.device, weights, layouts, outputs, width)
    return ids.new_empty((*ids.shape, width), dtype=dtype)


def _triton(
    x: Tensor, weights: list[Tensor], layouts: list[int], outputs: list[int], bias: Tensor | None = None
) -> Tensor:
    from pdkernels.triton.quantized_linear import forward

    refuse_numbers(OP, layouts)
    out = forward(x.reshape(x.shape[:-1].numel(), x.shape[-1]), weights, layouts, outputs, bias)
    return out.view(*x.shape[:-1], out.shape[1])


def _embedding_triton(
    ids: Tensor, weights: list[Tensor], layouts: list[int], outputs: list[int], width: int, dtype: torch.dtype
) -> Tensor:
    from pdkernels.triton.quantized_linear import rows_of

    return rows_of(ids.reshape(-1), weights, layouts, outputs, width, dtype).view(*ids.shape, width)


def _example_weight(draw: Draw) -> QuantizedWeight:
    return QuantizedWeight.join([quantize(draw.floats(20, 64), "q4_0"), quantize(draw.floats(30, 64), "q8_0")])


def _example(draw: Draw) -> dict[str, Any]:
    return {"x": draw.floats(3, 64), "weight": _example_weight(draw), "bias": draw.floats(50)}


def _embedding_example(draw: Draw) -> dict[str, Any]:
    return {"ids": draw.ints(0, 49, 2, 3), "weight": _example_weight(draw)}


quantized_linear_op = define(
    f"{OP}(Tensor x, Tensor[] weights, int[] layouts, int[] outputs, Tensor? bias=None) -> (Tensor out)",
    fake=_fake,
    reference=reference.quantized_linear,
    example=_example,
    triton=_triton,
    compiled=True,
    gradients="none",
)
quantized_embedding_op = define(
    f"{EMBEDDING}(Tensor ids, Tensor[] weights, int[] layouts, int[] outputs, int width, ScalarType dtype) -> (Tensor out)",
    fake=_embedding_fake,
    reference=reference.quantized_embedding,
    example=_embedding_example,
    triton=_embedding_triton,
)


def _sample(x: Any, dim: Any, number: int) -> Any:
    if isinstance(x, (list, tuple)):
        return [_sample(one, own, number) for one, own in zip(x, dim)]
    return x if dim is None else x.select(dim, number)


def batched(op: torch._ops.OpOverload) -> None:
    """Registers how torch.vmap runs it: PyTorch's own way takes no lists of tensors."""

    def run(info: Any, dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensor, int]:
        samples = [op(*_sample(arguments, dims, number)) for number in range(info.batch_size)]
        return torch.stack(samples), 0

    torch.library.register_vmap(op, run, lib=LIBRARY)


batched(quantized_linear_op)
batched(quantized_embedding_op)
