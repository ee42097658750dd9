"""feature_cache: what is refused and with which message; what the device does with values that were not checked before."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pdkernels as pd
from pdkernels.reference import feature_cache as reference
from tests.ops.feature_cache_cases import CPU, Selection, Sum, make_selection, make_sum
from tests.ops.kv_cases import filled
from tests.ops.test_feature_cache import check, check_sum, same
from tests.support.errors import refused

WILD = [-(2**63), -(2**31), -2, -1, 7, 17, 2**31 - 1, 2**62, 2**63 - 1]


def good_selection(page_size: int | None = None) -> Selection:
    case = make_selection(29, page_size=page_size)
    case.starts.zero_()
    case.counts.fill_(5)
    return case


def good_sum() -> Sum:
    case = make_sum(31)
    return replace(case, index=torch.tensor([[1, 4, -1], [0, 5, 6]]))


GOOD, PAGES, TERMS = good_selection(), good_selection(4), good_sum()
SELECT = {
    r"starts must be in \[0, 16\], got -1 for sequence 1\. The cache holds": {"starts": filled(GOOD.starts, 1, -1)},
    r"counts must be in \[0, 7\], got 8 for sequence 0": {"counts": filled(GOOD.counts, 0, 8)},
    r"starts \+ counts must be at most the capacity 16, got 17 for sequence 0": dict(
        starts=filled(GOOD.starts, 0, 13), counts=filled(GOOD.counts, 0, 4)
    ),
    r"quota must be at least 0, got -3 for sequence 1\. 0 chooses nothing": {"quota": filled(GOOD.quota, 1, -3)},
    r"TypeError: v must be a tensor, got list": {"v": [1.0]},
    r"v must have shape \(B, G, kv_heads, D\), got \(7, 2, 8\)": {"v": GOOD.v[0]},
    r"TypeError: v must be float32, float16 or bfloat16, got torch\.int32": {"v": GOOD.v.int()},
    r"TypeError: for the kernels, got torch\.float64\. Pass backend='reference'": dict(
        v=GOOD.v.double(), v_cache=GOOD.v_cache.double()
    ),
    r"v must have a contiguous last dimension, got strides": {"v": GOOD.v.mT.contiguous().mT},
    r"TypeError: v_cache must be torch\.float32 like the others, got torch\.float16": {"v_cache": GOOD.v_cache.half()},
    r"v_cache must have shape \(B or pages, slots, 2, 8\), got \(2, 16, 1, 8\)": {"v_cache": GOOD.v_cache[:, :, :1]},
    r"v_cache must have a contiguous last dimension, got strides": {"v_cache": GOOD.v_cache.mT.contiguous().mT},
    r"v_cache must have a batch of 2 like v, got 1": {"v_cache": GOOD.v_cache[:1]},
    r"max_selected must be at least 0, got -1": {"max_selected": -1},
    r"TypeError: max_selected must be an int, got float": {"max_selected": 1.5},
    r"update must be one of 'all', 'selected', 'none', got 'some'": {"update": "some"},
    r"starts must have shape \(2\), got \(1,\)": {"starts": GOOD.starts[:1]},
    r"TypeError: quota must be an int32 or int64 tensor, got torch\.float32": {"quota": GOOD.quota.float()},
    r"counts must be on cpu, got meta": {"counts": GOOD.counts.to("meta")},
    r"NotImplementedError: v must not require a gradient": {"v": GOOD.v.clone().requires_grad_()},
}
PAGED = {
    r"block_table\[1, 0\] must be in \[0, 9\], got -1 for sequence 1\. Reserve pages": {
        "block_table": filled(PAGES.block_table, (1, 0), -1)
    },
    r"v_cache must have a page size of at least 1, got 0": {"v_cache": PAGES.v_cache[:, :0]},
    r"block_table must have shape \(2, any\), got \(1, 4\)": {"block_table": PAGES.block_table[:1]},
}


SUM = {
    r"index\[1, 2\] must be in \[-1, 6\], got 7 for sequence 1\. -1 replaces nothing": {
        "index": filled(TERMS.index, (1, 2), 7)
    },
    r"index\[0, 0\] must be in \[-1, 6\], got -2 for sequence 0": {"index": filled(TERMS.index, (0, 0), -2)},
    r"index\[1, 1\] must be larger than the one before it, or -1 at the end, got 0 for sequence 1\. Sort": {
        "index": filled(TERMS.index, (1, 1), 0)
    },
    r"index\[0, 1\] must be larger than the one before it, or -1 at the end, got 4": {
        "index": filled(TERMS.index, (0, 0), -1)
    },
    r"x must have shape \(B, G, E\), got \(7, 16\)": {"x": TERMS.x[0]},
    r"TypeError: x must be float32, float16 or bfloat16, got torch\.int32": {"x": TERMS.x.int()},
    r"TypeError: for the kernels, got torch\.float64": dict(
        x=TERMS.x.double(), cached=TERMS.cached.double(), rows=TERMS.rows.double()
    ),
    r"TypeError: cached must be torch\.float32 like the others, got torch\.float16": {"cached": TERMS.cached.half()},
    r"cached must have shape \(2, 7, 16\) like x, got \(2, 5, 16\)": {"cached": TERMS.cached[:, :5]},
    r"cached must have a contiguous last dimension, got strides": {"cached": TERMS.cached.mT.contiguous().mT},
    r"rows and index must be given together, got only rows": {"index": None},
    r"rows and index must be given together, got only index": {"rows": None},
    r"rows must have shape \(2, 3, 16\), a row for each index, got \(2, 2, 16\)": {"rows": TERMS.rows[:, :2]},
    r"TypeError: rows must be torch\.float32 like the others, got torch\.float16": {"rows": TERMS.rows.half()},
    r"TypeError: index must be an int32 or int64 tensor, got torch\.float32": {"index": TERMS.index.float()},
    r"NotImplementedError: rows must not require a gradient": {"rows": TERMS.rows.clone().requires_grad_()},
}


@pytest.mark.parametrize("page_size", [None, 4])
def test_tables_start_from_good_calls(page_size: int | None) -> None:
    case = good_selection(page_size)
    actual = case.moved(CPU)
    check(case, actual, actual.run(pd.select_stale_rows_))
    good_sum().run(pd.add_cached_rows_)
    pd.gather_rows(X, INDEX)


@pytest.mark.parametrize(
    "case, op, text, change",
    [
        (case, op, *row)
        for case, op, table in (
            (GOOD, pd.select_stale_rows_, SELECT),
            (PAGES, pd.select_stale_rows_, PAGED),
            (TERMS, pd.add_cached_rows_, SUM),
        )
        for row in table.items()
    ],
    ids=[*SELECT, *PAGED, *SUM],
)
def test_bad_call(case: Selection | Sum, op, text: str, change: dict[str, object]) -> None:
    bad = replace(case, **change)
    before = [t.clone() for t in case.bytes()]
    with refused(text) as error:
        bad.run(op)
    assert str(error.value).startswith(f"pdkernels.{op.__name__}: ")
    assert all(torch.equal(a, b) for a, b in zip(case.bytes(), before))


X, INDEX = torch.zeros(2, 3, 4), torch.tensor([[0, 2], [-1, 1]])


@pytest.mark.parametrize(
    "text, call",
    {
        r"TypeError: gather_rows: x must be a tensor, got list": {"x": [1.0]},
        r"x must have shape \(B, G, \.\.\.\), got \(4,\)": {"x": X[0, 0]},
        r"TypeError: index must be an int32 or int64 tensor, got torch\.float32": {"index": INDEX.float()},
        r"index must have shape \(2, any\), got \(1, 2\)": {"index": INDEX[:1]},
        r"index must be on cpu, got meta": {"index": INDEX.to("meta")},
        r"index\[1, 0\] must be in \[-1, 2\], got 3 for sequence 1\. -1 gives a row of zeros": {
            "index": filled(INDEX, (1, 0), 3)
        },
        r"index\[0, 1\] must be in \[-1, 2\], got -2 for sequence 0": {"index": filled(INDEX, (0, 1), -2)},
        r"NotImplementedError: x must not require a gradient": {"x": X.clone().requires_grad_()},
        r"NotImplementedError: backend must be one of auto, native, reference on cpu, got 'triton'": {
            "backend": "triton"
        },
    }.items(),
)
def test_bad_gather(call: dict[str, object], text: str) -> None:
    with refused(text):
        pd.gather_rows(**{"x": X, "index": INDEX, **call})


@given(seed=st.integers(0, 2**31), page_size=st.sampled_from([None, 3]), update=st.sampled_from(reference.UPDATES))
@settings(max_examples=100)
def test_a_bad_sequence_is_refused_or_left_alone(impl, seed: int, page_size: int | None, update: str) -> None:
    """The CPU refuses what the reference refuses and writes nothing; CUDA serves the other sequences."""
    rng = random.Random(seed)
    case = make_selection(seed, batch=3, rows=4, kv_heads=1, max_selected=2, page_size=page_size, update=update)
    for _ in range(rng.randint(0, 2)):
        rng.choice([case.starts, case.counts, case.quota])[rng.randrange(3)] = rng.choice([*WILD, rng.randint(0, 16)])
    if page_size:
        case.block_table.view(-1)[rng.randrange(case.block_table.numel())] = rng.choice([-1, 10**6])
    actual, expected = case.moved(impl.device if not impl.raises else CPU), case.moved(CPU)
    if impl.raises:
        try:
            expected.moved(CPU).run(reference.select_stale_rows_)
        except ValueError:
            with pytest.raises(ValueError, match=r"pdkernels\.select_stale_rows_: "):
                actual.run(impl.select_stale_rows_)
            assert all(torch.equal(a, b) for a, b in zip(actual.bytes(), case.bytes()))
            return
    index = actual.run(impl.select_stale_rows_).cpu()
    for b in range(3):
        try:
            assert torch.equal(expected.sequence(b).run(reference.select_stale_rows_)[0], index[b])
        except ValueError:
            assert index[b].tolist() == [-1, -1]
    assert all(torch.equal(a, b) for a, b in zip(actual.bytes(), expected.bytes()))


def test_wild_indices_on_the_device(device_impl) -> None:
    """A bad index gives zeros; a bad list of rows replaces nothing, and affects only its own sequence."""
    x = torch.arange(24.0).view(2, 3, 4)
    index = torch.tensor([[0, 3, -2, 2], [2**62, -(2**63), 1, -1]])
    gathered = device_impl.gather_rows(x.to(device_impl.device), index.to(device_impl.device)).cpu()
    assert torch.equal(gathered, reference.gather_rows(x, torch.where((index >= 0) & (index < 3), index, -1)))
    for wild in ([1, 7, -1], [3, 3, -1], [-1, 2, -1], [-3, 2, 4], [5, 2, 6], [2**62, -1, -1]):
        case = good_sum()
        case.index[0] = torch.tensor(wild)
        actual, expected = case.moved(device_impl.device), case.moved(CPU)
        total = actual.run(device_impl.add_cached_rows_).cpu()
        expected.index[0] = -1
        assert same(total, expected.run(reference.add_cached_rows_))
        assert torch.equal(actual.bytes()[1], expected.bytes()[1])


def test_a_good_sum_after_all(impl) -> None:
    check_sum(impl, good_sum())
