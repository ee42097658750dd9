"""Draws of token_statistics: their numbers, their distribution, and the filters."""

from __future__ import annotations

import math

import pytest
import torch

import pdkernels as pd
from pdkernels.reference.sampling import draw
from pdkernels.reference.token_statistics import kept
from tests.ops.token_cases import DTYPES, check, rows_of, run

INF = math.inf


@pytest.mark.covering
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, width", [(300, 7), (100, 1031), (20, 8200)])
@pytest.mark.parametrize("temperature, distribution", [(0.3, "model"), (1.0, "sampling"), (2.5, "sampling")])
def test_within_the_error_budget(
    impl, rows: int, width: int, dtype: torch.dtype, temperature: float, distribution: str
) -> None:
    logits, options = (
        rows_of(rows, width, dtype),
        {"temperature": temperature, "distribution": distribution, "seed": 2**40 + 3, "step": 9},
    )
    check(run(impl, logits, **options), logits, **options)


def test_the_draw_of_the_decoders(impl) -> None:
    logits, row_positions = rows_of(50, 300), [2**32 - 1, *range(7, 56)]
    for step in (0, 2**32 - 1):
        found = run(impl, logits, temperature=0.8, seed=-5, step=step, positions=torch.tensor(row_positions))
        assert found.ids.tolist() == draw(logits, row_positions, 0.8, -5, step)


def test_steps_and_positions_of_rows(impl) -> None:
    logits, steps = rows_of(6, 100).view(2, 3, 100), torch.tensor([[4], [9]], dtype=torch.int32)
    positions = torch.tensor([[3, 1, 8], [5, 5, 2]], dtype=torch.int32)
    found = run(impl, logits, temperature=1.0, step=steps, positions=positions)
    for b in range(2):
        assert found.ids[b].tolist() == draw(logits[b], positions[b].tolist(), 1.0, 0, int(steps[b]))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_seeds_of_rows(impl, dtype: torch.dtype) -> None:
    """A row draws what it would draw alone with its seed, and equal rows draw differently."""
    logits, seeds = rows_of(1, 300).expand(2, 3, 300), torch.tensor([[-5], [2**31 - 1]]).to(dtype)
    row_positions = torch.arange(3).expand(2, 3)
    found = run(impl, logits, temperature=1.5, seed=seeds, positions=row_positions)
    for b in range(2):
        assert found.ids[b].tolist() == draw(logits[b], range(3), 1.5, int(seeds[b]), 0)
    assert not torch.equal(found.ids[0], found.ids[1])
    picked = run(impl, logits[0], temperature=1.5, seed=seeds[:, 0], row_index=torch.tensor([2, 0]))
    assert [int(n) for n in picked.ids] == [draw(logits[0, :1], [p], 1.5, int(s), 0)[0] for p, s in zip((2, 0), seeds)]
    with pytest.raises(ValueError, match=r"seed must broadcast to the shape \(2, 3\) of the rows, got \(2,\)"):
        run(impl, logits, temperature=1.0, seed=seeds[:, 0])


@pytest.mark.parametrize("temperature", [1e-30, 1e-12, 1e30])
def test_any_temperature(impl, temperature: float) -> None:
    logits = rows_of(50, 200)
    found = run(impl, logits, temperature=temperature)
    expected = logits.argmax(-1) if temperature < 1 else torch.tensor(draw(torch.zeros(50, 200), range(50), 1.0, 0, 0))
    assert torch.equal(found.ids, expected)
    assert run(impl, logits, temperature=temperature, distribution="sampling").entropy.isfinite().all()


def test_equal_scores_go_to_the_lowest_id(impl) -> None:
    """With huge logits the noise is lost in rounding."""
    found = run(impl, torch.full((5, 9000), 1e30), temperature=1.0)
    assert found.ids.tolist() == [0] * 5


@pytest.mark.parametrize("options", [{}, {"top_p": 0.8}, {"min_p": 0.2}], ids=str)
def test_the_distribution_of_the_draw(options: dict[str, float]) -> None:
    """Chi-square of 40 000 draws against the filtered and tempered distribution."""
    logits, temperature, count = torch.tensor([2.0, -1.0, 0.5, 0.5, 1.0, -3.0, 0.0, -INF]), 1.7, 40_000
    ids = pd.token_statistics(logits.expand(count, 8).contiguous(), temperature=temperature, seed=11, **options).ids
    keep = kept(logits[None], temperature, options.get("top_p", 1.0), options.get("min_p", 0.0))[0]
    distribution = torch.softmax(torch.where(keep, logits.double() / temperature, -INF), -1)
    seen = ids.bincount(minlength=8).double()
    assert (seen[distribution == 0] == 0).all()
    deviation = (
        ((seen - count * distribution)[distribution > 0].square() / (count * distribution[distribution > 0]))
        .sum()
        .item()
    )
    degrees = int((distribution > 0).sum()) - 1
    assert deviation < degrees + 4 * math.sqrt(2 * degrees)


# --- filters --------------------------------------------------------------------------------------------------------------------


@pytest.mark.covering
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [7, 300, 9000])
@pytest.mark.parametrize(
    "options", [{"top_p": 0.9}, {"min_p": 0.03}, {"top_p": 0.5, "min_p": 0.2}, {"top_p": 0.97}], ids=str
)
def test_filtered_distributions(impl, dtype: torch.dtype, width: int, options: dict[str, float]) -> None:
    logits = rows_of(30, width, dtype)
    for temperature in (0.0, 0.6):
        call = {"temperature": temperature, "distribution": "sampling", "suppress": [2], **options}
        check(run(impl, logits, **call), logits, **call)
    call = {"temperature": 0.6, "suppress": [2], **options}
    check(run(impl, logits, **call), logits, **call)


def test_the_edge_of_the_nucleus(impl) -> None:
    """Masses of 1/2, 1/4, 1/8, 1/16 twice: equals go together, and the token that crosses the edge stays."""
    logits = torch.tensor([[-4.0, -1.0, -4.0, -3.0, -2.0]]) * math.log(2)
    for top_p, stay in (
        (0.0, 1),
        (0.3, 1),
        (0.49, 1),
        (0.51, 2),
        (0.74, 2),
        (0.76, 3),
        (0.86, 3),
        (0.88, 5),
        (0.93, 5),
        (0.95, 5),
        (1.0, 5),
    ):
        found = run(impl, logits, top_p=top_p, distribution="sampling")
        assert int((found.top_probs > 0).sum()) == stay, top_p
        assert found.top_ids[0, :2].tolist() == [1, 4 if stay > 1 else 0]
    for min_p, stay in ((1.0, 1), (0.51, 1), (0.49, 2), (0.26, 2), (0.24, 3), (0.126, 3), (0.124, 5)):
        assert int((run(impl, logits, min_p=min_p, distribution="sampling").top_probs > 0).sum()) == stay, min_p


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_equals_at_the_edge(impl, dtype: torch.dtype) -> None:
    """Half the mass is in one token, half in thousands of equal ones, negative and close to others."""
    logits = torch.full((2, 9000), -0.75, dtype=dtype)
    logits[:, 4500:] = -40.0
    logits[0, 77] = -0.75 + math.log(4500)
    logits[1, 78] = -0.5
    found = run(impl, logits, distribution="sampling", top_p=0.7)
    assert found.entropy[0].item() == pytest.approx(0.5 * math.log(4500) + math.log(2), rel=1e-2)
    check(found, logits, distribution="sampling", top_p=0.7)
    few = run(impl, logits, distribution="sampling", top_p=0.3)
    assert few.probs[0] == 1 and few.entropy[0] == 0
    assert (run(impl, logits, distribution="sampling", top_p=0.0).probs == 1).all()


def test_filters_leave_the_models_distribution_alone(impl) -> None:
    logits = rows_of(20, 300)
    plain, filtered = run(impl, logits, temperature=0.9), run(impl, logits, temperature=0.9, top_p=0.4)
    assert all(torch.equal(a, b) for a, b in list(zip(plain, filtered))[2:])
    assert (filtered.ids != plain.ids).any()
    assert all(torch.equal(a, b) for a, b in zip(run(impl, logits), run(impl, logits, top_p=0.4, min_p=0.5)))


@pytest.mark.parametrize("options", [{"min_p": 0.3}, {"top_p": 0.3}, {"top_p": 0.5, "min_p": 0.3}], ids=str)
def test_rows_with_a_nan_are_not_filtered(impl, options: dict[str, float]) -> None:
    """Such a row has no distribution, so its first tokens are those of ``torch.topk``, regardless of the filters."""
    logits = torch.tensor([[0.0, 5.0, math.nan, 3.0, -2.0, 4.0]])
    for distribution in ("model", "sampling"):
        found = run(impl, logits, distribution=distribution, top_k=6, **options)
        assert found.ids.item() == 2 and found.top_ids.tolist() == [[2, 1, 5, 3, 0, 4]]
        assert found.probs.isnan().all() and found.entropy.isnan().all()


def test_margins_of_equals_are_plain_zeros(impl) -> None:
    found = run(impl, torch.tensor([[1.0, 1.0, 0.0], [-0.0, 0.0, 0.0]]))
    assert not found.margin.any() and not found.margin.signbit().any()


def test_temperatures_and_seeds_out_of_range() -> None:
    logits = torch.zeros(1, 4)
    for temperature in (1e-31, 5e-324):
        with pytest.raises(ValueError, match=r"temperature must be 0 or at least 1e-30, got"):
            pd.token_statistics(logits, temperature=temperature)
    for seed in (2**64, -(2**63) - 1):
        with pytest.raises(ValueError, match=r"seed must be a number of 64 bits, in \[-2\*\*63, 2\*\*64\), got"):
            pd.token_statistics(logits, temperature=1.0, seed=seed)
    same = (pd.token_statistics(logits, temperature=1.0, seed=seed) for seed in (2**64 - 1, -1))
    assert all(torch.equal(a, b) for a, b in zip(*same))
