"""Absurd values of the numbers and strings of every op, and tensors of unlike modes: an error of ours, or a result."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from pdkernels.masks import TilePlan
from pdkernels.ops.library import OPS
from tests.decoding.test_absurd_options import VALUES
from tests.ops.examples import PUBLIC, example, floats_of, run

NUMBERS = [
    (op, name)
    for op in PUBLIC
    for name, parameter in inspect.signature(getattr(pd, op)).parameters.items()
    if name not in ("group", "backend") and not isinstance(example(op).get(name), (Tensor, TilePlan, list))
]


@pytest.mark.parametrize(("op", "name"), NUMBERS)
def test_absurd_numbers(op: str, name: str) -> None:
    for value in VALUES:
        for backend in ("auto", "reference"):
            try:
                run(op, example(op) | {name: value}, backend=backend)
            except (ValueError, TypeError, NotImplementedError, MemoryError) as error:
                assert str(error).startswith(f"pdkernels.{op}: "), (value, backend, error)


def fresh(op: str, kind: str) -> dict[str, Any]:
    """Example arguments whose floats are inference tensors ("inference"), record gradients ("grad"), or neither."""
    with torch.inference_mode(kind == "inference"):
        made = example(op)
    if kind == "grad":
        for name in floats_of(op):
            if name not in OPS[op].mutated:
                made[name] = made[name].detach().clone().requires_grad_()
    return made


@pytest.mark.parametrize("op", PUBLIC)
def test_inference_tensors_beside_others(op: str) -> None:
    floats = floats_of(op)
    for name in floats:
        for of_one, of_others in (("inference", "grad"), ("grad", "inference"), ("inference", "plain")):
            for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
                arguments = fresh(op, of_others) | {name: fresh(op, of_one)[name]}
                with mode():
                    try:
                        run(op, arguments)
                    except (ValueError, TypeError, NotImplementedError) as error:
                        assert str(error).startswith(f"pdkernels.{op}: "), (name, of_one, of_others, error)
