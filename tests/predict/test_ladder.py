"""The model reproduces what was published of other forward passes."""

from __future__ import annotations

import pytest

from bench.predict.ladder import RUNGS, lines, rate
from tests.cudasim.build import ROOT
from tests.harness.budgets import find_cuobjdump
from tests.harness.triton_interpreter import requires_triton


@pytest.mark.parametrize("name, size", [(rung.name, size) for rung in RUNGS for size in rung.published])
def test_published_rates_within_ten_percent(name: str, size: int) -> None:
    (rung,) = (one for one in RUNGS if one.name == name)
    assert rate(rung.step, size) == pytest.approx(rung.published[size], rel=0.1)


def test_the_page_has_these_rates() -> None:
    page = (ROOT / "docs" / "gpu_proof.md").read_text()
    table = page.partition("<!-- ladder -->\n")[2].partition("\n<!-- /ladder -->")[0]
    assert table == "\n".join(lines())


@requires_triton
@pytest.mark.skipif(find_cuobjdump() is None, reason="needs cuobjdump")
def test_the_page_has_the_instructions_of_the_loops() -> None:
    from tests.ops import test_block_sparse_attention_gluon_backward_compiled as backward
    from tests.ops import test_block_sparse_attention_gluon_compiled as forward

    page, case = " ".join((ROOT / "docs" / "gpu_proof.md").read_text().split()), "bf16:128:128"
    cases = ((forward, case), (backward, case), (backward, f"{case}:keys"))
    (steady, masked), (dq, masked_dq), (dkv, masked_dkv) = (
        [max(loop["slots"] for loop in loops) for loops in (found[:2], found[2:])]
        for found in (module.measure([case])[case]["loops"] for module, case in cases)
    )
    assert f"issues {steady} instructions for 128 keys without a mask and {masked} with one" in page
    assert f"dQ takes {dq} instructions of a warp for 64 keys, and {masked_dq} with a mask" in page
    assert f"dK and dV take {dkv} for 64 queries, and {masked_dkv} with a mask" in page
