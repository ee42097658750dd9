"""Choices of arguments that the calls of several functions share: see `tests.harness.specialisations`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Choices = dict[str, Sequence[Any]]
DTYPES = ("float16", "bfloat16", "float32")
INDEX = ("int32", "int64")
ABSENT = None
# Two widths of a head where its dimension is no power of two; each row of the tables of blockings.
HEAD_DIMS = (16, 40, 64, 96, 128, 192, 256, 320, 512)
LAYOUTS = ("contiguous", "shifted", "far")
"""`shifted`: addresses that are multiples of an element only. `far`: strides of dimensions of size 1 beyond 32 bits."""


def index(values: Sequence[Any]) -> Sequence[Any]:
    """An index tensor that may be absent: None, or one of `values` in both dtypes."""
    return (ABSENT, *itertools.product(values, INDEX))


def zeros(layout: str, *shape: int, dtype: str) -> Tensor:
    kind = getattr(torch, dtype)
    if layout == "shifted":
        return torch.empty(torch.Size(shape).numel() + 1, dtype=kind)[1:].view(shape)
    if layout == "transposed":
        return torch.empty(shape[::-1], dtype=kind).T
    x = torch.empty(shape, dtype=kind)
    if layout == "far":
        strides = [2**32 if size == 1 and at < len(shape) - 1 and at != len(shape) - 3 else stride
                   for at, (size, stride) in enumerate(zip(shape, x.stride()))]  # fmt: skip
        return x.as_strided(shape, strides)
    return x
