"""The torch op library `pdkernels`: schemas and fakes live here in Python, kernels come from the compiled library.

A schema is the contract: ``Tensor(a!)`` marks what is written, lengths at run time are tensors, static things are ints.
An op's fake is also its validation: it looks at shapes, dtypes and devices and makes the messages. Tracing runs it, and a
call runs it only after the compiled code refused the arguments, so that a good call costs nothing for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pdkernels import _native, backends

LIBRARY = torch.library.Library("pdkernels", "DEF")
SCHEMAS: dict[str, str] = {}

# ``PDKERNELS_DEBUG_CHECKS=1``: values on the GPU are read back and checked, at the price of a sync per call. Read at import.
DEBUG_CHECKS = os.environ.get("PDKERNELS_DEBUG_CHECKS") == "1"

_FAKES: dict[str, Callable[..., Any]] = {}
_REFERENCES: dict[str, Callable[..., Any]] = {}


def define(schema: str, *, fake: Callable[..., Any], reference: Callable[..., Any]) -> torch._ops.OpOverload:
    """Defines an op with its fake and returns its default overload.

    Without the compiled library the reference serves the CPU, so that graphs and raw op calls still work.
    """
    name = schema[: schema.index("(")]
    LIBRARY.define(schema)
    SCHEMAS[name], _FAKES[name], _REFERENCES[name] = schema, fake, reference
    backends.register(name)
    torch.library.register_fake(f"pdkernels::{name}", fake, lib=LIBRARY)
    if not _native.has_native():
        LIBRARY.impl(name, reference, "CPU")
    return getattr(torch.ops.pdkernels, name).default


def call(op: torch._ops.OpOverload, arguments: tuple[Any, ...], anchor: Tensor, backend: str) -> Any:
    """Runs an op on the device of `anchor`, or its reference. Whatever refuses the arguments, the fake explains why."""
    name = op._opname
    try:
        if backends.resolve(name, backend, anchor.device) == "reference":
            _FAKES[name](*arguments)
            return _REFERENCES[name](*arguments)
        if DEBUG_CHECKS and anchor.is_cuda:
            op(*(_values_only(argument) for argument in arguments))
        return op(*arguments)
    except (RuntimeError, TypeError, AttributeError):
        _FAKES[name](*arguments)
        raise


def _values_only(argument: Any) -> Any:
    """A stand-in on the CPU: index tensors with their values, caches with their geometry but rows of no bytes.

    An op run on stand-ins checks its values and moves nothing.
    """
    if isinstance(argument, list):
        return [torch.empty((*t.shape[:-2], 1, 0), dtype=torch.uint8) for t in argument]
    return argument.to("cpu", copy=True) if isinstance(argument, Tensor) else argument
