"""The torch op library `pdkernels`: `define` describes an op once, and registration, calls and tests read it from
`OPS`.

A schema is the contract: ``Tensor(a!)`` marks what is written, run-time lengths are tensors, static values are ints. An
op's fake is also its validation: it checks shapes, dtypes and devices and builds the messages. Tracing runs it, and a
call runs it only after the compiled code has refused the arguments, so that it costs a good call nothing. Triton
kernels and ops composed in Python refuse nothing, so their fake runs first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pdkernels import _native, backends
from pdkernels._aliasing import check_dense, check_written
from pdkernels._validation import (
    check_fits_float,
    check_flag,
    check_type,
    fail,
    message,
    plain,
    refuse_tangents,
    sentence,
)

NAMESPACE = __name__.partition(".")[0]  # of the package itself: a copy under another name has ops of its own
LIBRARY = torch.library.Library(NAMESPACE, "DEF")

# ``PDKERNELS_DEBUG_CHECKS=1``: checks values on the GPU, at the cost of a sync per call. Read at import.
DEBUG_CHECKS = os.environ.get("PDKERNELS_DEBUG_CHECKS") == "1"


class Draw:
    """Random tensors for an op's example, reproducible by seed."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype

    def floats(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype or self.dtype)

    def ints(self, low: int, high: int, *shape: int) -> Tensor:
        """Integers in ``[low, high]``."""
        return torch.randint(low, high + 1, shape, generator=self.generator)

    def rows(self, batch: int, count: int, of: int) -> Tensor:
        """`count` distinct numbers below `of` for each sequence, ascending."""
        chosen = [torch.randperm(of, generator=self.generator)[:count].sort().values for _ in range(batch)]
        return torch.stack(chosen)


Example = Callable[[Draw], dict[str, Any]]
Gradients = Literal["refused", "cut", "none", "own"]


@dataclass(frozen=True)
class OpSpec:
    """Everything about an op; see `define`."""

    name: str
    schema: str
    arguments: tuple[str, ...]
    """Their names, in order."""
    tensors: tuple[int, ...]
    """Indices of tensors and lists of tensors among them."""
    flags: tuple[tuple[int, str], ...]
    """Indices of bools, and their names."""
    numbers: tuple[tuple[int, str], ...]
    """Positions and names of the float arguments."""
    mutated: tuple[str, ...]
    """The arguments that the schema marks as written."""
    writes: tuple[int, ...]
    """Their indices."""
    overload: torch._ops.OpOverload
    fake: Callable[..., Any]
    """The validation for the kernels: refuses float64 too."""
    check: Callable[..., Any]
    """The validation for the reference."""
    reference: Callable[..., Any]
    composed: bool
    """Whether its CPU kernel is composed of other ops."""
    gradients: Gradients
    example: Example


OPS: dict[str, OpSpec] = {}

PLAIN = frozenset({Tensor, torch.nn.Parameter, int, float, bool, str, list, tuple, type(None)})


_PLAIN_TYPES: dict[Any, str] = {Tensor: "Tensor", int: "int", float: "float", bool: "bool", str: "str"}
SCHEMA_TYPES: dict[Any, str] = {**_PLAIN_TYPES, **{kind | None: f"{name}?" for kind, name in _PLAIN_TYPES.items()}}
SCHEMA_TYPES |= {list[kind]: f"{name}[]" for kind, name in SCHEMA_TYPES.items()}  # type: ignore[valid-type]


def schema_of(structure: Any, *, mutated: Sequence[str] = (), without: Sequence[str] = ()) -> str:
    """The arguments of a schema: the fields of a NamedTuple, and those of a NamedTuple in it.

    >>> from typing import NamedTuple
    >>> class Arguments(NamedTuple):
    ...     cache: Tensor
    ...     bias: Tensor | None = None
    >>> schema_of(Arguments, mutated=["cache"])
    'Tensor(a!) cache, Tensor? bias=None'
    """
    marks = {name: f"({chr(ord('a') + i)}!)" for i, name in enumerate(mutated)}
    hints, fields = get_type_hints(structure), []
    for name in structure._fields:
        if hasattr(hints[name], "_fields"):
            fields.append(schema_of(hints[name]))
        elif name not in without:
            default = structure._field_defaults.get(name, ...)
            default_text = "" if default is ... else f'="{default}"' if isinstance(default, str) else f"={default}"
            kind = SCHEMA_TYPES[hints[name]].replace("Tensor", f"Tensor{marks.get(name, '')}")
            fields.append(f"{kind} {name}{default_text}")
    return ", ".join(fields)


def define(
    schema: str,
    *,
    fake: Callable[..., Any],
    reference: Callable[..., Any],
    example: Example,
    cpu: Callable[..., Any] | None = None,
    triton: Callable[..., Any] | None = None,
    compiled: bool = False,
    gradients: Gradients = "refused",
    float64: bool = False,
    reference_check: Callable[..., Any] | None = None,
    structure: Callable[..., Any] | None = None,
) -> torch._ops.OpOverload:
    """Defines an op and returns its default overload.

    Without the compiled library the reference serves the CPU, so graphs and raw op calls still work.

    Args:
        fake: validation, and empty results; also for calls of the reference.
        example: arguments of one representative call of the public function, small and valid on every device: the tests
            of all ops run it. What the op writes is included under its name in the schema.
        cpu: the CPU kernel of an op that is composed of other ops there.
        triton: the kernel on CUDA, if the compiled library serves only the CPU. It should import Triton in its body.
        compiled: whether the library has a CUDA kernel too, which takes precedence where it was built.
        gradients: what a call does with an input that requires a gradient. "refused": raises, except for the reference;
            "cut": detaches it; "none": raises, also for the reference, through which none flows; "own": nothing, since
            there are no floats or the op has its own autograd kernel.
        float64: whether the kernels take it. Otherwise they refuse it, with a message, after the checks of the fake.
        reference_check: replaces `fake` for the reference, where the fake itself refuses float64.
        structure: makes one value of the op's arguments, which `fake`, `reference`, `cpu`, `triton` and
            `reference_check` then take in their place.
    """
    if structure:
        fake, reference = _of_structure(structure, fake), _of_structure(structure, reference)
        cpu, triton, reference_check = (
            function and _of_structure(structure, function) for function in (cpu, triton, reference_check)
        )
    name = schema[: schema.index("(")]
    LIBRARY.define(schema)
    overload: torch._ops.OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    parameters = overload._schema.arguments
    arguments = tuple(argument.name for argument in parameters)
    tensors = tuple(i for i, argument in enumerate(parameters) if "Tensor" in str(argument.type))
    writes = counts_writes(overload)
    mutated = tuple(arguments[i] for i in writes)
    flags = tuple((i, argument.name) for i, argument in enumerate(parameters) if str(argument.type) == "bool")
    numbers = tuple((i, argument.name) for i, argument in enumerate(parameters) if "float" in str(argument.type))
    check = reference_check or fake
    check, fake = (_with_memory_checked(name, arguments, mutated, function) for function in (check, fake))
    if not float64 and reference_check is None:
        fake = _without_float64(name, arguments, fake)
    OPS[name] = OpSpec(
        name, schema, arguments, tensors, flags, numbers, mutated, writes, overload, fake, check, reference,
        cpu is not None, gradients, example,
    )  # fmt: skip
    if compiled and _native.cuda_archs():
        triton = None
    # The backward pass of an op is called only by autograd, and runs where the op ran.
    if not name.endswith("_backward"):
        backends.register(name, on_cuda="triton" if triton else "native")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    if cpu:
        LIBRARY.impl(name, _checked(fake, cpu), "CPU")
    elif not _native.has_native():
        LIBRARY.impl(name, reference, "CPU")
    if triton:
        LIBRARY.impl(name, _checked(fake, _on_its_device(triton)), "CUDA")
    return overload


def _of_structure(structure: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **options: Any) -> Any:
        return function(structure(*arguments, **options))

    return run


def counts_writes(op: torch._ops.OpOverload) -> tuple[int, ...]:
    """Makes calls of the raw op give what they write a new version; returns the indices of what is written.

    By its version autograd notices that a tensor it has saved was written since.
    """
    arguments = op._schema.arguments
    writes = tuple(i for i, argument in enumerate(arguments) if argument.alias_info and argument.alias_info.is_write)

    def run(keys: torch._C.DispatchKeySet, *arguments: Any) -> Any:
        results = op.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *arguments)
        _count(arguments, writes)
        return results

    if writes:
        LIBRARY.impl(op._opname, run, "ADInplaceOrView", with_keyset=True)
    return writes


def _count(arguments: Sequence[Any], writes: Sequence[int]) -> None:
    """Tensors from inference mode have no version, and autograd cannot save them."""
    versioned = [tensor for tensor in _tensors(arguments, writes) if not tensor.is_inference()]
    if versioned:
        torch.autograd.graph.increment_version(versioned)


def _tensors(arguments: Sequence[Any], at: Sequence[int]) -> list[Tensor]:
    tensors: list[Tensor] = []
    for i in at:
        value = arguments[i] if i < len(arguments) else None  # defaults at the end do not reach a raw call's kernel
        if isinstance(value, (list, tuple)):
            tensors.extend(value)
        elif value is not None:
            tensors.append(value)
    return tensors


_COUNTER = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def run_counted(op: torch._ops.OpOverload, arguments: tuple[Any, ...], writes: tuple[int, ...]) -> Any:
    """Calls an op and counts here, which is cheaper than in the dispatcher. A compiled graph counts for itself."""
    if torch.compiler.is_compiling():
        return op(*arguments)
    try:
        if not writes or forward_ad._current_level >= 0:  # tangents need the dispatcher's own way
            return op(*arguments)
        with torch._C._ExcludeDispatchKeyGuard(_COUNTER):
            results = op(*arguments)
    except RuntimeError as error:
        if type(error) is RuntimeError and str(error).startswith(f"{NAMESPACE}."):
            raise ValueError(str(error)) from None  # torch 2.15 makes no ValueError of std::invalid_argument
        raise
    _count(arguments, writes)
    return results


def _checked(check: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **options: Any) -> Any:
        check(*arguments, **options)
        return kernel(*arguments, **options)

    return run


def _on_its_device(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Triton launches on the current device, which may not be that of the tensors: switch to the first tensor's."""

    def run(*arguments: Any, **options: Any) -> Any:
        with torch.cuda.device_of(arguments[0]):
            return kernel(*arguments, **options)

    return run


def _with_memory_checked(
    op: str, names: tuple[str, ...], mutated: tuple[str, ...], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """Memory layout is checked alike for all ops: the compiled code refuses bad tensors, and this explains why."""

    def run(*arguments: Any, **options: Any) -> Any:
        named_arguments = [*zip(names, arguments), *options.items()]
        check_dense(op, named_arguments)
        results = fake(*arguments, **options)
        if mutated:
            check_written(op, mutated, named_arguments)
        return results

    return run


def _without_float64(op: str, names: tuple[str, ...], fake: Callable[..., Any]) -> Callable[..., Any]:
    """The reference takes float64, the kernels do not."""

    def run(*arguments: Any, **options: Any) -> Any:
        results = fake(*arguments, **options)
        for name, value in (*zip(names, arguments), *options.items()):
            if isinstance(value, Tensor) and value.dtype == torch.float64:
                remedy = "Pass backend='reference', which computes in float64."
                expectation = "be float32, float16 or bfloat16 for the kernels"
                raise TypeError(message(op, name, expectation, value.dtype, remedy))
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
    """A seed, or a tensor of seeds, as a schema takes it: a number and a tensor, which takes precedence if given."""
    return (0, seed) if type(seed) is not int and isinstance(seed, Tensor) else (key(op, seed), None)


def call(op: torch._ops.OpOverload, arguments: tuple[Any, ...], anchor: Tensor, backend: str) -> Any:
    """Runs an op on the device of `anchor`, or its reference. If the arguments are refused, the fake explains why.

    Tangents are refused here, for all ops: only references have a forward-mode derivative, and not all of them.
    """
    name = op._opname
    spec = OPS[name]
    for at, flag in spec.flags:  # torch would take a number
        check_flag(name, flag, arguments[at])
    if not PLAIN.issuperset(map(type, arguments)) and not torch.compiler.is_compiling():
        arguments = tuple(map(plain, arguments))  # torch would take a float32 of NumPy for an int, and round it
    for at, number in spec.numbers:  # torch would round an int
        if type(arguments[at]) is int:
            check_fits_float(name, number, arguments[at])
    if spec.gradients != "own" and torch.is_grad_enabled():
        arguments = _without_gradients(spec, arguments, backend)
    try:
        choice = backends.resolve(name, backend, anchor.device)
        if choice != "reference" or spec.gradients == "none":
            refuse_tangents(name, arguments, reference=spec.gradients != "none")
        if choice != "reference":
            if DEBUG_CHECKS and anchor.is_cuda and choice == "native" and _has_stand_ins(spec, arguments):
                op(*(_values_only(argument) for argument in arguments))
            return run_counted(op, arguments, spec.writes)
    except (RuntimeError, TypeError, AttributeError) as error:
        if spec.mutated and torch._C._are_functorch_transforms_active() and not str(error).startswith("pdkernels."):
            _refuse_transforms(spec)
        if isinstance(anchor, Tensor) and anchor.is_meta:
            return spec.fake(*arguments)
        _explain(spec, arguments, error)
        raise
    spec.check(*arguments)
    if torch.is_grad_enabled() and any(x.requires_grad and x.is_leaf for x in _tensors(arguments, spec.writes)):
        reason = "it writes a leaf that requires a gradient"  # PyTorch would refuse where some is written
        raise NotImplementedError(sentence(name, reason, "Call it under torch.no_grad()."))
    # torch's operators take no int of more than 64 bits for a float.
    return spec.reference(*(float(x) if type(x) is int and not -(2**63) <= x < 2**63 else x for x in arguments))


def _explain(spec: OpSpec, arguments: tuple[Any, ...], error: Exception) -> None:
    """Raises the reason a call failed, if it lies in the arguments. The fake allocates results as the kernel does."""
    try:
        spec.fake(*arguments)
    except RuntimeError as again:
        if isinstance(again, NotImplementedError):
            raise
        error = again
    if type(error) is RuntimeError and any(word in str(error) for word in ("allocate memory", "overflow")):
        remedy = "Pass smaller tensors, or parts of them."
        raise MemoryError(sentence(spec.name, "its results do not fit into memory", remedy)) from None


def _refuse_transforms(spec: OpSpec) -> NoReturn:
    """torch.vmap runs other ops sample by sample, but has no rule for what is written."""
    reason = f"{spec.mutated[0]} cannot be written inside torch.vmap or another transform of torch.func"
    remedy = "Call the op on the whole batch: its tensors have a batch dimension."
    raise NotImplementedError(sentence(spec.name, reason, remedy)) from None


def _without_gradients(spec: OpSpec, arguments: tuple[Any, ...], backend: str) -> tuple[Any, ...]:
    """Without its own gradient an op would silently cut the graph."""
    # Indices first: isinstance(x, Tensor) takes longer than everything else here if x is not a tensor.
    for i in spec.tensors:
        value = arguments[i]
        if value is None:
            continue
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if not isinstance(tensor, Tensor) or not tensor.requires_grad:
                continue
            if spec.gradients == "cut":
                return tuple(x.detach() if isinstance(x, Tensor) and x.requires_grad else x for x in arguments)
            if backend != "reference" or spec.gradients == "none":
                trained = "" if spec.gradients == "none" else ", or train with plain PyTorch (backend='reference')"
                remedy = f"Call it under torch.no_grad(){trained}."
                raise NotImplementedError(
                    message(spec.name, spec.arguments[i], "not require a gradient", "a tensor that does", remedy)
                )
    return arguments


def _has_stand_ins(spec: OpSpec, arguments: tuple[Any, ...]) -> bool:
    """Whether the lists among the arguments are caches. Others, such as packed matrices, have no values to check."""
    return all(not isinstance(x, list) or name in spec.mutated for name, x in zip(spec.arguments, arguments))


def _values_only(argument: Any) -> Any:
    """A stand-in on the CPU: index tensors with their values, caches with their geometry but zero-size rows.

    An op run on stand-ins checks its values and moves nothing.
    """
    if isinstance(argument, list):
        return [torch.empty((*t.shape[:-2], 1, 0), dtype=torch.uint8) for t in argument]
    return argument.to("cpu", copy=True) if isinstance(argument, Tensor) else argument
