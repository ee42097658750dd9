"""The torch op library `pdkernels`: schemas and fakes live here in Python, kernels come from the compiled library or Triton.

A schema is the contract: ``Tensor(a!)`` marks what is written, lengths at run time are tensors, static things are ints.
An op's fake is also its validation: it looks at shapes, dtypes and devices and makes the messages. Tracing runs it, and a
call runs it only after the compiled code refused the arguments, so that a good call costs nothing for it. Triton kernels
refuse nothing, nor does what is composed in Python, so their fake runs before them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pdkernels import _native, backends
from pdkernels._validation import check_type
from pdkernels.ops._floats import refuse_tangents

LIBRARY = torch.library.Library("pdkernels", "DEF")
SCHEMAS: dict[str, str] = {}

# ``PDKERNELS_DEBUG_CHECKS=1``: values on the GPU are read back and checked, at the price of a sync per call. Read at import.
DEBUG_CHECKS = os.environ.get("PDKERNELS_DEBUG_CHECKS") == "1"

# Ops whose kernel on the CPU is made of other ops, with no C++ of its own.
COMPOSED: set[str] = set()

_FAKES: dict[str, Callable[..., Any]] = {}
_REFERENCES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}


def define(
    schema: str,
    *,
    fake: Callable[..., Any],
    reference: Callable[..., Any],
    cpu: Callable[..., Any] | None = None,
    triton: Callable[..., Any] | None = None,
    reference_check: Callable[..., Any] | None = None,
) -> torch._ops.OpOverload:
    """Defines an op with its fake and returns its default overload.

    Without the compiled library the reference serves the CPU, so that graphs and raw op calls still work.

    Args:
        cpu: the kernel on the CPU of an op that is made of other ops there.
        triton: the kernel on CUDA, for ops whose compiled library serves the CPU alone. It should import Triton in its body.
        reference_check: the validation of arguments for the reference, where that takes more than the kernels do.
    """
    name = schema[: schema.index("(")]
    LIBRARY.define(schema)
    SCHEMAS[name], _FAKES[name], _REFERENCES[name] = schema, fake, (reference_check or fake, reference)
    # The backward pass of an op is called by autograd alone, and runs where the op itself ran.
    if not name.endswith("_backward"):
        backends.register(name, on_cuda="triton" if triton else "native")
    torch.library.register_fake(f"pdkernels::{name}", fake, lib=LIBRARY)
    if cpu:
        COMPOSED.add(name)
        LIBRARY.impl(name, _checked(fake, cpu), "CPU")
    elif not _native.has_native():
        LIBRARY.impl(name, reference, "CPU")
    if triton:
        LIBRARY.impl(name, _checked(fake, triton), "CUDA")
    return getattr(torch.ops.pdkernels, name).default


def _checked(check: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **options: Any) -> Any:
        check(*arguments, **options)
        return kernel(*arguments, **options)

    return run


def key(op: str, seed: int) -> int:
    """The low 64 bits of `seed` as the signed number that a schema takes."""
    check_type(isinstance(seed, (int, torch.SymInt)), op, "seed", "be an int", type(seed).__name__)
    return (seed + 2**63) % 2**64 - 2**63


def call(op: torch._ops.OpOverload, arguments: tuple[Any, ...], anchor: Tensor, backend: str) -> Any:
    """Runs an op on the device of `anchor`, or its reference. Whatever refuses the arguments, the fake explains why.

    Tangents are refused here, for all ops: the reference alone has a derivative in forward mode.
    """
    name = op._opname
    try:
        choice = backends.resolve(name, backend, anchor.device)
        if choice != "reference":
            refuse_tangents(name, arguments)
            if DEBUG_CHECKS and anchor.is_cuda and choice == "native":
                op(*(_values_only(argument) for argument in arguments))
            return op(*arguments)
    except (RuntimeError, TypeError, AttributeError):
        _FAKES[name](*arguments)
        raise
    check, reference = _REFERENCES[name]
    check(*arguments)
    return reference(*arguments)


def _values_only(argument: Any) -> Any:
    """A stand-in on the CPU: index tensors with their values, caches with their geometry but rows of no bytes.

    An op run on stand-ins checks its values and moves nothing.
    """
    if isinstance(argument, list):
        return [torch.empty((*t.shape[:-2], 1, 0), dtype=torch.uint8) for t in argument]
    return argument.to("cpu", copy=True) if isinstance(argument, Tensor) else argument
