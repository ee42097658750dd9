"""Tables of the papers: which there are, that each can be run, and that the pages are made from committed files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from bench.papers import runs, tables, trainings
from bench.papers.__main__ import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(page for page in (ROOT / "docs/papers").glob("*.md") if page.stem != "by_paper")  # test_by_paper.py


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"NO_COLOR": "1", "COLUMNS": "120"})


def test_every_paper_has_a_page_with_all_its_tables() -> None:
    assert {page.stem for page in PAGES} == set(tables.PAPERS)
    for page in PAGES:
        shown = re.findall(r"<!-- figure: (\S+) (\S+) -->", page.read_text())
        assert sorted(shown) == sorted((figure.paper, figure.name) for figure in tables.find(page.stem))


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_pages_are_the_committed_files(page: Path) -> None:
    text = page.read_text()
    assert tables.page(text, page.parent / "results") == text, "run: python -m bench.papers --pages docs/papers"


def test_every_file_is_of_a_table() -> None:
    names = {f"{figure.paper}_{figure.name}" for figure in tables.FIGURES}
    for path in (ROOT / "docs/papers/results").glob("*.json"):
        assert path.stem in names and json.loads(path.read_text())["rows"]


def test_names_are_unique_and_commands_name_them() -> None:
    assert len({(figure.paper, figure.name) for figure in tables.FIGURES}) == len(tables.FIGURES)
    for figure in tables.FIGURES:
        assert figure.command.split()[-2:] == [figure.paper, figure.name]
        assert tables.find(figure.paper, figure.name) == [figure]


def test_the_command_lists_what_there_is() -> None:
    result = run()
    assert result.exit_code == 0
    assert all(figure.name in result.output and figure.paper in result.output for figure in tables.FIGURES)


def test_exact_tables_are_the_committed_ones(tmp_path: Path) -> None:
    """Counts need no measurement: a new run gives the file."""
    for name in ("prefill", "decoding"):
        result = run("recurrent", name, "--output", str(tmp_path))
        assert result.exit_code == 0, result.output
        committed = ROOT / f"docs/papers/results/recurrent_{name}.json"
        assert (tmp_path / committed.name).read_text() == committed.read_text()
        assert tables.as_table(json.loads(committed.read_text())).splitlines()[0] in result.output


def test_a_table_that_is_there_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "recurrent_prefill.json").write_text("kept")
    result = run("recurrent", "prefill", "--output", str(tmp_path), "--resume")
    assert result.exit_code == 0 and "is there" in result.output
    assert (tmp_path / "recurrent_prefill.json").read_text() == "kept"


def test_limits_of_one_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    make_task = runs.make_task
    monkeypatch.setattr(runs, "make_task", lambda *given, **more: make_task(*given, **more)._replace(limit=20))
    result = tables.find("nemotron", "limits")[0].run(1, lambda what, share: None)
    assert len(result["rows"]) == 18 and result["problems"] == 1
    rows = {(row["block size"], row[""]): row for row in result["rows"]}
    for size in (4, 8, 16):
        assert rows[size, "oracle, first_all"]["exact blocks"] == "100.0%"
        assert 1 <= rows[size, "oracle, first_all"]["masks per forward"] <= size - 1
        assert rows[size, "threshold 0.9"]["tokens per forward"] > 0
    assert "| 16 | linear self-speculation | - |" in tables.as_table(result)


def test_forcings_train_a_copy_for_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    make_task, seen = trainings.make_task, []
    monkeypatch.setattr(trainings, "make_task", lambda *given, **more: make_task(*given, **more)._replace(limit=16))
    for name, value in {"FORCED_SUMS": 2, "FORCED_STEPS": 2, "TRAJECTORIES_PER_STEP": 2, "SUMS_PER_STEP": 1}.items():
        monkeypatch.setattr(trainings, name, value)
    force = trainings._force

    def watched(model: Any, *rest: Any) -> None:
        before = model.embedding.clone()
        force(model, *rest)
        assert not torch.equal(before, model.embedding) and not model.embedding.requires_grad
        seen.append((before, rest[1:]))

    monkeypatch.setattr(trainings, "_force", watched)
    result = tables.find("jacobi", "forcings")[0].run(1, lambda what, share: None)
    assert [row["noise, and what noisy blocks see"] for row in result["rows"]] == ["not trained", *trainings.FORCINGS]
    assert [rest for _, rest in seen] == list(trainings.FORCINGS.values())
    assert all(torch.equal(before, seen[0][0]) for before, _ in seen)
    assert all(row["tokens per forward"] >= 0.9 for row in result["rows"])


def test_pages_report_what_is_not_measured(tmp_path: Path) -> None:
    text = "a\n<!-- figure: jacobi knee -->\nold\n<!-- /figure -->\nb\n"
    made = tables.page(text, tmp_path)
    assert "Not measured yet." in made and "`python -m bench.papers jacobi knee`" in made and "old" not in made
    result = {"model": "m", "problems": 4, "rows": [{"": "x", "right": 2, "none": None, "f": 2e6}]}
    (tmp_path / "jacobi_knee.json").write_text(json.dumps(result))
    made = tables.page(made, tmp_path)
    assert "model m, problems 4:" in made and "| x | 50% (15%-85%) | - | 2e+06 |" in made
    assert tables.page(made, tmp_path) == made and made.startswith("a\n") and made.endswith("<!-- /figure -->\nb\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["planed"],
            "paper must be one of jacobi, recurrent, nemotron, slowfast, planned-diffusion, released, got 'planed'",
        ),
        (["recurrent", "knee"], "figure must be one of prefill, decoding, static, cache, grid, threshold"),
        (["recurrent", "--resume"], "--resume must be with --output"),
    ],
)
def test_errors_are_one_sentence(arguments: list[str], said: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and said in " ".join(result.stderr.split()), result.output


def test_tables_of_released_code_are_kept_and_not_measured(tmp_path: Path) -> None:
    for figure in tables.find("released"):
        result = run("released", figure.name, "--output", str(tmp_path))
        sentence = f"{figure.name} must be measured by code of this checkout, got a table of released code"
        assert result.exit_code == 2 and sentence in result.output and not list(tmp_path.iterdir())
        assert figure.command not in (ROOT / "docs/papers/released.md").read_text()
