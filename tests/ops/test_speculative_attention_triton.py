"""The Triton kernels of speculative attention against the dense reference, interpreted or on a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.masks import SegmentMask, TilePlan
from tests.harness.triton_interpreter import dot_dtypes, requires_triton, triton_device
from tests.ops import speculative_cases as cases
from tests.ops.speculative_cases import NAN, TAILS, Inputs, Results, in_pages

pytest.importorskip("triton", reason="needs triton")
from pdkernels.triton import speculative_attention as kernels

# The interpreter computes in NumPy, which warns about log2(0) and exp2 of hidden scores.
pytestmark = [requires_triton, pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")]
DEVICE = triton_device()


def make_inputs(new: int, lengths: list[int], **options: Any) -> Inputs:
    """Small heads of fp16: the interpreter is slow."""
    inputs = cases.make_inputs(new, lengths, **{"head_dim": 16, "dtype": torch.float16, **options})
    return inputs.map(lambda x: x.to(DEVICE))


def check(
    inputs: Inputs, mask: SegmentMask | list[SegmentMask], tiles: tuple[int, int] = (32, 32), **options: Any
) -> Results:
    return cases.check("triton", inputs, mask, tiles, **options)


def run(inputs: Inputs, plan: TilePlan) -> Results:
    return cases.run("triton", inputs, plan)


@pytest.mark.covering
@pytest.mark.parametrize("page_size,dtype", [(16 * (i % 2), dtype) for i, dtype in enumerate(dot_dtypes())])
@pytest.mark.parametrize("tail", TAILS)
def test_tails(tail: str, page_size: int, dtype: torch.dtype) -> None:
    mask = TAILS[tail][-40:, -40:]
    check(make_inputs(mask.q_len, [37, 0, 270], page_size=page_size, dtype=dtype, slots=300), mask)


@cache
def contiguous() -> tuple[Inputs, Results]:
    inputs = cases.make_inputs(7, [150, 64, 530], slots=1025, dtype=torch.float16)
    return inputs, check(inputs, pd.masks.causal(7))


@pytest.mark.parametrize("page_size", [1, 16, 256, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 64, 128))])
def test_page_sizes(page_size: int) -> None:
    inputs, expected = contiguous()
    found = check(in_pages(inputs, page_size), pd.masks.causal(7))
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


@pytest.mark.parametrize("heads,kv_heads", [(3, 3), (4, 2), (4, 1), (7, 1), (14, 2), (8, 1)])
def test_groups_of_query_heads(heads: int, kv_heads: int) -> None:
    mask = pd.masks.quadratic(4)
    check(make_inputs(mask.q_len, [70, 261], heads=heads, kv_heads=kv_heads), mask, (16, 16))


@pytest.mark.parametrize("head_dim", [16, 24, 40, 64, 96, 112, 128, 200, 256])
def test_head_dims(head_dim: int) -> None:
    check(make_inputs(5, [140], slots=512, head_dim=head_dim, heads=2, kv_heads=1), pd.masks.full(5))
    check(make_inputs(6, [33], page_size=16, head_dim=head_dim, heads=2, kv_heads=1), pd.masks.causal(6))


@pytest.mark.parametrize("length", [0, 1, 15, 16, 127, 128, 129, 255, 256, 257, 384, 513])
def test_lengths(length: int) -> None:
    check(make_inputs(3, [length], slots=1024), pd.masks.causal(3))


@pytest.mark.parametrize("blocks", [(16, 16), (48, 32), (128, 128), (64, 16), (16, 96)])
def test_tile_sizes(blocks: tuple[int, int]) -> None:
    """Tiles of rows straddle those of the plan, and more than one of either is needed."""
    mask = pd.masks.quadratic(7)
    check(make_inputs(mask.q_len, [20, 130], heads=7, kv_heads=1), mask, blocks)


@pytest.mark.parametrize("page_size", [64, pytest.param(0, marks=pytest.mark.slow)])
def test_many_splits(page_size: int) -> None:
    assert kernels.choose_splits(2048, 2) == 8
    inputs = make_inputs(9, [1100, 3, 1024, 257], slots=2048, page_size=page_size)
    check(inputs, pd.masks.candidates(3, 3))


def test_a_plan_for_each_sequence() -> None:
    masks = [pd.masks.causal(40), pd.masks.candidates(4, 10), pd.masks.full(40)]
    check(make_inputs(40, [5, 300, 0]), masks)


def test_lists_may_be_in_any_order() -> None:
    mask = pd.masks.causal(75)
    plan = mask.plan(16, 16)
    rows, lists = plan.rows.clone(), plan.lists.clone()
    for row in rows[: plan.grid[0]]:
        begin, middle, end = row[:3].tolist()
        # The ranges, tile by tile, after the tiles that need a mask.
        tiles = [[tile, -1] for first, last in plan.lists[begin:middle].tolist() for tile in range(first, last)]
        turned = torch.tensor(plan.lists[middle:end].tolist() + tiles[::-1], dtype=torch.int32).view(-1, 2)
        row[:2], row[2] = len(lists), len(lists) + len(turned)
        lists = torch.cat([lists, turned])
    assert bool((lists[len(plan.lists) :, 1] < 0).any())
    turned = replace(plan, rows=rows, lists=lists)
    check(make_inputs(75, [9]), mask, plan=turned)


@pytest.mark.parametrize("scale", [-0.5, 0.0, 1.0, 100.0])
def test_any_scale(scale: float) -> None:
    check(make_inputs(11, [290, 30], dtype=torch.float32, slots=600), pd.masks.causal(11), scale=scale)


def test_rows_that_see_nothing() -> None:
    """There are any only without a prefix."""
    mask = SegmentMask([pd.masks.Segment(20, "none"), pd.masks.Segment(16, "causal")])
    inputs = make_inputs(36, [0, 290, 0], slots=600)
    out, lse = check(inputs, mask)
    for b in (0, 2):
        assert (out[b, :20] == 0).all() and lse[b, :, :20].isneginf().all()
    assert out[1].any(-1).all() and lse[1].isfinite().all()


def test_rows_that_see_nothing_meet_no_infinite_value() -> None:
    mask = SegmentMask([pd.masks.Segment(6, "causal"), pd.masks.Segment(4, "none")])
    inputs = make_inputs(10, [0])
    inputs.v_new[:, 2] = float("inf")
    results = run(inputs, mask.plan(32, 32).to(DEVICE))
    assert (results.out[:, 6:] == 0).all() and results.lse[..., 6:].isneginf().all()
    assert not results.out[:, 2:6].isfinite().any()


@pytest.mark.parametrize("batch,new,slots", [(0, 4, 8), (2, 0, 8), (2, 4, 0)])
def test_empty(batch: int, new: int, slots: int) -> None:
    check(make_inputs(new, [0] * batch, slots=slots), pd.masks.causal(new))
    if slots and batch:
        check(make_inputs(new, [0] * batch, slots=slots, page_size=4), pd.masks.causal(new))


def test_strided_inputs() -> None:
    """Heads before tokens, K and V side by side, pieces of wider rows."""
    plain = make_inputs(21, [37, 300], slots=640)
    mask = pd.masks.quadratic(5)[:21, :21]
    widened = lambda x: torch.nn.functional.pad(x, (3, 5), value=NAN)[..., 3:-5]  # noqa: E731
    heads_first = lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)  # noqa: E731
    news, caches = torch.stack(plain[1:3], dim=2), torch.stack(plain[3:5])
    strided = plain._replace(
        q=widened(heads_first(plain.q)),
        k_new=news[:, :, 0],
        v_new=news[:, :, 1],
        k_cache=heads_first(caches[0]),
        v_cache=widened(caches[1]),
        lengths=plain.lengths.repeat_interleave(2)[::2],
    )
    plan = mask.plan(32, 32)
    assert not any(x.is_contiguous() for x in strided[:5])
    assert all(torch.equal(a, b) for a, b in zip(run(strided, plan), run(plain, plan)))


def test_a_sequence_does_not_depend_on_its_batch() -> None:
    mask, lengths = pd.masks.quadratic(3), [300, 0, 511]
    plan = mask.plan(16, 16)
    for page_size in (0, 16):
        together = make_inputs(mask.q_len, lengths, slots=530, page_size=page_size)
        results = run(together, plan)
        for b in range(len(lengths)):
            alone = run(together.sequence(b), plan)
            assert all(torch.equal(a[b : b + 1], c) for a, c in zip(results, alone))


def test_repeats_bit_for_bit() -> None:
    inputs, mask = make_inputs(12, [800, 41], slots=1024), pd.masks.causal(12)
    assert all(torch.equal(a, b) for a, b in zip(check(inputs, mask), check(inputs, mask)))


def test_lengths_change_and_nothing_else() -> None:
    """As in a replayed graph: same tensors, same launch, another length."""
    inputs, mask = make_inputs(4, [900, 900], slots=1024), pd.masks.causal(4)
    for lengths in ([900, 0], [1, 600], [512, 300]):
        inputs.lengths.copy_(torch.tensor(lengths))
        check(inputs, mask)


def test_launches_follow_from_the_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither lengths nor the batch changes how a prefix is split."""
    asked = []
    choose = kernels.choose_splits
    monkeypatch.setattr(kernels, "choose_splits", lambda *sizes: asked.append((sizes, choose(*sizes))) or asked[-1][1])
    plan = pd.masks.causal(4).plan(16, 16)
    for lengths, page_size in (([3], 0), ([900], 32), ([0, 1000, 512], 0)):
        run(make_inputs(4, lengths, slots=1024, page_size=page_size), plan)
    assert set(asked) == {((1024, 2), 4)}


def test_lengths_out_of_range_are_clamped() -> None:
    inputs, mask = make_inputs(4, [300, 300], slots=300), pd.masks.causal(4)
    inputs.lengths.copy_(torch.tensor([-7, 2**30]))
    results = run(inputs, mask.plan(16, 16))
    inputs.lengths.copy_(torch.tensor([0, 300]))
    assert all(torch.equal(a, b) for a, b in zip(results, run(inputs, mask.plan(16, 16))))


def test_nothing_is_read_or_written_outside() -> None:
    """NaN around the new tokens stays out, as NaN past the lengths does in all tests."""
    inputs = make_inputs(10, [300], slots=512)
    surrounded = [torch.full((3, 10 + 80, *x.shape[2:]), NAN, dtype=x.dtype, device=DEVICE) for x in inputs[:3]]
    for around, x in zip(surrounded, inputs[:3]):
        around[1:2, 40:50] = x
    inside = inputs._replace(**{name: x[1:2, 40:50] for name, x in zip(Inputs._fields, surrounded)})
    out, lse = check(inside, pd.masks.causal(10), (16, 16))
    assert out.isfinite().all() and lse.isfinite().all()


@pytest.mark.covering
@pytest.mark.parametrize("page_size", [0, 1, 5, 16, 64])
@pytest.mark.parametrize("how", ["all", "counts", "sources", "both"])
def test_rows_are_stored_after_the_prefix(how: str, page_size: int) -> None:
    """By the programs of both tiles of rows; there are more sources than one load covers."""
    inputs = cases.make_inputs(30, [150, 0, 260], slots=420, heads=5, kv_heads=1, head_dim=24, dtype=torch.float16)
    assert kernels.choose_decode_blocking(inputs.q, 150).block_m == 128
    rows = cases.make_rows(inputs, how)
    cases.check_append(
        "triton", cases.with_room(inputs, rows, page_size) if page_size else inputs, pd.masks.causal(30), rows
    )


@pytest.mark.parametrize("page_size", [16, pytest.param(0, marks=pytest.mark.slow)])
def test_one_of_many_splits_stores(page_size: int) -> None:
    inputs = cases.make_inputs(3, [700, 3, 512], slots=1024, head_dim=16, dtype=torch.float16)
    rows = cases.make_rows(inputs, "both")
    cases.check_append(
        "triton", cases.with_room(inputs, rows, page_size) if page_size else inputs, pd.masks.full(3), rows
    )


@pytest.mark.parametrize("paged", [False, True])
def test_a_sequence_with_bad_values_keeps_its_cache(paged: bool) -> None:
    """Nothing is stored for it, everything is for the others; their attention does not change."""
    inputs = cases.make_inputs(6, [17, 5, 20], slots=24, heads=2, kv_heads=1, head_dim=16, dtype=torch.float16)
    rows = cases.Rows(torch.tensor([3, 4, 4]), torch.tensor([[5, 0, 1, 99], [4, 4, 2, 0], [1, 2, 3, 4]]))
    inputs, plan = cases.with_room(inputs, rows, 4) if paged else inputs, pd.masks.causal(6).plan(16, 16)
    expected = run(inputs, plan)
    # A length past the capacity is clamped for attention, whose pages have to be valid.
    spoilt = {"lengths": [-1] if paged else [-1, 21], "counts": [-1, 5], "source_index": [-1, 6]}
    if paged:
        spoilt["block_table"] = [-1, 2**30]
    for name, value in ((name, value) for name, values in spoilt.items() for value in values):
        wrong = {name: x.clone() for name, x in (inputs._asdict() | rows._asdict()).items() if name in spoilt}
        wrong[name][(1, 2) if name == "block_table" else 1] = value  # that page would hold the last of four rows
        bad = inputs._replace(**{name: x for name, x in wrong.items() if name in Inputs._fields})
        results, *caches = cases.run_append("triton", bad, plan, cases.Rows(wrong["counts"], wrong["source_index"]))
        cases.assert_stored(caches, bad, cases.Rows(torch.tensor([3, 0, 4]), rows.source_index))
        assert all(torch.equal(a[::2], b[::2]) for a, b in zip(results, expected))


def test_splits_fill_the_gpu_and_no_more() -> None:
    assert kernels.choose_splits(0, 8) == kernels.choose_splits(300, 8) == 1
    for programs in (1, 8, 24, 80, 280):
        for capacity in (512, 4096, 65536, 2**20):
            splits = kernels.choose_splits(capacity, programs)
            assert 1 <= splits <= min(capacity // kernels.SHORTEST_SPLIT.value, kernels.MAX_SPLITS)
    assert kernels.choose_splits(2**16, 8) == 16  # 128 programs on 132 SMs
    assert kernels.choose_splits(512, 280) == 1
