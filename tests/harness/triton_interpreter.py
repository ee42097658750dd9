"""Runs a test's Triton kernel compiled if there is a GPU, and interpreted on CPU tensors otherwise.

Triton decides when it is imported and a kernel is decorated, by the environment variable TRITON_INTERPRET. So
`tests/conftest.py` calls `choose_mode()` before anything imports Triton, and a test only needs

    pytestmark = requires_triton
    x = torch.randn(..., device=triton_device())
    kernel[grid](x, ...)

The interpreter computes `tl.dot` of bfloat16 wrongly, so tests take the dtypes of such kernels from `dot_dtypes()`.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch

TRITON_FOUND = importlib.util.find_spec("triton") is not None
requires_triton = pytest.mark.skipif(not TRITON_FOUND, reason="needs triton")


def choose_mode() -> None:
    """Interpret where there is no GPU, unless TRITON_INTERPRET says otherwise. Must run before Triton is imported."""
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if interpreted() and TRITON_FOUND:
        _accept_recent_numpy()


def _accept_recent_numpy() -> None:
    """Triton 3.6 calls `int` on arrays of one element for loop bounds; NumPy 2.4 refuses (triton-lang/triton#9171)."""
    import triton
    from triton.runtime import interpreter

    if not triton.__version__.startswith("3.6."):
        return
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: type, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_and_index


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def triton_device() -> torch.device:
    return torch.device("cpu" if interpreted() else "cuda")


def dot_dtypes() -> list[torch.dtype]:
    """The dtypes for which `tl.dot` can be trusted here."""
    exact_everywhere = [torch.float16, torch.float32]
    return exact_everywhere if interpreted() else [*exact_everywhere, torch.bfloat16]
