"""The page "Paper by paper": every name, test and table in it exists, and nothing is left out of it."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bench.papers import by_paper, tables
from bench.papers.said.row import Row
from pdkernels.decoding import available, default_option

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/papers/by_paper.md"
ROWS = [(paper, row) for paper, rows in by_paper.ROWS.items() for row in rows]
PAPERS = [paper for paper in tables.PAPERS if paper != "released"]
ON_THE_PAGE = ["nemotron", "jacobi", "recurrent", "slowfast", "planned-diffusion", "missing"]
# Methods of other papers, which these five do not describe.
OTHERS = {"dflash", "draft_model", "dream", "eagle", "fast_dllm", "fast_dllm_v2", "mtp", "suffix"}


NAMES = [f"{paper} {row.place}" for paper, row in ROWS]


def resolve(name: str) -> Any:
    """What a dotted name means: its longest part that is a module, and attributes of it."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: ModuleType | Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize("row", [row for _, row in ROWS], ids=NAMES)
def test_what_is_here_is_here(row: Row) -> None:
    assert row.place and row.what and row.here and row.tests, "a row names code and a test"
    for name in row.here:
        if name.startswith("method "):
            assert name.removeprefix("method ") in available()
        elif "/" in name:
            assert (ROOT / name).is_file()
        else:
            resolve(name)


@pytest.mark.parametrize("row", [row for _, row in ROWS], ids=NAMES)
def test_tests_exist(row: Row) -> None:
    for name in row.tests:
        path, _, test = name.partition("::")
        assert (ROOT / path).is_file(), path
        if test:
            assert re.search(rf"^def {test}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), name


@pytest.mark.parametrize("paper", PAPERS)
def test_every_table_and_method_has_a_row(paper: str) -> None:
    registered = {figure.name for figure in tables.find(paper)}
    assert {name for row in by_paper.ROWS[paper] for name in row.figures} == registered


def test_every_method_of_the_papers_has_a_row() -> None:
    methods = {name.removeprefix("method ") for _, row in ROWS for name in row.here if name.startswith("method ")}
    assert methods == set(available()) - OTHERS


def test_what_is_missing_says_why() -> None:
    assert sorted(ON_THE_PAGE) == sorted([*PAPERS, "missing"])
    assert list(by_paper.MISSING) == list(by_paper.ROWS)
    for one in [one for found in by_paper.MISSING.values() for one in found]:
        assert one.place and one.what and one.why, one
        for script in re.findall(r"\S+\.py", one.command):
            assert (ROOT / script).is_file(), script
        for module in re.findall(r"-m (\S+)", one.command):
            resolve(module)
        for method, option in re.findall(r"--sweep (\w+)\.(\w+)=", one.command):
            default_option(method, option)


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert by_paper.fill(text) == text, "run: python -m bench.papers --pages docs/papers"
    assert re.findall(r"<!-- papers: (\S+) -->", text) == ON_THE_PAGE
