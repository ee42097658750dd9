"""Steps that recompute only some rows: chosen rows, gathered rows, sums and every other byte exactly."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import pdkernels as pd
from pdkernels.reference import feature_cache as reference
from tests.ops.feature_cache_cases import CPU, DTYPES, Selection, Sum, make_selection, make_sum, selections, sums
from tests.ops.implementations import NAMES, implementation
from tests.ops.kv_cases import storage, whole

NAN, INF = math.nan, math.inf


def check(case: Selection, actual: Selection, index: Tensor) -> None:
    """The results of a call on a copy of the case, and the memory after it."""
    expected = case.moved(CPU)
    assert torch.equal(index.cpu(), case.moved(CPU).doubled().run(reference.select_stale_rows_))
    assert torch.equal(index.cpu(), expected.run(reference.select_stale_rows_)) and index.dtype == torch.int64
    assert all(torch.equal(a, b) for a, b in zip(actual.bytes(), expected.bytes()))


def check_run(impl, case: Selection) -> None:
    actual = case.moved(impl.device)
    check(case, actual, actual.run(impl.select_stale_rows_))


# --- select_stale_rows_ -----------------------------------------------------------------------------------------------


@given(case=selections())
@settings(max_examples=100)
def test_select_equals_reference(impl, case: Selection) -> None:
    check_run(impl, case)


@pytest.mark.parametrize("update", reference.UPDATES)
def test_select_sizes_of_llada(impl, update: str) -> None:
    case = make_selection(
        3,
        batch=1,
        rows=24,
        kv_heads=32,
        head_dim=128,
        dtype=torch.bfloat16,
        max_selected=6,
        capacity=30,
        update=update,
        counts=False,
    )
    check_run(impl, case)


@pytest.mark.parametrize("rows, count", [(512, 100), (1100, 700)])
def test_select_among_more_rows_than_a_block_has_threads(impl, rows: int, count: int) -> None:
    check_run(
        impl,
        make_selection(rows, rows=rows, kv_heads=1, head_dim=8, max_selected=count, capacity=rows + 3, quota=False),
    )


@pytest.mark.parametrize("count", [12000, 16600])
def test_select_among_more_keys_than_a_block_holds(impl, count: int) -> None:
    """16,384 on CUDA. Keys are those of 8 directions, or of rows that did not change, so that many are equal."""
    rows, generator = 16600, torch.Generator().manual_seed(count)
    cached = torch.tensor([1.0, 0.0]).expand(1, rows, 1, 2).contiguous()
    angles = torch.randint(0, 16, (rows,), generator=generator).clamp(max=8) / 4
    v = torch.stack([angles.cos(), angles.sin()], -1).view(1, rows, 1, 2)
    starts = torch.zeros(1, dtype=torch.int64)
    expected = reference.select_stale_rows_(v, cached.clone(), starts, count, None, None, "none")
    actual = impl.select_stale_rows_(
        v.to(impl.device), cached.to(impl.device), starts.to(impl.device), max_selected=count, update="none"
    )
    assert torch.equal(actual.cpu(), expected)


@pytest.mark.parametrize("batch, rows, count", [(0, 3, 2), (2, 0, 2), (2, 3, 0), (1, 1, 1), (1, 2, 9)])
@pytest.mark.parametrize("update", reference.UPDATES)
def test_select_empty_and_single(impl, batch: int, rows: int, count: int, update: str) -> None:
    check_run(impl, make_selection(11, batch=batch, rows=rows, max_selected=count, update=update))


def test_select_from_values_of_no_size(impl) -> None:
    v, cache = torch.zeros(2, 3, 1, 0, device=impl.device), torch.zeros(2, 4, 1, 0, device=impl.device)
    index = impl.select_stale_rows_(v, cache, torch.zeros(2, dtype=torch.int64, device=impl.device), max_selected=2)
    assert index.tolist() == [[0, 1], [0, 1]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_and_nan(impl, dtype: torch.dtype) -> None:
    """Non-finite similarities first, then by cosine; among equal rows the first."""
    large = 1e30 if dtype != torch.float16 else INF
    pairs = [
        ((1, 0), (1, 0)),
        ((0, 0), (1, 1)),
        ((NAN, 0), (1, 0)),
        ((1, 1), (-1, -1)),
        ((0, 0), (0, 0)),
        ((large, 1), (1, 1)),
        ((1, 0), (1, 0)),
        ((1, 1), (INF, 1)),
        ((1, 0), (0, -1)),
        ((1, 1), (-1, -1)),
        ((-0.0, 0), (1, 1)),
        ((1, 1), (1, NAN)),
    ]
    v, cache = (
        torch.tensor([[pair[side] for pair in pairs]], dtype=dtype, device=impl.device).unsqueeze(2) for side in (0, 1)
    )
    order = [2, 5, 7, 11, 3, 9, 1, 4, 8, 10, 0, 6]
    start = torch.zeros(1, dtype=torch.int64, device=impl.device)
    for count in range(len(pairs) + 2):
        left = cache.clone()
        index = impl.select_stale_rows_(v, left, start, max_selected=count)
        assert index.tolist() == [sorted(order[:count]) + [-1] * (count - len(pairs))]
        assert torch.equal(left.nan_to_num(7), v.nan_to_num(7))


def test_selection_does_not_see_the_dtype_of_similarities(impl) -> None:
    """bfloat16 has 4 numbers between 0.98 and 1: cosines that differ by less still decide."""
    rows, generator = 64, torch.Generator().manual_seed(0)
    cache = torch.randn(1, rows, 4, 64, generator=generator).bfloat16()
    v = (
        cache.float()
        + 0.02 * torch.linspace(1, 2, rows).view(1, -1, 1, 1) * torch.randn(cache.shape, generator=generator)
    ).bfloat16()
    similarity = torch.cosine_similarity(v.double().flatten(2), cache.double().flatten(2), dim=-1)[0]
    assert similarity.bfloat16().unique().numel() < 4 and similarity.sort().values.diff().min() > 1e-7
    index = impl.select_stale_rows_(
        v.to(impl.device), cache.to(impl.device), torch.zeros(1, dtype=torch.int64, device=impl.device), max_selected=16
    )
    assert index[0].tolist() == similarity.argsort()[:16].sort().values.tolist()


@given(case=selections())
@settings(max_examples=20)
def test_a_sequence_does_not_depend_on_the_others(impl, case: Selection) -> None:
    together, again, alone = (case.moved(impl.device) for _ in range(3))
    index = together.run(impl.select_stale_rows_)
    assert torch.equal(index, again.run(impl.select_stale_rows_))
    parts = [alone.sequence(b).run(impl.select_stale_rows_) for b in range(len(index))]
    assert torch.equal(index, torch.cat(parts))
    assert all(
        torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(together.bytes(), again.bytes(), alone.bytes())
    )


@given(case=selections())
@settings(max_examples=8)
def test_select_does_not_depend_on_the_order_of_threads(case: Selection) -> None:
    impl = implementation("cudasim")
    for order in impl.schedules():
        with order:
            check_run(impl, case)


def test_rounds_of_a_choice_do_not_depend_on_the_order_of_threads() -> None:
    impl, case = (
        implementation("cudasim"),
        make_selection(
            5, batch=1, rows=1030, kv_heads=1, head_dim=8, max_selected=300, capacity=1030, quota=False, counts=False
        ),
    )
    for order in impl.schedules():
        with order:
            check_run(impl, case)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_share_the_work(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check_run(
            implementation("cpu"),
            make_selection(13, batch=3, rows=40, kv_heads=8, head_dim=64, max_selected=9, capacity=50),
        )
        check_sum(implementation("cpu"), make_sum(13, batch=3, rows=40, replaced=9, width=2000))
        x, index = torch.randn(3, 40, 9000), torch.randint(-1, 40, (3, 20))
        assert torch.equal(pd.gather_rows(x, index), reference.gather_rows(x, index))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("pad", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_vector_unit(level_ops: object, dtype: torch.dtype, pad: int) -> None:
    case = make_selection(17, rows=9, head_dim=34, dtype=dtype, max_selected=4, pad=pad, page_size=3, update="selected")
    actual = case.moved(CPU)
    tensors = (
        actual.v,
        actual.v_cache,
        actual.starts,
        actual.max_selected,
        actual.quota,
        actual.counts,
        actual.update,
        actual.block_table,
    )
    check(case, actual, level_ops.select_stale_rows_(*tensors))
    total = make_sum(17, width=34, dtype=dtype, pad=pad).moved(CPU)
    expected = total.moved(CPU)
    assert same(
        level_ops.add_cached_rows_(total.x, total.cached, total.rows, total.index),
        expected.run(reference.add_cached_rows_),
    )
    assert all(torch.equal(a, b) for a, b in zip(total.bytes(), expected.bytes()))


def drifted(dtype: torch.dtype, rows: int, seed: int) -> tuple[Tensor, Tensor, list[int]]:
    """Values and cached values; and the rows that moved by one unit in the last place of one component."""
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(1, rows, 2, 34, generator=generator).to(dtype)
    moved = torch.randperm(rows, generator=generator)[:3].sort().values.tolist()
    cached = v.clone()
    for i in moved:
        cached[0, i, 1, 7] *= 1 + torch.finfo(dtype).eps
    assert all((cached[0, i] != v[0, i]).sum() == 1 for i in moved)
    return v, cached, moved


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_moved_at_all_come_before_rows_that_did_not(impl, dtype: torch.dtype) -> None:
    for seed in range(5):
        v, cached, moved = drifted(dtype, 20, seed)
        for count in (2, 3, 5):
            still = [i for i in range(20) if i not in moved]
            found = impl.select_stale_rows_(
                v.to(impl.device),
                cached.to(impl.device),
                torch.tensor([0]).to(impl.device),
                max_selected=count,
                update="none",
            ).tolist()[0]
            assert set(found) <= set(moved) if count < 3 else found == sorted(moved + still[: count - 3])


def nearly_parallel(dtype: torch.dtype, dims: Iterable[int]) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Cosines that agree except for the last bits: the choices are the same only with the same order of sums. Values, cached ones, starts,
    the choice of the reference."""
    for seed, dim in enumerate(dims):
        generator = torch.Generator().manual_seed(seed)
        v = torch.randn(1, 24, 3, dim, generator=generator).to(dtype)
        cached = (v.float() * 3 + 1e-3 * torch.randn(v.shape, generator=generator)).to(dtype)
        if seed % 2:  # separate heads
            v, cached = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (v, cached))
        starts = torch.tensor([0])
        yield v, cached, starts, reference.select_stale_rows_(v, cached, starts, 8, None, None, "none")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_vector_unit_chooses_as_the_reference(level_ops: object, dtype: torch.dtype) -> None:
    for v, cached, starts, expected in nearly_parallel(dtype, (34, 34, 128, 128, 200, 264) * 4):
        assert torch.equal(level_ops.select_stale_rows_(v, cached, starts, 8, None, None, "none", None), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_device_chooses_as_the_reference(impl, dtype: torch.dtype) -> None:
    """Heads of a piece and of more, read in packs and one by one, and more pieces than a block of threads takes at a time."""
    for v, cached, starts, expected in nearly_parallel(dtype, (34, 34, 128, 128, 200, 264, 1, 17, 1400, 3001)):
        v, cached, starts = (x.to(impl.device) for x in (v, cached, starts))
        assert torch.equal(impl.select_stale_rows_(v, cached, starts, max_selected=8, update="none").cpu(), expected)


# --- gather_rows -------------------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 2**20),
    batch=st.integers(0, 3),
    rows=st.integers(0, 6),
    picked=st.integers(0, 9),
    pad=st.integers(0, 3),
    inner=st.sampled_from([(), (1,), (3,), (16,), (2, 8), (0,), (3, 5, 2)]),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    dtype=st.sampled_from([*DTYPES, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]),
)
@settings(max_examples=100)
def test_gather_equals_reference(impl, seed, batch, rows, picked, pad, inner, index_dtype, dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    order = (1, 0, *range(2, 2 + len(inner))) if pad else tuple(range(2 + len(inner)))
    x = storage((batch, rows, *inner), torch.uint8 if dtype == torch.bool else dtype, order, pad, seed)
    x = x % 2 == 0 if dtype == torch.bool else x
    index = torch.randint(-1, rows, (batch, 2 * picked), generator=generator, dtype=index_dtype)[:, ::2]
    gathered = impl.gather_rows(x.to(impl.device), index.to(impl.device)).cpu()
    expected = reference.gather_rows(x, index)
    assert gathered.is_contiguous() and gathered.dtype == dtype and gathered.shape == expected.shape
    assert torch.equal(whole(gathered), whole(expected.contiguous()))


def test_gather_from_rows_that_are_not_contiguous(impl) -> None:
    x, index = torch.randn(2, 6, 4).mT.to(impl.device), torch.tensor([[3, -1], [0, 0]], device=impl.device)
    assert torch.equal(impl.gather_rows(x, index), reference.gather_rows(x, index))


# --- add_cached_rows_ --------------------------------------------------------------------------------------------------


def same(a: Tensor, b: Tensor) -> bool:
    """Every number bit for bit, but any NaN is a NaN."""
    return a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0), b.nan_to_num(0))


def check_sum(impl, case: Sum) -> None:
    actual, expected = case.moved(impl.device), case.moved(CPU)
    total = actual.run(impl.add_cached_rows_).cpu()
    assert total.is_contiguous() and same(total, expected.run(reference.add_cached_rows_))
    assert all(torch.equal(a, b) for a, b in zip(actual.bytes(), expected.bytes()))


@given(case=sums())
@settings(max_examples=120)
def test_sum_equals_reference(impl, case: Sum) -> None:
    check_sum(impl, case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_sizes_of_llada(impl, dtype: torch.dtype) -> None:
    check_sum(impl, make_sum(5, batch=1, rows=12, replaced=5, width=4096, dtype=dtype))


def test_sum_copies_what_it_only_reads(impl) -> None:
    case = make_sum(7, batch=2, rows=6, replaced=3, width=6)
    strided = Sum(case.x.mT, case.cached, case.rows.mT.contiguous().mT, case.index).moved(impl.device)
    plain = Sum(case.x.mT.contiguous(), case.cached, case.rows, case.index).moved(CPU)
    assert same(strided.run(impl.add_cached_rows_).cpu(), plain.run(reference.add_cached_rows_))
    assert torch.equal(whole(strided.cached).cpu(), whole(plain.cached))


def test_sum_does_not_depend_on_the_order_of_threads() -> None:
    impl = implementation("cudasim")
    for order in impl.schedules():
        with order:
            check_sum(impl, make_sum(9, rows=5, replaced=4, width=24, dtype=torch.float16))


# --- torch integration -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_opcheck() -> None:
    ops = torch.ops.pdkernels
    for device in [torch.device(name) for name in NAMES if name != "cudasim"]:
        for options in ({}, {"quota": False, "counts": False, "page_size": 3, "update": "selected"}):
            c = make_selection(19, **options).moved(device)
            call = (c.v, c.v_cache, c.starts, c.max_selected, c.quota, c.counts, c.update, c.block_table)
            torch.library.opcheck(ops.select_stale_rows_.default, call)
        s = make_sum(19).moved(device)
        s.x.zero_(), s.cached.zero_(), s.rows.fill_(1)
        torch.library.opcheck(ops.add_cached_rows_.default, (s.x, s.cached, s.rows, s.index))
        torch.library.opcheck(ops.add_cached_rows_.default, (s.x, s.cached))
        torch.library.opcheck(ops.gather_rows.default, (s.x, s.index))


def test_fullgraph_without_recompiles() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()

    def step(v, v_cache, starts, quota, x, cached):
        index = pd.select_stale_rows_(v, v_cache, starts, max_selected=v.shape[1] // 2, quota=quota)
        return index, pd.add_cached_rows_(x, cached, pd.gather_rows(x, index) * 2, index)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for seed, (batch, rows, width) in enumerate([(2, 5, 24), (3, 9, 40), (5, 7, 16)]):
        case, expected = (make_selection(seed, batch=batch, rows=rows, kv_heads=3, capacity=20) for _ in range(2))
        x = torch.randn(batch, rows, width)
        cached, kept = torch.ones(batch, rows, width), torch.ones(batch, rows, width)
        actual = compiled(case.v, case.v_cache, case.starts, case.quota, x, cached)
        wanted = step(expected.v, expected.v_cache, expected.starts, expected.quota, x, kept)
        assert all(torch.equal(a, b) for a, b in zip(actual, wanted)) and torch.equal(cached, kept)
        assert all(torch.equal(a, b) for a, b in zip(case.bytes(), expected.bytes()))
    assert counter.frame_count == 1


def test_reference_backend() -> None:
    case = make_selection(23, page_size=3)
    actual = case.moved(CPU)
    check(
        case,
        actual,
        actual.run(lambda *tensors, **options: pd.select_stale_rows_(*tensors, **options, backend="reference")),
    )
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    pd.gather_rows(x, torch.tensor([[1], [2]]), backend="reference").sum().backward()
    assert x.grad.sum() == 8
    assert pd.add_cached_rows_(x.detach(), x.detach().clone(), backend="reference").dtype == torch.float64
