"""The Gluon kernel of dQ compiles for Hopper: products stay in flight, nothing is spilled, loops are short.

python -m tests.ops.test_block_sparse_attention_gluon_backward_compiled bf16:128:128      a JSON object on stdout
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import gluon_budgets as gluon
from tests.harness.gluon_budgets import Budget

pytestmark = gluon.NEEDS

# Dtype, head dimension, query rows of a plan's tile, options. A step has 64 keys; the Triton kernel has 306 instructions without a mask.
BUDGETS = {
    "bf16:128:128": Budget(280, 197_400, masked=385),
    "fp16:128:64": Budget(280, 197_400, masked=385),
    "bf16:64:128": Budget(280, 164_600, masked=385),
    "bf16:128:128:lse,negative": Budget(280, 197_400, masked=415),
}
# 64 x N x 16 products in a step: of the scores, of their gradients, of dQ.
PRODUCTS = {128: 20, 64: 12}


def compile_case(case: str) -> Any:
    import torch

    from pdkernels._attention import AttentionArguments, GradientArguments
    from pdkernels.gluon import _launch
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
    return gluon.compiled(lambda: _launch.of_queries(gradients, torch.empty_like(q), saved))["dq_kernel"]


def measure(cases: list[str]) -> dict[str, dict[str, Any]]:
    return gluon.measure(cases, "tests.ops.test_block_sparse_attention_gluon_backward_compiled")


@pytest.mark.parametrize("case", gluon.cases(BUDGETS))
def test_kernels_stay_within_budget(case: str) -> None:
    figures = measure([case])[case]
    assert figures["tma"]
    # Scores are waited for while two products run, their gradients while one does.
    gluon.check(figures, BUDGETS[case], PRODUCTS[int(case.split(":")[1])], [2, 1, 0])


if __name__ == "__main__":
    gluon.main(compile_case)
