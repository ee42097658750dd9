"""Counts of the theory against brute force, the fit of row times against a known knee, and the pictures."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from pathlib import Path

import pytest

from bench.papers import fit_row_times, plot_row_times, plot_theory, theory
from pdkernels import masks


def counted_pairs(length: int, factor: int) -> tuple[int, int, int]:
    """Visible pairs, one by one, from the definitions of the three layouts."""
    copies = [(token, copy) for token in range(length) for copy in range(factor)]
    depth = factor * sum(key <= query for query in range(length) for key in range(length))
    shared = unshared = 0
    for token, copy in copies:
        for other, its in copies:
            own = other == token and its <= copy
            shared += own or (other < token and its == factor - 1)
            unshared += own or other < token
    return depth, shared, unshared


@pytest.mark.parametrize("length", [1, 2, 3, 7])
@pytest.mark.parametrize("factor", [1, 2, 3, 5])
def test_prefill_costs_are_those_of_counting(length: int, factor: int) -> None:
    cost = theory.prefill_cost(length, factor, 8, params=10)
    assert cost.pairs == counted_pairs(length, factor)
    assert cost.rows == length * factor
    assert cost.flops == tuple(2 * 10 * cost.rows + 4 * 8 * pairs for pairs in cost.pairs)
    depth, shared, unshared = cost.flops
    attention = 4 * 8
    assert shared - depth == attention * length * factor * (factor - 1) // 2 >= 0
    assert unshared - shared == attention * factor * (factor - 1) * length * (length - 1) // 2
    assert (unshared > shared) == (factor > 1 and length > 1)


@pytest.mark.parametrize(("length", "factor"), [(1, 1), (3, 2), (7, 5), (40, 3)])
def test_the_masks_of_width_scaling_have_the_pairs_of_the_theory(length: int, factor: int) -> None:
    pairs = theory.prefill_cost(length, factor, 8).pairs
    for kv_share, expected in ((True, pairs[1]), (False, pairs[2])):
        mask = masks.width_scaling(length, factor, kv_share)
        assert mask.plan(16, 16).visible_pairs == int(mask.dense().sum()) == expected
        assert mask.shape == (length * factor,) * 2


def finished(steps: int, recurrences: int, inner: int) -> tuple[int, list[int]]:
    """The sampler, application by application: tokens that left the wave, and how wide it was."""
    wave = -(-recurrences // inner)
    ages, done, widths = [0], 0, []
    for _ in range(steps):
        widths.append(len(ages))
        ages = [age + 1 for age in ages]
        if ages[0] % inner == 0 and ages[-1] % inner == 0:
            if ages[0] >= wave * inner:
                ages.pop(0)
                done += 1
            ages.append(0)
    return done, widths


@pytest.mark.parametrize(("recurrences", "inner"), [(8, 1), (8, 2), (8, 8), (12, 4), (32, 4), (10, 4)])
def test_decode_budgets_are_those_of_a_run(recurrences: int, inner: int) -> None:
    for steps in range(1, 5 * recurrences):
        budget = theory.decode_budget(steps, recurrences, inner)
        done, widths = finished(steps, recurrences, inner)
        assert budget.tokens == (steps // recurrences, done)
        assert list(budget.widths) == widths
        if recurrences % inner == 0:
            assert budget.tokens[1] >= budget.tokens[0]
    long = theory.decode_budget(10_000 * recurrences, recurrences, inner)
    assert abs(long.tokens[1] / long.tokens[0] - long.limit) < 0.01


def test_a_wave_of_one_token_is_autoregressive_decoding() -> None:
    budget = theory.decode_budget(100, 8, 8)
    assert budget.wave == 1 and budget.tokens[0] == budget.tokens[1] and set(budget.widths) == {1}
    assert budget.products == budget.limit == 1


def test_a_wave_wider_than_the_knee_costs_what_it_gains() -> None:
    free, bound = theory.decode_budget(320, 32, 4), theory.decode_budget(320, 32, 4, knee=4)
    assert bound.limit == free.limit / 2 and bound.tokens[1] < free.tokens[1]
    assert theory.decode_budget(320, 32, 4, knee=8) == free


def test_the_advantage_of_width_ends_at_the_knee() -> None:
    for factor in (1, 2, 5):
        found = [theory.width_advantage(length, factor, 60) for length in range(1, 200)]
        assert found == sorted(found, reverse=True) and found[0] == factor
        assert all((advantage == 1) == (length >= 60 or factor == 1) for length, advantage in enumerate(found, 1))
    assert theory.depth_preferred([60, 59], 60) == Fraction(1, 2)


def test_the_knee_of_the_roofline_is_where_both_bounds_meet() -> None:
    device = theory.Device(flops=1000.0, bandwidth=10.0)
    assert device.knee == 100 == theory.tensor_budget(device)
    assert theory.row_cost(100, device, 5) == pytest.approx(theory.row_cost(1, device, 5))
    assert theory.row_cost(200, device, 5) == pytest.approx(2 * theory.row_cost(1, device, 5))
    assert theory.row_cost(10, device, 5, cached_bytes=1) == pytest.approx(2 * theory.row_cost(1, device, 5))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: theory.prefill_cost(0, 1, 1), "length must be at least 1, got 0"),
        (lambda: theory.decode_budget(1, 4, 5), r"inner must be at most recurrences \(4\), got 5"),
        (lambda: theory.decode_budget(1, 4, 0), "inner must be at least 1, got 0"),
        (lambda: theory.depth_preferred([], 5), "lengths must hold at least one"),
        (lambda: theory.tensor_budget(theory.DEVICES["H200"], -1), "slack must not be negative"),
        (lambda: fit_row_times([1], [1.0]), "rows must be two or more"),
        (lambda: fit_row_times([2, 1], [1.0, 1.0]), "rows must ascend"),
        (lambda: fit_row_times([1, 2], [1.0, 0.0]), "seconds must be positive"),
    ],
)
def test_errors_name_what_is_wrong(call: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()  # type: ignore[operator]


ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 256]


@pytest.mark.parametrize("knee", [6.0, 20.0, 50.0, 100.0])
def test_the_fit_finds_a_knee_that_is_known(knee: float) -> None:
    slope = 0.01
    seconds = [max(2.0, 2.0 + slope * (count - knee)) for count in ROWS]
    fit = fit_row_times(ROWS, seconds)
    assert fit.flat == pytest.approx(2.0, rel=1e-6)
    if knee <= 50:  # two points past it, so that the line is determined
        assert fit.knee == pytest.approx(knee, rel=1e-6) and fit.slope == pytest.approx(slope, rel=1e-6)
    # 10 % of the floor are 20 rows.
    assert fit.budget() == max(count for count in ROWS if count <= knee + 20)


def test_the_fit_tolerates_noise() -> None:
    noise = random.Random(0)
    for _ in range(20):
        seconds = [max(1.0, 0.3 + count / 40) * noise.uniform(0.97, 1.03) for count in ROWS]
        assert 22 < fit_row_times(ROWS, seconds).knee < 34


def test_without_a_knee_there_is_none() -> None:
    fit = fit_row_times(ROWS, [1.0] * len(ROWS))
    assert fit.knee == math.inf and fit.budget() == 256 and fit.as_json()["knee"] is None
    line = fit_row_times(ROWS, [float(count) for count in ROWS])
    assert line.knee <= 2 and line.budget() == 1


def test_the_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    plot_theory(tmp_path / "theory.png")
    plot_row_times(fit_row_times(ROWS, [max(1.0, count / 40) for count in ROWS]), tmp_path / "rows.png")
    assert all((tmp_path / name).stat().st_size > 5000 for name in ("theory.png", "rows.png"))
