"""The Gluon kernel of dQ compiles for Hopper: products stay in flight, nothing is spilled, loops are short.

python -m tests.ops.test_block_sparse_attention_gluon_backward_compiled bf16:128:128      a JSON object on stdout
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
    """Instructions of a warp for 64 keys that need no mask, at most. The Triton kernel has 306."""
    masked: int
    """For 64 keys that need one."""
    shared: int
    """Bytes of shared memory."""


# Dtype, head dimension, query rows of a plan's tile.
BUDGETS = {
    "bf16:128:128": Budget(280, 385, 197_400),
    "fp16:128:64": Budget(280, 385, 197_400),
    "bf16:64:128": Budget(280, 385, 164_600),
}
# 64 x N x 16 products in a step: of the scores, of their gradients, of dQ.
PRODUCTS = {128: 20, 64: 12}


def compile_case(case: str) -> Any:
    import torch

    from pdkernels._attention import AttentionArguments, GradientArguments
    from pdkernels.gluon import _launch
    from pdkernels.masks import Segment, SegmentMask
    from pdkernels.triton.block_sparse_attention import Saved

    dtype, head_dim, block_q = case.split(":")
    element = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    q, k = (torch.zeros(1, 256, heads, int(head_dim), dtype=element) for heads in (8, 2))
    plan = SegmentMask([Segment(256, "causal")]).plan(int(block_q), 128).arguments
    gradients = GradientArguments(q, None, q, torch.zeros(1, 8, 256), AttentionArguments(q, k, k, *plan, 0.1))
    assert _launch.serves_gradients(gradients)
    saved = Saved(*(torch.zeros(1, 8, 256) for _ in range(2)))
    return gluon.compiled(lambda: _launch.of_queries(gradients, torch.empty_like(q), saved))["dq_kernel"]


def main(cases: list[str]) -> None:
    print(json.dumps({case: gluon.figures(compile_case(case)) for case in cases}))


def measure(cases: list[str]) -> dict[str, dict[str, Any]]:
    return harness.measure(cases, "tests.ops.test_block_sparse_attention_gluon_backward_compiled", gluon.SOURCES)


def check(case: str) -> None:
    figures, budget = measure([case])[case], BUDGETS[case]
    assert not figures["serialized"] and not figures["spill"], figures
    assert figures["registers"] <= 168 and figures["setmaxnreg"] and figures["tma"]
    assert figures["shared"] <= min(budget.shared, harness.SHARED_LIMIT["sm_90"])
    # For each of the two consumers a loop over full tiles and one over tiles with a mask.
    assert len(figures["loops"]) == 4
    for loop in figures["loops"]:
        assert loop["spills"] == 0 and loop["products"] == PRODUCTS[int(case.split(":")[1])]
        # Scores are waited for while two products run, their gradients while one does.
        assert loop["in flight"] == [2, 1, 0], loop
    steady, masked = figures["loops"][:2], figures["loops"][2:]
    assert max(loop["slots"] for loop in steady) <= budget.steady, steady
    assert max(loop["slots"] for loop in masked) <= budget.masked, masked


@pytest.mark.parametrize("case", list(BUDGETS)[:1])
def test_kernels_stay_within_budget(case: str) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", list(BUDGETS)[1:])
def test_the_rest_stays_within_budget(case: str) -> None:
    check(case)


if __name__ == "__main__":
    main(sys.argv[1:])
