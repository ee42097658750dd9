"""Every builder against the dense rules of `pdkernels.reference.masks`, and what the papers say follows from them."""

from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import pdkernels.masks as masks
from pdkernels.reference import masks as reference
from tests.masks.strategies import BUILDERS, build, noise_aware, quadratic, whole_calls


def assert_is(mask: masks.SegmentMask, expected: tuple[Tensor, Tensor]) -> None:
    visible, positions = expected
    assert mask.shape == tuple(visible.shape)
    assert torch.equal(mask.dense(), visible)
    assert mask.positions.dtype == torch.int64 and torch.equal(mask.positions, positions)
    assert mask.density == pytest.approx(visible.float().mean().item() if visible.numel() else 0.0)


def test_every_builder_is_drawn() -> None:
    assert {name for name in masks.__all__ if inspect.isfunction(getattr(masks, name))} == {*BUILDERS, "pack"}


@pytest.mark.parametrize("name", BUILDERS)
def test_equals_the_rules(name: str) -> None:
    @settings(max_examples=100)
    @given(BUILDERS[name])
    def check(call) -> None:
        assert_is(build(call), getattr(reference, name)(**call[1]))

    check()


@settings(max_examples=40)
@given(st.lists(whole_calls, max_size=3), st.one_of(st.none(), st.integers(0, 5)))
def test_pack(calls, padding: int | None) -> None:
    parts = [build(call) for call in calls]
    length = None if padding is None else sum(part.q_len for part in parts) + padding
    expected = reference.pack([getattr(reference, name)(**arguments) for name, arguments in calls], length)
    packed = masks.pack(parts, length)
    assert_is(packed, expected)
    assert_is(masks.pack([packed, masks.causal(2)]), reference.pack([expected, reference.causal(2)]))


@given(noise_aware())
def test_no_clean_row_sees_noise(call) -> None:
    mask = build(call)
    dense = mask.dense()
    assert not dense[mask.clean_rows.flatten()][:, mask.noisy_rows.flatten()].any()
    assert not dense[mask.prompt_rows, mask.prompt_len :].any()


@given(noise_aware())
def test_a_noisy_row_sees_each_position_once(call) -> None:
    mask = build(call)
    dense = mask.dense()
    for row in range(mask.q_len):
        assert sorted(mask.positions[dense[row]].tolist()) == list(range(mask.positions[row] + 1))


@given(st.integers(0, 9), st.integers(1, 5), st.integers(1, 5), st.sampled_from(["streams", "interleaved"]))
def test_noise_aware_is_two_causal_streams(prompt_len: int, block_size: int, num_blocks: int, layout: str) -> None:
    mask = masks.noise_aware_causal(prompt_len, block_size, num_blocks, layout=layout)
    dense, causal = mask.dense(), masks.causal(prompt_len + block_size * num_blocks).dense()
    for blocks in (mask.noisy_rows, mask.clean_rows):
        stream = torch.cat([mask.prompt_rows, blocks.flatten()])
        assert torch.equal(dense[stream][:, stream], causal)
        assert torch.equal(mask.positions[stream], torch.arange(len(stream)))
    pairs = 2 * causal.sum() - prompt_len * (prompt_len + 1) // 2
    assert dense.sum() == pairs


@given(noise_aware())
def test_a_noisy_block_sees_what_a_draft_over_the_cache_sees(call) -> None:
    """With clean conditioning: the causal rows of a draft that follows the prompt and the committed blocks."""
    name, arguments = call
    mask = build((name, {**arguments, "conditioning": "clean", "window": None}))
    size, dense = mask.block_size, mask.dense()
    for j, rows in enumerate(mask.noisy_rows):
        committed = torch.cat([mask.prompt_rows, mask.clean_rows[:j].flatten()])
        keys = torch.cat([committed, rows])
        assert torch.equal(dense[rows][:, keys], masks.causal(size, len(keys)).dense())
        assert dense[rows].sum() == masks.causal(size, len(keys)).dense().sum()
        assert torch.equal(mask.positions[keys], torch.arange(len(keys)))


@given(noise_aware())
def test_windows_of_one_block_and_of_all_blocks(call) -> None:
    name, arguments = call
    for conditioning, window in (("clean", 1), ("noisy", arguments["num_blocks"] + 1)):
        plain = build((name, {**arguments, "conditioning": conditioning, "window": None}))
        windowed = build((name, {**arguments, "conditioning": "window", "window": window}))
        assert torch.equal(plain.dense(), windowed.dense())


@given(noise_aware())
def test_noise_aware_orders_hold_the_same_mask(call) -> None:
    name, arguments = call
    ours, theirs = (build((name, {**arguments, "layout": layout})) for layout in ("streams", "interleaved"))
    there, back = ours.to_interleaved, ours.from_interleaved
    assert torch.equal(there[back], torch.arange(ours.q_len)) and torch.equal(back[there], torch.arange(ours.q_len))
    assert torch.equal(ours.dense()[there][:, there], theirs.dense())
    assert torch.equal(ours.positions[there], theirs.positions)
    assert torch.equal(theirs.to_interleaved, torch.arange(ours.q_len))
    for rows in ("ar_rows", "ar_targets", "student_rows", "teacher_rows"):
        assert torch.equal(there[getattr(theirs, rows)], getattr(ours, rows))


@given(noise_aware())
def test_rows_of_the_losses(call) -> None:
    mask = build(call)
    n = mask.prompt_len + mask.block_size * mask.num_blocks
    clean = set(mask.clean_rows.flatten().tolist()) | set(range(mask.prompt_len))
    assert mask.positions[mask.ar_rows].tolist() == list(range(n - 1))
    assert mask.positions[mask.ar_targets].tolist() == list(range(1, n))
    assert set(mask.ar_rows.tolist()) | set(mask.ar_targets.tolist()) <= clean
    assert mask.student_rows.shape == mask.teacher_rows.shape
    assert torch.equal(mask.positions[mask.student_rows], mask.positions[mask.teacher_rows])
    assert not set(mask.student_rows.flatten().tolist()) & clean and set(mask.teacher_rows.flatten().tolist()) <= clean
    assert mask.student_rows.shape[1] == mask.block_size - (mask.conditioning == "clean")


@given(st.integers(1, 30), st.integers(1, 8), st.integers(0, 12), st.sampled_from(["noisy_first", "clean_first"]))
def test_dual_stream_trains_what_inference_does(length: int, block_size: int, prefix_len: int, order: str) -> None:
    prefix_len = min(prefix_len, length)
    mask = masks.dual_stream(length, block_size, order=order, prefix_len=prefix_len)
    noisy_count = length - prefix_len
    rows = torch.arange(mask.q_len)
    noisy, clean = (
        (rows[:noisy_count], rows[noisy_count:]) if order == "noisy_first" else (rows[length:], rows[:length])
    )
    dense = mask.dense()
    assert torch.equal(dense[clean][:, clean], masks.causal(length).dense()) and not dense[clean][:, noisy].any()
    for start in range(0, noisy_count, block_size):
        block = noisy[start : start + block_size]
        keys = torch.cat([clean[: prefix_len + start], block])
        # A draft pass: the block over the cache of everything before it, everything visible.
        assert dense[block][:, keys].all() and dense[block].sum() == len(block) * len(keys)
        assert torch.equal(mask.positions[keys], torch.arange(len(keys)))


@given(st.integers(0, 30))
def test_blocks_of_one_token_are_causal(length: int) -> None:
    causal = masks.causal(length).dense()
    assert torch.equal(masks.block_causal(length, 1).dense(), causal)
    assert torch.equal(masks.dual_stream(length, 1, clean="block").dense()[length:, length:], causal)
    noise_aware = masks.noise_aware_causal(0, 1, length)
    assert torch.equal(noise_aware.dense()[:length, :length], causal)


@given(st.integers(0, 20))
def test_a_tree_that_is_one_chain_is_causal(length: int) -> None:
    chain = masks.tree(list(range(-1, length - 1)))
    assert len(chain.segments) <= 1
    assert torch.equal(chain.dense(), masks.causal(length).dense())
    assert torch.equal(chain.positions, masks.causal(length).positions)


@given(st.integers(0, 4), st.integers(0, 5))
def test_candidates_are_a_tree_of_chains(count: int, length: int) -> None:
    parents = [branch * length + i - 1 if i else -1 for branch in range(count) for i in range(length)]
    assert torch.equal(masks.tree(parents).dense(), masks.candidates(count, length).dense())


@given(quadratic())
def test_quadratic_orders_hold_the_same_mask(call) -> None:
    name, arguments = call
    ours, theirs = (build((name, {**arguments, "layout": layout})) for layout in ("spec_first", "interleaved"))
    there, back = ours.to_interleaved, ours.from_interleaved
    assert torch.equal(there[back], torch.arange(ours.q_len))
    assert torch.equal(ours.dense()[there][:, there], theirs.dense())
    assert torch.equal(ours.positions[there], theirs.positions)
    for rows in ("draft_rows", "mask_rows"):
        assert torch.equal(there[getattr(theirs, rows)], getattr(ours, rows))


@given(quadratic())
def test_quadratic_drafts_verify_causally_and_masks_follow_a_draft_pass(call) -> None:
    mask = build(call)
    dense, draft = mask.dense(), mask.draft_rows
    assert torch.equal(dense[draft][:, draft], masks.causal(mask.block_size).dense())
    assert dense[draft].sum() == mask.block_size * (mask.block_size + 1) // 2
    inside = masks.causal if mask.in_group == "causal" else masks.full
    for g, rows in zip(mask.groups, mask.mask_rows):
        assert dense[rows][:, draft[: g + 1]].all()
        assert torch.equal(dense[rows][:, rows], inside(len(rows)).dense())
        assert dense[rows].sum() == len(rows) * (g + 1) + dense[rows][:, rows].sum()
        assert mask.positions[rows].tolist() == [g + r for r in range(1, 1 + len(rows))]


@pytest.mark.parametrize("block_size, pairs", [(8, 836), (16, 6408), (32, 50192)])
def test_quadratic_pairs(block_size: int, pairs: int) -> None:
    mask = masks.quadratic(block_size)
    assert mask.plan().visible_pairs == pairs and mask.q_len == block_size * (block_size + 1)


def test_quadratic_sizes_of_the_papers() -> None:
    k = 8
    assert masks.quadratic(k + 1, k, in_group="causal").q_len == (k + 1) ** 2
    assert masks.quadratic(k + 1, k, anchor_group=False).q_len == 1 + k + k * k


def test_planned_rounds() -> None:
    stages = [masks.Stage(2, (2, 1)), masks.Stage(1, (2,), sync=False), masks.Stage(1, sync=False)]
    dense = masks.planned(stages).dense()
    plan, first, second, sync = slice(0, 2), slice(2, 4), slice(4, 5), 5
    assert dense[first, 0:5].all() and not dense[plan, 2:].any() and not dense[first, 5:].any()
    assert dense[sync, :6].all() and dense[6, :7].all()
    assert dense[7:9, :9].all() and not dense[6, 7:].any()
    end = 9  # an end token without a sync before it: it sees no open chunk
    assert dense[end, :7].all() and not dense[end, 7:9].any() and dense[end, 9]
    sparse = masks.planned(stages, sparse=True).dense()
    # Nor do later chunks see open ones, as in training.
    unsynced = [masks.Stage(2, (2,), False), masks.Stage(1, (4,), False)]
    assert masks.planned(unsynced).dense()[5].tolist() == [True, True, False, False, True, True, True, True, True]
    assert masks.planned(unsynced, open_chunks="visible").dense()[5].all()
    assert not sparse[first, second].any() and not sparse[second, first].any() and sparse[sync, :6].all()
