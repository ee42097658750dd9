"""What an op has to do with a NaN or an infinity: it shows wherever the result depends on that number, and nowhere else.

Which results depend on a number is found with the plain reference, by giving it other finite values.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pdkernels.ops.library import OPS
from tests.ops.examples import is_float, raw_arguments, tensors_in

Raw = tuple[Any, ...]
CHANGES = [1.0, -2.5, 40.0, -40.0]
INFINITIES = [torch.inf, -torch.inf]
# Their floats rank rows or tokens, and NaN has a documented rank; the numbers themselves are not in the results.
RANKED = {"select_stale_rows_", "unmask_"}
# Their results are bytes, whose scale says that a row is not finite: see tests/ops/test_kv_quantize.py.
IN_BYTES = {"kv_quantize"}
ATTENTION = {"block_sparse_attention", "speculative_attention", "speculative_attention_append_"}


def raw(op: str, dtype: torch.dtype) -> Raw:
    arguments, options = raw_arguments(op, dtype)
    assert not options
    return arguments


def results(function: Callable[..., Any], op: str, arguments: Raw) -> list[Tensor]:
    """The floats that a call returns and writes."""
    own = tuple(_copy(x) for x in arguments)
    found = tensors_in(function(*own))
    written = [own[OPS[op].arguments.index(name)] for name in OPS[op].mutated]
    flat = [*found, *(x for one in written for x in (one if isinstance(one, (list, tuple)) else [one]))]
    return [x for x in flat if is_float(x)]


def plain_form(op: str) -> Callable[..., Any]:
    return function_of(op, lambda name: OPS[name].reference)


def function_of(op: str, find: Callable[[str], Callable[..., Any]]) -> Callable[..., Any]:
    """The raw op that `find` has under its name."""
    if op == "block_sparse_attention_backward":
        return with_own_results(find("block_sparse_attention"), find(op))
    return find(op)


def with_own_results(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward pass of block-sparse attention, after the forward pass of the same numbers."""

    def run(grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, *given: Any) -> Any:
        return backward(grad_out, grad_lse, *forward(*given), *given)

    return run


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


@cache
def _dependent(op: str, dtype: torch.dtype, places: int) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Of each case: which results depend on its number, and the results with NaN there, both by the plain reference."""
    reference, found = plain_form(op), []
    for _, arguments, which, at in cases(op, dtype, places):
        wide = tuple(_wide(x) for x in arguments)
        plain = results(reference, op, wide)
        undefined = results(reference, op, _with(wide, which, at, lambda x: torch.nan))
        depend = [torch.zeros_like(x, dtype=torch.bool) for x in plain]
        for change in CHANGES:
            other = results(reference, op, _with(wide, which, at, lambda x: x + change))  # noqa: B023
            for marks, a, b in zip(depend, plain, other):
                marks |= (a != b) & ~(a.isnan() & b.isnan())
        found.append((depend, undefined))
    return found


@cache
def _by_formula(op: str, dtype: torch.dtype, places: int) -> list[list[Tensor]]:
    """The results of the plain reference with an infinity in each case, first positive, then negative."""
    return [
        results(plain_form(op), op, tuple(_wide(x) for x in _with(arguments, which, at, lambda x: value)))  # noqa: B023
        for _, arguments, which, at in cases(op, dtype, places)
        for value in INFINITIES
    ]


def check_nan(
    function: Callable[..., Any], op: str, dtype: torch.dtype, places: int = 3, *, spreads: bool = False
) -> None:
    """Whatever depends on a number that is replaced by NaN is NaN.

    Others are NaN only where the formula has the number times an exact 0, as in the reference, and else as they were, unless the
    kernel `spreads` what a mask hides.
    """
    seen = 0
    clean = results(function, op, next(cases(op, dtype, places))[1])
    for (name, arguments, which, at), (depend, undefined) in zip(
        cases(op, dtype, places), _dependent(op, dtype, places), strict=True
    ):
        spoiled = results(function, op, _with(arguments, which, at, lambda x: torch.nan))
        assert len(clean) == len(spoiled) == len(depend)
        for number, (before, after, found, may) in enumerate(zip(clean, spoiled, depend, undefined)):
            where = f"{op} in {dtype}, NaN in {name}, result {number}"
            assert after[found].isnan().all(), f"{where}: {int((~after[found].isnan()).sum())} are no NaN"
            apart = ~found & ~may.isnan()
            # In half precision sums go in another order where a number is not finite.
            close = torch.allclose(after[apart], before[apart], rtol=0.05, atol=0.05, equal_nan=True)
            assert spreads or close, f"{where}: others differ"
            seen += int(found.sum())
    assert seen or places < 3, "no number that matters was replaced"


def check_infinities(function: Callable[..., Any], op: str, dtype: torch.dtype, places: int = 3) -> None:
    """Infinities give the numbers that are not finite in the formula, and no others."""
    changes = ((case, value) for case in cases(op, dtype, places) for value in INFINITIES)
    for ((name, arguments, which, at), value), wanted in zip(changes, _by_formula(op, dtype, places), strict=True):
        found = results(function, op, _with(arguments, which, at, lambda x: value))  # noqa: B023
        for number, (a, b) in enumerate(zip(found, wanted)):
            where = f"{op} in {dtype}, {value} in {name}, result {number}"
            if op in ATTENTION and a.dim() == 3:  # log-sum-exp: +inf in the formula, NaN in the kernels, as the row is
                a, b = (x.nan_to_num(torch.inf, torch.inf, -torch.inf) for x in (a, b))
            for kind in (torch.isnan, torch.isposinf, torch.isneginf):
                assert torch.equal(kind(a), kind(b)), f"{where}: {kind.__name__}"
