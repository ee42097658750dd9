"""The Gluon kernel of block-sparse attention, executed by `tests.gluonsim` under random schedules, against the dense reference."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs triton")
from tests.gluonsim import Edit, Fault, Simulator
from tests.gluonsim.attention_cases import MUTATIONS, WRONG_VALUES, Call, check, launcher, random_call


def run(seed: int, call: Call, edits: tuple[Edit, ...] = (), programs: int = 2, stages: int = 2) -> None:
    simulator = Simulator(edits)
    module = launcher(simulator, programs, stages)
    assert module.serves(call.given)
    with simulator.schedule(seed):
        results = module.forward(call.given)
    check(call, results)


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (10, 20, 30, 40))])
def test_random_plans_under_random_schedules(first: int) -> None:
    for seed in range(first, first + 10):
        run(seed, random_call(seed, 200), programs=1 + seed % 3, stages=2 + seed % 2)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(50, 5050, 100))
def test_many_plans_under_many_schedules(first: int) -> None:
    for seed in range(first, first + 100):
        run(seed, random_call(seed), programs=1 + seed % 3, stages=2 + seed % 2)


FOUND_WITHIN = 20


# Every fifth in every run, from breaches of the protocol and from wrong values, but for one that takes long to show.
NAMES = [
    name if i % 5 == 0 and name != "bits of another row" else pytest.param(name, marks=pytest.mark.slow)
    for i, name in enumerate([*MUTATIONS, *WRONG_VALUES])
]


@pytest.mark.parametrize("name", NAMES)
def test_a_planted_fault_is_found(name: str) -> None:
    edit = (MUTATIONS | WRONG_VALUES)[name]
    for seed in range(FOUND_WITHIN):
        try:
            run(seed, random_call(seed + 1000, 700), (edit,))
        except (Fault, AssertionError):
            return
    pytest.fail(f"{name}: not found in {FOUND_WITHIN} schedules")
