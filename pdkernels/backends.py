"""Which implementation serves a call.

``auto`` is the compiled kernel wherever one exists. It never becomes the reference on a GPU: that has to be asked for by
name. Choices are made once, when an op is defined, so that a call is one dictionary look-up that torch.compile can trace.
"""

from __future__ import annotations

import os
from typing import Literal, NoReturn

import torch

from pdkernels import _native
from pdkernels._validation import message

Backend = Literal["auto", "native", "triton", "reference"]
BACKENDS = ("auto", "native", "triton", "reference")

# ``PDKERNELS_BACKEND`` is the default of every call in the process. Read at import.
DEFAULT = os.environ.get("PDKERNELS_BACKEND", "auto")

# Op -> (backend, device type) -> implementation. What is not in it does not exist.
CHOICES: dict[str, dict[tuple[str, str], str]] = {}


def register(op: str, kernels: tuple[str, ...] = ("native",)) -> None:
    """Notes that `op` has the given kernels beside its reference."""
    choices = CHOICES[op] = {}
    for device, native in (("cpu", _native.has_native()), ("cuda", bool(_native.cuda_archs()))):
        choices["reference", device] = "reference"
        for kernel in kernels:
            if kernel == "triton" or native:
                choices[kernel, device] = kernel
                choices.setdefault(("auto", device), kernel)
    choices.setdefault(("auto", "cpu"), "reference")


def resolve(op: str, backend: str, device: torch.device) -> str:
    """The implementation for this call: ``native``, ``triton`` or ``reference``."""
    wanted = DEFAULT if backend == "auto" else backend
    choice = CHOICES[op].get((wanted, device.type))
    if choice is None:
        _explain(op, wanted, device.type)
    return choice


def _explain(op: str, backend: str, device: str) -> NoReturn:
    if backend not in BACKENDS:
        raise ValueError(message(op, "backend", f"be one of {', '.join(BACKENDS)}", repr(backend)))
    if device not in ("cpu", "cuda"):
        raise NotImplementedError(message(op, "device", "be cpu or cuda", device, "Move the tensors to one of them."))
    here = [name for name in BACKENDS if (name, device) in CHOICES[op]]
    remedy = "Build the library with: pip install ."
    if device == "cuda":
        remedy = "Rebuild with nvcc on the PATH (PDKERNELS_BUILD_CUDA=1), or pass backend='reference'."
    raise NotImplementedError(message(op, "backend", f"be one of {', '.join(here)} on {device}", repr(backend), remedy))
