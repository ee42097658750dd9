"""The Triton kernel of linear compiles for every architecture, within budget, onto the tensor cores."""

from __future__ import annotations

import json
import re
import sys
from typing import Any
from unittest import mock

import pytest

from tests.harness import triton_budgets as harness
from tests.harness.triton_interpreter import requires_triton

pytestmark = requires_triton
# Budgets are named "sm_90:bf16:4096 product": the width, with a bias and without; "abreast": of 64 rows and so many outputs.
BUDGETS = {name: budget for name, budget in json.loads(harness.BUDGET_FILE.read_text()).items() if " product" in name}
CASES = sorted({name.split(" ")[0] for name in BUDGETS})
FIRST_CLASS = "sm_90:bf16:4096"
ABREAST = {"product abreast 1024": 1024, "product abreast 28672": 28672}


def compile_variant(case: str, biased: bool, rows: int = 8, outputs: int = 1024) -> Any:
    """What the harness compiles when this launch replaces those of the block-sparse kernels."""
    import torch

    from pdkernels.triton import block_sparse_attention, linear

    def launch(given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q = given.q
        x, weight = (q.new_zeros(size, int(case.split(":")[2])) for size in (rows, outputs))
        linear.forward(x, weight, q.new_zeros(outputs) if biased else None)
        return q, q

    with mock.patch.multiple(block_sparse_attention, forward=launch, backward=mock.DEFAULT):
        (compiled,) = harness.compile_case(case).values()
    return compiled


def instructions(kernel: Any) -> set[str]:
    """Those of the tensor cores."""
    return set(re.findall(r"(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\S*", kernel.asm["ptx"]))


def main(cases: list[str]) -> None:
    """Writes the figures of some cases as a JSON object."""
    found = {}
    for case in cases:
        for name, biased in (("product", False), ("product with bias", True)):
            few = compile_variant(case, biased)
            found[f"{case} {name}"] = harness.read_figures(few, case.split(":")[0])
        if ":fp32:" not in case:
            for name, outputs in ABREAST.items():
                kernel = compile_variant(case, True, 64, outputs)
                found[f"{case} {name}"] = harness.read_figures(kernel, case.split(":")[0])
                # The instruction of few rows, whose bits they must have.
                assert instructions(kernel) == instructions(few) and len(instructions(kernel)) == 1
                assert kernel.metadata.shared <= harness.SHARED_LIMIT["sm_120"]
    print(json.dumps(found))


def check(case: str) -> None:
    measured = harness.measure([case], __name__)
    found = [
        problem for name, figures in measured.items() for problem in harness.problems(name, figures, BUDGETS.get(name))
    ]
    assert not found, "\n" + "\n".join(found)
    assert set(measured) == {name for name in BUDGETS if name.split(" ")[0] == case}


def test_kernel_stays_within_budget() -> None:
    check(FIRST_CLASS)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case != FIRST_CLASS])
def test_the_rest_stays_within_budget(case: str) -> None:
    check(case)


if __name__ == "__main__":
    main(sys.argv[1:])
