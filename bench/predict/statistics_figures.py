"""Instructions of the CUDA kernels of vocabulary statistics for bf16, from their machine code for Hopper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.predict.model import RowStatistics, Statistics
from tests.harness.budgets import FAST_ARCHS, KERNEL_FOLDER, find_nvcc, kept_of
from tests.harness.sass import TARGET, Instruction, cheapest_way, disassemble

# The kernels that an H200 has timed (commit bca45382) loaded the 8 packs of a region one after the other, in each look. Compiled, a
# warp issued 657 instructions for a region, and 48 for a pack.
TIMED = Statistics(region=657, row=3 * 8 * 48, waits=1 + 2 + 3 * 8 + 2)
RANKED = 5
"""Tokens that are ranked, as many as by default."""


def _loops(code: Sequence[Instruction]) -> list[list[Instruction]]:
    """All loops, the shortest first; an exit ends each."""
    at = {instruction.address: i for i, instruction in enumerate(code)}
    spans = [(at[t], i) for i, x in enumerate(code) if (t := x.target) is not None and t < x.address and t in at]
    found = sorted(spans, key=lambda span: span[1] - span[0])
    return [[*code[a : b + 1], Instruction(code[b].address + 1, "", "EXIT", "")] for a, b in found]


def regions_loop(code: Sequence[Instruction]) -> list[Instruction]:
    """The loop whose turn is a region, with a power for each of a lane's 64 logits."""
    return next(loop for loop in _loops(code) if _has(loop, "MUFU.EX2") >= 64)


def _has(loop: Sequence[Instruction], name: str) -> int:
    return sum(x.name.startswith(name) for x in loop)


def _after_regions(code: Sequence[Instruction], region: Sequence[Instruction]) -> int:
    """What a warp of the first block issues after the loop over regions: a turn of each loop that takes a token or a region, for all that
    are ranked; their loads; twice what lists the tokens of a pack; the exponential of a probability, and the way to the end."""
    after = [x for x in code if x.address > region[-2].address]
    loops = [loop for loop in _loops(after) if not _has(loop, "BAR")]
    turns = sum(cheapest_way(x, "REDUX", 2) for x in loops if _has(x, "REDUX") and not _has(x, "LDG"))
    loads = next(cheapest_way(x, "LDG", RANKED) for x in loops if _has(x, "LDG") == 8)
    calls = {int(match[1], 16) for x in after if x.name.startswith("CALL") and (match := TARGET.search(x.operands))}
    bodies = [_until_return(code, call) for call in calls]
    listing = sum(cheapest_way(body, "ATOMS", 1) for body in bodies if _has(body, "ATOMS"))
    return RANKED * turns + loads + 2 * listing + cheapest_way(after, "DFMA", 24) + cheapest_way(after, "STG", 4)


def _until_return(code: Sequence[Instruction], start: int) -> list[Instruction]:
    rest = [x for x in code if x.address >= start]
    last = next(i for i, x in enumerate(rest) if x.name.startswith("RET") and not x.predicate)
    return rest[: last + 1]


def _read(code: Path) -> dict[str, Any]:
    kernels = disassemble(code, "sm_90a")

    def kernel(name: str, variant: str) -> Any:
        (body,) = (body for mangled, body in kernels.items() if f"{name}I13__nv_bfloat16{variant}" in mangled)
        return body

    rows, cuts = kernel("token_row_kernel", "Lb1ELb0E"), kernel("token_cut_kernel", "Li8E")
    region = regions_loop(rows)
    # The first loop with the next region's loads that has masses.
    near = next(loop for loop in _loops(cuts) if _has(loop, "LDG.E.128") >= 16 and 0 < _has(loop, "MUFU.EX2") < 64)
    return {
        "region": cheapest_way(region, "MUFU.EX2", 64),
        "row": _after_regions(rows, region),
        "cut": [cheapest_way(regions_loop(cuts), "MUFU.EX2", 64), cheapest_way(near, "LDG.E.128", 8)],
    }


def measure() -> dict[str, Any]:
    """``region``: what a warp issues for 2048 logits; ``row``: for a row when all regions are done; ``cut``: what a warp issues for 2048
    logits in each pass of the cut. Empty without nvcc."""
    if find_nvcc() is None:
        return {}
    figures: dict[str, Any] = kept_of(KERNEL_FOLDER / "token_statistics.cu", "passes", _read, FAST_ARCHS)
    return figures


def today(figures: dict[str, Any]) -> RowStatistics:
    """The kernel of this checkout."""
    return RowStatistics(figures["region"], figures["row"])
