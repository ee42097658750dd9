"""The Triton kernels of linear_token_statistics compile for every architecture, within budget, onto the tensor cores."""

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
# Budgets are named "sm_90:bf16:4096 vocabulary drawn parts": hidden size, greedy or drawn at a temperature.
TEMPERATURES = {"greedy": 0.0, "drawn": 0.8}
# For more rows Hopper has larger tiles.
MANY_ROWS = 128
BUDGETS = {
    name: budget for name, budget in json.loads(harness.BUDGET_FILE.read_text()).items() if " vocabulary " in name
}
CASES = sorted({name.split(" ")[0] for name in BUDGETS})
FIRST_CLASS = "sm_90:bf16:4096"


def compile_variant(case: str, temperature: float, rows: int = 4) -> dict[str, Any]:
    """What the harness compiles when this launch replaces those of the block-sparse kernels."""
    import torch

    from pdkernels.triton import block_sparse_attention, linear_token_statistics

    def launch(given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q = given.q
        hidden, weight = (q.new_zeros(size, int(case.split(":")[2])) for size in (rows, 50304))
        number = torch.zeros(rows, dtype=torch.int64)
        linear_token_statistics.forward(
            hidden, weight, temperature, 1, None, 0, number, number, number, (50000,), 5, "model"
        )
        return q, q

    with mock.patch.multiple(block_sparse_attention, forward=launch, backward=mock.DEFAULT):
        return harness.compile_case(case)


def order_of_sums(ttgir: str) -> list[str]:
    """How the matrices of each reduction of floats lie in the warps, without the number of rows and of warps."""
    layouts = dict(re.findall(r"^(#\w+) = (.*?)(?: loc.*)?$", ttgir, re.MULTILINE))
    found = re.findall(r"}\) : \(tensor<\d+x(\d+)xf32, (#\w+)>\) ->", ttgir)
    return [f"{columns} {re.sub(r'warpsPerCTA = .[48], 1.', 'whole rows', layouts[name])}" for columns, name in found]


def main(cases: list[str]) -> None:
    """Writes the figures of some cases as a JSON object."""
    found = {}
    for case in cases:
        variants = {name: compile_variant(case, temperature) for name, temperature in TEMPERATURES.items()}
        if case.startswith("sm_90") and "fp32" not in case:
            kernel = compile_variant(case, 0.0, MANY_ROWS)["_parts_kernel"]
            variants["greedy, many rows"] = {"_parts_kernel": kernel}
            few, many = (
                one["_parts_kernel"].asm["ttgir"] for one in (variants["greedy"], variants["greedy, many rows"])
            )
            found[f"{case} vocabulary order of sums"] = {"few": order_of_sums(few), "many": order_of_sums(many)}
        for name, kernels in variants.items():
            for kernel, compiled in kernels.items():
                stage = kernel.strip("_").removesuffix("_kernel")
                found[f"{case} vocabulary {name} {stage}"] = harness.read_figures(compiled, case.split(":")[0])
    print(json.dumps(found))


def check(case: str) -> dict[str, dict[str, Any]]:
    found = []
    measured = harness.measure([case], __name__)
    orders = measured.pop(f"{case} vocabulary order of sums", {"few": [], "many": []})
    assert orders["few"] == orders["many"] and all("whole rows" in order for order in orders["few"])
    for name, figures in measured.items():
        if name.endswith("merge"):  # multiplies no matrices
            assert not any(figures[instruction] for instruction in harness.TENSOR_CORES)
            figures["mma.sync"] = 1
        found += harness.problems(name, figures, BUDGETS.get(name))
    assert not found, "\n" + "\n".join(found)
    assert set(measured) == {name for name in BUDGETS if name.split(" ")[0] == case}
    return measured


def test_kernels_stay_within_budget() -> None:
    measured = check(FIRST_CLASS)
    assert harness.measure([FIRST_CLASS], __name__)[f"{FIRST_CLASS} vocabulary order of sums"]["few"]
    assert all(measured[f"{FIRST_CLASS} vocabulary {name} parts"]["wgmma.mma_async"] for name in TEMPERATURES)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case != FIRST_CLASS])
def test_the_rest_stays_within_budget(case: str) -> None:
    check(case)


if __name__ == "__main__":
    main(sys.argv[1:])
