"""kv_quantize: every bit of the reference, on every level and device; and what its rows stand for."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import pdkernels as pd
from pdkernels.reference.kv_cache import kv_dequantize
from pdkernels.reference.kv_cache import kv_quantize as reference
from tests.harness.triton_interpreter import requires_triton, triton_device

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LARGEST, SMALLEST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).smallest_normal
STRANGE = [0.0, -0.0, 1e-45, -SMALLEST, 126 * SMALLEST, 127 * SMALLEST, 1e-3, 0.5, LARGEST, -LARGEST]


def numbers(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Rows of very different magnitudes; some are zeros, and some have values that are not finite."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.randn(shape[:-1], generator=generator).mul(6).exp()[..., None]
    rows = x.view(-1, shape[-1])
    rows[::7] = 0
    rows[1::11, 3], rows[2::13, -1], rows[3::17, 0] = math.nan, math.inf, -math.inf
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 24, 40, 64, 128, 200, 512])
def test_every_level_has_the_bits_of_the_reference(level_ops: object, head_dim: int, dtype: torch.dtype) -> None:
    x = numbers(dtype, 2, 37, 3, head_dim)
    assert torch.equal(level_ops.kv_quantize(x), reference(x))


@requires_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 40, 64])
def test_triton_has_the_bits_of_the_reference(head_dim: int, dtype: torch.dtype) -> None:
    from pdkernels.triton.kv_cache import quantize

    x = numbers(dtype, 2, 21, 3, head_dim).to(triton_device())
    wide = torch.cat([x, x], 2)[:, :, 1:4]
    for given_ in (x, x.transpose(0, 1), wide):
        assert torch.equal(quantize(given_).cpu(), reference(given_.cpu()))


@settings(max_examples=200)
@given(values=st.lists(st.one_of(st.sampled_from(STRANGE), st.floats(width=32)), min_size=16, max_size=16))
def test_any_row(values: list[float]) -> None:
    x = torch.tensor(values).view(1, 1, 16)
    assert torch.equal(pd.kv_quantize(x), reference(x))


@settings(max_examples=100)
@given(values=st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=16, max_size=16))
def test_no_number_is_further_from_its_own_than_half_a_step(values: list[float]) -> None:
    x = torch.tensor(values).view(1, 1, 16)
    found = kv_dequantize(pd.kv_quantize(x), torch.float64)
    step = max(float(x.abs().max()) / 127, SMALLEST)  # below that a row counts as zeros
    assert float((found - x).abs().max()) <= step * (0.5 + 1e-4)


def test_halves_between_two_codes_are_rounded_to_even() -> None:
    x = torch.zeros(1, 1, 16)
    x[0, 0, :8] = torch.tensor([127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5])
    assert pd.kv_quantize(x)[0, 0, :8].tolist() == [127, 0, 2, 2, 0, -2, -2, 126]


@pytest.mark.parametrize("shape", [(2, 5, 3, 24), (5, 3, 24)])
def test_rows_depend_on_themselves_alone(shape: tuple[int, ...]) -> None:
    """In any strides, with packed rows or a batch."""
    x = numbers(torch.bfloat16, *shape)
    found = pd.kv_quantize(x)
    assert found.shape == (*shape[:-1], 28) and found.dtype == torch.int8 and found.is_contiguous()
    single = [pd.kv_quantize(row.view(1, 1, 24)).flatten() for row in x.reshape(-1, 24)]
    assert torch.equal(found.view(-1, 28), torch.stack(single))
    turned = x.transpose(-2, -3).contiguous().transpose(-2, -3)
    assert not turned.is_contiguous() and torch.equal(pd.kv_quantize(turned), found)


def test_rows_of_no_token() -> None:
    assert pd.kv_quantize(torch.empty(0, 5, 2, 16)).shape == (0, 5, 2, 20)
    assert pd.kv_quantize(torch.empty(2, 0, 2, 16)).shape == (2, 0, 2, 20)


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (torch.zeros(2, 16), ValueError, r"x must have shape \(batch, rows, heads, head_dim\) or"),
        (torch.zeros(1, 1, 20), ValueError, "head_dim must be a multiple of 8 in"),
        (torch.zeros(1, 1, 8), ValueError, "head_dim must be a multiple of 8 in"),
        (torch.zeros(1, 16, 16, 2)[..., 0].unsqueeze(0).transpose(-1, -2), ValueError, "contiguous last dimension"),
        (torch.zeros(1, 1, 16, dtype=torch.int8), TypeError, "x must be float32, float16 or bfloat16, got torch.int8"),
        (torch.zeros(1, 1, 16, dtype=torch.float64), TypeError, "float32, float16 or bfloat16"),
        (torch.zeros(1, 1, 16, requires_grad=True), NotImplementedError, "not require a gradient"),
    ],
)
def test_errors(x: Tensor, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"pdkernels.kv_quantize: .*{words}"):
        pd.kv_quantize(x)
