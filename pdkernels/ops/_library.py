"""The torch op library `pdkernels`: `define` states all about an op once, and registration, calls and tests read it from `OPS`.

A schema is the contract: ``Tensor(a!)`` marks what is written, lengths at run time are tensors, static things are ints.
An op's fake is also its validation: it looks at shapes, dtypes and devices and makes the messages. Tracing runs it, and a
call runs it only after the compiled code refused the arguments, so that a good call costs nothing for it. Triton kernels
refuse nothing, nor does what is composed in Python, so their fake runs before them.
"""

from __future__ import annotations

import numbers
import operator
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from pdkernels import _native, backends
from pdkernels._aliasing import check_memory, check_written
from pdkernels._validation import check_flag, check_type, fail, message, refuse_tangents

LIBRARY = torch.library.Library("pdkernels", "DEF")

# ``PDKERNELS_DEBUG_CHECKS=1``: values on the GPU are read back and checked, at the price of a sync per call. Read at import.
DEBUG_CHECKS = os.environ.get("PDKERNELS_DEBUG_CHECKS") == "1"


class Draw:
    """Random tensors for an op's example: the same for the same seed."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype

    def floats(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype or self.dtype)

    def ints(self, least: int, most: int, *shape: int) -> Tensor:
        """In ``[least, most]``."""
        return torch.randint(least, most + 1, shape, generator=self.generator)

    def rows(self, batch: int, count: int, of: int) -> Tensor:
        """`count` of the numbers below `of` for each sequence, ascending."""
        chosen = [torch.randperm(of, generator=self.generator)[:count].sort().values for _ in range(batch)]
        return torch.stack(chosen)


Example = Callable[[Draw], dict[str, Any]]


@dataclass(frozen=True)
class OpSpec:
    """All about an op; see `define`."""

    name: str
    schema: str
    arguments: tuple[str, ...]
    """Their names, in order."""
    tensors: tuple[int, ...]
    """Where among them tensors are, or lists of tensors."""
    flags: tuple[tuple[int, str], ...]
    """Where bools are, and their names."""
    written: tuple[str, ...]
    """Those that the schema marks as written."""
    overload: torch._ops.OpOverload
    fake: Callable[..., Any]
    """Of the kernels: refuses float64 too."""
    check: Callable[..., Any]
    """The validation for the reference."""
    reference: Callable[..., Any]
    composed: bool
    """Whether its CPU kernel is made of other ops."""
    gradients: Literal["refused", "cut", "own"]
    example: Example


OPS: dict[str, OpSpec] = {}

PLAIN = frozenset({Tensor, torch.nn.Parameter, int, float, bool, str, list, tuple, type(None)})


def define(
    schema: str,
    *,
    fake: Callable[..., Any],
    reference: Callable[..., Any],
    example: Example,
    cpu: Callable[..., Any] | None = None,
    triton: Callable[..., Any] | None = None,
    gradients: Literal["refused", "cut", "own"] = "refused",
    float64: bool = False,
    reference_check: Callable[..., Any] | None = None,
) -> torch._ops.OpOverload:
    """Defines an op and returns its default overload.

    Without the compiled library the reference serves the CPU, so that graphs and raw op calls still work.

    Args:
        fake: validation, and empty results; of the reference's calls too.
        example: arguments of one representative call of the public function, small and good on every device: the tests of
            all ops run it. What the op writes is among them under its name in the schema.
        cpu: the kernel on the CPU of an op that is made of other ops there.
        triton: the kernel on CUDA, for ops whose compiled library serves the CPU alone. It should import Triton in its body.
        gradients: what a call does with an input that requires a gradient. "refused": raises, but for the reference; "cut":
            detaches it; "own": nothing, since there are no floats or since autograd has a kernel of the op's own.
        float64: whether the kernels take it. Others refuse it, in words, after what the fake refuses.
        reference_check: in place of `fake` for the reference, where the fake refuses float64 by itself.
    """
    name = schema[: schema.index("(")]
    LIBRARY.define(schema)
    overload: torch._ops.OpOverload = getattr(torch.ops.pdkernels, name).default
    given = overload._schema.arguments
    arguments = tuple(argument.name for argument in given)
    tensors = tuple(i for i, argument in enumerate(given) if "Tensor" in str(argument.type))
    written = tuple(argument.name for argument in given if argument.alias_info and argument.alias_info.is_write)
    flags = tuple((i, argument.name) for i, argument in enumerate(given) if str(argument.type) == "bool")
    check = reference_check or fake
    check, fake = (_with_memory_checked(name, arguments, written, function) for function in (check, fake))
    if not float64 and reference_check is None:
        fake = _without_float64(name, arguments, fake)
    OPS[name] = OpSpec(
        name,
        schema,
        arguments,
        tensors,
        flags,
        written,
        overload,
        fake,
        check,
        reference,
        cpu is not None,
        gradients,
        example,
    )
    # The backward pass of an op is called by autograd alone, and runs where the op itself ran.
    if not name.endswith("_backward"):
        backends.register(name, on_cuda="triton" if triton else "native")
    torch.library.register_fake(f"pdkernels::{name}", fake, lib=LIBRARY)
    if cpu:
        LIBRARY.impl(name, _checked(fake, cpu), "CPU")
    elif not _native.has_native():
        LIBRARY.impl(name, reference, "CPU")
    if triton:
        LIBRARY.impl(name, _checked(fake, _on_its_device(triton)), "CUDA")
    return overload


def _checked(check: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **options: Any) -> Any:
        check(*arguments, **options)
        return kernel(*arguments, **options)

    return run


def _on_its_device(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Triton launches on the current device, which need not be that of the tensors: the first of them decides."""

    def run(*arguments: Any, **options: Any) -> Any:
        with torch.cuda.device_of(arguments[0]):
            return kernel(*arguments, **options)

    return run


def _with_memory_checked(
    op: str, names: tuple[str, ...], written: tuple[str, ...], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """How tensors lie in memory is checked for all ops alike: the compiled code refuses them, and this says so."""

    def run(*arguments: Any, **options: Any) -> Any:
        given = [*zip(names, arguments), *options.items()]
        check_memory(op, given)
        results = fake(*arguments, **options)
        if written:
            check_written(op, written, given)
        return results

    return run


def _without_float64(op: str, names: tuple[str, ...], fake: Callable[..., Any]) -> Callable[..., Any]:
    """The reference takes float64, the kernels do not."""

    def run(*arguments: Any, **options: Any) -> Any:
        results = fake(*arguments, **options)
        for name, given in (*zip(names, arguments), *options.items()):
            if isinstance(given, Tensor) and given.dtype == torch.float64:
                remedy = "Pass backend='reference', which computes in float64."
                expectation = "be float32, float16 or bfloat16 for the kernels"
                raise TypeError(message(op, name, expectation, given.dtype, remedy))
        return results

    return run


def key(op: str, seed: int) -> int:
    """The 64 bits of `seed` as the signed number that a schema takes."""
    if not isinstance(seed, (int, torch.SymInt)):
        check_type(False, op, "seed", "be an int", type(seed).__name__)
    if not -(2**63) <= seed < 2**64:
        fail(op, "seed", "be a number of 64 bits, in [-2**63, 2**64)", seed)
    return seed if seed < 2**63 else seed - 2**64


def keys(op: str, seed: int | Tensor) -> tuple[int, Tensor | None]:
    """A seed, or a tensor of them, as a schema takes it: a number and a tensor, of which the second counts where it is given."""
    return (0, seed) if type(seed) is not int and isinstance(seed, Tensor) else (key(op, seed), None)


def call(op: torch._ops.OpOverload, arguments: tuple[Any, ...], anchor: Tensor, backend: str) -> Any:
    """Runs an op on the device of `anchor`, or its reference. Whatever refuses the arguments, the fake explains why.

    Tangents are refused here, for all ops: the reference alone has a derivative in forward mode.
    """
    name = op._opname
    spec = OPS[name]
    for at, flag in spec.flags:  # torch would take a number
        check_flag(name, flag, arguments[at])
    if not PLAIN.issuperset(map(type, arguments)) and not torch.compiler.is_compiling():
        arguments = tuple(map(_plain, arguments))
    if spec.gradients != "own" and torch.is_grad_enabled():
        arguments = _without_gradients(spec, arguments, backend)
    try:
        choice = backends.resolve(name, backend, anchor.device)
        if choice != "reference":
            refuse_tangents(name, arguments)
            if DEBUG_CHECKS and anchor.is_cuda and choice == "native":
                op(*(_values_only(argument) for argument in arguments))
            return op(*arguments)
    except (RuntimeError, TypeError, AttributeError) as error:
        if spec.written and torch._C._are_functorch_transforms_active() and not str(error).startswith("pdkernels."):
            _refuse_transforms(spec)
        if isinstance(anchor, Tensor) and anchor.is_meta:
            return spec.fake(*arguments)
        _explain(spec, arguments, error)
        raise
    spec.check(*arguments)
    # torch's operators take no int of more than 64 bits, where a float is meant.
    return spec.reference(*(float(x) if type(x) is int and not -(2**63) <= x < 2**63 else x for x in arguments))


def _plain(argument: Any) -> Any:
    """A NumPy number as Python's, or torch would take a float32 for an int and round it."""
    if isinstance(argument, (Tensor, list, tuple, str, bool)) or argument is None:
        return argument
    if hasattr(argument, "__index__") and not hasattr(argument, "__len__"):
        return operator.index(argument)
    return float(argument) if isinstance(argument, numbers.Real) else argument


def _explain(spec: OpSpec, arguments: tuple[Any, ...], error: Exception) -> None:
    """Why a call failed, where its arguments are the reason. The fake allocates results as the kernel does."""
    try:
        spec.fake(*arguments)
    except RuntimeError as again:
        if isinstance(again, NotImplementedError):
            raise
        error = again
    if type(error) is RuntimeError and any(word in str(error) for word in ("allocate memory", "overflow")):
        remedy = "Pass smaller tensors, or parts of them."
        raise MemoryError(message(spec.name, "its results", "fit into memory", "sizes that do not", remedy)) from None


def _refuse_transforms(spec: OpSpec) -> NoReturn:
    """torch.vmap runs other ops sample by sample, but has no rule for what is written."""
    remedy = "Call the op on the whole batch: its tensors have a batch dimension."
    raise NotImplementedError(
        message(
            spec.name,
            spec.written[0],
            "not be written inside a transform of torch.func",
            "torch.vmap or another one",
            remedy,
        )
    ) from None


def _without_gradients(spec: OpSpec, arguments: tuple[Any, ...], backend: str) -> tuple[Any, ...]:
    """Without a gradient of its own an op would cut the graph in silence."""
    # Places first: isinstance(x, Tensor) takes longer than all else here where x is none.
    for i in spec.tensors:
        given = arguments[i]
        if given is None:
            continue
        for tensor in given if isinstance(given, (list, tuple)) else (given,):
            if not isinstance(tensor, Tensor) or not tensor.requires_grad:
                continue
            if spec.gradients == "cut":
                return tuple(x.detach() if isinstance(x, Tensor) and x.requires_grad else x for x in arguments)
            if backend != "reference":
                remedy = "Call it under torch.no_grad(), or train with plain PyTorch (backend='reference')."
                raise NotImplementedError(
                    message(spec.name, spec.arguments[i], "not require a gradient", "a tensor that does", remedy)
                )
    return arguments


def _values_only(argument: Any) -> Any:
    """A stand-in on the CPU: index tensors with their values, caches with their geometry but rows of no bytes.

    An op run on stand-ins checks its values and moves nothing.
    """
    if isinstance(argument, list):
        return [torch.empty((*t.shape[:-2], 1, 0), dtype=torch.uint8) for t in argument]
    return argument.to("cpu", copy=True) if isinstance(argument, Tensor) else argument
