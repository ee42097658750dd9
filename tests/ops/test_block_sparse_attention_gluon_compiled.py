"""The Gluon kernel of block-sparse attention compiles for Hopper: products stay in flight, nothing is spilled, loops are short.

python -m tests.ops.test_block_sparse_attention_gluon_compiled bf16:128:128      a JSON object on stdout
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import gluon_budgets as gluon
from tests.harness.gluon_budgets import Budget

pytestmark = gluon.NEEDS

# Dtype, head dimension, query rows of a plan's tile, options. A step has 128 keys; the Triton kernel has 566 instructions for 64 with a mask.
BUDGETS = {
    "bf16:128:128": Budget(465, 197_064, masked=645),
    "fp16:128:64": Budget(465, 197_064, masked=645),
    "bf16:64:128": Budget(440, 164_360, masked=630),
    "fp16:64:256": Budget(440, 164_360, masked=630),
    "bf16:128:128:sinks,negative": Budget(540, 197_080, masked=715),
}
# 64 x 128 x 16 products in a step: of the scores, of the values.
PRODUCTS = {128: 16, 64: 12}


def compile_case(case: str) -> Any:
    import torch

    from pdkernels._attention import AttentionArguments
    from pdkernels.gluon import launch as _launch
    from pdkernels.masks import Segment, SegmentMask

    dtype, head_dim, block_q, *options = case.replace(",", ":").split(":")
    element = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    q, k = (torch.zeros(1, 256, heads, int(head_dim), dtype=element) for heads in (8, 2))
    plan = SegmentMask([Segment(256, "causal")]).plan(int(block_q), 128).arguments
    sinks = torch.zeros(8) if "sinks" in options else None
    given = AttentionArguments(q, k, k, *plan, -0.1 if "negative" in options else 0.1, sinks)
    assert _launch.serves(given)
    return gluon.compiled(lambda: _launch.forward(given))["forward_kernel"]


def measure(cases: list[str]) -> dict[str, dict[str, Any]]:
    return gluon.measure(cases, "tests.ops.test_block_sparse_attention_gluon_compiled")


@pytest.mark.parametrize("case", gluon.cases(BUDGETS))
def test_kernels_stay_within_budget(case: str) -> None:
    figures = measure([case])[case]
    assert figures["tma"]
    # Scores are waited for while the product with the values runs, and that one after the softmax.
    gluon.check(figures, BUDGETS[case], PRODUCTS[int(case.split(":")[1])], [1, 0])


if __name__ == "__main__":
    gluon.main(compile_case)
