"""A product with a matrix, as plain PyTorch.

Source: y = x W^T + b.
"""

from __future__ import annotations

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight^T + bias``, ``(..., outputs)``: summed in float32 (float64 for float64), rounded once to the dtype of `x`.

    >>> linear(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([0.5, 0.0]))
    tensor([[11.5000,  1.0000]])
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    out = x.to(wide) @ weight.to(wide).T
    return (out if bias is None else out + bias.to(wide)).to(x.dtype)
