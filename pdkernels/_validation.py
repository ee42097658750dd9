"""The checks of the whole package, and one grammar for errors:
``pdkernels.<op>: <argument> must <expectation>, got <actual>. <remedy>``. Where that reads badly, `refuse` and
`sentence` take a free sentence instead.

ValueError for shapes and values, TypeError for types and dtypes. In functions that torch.compile traces, test first and
call `fail` only then: building a message from sizes would pin the graph to them.
"""

from __future__ import annotations

import difflib
import math
import numbers
import operator
import os
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

INDEX_DTYPES = (torch.int32, torch.int64)
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_CUDA_BATCH = 65535
FINITE = torch.finfo(torch.float64).max

Sizes = Sequence[int | None]
"""A shape; None: any size."""


def message(op: str, argument: str, expectation: str, actual: object, remedy: str = "") -> str:
    if isinstance(actual, int) and actual.bit_length() > 256:  # Python refuses to print thousands of digits
        actual = f"an int of {actual.bit_length()} bits"
    return f"pdkernels.{op}: {argument} must {expectation}, got {actual}.{' ' + remedy if remedy else ''}"


def sentence(op: str, text: str, remedy: str = "") -> str:
    """A message with a free sentence, where the grammar of `message` reads badly.

    >>> sentence("eval", "--resume needs --json, which names the file to continue")
    'pdkernels.eval: --resume needs --json, which names the file to continue.'
    """
    return f"pdkernels.{op}: {text}{'' if text.endswith('.') else '.'}{' ' + remedy if remedy else ''}"


def refuse(condition: bool, op: str, text: str, remedy: str = "") -> None:
    """Raises ValueError with a free sentence if `condition` holds."""
    if condition:
        raise ValueError(sentence(op, text, remedy))


def fail(op: str, argument: str, expectation: str, actual: object, remedy: str = "") -> NoReturn:
    raise ValueError(message(op, argument, expectation, actual, remedy))


def check(condition: bool, op: str, argument: str, expectation: str, actual: object, remedy: str = "") -> None:
    """Raises ValueError, for shapes and values."""
    if not condition:
        fail(op, argument, expectation, actual, remedy)


def check_type(condition: bool, op: str, argument: str, expectation: str, actual: object, remedy: str = "") -> None:
    """Raises TypeError, for types and dtypes."""
    if not condition:
        raise TypeError(message(op, argument, expectation, actual, remedy))


# ------------------------------------------------------------------------------------------------- numbers and names


def integer(op: str, argument: str, value: object, minimum: int) -> int:
    """The value as a Python int, at least `minimum`. NumPy integers are accepted, bools are not."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(message(op, argument, "be an integer", type(value).__name__))
    if number < minimum:
        fail(op, argument, f"be {minimum} or more", number)
    return number


def plain(value: Any) -> Any:
    """A number of NumPy as Python's, and anything else as it is.

    >>> plain(torch.tensor(3).numpy()[()]), plain("text")
    (3, 'text')
    """
    if isinstance(value, (Tensor, list, tuple, str, bool)) or value is None:
        return value
    try:
        if hasattr(value, "__index__") and not hasattr(value, "__len__"):
            return operator.index(value)
        return float(value) if isinstance(value, numbers.Real) else value
    except (TypeError, OverflowError):  # a class, or a number beyond all floats
        return value


def check_int(
    op: str, argument: str, value: Any, minimum: int | None = None, remedy: str = "", kind: str = "an int"
) -> None:
    """An int, which may be symbolic in a traced graph."""
    check_type(isinstance(value, (int, torch.SymInt)), op, argument, f"be {kind}", type(value).__name__)
    if minimum is not None and value < minimum:
        fail(op, argument, f"be at least {minimum}", value, remedy)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        fail(op, argument, "be a number of 64 bits", value)


def check_number(
    op: str,
    argument: str,
    value: Any,
    minimum: float = -math.inf,
    maximum: float = math.inf,
    expectation: str = "be a number",
) -> None:
    """A number in ``[minimum, maximum]``, worded as `expectation`; NaN always fails."""
    check_type(isinstance(value, (int, float)), op, argument, "be a number", type(value).__name__)
    if not minimum <= value <= maximum:
        fail(op, argument, expectation, value)
    check_fits_float(op, argument, value)


def check_fits_float(op: str, argument: str, value: int | float) -> None:
    """Checks that a float can hold an int exactly: larger ones are mistakes, and most of them cannot be converted."""
    if isinstance(value, int) and abs(value) > 2**53:
        fail(op, argument, "be a float, or an int of at most 53 bits", value)


def check_flag(op: str, argument: str, value: object) -> None:
    check_type(isinstance(value, bool), op, argument, "be a bool", type(value).__name__)


def check_text(op: str, text: str, argument: str = "text") -> None:
    """Raises TypeError or ValueError for anything but text that UTF-8 can encode."""
    check_type(isinstance(text, str), op, argument, "be a str", type(text).__name__)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        remedy = "Bytes of another encoding become text with .decode(encoding)."
        fail(op, argument, "hold only Unicode characters", f"the surrogate {text[error.start]!r}", remedy)


def refuse_foreign(op: str, argument: str, model: Any) -> None:
    """Raises TypeError for a model of transformers, or for one in a wrapper of PEFT or torch.compile, that is not
    wrapped for us; neither need be installed."""
    inner = getattr(model, "_orig_mod", model)
    libraries = {base.__module__.partition(".")[0] for base in type(inner).__mro__}
    if libraries & {"transformers", "peft"} and not hasattr(inner, "new_cache"):
        remedy = "Pass pdkernels.integrations.transformers.wrap(model, tokenizer)."
        fault = message(op, argument, "be a model of pdkernels, or wrapped", type(inner).__name__, remedy)
        raise TypeError(fault)


def did_you_mean(value: object, candidates: Iterable[str]) -> str:
    """A hint for a misspelt name, to put before a remedy; empty if no candidate is close.

    >>> did_you_mean("blocksize", ["block_size", "seed"])
    "Did you mean 'block_size'? "
    """
    word, names = str(value).lower(), list(candidates)
    longer = [name for name in names if len(word) > 2 and name.startswith(word)]
    close = longer or difflib.get_close_matches(word, names, 1)
    return f"Did you mean {close[0]!r}? " if close else ""


def check_fits_memory(op: str, argument: str, value: object, nbytes: int, device: torch.device) -> None:
    """Checks that the memory that `value` of an argument requires fits into the total memory of the machine or GPU."""
    if device.type == "cpu" and hasattr(os, "sysconf"):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    elif device.type == "cuda" and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        return
    if nbytes > total:
        fail(op, argument, f"fit in memory ({total / 2**30:.4g} GiB)", f"{value}, which takes {nbytes / 2**30:.4g} GiB")


def check_choice(op: str, argument: str, value: object, choices: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        fail(op, argument, f"be one of {', '.join(map(repr, choices))}", repr(value))


# ------------------------------------------------------------------------------------------------- tensors


def check_shape(op: str, argument: str, tensor: Tensor, sizes: Sizes, like: str = "") -> None:
    """The given sizes. `like`: where they come from, such as " like x"."""
    if tensor.dim() != len(sizes) or any(size is not None and size != have for size, have in zip(sizes, tensor.shape)):
        expected = ", ".join("any" if size is None else str(size) for size in sizes)
        fail(op, argument, f"have shape ({expected}){like}", tuple(tensor.shape))


def check_device(op: str, argument: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        fail(op, argument, f"be on {device}", tensor.device, f"Move it with .to({str(device)!r}).")


def check_index(op: str, argument: str, tensor: Any, sizes: Sizes, device: torch.device | None) -> None:
    """An int32 or int64 tensor of the given shape on the given device (None: any)."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in INDEX_DTYPES:
        actual = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(
            message(op, argument, "be an int32 or int64 tensor", actual, "Convert it with .to(torch.int64).")
        )
    check_shape(op, argument, tensor, sizes)
    if device is not None:
        check_device(op, argument, tensor, device)


def check_indices(op: str, sizes: Sizes, device: torch.device | None, **tensors: Any) -> None:
    """`check_index` of all tensors that are given."""
    for argument, tensor in tensors.items():
        if tensor is not None:
            check_index(op, argument, tensor, sizes, device)


def check_floats(
    op: str, argument: str, tensor: Any, sizes: Sizes | None = None, *, like: Tensor | None = None, whose: str = ""
) -> None:
    """Checks dtype and sizes: a dtype that kernels or the reference support, or the dtype and device of `like`."""
    check_type(isinstance(tensor, Tensor), op, argument, "be a tensor", type(tensor).__name__)
    if tensor.dtype not in (*KERNEL_DTYPES, torch.float64) if like is None else tensor.dtype != like.dtype:
        expectation = "be float32, float16 or bfloat16" if like is None else f"be {like.dtype} like the others"
        raise TypeError(message(op, argument, expectation, tensor.dtype, "Convert it with .to()."))
    if like is not None:
        check_device(op, argument, tensor, like.device)
    if sizes is not None:
        check_shape(op, argument, tensor, sizes, whose)


def check_last_contiguous(op: str, remedy: str = "", **tensors: Tensor) -> None:
    for argument, tensor in tensors.items():
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            fail(op, argument, "have a contiguous last dimension", f"strides {tensor.stride()}", remedy)


def check_cuda_batch(op: str, argument: str, tensor: Tensor) -> None:
    """For ops whose kernels map the batch to a dimension of the grid."""
    if tensor.is_cuda and tensor.shape[0] > MAX_CUDA_BATCH:
        expectation, remedy = f"have a batch of at most {MAX_CUDA_BATCH} on CUDA", "Call it for parts of the batch."
        raise NotImplementedError(message(op, argument, expectation, tensor.shape[0], remedy))


def refuse_tangents(op: str, arguments: Iterable[Any], reference: bool = True) -> None:
    """Refuses tangents: no kernel has a forward-mode derivative, and results without one would look like constants.
    `reference`: whether the op's reference has one."""
    # The level is -1 outside a dual level, and asking a tensor takes longer than many ops.
    if forward_ad._current_level < 0:
        return
    for value in arguments:
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
                reason = "an input has a tangent, and the kernels have no derivative in forward mode"
                remedy = "Pass backend='reference', which PyTorch differentiates, or the primal alone."
                if not reference:
                    reason, remedy = "an input has a tangent, and the op has no derivative", "Pass the primal alone."
                raise NotImplementedError(sentence(op, reason, remedy))
