"""Checks and small steps that builders share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from pdkernels import _validation
from pdkernels._validation import check_choice, check_flag, fail

# Masks lie in the computer's memory, whatever torch's default device is.
arange = partial(torch.arange, device="cpu")

# Longer masks do not fit the 32-bit numbers of a plan.
MOST_TOKENS = 2**31 - 1


def integer(builder: str, argument: str, value: object, least: int) -> int:
    """The value as a Python int, at least `least`."""
    number = _validation.integer(f"masks.{builder}", argument, value, least)
    if number > MOST_TOKENS:
        fail(f"masks.{builder}", argument, "be less than 2**31", number)
    return number


def flag(builder: str, argument: str, value: object) -> bool:
    check_flag(f"masks.{builder}", argument, value)
    return bool(value)


def choice(builder: str, argument: str, value: object, known: Sequence[str]) -> None:
    check_choice(f"masks.{builder}", argument, value, known)


def blocks(length: int, block_size: int) -> list[int]:
    """Lengths of the blocks of a run; the last may be shorter."""
    return [min(block_size, length - start) for start in range(0, length, block_size)]


def inverse(permutation: Tensor) -> Tensor:
    result = torch.empty_like(permutation)
    result[permutation] = arange(len(permutation))
    return result
