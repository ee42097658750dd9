"""Memory of weights and caches on the CPU: in huge pages where the system allows it.

A thread reads large matrices faster there, since the processor looks up a page every 2 MiB instead of every 4 KiB. Such
a tensor can be copied, pickled, shared and written after a fork, and it gives its memory back.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from pdkernels import _native
from pdkernels._host import HugePages
from pdkernels._validation import refuse

_LEAST = 1 << 17  # bytes: what is smaller gains nothing, and there are many of them
_SYSTEM = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_NODES = Path("/sys/devices/system/node/has_memory")
_MIB = 1 << 20


def asked() -> bool:
    """Whether ``PDKERNELS_HUGE_PAGES`` asks for huge pages: on unless it is 0."""
    value = os.environ.get("PDKERNELS_HUGE_PAGES", "")
    refuse(value not in ("", "0", "1"), "HUGE_PAGES", f"PDKERNELS_HUGE_PAGES must be 0 or 1, got {value!r}")
    return value != "0"


@cache
def setting() -> str:
    """The system's own setting: always, madvise or never; "" if it has none."""
    try:
        chosen = re.search(r"\[(\w+)\]", _SYSTEM.read_text())
    except OSError:
        return ""
    return "" if chosen is None else chosen[1]


def enabled() -> bool:
    """Whether `empty` asks for huge pages."""
    return asked() and setting() in ("always", "madvise")


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor on the CPU like that of `torch.empty`: in huge pages if it is large and the system has them.

    >>> empty((2, 3), torch.bfloat16).shape
    torch.Size([2, 3])
    """
    placed = _placed(shape, dtype)
    if placed is None:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    if _several_memories():
        _native.touch(placed.data_ptr(), placed.nbytes)
    return placed


def copied(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in the memory of `empty`.

    >>> copied(torch.ones(2), torch.float64)
    tensor([1., 1.], dtype=torch.float64)
    """
    return empty(tensor.shape, dtype).copy_(tensor)


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """The tensor of `torch.zeros`, on the CPU where `empty` would put it.

    >>> zeros((2,), torch.float32)
    tensor([0., 0.])
    """
    placed = _placed(shape, dtype) if torch.device(device).type == "cpu" else None
    return torch.zeros(tuple(shape), dtype=dtype, device=device) if placed is None else placed


def moved(tensor: Tensor, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """`tensor.to(device, dtype)`; numbers that are converted on the CPU go into the memory of `empty`.

    >>> moved(torch.ones(2), torch.float64, "cpu")
    tensor([1., 1.], dtype=torch.float64)
    """
    converts = tensor.dtype != dtype and tensor.device.type == "cpu" == torch.device(device).type
    return copied(tensor, dtype) if converts else tensor.to(device, dtype)


@contextmanager
def lasting() -> Iterator[None]:
    """The context for tensors that calls to come use again: plain ones, wherever this call is made.

    One of inference mode could not be used in training, and one of torch.export or FakeTensorMode nowhere else.

    >>> with torch.inference_mode(), lasting():
    ...     torch.ones(1).is_inference()
    False
    """
    with torch.inference_mode(False), torch.no_grad():
        if _fake_mode() is None:
            yield
        else:
            with _disable_current_modes():
                yield


def is_faked() -> bool:
    """Whether a FakeTensorMode refuses tensors with values, as that of torch.export does not."""
    mode = _fake_mode()
    return mode is not None and not mode.allow_non_fake_inputs


def _fake_mode() -> FakeTensorMode | None:
    if torch.compiler.is_dynamo_compiling():
        return None
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return mode if isinstance(mode, FakeTensorMode) else None


def buffer(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, for compiled code. Inside torch.func.grad and jvp they are those
    of the tensor that is followed there.

    >>> buffer(torch.tensor([1, 2], dtype=torch.uint8)).tolist()
    [1, 2]
    """
    while torch._C._functorch.is_gradtrackingtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    setattr(memory, "tensor", tensor)  # noqa: B010 - it lives as long as its bytes are looked at
    return memoryview(memory).cast("B")


def report() -> dict[str, str]:
    """A report for people: what is asked for, what the system says, and what a trial allocation gets."""
    lines = {"huge pages": "on" if enabled() else "off" if setting() else "off: the system has none"}
    if not asked():
        lines["huge pages"] = "off: PDKERNELS_HUGE_PAGES=0"
    try:
        lines["system"] = _SYSTEM.read_text().strip()
    except OSError:
        lines["system"] = f"no {_SYSTEM}"
    if enabled():
        trial = empty((16 * _MIB,), torch.uint8)
        before = huge_bytes(trial)
        trial.fill_(1)
        lines["trial"] = f"{(huge_bytes(trial) - before) // _MIB} of {trial.nbytes // _MIB} MiB are in huge pages"
    return lines


def huge_bytes(tensor: Tensor) -> int:
    """Bytes in huge pages of the mappings that hold a tensor, as the system counts them; 0 if it does not say."""
    return sum(1024 * int(value.split()[0]) for value in _told(tensor, "AnonHugePages:"))


def _told(tensor: Tensor, field: str) -> list[str]:
    """The system's value of a field for each mapping that holds a tensor."""
    first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    values, overlaps = list[str](), False
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        name, _, value = line.partition(" ")
        if "-" in name:
            low, high = (int(bound, 16) for bound in name.split("-"))
            overlaps = low < last and first < high
        elif overlaps and name == field:
            values.append(value)
    return values


@cache
def _several_memories() -> bool:
    """Whether the machine has more than one NUMA node with memory: a list such as 0-1 instead of 0."""
    try:
        return not _NODES.read_text().strip().isdigit()
    except OSError:
        return False


def _placed(shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
    """Zeros in huge pages; None where ordinary memory is as good or the only choice."""
    count = math.prod(shape)
    # A mode makes tensors of its own kind.
    if count * dtype.itemsize < _LEAST or not enabled() or _get_current_dispatch_mode() is not None:
        return None
    try:
        memory = HugePages(count * dtype.itemsize)
    except MemoryError:
        return None
    shaped = torch.frombuffer(memory, dtype=dtype, count=count).view(tuple(shape))
    # Not a view, whose writes autograd would follow.
    fresh = torch.empty(0, dtype=dtype, device="cpu")
    return fresh.set_(shaped.untyped_storage(), 0, shaped.shape, shaped.stride())
