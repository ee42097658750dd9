"""What ops that compute in floats check of their tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pdkernels._validation import check_type, fail, message
from pdkernels.backends import Backend

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_floats(op: str, argument: str, tensor: object, *, like: Tensor | None = None) -> None:
    """A tensor of a dtype that kernels or the reference take, that of `like` where given."""
    check_type(isinstance(tensor, Tensor), op, argument, "be a tensor", type(tensor).__name__)
    if like is None and tensor.dtype not in (*KERNEL_DTYPES, torch.float64):
        raise TypeError(
            message(op, argument, "be float32, float16 or bfloat16", tensor.dtype, "Convert it with .to().")
        )
    if like is not None and tensor.dtype != like.dtype:
        raise TypeError(
            message(op, argument, f"be {like.dtype} like the others", tensor.dtype, "Convert it with .to().")
        )
    if like is not None and tensor.device != like.device:
        fail(op, argument, f"be on {like.device}", tensor.device, f"Move it with .to({str(like.device)!r}).")


def refuse_float64(op: str, argument: str, tensor: Tensor) -> None:
    """The fake's part: the reference takes float64, the kernels do not."""
    if tensor.dtype == torch.float64:
        remedy = "Pass backend='reference', which computes in float64."
        raise TypeError(message(op, argument, "be float32, float16 or bfloat16 for the kernels", tensor.dtype, remedy))


def refuse_gradients(op: str, backend: Backend, **tensors: Tensor | Sequence[Tensor] | None) -> None:
    """Without a gradient of its own an op would cut the graph in silence."""
    if not torch.is_grad_enabled() or backend == "reference":
        return
    for name, given in tensors.items():
        for tensor in given if isinstance(given, (list, tuple)) else (given,):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                remedy = "Call it under torch.no_grad(), or train with plain PyTorch (backend='reference')."
                raise NotImplementedError(message(op, name, "not require a gradient", "a tensor that does", remedy))


def refuse_tangents(op: str, arguments: Iterable[Any]) -> None:
    """No kernel has a derivative in forward mode: results without one would look like constants."""
    # The level is -1 but inside of a dual level, and asking a tensor takes longer than many an op.
    if forward_ad._current_level < 0:
        return
    for given in arguments:
        for tensor in given if isinstance(given, (list, tuple)) else (given,):
            if isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
                remedy = "Pass backend='reference', which PyTorch differentiates, or the primal alone."
                raise NotImplementedError(
                    message(op, "its inputs", "have no tangent (forward mode)", "a tensor with one", remedy)
                )
