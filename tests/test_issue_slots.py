"""What a warp issues, read from the machine code, for kernels bound by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.predict.statistics_figures import regions_loop
from tests.harness.budgets import FAST_ARCHS, KERNEL_FOLDER, find_cuobjdump, find_nvcc, kept_of
from tests.harness.sass import cheapest_way, disassemble, functions, mix, outer_loops, steady_loops

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


def slots_for_each_logit(code: Path) -> dict[str, dict[str, float]]:
    """For each type of logits: of a region, and of the part that is done for each logit, from the first power to the last without the few
    instructions around them. A lane has 64 logits, each of which takes one MUFU.EX2."""
    kernels, found = disassemble(code, "sm_90a"), {}
    for element in MOST_SLOTS:
        (kernel,) = (body for name, body in kernels.items() if f"token_row_kernelI{element}Lb1ELb0E" in name)
        region = regions_loop(kernel)
        sums = [x.address for x in region if x.name.startswith("MUFU.EX2")]
        inside = [x for x in region if sums[0] <= x.address <= sums[63]]
        found[element] = {"all": cheapest_way(region, "MUFU.EX2", 64) / 64, "inside": len(inside) / 64}
    return found


# A turn of the loop over regions: 214 slots for each 512 logits of a warp, 13.4 for each of a lane, are what the memory bandwidth of
# an H200 allows.
MOST_SLOTS = {"13__nv_bfloat16": 10, "6__half": 10, "f": 12.5}


@needs_tools
@pytest.mark.parametrize("element", MOST_SLOTS)
def test_token_statistics(element: str) -> None:
    found = kept_of(KERNEL_FOLDER / "token_statistics.cu", "slots", slots_for_each_logit, FAST_ARCHS)[element]
    assert found["all"] <= MOST_SLOTS[element] and found["inside"] <= 8
