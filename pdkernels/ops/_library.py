"""The torch op library `pdkernels`: schemas and fakes live here in Python, kernels come from the compiled library.

A schema is the contract: ``Tensor(a!)`` marks what is written, lengths at run time are tensors, static things are ints.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from pdkernels import _native, backends

LIBRARY = torch.library.Library("pdkernels", "DEF")
SCHEMAS: dict[str, str] = {}

# ``PDKERNELS_DEBUG_CHECKS=1``: values on the GPU are read back and checked, at the price of a sync per call. Read at import.
DEBUG_CHECKS = os.environ.get("PDKERNELS_DEBUG_CHECKS") == "1"


def define(schema: str, *, fake: Callable[..., Any], reference: Callable[..., Any]) -> Any:
    """Defines an op with its fake and returns its default overload.

    Without the compiled library the reference serves the CPU, so that graphs and raw op calls still work.
    """
    name = schema[: schema.index("(")]
    LIBRARY.define(schema)
    SCHEMAS[name] = schema
    backends.register(name)
    torch.library.register_fake(f"pdkernels::{name}", fake, lib=LIBRARY)
    if not _native.has_native():
        LIBRARY.impl(name, reference, "CPU")
    return getattr(torch.ops.pdkernels, name).default
