"""The Gluon kernel of dQ, executed by `tests.gluonsim` under random schedules, against the gradients of the dense reference."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")
from pdkernels.triton.block_sparse_attention import Saved
from tests.gluonsim import Edit, Fault, Simulator
from tests.gluonsim.attention_cases import DQ_MUTATIONS, Call, check_dq, gradients_of, launcher, random_call


def run(
    seed: int, call: Call, edits: tuple[Edit, ...] = (), programs: int = 2, stages: int = 2, inputs: int | None = None
) -> torch.Tensor:
    # Where one weight is nearly 1, delta = rowsum(dO * O) has the rounding of O, which PyTorch's gradients have not: no large scales.
    scale = math.copysign(call.given.q.shape[3] ** -0.5, call.given.scale)
    call = call._replace(given=call.given._replace(scale=scale))
    gradients = gradients_of(call, seed if inputs is None else inputs)
    module = launcher(simulator := Simulator(edits), programs, stages)
    assert module.serves_gradients(gradients)
    rows = -(-call.given.q.shape[1] // call.given.block_q) * call.given.block_q
    dq = torch.full(call.given.q.shape, torch.nan, dtype=call.given.q.dtype)
    saved = Saved(*(torch.full((*gradients.lse.shape[:2], rows), torch.nan) for _ in range(2)))
    with simulator.schedule(seed):
        module.of_queries(gradients, dq, saved)
    check_dq(call, gradients, dq, saved)
    return dq


def test_random_plans_under_random_schedules() -> None:
    for seed in range(10):
        run(seed, random_call(seed, 200), programs=1 + seed % 3, stages=2 + seed % 2)


def test_the_same_bits_under_every_schedule() -> None:
    assert torch.equal(*(run(seed, random_call(3, 200), programs=1 + seed, inputs=1) for seed in (1, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(10, 5010, 100))
def test_many_plans_under_many_schedules(first: int) -> None:
    for seed in range(first, first + 100):
        run(seed, random_call(seed), programs=1 + seed % 3, stages=2 + seed % 2)


FOUND_WITHIN = 20


@pytest.mark.slow
@pytest.mark.parametrize("name", DQ_MUTATIONS)
def test_a_planted_fault_is_found(name: str) -> None:
    for seed in range(FOUND_WITHIN):
        try:
            run(seed, random_call(seed + 1000, 700), (DQ_MUTATIONS[name],))
        except (Fault, AssertionError):
            return
    pytest.fail(f"{name}: not found in {FOUND_WITHIN} schedules")
