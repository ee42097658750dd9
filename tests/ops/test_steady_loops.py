"""The loops in which attention spends its time, by the machine code of sm_90a: what they issue, wait for and spill."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from bench.predict.loop_figures import measure
from tests.harness.budgets import find_cuobjdump
from tests.harness.triton_interpreter import requires_triton

pytestmark = [requires_triton, pytest.mark.skipif(find_cuobjdump() is None, reason="needs cuobjdump")]


class Budget(NamedTuple):
    slots: int
    """Instructions of a warp in a step, at most."""
    wait: int
    """Groups of loads that may still be under way where the loop waits, at least. 0: it waits for what it has just asked for."""
    spills: int = 0
    """Accesses to local memory in a step, at most."""


# At 128 x 128 keys and rows a step is 2048 cycles of the tensor cores in the forward pass; a warp issues one instruction a cycle,
# two warps share an issuer, and loads that nothing hides take 500 to 1000 cycles.
BUDGETS = {
    "forward": Budget(545, wait=2),
    "dq": Budget(310, wait=4),
    "dkv": Budget(440, wait=4, spills=8),
    "speculative contiguous": Budget(355, wait=4),
    "speculative paged": Budget(505, wait=6),
    "vocabulary few": Budget(200, wait=6),
    "vocabulary many": Budget(130, wait=6),
}


@pytest.mark.parametrize("name", BUDGETS)
def test_within_budget(name: str) -> None:
    figures, budget = measure()[name]["steady"], BUDGETS[name]
    assert figures["tensor"] > 0
    assert figures["slots"] <= budget.slots and figures["spills"] <= budget.spills, figures
    assert figures["wait"] >= budget.wait, figures
