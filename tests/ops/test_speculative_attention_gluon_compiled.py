"""The Gluon kernel of speculative attention compiles for Hopper: products stay in flight, nothing is spilled, loops are short.

python -m tests.ops.test_speculative_attention_gluon_compiled bf16:128:0:64      a JSON object on stdout
"""

from __future__ import annotations

import json
import sys
from typing import Any, NamedTuple

import pytest

from tests.harness import gluon_budgets as gluon
from tests.harness import triton_budgets as harness
from tests.harness.budgets import find_cuobjdump
from tests.harness.triton_interpreter import requires_triton

pytestmark = [requires_triton, pytest.mark.skipif(find_cuobjdump() is None, reason="needs cuobjdump")]


class Budget(NamedTuple):
    steady: int
    """Instructions of a warp for 128 keys of the prefix, at most."""
    shared: int
    """Bytes of shared memory."""


# Dtype, head dimension, page size or 0, rows and columns of a plan's tile.
BUDGETS = {
    "bf16:128:0:64": Budget(465, 164_300),
    "bf16:128:16:64": Budget(465, 164_300),
    "fp16:128:256:32": Budget(465, 164_300),
    "bf16:64:0:128": Budget(425, 148_000),
    "fp16:64:16:32": Budget(425, 148_000),
}
# 64 x 128 x 16 products in a step: of the scores, of the values.
PRODUCTS = {128: 16, 64: 12}


def compile_case(case: str) -> Any:
    import torch

    from pdkernels._attention import SpeculativeArguments
    from pdkernels.gluon import _launch_speculative as _launch
    from pdkernels.masks import quadratic

    dtype, head_dim, page_size, block = case.split(":")
    element = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    mask = quadratic(8)
    q, k = (torch.zeros(2, mask.q_len, heads, int(head_dim), dtype=element) for heads in (8, 2))
    slots = int(page_size) or 4096
    cache = torch.zeros(2 * 4096 // slots, slots, 2, int(head_dim), dtype=element)
    table = torch.zeros(2, 4096 // slots, dtype=torch.int32) if int(page_size) else None
    plan = mask.plan(int(block), int(block)).arguments
    given = SpeculativeArguments(q, k, k, cache, cache, torch.zeros(2, dtype=torch.int64), *plan, 0.1, table)
    assert _launch.serves(given)
    return gluon.compiled(lambda: _launch.forward(given))["split_kernel"]


def main(cases: list[str]) -> None:
    print(json.dumps({case: gluon.figures(compile_case(case)) for case in cases}))


def measure(cases: list[str]) -> dict[str, dict[str, Any]]:
    return harness.measure(cases, "tests.ops.test_speculative_attention_gluon_compiled", gluon.SOURCES)


def check(case: str) -> None:
    figures, budget = measure([case])[case], BUDGETS[case]
    _, head_dim, page_size, _ = case.split(":")
    assert not figures["serialized"] and not figures["spill"], figures
    # 168 registers a thread at launch; setmaxnreg then gives consumers 224 or more, and the producer 56.
    assert figures["registers"] <= 168 and figures["setmaxnreg"] and figures["cp.async"]
    assert bool(figures["tma"]) == (int(page_size) % 128 == 0)
    assert figures["shared"] <= min(budget.shared, harness.SHARED_LIMIT["sm_90"])
    # For each of the two consumers a loop over whole steps. Those over steps with a mask have loops in them, over a plan's lists.
    assert len(figures["loops"]) == 2
    for loop in figures["loops"]:
        assert loop["spills"] == 0 and loop["products"] == PRODUCTS[int(head_dim)]
        # Scores are waited for while the product with the values runs, and that one after the softmax.
        assert loop["in flight"] == [1, 0], loop
    assert max(loop["slots"] for loop in figures["loops"]) <= budget.steady, figures["loops"]


@pytest.mark.parametrize("case", list(BUDGETS)[:1])
def test_kernels_stay_within_budget(case: str) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", list(BUDGETS)[1:])
def test_the_rest_stays_within_budget(case: str) -> None:
    check(case)


if __name__ == "__main__":
    main(sys.argv[1:])
