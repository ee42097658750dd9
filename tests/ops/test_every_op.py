"""What holds for every defined op, by the example in its definition."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from pdkernels.ops.library import OPS
from tests.ops.examples import PUBLIC, example, is_float, raw_arguments, run, tensors_in


@pytest.mark.parametrize("op", OPS)
def test_opcheck(op: str) -> None:
    arguments, options = raw_arguments(op)
    with torch.no_grad():
        torch.library.opcheck(OPS[op].overload, arguments, options)


@pytest.mark.parametrize("op", OPS)
def test_results_have_names(op: str) -> None:
    names = [result.name for result in OPS[op].overload._schema.returns]
    assert all(names) and len(set(names)) == len(names)


@pytest.mark.parametrize("op", OPS)
def test_an_example_is_the_same_for_the_same_seed(op: str) -> None:
    one, again, other = example(op, 1), example(op, 1), example(op, 2)
    tensors = [name for name, x in one.items() if isinstance(x, Tensor)]
    assert all(torch.equal(one[name], again[name]) for name in tensors)
    assert any(not torch.equal(one[name], other[name]) for name in tensors)
    assert all(one[name].shape == other[name].shape for name in tensors)


@pytest.mark.parametrize("op", PUBLIC)
def test_the_kernel_is_the_reference(op: str) -> None:
    """Closely enough to tell one op from another; each family's tests say how closely."""
    kernel, reference = example(op), example(op)
    found = [*tensors_in(run(op, kernel)), *(kernel[name] for name in OPS[op].mutated)]
    wanted = [*tensors_in(run(op, reference, backend="reference")), *(reference[name] for name in OPS[op].mutated)]
    assert len(found) == len(wanted) > 0
    for a, b in zip(found, wanted):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True) if is_float(a) else torch.equal(a, b)


@pytest.mark.parametrize("op", PUBLIC)
def test_names_are_those_of_the_public_function(op: str) -> None:
    parameters = inspect.signature(getattr(pd, op)).parameters
    assert set(OPS[op].mutated) | set(example(op)) <= set(parameters)


@pytest.mark.parametrize("default", [torch.device("meta"), torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_no_default_changes_a_result(op: str, default: torch.device | torch.dtype) -> None:
    """`torch.set_default_device`, also of a device without numbers, and `torch.set_default_dtype`."""

    def results(arguments: dict[str, Any], options: dict[str, str]) -> list[Tensor]:
        return [*tensors_in(run(op, arguments, **options)), *flat(arguments[name] for name in OPS[op].mutated)]

    def flat(written: Iterable[Any]) -> list[Tensor]:
        return [x for item in written for x in (item if isinstance(item, list) else [item])]

    before = torch.get_default_dtype()
    for options in ({}, {"backend": "reference"}):
        wanted, arguments = results(example(op), options), example(op)
        try:
            if isinstance(default, torch.dtype):
                torch.set_default_dtype(default)
            with default if isinstance(default, torch.device) else nullcontext():
                there = results(arguments, options)
        finally:
            torch.set_default_dtype(before)
        for a, b in zip(there, wanted, strict=True):
            assert a.device == b.device and a.dtype == b.dtype
            assert torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
