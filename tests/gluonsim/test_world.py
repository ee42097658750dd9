"""Programs that run at once in the simulator, and what they may know of each other's memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")
from tests.gluonsim import Fault, Simulator

SOURCE = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

ROWS = gl.BlockedLayout([1], [32], [4], [0])

@gluon.jit
def add(sums, turn, added, ticket):
    mbarrier.wait(turn, 0)
    at = sums + gl.arange(0, 128, layout=ROWS)
    before = gl.load(at, mask=ticket > 0, other=1.0)
    gl.store(at, before * 3.0 + ticket.to(gl.float32))
    gl.thread_barrier()
    mbarrier.arrive(added)

@gluon.jit
def hand_on(counters, turn, added, ticket):
    while gl.atomic_add(counters + 1, 0, sem="acquire", scope="gpu") != ticket:
        pass
    mbarrier.arrive(turn)
    mbarrier.wait(added, 0)
    gl.atomic_add(counters + 1, 1, sem="release", scope="gpu")

@gluon.jit
def kernel(sums, counters):
    turn = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    added = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(turn, count=1)
    mbarrier.init(added, count=1)
    fence_async_shared()
    ticket = gl.atomic_add(counters, 1, sem="relaxed", scope="gpu")
    gl.warp_specialize([(add, (sums, turn, added, ticket)), (hand_on, (counters, turn, added, ticket))], [1], [24])
"""
PROGRAMS = 5


def run(seed: int, *edits: tuple[str, str]) -> None:
    text = SOURCE
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    simulator = Simulator()
    simulator.resident = 1 + seed % 4
    module: Any = simulator.execute(text, "world")
    sums, counters = torch.full((128,), torch.nan), torch.zeros(2, dtype=torch.int32)
    with simulator.schedule(seed):
        module.kernel[(PROGRAMS,)](sums, counters)
    wanted = 1.0
    for ticket in range(PROGRAMS):
        wanted = wanted * 3 + ticket
    assert (sums == wanted).all() and counters.tolist() == [PROGRAMS, PROGRAMS]


def test_the_order_is_that_of_tickets_under_every_schedule() -> None:
    for seed in range(20):
        run(seed)


LOOK = '    while gl.atomic_add(counters + 1, 0, sem="acquire", scope="gpu") != ticket:\n        pass\n'
FAULTS = {
    "no look at the counter": ((LOOK, ""), "does not know"),
    "a relaxed look": (("acquire", "relaxed"), "does not know"),
    "a relaxed end": (("release", "relaxed"), "does not know"),
    "an end without the others' stores": (("    gl.thread_barrier()\n", ""), "does not know"),
    "an end too early": (("    mbarrier.wait(added, 0)\n", ""), "does not know"),
    "a turn that never comes": (("!= ticket", "!= ticket + 1"), "deadlock"),
    "a place that nobody takes": (
        ('gl.atomic_add(counters, 1, sem="relaxed", scope="gpu")', "gl.program_id(0)"),
        "deadlock",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_between_programs_is_found(name: str) -> None:
    edit, wanted = FAULTS[name]
    with pytest.raises(Fault, match=wanted):
        for seed in range(20):
            run(seed, edit)
