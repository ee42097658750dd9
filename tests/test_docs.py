"""The code in README.md and docs/ runs, and their tables are those of the committed results."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

import pdkernels as pd
from bench import bench_grouped_linear, report
from pdkernels import cli, decoding
from scripts import methods

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OPTIONAL = {"transformers"}
IDS = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_python_blocks_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each page's blocks run in order, in one namespace, as a reader would type them."""
    if page.name == "adding_an_op.md":  # excerpts, not programs
        pytest.skip("has excerpts of files")
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    namespace: dict[str, object] = {}
    for block in blocks:
        try:
            if page.name == "transformers.md":  # in the words of its newest version
                from tests.support.transformers_names import CACHE

                block = block.replace(" cache=", f" {CACHE}=")
            exec(compile(block, str(page), "exec"), namespace)
        except ModuleNotFoundError as error:
            if error.name not in OPTIONAL:
                raise
            pytest.skip(f"{error.name} is not installed")


def test_products_of_experts_are_those_that_were_measured() -> None:
    found = json.loads(bench_grouped_linear.RESULT.read_text())
    assert bench_grouped_linear.markdown(found) in (ROOT / "docs/ops/grouped_linear.md").read_text()


def test_excerpts_are_in_their_files() -> None:
    """Each block of the walk-through starts with a comment that names the file it is from."""
    page = (ROOT / "docs/adding_an_op.md").read_text()
    excerpts = re.findall(r"^```(?:python|cpp)\n(?:#|//) (\S+)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(excerpts) == page.count("```python") + page.count("```cpp") == 7
    for file, text in excerpts:
        assert text in (ROOT / file).read_text(), file


COMMANDS = re.findall(r"^python -m pdkernels (generate .*)$", (ROOT / "docs/command_line.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run_and_their_sums_are_right(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, shlex.split(command, comments=True))
    assert result.exit_code == 0, result.output
    for first, second in re.findall(r'"(\d+) \+ (\d+) = \?"', command):
        assert f"answer {int(first) + int(second)}" in result.stdout, result.stdout


def test_the_readme_counts_the_methods() -> None:
    assert f"and {len(decoding.available())} decoding methods" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_have_targets(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} points to {target}"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_tables_are_the_committed_results(page: Path, tmp_path: Path) -> None:
    copy = tmp_path / page.name
    copy.write_text(page.read_text())
    report.renew(copy, report.load(report.RESULTS))
    assert copy.read_text() == page.read_text(), "run: python -m bench.report --write"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_no_table_is_empty(page: Path) -> None:
    assert not re.search(r"^\|[ :|-]+\|\n(?!\|)", page.read_text(), re.MULTILINE), "a head without rows"
    assert not re.search(r"<!-- bench:[^>]+ -->\s*<!-- /bench -->", page.read_text()), "nothing between the marks"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_rows_follow_a_head(page: Path) -> None:
    tables = re.findall(r"(?:^\|.*\n)+", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    assert all(re.match(r"\|.*\n\|[ :|-]+\|\n", table) for table in tables), "a blank line inside a table ends it"
    for table in tables:
        cells = [len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()]
        assert len({*cells}) == 1, f"a bar in a cell is written \\|: {table.splitlines()[cells.index(max(cells))]}"


def test_families_of_checkpoints_are_named_wherever_they_are_listed() -> None:
    """The first name of each row of the table, without the size or the minor version of a model."""
    page = (ROOT / "docs" / "checkpoints.md").read_text().partition("```")[0]
    table = re.findall(r"^\| `\w+`.*? \| ([^|,(]+)", page, re.MULTILINE)
    families = {re.split(r"[ -]\d|\.0| \(| $", name)[0].strip() for name in table}
    assert {"Qwen2", "MiMo", "LLaDA2", "Huginn"} < families
    pages = {"docs/index.md": (ROOT / "docs" / "index.md").read_text(), "load": pd.models.load.__doc__ or ""}
    pages = {place: " ".join(text.split()) for place, text in pages.items()}
    assert {place: sorted(name for name in families if name not in text) for place, text in pages.items()} == {
        place: [] for place in pages
    }


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_tables_of_methods_match_the_decoders(page: Path) -> None:
    assert methods.page(page.read_text()) == page.read_text(), "run: python -m scripts.methods"
