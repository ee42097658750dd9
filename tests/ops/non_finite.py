"""What an op has to do with a NaN or an infinity: it shows wherever the result depends on that number, and nowhere else.

Which results depend on a number is found with the plain reference, by giving it other finite values.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pdkernels.ops._library import OPS
from tests.ops.examples import is_float, raw_arguments, tensors_in

Raw = tuple[Any, ...]
CHANGES = [1.0, -2.5, 40.0, -40.0]
# Their floats rank rows or tokens, and NaN has a documented rank; the numbers themselves are not in the results.
RANKED = {"select_stale_rows_", "unmask_"}


def raw(op: str, dtype: torch.dtype) -> Raw:
    arguments, options = raw_arguments(op, dtype)
    assert not options
    return arguments


def results(function: Callable[..., Any], op: str, arguments: Raw) -> list[Tensor]:
    """The floats that a call returns and writes."""
    own = tuple(_copy(x) for x in arguments)
    found = tensors_in(function(*own))
    written = [own[OPS[op].arguments.index(name)] for name in OPS[op].written]
    flat = [*found, *(x for one in written for x in (one if isinstance(one, (list, tuple)) else [one]))]
    return [x for x in flat if is_float(x)]


def _copy(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return type(x)(_copy(one) for one in x)
    return x.clone() if isinstance(x, Tensor) else x


def _wide(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return type(x)(_wide(one) for one in x)
    return x.float() if is_float(x) else x


def _floats(arguments: Raw) -> list[Tensor]:
    flat = [x for one in arguments for x in (one if isinstance(one, (list, tuple)) else [one])]
    return [x for x in flat if is_float(x)]


def _with(arguments: Raw, which: int, at: int, change: Callable[[float], float]) -> Raw:
    changed = tuple(_copy(x) for x in arguments)
    numbers = _floats(changed)[which].view(-1)
    numbers[at] = change(float(numbers[at]))
    return changed


def cases(op: str, dtype: torch.dtype, places: int = 3) -> Iterator[tuple[str, Raw, int, int]]:
    """Arguments, and a float among them: number `at` of tensor `which`."""
    arguments, rng = raw(op, dtype), random.Random(op)
    arguments = tuple(_contiguous(x) for x in arguments)
    for which, tensor in enumerate(_floats(arguments)):
        for at in {0, tensor.numel() - 1, *(rng.randrange(tensor.numel()) for _ in range(places))}:
            yield f"tensor {which}, number {at}", arguments, which, at


def _contiguous(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return type(x)(_contiguous(one) for one in x)
    return x.contiguous() if isinstance(x, Tensor) else x


def check(function: Callable[..., Any], op: str, dtype: torch.dtype, places: int = 3) -> int:
    """How many results depended on a number that was replaced by NaN. Each of them has to be NaN.

    Others are NaN only where the formula has the number times an exact 0, as in the reference, and else as they were.
    """
    reference, seen = OPS[op].reference, 0
    for name, arguments, which, at in cases(op, dtype, places):
        clean = results(function, op, arguments)
        spoiled = results(function, op, _with(arguments, which, at, lambda x: torch.nan))
        wide = tuple(_wide(x) for x in arguments)
        plain = results(reference, op, wide)
        undefined = results(reference, op, _with(wide, which, at, lambda x: torch.nan))
        depend = [torch.zeros_like(x, dtype=torch.bool) for x in plain]
        for change in CHANGES:
            other = results(reference, op, _with(wide, which, at, lambda x: x + change))  # noqa: B023
            for found, a, b in zip(depend, plain, other):
                found |= (a != b) & ~(a.isnan() & b.isnan())
        assert len(clean) == len(spoiled) == len(depend)
        for number, (before, after, found, may) in enumerate(zip(clean, spoiled, depend, undefined)):
            where = f"{op} in {dtype}, NaN in {name}, result {number}"
            assert after[found].isnan().all(), f"{where}: {int((~after[found].isnan()).sum())} are no NaN"
            apart = ~found & ~may.isnan()
            assert torch.allclose(after[apart], before[apart], rtol=0.01, atol=0.01, equal_nan=True), f"{where}: others differ"
            seen += int(found.sum())
    return seen


def check_infinities(function: Callable[..., Any], op: str, dtype: torch.dtype, places: int = 3) -> None:
    """Infinities give the numbers that are not finite in the formula, and no others."""
    for name, arguments, which, at in cases(op, dtype, places):
        for value in (torch.inf, -torch.inf):
            changed = _with(arguments, which, at, lambda x: value)  # noqa: B023
            found = results(function, op, changed)
            wanted = results(OPS[op].reference, op, tuple(_wide(x) for x in changed))
            for number, (a, b) in enumerate(zip(found, wanted)):
                where = f"{op} in {dtype}, {value} in {name}, result {number}"
                for kind in (torch.isnan, torch.isposinf, torch.isneginf):
                    assert torch.equal(kind(a), kind(b)), f"{where}: {kind.__name__} {int(kind(a).sum())}, not {int(kind(b).sum())}"
