"""What the model says of work that an H200 has timed."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from bench.predict import model, statistics_figures
from bench.predict.device import DEVICES
from bench.predict.fit import fit
from bench.predict.measured import Comparisons, times
from tests.harness.budgets import find_cuobjdump, find_nvcc
from tests.harness.triton_interpreter import requires_triton

H200 = DEVICES["h200"]
pytestmark = [requires_triton, pytest.mark.skipif(find_cuobjdump() is None, reason="needs cuobjdump")]


@pytest.fixture(scope="module")
def compared(figures: dict[str, Any]) -> Comparisons:
    return Comparisons(H200, figures)


def test_rows_that_are_held_out(compared: Comparisons) -> None:
    errors = {row.work: abs(row.error) for row in compared.rows if not row.fits}
    assert len(errors) >= 30 and median(errors.values()) < 0.12 and max(errors.values()) < 0.35, errors
    masks = [error for work, error in errors.items() if work.startswith("dual stream")]
    assert len(masks) == 6 and max(masks) < 0.1
    assert median(compared.sweep) < 0.12 and max(compared.sweep) < 0.4


def test_the_forward_pass_is_near_its_goal(compared: Comparisons) -> None:
    (row,) = (row for row in compared.rows if row.work == "noise-aware 4608, forward")
    assert row.predicted <= 1.1 * 165e-6


def test_each_number_has_its_rows(compared: Comparisons) -> None:
    fitted = [row for row in compared.rows if row.fits]
    assert {row.fits for row in fitted} == {"drain, program", "l2", "alone", "latency"}
    assert all(abs(row.error) < 0.1 for row in fitted)
    assert all(abs(row.error) < 0.005 for row in fitted if row.fits != "drain, program")


def test_the_numbers_are_those_of_the_fit(figures: dict[str, Any]) -> None:
    elsewhere = H200._replace(l2=28.0, drain=256, program=1500, alone=2.0, latency=6e-7)
    assert fit(elsewhere, figures) == H200


def test_everything_timed_is_compared_or_named(compared: Comparisons) -> None:
    works = [row.work for row in compared.rows]
    assert len(set(works)) == len(works)
    assert set(compared.left) < set(times())
    assert all("temperature 1" in case or "d64" in case or "pages" in case for case, _ in compared.left)


@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")
@pytest.mark.parametrize("rows", [1, 32, 256])
def test_token_statistics_wait_less_than_when_they_were_timed(rows: int) -> None:
    today, timed = statistics_figures.today(statistics_figures.measure()), statistics_figures.TIMED
    assert today.region <= timed.region
    assert model.row_statistics(H200, today, rows, 126464) < model.statistics(H200, timed, rows, 126464) / 2
