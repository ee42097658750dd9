"""The planner against a brute-force planner on the dense mask, published tile counts, and the methods of plans."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import pdkernels as pd
import pdkernels.masks as masks
from tests.harness.pretended_gpu import pretended_gpu, without_gpu
from tests.masks.brute_force import brute_force, listed
from tests.masks.strategies import build, calls, random_masks

tiles = st.sampled_from([16, 32, 48, 64])


@settings(max_examples=400)
@given(st.one_of(random_masks(), calls.map(build)), tiles, tiles)
def test_equals_brute_force(mask: masks.SegmentMask, block_q: int, block_k: int) -> None:
    assert listed(mask.plan(block_q, block_k)) == brute_force(mask.dense(), block_q, block_k)


@pytest.mark.parametrize("block_q, block_k", [(16, 16), (32, 64), (128, 128), (128, 80), (1024, 16)])
@pytest.mark.parametrize(
    "mask",
    [
        masks.noise_aware_causal(37, 32, 5),
        masks.noise_aware_causal(37, 32, 5, "window", 2, "interleaved"),
        masks.noise_aware_causal(0, 1, 90, "clean", layout="interleaved"),
        masks.dual_stream(170, 32, "block"),
        masks.planned([(40, (33, 70), True), (11, (64,), False), (1, (), False)], sparse=True),
        masks.quadratic(13, in_group="causal"),
        masks.pack([masks.causal(100), masks.dual_stream(65, 8), masks.tree([-1, 0, 0, 1, 2])], length=400),
        masks.noise_aware_causal(100, 16, 8)[100:228, 3:317],
        masks.causal(150)[:, 40:41],  # the diagonal leaves the window in the middle of a tile
    ],
    ids=repr,
)
def test_larger_masks_equal_brute_force(mask: masks.SegmentMask, block_q: int, block_k: int) -> None:
    if mask.q_len * mask.kv_len > 130_000 and block_q * block_k < 1000:
        pytest.skip("slow in Python")
    assert listed(mask.plan(block_q, block_k)) == brute_force(mask.dense(), block_q, block_k)


@settings(max_examples=50)
@given(random_masks(80), tiles, tiles)
def test_skipped_tiles_are_hidden_and_full_tiles_visible(mask: masks.SegmentMask, block_q: int, block_k: int) -> None:
    """The plan, unpacked pair by pair, is the mask, read along rows and along columns."""
    dense, plan = mask.dense(), mask.plan(block_q, block_k)
    bits = (plan.bitmaps[..., None] >> torch.arange(32)) & 1
    for transposed in (False, True):
        offsets, others, numbers = plan.visits(transposed)
        unpacked = torch.zeros(
            -(-mask.q_len // block_q) * block_q, -(-mask.kv_len // block_k) * block_k, dtype=torch.bool
        )
        for tile in range(len(offsets) - 1):
            for visit in range(offsets[tile], offsets[tile + 1]):
                i, j = (int(others[visit]), tile) if transposed else (tile, int(others[visit]))
                number = int(numbers[visit])
                content = torch.ones(block_q, block_k) if number < 0 else bits[number].flatten(1)[:, :block_k]
                unpacked[i * block_q : (i + 1) * block_q, j * block_k : (j + 1) * block_k] = content.bool()
        assert torch.equal(unpacked[: mask.q_len, : mask.kv_len], dense)
    # Beyond the lengths all bits of partial tiles are 0.
    assert sum(int(bits[number].sum()) for number in plan.visits().bitmaps.tolist() if number >= 0) <= int(dense.sum())


@settings(max_examples=60)
@given(random_masks(80), tiles, tiles)
def test_dense_is_the_mask(mask: masks.SegmentMask, block_q: int, block_k: int) -> None:
    assert torch.equal(mask.plan(block_q, block_k).dense(), mask.dense())


@pytest.mark.parametrize("layout", ["streams", "interleaved"])
def test_ranges_hold_every_whole_full_tile(layout: str) -> None:
    """A kernel that walks ranges without a mask reads nothing beyond the lengths, and lists hold no tile that needs no mask."""
    plan = masks.noise_aware_causal(37, 32, 9, layout=layout).plan(32, 48)
    q_tiles = plan.grid[0]
    for rows, length, block in ((plan.rows[:q_tiles], plan.kv_len, 48), (plan.rows[q_tiles:], plan.q_len, 32)):
        assert length % block, "the case wants a ragged last tile"
        for begin, middle, end, _ in rows.tolist():
            ranges, others = plan.lists[begin:middle], plan.lists[middle:end]
            assert bool((ranges[:, 1] * block <= length).all()) and bool((ranges[:, 0] < ranges[:, 1]).all())
            assert bool((ranges[1:, 0] > ranges[:-1, 1]).all())
            assert all(number >= 0 or (tile + 1) * block > length for tile, number in others.tolist())


def counts(mask: masks.SegmentMask, tile: int = 128) -> tuple[int, int]:
    plan = mask.plan(tile, tile)
    return plan.visited_tiles, int((plan.visits().bitmaps >= 0).sum())


@pytest.mark.parametrize(
    "num_blocks, layout, visited, partial, work",
    [
        (64, "interleaved", 666, 532, 1.698),
        (64, "streams", 410, 36, 1.046),
        (248, "interleaved", 8256, 7754, 1.899),
        (248, "streams", 4412, 128, 1.015),
    ],
)
def test_noise_aware_tiles(num_blocks: int, layout: str, visited: int, partial: int, work: float) -> None:
    mask = masks.noise_aware_causal(512, 32, num_blocks, layout=layout)
    assert counts(mask) == (visited, partial)
    assert 1 / mask.plan().tile_efficiency == pytest.approx(work, abs=1e-3)


@pytest.mark.parametrize(
    "conditioning, window, short, long",
    [("noisy", None, 0.95, 0.98), ("window", 16, 0.95, 0.98), ("clean", None, 0.92, 0.97)],
)
def test_noise_aware_efficiency(conditioning: str, window: int | None, short: float, long: float) -> None:
    for num_blocks, efficiency in ((64, short), (248, long)):
        assert masks.noise_aware_causal(512, 32, num_blocks, conditioning, window).plan().tile_efficiency >= efficiency


@pytest.mark.parametrize("clean, pairs, work", [("causal", 16_844_800, 1.058), ("block", 16_908_288, 1.054)])
@pytest.mark.parametrize("order", ["noisy_first", "clean_first"])
def test_dual_stream_tiles(clean: str, pairs: int, work: float, order: str) -> None:
    mask = masks.dual_stream(4096, 32, clean, order)
    assert counts(mask) == (1088, 96) and mask.plan().visible_pairs == pairs
    assert 1 / mask.plan().tile_efficiency == pytest.approx(work, abs=1e-3) and mask.plan().tile_efficiency >= 0.94


@pytest.mark.parametrize(
    "tile, block_size, interleaved, spec_first, of",
    [(16, 16, 168, 33, 289), (64, 16, 18, 9, 25), (64, 32, 168, 33, 289), (128, 32, 52, 17, 81)],
)
def test_quadratic_tiles(tile: int, block_size: int, interleaved: int, spec_first: int, of: int) -> None:
    for layout, visited in (("interleaved", interleaved), ("spec_first", spec_first)):
        plan = masks.quadratic(block_size, layout=layout).plan(tile, tile)
        assert plan.visited_tiles == visited and math.prod(plan.grid) == of


def test_equal_bitmaps_are_stored_once() -> None:
    assert len(masks.noise_aware_causal(512, 32, 248).plan().bitmaps) == 1
    assert len(masks.causal(4096).plan(64, 64).bitmaps) == 1


@pytest.mark.parametrize("mask", [masks.noise_aware_causal(512, 32, 2032), masks.dual_stream(65536, 32)], ids=repr)
def test_long_plans_stay_small(mask: masks.SegmentMask) -> None:
    """131,072 tokens: a plan grows with rows of tiles, not with the tiles they visit."""
    plan = mask.plan()
    assert plan.visited_tiles > 200_000 and plan.nbytes < 150_000


def test_plans_are_shared_by_equal_masks() -> None:
    plan = masks.quadratic(6).plan(32, 32)
    assert masks.quadratic(6).plan(32, 32) is plan and masks.quadratic(6).plan(32, 16) is not plan
    assert masks.quadratic(6)[1:].plan(32, 32) is not plan
    assert masks.quadratic(6) == masks.quadratic(6) != masks.quadratic(7) and masks.quadratic(6) != 6


def test_a_plan_never_holds_all_pairs() -> None:
    plan = masks.noise_aware_causal(512, 32, 248).plan()
    assert plan.nbytes < 16_000 and plan.tile_efficiency > 0.98
    assert all(tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in plan._tensors())


def test_rows_that_see_nothing() -> None:
    plan = masks.pack([masks.causal(10)], length=64).plan(32, 32)
    assert plan.visits().offsets.tolist() == plan.visits(True).offsets.tolist() == [0, 1, 1]
    empty = masks.causal(0).plan(16, 16)
    assert listed(empty) == brute_force(masks.causal(0).dense(), 16, 16) and empty.tile_efficiency == 1.0


def test_a_plan_made_in_inference_mode_serves_training() -> None:
    with torch.inference_mode():
        plan = masks.causal(41).plan(16, 48)
    assert masks.causal(41).plan(16, 48) is plan
    q = torch.randn(1, 41, 1, 16, requires_grad=True)
    pd.block_sparse_attention(q, q, q, plan).sum().backward()
    assert q.grad is not None


def test_plans_made_of_others_in_inference_mode_serve_training() -> None:
    plans = [masks.causal(41).plan(16, 16), masks.full(41).plan(16, 16)]
    with torch.inference_mode():
        stacked = masks.TilePlan.stack(plans)
    q = torch.randn(2, 41, 1, 16, requires_grad=True)
    pd.block_sparse_attention(q, q, q, stacked).sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize("builder", [masks.causal, masks.full])
def test_a_plan_made_of_fake_tensors_is_no_other_calls_plan(builder: Callable[[int], masks.SegmentMask]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        builder(47).plan(16, 16)
    assert torch.equal(builder(47).plan(16, 16).dense(), builder(47).dense())


def test_an_exported_program_plans_its_mask() -> None:
    class Attention(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return pd.block_sparse_attention(q, q, q, masks.causal(53).plan(16, 16))

    q, attention = torch.randn(1, 53, 2, 16), Attention()
    exported = torch.export.export(attention, (q,), strict=False)
    assert torch.equal(exported.module()(q), attention(q))


@without_gpu
def test_a_device_without_a_number_is_the_current_one() -> None:
    with pretended_gpu():
        plan = masks.causal(43).plan(16, 16, "cuda")
        assert plan.device == torch.device("cuda:0") and plan.to("cuda") is plan
        assert masks.causal(43).plan(16, 16, "cuda:0") is plan


def test_long_rows_start_first() -> None:
    plan = masks.causal(256).plan(64, 64)
    assert plan.rows[:4, 3].tolist() == [3, 2, 1, 0] and plan.rows[4:, 3].tolist() == [0, 1, 2, 3]


def test_stack() -> None:
    plans = [mask.plan(32, 32) for mask in (masks.causal(100), masks.dual_stream(50, 8), masks.causal(100))]
    stacked = masks.TilePlan.stack(plans)
    assert stacked.batch == 3 and plans[0].batch is None and stacked.to("cpu") is stacked
    assert stacked.visible_pairs == sum(plan.visible_pairs for plan in plans)
    for sample, plan in enumerate(plans):
        for transposed in (False, True):
            visits, single = stacked.visits(transposed, sample), plan.visits(transposed)
            assert torch.equal(visits.offsets, single.offsets) and torch.equal(visits.tiles, single.tiles)
            partial = visits.bitmaps >= 0
            assert torch.equal(partial, single.bitmaps >= 0)
            assert torch.equal(stacked.bitmaps[visits.bitmaps[partial]], plan.bitmaps[single.bitmaps[partial]])
        assert torch.equal(stacked.rows[sample, :, 3], plan.rows[:, 3])
    dense = [masks.causal(100).dense(), masks.dual_stream(50, 8).dense(), masks.causal(100).dense()]
    assert torch.equal(stacked.dense(), torch.stack(dense))
    # Equal samples share their lists.
    assert len(stacked.lists) == len(plans[0].lists) + len(plans[1].lists)
    visited = sum(plan.visited_tiles for plan in plans) * 32 * 32
    assert stacked.tile_efficiency == pytest.approx(stacked.visible_pairs / visited)


@settings(max_examples=40)
@given(random_masks(), tiles, tiles, st.booleans())
def test_block_lists(mask: masks.SegmentMask, block_q: int, block_k: int, ragged_is_partial: bool) -> None:
    plan = mask.plan(block_q, block_k)
    lists = plan.block_lists(ragged_is_partial)
    offsets, tiles, bitmaps = (part.tolist() for part in plan.visits())
    for i in range(len(offsets) - 1):
        full, partial = [], []
        for j, bitmap in sorted(zip(tiles[offsets[i] : offsets[i + 1]], bitmaps[offsets[i] : offsets[i + 1]])):
            ragged = (i + 1) * block_q > mask.q_len or (j + 1) * block_k > mask.kv_len
            (partial if bitmap >= 0 or (ragged and ragged_is_partial) else full).append(j)
        assert lists.full_block_idx[i, : lists.full_block_cnt[i]].tolist() == full
        assert lists.mask_block_idx[i, : lists.mask_block_cnt[i]].tolist() == partial


def test_block_lists_of_a_stack() -> None:
    plans = [masks.causal(100).plan(32, 32), masks.full(100).plan(32, 32)]
    for name, tensor in masks.TilePlan.stack(plans).block_lists()._asdict().items():
        assert torch.equal(tensor, torch.stack([getattr(plan.block_lists(), name) for plan in plans]))
