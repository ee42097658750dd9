"""The greedy choice: PyTorch's argmax wherever there is one, in each dtype."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdkernels.generation.noise import greedy

NUMBERS = st.sampled_from([0.0, -0.0, 1.0, 1.0, 2.5, -3.0, float("inf"), float("-inf"), float("nan")])


@given(
    rows=st.integers(1, 5).flatmap(
        lambda n: st.lists(st.lists(NUMBERS, min_size=n, max_size=n), min_size=1, max_size=4)
    )
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_is_the_first_of_the_largest(dtype: torch.dtype, rows: list[list[float]]) -> None:
    logits = torch.tensor(rows, dtype=dtype)[None]
    expected, found = logits.argmax(-1), greedy(logits)
    impossible = logits.isneginf().all(-1)
    assert torch.equal(found[~impossible], expected[~impossible])
    assert found.dtype == torch.int64 and bool((found[impossible] <= 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_of_a_whole_vocabulary(dtype: torch.dtype) -> None:
    """Of 16-bit numbers, many are equal to the largest."""
    logits = torch.randn(3, 2, 50_000, generator=torch.Generator().manual_seed(0)).clamp(max=3.0).to(dtype)
    assert torch.equal(greedy(logits), logits.argmax(-1)) and bool((logits == logits.amax()).sum() > 100)
