"""One grammar for every error: ``pdkernels.<op>: <argument> must <expectation>, got <actual>. <remedy>``.

In functions that torch.compile traces, test first and call `fail` only then: building a message out of sizes would pin the
graph to them.
"""

from __future__ import annotations

import operator
from typing import NoReturn

import torch
from torch import Tensor

INDEX_DTYPES = (torch.int32, torch.int64)


def message(op: str, argument: str, expectation: str, actual: object, remedy: str = "") -> str:
    return f"pdkernels.{op}: {argument} must {expectation}, got {actual}.{' ' + remedy if remedy else ''}"


def fail(op: str, argument: str, expectation: str, actual: object, remedy: str = "") -> NoReturn:
    raise ValueError(message(op, argument, expectation, actual, remedy))


def check(condition: bool, op: str, argument: str, expectation: str, actual: object, remedy: str = "") -> None:
    """ValueError for shapes and values."""
    if not condition:
        fail(op, argument, expectation, actual, remedy)


def check_type(condition: bool, op: str, argument: str, expectation: str, actual: object, remedy: str = "") -> None:
    """TypeError for types and dtypes."""
    if not condition:
        raise TypeError(message(op, argument, expectation, actual, remedy))


def integer(op: str, argument: str, value: object, least: int) -> int:
    """The value as a Python int, at least `least`. NumPy's integers will do, a bool will not."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(message(op, argument, "be an integer", type(value).__name__))
    if number < least:
        fail(op, argument, f"be {least} or more", number)
    return number


def check_own_places(op: str, **tensors: Tensor) -> None:
    """Of tensors that are written: entries that share a place, as those of an expanded tensor do, would be lost but for one."""
    for argument, tensor in tensors.items():
        shared = any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride()))
        if shared and tensor.numel() > 0:
            remedy = "It is written; pass a copy, .contiguous(), of what was expanded."
            fail(
                op,
                argument,
                "have a place in memory for each entry",
                f"shape {tuple(tensor.shape)} with strides {tensor.stride()}",
                remedy,
            )


def check_index(
    op: str, argument: str, tensor: object, shape: tuple[int | None, ...], device: torch.device | None
) -> None:
    """An int32 or int64 tensor of the given shape (None: any size) on the given device (None: any)."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in INDEX_DTYPES:
        actual = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(
            message(op, argument, "be an int32 or int64 tensor", actual, "Convert it with .to(torch.int64).")
        )
    if tensor.dim() != len(shape) or any(size is not None and size != have for size, have in zip(shape, tensor.shape)):
        wanted = "(" + ", ".join("any" if size is None else str(size) for size in shape) + ")"
        fail(op, argument, f"have shape {wanted}", tuple(tensor.shape))
    if device is not None and tensor.device != device:
        fail(op, argument, f"be on {device}", tensor.device, f"Move it with .to({str(device)!r}).")
