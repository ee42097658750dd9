"""Every CUDA kernel compiles for every architecture within its budget of registers and shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from setup import CUDA_ARCHS
from tests.harness.budgets import (
    FAST_ARCHS,
    INCLUDE_DIRS,
    code_in,
    compile_kernels,
    find_cuobjdump,
    find_nvcc,
    kernel_sources,
    load_budgets,
    measure,
    problems,
)


def check(source: Path, archs: Sequence[str]) -> None:
    found = problems(source.name, measure(source, archs=archs), load_budgets().get(source.name, {}))
    assert not found, "\n" + "\n".join(found)


@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc (no GPU)")
@pytest.mark.parametrize("source", kernel_sources(), ids=lambda source: source.stem)
def test_kernels_stay_within_budget(source: Path) -> None:
    """On one architecture, in the tests that are run all the time."""
    check(source, FAST_ARCHS)


@pytest.mark.slow
@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc (no GPU)")
@pytest.mark.parametrize("source", kernel_sources(), ids=lambda source: source.stem)
def test_kernels_stay_within_budget_on_every_architecture(source: Path) -> None:
    check(source, CUDA_ARCHS)


@pytest.mark.slow
@pytest.mark.skipif(find_nvcc() is None or find_cuobjdump() is None, reason="needs nvcc and cuobjdump")
@pytest.mark.parametrize("source", kernel_sources(), ids=lambda source: source.stem)
def test_code_for_every_architecture_and_ptx(source: Path, tmp_path: Path) -> None:
    """Also if the library is built without CUDA kernels."""
    code = compile_kernels(source, INCLUDE_DIRS, CUDA_ARCHS)
    compiled, ptx = code_in(code, tmp_path)
    assert compiled == {code.stem: set(CUDA_ARCHS)} and {"80", "90a", "100"} <= set(CUDA_ARCHS)
    assert ptx == {f"{code.stem}.sm_{CUDA_ARCHS[-1]}"}


@pytest.mark.slow
@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc (no GPU)")
@pytest.mark.parametrize("source", kernel_sources(), ids=lambda source: source.stem)
def test_every_kernel_compiles_for_later_gpus_too(source: Path) -> None:
    """Wheels hold PTX for them: every kernel that is launched, with what fits into a block of any GPU."""
    measured = measure(source, archs=["120"])
    assert measured.keys() == load_budgets()[source.name].keys()
    for kernel, found in measured.items():
        registers = (
            255 if kernel.startswith(("token_row_kernel<float", "token_cut_kernel<float")) else 128
        )  # 256, 512 threads
        assert found["sm_120"].registers <= registers and found["sm_120"].shared <= 48 * 1024, kernel


def test_no_budget_for_a_file_that_is_gone() -> None:
    gone = load_budgets().keys() - {source.name for source in kernel_sources()}
    assert not gone, f"remove {sorted(gone)} from tests/compile_budgets.json"
