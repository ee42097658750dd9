"""linear against float64, and the promise that a row's bits do not depend on the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import pdkernels as pd
from pdkernels.reference.linear import linear as reference
from tests.harness.error_budget import assert_within_budget
from tests.harness.triton_interpreter import interpreted, requires_triton, triton_device
from tests.ops.implementations import LEVELS

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
DTYPES = [
    (x, w) for x in FLOATS for w in FLOATS if w in (x, torch.bfloat16, torch.float16) and (x == w or x == FLOATS[0])
]
SHAPES = [(1, 1, 1), (3, 7, 5), (9, 31, 33), (17, 64, 40), (33, 100, 129), (5, 25, 1030), (70, 24, 2100)]


def inputs(
    rows: int, outputs: int, width: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * 10_007 + outputs * 101 + width)
    x, weight, bias = (
        torch.randn(shape, generator=generator) for shape in ((rows, width), (outputs, width), (outputs,))
    )
    return x.to(dtypes[0]), weight.to(dtypes[1]), bias.to(dtypes[0])


def check(actual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    exact = reference(x.double(), weight.double(), None if bias is None else bias.double())
    assert_within_budget(actual.cpu(), exact, reference(x, weight, bias), name="linear")


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("rows, outputs, width", SHAPES[2:])
def test_within_the_error_budget(rows: int, outputs: int, width: int, dtypes: Any) -> None:
    x, weight, bias = inputs(rows, outputs, width, dtypes)
    check(pd.linear(x, weight, bias), x, weight, bias)
    check(pd.linear(x, weight), x, weight, None)


@pytest.mark.parametrize("level_ops", [*LEVELS, "avx512_bf16"], indirect=True)
@pytest.mark.parametrize("rows, outputs, width", [*SHAPES, (3, 5, 0)])
def test_every_level(level_ops: Any, rows: int, outputs: int, width: int) -> None:
    for dtypes in DTYPES:
        x, weight, bias = inputs(rows, outputs, width, dtypes)
        found = level_ops.linear(x, weight, bias)
        if rows * outputs >= 200:
            check(found, x, weight, bias)
        alone = torch.cat([level_ops.linear(row[None], weight, bias) for row in x])
        assert torch.equal(found, alone)


# More rows than are streamed are multiplied by blocks, whose sums have the same order.
STREAMED = [(25, 96, False), (500, 2100, False), (260, 4100, True), (1200, 576, True)]


@pytest.mark.covering
@pytest.mark.parametrize("level_ops", [*LEVELS, "avx512_bf16"], indirect=True)
@pytest.mark.parametrize("outputs, width, apart", STREAMED)
def test_few_rows_have_the_bits_of_many(level_ops: Any, outputs: int, width: int, apart: bool) -> None:
    check_few_rows(level_ops.linear, outputs, width, apart)


@pytest.mark.parametrize("outputs, width, apart", STREAMED)
def test_few_rows_have_the_bits_of_many_here(outputs: int, width: int, apart: bool) -> None:
    check_few_rows(pd.linear, outputs, width, apart)


def check_few_rows(linear: Any, outputs: int, width: int, apart: bool) -> None:
    for dtypes in DTYPES:
        x, weight, bias = inputs(9, outputs, width, dtypes)
        if apart:  # rows with other numbers between them
            x, weight = (torch.cat((of, of.new_full((len(of), 3), torch.nan)), 1)[:, :-3] for of in (x, weight))
        many = linear(x, weight, bias)
        for rows in (1, 2, 3, 4, 5, 6, 7, 8):
            assert torch.equal(linear(x[:rows], weight, bias), many[:rows]), (dtypes, rows)


def test_every_half_is_multiplied_as_it_is() -> None:
    """Subnormal numbers, infinities and NaN included, for one row and for many."""
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    weight = torch.zeros(1 << 16, 40, dtype=torch.float16)
    weight[torch.arange(1 << 16), torch.arange(1 << 16) % 40] = halves
    x = torch.ones(12, 40, dtype=torch.float16)
    for rows in (1, 12):
        found = pd.linear(x[:rows], weight)
        assert torch.equal(found.isnan(), halves.isnan().expand(rows, -1))
        assert torch.equal(found.nan_to_num(), halves.nan_to_num().expand(rows, -1))
        assert torch.equal(
            pd.linear(x[:rows].float(), weight).nan_to_num(), halves.float().nan_to_num().expand(rows, -1)
        )


@given(data=st.data())
@settings(max_examples=60)
def test_a_row_has_the_same_bits_in_any_batch(data: st.DataObject) -> None:
    dtypes = data.draw(st.sampled_from(DTYPES))
    outputs, width = data.draw(st.integers(1, 80)), data.draw(st.sampled_from([1, 8, 33, 96, 576, 1100]))
    x, weight, bias = inputs(70, outputs, width, dtypes)
    whole = pd.linear(x, weight, bias)
    first = data.draw(st.integers(0, 69))
    last = data.draw(st.integers(first + 1, 70))
    part = pd.linear(x[first:last], weight, bias)
    assert torch.equal(part, whole[first:last])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(data.draw(st.integers(1, 4)))
        assert torch.equal(pd.linear(x, weight, bias), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("level_ops", [*LEVELS, "avx512_bf16"], indirect=True)
def test_subnormal_bfloat16_may_count_as_zero(level_ops: Any) -> None:
    x = torch.full((2, 40), 2.0**-130).bfloat16()
    found = level_ops.linear(x, torch.full((3, 40), 2.0**8).bfloat16(), None)
    assert (found == 40 * 2.0**-122).all() or (found == 0).all()


def test_any_layout_and_shape() -> None:
    x, weight, bias = inputs(24, 50, 64, (torch.float32, torch.float32))
    expected = pd.linear(x, weight, bias)
    assert torch.equal(pd.linear(x.view(2, 3, 4, 64), weight, bias), expected.view(2, 3, 4, 50))
    assert torch.equal(pd.linear(x.T.contiguous().T, weight.T.contiguous().T, bias), expected)
    wide_x, wide_weight = torch.zeros(24, 100), torch.full((50, 90), float("nan"))
    wide_x[:, 3:67], wide_weight[:, 5:69] = x, weight
    assert torch.equal(pd.linear(wide_x[:, 3:67], wide_weight[:, 5:69], bias.repeat_interleave(2)[::2]), expected)
    assert torch.equal(pd.linear(x[:1].expand(5, 64), weight, bias), expected[:1].expand(5, 50))
    assert torch.equal(pd.linear(x[0], weight, bias), expected[0])


@pytest.mark.parametrize("rows, outputs, width", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_nothing(rows: int, outputs: int, width: int) -> None:
    bias = torch.ones(outputs)
    found = pd.linear(torch.zeros(rows, width), torch.zeros(outputs, width), bias)
    assert torch.equal(found, torch.ones(rows, outputs))


def test_infinities_and_nan_stay_in_their_row() -> None:
    x, weight, _ = inputs(6, 40, 96, (torch.bfloat16, torch.bfloat16))
    expected = pd.linear(x, weight)
    x[2, 5], x[4, 95] = float("inf"), float("nan")
    found = pd.linear(x, weight)
    kept = [0, 1, 3, 5]
    assert torch.equal(found[kept], expected[kept])
    assert found[2].isinf().all() and found[4].isnan().all()


@requires_triton
@pytest.mark.parametrize("dtypes", [(d, d) for d in FLOATS[:2]] + [(FLOATS[0], FLOATS[1])], ids=str)
def test_triton(dtypes: Any) -> None:
    from pdkernels.triton.linear import forward

    x, weight, bias = (t.to(triton_device()) for t in inputs(20, 50, 150, dtypes))
    found = forward(x, weight, bias)
    check(found, x.cpu(), weight.cpu(), bias.cpu())
    assert torch.equal(forward(x[3:5], weight, bias), found[3:5])
    assert torch.equal(forward(x, weight, None), forward(x, weight, torch.zeros_like(bias)))


ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"weight": torch.zeros(3, 5)}, ValueError, "linear: weight must have shape (outputs, 4), got (3, 5)."),
    ({"weight": torch.zeros(3)}, ValueError, "linear: weight must have shape (outputs, 4), got (3,)."),
    ({"x": torch.tensor(1.0)}, ValueError, "linear: x must have shape (..., width), got ()."),
    ({"x": torch.zeros(2, 4).half()}, TypeError, "linear: weight must have dtype torch.float16 like x"),
    ({"x": torch.zeros(2, 4).long()}, TypeError, "linear: x must"),
    ({"bias": torch.zeros(2)}, ValueError, "linear: bias must have shape (3), got (2,)."),
    ({"bias": torch.zeros(3).half()}, TypeError, "linear: bias must"),
]


@pytest.mark.parametrize("wrong, error, text", ERRORS)
def test_errors(wrong: dict[str, Any], error: type[Exception], text: str) -> None:
    arguments = {"x": torch.zeros(2, 4), "weight": torch.zeros(3, 4), "bias": torch.zeros(3)} | wrong
    with pytest.raises(error) as caught:
        pd.linear(**arguments)
    assert text in str(caught.value)


@requires_triton
def test_every_tiling_gives_the_bits_of_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from pdkernels.triton import linear

    # Whole numbers: in the interpreter a BLAS multiplies, in an order of its own.
    x, weight = (torch.randint(-4, 5, size).half().to(triton_device()) for size in ((70, 150), (300, 150)))
    few = torch.cat([linear.forward(part, weight, None) for part in x.split(16)])
    assert torch.equal(few, (x.float() @ weight.float().T).half())
    for tiling in linear.ABREAST:
        monkeypatch.setattr(linear, "ABREAST", (tiling,))
        assert torch.equal(linear.forward(x, weight, None), few)


@requires_triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "width", [512, *(pytest.param(width, marks=pytest.mark.slow) for width in (1024, 1536, 2048, 4096))]
)
def test_a_row_does_not_depend_on_their_number_at_any_width(
    width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that choose by the number of rows how to sum up a width of 2^n were reported to differ."""
    from pdkernels.triton.linear import forward

    def by_rows(a: Any, b: Any, dtype: Any) -> Any:
        """As on tensor cores, where a row's sums are the same at any place of a tile. Those of a BLAS are not."""
        return np.stack([(row[:, None] * b.astype(dtype)).sum(0) for row in a.astype(dtype)])

    if interpreted():
        monkeypatch.setattr(np, "matmul", by_rows)
    x, weight, bias = (one.to(triton_device()) for one in inputs(64, 33, width, (dtype, dtype)))
    whole = forward(x, weight, bias)
    check(whole, x.cpu(), weight.cpu(), bias.cpu())
    for rows in (1, 2, 8, 15, 16, 17, 33, 63):
        first = 64 - rows  # at another place of its tile
        assert torch.equal(forward(x[first:], weight, bias), whole[first:])
