"""What is kept counts only for the sources that it was measured with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness import kept_figures
from tests.harness.kept_figures import VARIABLE, digest_code, kept, with_headers, with_imports


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kept_figures, "TABLE", tmp_path / "compiled.json")
    monkeypatch.delenv(VARIABLE, raising=False)
    return tmp_path / "compiled.json"


def test_measured_again_once_the_key_is_another(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept("kernel", "a", lambda: {"registers": 40}) == {"registers": 40}
    assert not table.exists()  # only where it is asked for
    monkeypatch.setenv(VARIABLE, "keep")
    kept("kernel", "a", lambda: {"registers": 40})
    monkeypatch.delenv(VARIABLE)
    assert kept("kernel", "a", lambda: {"registers": 48}) == {"registers": 40}
    assert kept("kernel", "b", lambda: {"registers": 48}) == {"registers": 48}
    assert kept("another", "a", lambda: {"registers": 56}) == {"registers": 56}
    monkeypatch.setenv(VARIABLE, "ignore")
    assert kept("kernel", "a", lambda: {"registers": 48}) == {"registers": 48}
    assert json.loads(table.read_text()) == {"kernel": {"key": "a", "figures": {"registers": 40}}}


def test_a_line_each_in_order(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "keep")
    for name, key in (("two", "a"), ("one", "a"), ("two", "b")):
        kept(name, key, lambda: [1, 2])
    assert table.read_text().splitlines() == [
        "{",
        '"one": {"key": "a", "figures": [1, 2]},',
        '"two": {"key": "b", "figures": [1, 2]}',
        "}",
    ]


def test_imports_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_figures, "ROOT", tmp_path)
    (tmp_path / "pdkernels").mkdir()
    files = {name: tmp_path / f"pdkernels/{name}.py" for name in ("one", "two", "three", "four", "__init__")}
    texts = ["from pdkernels import two, missing", "def f():\n    from pdkernels.three import x", "import os", "", ""]
    for file, text in zip(files.values(), texts):
        file.write_text(text)
    assert with_imports([files["one"]]) == {files["one"], files["two"], files["three"]}


def test_python_counts_by_what_it_does(tmp_path: Path) -> None:
    file = tmp_path / "kernel.py"

    def digest(text: str) -> str:
        file.write_text(text)
        return digest_code([file])

    before = digest('"""A module."""\ndef f(x):\n    """Adds 1."""\n    return x + 1\n')
    assert digest("def f(x):  # a comment\n\n    return (x\n            + 1)\n") == before
    assert digest("def f(x):\n    return x + 2\n") != before
    assert digest('def f(x):\n    """Nothing."""\n') != before


def test_headers_are_followed(tmp_path: Path) -> None:
    folders = tmp_path / "a", tmp_path / "b"
    for folder in folders:
        folder.mkdir()
    source, one, two = folders[0] / "kernel.cu", folders[0] / "one.h", folders[1] / "two.h"
    source.write_text('#include <vector>\n#include "one.h"\n')
    one.write_text('# include "two.h"\n')
    two.write_text('#include "one.h"\n')
    assert with_headers(source, folders) == sorted([source, one, two])
    two.write_text('#include "missing.h"\n')
    with pytest.raises(FileNotFoundError, match="two.h includes 'missing.h'"):
        with_headers(source, folders)
