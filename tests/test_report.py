"""What benchmarks become, on results made up here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import report
from bench.bench_log_step import CANDIDATES
from bench.bench_speculative_attention import APPENDING


def result(op: str, candidate: str, median: float, ratio: float, **sizes: object) -> dict:
    extra = {
        "op": op,
        "candidate": candidate,
        "median_us": median,
        "ratio_to_baseline": ratio,
        "device": "Made Up",
        "threads": 2,
        "torch": "2.13.0",
        "pdkernels": "0",
        **sizes,
    }
    return {"group": op, "extra_info": extra, "stats": {"iqr": 4e-7, "max": 1e-3}}


def cells(text: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("| ").split(" | ")] for line in text.splitlines() if line.startswith("| ")
    ]


@pytest.fixture
def rows(tmp_path: Path) -> list[report.Row]:
    first, second = APPENDING
    append, step = "speculative_attention_append_", "log_step_"
    ours, theirs = CANDIDATES
    benchmarks = [
        result(append, first, 100.4, 0.5, rows=8, dtype="bf16"),
        result(append, second, 210.0, 1.0, rows=8, dtype="bf16"),
        result(append, first, 40.0, 0.8, rows=1, dtype="bf16"),
        result(step, ours, 2.0, 0.25, batch=8, columns=68),
        result(step, theirs, 8.1, 1.0, batch=8, columns=68),
        result(step, ours, 1.5, 0.1, batch=1, columns=2),
        result(step, theirs, 15.0, 1.0, batch=1, columns=2),
    ]
    (tmp_path / "some.json").write_text(json.dumps({"benchmarks": benchmarks}))
    return report.load(tmp_path)


def test_rows_stored_by_attention(rows: list[report.Row]) -> None:
    text = report.TABLES["speculative_attention_append_"](rows)
    header, _, *lines = cells(text)
    assert header[1:] == ["1 rows stored", "8 rows stored"]
    assert lines == [
        ["**pdkernels**", "40.0 (1.00x)", "100 (1.00x)"],
        ["kv_append_, then speculative_attention", "-", "210 (2.00x)"],
    ]
    assert text.endswith("\n\nMade Up, 2 threads, torch 2.13.0, pdkernels 0")


def test_entries_of_a_step(rows: list[report.Row]) -> None:
    header, _, *lines = cells(report.TABLES["log_step_"](rows))
    assert header[1:] == ["batch 1, 2 columns", "batch 8, 68 columns"]
    assert lines == [["**pdkernels**", "1.5 (1.00x)", "2.0 (1.00x)"], ["torch ops", "15.0 (10x)", "8.1 (4.00x)"]]


@pytest.mark.parametrize("name", ["speculative_attention_append_", "log_step_"])
def test_a_page_shows_them_where_they_were_measured(name: str, rows: list[report.Row], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"Above.\n\n<!-- bench:{name} -->\n\n<!-- /bench -->\n")
    report.renew(page, [])
    assert page.read_text() == f"Above.\n\n<!-- bench:{name} -->\n\n<!-- /bench -->\n"
    report.renew(page, rows)
    assert report.TABLES[name](rows) in page.read_text()
