"""The Triton kernels of linear_token_statistics compile for every architecture, within budget, onto the tensor cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.cudasim.build import ROOT, build_once, digest, digest_text
from tests.harness import triton_budgets as harness
from tests.harness.triton_interpreter import requires_triton

pytestmark = requires_triton
# Budgets are named "sm_90:bf16:4096 vocabulary drawn parts": hidden size, greedy or drawn at a temperature.
TEMPERATURES = {"greedy": 0.0, "drawn": 0.8}
BUDGETS = {name: budget for name, budget in json.loads(harness.BUDGET_FILE.read_text()).items() if " vocabulary " in name}
CASES = sorted({name.split(" ")[0] for name in BUDGETS})


def compile_variant(case: str, temperature: float) -> dict[str, Any]:
    """What the harness compiles when this launch stands where it launches the block-sparse kernels."""
    import torch

    from pdkernels.triton import block_sparse_attention, linear_token_statistics

    def launch(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, weight = (q.new_zeros(size, int(case.split(":")[2])) for size in (4, 50304))
        number = torch.zeros(4, dtype=torch.int64)
        linear_token_statistics.forward(hidden, weight, temperature, 1, 0, number, number, number, (50000,), 5, "model")
        return q, q

    with mock.patch.multiple(block_sparse_attention, forward=launch, backward=mock.DEFAULT):
        return harness.compile_case(case)


def main(cases: list[str]) -> None:
    """Writes the figures of some cases as a JSON object."""
    found = {}
    for case in cases:
        for name, temperature in TEMPERATURES.items():
            for kernel, compiled in compile_variant(case, temperature).items():
                stage = kernel.strip("_").removesuffix("_kernel")
                found[f"{case} vocabulary {name} {stage}"] = harness.read_figures(compiled, case.split(":")[0])
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
