"""Every CUDA kernel compiles for every architecture within the registers and shared memory it was granted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.budgets import find_nvcc, kernel_sources, load_budgets, measure, problems


@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc (no GPU)")
@pytest.mark.parametrize("source", kernel_sources(), ids=lambda source: source.stem)
def test_kernels_stay_within_budget(source: Path) -> None:
    found = problems(source.name, measure(source), load_budgets().get(source.name, {}))
    assert not found, "\n" + "\n".join(found)


def test_no_budget_for_a_file_that_is_gone() -> None:
    gone = load_budgets().keys() - {source.name for source in kernel_sources()}
    assert not gone, f"remove {sorted(gone)} from tests/compile_budgets.json"
