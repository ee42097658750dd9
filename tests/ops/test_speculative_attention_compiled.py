"""The Triton kernels of speculative attention compile for every architecture, within budget, onto the tensor cores."""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

import pytest

from tests.harness import triton_budgets as harness
from tests.harness.triton_interpreter import requires_triton

pytestmark = requires_triton
# Budgets are named "sm_90:bf16:128 speculative many paged": quadratic self-speculation of width 8 or a single token, 4 query
# heads for each KV head; "storing" chosen rows, which needs the most.
NEW = {"many": 81, "few": 1}
PAGES = {"contiguous": 0, "paged": 16, "paged, storing": 16}
BUDGETS = {
    name: budget for name, budget in json.loads(harness.BUDGET_FILE.read_text()).items() if " speculative " in name
}
CASES = sorted({name.split(" ")[0] for name in BUDGETS})
FIRST_CLASS = [case for case in CASES if case.endswith("bf16:128")]


def compile_variant(case: str, new: int, layout: str) -> dict[str, Any]:
    """What the harness compiles when this launch replaces those of the block-sparse kernels."""
    import torch

    from pdkernels._attention import AttentionArguments, SpeculativeArguments
    from pdkernels.triton import block_sparse_attention, speculative_attention

    page_size, lengths = PAGES[layout], torch.zeros(1, dtype=torch.int64)
    storing = "storing" in layout
    rows = {"counts": lengths, "source_index": torch.zeros(1, 9, dtype=torch.int64)} if storing else {}

    def launch(given: AttentionArguments) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (x[:, :new] for x in given[:3])
        pages = k.new_zeros((4, page_size or 4096, *k.shape[2:]))
        table = torch.zeros(1, 4096 // page_size, dtype=torch.int32) if page_size else None
        speculative = SpeculativeArguments(q, k, v, pages, pages, lengths, *given.plan, given.scale, table, **rows)
        return speculative_attention.forward(speculative, append=storing)

    with mock.patch.multiple(block_sparse_attention, forward=launch, backward=mock.DEFAULT):
        return harness.compile_case(case)


def main(cases: list[str]) -> None:
    """Writes the figures of some cases as a JSON object."""
    found = {}
    for case in cases:
        for rows, new in NEW.items():
            for layout in PAGES:
                kernels = compile_variant(case, new, layout)
                architecture = case.split(":")[0]
                found[f"{case} speculative {rows} {layout}"] = harness.read_figures(
                    kernels["_split_kernel"], architecture
                )
        found[f"{case} speculative merge"] = harness.read_figures(kernels["_merge_kernel"], architecture)
    print(json.dumps(found))


def check(case: str) -> None:
    found = []
    measured = harness.measure([case], __name__)
    for name, figures in measured.items():
        if name.endswith("merge"):  # adds up, multiplies no matrices
            assert not any(figures[instruction] for instruction in harness.TENSOR_CORES)
            figures["mma.sync"] = 1
        found += harness.problems(name, figures, BUDGETS.get(name))
    assert not found, "\n" + "\n".join(found)
    assert set(measured) == {name for name in BUDGETS if name.split(" ")[0] == case}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case.startswith("sm_90:") else pytest.mark.slow) for case in FIRST_CLASS]
)
def test_kernels_stay_within_budget(case: str) -> None:
    check(case)
    # Many rows should use the instructions of their own architecture.
    best = dict(zip(("sm_80", "sm_90", "sm_100"), harness.TENSOR_CORES))[case.split(":")[0]]
    assert all(harness.measure([case], __name__)[f"{case} speculative many {layout}"][best] for layout in PAGES)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in FIRST_CLASS])
def test_the_rest_stays_within_budget(case: str) -> None:
    check(case)


if __name__ == "__main__":
    main(sys.argv[1:])
