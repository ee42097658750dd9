"""What kernels compute with: tensors with a layout, scalars without one, and pointers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as real

from tests.gluonsim.scheduler import Fault

DTYPES = {
    real.bfloat16: torch.bfloat16,
    real.float16: torch.float16,
    real.float32: torch.float32,
    real.float64: torch.float64,
    real.int1: torch.bool,
    real.int8: torch.int8,
    real.int32: torch.int32,
    real.int64: torch.int64,
}
NAMES = {ours: theirs for theirs, ours in DTYPES.items()}


class Value:
    """A tensor as the program sees it. `layout` None: a scalar. Shapes, tuples in place of layouts: found by the compiler."""

    def __init__(self, value: Tensor, layout: Any = None) -> None:
        if (layout is None) != (value.dim() == 0):
            raise Fault(f"a tensor of shape {tuple(value.shape)} has the layout {layout}")
        rank = getattr(layout, "rank", None)
        if rank is not None and rank != value.dim():
            raise Fault(f"a tensor of shape {tuple(value.shape)} has a layout of rank {rank}")
        self.value, self.layout = value, layout

    @property
    def shape(self) -> list[int]:
        return list(self.value.shape)

    @property
    def dtype(self) -> Any:
        return NAMES[self.value.dtype]

    def to(self, dtype: Any) -> Value:
        return Value(self.value.to(DTYPES[dtype]), self.layout)

    def __index__(self) -> int:
        if self.layout is not None:
            raise Fault("a tensor is used as a number")
        return int(self.value)

    def __bool__(self) -> bool:
        if self.layout is not None:
            raise Fault("a tensor is used as a condition")
        return bool(self.value)

    def __getitem__(self, key: Any) -> Value:
        found = self
        for axis, each in enumerate(key if isinstance(key, tuple) else (key,)):
            if each is None:
                found = expand(found, axis)
            elif each != slice(None):
                raise Fault(f"Gluon has no index {each!r}")
        return found

    def __invert__(self) -> Value:
        return Value(~self.value, self.layout)

    def __neg__(self) -> Value:
        return Value(-self.value, self.layout)


def expand(x: Value, axis: int) -> Value:
    layout = x.layout
    if not isinstance(layout, real.SliceLayout):
        raise Fault(f"a dimension is added to a tensor whose layout is no slice: {layout}")
    if layout.dim != axis:
        raise Fault(f"dimension {axis} is added to a tensor whose layout is a slice of dimension {layout.dim}")
    return Value(x.value.unsqueeze(axis), layout.parent)


def scalar(x: Any) -> Tensor:
    """A Python number as Triton types it."""
    if isinstance(x, bool):
        return torch.tensor(x)
    if isinstance(x, int):
        return torch.tensor(x, dtype=torch.int32 if -(2**31) <= x < 2**31 else torch.int64)
    return torch.tensor(x, dtype=torch.float32)


def wrap(x: Any) -> Value:
    if isinstance(x, Value):
        return x
    if isinstance(x, (bool, int, float)):
        return Value(scalar(x))
    raise Fault(f"a value is expected, not {x!r}")


def together(*values: Any) -> tuple[list[Tensor], Any]:
    """Operands of one operation, and the layout of its result."""
    found = [wrap(x) for x in values]
    layouts = [x.layout for x in found if x.layout is not None]
    for layout in layouts[1:]:
        if layout != layouts[0]:
            raise Fault(f"operands have different layouts: {layouts[0]} and {layout}")
    ranks = {x.value.dim() for x in found if x.layout is not None}
    if len(ranks) > 1:
        raise Fault(f"operands have ranks {sorted(ranks)}")
    return [x.value for x in found], layouts[0] if layouts else None


def elementwise(function: Callable[..., Tensor], *values: Any) -> Value:
    tensors, layout = together(*values)
    return Value(function(*tensors), layout)


def _divide(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b, rounding_mode="trunc")  # as the hardware, not as Python


def _remainder(a: Tensor, b: Tensor) -> Tensor:
    return torch.fmod(a, b)


OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "truediv": torch.true_divide,
    "floordiv": _divide,
    "mod": _remainder,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "lshift": torch.bitwise_left_shift,
    "rshift": torch.bitwise_right_shift,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "eq": torch.eq,
    "ne": torch.ne,
}


def _method(function: Callable[[Tensor, Tensor], Tensor], swapped: bool) -> Callable[[Value, Any], Any]:
    def method(self: Value, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        return elementwise(function, other, self) if swapped else elementwise(function, self, other)

    return method


for _name, _function in OPERATORS.items():
    setattr(Value, f"__{_name}__", _method(_function, False))
    if _name not in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Value, f"__r{_name}__", _method(_function, True))
Value.__hash__ = None  # type: ignore[assignment]


class Pointer:
    """Into the memory of a tensor, and `offset` elements from its beginning."""

    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, wrap(offset)

    @classmethod
    def of(cls, x: Tensor) -> Pointer:
        extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride())) if x.numel() else 0
        return cls(torch.as_strided(x, (extent,), (1,)))

    @property
    def dtype(self) -> Any:
        return type("pointer", (), {"element_ty": NAMES[self.memory.dtype]})

    def __add__(self, other: Any) -> Pointer:
        # Addresses have 64 bits; what is added to one may have wrapped around before.
        other = wrap(other)
        widened = Value(other.value.to(torch.int64), other.layout)
        return Pointer(self.memory, elementwise(torch.add, self.offset, widened))

    __radd__ = __add__

    def checked(self, mask: Any) -> tuple[Tensor, Tensor, Any]:
        (at, chosen), layout = together(self.offset, True if mask is None else mask)
        at, chosen = torch.broadcast_tensors(at.to(torch.int64), chosen)
        wrong = chosen & ((at < 0) | (at >= self.memory.numel()))
        if wrong.any():
            raise Fault(f"element {int(at[wrong].flatten()[0])} of a tensor with {self.memory.numel()} is accessed")
        return at, chosen, layout

    def load(self, mask: Any = None, other: Any = None) -> Value:
        at, chosen, layout = self.checked(mask)
        if not self.memory.numel():
            found = self.memory.new_zeros(at.shape)
        else:
            found = self.memory[torch.where(chosen, at, 0)]
        if other is not None:
            (given,), _ = together(other)
            found = torch.where(chosen, found, given.to(found.dtype))
        elif not chosen.all():
            found = torch.where(chosen, found, _rubbish(found.dtype))
        return Value(found, layout)

    def store(self, values: Any, mask: Any = None) -> None:
        at, chosen, layout = self.checked(mask)
        (given,), own = together(values)
        if layout is not None and own is not None and layout != own:
            raise Fault(f"a value of layout {own} is stored at addresses of layout {layout}")
        given = given.broadcast_to(at.shape).to(self.memory.dtype)
        self.memory[at[chosen]] = given[chosen]


def _rubbish(dtype: torch.dtype) -> Tensor:
    """What a masked load without `other` returns."""
    return torch.tensor(float("nan") if dtype.is_floating_point else -12345, dtype=dtype)


def reduced(x: Value, axis: int, function: Callable[[Tensor, int], Tensor]) -> Value:
    layout = None if x.value.dim() == 1 else real.SliceLayout(axis, x.layout)
    return Value(function(x.value, axis), layout)


def reshaped(x: Value, shape: Sequence[int]) -> Value:
    return Value(x.value.reshape(*shape), ("reshape", tuple(shape), x.layout))
