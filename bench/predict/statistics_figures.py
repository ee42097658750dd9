"""Instructions of the CUDA kernels of vocabulary statistics for bf16, from their machine code for Hopper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.predict.model import Statistics
from tests.harness.budgets import FAST_ARCHS, KERNEL_FOLDER, find_nvcc, kept_of
from tests.harness.sass import cheapest_way, disassemble, outer_loops, steady_loops

LOOKS = 3
"""How often a warp looks through the keys of a region: for its first token, and again after each of the two that it takes."""
# The loads of a region; then a row's block loads the regions, 32 at a time, the logits of one, and the regions again for the sums.
WAITS = 1 + 2 + 1 + 2
# The kernels that an H200 has timed (commit bca45382) loaded the 8 packs of a region one after the other, in each look. Compiled, a
# warp issued 657 instructions for a region, and 48 for a pack.
TIMED = Statistics(region=657, row=LOOKS * 8 * 48, waits=1 + 2 + LOOKS * 8 + 2)


def _read(code: Path) -> dict[str, Any]:
    kernels = disassemble(code, "sm_90a")

    def kernel(name: str, variant: str) -> Any:
        (body,) = (body for mangled, body in kernels.items() if f"{name}I13__nv_bfloat16{variant}" in mangled)
        return body

    loops = outer_loops(kernel("token_cut_kernel", "Li8E"), "LDG")
    # Loops of top-k lie between the first pass and that of the masses, which needs exponentials.
    second = next(i for i, loop in enumerate(loops) if any(x.name.startswith("MUFU.EX2") for x in loop))
    passes = (loops[0], *loops[second : second + 2])
    return {
        "region": cheapest_way(kernel("token_region_kernel", "Lb1ELb0E"), "MUFU.EX2", 64),
        # A turn of the loop over tokens: a look through 64 logits of a lane, and the largest of the lanes.
        "look": min(len(loop) for loop in steady_loops(kernel("token_row_kernel", "Lb1E")) if len(loop) > 8 * 64),
        # The largest, masses into bins, what is left.
        "cut": [cheapest_way(x, *(("MUFU.EX2", 8) if number == 1 else ("LDG", 1))) for number, x in enumerate(passes)],
    }


def measure() -> dict[str, Any]:
    """``region``: what a warp issues for 2048 logits; ``look``: for a look through them when ranking; ``cut``: what a warp issues for 256
    logits in each pass of the cut. Empty without nvcc."""
    if find_nvcc() is None:
        return {}
    figures: dict[str, Any] = kept_of(KERNEL_FOLDER / "token_statistics.cu", "passes", _read, FAST_ARCHS)
    return figures


def today(figures: dict[str, Any]) -> Statistics:
    """The kernels of this checkout."""
    return Statistics(figures["region"], LOOKS * figures["look"], WAITS)
