"""The documentation site: it has every public name, and builds without a warning."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pdkernels as pd

ROOT = Path(__file__).resolve().parent.parent
API = "".join(page.read_text() for page in sorted((ROOT / "docs/api").glob("*.md")))
MODULES = re.findall(r"^\.\. automodule:: (\S+)$", API, re.MULTILINE)


def test_every_public_name_is_in_the_api() -> None:
    shown = {name for module in map(importlib.import_module, MODULES) for name in getattr(module, "__all__", ())}
    shown |= set(re.findall(r"^\.\. autofunction:: pdkernels\.(\w+)$", API, re.MULTILINE))
    packages = {"cache", "decoding", "masks", "models", "ops", "reference", "__version__"}
    assert set(pd.__all__) - packages - shown == {"has_native"}
    assert set(pd.ops.__all__) <= shown
    assert len(MODULES) == len(set(MODULES))


def test_every_page_is_in_the_contents() -> None:
    listed = set(re.findall(r"^([\w./*]+)$", (ROOT / "docs/index.md").read_text(), re.MULTILINE))
    pages = {str(page.relative_to(ROOT / "docs").with_suffix("")) for page in (ROOT / "docs").rglob("*.md")}
    for folder in [name[:-1] for name in listed if name.endswith("/*")]:
        pages = {page for page in pages if not page.startswith(folder)}
    assert pages - listed == {"index"}, "docs/index.md lists all pages"


@pytest.mark.parametrize("builder", ["dummy", pytest.param("html", marks=pytest.mark.slow)])
def test_it_builds_without_a_warning(builder: str, tmp_path: Path) -> None:
    for name in ("sphinx", "furo", "myst_parser"):
        pytest.importorskip(name, reason=f"{name} builds the site: pip install sphinx furo myst-parser")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", builder, "-c", "docs/site"]
    command += ["-d", str(tmp_path / "trees"), ".", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ)
    assert built.returncode == 0, built.stderr
    if builder == "html":
        assert "block_sparse_attention" in (tmp_path / "site/docs/api/ops.html").read_text()
        assert (tmp_path / "site/index.html").is_file()
