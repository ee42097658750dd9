"""The Gluon kernel of block-sparse attention compiles for Hopper: products stay in flight, nothing is spilled, loops are short.

python -m tests.ops.test_block_sparse_attention_gluon_compiled bf16:128:128      a JSON object on stdout
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
    """Instructions of a warp for 128 keys that need no mask, at most."""
    masked: int
    """For 128 keys that need one. The Triton kernel has 566 for 64."""
    shared: int
    """Bytes of shared memory."""


# Dtype, head dimension, query rows of a plan's tile.
BUDGETS = {
    "bf16:128:128": Budget(465, 645, 197_064),
    "fp16:128:64": Budget(465, 645, 197_064),
    "bf16:64:128": Budget(440, 630, 164_360),
    "fp16:64:256": Budget(440, 630, 164_360),
}
# 64 x 128 x 16 products in a step: of the scores, of the values.
PRODUCTS = {128: 16, 64: 12}


def compile_case(case: str) -> Any:
    import torch

    from pdkernels._attention import AttentionArguments
    from pdkernels.gluon import _launch
    from pdkernels.masks import Segment, SegmentMask

    dtype, head_dim, block_q = case.split(":")
    element = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    q, k = (torch.zeros(1, 256, heads, int(head_dim), dtype=element) for heads in (8, 2))
    plan = SegmentMask([Segment(256, "causal")]).plan(int(block_q), 128).arguments
    given = AttentionArguments(q, k, k, *plan, 0.1)
    assert _launch.serves(given)
    return gluon.compiled(lambda: _launch.forward(given))["forward_kernel"]


def main(cases: list[str]) -> None:
    print(json.dumps({case: gluon.figures(compile_case(case)) for case in cases}))


def measure(cases: list[str]) -> dict[str, dict[str, Any]]:
    return harness.measure(cases, "tests.ops.test_block_sparse_attention_gluon_compiled", gluon.SOURCES)


def check(case: str) -> None:
    figures, budget = measure([case])[case], BUDGETS[case]
    assert not figures["serialized"] and not figures["spill"], figures
    # 168 registers a thread at launch; setmaxnreg then gives consumers 240 and the producer 24.
    assert figures["registers"] <= 168 and figures["setmaxnreg"] and figures["tma"]
    assert figures["shared"] <= min(budget.shared, harness.SHARED_LIMIT["sm_90"])
    # For each of the two consumers a loop over full tiles and one over tiles with a mask.
    *steady, third, fourth = figures["loops"]
    assert len(steady) == 2
    for loop in figures["loops"]:
        assert loop["spills"] == 0 and loop["products"] == PRODUCTS[int(case.split(":")[1])]
        # Scores are waited for while the product with the values runs, and that one after the softmax.
        assert loop["in flight"] == [1, 0], loop
    assert max(loop["slots"] for loop in steady) <= budget.steady, steady
    assert max(third["slots"], fourth["slots"]) <= budget.masked, (third, fourth)


@pytest.mark.parametrize("case", list(BUDGETS)[:1])
def test_kernels_stay_within_budget(case: str) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", list(BUDGETS)[1:])
def test_the_rest_stays_within_budget(case: str) -> None:
    check(case)


if __name__ == "__main__":
    main(sys.argv[1:])
