"""The model of `python -m bench.predict`, and what it must say of today's kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.predict import __main__ as command
from bench.predict import model, statistics_figures, tables
from bench.predict.device import DEVICES, limits
from bench.predict.gluon import snake
from bench.predict.model import Attention, makespan, step_cycles
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


def test_turns_of_alternating_direction() -> None:
    assert snake([5, 4, 3, 2, 1], 2) == 8  # 5 + 2 + 1, 4 + 3
    assert snake([1], 3) == 1


def test_the_limits_are_those_that_were_measured() -> None:
    """The clock is that at which all tensor cores multiply at the rate of the record."""
    measured = limits()
    assert H200.clock * H200.sms * 4096 == pytest.approx(measured["bf16_tflops"] * 1e12)
    assert H200.memory == pytest.approx(measured["read_gb_per_s"] * 1e9)
    assert H200.launch == pytest.approx(measured["shortest_launch_us"] * 1e-6)
    assert 1.2e9 < H200.clock < 1.98e9  # the highest clock of the data sheet


def test_a_step_waits_for_what_it_has_to() -> None:
    device = H200._replace(l2=28.0, drain=200)
    loop = {"slots": 500, "mufu": 100, "tensor": 1000, "drains": 1, "wait": 2, "loaded": 8192, "spills": 0}
    assert step_cycles(device, loop, 8) == 2000 + 1000 + 200
    assert step_cycles(device, loop | {"drains": 0}, 8) == pytest.approx(8192 * 8 / 28)
    assert step_cycles(device, loop | {"wait": 0}, 8) == 3200 + device.exposed
    assert step_cycles(device, loop | {"loaded": 16384}, 8) == pytest.approx(16384 * 8 / 28)


def test_rows_are_checked_in_linear_time() -> None:
    """With a block a row, each of which looks at all rows, twice the rows took four times as long."""
    work = model.Shared(16384, 0, 2 * 192, 256, 3, 16384, 2)
    seconds = model.shared(H200, work) - H200.launch
    assert model.shared(H200, work._replace(rows=32768, looks=32768)) - H200.launch < 2 * seconds < 100e-6
    by_row = work._replace(blocks=2 * work.rows)
    assert model.shared(H200, by_row) > 1.5e-3
    assert model.choice(H200, 32768, 512) < 2 * model.choice(H200, 16384, 512)


def test_dependent_accesses_and_lone_warps_take_their_time() -> None:
    work = model.Statistics(region=650, row=1000, waits=5)
    seconds = model.statistics(H200, work, 1, 126464)
    assert model.statistics(H200, work._replace(waits=15), 1, 126464) - seconds == pytest.approx(10 * H200.latency)
    slower = model.statistics(H200, work._replace(row=2000), 1, 126464) - seconds
    assert slower == pytest.approx(1000 * H200.alone / H200.clock)
    assert model.statistics(H200, work, 256, 126464) - seconds > 255 * 126464 * 2 / H200.memory


def test_clusters_compute_while_they_read() -> None:
    work = model.RowStatistics(region=600, row=1000)
    assert [model.row_blocks(H200, rows, 62) for rows in (1, 33, 34, 66, 67, 132, 133)] == [8, 8, 4, 4, 2, 2, 1]
    assert model.row_blocks(H200, 1, 5) == 4
    few, many = (model.row_statistics(H200, work, rows, 126464) for rows in (1, 256))
    read = 256 * 126464 * 2 / H200.memory
    assert read + H200.launch < many < read + H200.launch + 6e-6  # the sums take less
    assert model.row_statistics(H200, work._replace(region=1200), 256, 126464) > many + 0.5 * read
    assert few < model.statistics(H200, model.Statistics(600, 1000, 2), 1, 126464)
    assert model.cut(H200, [600, 100], 256, 126464) > 2 * read > model.cut(H200, [600, 100], 1, 126464)


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
    code = {"region": 600, "row": 1200, "cut": [600, 110]}
    rows = tables.rows(H200, figures | {"statistics": code})
    assert all(row.floor < row.predicted for row in rows) and len({row.work for row in rows}) == len(rows)
    (_, flex, _), (_, flash, _) = tables.controls(H200, figures)
    assert 408 / 1.15 <= flex <= 496 * 1.15 and 560 / 1.15 <= flash <= 740 * 1.15


@requires_triton
@compiled
@pytest.mark.slow
@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")
def test_the_page_has_these_predictions(figures: dict[str, Any]) -> None:
    figures = {**figures, "statistics": statistics_figures.measure()}
    page = (ROOT / "docs" / "gpu_proof.md").read_text()
    table = page.partition("<!-- predict -->\n")[2].partition("\n<!-- /predict -->")[0]
    assert table == tables.markdown(H200, figures)


def test_tables_are_written_where_the_page_has_a_place(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- x -->\nold\nlines\n<!-- /x -->\nb\n")
    tables.write({"x": r"new \1"}, page)
    assert page.read_text() == "a\n<!-- x -->\nnew \\1\n<!-- /x -->\nb\n"
    with pytest.raises(ValueError, match="'y'"):
        tables.write({"y": ""}, page)


def test_without_cuobjdump(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "find_cuobjdump", lambda: None)
    assert command.main(["--device", "h200"]) == 2
    assert "cuobjdump was not found" in capsys.readouterr().err


def test_only_the_tables_of_the_h200_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["--device", "h100", "--write"])
    assert "the H200's tables" in capsys.readouterr().err
