"""Bad calls of the KV-cache ops: the sentence a user reads, and a cache that stays as it was."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pdkernels as pd
from pdkernels import backends
from pdkernels.ops import library as _library
from pdkernels.reference import kv_cache as reference
from tests.ops.kv_cases import Case, filled, make_case, whole
from tests.support.errors import refused

CPU = torch.device("cpu")


def append(ops, c: Case) -> None:
    ops.kv_append_(c.k, c.v, c.k_new, c.v_new, c.lengths, counts=c.counts, block_table=c.block_table)


def commit(ops, c: Case) -> None:
    ops.kv_commit_(c.k, c.v, c.lengths, c.counts, c.source_index, block_table=c.block_table)


def good_case(page_size: int | None = None) -> Case:
    case = make_case(5, layers=2, batch=2, capacity=12, heads=2, head_dim=4, rows=4, page_size=page_size)
    case.lengths.copy_(torch.tensor([3, 6]))
    case.counts.copy_(torch.tensor([2, 4]))
    case.source_index.copy_(torch.tensor([[0, 2, 0, 0], [1, 2, 3, 5]]))
    return case


GOOD, PAGES = good_case(), good_case(4)
# What the message must contain, and what is wrong with the call.
APPEND = {
    r"kv_append_: lengths must be in \[0, 12\], got -1 for sequence 1": {"lengths": filled(GOOD.lengths, 1, -1)},
    r"counts must be in \[0, 4\], got 5 for sequence 0": {"counts": filled(GOOD.counts, 0, 5)},
    r"lengths \+ counts must be at most the capacity 12, got 13 for sequence 1\. Make the cache larger": {
        "lengths": filled(GOOD.lengths, 1, 9)
    },
    r"TypeError: lengths must be an int32 or int64 tensor, got list": {"lengths": [3, 6]},
    r"lengths must have shape \(2\), got \(1,\)": {"lengths": GOOD.lengths[:1]},
    r"TypeError: counts must be an int32 or int64 tensor, got torch\.int16": {"counts": GOOD.counts.short()},
    r"k_cache must have 4 dimensions, or 5 with the layers first, got \(12, 2, 4\)": {"k": GOOD.k[0, 0]},
    r"TypeError: kv_append_: k_cache must be a tensor or a list of them, got object": {"k": object()},
    r"k_new must have a contiguous last dimension, got strides .*\. Call \.contiguous\(\) on it": {
        "k_new": GOOD.k_new.transpose(-1, -2)
    },
    r"v_cache must match k_cache": {"v": GOOD.v[:, :, :5]},
    r"TypeError: k_new must be torch\.float32 like the cache, got torch\.float64\. Convert it": {
        "k_new": GOOD.k_new.double()
    },
    r"v_new must have shape \(layers, 2, rows, 2, 4\) like lengths and the cache, got \(\d, 2, \d, 1, 4\)": {
        "v_new": GOOD.v_new[..., :1, :]
    },
    r"k_new must have shape": {"k_new": GOOD.k_new[:, :1]},
    r"k_new must have the cache's 2 layers, got 1": {"k_new": GOOD.k_new[:1]},
    r"v_new must have 4 rows like k_new, got 3": {"v_new": GOOD.v_new[:, :, :3]},
    r"k_new must be on cpu like the cache, got meta": {"k_new": GOOD.k_new.to("meta")},
}
COMMIT = {
    r"kv_commit_: lengths must be in \[0, 12\], got 13 for sequence 0": {"lengths": filled(GOOD.lengths, 0, 13)},
    r"counts must be in \[0, 4\], got -2 for sequence 1": {"counts": filled(GOOD.counts, 1, -2)},
    r"source_index must be in \[0, 8\], got -1 for sequence 0": {"source_index": filled(GOOD.source_index, (0, 1), -1)},
    r"source_index must be in \[0, 5\], got 6 for sequence 1": {"source_index": filled(GOOD.source_index, (1, 3), 6)},
    r"TypeError: kv_commit_: lengths must be an int32 or int64 tensor, got torch\.float32\. Convert it": {
        "lengths": GOOD.lengths.float()
    },
    r"counts must have shape \(2\), got \(2, 1\)": {"counts": GOOD.counts[:, None]},
    r"source_index must have shape \(2, any\), got \(1, 4\)": {"source_index": GOOD.source_index[:1]},
    r"TypeError: k_cache must be a tensor, got int": {"k": [1]},
    r"TypeError: kv_commit_: v_cache must be a tensor or a list of them, got NoneType": {"v": None},
    r"v_cache must hold at least one layer, got an empty list": {"v": []},
    r"k_cache must have a contiguous last dimension, got strides .*\. Allocate it so\.": {
        "k": GOOD.k.transpose(-1, -2)
    },
    r"k_cache\[1\] must have the shape, strides and dtype of the first layer": {"k": [GOOD.k[0], GOOD.k[1, :, :8]]},
    r"v_cache must match k_cache, 2 layers of \(2, 12, 2, 4\), up to the heads, got 1 layers": {"v": GOOD.v[:1]},
    r"counts must be on cpu, got meta\. Move it": {"counts": GOOD.counts.to("meta")},
}
APPEND_PAGED = {
    r"block_table\[1, 2\] must be in \[0, 7\], got -1 for sequence 1\. Reserve pages": {
        "block_table": filled(PAGES.block_table, (1, 2), -1)
    },
    r"block_table must have shape \(2, any\), got \(1, 3\)": {"block_table": PAGES.block_table[:1]},
}
COMMIT_PAGED = {
    r"block_table\[0, 1\] must be in \[0, 7\], got 99 for sequence 0": {
        "block_table": filled(PAGES.block_table, (0, 1), 99)
    },
    r"TypeError: block_table must be an int32 or int64 tensor": {"block_table": PAGES.block_table.float()},
}
TABLE = [
    (call, good, *row)
    for call, good, rows in (
        (append, GOOD, APPEND),
        (commit, GOOD, COMMIT),
        (append, PAGES, APPEND_PAGED),
        (commit, PAGES, COMMIT_PAGED),
    )
    for row in rows.items()
]


def check_refused(good: Case, bad: Case, call, text: str) -> None:
    watched = [whole(t) for t in (good.k, good.v, bad.lengths) if isinstance(t, torch.Tensor)]
    before = [t.clone() for t in watched]
    with refused(text) as error:
        call(pd, bad)
    assert str(error.value).startswith("pdkernels.")
    assert all(torch.equal(a, b) for a, b in zip(watched, before))


@pytest.mark.parametrize("call, good, text, change", TABLE)
def test_bad_call(call, good: Case, text: str, change: dict[str, object]) -> None:
    check_refused(good, replace(good, **change), call, text)


def test_table_starts_from_a_good_case() -> None:
    for page_size in (None, 4):
        for call in (append, commit):
            call(pd, good_case(page_size))


@pytest.mark.parametrize(
    "wanted, text",
    [([-1, 0], r"new_lengths must be in \[0, 3\], got -1 for sequence 0"), ([3, 7], r"\[0, 6\], got 7 for sequence 1")],
)
def test_bad_trim(wanted: list[int], text: str) -> None:
    lengths = torch.tensor([3, 6])
    with pytest.raises(ValueError, match=text):
        pd.kv_trim_(lengths, torch.tensor(wanted))
    assert lengths.tolist() == [3, 6]


def test_a_default_backend_is_named_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = good_case().lengths
    monkeypatch.setattr(backends, "DEFAULT", "fast")
    with pytest.raises(
        ValueError, match="kv_trim_: PDKERNELS_BACKEND must be one of auto, native, triton, reference, got 'fast'"
    ):
        pd.kv_trim_(lengths, lengths.clone())
    monkeypatch.setattr(backends, "DEFAULT", "triton")
    with pytest.raises(
        NotImplementedError,
        match="kv_trim_: PDKERNELS_BACKEND must be one of auto, native, reference on cpu, got 'triton'",
    ):
        pd.kv_trim_(lengths, lengths.clone())


def test_unknown_and_missing_backends() -> None:
    case = good_case()
    with pytest.raises(ValueError, match="backend must be one of auto, native, triton, reference, got 'fast'"):
        pd.kv_trim_(case.lengths, case.lengths.clone(), backend="fast")
    with pytest.raises(
        NotImplementedError, match="backend must be one of auto, native, reference on cpu, got 'triton'"
    ):
        pd.kv_trim_(case.lengths, case.lengths.clone(), backend="triton")
    # Without memory a call is its validation.
    with pytest.raises(ValueError, match=r"new_lengths must have shape \(2\), got \(0,\)"):
        pd.kv_trim_(case.lengths.to("meta"), case.lengths.to("meta")[:0])


# --- many random bad calls -------------------------------------------------------------------------------------------------

WILD = [-(2**63), -(2**40), -(2**31), -1, 2**31 - 1, 2**40, 2**62, 2**63 - 1]


def spoil(case: Case, rng: random.Random) -> None:
    """Puts values far out of range, or just out of range, at one to four random indices."""
    targets = [
        case.lengths,
        case.counts,
        case.source_index,
        *([case.block_table] if case.block_table is not None else []),
    ]
    for _ in range(rng.randint(1, 4)):
        target = rng.choice([t for t in targets if t.numel()])
        bounds = torch.iinfo(target.dtype)
        value = rng.choice([*WILD, case.capacity + 1, rng.randint(-3, case.capacity + 3)])
        if target is case.block_table:  # a valid page of another sequence would make the result depend on the order
            value = rng.choice([-1, -(2**31), 2**31 - 1, 10**6])
        target.view(-1)[rng.randrange(target.numel())] = max(bounds.min, min(bounds.max, value))


def bad_case(seed: int) -> Case:
    rng = random.Random(seed)
    case = make_case(
        seed,
        layers=1,
        batch=rng.randint(1, 3),
        capacity=rng.randint(1, 10),
        heads=1,
        head_dim=rng.choice([1, 4]),
        page_size=rng.choice([None, 1, 3]),
        index_dtype=rng.choice([torch.int32, torch.int64]),
        rows=rng.randint(1, 6),
    )
    spoil(case, rng)
    return case


def expected_after(case: Case, call, sequence_by_sequence: bool) -> tuple[Case, bool]:
    """The reference's result of a call: all or nothing, or one sequence at a time; and whether it raised."""
    result, refused = case.moved(CPU), False
    batch = case.lengths.shape[0]
    for rows in [slice(b, b + 1) for b in range(batch)] if sequence_by_sequence else [slice(0, batch)]:
        part = replace(
            result,
            k=result.k if case.block_table is not None else result.k[:, rows],
            v=result.v if case.block_table is not None else result.v[:, rows],
            k_new=result.k_new[:, rows],
            v_new=result.v_new[:, rows],
            lengths=result.lengths[rows],
            counts=result.counts[rows],
            source_index=result.source_index[rows],
            block_table=None if case.block_table is None else result.block_table[rows],
        )
        try:
            call(reference, part)
        except ValueError:
            refused = True
    return result, refused


@given(seed=st.integers(0, 2**31), call=st.sampled_from([append, commit]))
@settings(max_examples=1000)
def test_a_thousand_bad_calls(seed: int, call) -> None:
    check_bad_call(seed, call)


@pytest.mark.slow
@given(seed=st.integers(0, 2**31), call=st.sampled_from([append, commit]))
@settings(max_examples=10_000)
def test_ten_thousand_bad_calls(seed: int, call) -> None:
    check_bad_call(seed, call)


def check_bad_call(seed: int, call) -> None:
    """The CPU refuses exactly what the reference refuses, and then no byte has changed."""
    actual = bad_case(seed)
    expected, refused = expected_after(actual, call, sequence_by_sequence=False)
    if refused:
        with pytest.raises(ValueError, match=r"pdkernels\.kv_"):
            call(pd, actual)
    else:
        call(pd, actual)
    assert all(torch.equal(a, b) for a, b in zip(actual.bytes(), expected.bytes()))


@given(seed=st.integers(0, 2**31), call=st.sampled_from([append, commit]))
@settings(max_examples=600)
def test_bad_sequences_are_left_alone_on_cuda(seed: int, call, device_impl) -> None:
    """CUDA kernels cannot raise: a sequence with bad values stays as it was, the others are served."""
    case = bad_case(seed)
    expected, _ = expected_after(case, call, sequence_by_sequence=True)
    actual = case.moved(device_impl.device)
    call(device_impl, actual)
    assert all(torch.equal(a, b) for a, b in zip(actual.bytes(), expected.bytes()))


def test_bad_trim_is_left_alone_on_cuda(device_impl) -> None:
    lengths = torch.tensor([3, 6, 2], device=device_impl.device)
    device_impl.kv_trim_(lengths, torch.tensor([-1, 7, 1], device=device_impl.device))
    assert lengths.tolist() == [3, 6, 1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("call, good, text, change", [row for row in TABLE if re.search(r"in \\\[0|capacity", row[2])])
def test_debug_checks_raise_on_cuda(monkeypatch, call, good: Case, text: str, change: dict[str, object]) -> None:
    monkeypatch.setattr(_library, "DEBUG_CHECKS", True)
    bad = replace(good, **change).moved(torch.device("cuda"))
    check_refused(bad, bad, call, text)


def test_what_a_kernel_refuses_is_a_value_error() -> None:
    """torch 2.15 raises RuntimeError for std::invalid_argument."""

    def refuse(*_: object) -> None:
        raise RuntimeError("pdkernels.kv_trim_: new_lengths must be in order.")

    for writes in ((), (0,)):  # also of ops that are called without `library.call`, such as whole steps
        with pytest.raises(ValueError, match="^pdkernels.kv_trim_: new_lengths must be in order.$"):
            _library.run_counted(refuse, (torch.tensor([3, 6]),), writes)  # type: ignore[arg-type]
