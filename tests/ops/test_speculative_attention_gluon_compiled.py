"""The Gluon kernel of speculative attention compiles for Hopper: products stay in flight, nothing is spilled, loops are short.

python -m tests.ops.test_speculative_attention_gluon_compiled bf16:128:0:64      a JSON object on stdout
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import gluon_budgets as gluon
from tests.harness.gluon_budgets import Budget

pytestmark = gluon.NEEDS

# Dtype, head dimension, page size or 0, rows and columns of a plan's tile, options. A step has 128 keys of the prefix.
BUDGETS = {
    "bf16:128:0:64": Budget(465, 164_300),
    "bf16:128:128:64": Budget(465, 164_300),
    "fp16:128:256:32": Budget(465, 164_300),
    "bf16:64:0:128": Budget(425, 148_000),
    "fp16:64:128:32": Budget(425, 148_000),
    "bf16:128:128:64:packed,sinks,negative,append": Budget(520, 164_300),
    "fp16:64:0:64:one split,packed,append,counts": Budget(425, 148_000),
}
# 64 x 128 x 16 products in a step: of the scores, of the values.
PRODUCTS = {128: 16, 64: 12}


def compile_case(case: str) -> Any:
    import torch

    from pdkernels._attention import SpeculativeArguments
    from pdkernels.gluon import launch_speculative as _launch
    from pdkernels.masks import quadratic

    dtype, head_dim, page_size, block, *options = case.replace(",", ":").split(":")
    element = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    mask = quadratic(8)
    q, k = (torch.zeros(2, mask.q_len, heads, int(head_dim), dtype=element) for heads in (8, 2))
    capacity, lengths = 128 if "one split" in options else 4096, torch.zeros(2, dtype=torch.int64)
    slots = int(page_size) or capacity
    cache = torch.zeros(2 * capacity // slots, slots, 2, int(head_dim), dtype=element)
    table = torch.zeros(2, capacity // slots, dtype=torch.int32) if int(page_size) else None
    more: dict[str, Any] = {"sinks": torch.zeros(8) if "sinks" in options else None}
    if "packed" in options:
        q, k = q.flatten(0, 1), k.flatten(0, 1)
        more |= {"cu_seqlens": torch.arange(3) * mask.q_len, "max_new": mask.q_len}
    if "counts" in options:
        more |= {"counts": lengths, "source_index": torch.zeros(2, 8, dtype=torch.int64)}
    plan = mask.plan(int(block), int(block)).arguments
    scale = -0.1 if "negative" in options else 0.1
    given = SpeculativeArguments(q, k, k, cache, cache, lengths, *plan, scale, table, **more)
    assert _launch.serves(given)
    kernels = gluon.compiled(lambda: _launch.forward(given, append="append" in options))
    assert ("_merge_kernel" in kernels) == ("one split" not in options)
    assert ("_append_kernel" in kernels) == ("append" in options)
    return kernels["split_kernel"]


def measure(cases: list[str]) -> dict[str, dict[str, Any]]:
    return gluon.measure(cases, "tests.ops.test_speculative_attention_gluon_compiled")


@pytest.mark.parametrize("case", gluon.cases(BUDGETS))
def test_kernels_stay_within_budget(case: str) -> None:
    figures = measure([case])[case]
    _, head_dim, *_ = case.split(":")
    assert figures["cp.async"] and figures["tma"]
    # Scores are waited for while the product with the values runs, and that one after the softmax.
    gluon.check(figures, BUDGETS[case], PRODUCTS[int(head_dim)], [1, 0])


if __name__ == "__main__":
    gluon.main(compile_case)
