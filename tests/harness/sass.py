"""Reads the machine code of compiled kernels: what a warp issues, in the loops that matter and on the path that skips rare cases.

    functions(listing of cuobjdump -sass or nvdisasm) -> {mangled name: instructions}

Costs are issue slots: one per warp instruction. Some hold their pipe longer (`CYCLES`).
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.harness.budgets import find_cuobjdump

LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
TARGET = re.compile(r"0x([0-9a-f]+)")
# Cycles a warp instruction holds a pipe of an SM's quarter on sm_90: 16 lanes of MUFU per SM, half rate for doubles and
# conversions. Everything else that matters here takes one.
CYCLES = {"MUFU": 8, "DADD": 2, "DMUL": 2, "DFMA": 2, "F2F": 8, "I2F": 2, "F2I": 2, "IMAD.WIDE": 2, "HGMMA": 128}


class Instruction(NamedTuple):
    address: int
    predicate: str
    """Such as ``!P0``; empty: always."""
    name: str
    operands: str

    @property
    def target(self) -> int | None:
        """The target of a branch, if the instruction names one."""
        found = TARGET.search(self.operands) if self.name.startswith("BRA") else None
        return int(found[1], 16) if found else None


def functions(listing: str) -> dict[str, list[Instruction]]:
    """The instructions of each function of a listing.

    >>> code = functions('''Function : f
    ...         /*0000*/                   MOV R1, c[0x0][0x28] ;
    ...         /*0010*/              @!P0 BRA 0x0 ;
    ... ''')["f"]
    >>> code[1].predicate, code[1].target
    ('!P0', 0)
    """
    found: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in listing.splitlines():
        if line.strip().startswith("Function :"):
            current = found[line.split(":")[1].strip()] = []
        elif match := LINE.match(line):
            address, predicate, name, operands = match.groups()
            current.append(Instruction(int(address, 16), predicate or "", name, operands.strip()))
    return found


def disassemble(code: Path, architecture: str) -> dict[str, list[Instruction]]:
    """The functions in a cubin or fatbin, of one architecture such as ``sm_90a``."""
    tool = find_cuobjdump()
    if tool is None:
        raise FileNotFoundError("cuobjdump was not found. It comes with CUDA and with triton.")
    answer = subprocess.run(
        [tool, "-sass", "-arch", architecture, str(code)], check=True, capture_output=True, text=True
    )
    return functions(answer.stdout)


def cheapest_way(code: Sequence[Instruction], name: str, count: int) -> int:
    """The fewest issue slots from the entry to an exit with `count` instructions called `name` or more, no loop taken twice.

    What a warp issues if no rare case occurs, in kernels that do their work in a straight line: the work is identified
    by an instruction that it needs. ValueError: no path has so many.
    """
    at = {instruction.address: i for i, instruction in enumerate(code)}
    # For each instruction, how many of those called `name` came before it -> fewest slots until there.
    best: list[dict[int, int]] = [{} for _ in range(len(code) + 1)]
    best[0][0] = 0
    answer: int | None = None
    for i, instruction in enumerate(code):
        here = instruction.name.startswith(name)
        leaves = instruction.name.startswith(("EXIT", "RET"))
        target = instruction.target
        ahead = [at[target]] if target is not None and target in at and at[target] > i else []
        always = not instruction.predicate and (leaves or (target is not None and " " not in instruction.operands))
        for seen, slots in best[i].items():
            seen, slots = min(seen + here, count), slots + 1
            if leaves and seen == count:
                answer = slots if answer is None else min(answer, slots)
            for after in ahead if always else [*ahead, i + 1]:
                best[after][seen] = min(slots, best[after].get(seen, slots))
    if answer is None:
        raise ValueError(f"no way through the code has {count} times {name}")
    return answer


def steady_loops(code: Sequence[Instruction]) -> list[list[Instruction]]:
    """Innermost loops, the longest first."""
    at = {instruction.address: i for i, instruction in enumerate(code)}
    spans = sorted(
        ((at[t], i) for i, x in enumerate(code) if (t := x.target) is not None and t < x.address and t in at),
        key=lambda span: span[1] - span[0],
    )
    inner: list[tuple[int, int]] = []
    for start, end in spans:
        if not any(start <= a and b <= end for a, b in inner):
            inner.append((start, end))
    return sorted((list(code[a : b + 1]) for a, b in inner), key=len, reverse=True)


def outer_loops(code: Sequence[Instruction], once: str) -> list[list[Instruction]]:
    """Loops with a single instruction called `once`, which are in no larger such loop, in the order of the code; an exit ends each."""
    at = {instruction.address: i for i, instruction in enumerate(code)}
    spans = [(at[t], i) for i, x in enumerate(code) if (t := x.target) is not None and t < x.address and t in at]
    single = [(a, b) for a, b in spans if sum(x.name.startswith(once) for x in code[a : b + 1]) == 1]
    outer = [(a, b) for a, b in single if not any((c, d) != (a, b) and c <= a and b <= d for c, d in single)]
    return [[*code[a : b + 1], Instruction(code[b].address + 1, "", "EXIT", "")] for a, b in sorted(outer)]


def mix(code: Sequence[Instruction]) -> Counter[str]:
    """How often each opcode occurs in the code, without its modifiers."""
    return Counter(x.name.split(".")[0] for x in code)


def pipe_cycles(code: Sequence[Instruction], pipe: str) -> int:
    """Cycles that the instructions of a pipe hold it, in one warp."""
    return sum(CYCLES.get(pipe, 1) for x in code if x.name.startswith(pipe))
