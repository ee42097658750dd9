"""Checks and small steps that builders share."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from pdkernels._validation import check_type, fail, message


# Longer masks do not fit the 32-bit numbers of a plan.
MOST_TOKENS = 2**31 - 1


def integer(builder: str, argument: str, value: object, least: int) -> int:
    """The value as a Python int, at least `least`."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(message(f"masks.{builder}", argument, "be an integer", type(value).__name__))
    if number < least:
        fail(f"masks.{builder}", argument, f"be {least} or more", number)
    if number > MOST_TOKENS:
        fail(f"masks.{builder}", argument, "be less than 2**31", number)
    return number


def flag(builder: str, argument: str, value: object) -> bool:
    check_type(isinstance(value, bool), f"masks.{builder}", argument, "be a bool", type(value).__name__)
    return bool(value)


def choice(builder: str, argument: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        fail(f"masks.{builder}", argument, f"be one of {', '.join(map(repr, known))}", repr(value))


def blocks(length: int, block_size: int) -> list[int]:
    """Lengths of the blocks of a run; the last may be shorter."""
    return [min(block_size, length - start) for start in range(0, length, block_size)]


def inverse(permutation: Tensor) -> Tensor:
    result = torch.empty_like(permutation)
    result[permutation] = torch.arange(len(permutation))
    return result
