"""Absurd values of every option of every method: an error of ours, or a generation that ends."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

import pdkernels as pd
from pdkernels.decoding import available, generate
from pdkernels.decoding.methods import METHODS
from tests.harness.sessions import FILTERS
from tests.support.plans import example

VALUES: list[Any] = [
    2**64,
    2**70,
    -(2**70),
    -1,
    0,
    float("nan"),
    float("inf"),
    float("-inf"),
    1e308,
    1e-320,
    10**400,
    True,
    "x",
    "",
    None,
    [],
    {},
    object(),
    1 + 2j,
    numpy.float64("nan"),
    numpy.float32(0.5),
    numpy.float64(1e300),
    numpy.int64(2),
    numpy.uint64(2**64 - 1),
    numpy.bool_(True),
    numpy.ones(3),
    torch.tensor(2),
    torch.tensor(0.5),
    torch.tensor(float("nan")),
    torch.ones(3),
]
# Every method takes these from `generate`.
SHARED = ("max_new_tokens", "end_tokens", "on_tokens", "trace", "overflow", "infill", *FILTERS, "stop_strings")
CASES = [(method, option) for method in available() for option in METHODS[method].options]
CASES += [(method, option) for method in ("autoregressive", "jacobi", "llada", "recurrent_static") for option in SHARED]


FEW = [2**70, float("nan"), 10**400, numpy.ones(3)]


def test_numbers_of_numpy_are_those_of_python() -> None:
    model = pd.models.load("tiny-code")
    options = {
        "max_new_tokens": 6,
        "temperature": 0.5,
        "top_k": 9,
        "seed": 3,
        "repetition_penalty": 1.5,
        "page_size": 4,
    }
    expected = generate(
        model, "import o", "jacobi", block_size=4, suppress_tokens=[10], logit_bias={32: 2.0}, **options
    )
    numbers = {name: numpy.asarray(value)[()] for name, value in options.items()}
    numbers |= {"suppress_tokens": numpy.array([10]), "logit_bias": {numpy.int64(32): numpy.float32(2)}}
    found = generate(model, "import o", "jacobi", block_size=numpy.int32(4), **numbers)
    assert found.text == expected.text and found.stats.forwards == expected.stats.forwards
    with pytest.raises(TypeError, match="max_new_tokens must be an int, got float"):
        generate(model, "import o", max_new_tokens=numpy.float64(6))


@pytest.mark.parametrize("values", [FEW, pytest.param(VALUES, marks=pytest.mark.slow)], ids=["few", "all"])
@pytest.mark.parametrize(("method", "option"), CASES)
def test_absurd_values(method: str, option: str, values: list[Any]) -> None:
    model = example(METHODS[method])
    drawn = option != "temperature" and "temperature" in METHODS[method].options
    for value in values:
        for more in [{"temperature": 0.5}] * drawn + [{}] * (values is VALUES or not drawn):
            options = {"max_new_tokens": 3, "end_tokens": (), **more, option: value}
            try:
                generate(model, [[52, 43, 49], [12, 7]], method, **options)
            except (ValueError, TypeError, NotImplementedError) as error:
                # Longer than a line only where a value is.
                assert str(error).startswith("pdkernels."), (value, error)
                assert type(error) is not OverflowError, (value, error)
