"""What a warp issues, read from the machine code, for kernels bound by it."""

from __future__ import annotations

from functools import cache

import pytest

from tests.harness.budgets import FAST_ARCHS, INCLUDE_DIRS, compile_kernels, find_cuobjdump, find_nvcc, kernel_sources
from tests.harness.sass import Instruction, cheapest_way, disassemble, functions, mix, outer_loops, steady_loops

needs_tools = pytest.mark.skipif(find_nvcc() is None or find_cuobjdump() is None, reason="needs nvcc and cuobjdump")
LISTING = """
        Function : loop
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA 0x60 ;
        /*0020*/                   MUFU.EX2 R2, R3 ;
        /*0030*/              @P1  EXIT ;
        /*0040*/                   FADD R2, R2, R3 ;
        /*0050*/              @P2  BRA 0x20 ;
        /*0060*/                   EXIT ;
"""


def test_the_cheapest_way_does_the_work() -> None:
    code = functions(LISTING)["loop"]
    assert cheapest_way(code, "MUFU", 0) == 3
    assert cheapest_way(code, "MUFU", 1) == 4
    with pytest.raises(ValueError, match="no way"):
        cheapest_way(code, "MUFU", 2)


def test_loops_with_one_load() -> None:
    (loop,) = outer_loops(functions(LISTING)["loop"], "MUFU")
    assert [x.name for x in loop] == ["MUFU.EX2", "EXIT", "FADD", "BRA", "EXIT"] and not outer_loops(loop, "LDG")
    assert cheapest_way(loop, "FADD", 1) == 5


def test_loops() -> None:
    (loop,) = steady_loops(functions(LISTING)["loop"])
    assert [x.address for x in loop] == [0x20, 0x30, 0x40, 0x50] and mix(loop)["MUFU"] == 1


@cache
def token_statistics_kernels() -> dict[str, list[Instruction]]:
    (source,) = (path for path in kernel_sources() if path.name == "token_statistics.cu")
    return disassemble(compile_kernels(source, INCLUDE_DIRS, FAST_ARCHS), "sm_90a")


# A lane has 64 logits, each of which takes one MUFU.EX2. The whole kernel, from its arguments to its stores: 214 slots for each 512
# logits of a warp, 13.4 for each of a lane, are what the memory bandwidth of an H200 allows.
@needs_tools
@pytest.mark.parametrize("element, most", [("13__nv_bfloat16", 11.5), ("6__half", 11.5), ("f", 12.5)])
def test_token_statistics(element: str, most: float) -> None:
    (code,) = (
        code for name, code in token_statistics_kernels().items() if f"token_region_kernelI{element}Lb1ELb0E" in name
    )
    assert cheapest_way(code, "MUFU.EX2", 64) / 64 <= most
    sums = [x for x in code if x.name.startswith("MUFU.EX2")]
    # The part that is done for each logit: from the first power to the last, without the few instructions around them.
    inside = [x for x in code if sums[0].address <= x.address <= sums[63].address]
    assert len(inside) / 64 <= 8
