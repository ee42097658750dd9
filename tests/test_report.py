"""Tables and plots of benchmarks, on made-up results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import cache_dtypes, grammars_report, long_texts, maskbench, plots, records, report
from bench.bench_log_step import CANDIDATES
from bench.bench_speculative_attention import APPENDING
from pdkernels.decoding.methods import METHODS

ROOT = Path(__file__).resolve().parent.parent


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


def test_long_texts_are_measured_at_any_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory grows by two rows of 16 numbers in fp32 for each layer with attention; a state and its convolution do not grow."""
    sizes = {"vocab_size": 16, "hidden_size": 16, "heads": 1, "kv_heads": 1, "head_dim": 16, "intermediate_size": 16}
    states = {"key_heads": 1, "value_heads": 1, "key_dim": 8, "value_dim": 8}
    monkeypatch.setattr(long_texts, "SIZES", {**sizes, "layers": long_texts.LAYERS})
    monkeypatch.setattr(long_texts, "STATES", states)
    monkeypatch.setattr(long_texts, "POSITIONS", (16, 48))
    found = long_texts.measured(rounds=2)
    memory = {(step["recurrent"], step["position"]): step["bytes"] for step in found["steps"]}
    for recurrent in long_texts.RECURRENT:
        attention = long_texts.LAYERS - recurrent
        assert memory[recurrent, 48] - memory[recurrent, 16] == 32 * attention * 2 * 16 * 4
        assert memory[recurrent, 16] - 16 * attention * 2 * 16 * 4 == recurrent * (8 * 8 + 3 * 24) * 4
    header, _, *lines = cells(long_texts.markdown(found))
    assert header[2:4] == ["at 16", "at 48"] and len(lines) == 2 * len(long_texts.RECURRENT)


def test_rows_of_a_table_of_cache_dtypes() -> None:
    """A row for each length and number of rows; the ratio is of the times."""
    sizes = {"bf16": {"ms": 20.0, "bytes": 64_000_000}, "int8": {"ms": 25.0, "bytes": 34_000_000}}
    forwards = [{"length": 2048, "rows": rows, "dtype": name, **own} for rows in (1, 8) for name, own in sizes.items()]
    found = {"rounds": 3, "processor": "a CPU", "model": "a model", "forwards": forwards}
    _, _, *lines = cells(cache_dtypes.markdown(found))
    assert lines[0] == ["2,048", "1", "20.0 ms", "25.0 ms", "1.25", "64.0 MB", "34.0 MB"] and len(lines) == 2


def test_peers_are_compared_case_by_case() -> None:
    """The fastest peer of each case counts; a copy is not a peer, and neither is a candidate made of our own ops."""
    times = {"pdkernels": (0.5, 1.0), "torch": (1.0, 3.0), "torch.compile": (2.0, 1.5)}
    left_out = {"a copy of as many bytes": (0.1, 0.1), "F.linear + pd.token_statistics": (0.2, 0.2)}
    made = [
        {**result("verify_draft", name, 1.0, ratio)["extra_info"], "group": f"case {case}, cpu"}
        for name, ratios in (times | left_out).items()
        for case, ratio in enumerate(ratios)
    ]
    _, _, line = cells(report.TABLES["peers"](made))
    assert line == ["`verify_draft`", "torch; torch.compile", "**1.8x**", "1.50x to 2.00x", "2", "(1)"]
    assert report.TABLES["peers"]([]) == "not measured"


def test_the_headline_shows_each_method_at_its_fastest(tmp_path: Path) -> None:
    rows = [row for row in report.load(report.RESULTS) if row["op"] == "evaluation" and row["task"] == "sums"]
    masked = [row for row in rows if report.family(row) == "masked"]
    best = plots.fastest(masked)
    baseline = next(row for row in masked if row["baseline"])
    assert {row["method"] for row in best} == {"fast_dllm", "slowfast"}  # `dllm_cache` is less accurate
    assert all(row["right"] >= baseline["right"] and row["speedup"] > 1 for row in best)
    plots.headline(rows, tmp_path / "headline.png")
    assert (tmp_path / "headline.png").stat().st_size > 10_000


def test_tables_of_grammars() -> None:
    rows = [
        {"model": "tiny-code", "method": "jacobi", "valid": 3, "invalid": 0, "refused": 1},
        {"model": "smollm2-135m-instruct", "method": "jacobi", "valid": 2, "invalid": 2, "refused": 0},
        {"model": "tiny-masked", "method": "llada", "valid": 4, "invalid": 0, "refused": 0},
    ]
    times = {"step_us": 500.0, "rest_ms": 10.0, "grammar_ms": 3.2, "automaton_ms": 41.0, "states": 1234}
    machine = {"device": "one", "torch": "2", "pdkernels": "0"}
    text = grammars_report.tables({"proof": rows, "cost": {"person": times}, "machine": machine})
    assert "| `jacobi` | 3 of 3, 1 refused | 2 of 4 |" in text and "| `llada` | 4 of 4 | - |" in text
    assert "| person | 500 | 10.0 | 5.0% | 3 | 41 | 1,234 |" in text
    mask = {
        "schema": "map",
        "engine": "one",
        "version": "1",
        "allowed": 1234.0,
        "row_us": 2.5,
        "longest_us": 9.0,
        "draft_us": 70.2,
        "ready_ms": 1e3,
    }
    text = grammars_report.tables({"masks": [mask], "masks_machine": machine})
    assert "| map | one 1 | 1,234 | 2.5 | 9.0 | 70 | 1,000 |" in text


def test_schemas_that_people_send() -> None:
    """In the committed figures we take no invalid text, and compile no fewer schemas than llguidance."""
    found = json.loads(maskbench.RESULTS.read_text())
    rows = {(row["set"], row["engine"]): row for row in found["rows"]}
    for (name, engine), row in rows.items():
        if engine.startswith("pdkernels"):
            assert row["invalid_taken"] == row["late"] == 0
            assert row["compiled"] >= rows[name, "llguidance"]["compiled"]
    row = {**rows["MaskBench", "pdkernels"], "late": 2, "p50_ms": 0.0}
    text = maskbench.report({"rows": [row], "versions": {"pdkernels": "0"}})
    assert f"{row['compiled']} of {row['schemas']}, 2 late" in text and "| below 4 |" in text


LATER = frozenset[str]()
"""Methods whose proof is still to be run: `python -m bench.grammars --part tiny --method NAME`."""


def test_grammars_are_cheap_and_always_followed() -> None:
    """In the committed figures, of all methods; slow ones were given fewer grammars."""
    found = json.loads(report.GRAMMARS.read_text())
    for row in found["proof"]:
        fewest = 16 if row["model"].startswith("smollm2") else 31
        assert row["invalid"] == 0 and row["valid"] + row["refused"] >= fewest, row
    assert {row["method"] for row in found["proof"] if row["model"].startswith("tiny-")} >= METHODS.keys() - LATER
    assert len(found["cost"]) > 0
    assert all(row["step_us"] / 1e3 < 0.1 * row["rest_ms"] for row in found["cost"].values())
    ours = [row for row in found["masks"] if row["engine"] == "pdkernels"]
    assert len(ours) > 3 and all(row["row_us"] <= row["longest_us"] < 50 for row in ours)


def test_committed_results_have_a_line_for_each_record() -> None:
    """`python -m bench.records FILE` renews one."""
    for path in sorted([*ROOT.glob("bench/results/**/*.json"), *ROOT.glob("docs/papers/results/*.json")]):
        if "local" not in path.parts:
            written = path.read_text()
            assert written == records.text(records.used(json.loads(written))), path
