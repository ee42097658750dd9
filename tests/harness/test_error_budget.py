from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.error_budget import assert_within_budget

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
dtypes = st.sampled_from(FLOATS)
seeds = st.integers(0, 2**32 - 1)
scales = st.sampled_from([1e-6, 1e-3, 1.0, 50.0])


def values(seed: int, dtype: torch.dtype, scale: float, *shape: int) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale).to(dtype)


@given(seed=seeds, dtype=st.sampled_from(FLOATS[:3]), scale=scales, columns=st.integers(1, 70))
def test_another_order_of_summation_passes(seed: int, dtype: torch.dtype, scale: float, columns: int) -> None:
    """An equally good kernel: the same roundings in another order."""
    x = values(seed, dtype, scale, 256, columns)
    forwards, backwards = torch.zeros(256, dtype=dtype), torch.zeros(256, dtype=dtype)
    for column in range(columns):
        forwards += x[:, column]
        backwards += x[:, columns - 1 - column]
    assert_within_budget(backwards, x.double().sum(1), forwards, name="sum")


@given(seed=seeds, dtype=dtypes, scale=scales)
def test_pytorch_itself_and_the_rounded_oracle_pass(seed: int, dtype: torch.dtype, scale: float) -> None:
    x = values(seed, dtype, scale, 7, 9)
    oracle = x.double().softmax(1)
    pytorch = x.softmax(1)
    assert_within_budget(pytorch, oracle, pytorch, name="PyTorch")
    assert_within_budget(oracle.to(dtype), oracle, pytorch, name="oracle")


@given(seed=seeds, dtype=dtypes, row=st.integers(0, 6), column=st.integers(0, 8), ulps=st.integers(16, 1000))
def test_one_wrong_element_fails_and_is_named(seed: int, dtype: torch.dtype, row: int, column: int, ulps: int) -> None:
    x = values(seed, dtype, 1.0, 7, 9)
    oracle, pytorch = x.double().softmax(1), x.softmax(1)
    wrong = pytorch.clone()
    wrong[row, column] += ulps * torch.finfo(dtype).eps
    with pytest.raises(
        AssertionError, match=rf"wrong \(.*error over budget(.|\n)*worst at \[{row}, {column}\]: kernel"
    ):
        assert_within_budget(wrong, oracle, pytorch, name="wrong")


@given(seed=seeds, dtype=dtypes)
def test_a_small_bias_everywhere_fails(seed: int, dtype: torch.dtype) -> None:
    """No element is worse than PyTorch's worst, but all are off: the root mean square shows it."""
    x = values(seed, dtype, 1.0, 64, 64).clamp(-1, 1)
    eps = torch.finfo(dtype).eps
    pytorch, biased = x.clone(), (x.double() + 3 * eps).to(dtype)
    pytorch[0, 0] += 8 * eps
    with pytest.raises(AssertionError, match="error over budget") as failure:
        assert_within_budget(biased, x.double(), pytorch, name="bias")
    largest, _, allowed = map(float, str(failure.value).splitlines()[2].split()[1:])
    assert largest < allowed


@given(dtype=dtypes, special=st.sampled_from([math.nan, math.inf, -math.inf]), index=st.integers(0, 3))
def test_nan_and_infinities_are_where_the_oracle_has_them(dtype: torch.dtype, special: float, index: int) -> None:
    plain = torch.ones(4, dtype=dtype)
    marked = plain.clone()
    marked[index] = special
    assert_within_budget(marked, marked.double(), marked, name="same")
    message = rf"NaN or infinity in the wrong place, at \[{index}\]"
    with pytest.raises(AssertionError, match=message):
        assert_within_budget(plain, marked.double(), marked, name="lost")
    with pytest.raises(AssertionError, match=message):
        assert_within_budget(marked, plain.double(), plain, name="invented")
    if not math.isnan(special):
        with pytest.raises(AssertionError, match=message):
            assert_within_budget(-marked, marked.double(), marked, name="sign")


def test_overflow_is_right_where_the_oracle_rounds_to_it_or_pytorch_overflows_too() -> None:
    huge = torch.tensor([1e5, 1.0], dtype=torch.float64)
    overflowed = huge.half()
    assert overflowed[0].isinf()
    assert_within_budget(overflowed, huge, overflowed, name="overflow of the result")
    # x * x overflows in fp16 on the way to a small mean: the kernel may overflow too, or be better.
    oracle, pytorch = torch.tensor([40.0], dtype=torch.float64), torch.tensor([math.inf], dtype=torch.float16)
    assert_within_budget(pytorch, oracle, pytorch, name="as PyTorch")
    assert_within_budget(oracle.half(), oracle, pytorch, name="better")
    with pytest.raises(AssertionError, match="error over budget"):
        assert_within_budget(torch.tensor([41.0]).half(), oracle, pytorch, name="finite but wrong")


@given(seed=seeds)
def test_subnormal_results_may_be_off_by_half_the_smallest(seed: int) -> None:
    x = values(seed, torch.float64, 1e-7, 50)
    assert_within_budget(x.half(), x, x.half(), name="subnormal")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool, torch.uint8])
def test_integers_are_exact(dtype: torch.dtype) -> None:
    right = torch.tensor([[0, 1], [1, 0]]).to(dtype)
    wrong = right.clone()
    wrong[1, 1] = 1
    assert_within_budget(right, right, right, name="equal")
    with pytest.raises(
        AssertionError, match=r"ids: 1 of 4 integers differ, first at \[1, 1\]: kernel (1|True), oracle (0|False)"
    ):
        assert_within_budget(wrong, right, right, name="ids")


def test_wrong_use_is_refused() -> None:
    x = torch.ones(3)
    with pytest.raises(AssertionError, match="shapes differ"):
        assert_within_budget(x, x[:2].double(), x, name="x")
    with pytest.raises(AssertionError, match=r"gives torch.float16, PyTorch gives torch.float32"):
        assert_within_budget(x.half(), x.double(), x, name="x")
    with pytest.raises(TypeError, match=r"oracle must be float64, got torch\.float32"):
        assert_within_budget(x, x, x, name="x")
    with pytest.raises(TypeError, match="complex"):
        assert_within_budget(x.to(torch.complex64), x.to(torch.complex64), x.to(torch.complex64), name="x")


def test_scalars_and_empty_tensors() -> None:
    assert (
        assert_within_budget(torch.tensor(1.0), torch.tensor(1.0).double(), torch.tensor(1.0), name="scalar").kernel_max
        == 0
    )
    empty = torch.empty(0, 3)
    assert_within_budget(empty, empty.double(), empty, name="empty")
    with pytest.raises(AssertionError, match=r"worst at \[\]: kernel 2.0, oracle 1.0, PyTorch 1.0"):
        assert_within_budget(torch.tensor(2.0), torch.tensor(1.0).double(), torch.tensor(1.0), name="scalar")
