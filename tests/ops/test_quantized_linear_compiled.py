"""The Triton kernels of packed matrices compile for every architecture, within budget, onto the tensor cores, without contraction."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.cudasim.build import ROOT
from tests.harness import triton_budgets as harness
from tests.harness.triton_interpreter import requires_triton

pytestmark = requires_triton
# Budgets are named "sm_90:bf16:4096 packed half 4, 8 rows": the width, and what a kernel is compiled for.
BUDGETS = {name: budget for name, budget in json.loads(harness.BUDGET_FILE.read_text()).items() if " packed" in name}
CASES = sorted({name.split(" ")[0] for name in BUDGETS})
FIRST_CLASS = "sm_90:bf16:4096"
FIRST = ("half 4", "super16 6")
ROWS = (8, 32, 64)


def matrices() -> dict[str, Any]:
    """Each kind of scales and codes; the groups of `float` and the kinds with zeros may have any size."""
    from pdkernels.reference.quantized_linear import Layout
    from tests.harness.specialisations import MATRICES

    return {f"{scales} {bits}": Layout(scales, bits, group) for scales, bits, group in MATRICES}


def compile_variant(case: str, layout: Any, rows: int) -> dict[str, Any]:
    """What the harness compiles when these launches replace those of the block-sparse kernels."""
    import torch

    from pdkernels.triton import block_sparse_attention, quantized_linear

    def launch(given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        width = int(case.split(":")[2])
        x = given.q.new_zeros(rows, width)
        matrix = [torch.zeros(layout.nbytes(1024, width), dtype=torch.uint8)], [layout.number], [1024]
        quantized_linear.forward(x, *matrix, None)
        quantized_linear.rows_of(torch.zeros(3, dtype=torch.int64), *matrix, width, x.dtype)
        return given.q, given.q

    with mock.patch.multiple(block_sparse_attention, forward=launch, backward=mock.DEFAULT):
        return harness.compile_case(case)


def arithmetic(kernel: Any) -> dict[str, int]:
    """Instructions that round twice or flush what is below the normal numbers."""
    ptx = kernel.asm["ptx"]
    return {what: len(re.findall(what, ptx)) for what in (r"\bfma\.", r"\.ftz", r"div\.full", r"\.approx")}


def main(cases: list[str]) -> None:
    """Writes the figures of some cases, each alone or with one kind of matrix after a comma, as a JSON object."""
    found: dict[str, dict[str, Any]] = {}
    for wanted in cases:
        case, _, only = wanted.partition(",")
        for name, layout in matrices().items():
            if only not in ("", name):
                continue
            for rows in ROWS:
                kernels = compile_variant(case, layout, rows)
                names = {"_products": f"{name}, {rows} rows", "_embedding": f"{name} embedding"}
                for kernel, compiled in kernels.items():
                    label = f"{case} packed {names.get(kernel, 'rows of x')}"
                    if label not in found:
                        figures = harness.read_figures(compiled, case.split(":")[0])
                        found[label] = figures | {"inexact": arithmetic(compiled)}
    print(json.dumps(found))


def measure(*cases: str) -> dict[str, dict[str, Any]]:
    others: list[Path] = [ROOT / "tests/harness/specialisations.py", ROOT / "reference/quantized_linear.py"]
    return harness.measure(list(cases), __name__, others)


def check(*cases: str) -> set[str]:
    measured, found = measure(*cases), []
    for name, figures in measured.items():
        assert not any(figures.pop("inexact").values()), name
        if not name.endswith(" rows"):  # multiplies no matrices
            assert not any(figures[instruction] for instruction in harness.TENSOR_CORES)
            figures["mma.sync"] = 1
        found += harness.problems(name, figures, BUDGETS.get(name))
    assert not found, "\n" + "\n".join(found)
    return set(measured)


def test_kernels_stay_within_budget() -> None:
    assert len(check(*(f"{FIRST_CLASS},{name}" for name in FIRST))) == 1 + len(FIRST) * (1 + len(ROWS))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_rest_stays_within_budget(case: str) -> None:
    assert check(case) == {name for name in BUDGETS if name.split(" ")[0] == case}


if __name__ == "__main__":
    main(sys.argv[1:])
