"""The Gluon kernels of dQ, of dK and dV, and of all three compile for Hopper: products stay in flight, loops are short and spill nothing.

python -m tests.ops.test_block_sparse_attention_gluon_backward_compiled bf16:128:128      a JSON object on stdout
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import gluon_budgets as gluon
from tests.harness.gluon_budgets import Budget

pytestmark = gluon.NEEDS

# Dtype, head dimension, query rows of a plan's tile, options. A step of dQ has 64 keys, one of dK and dV ("keys") 64 queries.
BUDGETS = {
    "bf16:128:128": Budget(280, 197_400, masked=385),
    "fp16:128:64": Budget(280, 197_400, masked=385),
    "bf16:64:128": Budget(280, 164_600, masked=385),
    "bf16:128:128:lse,negative": Budget(280, 197_400, masked=415),
    "bf16:128:128:keys": Budget(315, 199_240, masked=475, spill=16),
    "fp16:64:64:keys": Budget(280, 100_936, masked=440),
    "bf16:128:128:keys,negative": Budget(345, 199_240, masked=505, spill=16),
}
# All in one pass: a step has 128 keys and 64 queries, its loop serves masks and last turns too, and loads one or two numbers again that have no register.
ONE_PASS = {
    "bf16:128:128:one-pass": Budget(800, 198_848, spill=56),
    "fp16:128:64:one-pass,lse,negative": Budget(860, 198_848, spill=96),
}
RELOADS = 2
# 64 x N x 16 products in a step: of the scores, of their gradients, and of dQ, or of dK and dV.
PRODUCTS = {"dq": {128: 20, 64: 12}, "keys": {128: 24, 64: 16}}
# How many are under way after each wait. Scores of dQ are waited for while two products run, their gradients while one does; of dK and dV
# the scores while their gradients are computed.
IN_FLIGHT = {"dq": [2, 1, 0], "keys": [1, 0, 0]}


def compile_case(case: str) -> Any:
    import torch

    from pdkernels._attention import AttentionArguments, GradientArguments
    from pdkernels.gluon import launch as _launch
    from pdkernels.masks import Segment, SegmentMask
    from pdkernels.triton.block_sparse_attention import Saved

    dtype, head_dim, block_q, *options = case.replace(",", ":").split(":")
    element = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    q, k = (torch.zeros(1, 256, heads, int(head_dim), dtype=element) for heads in (8, 2))
    plan = SegmentMask([Segment(256, "causal")]).plan(int(block_q), 128).arguments
    given = AttentionArguments(q, k, k, *plan, -0.1 if "negative" in options else 0.1)
    lse = torch.zeros(1, 8, 256)
    gradients = GradientArguments(q, lse if "lse" in options else None, q, lse, given)
    assert _launch.serves_gradients(gradients)
    saved = Saved(*(torch.zeros(1, 8, 256) for _ in range(2)))
    if "one-pass" in options:
        from pdkernels.gluon import launch_one_pass as _one_pass

        return gluon.compiled(lambda: _one_pass.backward(gradients))["one_pass_kernel"]
    if "keys" in options:
        parts = (torch.zeros(1, 256, 2, int(head_dim), dtype=element),) * 2
        return gluon.compiled(lambda: _launch.of_keys(gradients, saved, parts, plan[0][2:], 1, 4))["dkv_kernel"]
    return gluon.compiled(lambda: _launch.of_queries(gradients, torch.empty_like(q), saved))["dq_kernel"]


def measure(cases: list[str]) -> dict[str, dict[str, Any]]:
    return gluon.measure(cases, "tests.ops.test_block_sparse_attention_gluon_backward_compiled")


@pytest.mark.parametrize("case", gluon.cases(BUDGETS))
def test_kernels_stay_within_budget(case: str) -> None:
    figures, kernel = measure([case])[case], "keys" if "keys" in case else "dq"
    assert figures["tma"]
    gluon.check(figures, BUDGETS[case], PRODUCTS[kernel][int(case.split(":")[1])], IN_FLIGHT[kernel])


@pytest.mark.parametrize("case", gluon.cases(ONE_PASS))
def test_one_pass_stays_within_budget(case: str) -> None:
    figures, budget = measure([case])[case], ONE_PASS[case]
    assert not figures["serialized"] and figures["spill"] <= budget.spill, figures
    assert figures["registers"] <= 168 and figures["setmaxnreg"] and figures["shared"] <= budget.shared
    assert len(figures["loops"]) == 2, figures
    for loop in figures["loops"]:
        assert loop["slots"] <= budget.steady and loop["spills"] <= RELOADS, loop
        # Scores of 64 keys, their gradients and dQ take eight products each, dK and dV four of twice the width.
        assert loop["products"] == 32 and loop["in flight"] == [1, 1, 0, 0], loop


if __name__ == "__main__":
    gluon.main(compile_case)
