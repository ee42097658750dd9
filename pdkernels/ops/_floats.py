"""What ops that compute in floats check of their tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from pdkernels._validation import check_type, fail, message

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_floats(op: str, argument: str, tensor: object, *, like: Tensor | None = None) -> None:
    """A tensor of a dtype that kernels or the reference take, that of `like` where given."""
    check_type(isinstance(tensor, Tensor), op, argument, "be a tensor", type(tensor).__name__)
    if like is None and tensor.dtype not in (*KERNEL_DTYPES, torch.float64):
        raise TypeError(message(op, argument, "be float32, float16 or bfloat16", tensor.dtype, "Convert it with .to()."))
    if like is not None and tensor.dtype != like.dtype:
        raise TypeError(message(op, argument, f"be {like.dtype} like the others", tensor.dtype, "Convert it with .to()."))
    if like is not None and tensor.device != like.device:
        fail(op, argument, f"be on {like.device}", tensor.device, f"Move it with .to({str(like.device)!r}).")


def refuse_float64(op: str, argument: str, tensor: Tensor) -> None:
    """The fake's part: the reference takes float64, the kernels do not."""
    if tensor.dtype == torch.float64:
        remedy = "Pass backend='reference', which computes in float64."
        raise TypeError(message(op, argument, "be float32, float16 or bfloat16 for the kernels", tensor.dtype, remedy))
