"""The choice of the implementation for a call.

``auto`` is the compiled kernel wherever one exists. It never falls back to the reference on a GPU, which must be
requested by name. Choices are made once, when an op is defined, so that a call is one dictionary look-up that
torch.compile can trace.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Literal, NoReturn, get_args

import torch

from pdkernels import _native
from pdkernels._validation import message

Backend = Literal["auto", "native", "triton", "reference"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

# ``PDKERNELS_BACKEND`` is the default of every call in the process. Read at import.
DEFAULT = os.environ.get("PDKERNELS_BACKEND", "auto")

# Op -> (backend, device type) -> implementation. Missing entries do not exist.
CHOICES: dict[str, dict[tuple[str, str], str]] = {}

# Op -> "native" or "triton": the kind of its CUDA kernel, and so what it needs.
ON_CUDA: dict[str, str] = {}


def register(op: str, on_cuda: str = "native") -> None:
    """Records that `op` has a compiled kernel on the CPU and a ``native`` or ``triton`` one on CUDA."""
    choices = CHOICES[op] = {}
    ON_CUDA[op] = on_cuda
    on_gpu = bool(_native.cuda_archs()) if on_cuda == "native" else importlib.util.find_spec("triton") is not None
    for device, kernel, exists in (("cpu", "native", _native.has_native()), ("cuda", on_cuda, on_gpu)):
        choices["reference", device] = "reference"
        if exists:
            choices[kernel, device] = choices["auto", device] = kernel
    choices.setdefault(("auto", "cpu"), "reference")


def resolve(op: str, backend: str, device: torch.device) -> str:
    """The implementation for this call: ``native``, ``triton`` or ``reference``."""
    requested = DEFAULT if backend == "auto" else backend
    choice = CHOICES[op].get((requested, device.type))
    if choice is None:
        _explain(op, "backend" if requested == backend else "PDKERNELS_BACKEND", requested, device.type)
    return choice


def _explain(op: str, source: str, backend: str, device: str) -> NoReturn:
    if backend not in BACKENDS:
        raise ValueError(message(op, source, f"be one of {', '.join(BACKENDS)}", repr(backend)))
    if device not in ("cpu", "cuda"):
        raise NotImplementedError(message(op, "device", "be cpu or cuda", device, "Move the tensors to one of them."))
    here = [name for name in BACKENDS if (name, device) in CHOICES[op]]
    kernel = CHOICES[op].get(("auto", device), "reference")
    if kernel != "reference":
        remedy = f"Pass backend={kernel!r}, the kernel of this op on {device}."
    elif device == "cpu":
        remedy = "Build the library with: pip install ."
    elif ON_CUDA[op] == "triton":
        remedy = "Install triton, or pass backend='reference'."
    else:
        remedy = "Rebuild with nvcc on the PATH (PDKERNELS_BUILD_CUDA=1), or pass backend='reference'."
    raise NotImplementedError(message(op, source, f"be one of {', '.join(here)} on {device}", repr(backend), remedy))


def backend_of(dtype: torch.dtype) -> Backend:
    """The reference for fp64, which kernels do not support and which serves as the oracle of tests; else ``auto``."""
    return "reference" if dtype == torch.float64 else "auto"
