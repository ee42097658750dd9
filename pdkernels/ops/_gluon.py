"""Whether a call runs a Gluon kernel or the Triton kernel that computes the same.

Gluon kernels are for Hopper. Before the first call on a device, the kernel runs on a small input and is compared with the reference. If it
fails, or its results differ, the Triton kernel serves the process, and a warning says so. ``PDKERNELS_GLUON=0`` chooses the Triton kernels.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from pdkernels._attention import AttentionArguments
from pdkernels._validation import message
from pdkernels.masks.basic import causal
from pdkernels.reference.block_sparse_attention import block_sparse_attention as reference

VARIABLE = "PDKERNELS_GLUON"
# By device, head dimension and dtype: whether the kernel passed.
CHECKED: dict[tuple[str, int, torch.dtype], bool] = {}

Forward = Callable[[AttentionArguments], tuple[Tensor, Tensor]]


def wanted() -> bool:
    """What the environment says.

    >>> import os; from unittest import mock
    >>> with mock.patch.dict(os.environ, {VARIABLE: "0"}): wanted()
    False
    """
    setting = os.environ.get("PDKERNELS_GLUON", "auto")
    if setting not in ("auto", "0"):
        raise ValueError(message("block_sparse_attention", VARIABLE, "be auto or 0", repr(setting)))
    return setting == "auto"


def forward_for(given: AttentionArguments) -> Forward | None:
    """The Gluon kernel for this call, or None."""
    device = given.q.device
    if not wanted() or device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    try:
        from pdkernels.gluon import _launch
    except ImportError:  # a Triton without Gluon
        return None
    return _launch.forward if _launch.serves(given) and passes(given, _launch.forward) else None


def passes(given: AttentionArguments, forward: Forward) -> bool:
    """Whether the kernel for this dtype and head dimension computes what the reference does on this device. Runs it once."""
    q = given.q
    key = (str(q.device), q.shape[3], q.dtype)
    if key not in CHECKED:
        # A graph that is being captured cannot wait for results: it gets the Triton kernel.
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        CHECKED[key] = _compare(q, forward)
    return CHECKED[key]


def _compare(like: Tensor, forward: Forward) -> bool:
    mask, device = causal(200), like.device
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, 200, heads, like.shape[3], generator=generator).to(device, like.dtype) for heads in (2, 1, 1)
    )
    scale = like.shape[3] ** -0.5
    try:
        found = forward(AttentionArguments(q, k, v, *mask.plan(128, 128, device).arguments, scale))
        exact = reference(*(x.float() for x in (q, k, v)), mask.dense().to(device), scale)
        worst = max(float((a.float() - b).abs().max()) for a, b in zip(found, exact))
        problem = "" if worst < 0.02 else f"its results are off by {worst:.3g}"  # bf16 rounds at 0.008
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        name = f"the Gluon kernel for heads of {like.shape[3]} in {like.dtype}"
        warnings.warn(f"pdkernels: {name} is not used on {device}, the Triton kernel is: {problem}", stacklevel=4)
    return not problem
