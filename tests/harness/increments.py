"""Accesses to shared memory whose address gets an increment twice, in the machine code of a kernel.

ptxas (12.0 to 13.5, for sm_80 to sm_120) does so where a counter indexes shared memory under a bound of its own, as in
``++n < size ? list[n] : 0``: it adds 1 to the counter's register, takes the address from that, and has the 1 in the offset as well.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tests.harness.sass import Instruction

REGISTER = re.compile(r"U?R\d+$")
NUMBER = re.compile(r"0x[0-9a-f]+$")
ADDRESS = re.compile(r"\[(U?R\d+)(?:\.X(\d+))?(?:\+U?R\d+)?\+(0x[0-9a-f]+)\]")
SHARED = ("LDS", "STS", "ATOMS")


def doubled(code: Sequence[Instruction]) -> list[str]:
    """The accesses, by their text.

    >>> from tests.harness.sass import functions
    >>> listing = '''Function : f
    ...         /*0000*/                   VIADD R6, R6, 0x1 ;
    ...         /*0010*/              @!P0 IMAD R10, R6, 0x8, R11 ;
    ...         /*0020*/              @!P0 LDS.64 R2, [R10+0x8] ;
    ... '''
    >>> doubled(functions(listing)["f"])
    ['0x20 LDS.64 R2, [R10+0x8]']
    >>> doubled(functions(listing.replace("+0x8", "+0x10"))["f"])
    []
    """
    targets = {instruction.target for instruction in code}
    # What a register has of an increment that a register before it got, in this stretch of code.
    added: dict[str, int] = {}
    found = []
    for instruction in code:
        if instruction.address in targets or instruction.name.startswith(("BRA", "BSYNC", "EXIT")):
            added = {}
        if instruction.name.startswith(SHARED) and (access := ADDRESS.search(instruction.operands)):
            register, scale, offset = access.groups()
            if added.get(register, 0) * int(scale or 1) == int(offset, 16):
                found.append(f"{instruction.address:#x} {instruction.name} {instruction.operands}")
        to, amount = _result(instruction, added)
        added[to] = amount
    return found


def _result(instruction: Instruction, added: dict[str, int]) -> tuple[str, int]:
    """The register that an instruction sets, and what it has of an increment."""
    to, *parts = (part.strip().removesuffix(".reuse") for part in instruction.operands.split(","))
    name, numbers = instruction.name, [int(part, 16) for part in parts if NUMBER.match(part)]
    registers = [part for part in parts if REGISTER.match(part)]
    if name.startswith(("VIADD", "IADD3", "UIADD3")) and registers == [to] and len(numbers) == 1:
        return to, numbers[0] if numbers[0] < 2**31 else 0
    sizes = [added.get(part, 0) for part in registers]
    if len(numbers) == 1 and len(sizes) > 0:
        if name.startswith(("IMAD", "UIMAD")):
            return to, sizes[0] * numbers[0] + sum(sizes[1:])
        if name.startswith(("LEA", "ULEA", "SHF.L", "USHF.L")):
            return to, (sizes[0] << numbers[0]) + sum(sizes[1:])
    if not numbers and name.startswith(("IADD3", "UIADD3", "IMAD.IADD", "IMAD.MOV", "MOV", "UMOV")):
        return to, sum(sizes)
    return to, 0
