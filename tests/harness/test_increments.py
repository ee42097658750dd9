"""No kernel has an address to which an increment was added twice (`tests/harness/increments.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from setup import CUDA_ARCHS
from tests.harness.budgets import FAST_ARCHS, find_cuobjdump, find_nvcc, kept_of, kernel_sources
from tests.harness.increments import SHARED, doubled
from tests.harness.sass import disassemble, functions

# `++next < 16 ? list[next] : 0` as ptxas 13.0 compiles it, wrong for sm_80 and right for sm_100.
WRONG = """
        Function : sm_80
        /*0490*/                   IADD3 R7, R7, 0x1, RZ ;
        /*04a0*/              @!P0 IMAD R10, R0, 0x10, R7 ;
        /*04b0*/              @!P0 LDS.64 R2, [R10.X8+0x8] ;
"""
RIGHT = """
        Function : sm_100
        /*07e0*/              @!P0 IMAD R11, R13.reuse, 0x8, R6 ;
        /*07f0*/                   VIADD R13, R13, 0x1 ;
        /*0800*/              @!P0 LDS.64 R2, [R11+0x8] ;
        /*0810*/                   BSYNC.RECONVERGENT B0 ;
        /*0820*/                   LDS.64 R2, [R13+0x1] ;
"""


def test_a_doubled_increment_is_seen() -> None:
    (wrong,), (right,) = functions(WRONG).values(), functions(RIGHT).values()
    assert doubled(wrong) == ["0x4b0 LDS.64 R2, [R10.X8+0x8]"] and doubled(right) == []


def reader(archs: Sequence[str]) -> Callable[[Path], Any]:
    def read(code: Path) -> dict[str, Any]:
        kernels = {arch: disassemble(code, f"sm_{arch}") for arch in archs}
        return {
            "accesses": sum(x.name.startswith(SHARED) for found in kernels.values() for one in found.values() for x in one),
            "doubled": {f"{arch} {name}": places for arch, found in kernels.items() for name, one in found.items() if (places := doubled(one))},
        }  # fmt: skip

    return read


def check(source: Path, archs: Sequence[str]) -> None:
    found = kept_of(source, "increments", reader(archs), archs)
    assert found["doubled"] == {}
    assert found["accesses"] > 0 or "__shared__" not in source.read_text()


needs_tools = pytest.mark.skipif(find_nvcc() is None or find_cuobjdump() is None, reason="needs nvcc and cuobjdump")
by_source = pytest.mark.parametrize("source", kernel_sources(), ids=lambda source: source.stem)


@needs_tools
@by_source
def test_no_increment_is_doubled(source: Path) -> None:
    check(source, FAST_ARCHS)


@pytest.mark.slow
@needs_tools
@by_source
def test_no_increment_is_doubled_on_any_architecture(source: Path) -> None:
    check(source, CUDA_ARCHS)
