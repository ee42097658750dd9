"""Matrices of whole numbers with scales in groups, as quantised checkpoints store them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple, NoReturn, Protocol, TypeAlias

import torch
from torch import Tensor

from pdkernels._validation import fail, message
from pdkernels.models.files.fields import OP, Fields, shown
from pdkernels.models.files.patterns import Budget, InvalidPattern, Pattern, UnsupportedPattern
from pdkernels.ops.quantized_weight import GROUP

Role: TypeAlias = Literal["linear", "head", "embedding"]
"""What a matrix is to its model: a linear layer, the one before the logits, or a table of tokens."""
CONFIG_FIELDS = ("quantization_config", "compression_config")
"""Where a config.json describes quantised matrices. The second is an older name that compressed-tensors had."""
FLOATS = ("float16", "bfloat16", "float32")
WORDS = ("I32",)
MATRIX = "matrix"
"""The op of errors about one matrix, which whoever reads it replaces by its name."""
MADE = "It may go if it only tells how the weights were made."
_NAMES = "List the modules' names instead."


class Needed(NamedTuple):
    """A tensor of a quantised matrix: what its shape and dtype must be."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    optional: bool = False


class Integers(NamedTuple):
    """``scale * (code - zero)``."""

    codes: Tensor
    """``(outputs, width)`` uint8."""
    scales: Tensor
    """``(outputs, groups)`` of any float dtype; the numbers are meant to be rounded to it."""
    zeros: Tensor
    """``(outputs, groups)`` uint8."""
    bits: int
    group: int
    """Columns that share a scale; 0: all."""


class Format(Protocol):
    """How one matrix `(outputs, width)` lies in tensors, which are named by what follows the module's name and a
    dot."""

    @property
    def name(self) -> str: ...

    def tensors(self, outputs: int, width: int) -> Mapping[str, Needed]: ...

    def read(self, tensor: Callable[[str], Tensor | None], outputs: int, width: int) -> Integers:
        """From tensors that have been checked to be as needed; None for one that is not there."""
        ...


class Scheme(Protocol):
    """Which matrices of a checkpoint are quantised, and how."""

    def format_of(self, module: str, role: Role = "linear") -> Format | None:
        """Of the module with this published name; None: it holds numbers."""
        ...

    def may_hold_numbers(self, module: str) -> bool:
        """Whether a layer with a format holds numbers all the same, if the file has them."""
        ...


def fields_of_words(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` numbers of 4 or 8 bits in each row of int32 words, the lowest bits first; uint8."""
    # One word for each row of a transposed tensor lies as it should, and has another stride.
    data = packed.reshape(-1).view(torch.uint8).view(len(packed), -1)
    return (data if bits == 8 else torch.stack((data & 15, data >> 4), -1).flatten(1))[:, :count]


def words_for(count: int, bits: int) -> int:
    return -(-count * bits // 32)


def groups_of(width: int, group: int) -> int:
    return -(-width // group) if group else 1


def group_size(fields: Fields, name: str, value: object) -> int:
    """Columns that share a scale, 0 for -1: all of them."""
    if type(value) is not int or (value != -1 and (value < GROUP or value % GROUP or value > 1 << 20)):
        refuse(fields, name, f"be -1 or a multiple of {GROUP}", value)
    return max(int(value), 0)


def refuse(fields: Fields, name: str, expectation: str, actual: object, remedy: str = "") -> NoReturn:
    """NotImplementedError for an option that our models do not follow."""
    raise NotImplementedError(message(OP, f"{fields.where}: {name}", expectation, shown(actual), remedy))


def refuse_others(fields: Fields, supported: Iterable[str]) -> None:
    """What an unknown field asks for might be ignored otherwise."""
    supported = {*supported}
    other = next((name for name in fields.values if name not in supported), None)
    if other is not None:
        refuse(fields, shown(other), "be absent", fields.get(other), MADE)


class NamePattern:
    """A regular expression from a file, which names modules from their start on."""

    def __init__(self, fields: Fields, field: str, text: str, budget: Budget) -> None:
        self.text = text
        self._fields, self._field = fields, field
        try:
            self._pattern = Pattern(text, budget)
        except UnsupportedPattern as error:
            self._refuse(error)

    def matches(self, module: str) -> bool:
        try:
            return self._pattern.matches(module)
        except UnsupportedPattern as error:
            self._refuse(error)

    def matches_part(self, module: str) -> bool:
        """Whether it matches from the start up to the end, or up to a dot or after one."""
        ends = {len(module), *(at + after for at, letter in enumerate(module) if letter == "." for after in (0, 1))}
        try:
            return any(self._pattern.matches(module[:end], to_end=True) for end in sorted(ends))
        except UnsupportedPattern as error:
            self._refuse(error)

    def _refuse(self, error: UnsupportedPattern) -> NoReturn:
        where, expectation = f"{self._fields.where}: {self._field}", f"hold other patterns than {shown(self.text)}"
        if isinstance(error, InvalidPattern):
            fail(OP, where, expectation, error, _NAMES)
        raise NotImplementedError(message(OP, where, expectation, error, _NAMES))
