"""The Gluon kernel of dK and dV, executed by `tests.gluonsim` under random schedules, against the gradients of the dense reference."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")
from tests.gluonsim import Edit, Fault, Simulator
from tests.gluonsim.attention_cases import Call, check_dkv, gradients_of, launcher, random_call, saved_of
from tests.gluonsim.dkv_cases import MUTATIONS


def run(
    seed: int, call: Call, edits: tuple[Edit, ...] = (), stages: int = 2, inputs: int | None = None
) -> torch.Tensor:
    scale = math.copysign(call.given.q.shape[3] ** -0.5, call.given.scale)  # as in the test of dQ
    given = call.given._replace(scale=scale)
    call = call._replace(given=given)
    inputs = seed if inputs is None else inputs
    gradients = gradients_of(call, inputs)
    module = launcher(simulator := Simulator(edits), stages=stages)
    assert module.serves_gradients(gradients)
    group = given.q.shape[2] // given.k.shape[2]
    piece = 1 + inputs % group
    pieces = -(-group // piece)
    parts = torch.full((2, pieces, *given.k.shape), torch.nan, dtype=torch.float32 if pieces > 1 else given.k.dtype)
    q_tiles, k_tiles = (
        -(-size // block) for size, block in zip((given.q.shape[1], given.k.shape[1]), given[6:8], strict=True)
    )
    rows = given.plan_rows.narrow(-2, q_tiles, k_tiles)
    with simulator.schedule(seed):
        module.of_keys(gradients, saved_of(call, gradients), tuple(parts), rows, pieces, piece)
    results = parts.sum(1).to(given.k.dtype)
    check_dkv(call, gradients, (results[0], results[1]))
    return results


def test_random_plans_under_random_schedules() -> None:
    for seed in range(10):
        run(seed, random_call(seed, 150), stages=2 + seed % 2)


def test_both_kernels_one_after_the_other() -> None:
    """What the first one saves is what the second one reads, and parts of a group are added up."""
    call = random_call(2, 150)
    call = call._replace(given=call.given._replace(scale=call.given.q.shape[3] ** -0.5))
    gradients = gradients_of(call, 1)
    module = launcher(Simulator())
    _, dk, dv = module.backward(gradients)
    check_dkv(call, gradients, (dk, dv))


@pytest.mark.slow
def test_plans_of_many_tiles() -> None:
    for seed in range(10, 50):
        run(seed, random_call(seed, 400), stages=2 + seed % 2)


def test_the_same_bits_under_every_schedule() -> None:
    assert torch.equal(*(run(seed, random_call(3, 150), inputs=1) for seed in (1, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(50, 5050, 100))
def test_many_plans_under_many_schedules(first: int) -> None:
    for seed in range(first, first + 100):
        run(seed, random_call(seed), stages=2 + seed % 2)


FOUND_WITHIN = 20


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_fault_is_found(name: str) -> None:
    for seed in range(FOUND_WITHIN):
        try:
            run(seed, random_call(seed + 1000, 700), (MUTATIONS[name],))
        except (Fault, AssertionError):
            return
    pytest.fail(f"{name}: not found in {FOUND_WITHIN} schedules")
