"""The model of `python -m bench.predict`, and what it must say of today's kernels."""

from __future__ import annotations

from typing import Any

import pytest

from bench.predict import __main__ as command
from bench.predict import model
from bench.predict.model import DEVICES, Attention, makespan, step_cycles
from pdkernels import masks
from tests.cudasim.build import ROOT
from tests.harness.budgets import find_cuobjdump, find_nvcc
from tests.harness.triton_interpreter import requires_triton

H200 = DEVICES["h200"]
compiled = pytest.mark.skipif(find_cuobjdump() is None, reason="needs cuobjdump")
PLANS = {
    "noise-aware 4608": (masks.noise_aware_causal(512, 32, 64, layout="streams"), (28, 4)),
    "noise-aware 16384": (masks.noise_aware_causal(512, 32, 248, layout="streams"), (28, 4)),
    "dual stream 8192": (masks.dual_stream(4096, 32), (32, 8)),
}


def test_makespan() -> None:
    assert makespan([3, 1, 1, 1], 2) == (3, 3)
    assert makespan([1, 1, 1, 3], 2) == (4, 3)
    assert makespan([5], 4) == (5, 1.25)


def test_a_step_waits_for_what_it_has_to() -> None:
    loop = {"slots": 500, "mufu": 100, "tensor": 1000, "drains": 1, "wait": 2, "loaded": 8192, "spills": 0}
    assert step_cycles(H200, loop, 8) == 2000 + 1000 + 200
    assert step_cycles(H200, loop | {"drains": 0}, 8) == pytest.approx(8192 * 8 / 28)
    assert step_cycles(H200, loop | {"wait": 0}, 8) == 3200 + H200.exposed
    assert step_cycles(H200, loop | {"loaded": 16384}, 8) == pytest.approx(16384 * 8 / 28)


def test_rows_are_checked_in_linear_time() -> None:
    """With a block a row, each of which looks at all rows, twice the rows took four times as long."""
    work = model.Shared(16384, 0, 2 * 192, 256, 3, 16384, 2)
    seconds = model.shared(H200, work) - H200.launch
    assert model.shared(H200, work._replace(rows=32768, looks=32768)) - H200.launch < 2 * seconds < 100e-6
    by_row = work._replace(blocks=2 * work.rows)
    assert model.shared(H200, by_row) > 1.5e-3
    assert model.choice(H200, 32768, 512) < 2 * model.choice(H200, 16384, 512)


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    from bench.predict.loop_figures import measure

    return measure()


@requires_triton
@compiled
@pytest.mark.parametrize("name", PLANS)
def test_programs_end_together(name: str, figures: dict[str, Any]) -> None:
    mask, heads = PLANS[name]
    kernels = Attention(H200, figures, mask.plan(128, 128), heads)
    for _, balance in (kernels.by_queries("forward"), kernels.by_queries("dq"), kernels.by_keys()):
        assert balance <= 1.05


@requires_triton
@compiled
def test_predictions(figures: dict[str, Any]) -> None:
    found = {row.work: row for row in model.rows(H200, figures, slots=650, cuts=[110, 250, 120])}
    assert all(row.floor < row.predicted for row in found.values())
    assert found["block-sparse forward, noise-aware 4608"].predicted <= 1.1 * 195e-6
    (_, flex, _), (_, flash, _) = model.controls(H200, figures)
    assert 408 / 1.15 <= flex <= 496 * 1.15 and 560 / 1.15 <= flash <= 740 * 1.15


@requires_triton
@compiled
@pytest.mark.slow
@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")
def test_the_page_has_these_predictions(figures: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "gpu_proof.md").read_text()
    table = page.partition("<!-- predict -->\n")[2].partition("\n<!-- /predict -->")[0]
    assert table == model.markdown(H200, figures, model.region_slots(), model.cut_slots())


def test_without_cuobjdump(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "find_cuobjdump", lambda: None)
    assert command.main(["--device", "h200"]) == 2
    assert "cuobjdump was not found" in capsys.readouterr().err
