"""What the rehearsal of a release notices, and the page of the package index."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import release_check
from tests.test_packaging import ROOT, load

NUMBER = re.sub(r"\.dev\d+$", "", release_check.version())
FILES = ("pdkernels/_version.py", "scripts/conda/recipe.yaml", "CHANGELOG.md", "README.md", "docs/index.md")


@pytest.fixture
def released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copies of the files of a release, as they are to be when it is tagged."""
    for name in FILES:
        text = (ROOT / name).read_text().replace(release_check.version(), NUMBER)
        text = re.sub(rf"## {re.escape(NUMBER)} \(.*\)", f"## {NUMBER} (2026-12-01)", text)
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text.replace("pip install .", "pip install pdkernels"))
    monkeypatch.setattr(release_check, "ROOT", tmp_path)
    monkeypatch.setattr(release_check, "run", lambda *command, cwd: "")
    return tmp_path


def test_a_release_that_is_ready_has_nothing_to_do(released: Path) -> None:
    assert list(release_check.to_do(NUMBER)) == []


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        (FILES[0], lambda text: text.replace(NUMBER, "9.9"), f"{FILES[0]} has the version 9.9, not {NUMBER}."),
        (FILES[1], lambda text: text.replace(NUMBER, "9.9"), f"{FILES[1]} has the version 9.9, not {NUMBER}."),
        (FILES[2], lambda text: text.replace("2026-12-01", "unreleased"), "CHANGELOG.md has no heading"),
        (FILES[2], lambda text: text.replace("(2026-12-01)\n", "(2026-12-01)\n" + "- More.\n" * 45), "a screen is 45"),
        (FILES[3], lambda text: text.replace("pip install pdkernels", ""), "README.md does not say: pip install pdkernels"),
    ],
)  # fmt: skip
def test_what_is_to_do_is_said(released: Path, name: str, change: Callable[[str], str], sentence: str) -> None:
    (released / name).write_text(change((released / name).read_text()))
    (told,) = release_check.to_do(NUMBER)
    assert sentence in told


def test_uncommitted_changes_are_named(released: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release_check, "run", lambda *command, cwd: " M setup.py\n?? notes.txt\n")
    assert list(release_check.to_do(NUMBER)) == ["2 files differ from the last commit: setup.py, notes.txt."]


def test_notes_are_those_of_one_version() -> None:
    heading, text = release_check.section((ROOT / "CHANGELOG.md").read_text(), NUMBER)
    assert heading.startswith(f"{NUMBER} (") and "## " not in text
    assert 5 < len(text.splitlines()) <= release_check.SCREEN
    assert release_check.section("# Changelog\n", NUMBER) == ("", "")


WHOLE = (
    "pdkernels-1.2.0.tar.gz",
    "pdkernels-1.2.0-py3-none-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl",
    "pdkernels-1.2.0-py3-none-manylinux_2_28_aarch64.whl",
    "pdkernels_smollm2-0.1.0-py3-none-any.whl",
)


def test_a_release_is_whole_or_says_what_is_missing(tmp_path: Path) -> None:
    for name in WHOLE:
        (tmp_path / name).write_bytes(b"")
    assert list(release_check.incomplete(tmp_path, "1.2.0")) == []
    assert len(list(release_check.incomplete(tmp_path, "1.2"))) == 3 + 3  # missing, and of another version
    for name in WHOLE:
        (tmp_path / name).unlink()
        (told,) = release_check.incomplete(tmp_path, "1.2.0")
        assert "is missing" in told
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "pdkernels-1.2.0-cp313-cp313-linux_x86_64.whl").write_bytes(b"")
    (told,) = release_check.incomplete(tmp_path, "1.2.0")
    assert "linux_x86_64.whl is no part of the release 1.2.0" in told
    with (tmp_path / WHOLE[2]).open("r+b") as file:
        file.truncate(release_check.LARGEST_WHEEL)
    assert any("25.0 MB, and at most 25 are wanted" in told for told in release_check.incomplete(tmp_path, "1.2.0"))


def test_the_index_shows_whole_links() -> None:
    """A package index knows no files of the repository: pictures and pages are links to it."""
    setup_py = load("setup.py")
    page, readme = setup_py.description(), (ROOT / "README.md").read_text()
    before, after = (re.findall(r"\]\(([^)]+)\)", text) for text in (readme, page))
    assert len(before) == len(after) > 20
    for name, link in zip(before, after):
        if name.startswith(("http", "#")):
            assert link == name
            continue
        root, ref, target = re.fullmatch(r"(.*)/(?:blob|raw)/([^/]+)/(.*)", link).groups()
        assert root == setup_py.REPOSITORY and target == name and (ROOT / name.partition("#")[0]).exists()
        assert ref == ("main" if "dev" in setup_py.VERSION else f"v{setup_py.VERSION}")
    (picture,) = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page)
    assert "/raw/" in picture
    assert re.findall(r"^```.*?^```", page, re.M | re.S) == re.findall(r"^```.*?^```", readme, re.M | re.S)


def test_the_rehearsal_runs_what_the_makefile_demonstrates() -> None:
    (line,) = re.findall(r"^demo:.*\n.*-m pdkernels (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert line.replace('"', "") == " ".join(release_check.DEMO)


def test_the_steps_name_what_is_there() -> None:
    page = (ROOT / "RELEASING.md").read_text()
    workflow = (ROOT / ".github/workflows/release.yml").read_text()
    assert "environment: pypi" in workflow and "environment `pypi`" in page
    for command in re.findall(r"release_check\.py ([^\n|]*)", page + workflow):
        options = set(re.findall(r"--[a-z]+", command))
        assert options <= {"--facts", "--tag", "--dist", "--notes"}, command
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"docs", "release-check"} <= set(targets) and "make docs release-check" in page
