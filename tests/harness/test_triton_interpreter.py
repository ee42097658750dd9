"""Two small real kernels, interpreted or compiled: odd sizes, masks, fp32 accumulation."""

from __future__ import annotations

import pytest
import torch

from tests.harness.error_budget import assert_within_budget
from tests.harness.triton_interpreter import dot_dtypes, interpreted, triton_device

triton = pytest.importorskip("triton", reason="needs triton")
import triton.language as tl  # noqa: E402


@triton.jit
def softmax_kernel(x, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    values = tl.load(x + row * columns + at, mask=inside, other=float("-inf")).to(tl.float32)
    weights = tl.exp(values - tl.max(values, axis=0))
    tl.store(out + row * columns + at, weights / tl.sum(weights, axis=0), mask=inside)


@triton.jit
def matmul_kernel(a, b, out, M, N, K, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, K, BLOCK):
        across, down = start + tl.arange(0, BLOCK)[None, :], start + tl.arange(0, BLOCK)[:, None]
        left = tl.load(a + rows * K + across, mask=(rows < M) & (across < K), other=0.0)
        right = tl.load(b + down * N + columns, mask=(down < K) & (columns < N), other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    tl.store(out + rows * N + columns, total, mask=(rows < M) & (columns < N))


@triton.jit
def plus_one(x):
    return x + 1


@triton.jit
def helper_kernel(out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, plus_one(plus_one(at)) + tl.max(at, axis=0), mask=at < BLOCK - 1)


@triton.jit
def part_kernel(out, skipped, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, at, mask=(at < BLOCK - 1) & (skipped == 0))


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(triton_device(), dtype)


def test_kernels_run_where_the_mode_says() -> None:
    assert interpreted() or torch.cuda.is_available()
    assert type(softmax_kernel).__name__ == ("InterpretedFunction" if interpreted() else "JITFunction")


def test_the_language_is_as_before_after_a_launch() -> None:
    """Calls of helpers find it patched, in a second launch too."""
    before = tl.store, tl.core.store, tl.core.where, tl.tensor.__add__
    for _ in range(2):
        out = torch.zeros(8, dtype=torch.int32, device=triton_device())
        helper_kernel[(1,)](out, BLOCK=8)
        assert out.tolist() == [9, 10, 11, 12, 13, 14, 15, 0]
        assert before == (tl.store, tl.core.store, tl.core.where, tl.tensor.__add__)


def test_a_scalar_may_be_part_of_a_mask() -> None:
    """Triton 3.9 interprets masks of booleans only."""
    for skipped, stored in ((0, [0, 1, 2, -1]), (2, [-1] * 4)):
        out = torch.full((4,), -1, dtype=torch.int32, device=triton_device())
        part_kernel[(1,)](out, skipped, BLOCK=4)
        assert out.tolist() == stored


@pytest.mark.skipif(not interpreted(), reason="needs the interpreter")
def test_a_scalar_stays_a_boolean_over_a_block() -> None:
    numpy, interpreter = pytest.importorskip("numpy"), pytest.importorskip("triton.runtime.interpreter")
    truth = interpreter.TensorHandle(numpy.array([True]), tl.int32)  # the type that it gives a comparison
    spread = interpreter.InterpreterBuilder().create_splat(tl.block_type(tl.int1, [4]), truth)
    assert spread.data.dtype == bool and spread.data.all()


@pytest.mark.parametrize("columns", [1, 63, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_masked_softmax(columns: int, dtype: torch.dtype) -> None:
    x = randn(7, columns, dtype=dtype)
    out = torch.full_like(x, float("nan"))
    softmax_kernel[(7,)](x, out, columns, BLOCK=triton.next_power_of_2(columns))
    assert_within_budget(out, x.double().softmax(1), x.softmax(1), name="softmax")


@pytest.mark.parametrize("shape", [(33, 17, 50), (16, 16, 16), (1, 40, 7)])
@pytest.mark.parametrize("dtype", dot_dtypes())
def test_tiled_matmul(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, n, k = shape
    a, b = randn(m, k, dtype=dtype), randn(k, n, dtype=dtype)
    out = torch.full((m, n), float("nan"), dtype=dtype, device=a.device)
    matmul_kernel[(triton.cdiv(m, 16), triton.cdiv(n, 16))](a, b, out, m, n, k, BLOCK=16)
    assert_within_budget(out, a.double() @ b.double(), a @ b, name="matmul")
