"""The filters of token_statistics: top-k, typical-p, penalties and impossible tokens, against the reference and the ops one by one."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from pdkernels.ops.token_statistics import Options, token_statistics_op
from pdkernels.reference.filter_logits import filter_logits
from pdkernels.reference.sampling import draw
from pdkernels.reference.sampling import filtered as one_by_one
from pdkernels.reference.token_statistics import kept
from tests.ops.filter_cases import random_filters
from tests.ops.token_cases import DTYPES, check, rows_of
from tests.support.errors import refused

INF = math.inf
CUTS: list[dict[str, Any]] = [
    {"keep_top_k": 1},
    {"keep_top_k": 5},
    {"keep_top_k": 50},
    {"typical_p": 0.5},
    {"keep_top_k": 20, "top_p": 0.8},
    {"keep_top_k": 40, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.7},
    {"top_p": 0.95, "min_p": 0.01, "typical_p": 0.9},
]


def run(impl: Any, logits: Tensor, **options: Any) -> pd.TokenStatistics:
    def moved(x: Any) -> Any:
        return x.to(impl.device) if isinstance(x, Tensor) else x

    given = {name: moved(value) for name, value in options.items()}
    if given.get("filters"):
        given["filters"] = pd.LogitFilters(*map(moved, given["filters"]))
    return pd.TokenStatistics(*(t.cpu() for t in impl.token_statistics(logits.to(impl.device), **given)))


def raw(**options: Any) -> dict[str, Any]:
    """Options as the reference takes them."""
    filters = options.pop("filters", None)
    return options | (filters._asdict() if filters else {})


@pytest.mark.parametrize("scale", [0.0, 0.1, 2.0, 10.0])
def test_top_p_of_flat_and_of_peaked_rows(impl: Any, scale: float) -> None:
    """CUDA first looks for the cut among few tokens, then among all, and keeps the logits near it if they are not many."""
    logits = rows_of(2, 20_480, torch.bfloat16, scale)
    for top_p in (0.0, 0.3, 0.95, 0.9999):
        call = {"distribution": "sampling", "top_p": top_p}
        check(run(impl, logits, **call), logits, **call)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype, width", [(torch.float32, 7), (torch.float16, 300), (torch.bfloat16, 9000)], ids=str)
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_the_distributions_of_the_reference(impl: Any, dtype: torch.dtype, width: int, cut: dict[str, Any]) -> None:
    logits = rows_of(8, width, dtype)
    for temperature, distribution in ((0.0, "sampling"), (0.6, "sampling"), (1.0, "model")):
        call = {"temperature": temperature, "distribution": distribution, "suppress": [2], "step": 3, **cut}
        check(run(impl, logits, **call), logits, **call)


@pytest.mark.covering
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cut", [{}, CUTS[4], CUTS[5]], ids=str)
def test_filters_of_logits(impl: Any, dtype: torch.dtype, cut: dict[str, Any]) -> None:
    """The statistics are those of the stored filtered logits, bit for bit on the CPU."""
    for rows, width, groups in ((40, 40, 2), (4, 9001, 4), (16, 8300, 1)):
        logits = rows_of(rows, width, dtype).view(groups, rows // groups, width)
        filters = random_filters(rows, width, 8, groups)
        stored = filter_logits(logits, *filters)
        for temperature in (0.0, 0.8):
            for distribution in ("model", "sampling"):
                call = {"temperature": temperature, "distribution": distribution, "suppress": [5], **cut}
                found = run(impl, logits, filters=filters, **call)
                check(found, logits, **raw(filters=filters, **call))
                # On CUDA the distribution of work follows the dtype.
                same = run(impl, stored, **call)
                assert torch.equal(found.ids, same.ids) and torch.equal(found.top_ids, same.top_ids)
                assert impl.name != "cpu" or all(torch.equal(a, b) for a, b in zip(found, same))


def test_draws_are_those_of_transformers_order(impl: Any) -> None:
    """Against a reference that compares all tokens with each other."""
    logits = rows_of(20, 60)
    logits[10:] = (logits[10:] * 2).round() / 2 + 0.01 * torch.arange(60)  # close, and apart by more than rounding
    for number, cut in enumerate(CUTS):
        settings = (cut.get("keep_top_k"), cut.get("top_p", 1.0), cut.get("min_p", 0.0), cut.get("typical_p", 1.0))
        law = one_by_one(logits, 0.9, *settings)
        stays = kept(logits, 0.9, settings[1], settings[2], settings[0] or 0, settings[3])
        assert torch.equal(law.isfinite(), stays)
        found = run(impl, logits, temperature=0.9, seed=number, **cut)
        assert found.ids.tolist() == draw(law, range(20), 0.9, number, 0)


def test_ties_stay_or_go_together(impl: Any) -> None:
    logits = torch.full((1, 9000), -1.0)
    logits[0, 100:4200] = 2.0
    logits[0, 8999] = 3.0
    found = run(impl, logits, distribution="sampling", keep_top_k=2)  # far more than two
    assert found.entropy.item() == pytest.approx(math.log(4100 + math.e) - math.e / (4100 + math.e), rel=1e-5)
    assert run(impl, logits, distribution="sampling", keep_top_k=1).entropy.item() == 0
    everything = run(impl, logits, distribution="sampling", keep_top_k=4102)
    assert torch.equal(everything.entropy, run(impl, logits, distribution="sampling").entropy)
    equal = run(impl, torch.zeros(1, 9000), distribution="sampling", keep_top_k=3, top_p=0.5, typical_p=0.5)
    assert equal.entropy.item() == pytest.approx(math.log(9000), rel=1e-6)


def test_typical_tokens_by_hand(impl: Any) -> None:
    """Meister et al.: of 1/2, 3/10 and 1/5 the surprises are 0.69, 1.2 and 1.61, the entropy is 1.03."""
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    for typical_p, stay in ((0.2, [1]), (0.29, [1]), (0.31, [1, 0]), (0.79, [1, 0]), (0.81, [1, 0, 2])):
        found = run(impl, logits, distribution="sampling", typical_p=typical_p, top_k=3)
        assert {n for n, p in zip(found.top_ids[0].tolist(), found.top_probs[0].tolist()) if p > 0} == set(stay)
    assert run(impl, logits.expand(50, 3), temperature=1.0, typical_p=0.2).ids.tolist() == [1] * 50
    beside = torch.cat([torch.full((1, 1), -INF), logits], 1)  # an excluded token adds nothing to the entropy
    assert run(impl, beside.expand(50, 4), temperature=1.0, typical_p=0.2).ids.tolist() == [2] * 50


def test_fewer_possible_tokens_than_asked_for(impl: Any) -> None:
    logits = torch.full((3, 9000), -INF)
    logits[0, 4000] = 1.0
    logits[1, [5, 8999]] = torch.tensor([1.0, 1.0])
    found = run(impl, logits, temperature=1.0, keep_top_k=20, top_p=0.9, typical_p=0.9, distribution="sampling")
    assert found.ids[0] == 4000 and found.probs.tolist() == [1.0, 0.5, 0.0] and found.ids[2] == -1
    none = pd.LogitFilters(allowed=torch.zeros(282, dtype=torch.int32))
    assert run(impl, torch.zeros(2, 9000), temperature=1.0, keep_top_k=3, filters=none).ids.tolist() == [-1, -1]


def test_rows_without_a_distribution_are_not_cut(impl: Any) -> None:
    logits = torch.tensor([[0.0, 5.0, math.nan, 3.0, -2.0, 4.0], [0.0, INF, 1.0, 2.0, 3.0, 4.0]])
    for distribution in ("model", "sampling"):
        found = run(impl, logits, temperature=0.5, distribution=distribution, top_k=6, keep_top_k=2, typical_p=0.5)
        assert found.ids.tolist() == [2, 1] and found.probs.isnan().all()
        assert found.top_ids.tolist() == [[2, 1, 5, 3, 0, 4], [1, 5, 4, 3, 2, 0]]


def test_filters_go_with_the_results(impl: Any) -> None:
    """With chosen rows, a filter's rows are those of the results; a row that is not there is not filtered into one."""
    logits, index = rows_of(4, 500), torch.tensor([[3, 0], [-1, 2]])
    bias = torch.zeros(2, 2, 500)
    bias[0, 0, 7] = bias[0, 1, 9] = bias[1, 0, 11] = bias[1, 1, 13] = 100.0
    found = run(impl, logits, row_index=index, filters=pd.LogitFilters(bias=bias), keep_top_k=4, temperature=1.0)
    assert found.ids.tolist() == [[7, 9], [-1, 13]]
    each = run(impl, logits, row_index=index, filters=pd.LogitFilters(bias=bias[:, 1]))
    assert each.ids.tolist() == [[9, 9], [-1, 13]]


def test_a_row_does_not_depend_on_the_others(impl: Any) -> None:
    logits, filters = rows_of(9, 9001), random_filters(9, 9001, 9)
    for cut in (CUTS[3], CUTS[5], {"top_p": 0.999}):
        options = {"temperature": 0.8, "distribution": "sampling", **cut}
        together = run(impl, logits, filters=filters, **options)
        one = pd.LogitFilters(*(x[4:5] if isinstance(x, Tensor) else x for x in filters))
        alone = run(impl, logits[4:5], filters=one, positions=torch.tensor([4]), **options)
        assert all(torch.equal(a[4:5], b) for a, b in zip(together, alone))


def test_threads_give_the_same_bits() -> None:
    logits, before, results = rows_of(3, 50_000), torch.get_num_threads(), []
    options = {"temperature": 0.5, "filters": random_filters(3, 50_000, 1), **CUTS[5]}
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(pd.token_statistics(logits, **options))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))


def test_part_of_a_vocabulary_draws_its_own_noise(impl: Any) -> None:
    """`first_id` moves the random numbers of the few tokens that are left as of all."""
    logits = rows_of(5, 300)
    for keep_top_k in (0, 300, 60):
        given = Options(1.0, 7, keep_top_k=keep_top_k, top_k=1)
        ids = token_statistics_op(logits, *given, 64)[0]
        whole = torch.full((5, 364), -INF)
        whole[:, 64:] = logits
        expected = run(impl, whole, temperature=1.0, seed=7, keep_top_k=keep_top_k or None, top_k=1).ids - 64
        assert torch.equal(ids, expected)


def test_the_fused_head_takes_the_same_filters() -> None:
    hidden, head = rows_of(12, 16).view(4, 3, 16), rows_of(900, 16)
    filters = random_filters(4, 900, 2)
    for cut in ({}, CUTS[5]):
        options = {"temperature": 0.7, "filters": filters, **cut}
        logits = pd.linear(hidden, head)
        whole = pd.token_statistics(logits, **options)
        assert all(torch.equal(a, b) for a, b in zip(pd.linear_token_statistics(hidden, head, **options), whole))
    with pytest.MonkeyPatch.context() as patch:  # blocks of five rows
        patch.setattr(importlib.import_module("pdkernels.ops.linear_token_statistics"), "BLOCK_LOGITS", 5 * 900)
        assert all(torch.equal(a, b) for a, b in zip(pd.linear_token_statistics(hidden, head, **options), whole))


X = torch.zeros(2, 40)


@pytest.mark.parametrize(
    "text, call",
    {
        r"keep_top_k must be at least 1, got 0\. Pass None to keep all tokens": {"keep_top_k": 0},
        r"TypeError: keep_top_k must be an int, got float": {"keep_top_k": 2.5},
        r"typical_p must be in \(0, 1\], got 0": {"typical_p": 0.0},
        r"typical_p must be in \(0, 1\], got 1\.5": {"typical_p": 1.5},
        r"TypeError: filters must be LogitFilters, got dict": {"filters": {}},
        r"bias must have 40 columns, got \(1, 3\)": {"filters": pd.LogitFilters(bias=X[0, :3])},
        r"banned must hold ids in \[-1, 39\], got 44 for row 0": {"filters": pd.LogitFilters(banned=X[0].long() + 44)},
        r"repetition_penalty must be finite and above 0 in float32, got -1": {
            "filters": pd.LogitFilters(repetition_penalty=-1)
        },
        r"temperature must be a float, or an int of at most 53 bits, got 9223372036854775807": {
            "temperature": 2**63 - 1
        },
    }.items(),
)
def test_bad_call(call: dict[str, object], text: str) -> None:
    with refused(text) as error:
        pd.token_statistics(**{"logits": X, **call})
    assert str(error.value).startswith("pdkernels.token_statistics: ")


def test_slices_of_a_vocabulary_take_none_of_them() -> None:
    for option in ({"keep_top_k": 3}, {"typical_p": 0.5}, {"filters": pd.LogitFilters(bias=X[0])}):
        with refused(f"NotImplementedError: {next(iter(option))} is not supported with a group"):
            pd.token_statistics(X, group=object(), first_id=0, **option)
