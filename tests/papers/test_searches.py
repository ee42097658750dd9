"""The surface of Jacobi Forcing's appendix E, and the tables of speed that stand beside it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from bench.papers import fixed_acceptance, grid_search, segments, strategies
from bench.papers.grid_search import BLOCK_SIZES, DEGREES, VERIFICATION_SIZES, fitted

POINTS = [*itertools.product(BLOCK_SIZES, VERIFICATION_SIZES)]


@pytest.mark.parametrize("logarithms", [False, True])
def test_a_hill_is_found(logarithms: bool) -> None:
    """Of degree 2 in the coordinates of the fit: no higher degree is better, and its top is that of the hill."""
    scale = torch.log2 if logarithms else torch.clone
    places = scale(torch.tensor(POINTS, dtype=torch.float64))
    top = scale(torch.tensor([64.0, 4.0], dtype=torch.float64))
    values = 300 - 3 * ((places - top) / (places.amax(0) - places.amin(0))).square().sum(1)
    surface = fitted(POINTS, values.tolist(), logarithms)
    assert surface.degree == 2 and surface.errors[1] < 1e-18 < surface.errors[0] and surface.left_out[1] < 1e-18
    assert surface.best == pytest.approx((64, 4), rel=0.04)  # a point of the dense grid


def test_the_errors_are_those_of_least_squares() -> None:
    """Against the normal equations, one degree at a time; and of points that are left out, the error is larger."""
    values = torch.rand(len(POINTS), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    surface = fitted(POINTS, values.tolist(), logarithms=True)
    x, y = torch.tensor(POINTS, dtype=torch.float64).log2().unbind(1)
    for degree, error in zip((1, 2), surface.errors):
        design = torch.stack([x**i * y**j for i in range(degree + 1) for j in range(degree + 1 - i)], 1)
        solved = torch.linalg.solve(design.T @ design, design.T @ values)
        assert error == pytest.approx((design @ solved - values).square().mean().item())
    assert surface.errors == sorted(surface.errors, reverse=True) and surface.degree == DEGREES[-1]
    assert all(out > own for out, own in zip(surface.left_out, surface.errors))


def test_smoothing_keeps_a_plane_inside() -> None:
    plane = torch.arange(40.0, dtype=torch.float64)[:, None] + 2 * torch.arange(40.0, dtype=torch.float64)
    smooth = grid_search._smoothed(plane)
    assert torch.allclose(smooth[8:-8, 8:-8], plane[8:-8, 8:-8]) and not torch.allclose(smooth, plane)


def quiet(what: str, share: float) -> None:
    assert 0 <= share <= 1


def test_a_small_search(monkeypatch: pytest.MonkeyPatch) -> None:
    make_task = grid_search.make_task
    monkeypatch.setattr(grid_search, "make_task", lambda *given, **more: make_task(*given, **more)._replace(limit=6))
    result = grid_search.search(1, quiet)
    assert [row["block size"] for row in result["rows"]] == list(BLOCK_SIZES)
    assert all(row[f"tokens/s, {n} verified"] > 0 for row in result["rows"] for n in VERIFICATION_SIZES)
    assert "degree 6" in result["surface over sizes"]


def test_small_tables_of_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_acceptance, "REPEATS", 2)
    rows = fixed_acceptance.fixed(1, quiet)["rows"]
    assert [row["block size"] for row in rows] == list(fixed_acceptance.BLOCK_SIZES)
    assert rows[0]["2 accepted"] is None and rows[1]["4 accepted"] == pytest.approx(2 * rows[1]["2 accepted"], abs=0.02)
    make_task = strategies.make_task
    monkeypatch.setattr(strategies, "make_task", lambda *given, **more: make_task(*given, **more)._replace(limit=6))
    found: list[dict[str, Any]] = strategies.compare(1, quiet)["rows"]
    assert [row[""] for row in found] == list(strategies.STRATEGIES)
    assert found[0]["forwards per prompt"] >= found[3]["forwards per prompt"] > 0


def test_runs_of_a_draft_that_the_fixed_point_has() -> None:
    """Against a comparison of all places; three tokens are not enough."""
    for seed in range(20):
        noisy, fixed = torch.randint(2, (2, 12), generator=torch.Generator().manual_seed(seed)).tolist()
        marked = set()
        for start, size in itertools.product(range(12), range(4, 13)):
            run = noisy[start : start + size]
            if len(run) == size and any(fixed[place : place + size] == run for place in range(12)):
                marked |= {*range(start, start + size)}
        assert segments.in_segments(noisy, fixed) == len(marked)
    assert segments.in_segments([1, 2, 3], [1, 2, 3]) == 0 and segments.in_segments([], []) == 0


def test_a_trained_model_has_more_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    make_task = segments.make_task
    monkeypatch.setattr(segments, "make_task", lambda *given, **more: make_task(*given, **more)._replace(limit=96))
    before, after = segments.count(2, quiet)["rows"]
    assert (before[""], after[""]) == ("tiny-code", "tiny-jacobi")
    assert all(after[name] > before[name] > 0 for name in before if name not in ("", "not converged"))
