"""The Triton kernels of grouped_linear compile for every architecture, within budget, onto the tensor cores."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.cudasim.build import ROOT
from tests.harness import triton_budgets as harness
from tests.harness.triton_interpreter import requires_triton
from tests.ops.test_quantized_linear_compiled import arithmetic

pytestmark = requires_triton
# Budgets are named "sm_90:bf16:2048 experts, half 4, 8 rows": the width, the scales and codes of packed matrices, and a tile's rows.
BUDGETS = {name: budget for name, budget in json.loads(harness.BUDGET_FILE.read_text()).items() if " experts" in name}
CASES = sorted({name.split(" ")[0] for name in BUDGETS})
FIRST_CLASS = "sm_90:bf16:2048"
PACKED = ("half 4", "half 8", "super 4", "super16 6", "half_zero 4")
EXPERTS = 128
TILES = {8: 64, 32: 16 * EXPERTS, 64: 64 * EXPERTS}
"""Rows of the tiles for so many rows."""


def compile_variant(case: str, matrix: str | None, rows: int) -> dict[str, Any]:
    """What the harness compiles when this launch replaces those of the block-sparse kernels."""
    import torch

    from pdkernels.reference.quantized_linear import Layout
    from pdkernels.triton import block_sparse_attention, grouped_linear

    def launch(given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        width, outputs, q = int(case.split(":")[2]), 1536, given.q
        x, ends = q.new_zeros(rows, width), torch.zeros(EXPERTS, dtype=torch.int64)
        if matrix is None:
            grouped_linear.forward(x, q.new_zeros(1, 1, width).expand(EXPERTS, outputs, width), ends, None)
        else:
            scales, bits = matrix.split()
            layout = Layout(scales, int(bits), {"super": 8, "super16": 8, "half_zero": 4}.get(scales, 1))
            data = torch.zeros(EXPERTS * layout.nbytes(outputs, width), dtype=torch.uint8)
            grouped_linear.quantized_forward(x, [data], [layout.number], [outputs], ends, None)
        return q, q

    with mock.patch.multiple(block_sparse_attention, forward=launch, backward=mock.DEFAULT):
        return harness.compile_case(case)


def main(cases: list[str]) -> None:
    """Writes the figures of some cases, each alone or with one kind of matrix after a comma, as a JSON object."""
    found: dict[str, dict[str, Any]] = {}
    for wanted in cases:
        case, _, only = wanted.partition(",")
        for matrix, (tile, rows) in itertools.product((None, *PACKED), TILES.items()):
            if only not in ("", matrix or "numbers"):
                continue
            for name, compiled in compile_variant(case, matrix, rows).items():
                if name.startswith("_grouped"):
                    label = f"{case} experts" + ("" if matrix is None else f", {matrix}, {tile} rows")
                    found[label] = harness.read_figures(compiled, case.split(":")[0])
                    found[label]["inexact"] = {} if matrix is None else arithmetic(compiled)
    print(json.dumps(found))


def check(*cases: str) -> set[str]:
    others: list[Path] = [ROOT / "reference/quantized_linear.py", ROOT / "tests/ops/test_quantized_linear_compiled.py"]
    measured, found = harness.measure([*cases], __name__, others), []
    for name, figures in measured.items():
        assert not any(figures.pop("inexact").values()), name
        found += harness.problems(name, figures, BUDGETS.get(name))
    assert not found, "\n" + "\n".join(found)
    return set(measured)


def test_kernels_stay_within_budget() -> None:
    assert len(check(f"{FIRST_CLASS},numbers", f"{FIRST_CLASS},half 4")) == 1 + len(TILES)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_rest_stays_within_budget(case: str) -> None:
    assert check(case) == {name for name in BUDGETS if name.split(" ")[0] == case}


if __name__ == "__main__":
    main(sys.argv[1:])
