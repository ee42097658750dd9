"""filter_logits against its rule written out, transformers' processor, and the reference, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import pdkernels as pd
from pdkernels.reference.filter_logits import filter_logits as reference
from tests.ops.filter_cases import filtered, random_filters, words_of
from tests.ops.token_cases import DTYPES, rows_of
from tests.support.errors import refused

INF, NAN = math.inf, math.nan


def run(impl: Any, logits: Tensor, filters: pd.LogitFilters) -> Tensor:
    moved = {name: x.to(impl.device) if isinstance(x, Tensor) else x for name, x in filters._asdict().items()}
    return impl.filter_logits(logits.to(impl.device), **moved).cpu()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), width=st.integers(1, 70), rows=st.sampled_from([1, 4, 6]), groups=st.integers(1, 6))
def test_the_rule(seed: int, width: int, rows: int, groups: int) -> None:
    groups = groups if rows % groups == 0 else rows
    logits, filters = rows_of(rows, width), random_filters(rows, width, seed, groups)
    expected = filtered(logits, filters)
    torch.testing.assert_close(reference(logits.double(), *filters), expected, rtol=1e-12, atol=1e-12)
    found = torch.ops.pdkernels.filter_logits(logits, *filters)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, width", [(6, 1), (4, 33), (6, 100), (3, 8200), (2, 20_001)])
def test_the_bits_of_the_reference(impl: Any, rows: int, width: int, dtype: torch.dtype) -> None:
    """Each operation is rounded as PyTorch rounds it."""
    logits = rows_of(rows, width, dtype)
    for filters in (random_filters(rows, width, 3), random_filters(rows, width, 4)._replace(counts=None)):
        assert torch.equal(run(impl, logits, filters), reference(logits, *filters))
        for name in ("bias", "counts", "recent", "banned", "allowed"):
            one = pd.LogitFilters(**{name: getattr(filters, name)}, repetition_penalty=0.7, frequency_penalty=0.1)
            assert torch.equal(run(impl, logits, one), reference(logits, *one)), name


def test_the_repetition_penalty_of_transformers(impl: Any) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    logits, ids = rows_of(8, 500), torch.randint(500, (8, 300), generator=torch.Generator().manual_seed(1))
    counts = torch.zeros(8, 500, dtype=torch.int32).scatter_(1, ids[:, :150], -1)
    filters = pd.LogitFilters(counts=counts, recent=ids[:, 150:], repetition_penalty=1.1)
    expected = transformers.RepetitionPenaltyLogitsProcessor(1.1)(ids, logits)
    assert torch.equal(run(impl, logits, filters), expected)


@pytest.mark.parametrize("shape", [(), (2,), (2, 3), (2, 3, 1)])
def test_rows_that_share_a_filter(impl: Any, shape: tuple[int, ...]) -> None:
    """A tensor for all rows, for each sequence, for each row."""
    logits, one = rows_of(6, 40).view(2, 3, 1, 40), random_filters(math.prod(shape), 40, 5)
    shaped = {name: x.view(*shape, -1) if isinstance(x, Tensor) else x for name, x in one._asdict().items()}
    whole = {name: x.repeat_interleave(6 // len(x), 0).view(2, 3, 1, -1) if isinstance(x, Tensor) else x
             for name, x in one._asdict().items()}  # fmt: skip
    assert torch.equal(run(impl, logits, pd.LogitFilters(**shaped)), run(impl, logits, pd.LogitFilters(**whole)))


def test_odd_numbers(impl: Any) -> None:
    """Infinities and NaN take part as in PyTorch, -inf stays impossible, and an impossible NaN is gone."""
    logits = torch.tensor([[INF, -INF, NAN, 0.0, -0.0, NAN]])
    most = 2**31 - 1
    counts = torch.tensor([[most, 1, 1, -7, -1, 0]], dtype=torch.int32)
    filters = pd.LogitFilters(
        counts=counts, recent=torch.tensor([[0, 3]]), repetition_penalty=2.0, frequency_penalty=1e-3
    )
    expected = reference(logits, *filters)
    assert torch.equal(run(impl, logits, filters).nan_to_num(7), expected.nan_to_num(7))
    assert expected[0, 1] == -INF and expected[0, 3] == torch.tensor(-1e-3)
    one = pd.LogitFilters(allowed=words_of(torch.tensor([[True] * 5 + [False]])), banned=torch.tensor([2]))
    assert run(impl, logits, one)[0, [2, 5]].tolist() == [-INF, -INF]


def test_layouts(impl: Any) -> None:
    logits, filters = rows_of(4, 64), random_filters(4, 64, 6)
    expected = run(impl, logits, filters)
    strided = {name: torch.stack([x, x], -1)[..., 0] if isinstance(x, Tensor) else x
               for name, x in filters._asdict().items()}  # fmt: skip
    assert torch.equal(run(impl, torch.stack([logits, logits], -1)[..., 0], pd.LogitFilters(**strided)), expected)
    wide = torch.stack([logits, logits], 1).flatten(1)[:, :64]
    assert torch.equal(run(impl, wide, filters), expected)
    narrow = filters._replace(recent=filters.recent.int(), banned=filters.banned.int())
    assert torch.equal(run(impl, logits, narrow), expected)
    assert run(impl, logits[:0], pd.LogitFilters(bias=torch.zeros(64))).shape == (0, 64)


def test_threads_give_the_same_bits() -> None:
    logits, filters, before, results = rows_of(3, 50_000), random_filters(3, 50_000, 7), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(pd.filter_logits(logits, **filters._asdict()))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])


X = torch.zeros(2, 3, 40)


@pytest.mark.parametrize(
    "text, call",
    {
        r"logits must have shape \(\.\.\., V\), V at least 1, got \(2, 3, 0\)": {"logits": X[..., :0]},
        r"TypeError: bias must be torch\.float32, got torch\.float64": {"bias": X[0, 0].double()},
        r"TypeError: counts must be torch\.int32, got torch\.int64": {"counts": X[0, 0].long()},
        r"TypeError: counts must be a tensor, got list": {"counts": [0]},
        r"bias must have 40 columns, got \(1, 39\)": {"bias": X[0, 0, :39]},
        r"allowed must have 2 columns, got \(1, 1\)": {"allowed": X[0, 0, :1].int()},
        r"bias must have the shape \(\*rows, n\), whose rows are a beginning of \(2, 3\), got \(3, 40\)": {
            "bias": X[0]
        },
        r"banned must hold ids in \[-1, 39\], got 40 for row 0": {"banned": torch.tensor([3, 40])},
        r"banned must hold ids in \[-1, 39\], got -2 for row 3": {"banned": torch.tensor([[3], [-2]])},
        r"recent must hold ids in \[-41, 39\], got -42 for row 0": {"recent": torch.tensor([-42])},
        r"repetition_penalty must be finite and above 0 in float32, got 0": {"repetition_penalty": 0.0},
        r"repetition_penalty must be finite and above 0 in float32, got inf": {"repetition_penalty": INF},
        r"repetition_penalty must be finite and above 0 in float32, got 1e\+39": {"repetition_penalty": 1e39},
        r"presence_penalty must be finite in float32, got -1e\+39": {"presence_penalty": -1e39},
        r"frequency_penalty must be finite in float32, got nan": {"frequency_penalty": NAN},
        r"frequency_penalty must be finite in float32, got 1e\+300": {"frequency_penalty": 1e300},
        r"presence_penalty must be a float, or an int of at most 53 bits, got 9007199254740993": {
            "presence_penalty": 2**53 + 1
        },
        r"TypeError: presence_penalty must be a number, got str": {"presence_penalty": "much"},
    }.items(),
)
def test_bad_call(call: dict[str, object], text: str) -> None:
    with refused(text) as error:
        pd.filter_logits(**{"logits": X, **call})
    assert str(error.value).startswith("pdkernels.filter_logits: ")
