"""The Gluon kernel of speculative attention, executed by `tests.gluonsim` under random schedules, against the dense reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")
from pdkernels import masks
from pdkernels._attention import SpeculativeArguments
from tests.gluonsim import Edit, Fault, Simulator
from tests.gluonsim.speculative_cases import MUTATIONS, WRONG_VALUES, Call, check, cut_tile_call, launcher, random_call
from tests.ops.speculative_cases import assert_stored, in_pages, make_inputs, make_rows, with_room


def run(seed: int, call: Call, edits: tuple[Edit, ...] = (), stages: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    simulator = Simulator(edits)
    module = launcher(simulator, stages)
    assert module.serves(call.given)
    with simulator.schedule(seed):
        results = module.forward(call.given)
    check(call, results)
    return results


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (10, 20, 30, 40))])
def test_random_tails_under_random_schedules(first: int) -> None:
    for seed in range(first, first + 10):
        run(seed, random_call(seed, 200, 70), stages=2 + seed % 2)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(50, 5050, 100))
def test_many_tails_under_many_schedules(first: int) -> None:
    for seed in range(first, first + 100):
        run(seed, random_call(seed), stages=2 + seed % 2)


FOUND_WITHIN = 20


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MUTATIONS, *WRONG_VALUES])
def test_a_planted_fault_is_found(name: str) -> None:
    edit = (MUTATIONS | WRONG_VALUES)[name]
    for seed in range(FOUND_WITHIN):
        try:
            # Prefixes of several splits, new tokens of two steps.
            run(seed, random_call(seed + 1000, 700, 200) if seed else cut_tile_call(), (edit,))
        except (Fault, AssertionError):
            return
    pytest.fail(f"{name}: not found in {FOUND_WITHIN} schedules")


def test_a_tile_past_the_end() -> None:
    run(0, cut_tile_call())


def test_a_paged_cache_gives_the_bits_of_a_contiguous_one() -> None:
    mask = masks.quadratic(6)
    inputs = make_inputs(mask.q_len, [300], slots=512, heads=2, kv_heads=1, head_dim=64, dtype=torch.float16)
    found = []
    for page_size in (0, 128, 256):
        *tensors, table = in_pages(inputs, page_size) if page_size else inputs
        given = SpeculativeArguments(*tensors, *mask.plan(64, 64).arguments, 0.125, table)
        found.append(run(page_size, Call(given, mask.dense())))
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other))


@pytest.mark.parametrize("how", ["all", "both"])
@pytest.mark.parametrize("page_size", [0, 128])
def test_rows_are_stored(page_size: int, how: str) -> None:
    mask = masks.causal(40)
    inputs = make_inputs(40, [100, 3], slots=200, heads=2, kv_heads=2, head_dim=64, dtype=torch.float16)
    rows = make_rows(inputs, how)
    if page_size:
        inputs = with_room(inputs, rows, page_size)
    *tensors, table = inputs
    caches = [x.clone() for x in tensors[3:5]]
    given = SpeculativeArguments(
        *tensors[:3], *caches, tensors[5], *mask.plan(64, 64).arguments, 0.125, table, **rows._asdict()
    )
    module = launcher(Simulator())
    check(Call(given, mask.dense()), module.forward(given, append=True))
    assert_stored(caches, inputs, rows)


def test_what_the_kernel_does_not_serve() -> None:
    serves = launcher(Simulator()).serves
    mask = masks.causal(40)

    def call(
        rows: int = 40, head_dim: int = 64, dtype: torch.dtype = torch.float16, **more: Any
    ) -> SpeculativeArguments:
        *tensors, table = make_inputs(rows, [100], heads=2, kv_heads=2, head_dim=head_dim, dtype=dtype)
        return SpeculativeArguments(*tensors, *mask.plan(64, more.pop("block_k", 64)).arguments, 0.125, table, **more)

    assert serves(call()) and serves(call(head_dim=128, dtype=torch.bfloat16)) and serves(call(sinks=torch.zeros(2)))
    assert not serves(call(rows=32))  # the Triton kernel for few rows
    assert not serves(call(head_dim=32)) and not serves(call(dtype=torch.float32)) and not serves(call(block_k=48))
    assert not serves(call(starts=torch.zeros(1, 1, dtype=torch.int64)))
    plain = call()
    for page_size in (16, 64, 192):  # a step may cross pages
        pages = plain.k_cache.new_zeros(4, page_size, *plain.k_cache.shape[2:])
        assert not serves(
            plain._replace(k_cache=pages, v_cache=pages, block_table=torch.zeros(1, 4, dtype=torch.int32))
        )
    shifted = torch.zeros(plain.v_new.numel() + 4, dtype=torch.float16)[4:].view(plain.v_new.shape)
    assert not serves(plain._replace(v_new=shifted))
