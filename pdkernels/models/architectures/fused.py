"""The matrix products of a model and the ops between them.

Inference runs each as one op. The ops have no gradient and no fp64, so training and fp64 checks use plain PyTorch. Rows
are independent in all of them: a row gets the same bits alone and in a batch.
"""

from __future__ import annotations

from typing import overload

import torch
import torch.nn.functional as F

from pdkernels._validation import KERNEL_DTYPES
from pdkernels.ops.grouped_linear import grouped_linear as grouped_product
from pdkernels.ops.grouped_linear import quantized_grouped_linear
from pdkernels.ops.linear import linear as product
from pdkernels.ops.quantized_linear import quantized_embedding, quantized_linear
from pdkernels.ops.quantized_weight import QuantizedWeight
from pdkernels.ops.transformer_ops import add_rms_norm, gelu_and_mul, silu_and_mul


def enabled(x: torch.Tensor) -> bool:
    """Whether the ops replace plain PyTorch. Autocast mixes dtypes, which they do not support."""
    autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    return not (torch.is_grad_enabled() or autocast) and x.dtype in KERNEL_DTYPES


def linear(x: torch.Tensor, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight^T + bias``. On CUDA always PyTorch's product, because we have no kernel for few rows there yet."""
    if isinstance(weight, QuantizedWeight):
        return quantized_linear(x, weight, bias)
    if x.device.type == "cpu" and enabled(x):
        return product(x, weight, bias)
    return F.linear(x, weight, bias)


def wide_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight^T`` in float32, or float64, whatever the dtypes."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if x.device.type == "cpu" and enabled(x):
        return product(wide, weight)
    return F.linear(wide, weight.to(wide.dtype))


def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor | QuantizedWeight, ends: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``x[r] @ weight[g]^T + bias[g]`` for the rows r of each expert g, which end at `ends`. Without the op the host
    reads these."""
    if isinstance(weight, QuantizedWeight):
        return quantized_grouped_linear(x, weight, ends, bias)
    if enabled(x):
        return grouped_product(x, weight, ends, bias)
    products, first = [x.new_empty(0, weight.shape[1])], 0
    for expert, end in enumerate(ends.tolist()):
        if end > first:
            products.append(F.linear(x[first:end], weight[expert], None if bias is None else bias[expert]))
        first = end
    return torch.cat(products)


def embed(tokens: torch.Tensor, weight: torch.Tensor | QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The rows `tokens` of an embedding."""
    if isinstance(weight, QuantizedWeight):
        return quantized_embedding(tokens, weight, dtype)
    return F.embedding(tokens, weight)


def add_linear(added: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``added + x @ weight^T`` of two `(batch, rows, width)`."""
    if x.device.type == "cpu" and enabled(x):
        return added + product(x, weight)
    return torch.addmm(added.flatten(0, 1), x.flatten(0, 1), weight.T).view_as(added)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm: statistics in fp32 (fp64 for fp64 input), cast to the dtype of `x`, then the weight."""
    if enabled(x):
        return add_rms_norm(x, None, weight, eps=eps)[0]
    return F.rms_norm(x, weight.shape, None, eps) * weight


@overload
def add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, next_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, next_weight: None, eps: float
) -> tuple[torch.Tensor, None]: ...
def add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, next_weight: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``y = rms_norm(x + residual) * weight``, the sum itself without a weight, and ``rms_norm(y) * next_weight`` with
    a next weight."""
    if enabled(x):
        return add_rms_norm(x, residual, weight, next_weight=next_weight, eps=eps)
    y = x + residual if weight is None else rms_norm(x + residual, weight, eps)
    return y, None if next_weight is None else rms_norm(y, next_weight, eps)


def gated(x: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """``silu(gate) * up`` of ``gate, up = x.chunk(2, -1)``, or with "gelu", by its approximation with tanh."""
    if enabled(x):
        return gelu_and_mul(x) if activation == "gelu" else silu_and_mul(x)
    gate, up = x.chunk(2, -1)
    return (F.gelu(gate, approximate="tanh") if activation == "gelu" else F.silu(gate)) * up


def capped(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Logits x as ``cap * tanh(x / cap)``; None: as they are."""
    return logits if cap is None else torch.tanh(logits / cap) * cap
