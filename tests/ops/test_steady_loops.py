"""The loops in which attention spends its time, by the machine code of sm_90a: what they issue, wait for and spill."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.harness import triton_budgets as harness
from tests.harness.budgets import find_cuobjdump
from tests.harness.sass import Instruction, disassemble, steady_loops
from tests.harness.triton_interpreter import requires_triton
from tests.ops.test_speculative_attention_compiled import compile_variant

pytestmark = [requires_triton, pytest.mark.skipif(find_cuobjdump() is None, reason="needs cuobjdump")]
CASE = "sm_90:bf16:128"


class Budget(NamedTuple):
    slots: int
    """Instructions of a warp in a step, at most."""
    wait: int
    """Groups of loads that may still be under way where the loop waits, at least. 0: it waits for what it has just asked for."""
    spills: int = 0
    """Accesses to local memory in a step, at most."""


# At 128 x 128 keys and rows a step is 2048 cycles of the tensor cores in the forward pass; a warp issues one instruction a cycle,
# two warps share an issuer, and loads that nothing hides take 500 to 1000 cycles. The dK/dV kernel has no registers for a third
# stage: its loop would spill 66 times a step.
BUDGETS = {
    "forward": Budget(545, wait=2),
    "dq": Budget(310, wait=4),
    "dkv": Budget(440, wait=0, spills=18),
    "speculative contiguous": Budget(355, wait=4),
    "speculative paged": Budget(505, wait=6),
}


def tensor_cycles(loop: Sequence[Instruction]) -> int:
    """Cycles of a warp group: ``HGMMA.64xNx16`` multiplies for N / 2 cycles."""
    shapes = [x.name.split(".")[1] for x in loop if x.name.startswith("HGMMA")]
    return sum(int(shape.split("x")[1]) // 2 for shape in shapes)


def read_loop(kernel: Any) -> dict[str, int]:
    """Figures of the loop with the most work for tensor cores; among equals, of the one without masks, which is shorter."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(kernel.asm["cubin"])
        (code,) = disassemble(cubin, "sm_90a").values()
    loop = max(steady_loops(code), key=lambda loop: (tensor_cycles(loop), -len(loop)))
    waits = [int(x.operands.split(",")[1], 16) for x in loop if x.name.startswith("DEPBAR")]
    return {
        "slots": len(loop),
        "wait": min(waits),
        "spills": sum(x.name.startswith(("LDL", "STL")) for x in loop),
        "tensor": tensor_cycles(loop),
    }


def main(cases: list[str]) -> None:
    found = {}
    for case in cases:
        for name, kernel in harness.compile_case(case).items():
            found[name.strip("_").removesuffix("_kernel")] = read_loop(kernel)
        for layout in ("contiguous", "paged"):
            found[f"speculative {layout}"] = read_loop(compile_variant(case, 81, layout)["_split_kernel"])
    print(json.dumps(found))


@pytest.mark.parametrize("name", BUDGETS)
def test_within_budget(name: str) -> None:
    figures, budget = harness.measure([CASE], __name__)[name], BUDGETS[name]
    assert figures["tensor"] > 0
    assert figures["slots"] <= budget.slots and figures["spills"] <= budget.spills, figures
    assert figures["wait"] >= budget.wait, figures


if __name__ == "__main__":
    main(sys.argv[1:])
