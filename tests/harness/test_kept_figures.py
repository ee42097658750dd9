"""What is kept counts only for the sources that it was measured with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import kept_figures
from tests.harness.kept_figures import VARIABLE, digest_code, kept, with_headers


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kept_figures, "FOLDER", tmp_path / "compiled")
    monkeypatch.delenv(VARIABLE, raising=False)
    return tmp_path / "compiled"


def test_measured_again_once_the_key_is_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept("kernel", "a", lambda: {"registers": 40}) == {"registers": 40}
    assert not folder.exists()  # only where it is asked for
    monkeypatch.setenv(VARIABLE, "keep")
    kept("kernel", "a", lambda: {"registers": 40})
    monkeypatch.delenv(VARIABLE)
    assert kept("kernel", "a", lambda: {"registers": 48}) == {"registers": 40}
    assert kept("kernel", "b", lambda: {"registers": 48}) == {"registers": 48}
    assert kept("another", "a", lambda: {"registers": 56}) == {"registers": 56}
    monkeypatch.setenv(VARIABLE, "ignore")
    assert kept("kernel", "a", lambda: {"registers": 48}) == {"registers": 48}
    assert [file.name for file in folder.iterdir()] == ["kernel.json"]


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
