"""Compiles Gluon kernels for Hopper without a GPU, reads the loops of their machine code, and checks them."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from tests.cudasim.build import ROOT
from tests.harness import sass
from tests.harness import triton_budgets as harness
from tests.harness.budgets import find_cuobjdump
from tests.harness.triton_interpreter import requires_triton

NEEDS = [requires_triton, pytest.mark.skipif(find_cuobjdump() is None, reason="needs cuobjdump")]

SOURCES = (Path(__file__), *(ROOT / "pdkernels" / "gluon").glob("*.py"))


def compiled(launch: Callable[[], object]) -> dict[str, Any]:
    """The kernels that a call starts, by name; they are compiled, not run."""
    import triton
    from triton.runtime.jit import JITFunction

    found: dict[str, Any] = {}
    run = JITFunction.run

    def compile_only(self: Any, *arguments: Any, warmup: bool, **options: Any) -> None:
        assert "enable_fp_fusion" in options, "see pdkernels/triton/blocking.py"
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


class Budget(NamedTuple):
    steady: int
    """Instructions of a warp for a step that needs no mask, at most."""
    shared: int
    """Bytes of shared memory."""
    masked: int | None = None
    """For a step that needs a mask. None: these loops have loops in them, over a plan's lists, and are not among the figures."""
    spill: int = 0
    """Bytes of registers spilled outside these loops."""


def cases(budgets: Iterable[str]) -> list[Any]:
    """The first one is for every run, the others are slow."""
    first, *others = budgets
    return [first, *(pytest.param(case, marks=pytest.mark.slow) for case in others)]


def measure(cases: list[str], module: str) -> dict[str, dict[str, Any]]:
    """The figures of cases, from `module` run as a separate process, which calls `main`."""
    return harness.measure(cases, module, SOURCES)


def main(compile_case: Callable[[str], Any]) -> None:
    print(json.dumps({case: figures(compile_case(case)) for case in sys.argv[1:]}))


def check(found: dict[str, Any], budget: Budget, products: int, in_flight: list[int]) -> None:
    """`products` of a step, and how many of them each wait leaves under way."""
    assert not found["serialized"] and found["spill"] <= budget.spill, found
    # At launch; setmaxnreg then gives the consumers more and the producer less.
    assert found["registers"] <= 168 and found["setmaxnreg"]
    assert found["shared"] <= min(budget.shared, harness.SHARED_LIMIT["sm_90"])
    loops = found["loops"]
    for loop in loops:
        assert loop["spills"] == 0 and loop["products"] == products, loop
        assert loop["in flight"] == in_flight, loop
    # One of each kind for each of the two consumers.
    steady, masked = loops[:2], loops[2:]
    assert len(steady) == 2 and max(loop["slots"] for loop in steady) <= budget.steady, steady
    assert len(masked) == (0 if budget.masked is None else 2), masked
    assert all(loop["slots"] <= budget.masked for loop in masked), masked
