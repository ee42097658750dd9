"""Compiles Gluon kernels for Hopper without a GPU, and reads the loops of their machine code."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from tests.cudasim.build import ROOT
from tests.harness import sass
from tests.harness import triton_budgets as harness

SOURCES = (Path(__file__), *(ROOT / "pdkernels" / "gluon").glob("*.py"))


def compiled(launch: Callable[[], object]) -> dict[str, Any]:
    """The kernels that a call starts, by name; they are compiled, not run."""
    import triton
    from triton.runtime.jit import JITFunction

    found: dict[str, Any] = {}
    run = JITFunction.run

    def compile_only(self: Any, *arguments: Any, warmup: bool, **options: Any) -> None:
        found[self.__name__] = run(self, *arguments, warmup=True, **options)

    triton.runtime.driver.set_active(harness._Driver("sm_90"))
    with mock.patch.object(JITFunction, "run", compile_only):
        launch()
    return found


def read_loops(kernel: Any) -> list[dict[str, Any]]:
    """Loops with products, the shortest first. ``in flight``: how many products each wait leaves under way."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(kernel.asm["cubin"])
        (code,) = sass.disassemble(cubin, "sm_90a").values()
    found = []
    for loop in sass.steady_loops(code):
        mix = sass.mix(loop)
        if mix["HGMMA"]:
            waits = [int(x.operands.split(",")[1], 16) for x in loop if x.name.startswith("WARPGROUP.DEPBAR")]
            spills = mix["LDL"] + mix["STL"]
            found.append({"slots": len(loop), "products": mix["HGMMA"], "in flight": waits, "spills": spills})
    return sorted(found, key=lambda loop: loop["slots"])


def figures(kernel: Any) -> dict[str, Any]:
    """Registers, spills and shared memory, the loops, and how often an instruction of warp specialisation occurs."""
    found, ptx = harness.read_figures(kernel, "sm_90"), kernel.asm["ptx"]
    counts = {"tma": "cp.async.bulk.tensor", "setmaxnreg": "setmaxnreg", "cp.async": "cp.async.cg"}
    return {**found, **{name: ptx.count(text) for name, text in counts.items()}, "loops": read_loops(kernel)}
