"""Which implementation serves a call.

``auto`` is the compiled kernel wherever one exists. It never becomes the reference on a GPU: that has to be asked for by
name. ``PDKERNELS_BACKEND`` changes the default for a whole process.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Literal

import torch

from pdkernels import _native
from pdkernels._validation import message

Backend = Literal["auto", "native", "triton", "reference"]
BACKENDS = ("auto", "native", "triton", "reference")

# Op -> backends it has beside the reference. Ops add themselves where they are defined.
IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {}


def resolve(op: str, backend: str, device: torch.device) -> str:
    """The implementation for this call: ``native``, ``triton`` or ``reference``."""
    if backend == "auto":
        backend = os.environ.get("PDKERNELS_BACKEND", "auto")
    return _resolve(op, backend, device.type)


@cache
def _resolve(op: str, backend: str, device: str) -> str:
    if backend not in BACKENDS:
        raise ValueError(message(op, "backend", f"be one of {', '.join(BACKENDS)}", repr(backend)))
    if backend == "reference":
        return "reference"
    if backend == "triton" and "triton" not in IMPLEMENTATIONS[op]:
        raise NotImplementedError(message(op, "backend", f"be one of auto, {', '.join(IMPLEMENTATIONS[op])}, reference", "'triton'"))
    if device == "cpu":
        if _native.has_native():
            return "native"
        if backend == "native":
            raise NotImplementedError(message(op, "backend", "be one that is built", "'native'", "Build the library: pip install ."))
        return "reference"
    if device == "cuda" and _native.cuda_archs():
        return "native"
    if device == "cuda":
        remedy = "Rebuild with nvcc on the PATH (PDKERNELS_BUILD_CUDA=1), or pass backend='reference'."
        raise NotImplementedError(message(op, "device", "have compiled kernels", "cuda without any", remedy))
    raise NotImplementedError(message(op, "device", "be cpu or cuda", device, "Move the tensors, or pass backend='reference'."))
