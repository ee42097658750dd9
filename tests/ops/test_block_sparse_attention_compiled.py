"""The Triton kernels of block-sparse attention compile for every architecture, within budget, onto the tensor cores."""

from __future__ import annotations

import json

import pytest

from tests.harness.triton_budgets import BUDGET_FILE, measure, problems
from tests.harness.triton_interpreter import requires_triton

pytestmark = requires_triton
# Named "sm_90:bf16:128 forward"; kernels of other families have other names.
KERNELS = (" forward", " dq", " dkv")
BUDGETS = {name: budget for name, budget in json.loads(BUDGET_FILE.read_text()).items() if name.endswith(KERNELS)}
CASES = sorted({name.split(" ")[0] for name in BUDGETS})
FIRST_CLASS = [case for case in CASES if case.endswith(("bf16:64", "bf16:128"))]


def check(cases: list[str]) -> None:
    found = []
    for name, figures in measure(cases).items():
        if name.endswith(" sum"):  # adds up pieces of dK and dV
            assert figures["registers"] <= 40 and not figures["spill"] and not figures["shared"]
            continue
        found += problems(name, figures, BUDGETS.get(name))
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    "architecture",
    [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90", pytest.param("sm_100", marks=pytest.mark.slow)],
)
def test_kernels_stay_within_budget(architecture: str) -> None:
    check([case for case in FIRST_CLASS if case.startswith(f"{architecture}:")])


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in FIRST_CLASS])
def test_the_rest_stays_within_budget(case: str) -> None:
    check([case])
