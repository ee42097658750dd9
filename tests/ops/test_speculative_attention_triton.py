"""The Triton kernels of speculative attention against the dense reference, interpreted or on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from pdkernels.masks import SegmentMask, TilePlan
from pdkernels.reference.speculative_attention import speculative_attention as reference
from tests.harness.error_budget import assert_within_budget
from tests.harness.triton_interpreter import dot_dtypes, requires_triton, triton_device

pytest.importorskip("triton", reason="needs triton")
from pdkernels.triton import speculative_attention as kernels

# The interpreter computes in NumPy, which remarks on log2(0) and on exp2 of hidden scores.
pytestmark = [requires_triton, pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")]
DEVICE = triton_device()
NAN = float("nan")

TAILS = {
    "quadratic": pd.masks.quadratic(4),
    "quadratic interleaved": pd.masks.quadratic(3, layout="interleaved"),
    "candidates": pd.masks.candidates(4, 5),
    "tree": pd.masks.tree([-1, 0, 1, 0, 3, -1, 5, 5, 2, 8, 4]),
    "block": pd.masks.full(16),
    "verify": pd.masks.causal(19),
    "planned": pd.masks.planned([pd.masks.Stage(3, (4, 5)), pd.masks.Stage(2, (3,))], sparse=True),
    "one token": pd.masks.causal(1),
}


def randn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


class Inputs(NamedTuple):
    """What the kernel and the reference take, but for the mask."""

    q: Tensor
    k_new: Tensor
    v_new: Tensor
    k_cache: Tensor
    v_cache: Tensor
    lengths: Tensor
    block_table: Tensor | None = None


def make_inputs(
    new: int, lengths: list[int], *, slots: int | None = None, page_size: int = 0,
    heads: int = 4, kv_heads: int = 2, head_dim: int = 16, dtype: torch.dtype = torch.float16,
) -> Inputs:  # fmt: skip
    """NaN stands wherever nothing may be read: behind the lengths, in pages nobody owns; no such page is in the table."""
    batch, slots = len(lengths), max(lengths, default=0) + 3 if slots is None else slots
    q = randn(batch, new, heads, head_dim, dtype=dtype, seed=0)
    k_new, v_new = (randn(batch, new, kv_heads, head_dim, dtype=dtype, seed=seed) for seed in (1, 2))
    caches = [randn(batch, slots, kv_heads, head_dim, dtype=dtype, seed=seed) for seed in (3, 4)]
    for cache in caches:
        for b, length in enumerate(lengths):
            cache[b, length:] = NAN
    # int32 and int64 take turns.
    device_lengths = torch.tensor(lengths, dtype=torch.int64 if new % 2 else torch.int32, device=DEVICE)
    inputs = Inputs(q, k_new, v_new, *caches, device_lengths)
    return paged(inputs, page_size) if page_size else inputs


def paged(inputs: Inputs, page_size: int) -> Inputs:
    """The same cache in pages, in random order; pages that are not there are named by a number far outside."""
    batch, slots = inputs.k_cache.shape[:2]
    per_sequence = -(-slots // page_size)
    places = torch.randperm(batch * per_sequence + 3, generator=torch.Generator().manual_seed(5))
    table = places[: batch * per_sequence].view(batch, per_sequence).to(DEVICE, torch.int32)
    pools = []
    for cache in (inputs.k_cache, inputs.v_cache):
        pool = cache.new_full((len(places), page_size, *cache.shape[2:]), NAN)
        filled = torch.nn.functional.pad(cache, (0, 0, 0, 0, 0, per_sequence * page_size - slots), value=NAN)
        pool[table.long()] = filled.unflatten(1, (per_sequence, page_size))
        pools.append(pool)
    owned = -(-inputs.lengths // page_size)
    table[torch.arange(per_sequence, device=DEVICE) >= owned[:, None]] = -(2**20)
    return inputs._replace(k_cache=pools[0], v_cache=pools[1], block_table=table)


def run_kernels(inputs: Inputs, plan: TilePlan, scale: float) -> tuple[Tensor, Tensor]:
    *tensors, table = inputs
    lists = (plan.kv_offsets, plan.kv_tiles, plan.kv_bitmaps, plan.bitmaps)
    return kernels.forward(*tensors, *lists, plan.block_q, plan.block_k, scale, table)


def check(
    inputs: Inputs, mask: SegmentMask | list[SegmentMask], blocks: tuple[int, int] = (32, 32), *,
    scale: float | None = None, plan: TilePlan | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What the kernels give, within the budget of the reference."""
    masks = mask if isinstance(mask, list) else [mask]
    if plan is None:
        plans = [mask.plan(*blocks, device=DEVICE) for mask in masks]
        plan = plans[0] if len(plans) == 1 else TilePlan.stack(plans)
    scale = inputs.q.shape[-1] ** -0.5 if scale is None else scale
    results = run_kernels(inputs, plan, scale)
    tail = torch.stack([mask.dense() for mask in masks]).to(DEVICE)
    *tensors, lengths, table = inputs
    exact, same = (
        reference(*(x.to(dtype) for x in tensors), lengths, tail, block_table=table, scale=scale)
        for dtype in (torch.float64, inputs.q.dtype)
    )
    for name, actual, oracle, pytorch in zip(("out", "lse"), results, exact, same):
        assert_within_budget(actual, oracle, pytorch, name=name)
    return results


@pytest.mark.parametrize("dtype", dot_dtypes(), ids=str)
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("tail", TAILS)
def test_tails(tail: str, page_size: int, dtype: torch.dtype) -> None:
    mask = TAILS[tail]
    check(make_inputs(mask.q_len, [37, 0, 300], page_size=page_size, dtype=dtype, slots=640), mask)


@pytest.mark.parametrize("page_size", [1, 5, 16, 64, 128, 256])
def test_page_sizes(page_size: int) -> None:
    inputs = make_inputs(7, [150, 64, 530], slots=1025, head_dim=32)
    in_pages, contiguous = (check(x, pd.masks.causal(7)) for x in (paged(inputs, page_size), inputs))
    assert all(torch.equal(a, b) for a, b in zip(in_pages, contiguous))


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
    """Tiles of rows lie across those of the plan, and more than one of either is needed."""
    mask = pd.masks.quadratic(7)
    check(make_inputs(mask.q_len, [20, 130], heads=7, kv_heads=1), mask, blocks)


@pytest.mark.parametrize("lengths", [[1100, 3, 1024, 257]])
def test_many_shares(lengths: list[int]) -> None:
    assert kernels.choose_splits(2048, 2) == 8
    for page_size in (0, 64):
        check(make_inputs(9, lengths, slots=2048, page_size=page_size), pd.masks.candidates(3, 3))


def test_a_plan_for_each_sequence() -> None:
    masks = [pd.masks.causal(40), pd.masks.candidates(4, 10), pd.masks.full(40)]
    check(make_inputs(40, [5, 300, 0]), masks)


def test_lists_may_be_in_any_order() -> None:
    mask = pd.masks.causal(75)
    plan = mask.plan(16, 16, device=DEVICE)
    offsets = plan.kv_offsets.tolist()
    backwards = [entry for first, last in zip(offsets, offsets[1:]) for entry in reversed(range(first, last))]
    turned = replace(plan, kv_tiles=plan.kv_tiles[backwards], kv_bitmaps=plan.kv_bitmaps[backwards])
    assert not torch.equal(turned.kv_tiles, plan.kv_tiles)
    check(make_inputs(75, [9]), mask, plan=turned)


@pytest.mark.parametrize("scale", [-0.5, 0.0, 1.0, 100.0])
def test_any_scale(scale: float) -> None:
    check(make_inputs(11, [290, 30], dtype=torch.float32, slots=600), pd.masks.causal(11), scale=scale)


def test_rows_that_see_nothing() -> None:
    """Only without a prefix there are any."""
    mask = SegmentMask([pd.masks.Segment(20, "none"), pd.masks.Segment(16, "causal")])
    inputs = make_inputs(36, [0, 290, 0], slots=600)
    out, lse = check(inputs, mask)
    for b in (0, 2):
        assert (out[b, :20] == 0).all() and lse[b, :, :20].isneginf().all()
    assert out[1].any(-1).all() and lse[1].isfinite().all()


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
        q=widened(heads_first(plain.q)), k_new=news[:, :, 0], v_new=news[:, :, 1],
        k_cache=heads_first(caches[0]), v_cache=widened(caches[1]), lengths=plain.lengths.repeat_interleave(2)[::2],
    )  # fmt: skip
    plan = mask.plan(32, 32, device=DEVICE)
    assert not any(x.is_contiguous() for x in strided[:5])
    assert all(torch.equal(a, b) for a, b in zip(run_kernels(strided, plan, 0.25), run_kernels(plain, plan, 0.25)))


def test_a_sequence_does_not_depend_on_its_batch() -> None:
    mask, lengths = pd.masks.quadratic(3), [300, 0, 1000, 77, 511]
    plan = mask.plan(16, 16, device=DEVICE)
    for page_size in (0, 16):
        together = make_inputs(mask.q_len, lengths, slots=1030, page_size=page_size)
        results = run_kernels(together, plan, 0.25)
        for b in range(len(lengths)):
            part = slice(b, b + 1)
            alone = Inputs(*(None if x is None else x[part] for x in together))
            if page_size:
                alone = alone._replace(k_cache=together.k_cache, v_cache=together.v_cache)
            assert all(torch.equal(a[part], c) for a, c in zip(results, run_kernels(alone, plan, 0.25)))


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
    """Neither lengths nor the batch change how a prefix is split."""
    asked = []
    choose = kernels.choose_splits
    monkeypatch.setattr(kernels, "choose_splits", lambda *sizes: asked.append((sizes, choose(*sizes))) or asked[-1][1])
    plan = pd.masks.causal(4).plan(16, 16, device=DEVICE)
    for lengths in ([3], [900], [0, 1000, 512]):
        for page_size in (0, 32):
            run_kernels(make_inputs(4, lengths, slots=1024, page_size=page_size), plan, 0.25)
    assert set(asked) == {((1024, 2), 4)}


def test_lengths_out_of_range_are_clamped() -> None:
    inputs, mask = make_inputs(4, [300, 300], slots=300), pd.masks.causal(4)
    inputs.lengths.copy_(torch.tensor([-7, 2**30]))
    results = run_kernels(inputs, mask.plan(16, 16, device=DEVICE), 0.25)
    inputs.lengths.copy_(torch.tensor([0, 300]))
    assert all(torch.equal(a, b) for a, b in zip(results, run_kernels(inputs, mask.plan(16, 16, device=DEVICE), 0.25)))


def test_nothing_is_read_or_written_outside() -> None:
    """NaN around the new tokens stays out, as NaN behind the lengths does in all tests."""
    inputs = make_inputs(10, [300], slots=512)
    surrounded = [torch.full((3, 10 + 80, *x.shape[2:]), NAN, dtype=x.dtype, device=DEVICE) for x in inputs[:3]]
    for around, x in zip(surrounded, inputs[:3]):
        around[1:2, 40:50] = x
    inside = inputs._replace(**{name: x[1:2, 40:50] for name, x in zip(Inputs._fields, surrounded)})
    out, lse = check(inside, pd.masks.causal(10), (16, 16))
    assert out.isfinite().all() and lse.isfinite().all()


def test_splits_fill_the_gpu_and_no_more() -> None:
    assert kernels.choose_splits(0, 8) == kernels.choose_splits(300, 8) == 1
    for programs in (1, 8, 24, 80, 280):
        for capacity in (512, 4096, 65536, 2**20):
            splits = kernels.choose_splits(capacity, programs)
            assert 1 <= splits <= min(capacity // kernels.SHORTEST_SHARE.value, kernels.MOST_SPLITS)
    assert kernels.choose_splits(2**16, 8) == 16  # 128 programs on 132 SMs
    assert kernels.choose_splits(512, 280) == 1
