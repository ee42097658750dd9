"""The backward pass of five products in Gluon, executed by `tests.gluonsim` with several programs at once under random schedules, against
the gradients of the dense reference."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import pdkernels as pd

pytest.importorskip("triton", reason="needs triton")
from pdkernels._attention import AttentionArguments
from pdkernels.masks import causal, dual_stream, noise_aware_causal
from tests.gluonsim import Edit, Fault, Simulator
from tests.gluonsim.attention_cases import Call, check_dkv, check_dq, gradients_of, plan_of, random_call
from tests.gluonsim.one_pass_cases import KERNEL, LAUNCH, MUTATIONS, TURNS


def run(
    seed: int, call: Call, edits: tuple[Edit, ...] = (), resident: int | None = None, inputs: int | None = None
) -> tuple[Tensor, ...]:
    """The gradients, by so many programs at once: one to five."""
    given = call.given._replace(scale=math.copysign(call.given.q.shape[3] ** -0.5, call.given.scale))
    call = call._replace(given=given)
    inputs = seed if inputs is None else inputs
    gradients = gradients_of(call, inputs)
    simulator = Simulator(edits)
    module = simulator.load(LAUNCH)
    module.STEPS.update({size: steps._replace(stages=2 + seed % 2) for size, steps in module.STEPS.items()})
    assert module.serves(gradients)
    simulator.resident = 1 + seed % 5 if resident is None else resident
    seen: dict[str, Any] = {}

    def empty(*shape: Any, **options: Any) -> Tensor:
        """Memory is what others left there."""
        made = real(*shape, **options)
        return made.fill_(math.nan if made.is_floating_point() else 12345)

    real, saved = torch.empty, module.Saved
    module.Saved = lambda *rows: seen.setdefault("saved", saved(*rows))
    module.add_pieces = add_pieces
    # As for a model whose keys do or do not fill a GPU.
    module.split_group = lambda group, blocks: (-(-group // (1 + inputs % group)), 1 + inputs % group)
    with simulator.schedule(seed), mock.patch.object(torch, "empty", empty):
        dq, dk, dv = module.backward(gradients)
    check_dq(call, gradients, dq, seen["saved"])
    check_dkv(call, gradients, (dk, dv))
    return dq, dk, dv


def add_pieces(partials: tuple[Tensor, Tensor], results: tuple[Tensor, Tensor]) -> None:
    for parts, result in zip(partials, results, strict=True):
        result.copy_(parts.sum(0))


def call_of(seed: int, largest: int = 300) -> Call:
    """A random call with heads of 128."""
    for number in range(seed, seed + 100_000, 1000):
        call = random_call(number, largest)
        if call.given.q.shape[3] == 128:
            return call
    raise AssertionError("no such call")


def call_under(mask: Any, seed: int, heads: tuple[int, int] = (4, 2), block_k: int = 128) -> Call:
    generator = torch.Generator().manual_seed(seed)
    dense = mask if isinstance(mask, Tensor) else mask.dense()
    q, k, v = (
        torch.randn(1, dense.shape[0], count, 128, generator=generator).bfloat16()
        for count in (heads[0], heads[1], heads[1])
    )
    given = AttentionArguments(q, k, v, *plan_of([dense], 128, block_k), 128, block_k, 128**-0.5)
    return Call(given, dense[None])


@pytest.mark.parametrize(
    "mask, heads, block_k",
    [
        (causal(500), (2, 1), 128),
        (causal(300), (2, 2), 256),
        (dual_stream(192, 32), (4, 2), 128),
        (noise_aware_causal(70, 32, 4, layout="streams"), (3, 1), 128),
    ],
)
def test_masks_under_random_schedules(mask: Any, heads: tuple[int, int], block_k: int) -> None:
    for seed in range(2):
        run(seed, call_under(mask, seed, heads, block_k))


def window() -> Tensor:
    """Tiles that have equally many visits."""
    rows, columns = torch.arange(900)[:, None], torch.arange(900)[None, :]
    return (columns <= rows) & (columns > rows - 300)


@pytest.mark.parametrize(
    "mask", [causal(900).dense(), window(), dual_stream(500, 32).dense(), torch.ones(700, 300) > 0]
)
def test_visits_and_their_turns(mask: Tensor) -> None:
    """Queries with the most visits first, of equals the last; keys in the order in which their programs start."""
    rows, lists, bitmaps = plan_of([mask], 128, 128)
    q_tiles, k_tiles = (-(-size // 128) for size in mask.shape)
    turns = torch.full((k_tiles, q_tiles, 4), -9, dtype=torch.int32)
    kernel = Simulator().load(TURNS).describe_kernel
    kernel[(q_tiles * k_tiles,)](turns, rows, lists, 0, 0, q_tiles, k_tiles, num_warps=1)
    seen = torch.tensor([[bool(part.any()) for part in row.split(128, 1)] for row in mask.split(128)])
    order = rows[q_tiles:, 3].tolist()
    assert order == sorted(range(k_tiles), key=lambda key: (-int(seen[:, key].sum()), key))
    for place, key in enumerate(order):
        walk = sorted(seen[:, key].nonzero().flatten().tolist(), key=lambda query: (-int(seen[query].sum()), -query))
        assert turns[key, : len(walk), 0].tolist() == walk
        for query, bitmap, turn, _ in turns[key, : len(walk)].tolist():
            before = sum(bool(seen[query, other]) for other in order[:place])
            assert turn == 2 * before + (before == seen[query].sum() - 1)
            tile = mask[query * 128 : (query + 1) * 128, key * 128 : (key + 1) * 128]
            assert (bitmap == -1) == bool(tile.all())
            assert bitmap == -1 or bits_of(bitmaps[bitmap])[: tile.shape[0], : tile.shape[1]].equal(tile)


def bits_of(words: Tensor) -> Tensor:
    return (words[:, :, None] >> torch.arange(32) & 1).flatten(1).bool()


def test_random_plans_under_random_schedules() -> None:
    for seed in range(4):
        run(seed, call_of(seed, 200))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 600, 20))
def test_many_plans_under_many_schedules(first: int) -> None:
    for seed in range(first, first + 20):
        run(seed, call_of(seed, 400))


def test_the_same_bits_under_every_schedule_and_number_of_programs() -> None:
    """Also where the query heads of a KV head are dealt out to several programs, and a tile of keys to two."""
    for call in (lambda: call_under(dual_stream(160, 32), 1, (3, 1), 256), lambda: call_of(3, 200)):
        first, *others = (run(seed, call(), inputs=1, resident=resident) for seed, resident in ((0, 1), (2, 3), (4, 9)))
        for other in others:
            assert all(torch.equal(x, y) for x, y in zip(first, other, strict=True))


def below_zero() -> Call:
    """Scores so low that a key past the end, whose score is 0, would have an infinite weight."""
    q, k = torch.full((1, 100, 1, 128), 5.0), torch.full((1, 100, 1, 128), -5.0)
    k[:, ::3] = -4.98
    mask = torch.ones(100, 100, dtype=torch.bool)
    given = AttentionArguments(
        q.bfloat16(), k.bfloat16(), q.bfloat16(), *plan_of([mask], 128, 128), 128, 128, 128**-0.5
    )
    return Call(given, mask[None])


def test_keys_past_the_end() -> None:
    run(1, below_zero())
    with pytest.raises((AssertionError, Fault)):
        run(1, below_zero(), (Edit(KERNEL, "(keys_left + nothing < 64)", "(keys_left + nothing < 0)"),))


def backwards() -> Tensor:
    """Later keys are seen by more queries, and so start first; nobody sees those of the second tile."""
    mask = causal(400).dense().flip(0, 1)
    mask[:, 128:256] = False
    return mask


FOUND_WITHIN = 24


def planted_call(seed: int) -> Call:
    """In turn: keys that several programs add, tiles of 256 keys, another order and tiles that nobody sees, random plans."""
    calls = [
        lambda: call_under(causal(300), seed, (1, 1)),
        lambda: call_under(causal(290), seed, (2, 1), 256),
        lambda: call_under(backwards(), seed, (2, 1)),
        lambda: call_of(seed + 1000, 400),
    ]
    return calls[seed % 4]()


def test_faults_are_of_the_present_sources() -> None:
    for edit in MUTATIONS.values():
        Simulator([edit]).load(edit.module)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_fault_is_found(name: str) -> None:
    for seed in range(FOUND_WITHIN):
        try:
            run(seed, planted_call(seed), (MUTATIONS[name],))
        except (Fault, AssertionError):
            return
    pytest.fail(f"{name}: not found in {FOUND_WITHIN} schedules")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mask", [causal(1500), dual_stream(1024, 32)], ids=["causal", "dual-stream"])
def test_cuda_repeats_its_bits_and_has_the_gradients_of_two_passes(mask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(1, mask.q_len, heads, 128, generator=generator).bfloat16().cuda() for heads in (8, 2, 2, 8)
    )
    inputs, plan = [x.requires_grad_() for x in (q, k, v)], mask.plan(128, 128, "cuda")

    def gradients(setting: str) -> tuple[Tensor, ...]:
        monkeypatch.setenv("PDKERNELS_GLUON", setting)
        return torch.autograd.grad(pd.block_sparse_attention(*inputs, plan), inputs, grad)

    expected, first = gradients("auto"), gradients("one-pass")
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients("one-pass")))
    for a, b in zip(first, expected):
        assert (a - b).float().norm() < 0.01 * b.float().norm()
