"""Figures of compiled kernels, a table of the checkout: tests compile what has changed and check the rest against these.

    make compiled      brings them up to date
    make test-all      does not look at them

A line has what one call measured, and a hash of all that it was compiled from.
"""

from __future__ import annotations

import ast
import fcntl
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.cudasim.build import ROOT, digest_text

TABLE = ROOT / "tests" / "compiled.json"
PACKAGE = ROOT / "pdkernels"
VARIABLE = "PDKERNELS_COMPILED"  # "keep": write what is measured; "ignore": measure everything


def kept(name: str, key: str, measure: Callable[[], Any]) -> Any:
    """The figures under a name if they have this key, else those that `measure` finds: what JSON can hold."""
    mode = os.environ.get(VARIABLE)
    entry = {} if mode == "ignore" else _read().get(name, {})
    if entry.get("key") == key:
        return entry["figures"]
    figures = measure()
    if mode == "keep":
        _write(name, {"key": key, "figures": figures})
    return figures


def _read() -> dict[str, Any]:
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


def _write(name: str, entry: dict[str, Any]) -> None:
    """Adds a line to the table, or replaces it; workers of one run take turns."""
    with TABLE.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lines = [f"{json.dumps(each)}: {json.dumps(line)}" for each, line in sorted({**_read(), name: entry}.items())]
        partial = TABLE.with_suffix(".partial")
        partial.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        partial.replace(TABLE)


def digest_code(files: Iterable[Path]) -> str:
    """A hash of Python files by what they say to Python: comments, docstrings and the shape of the text do not count."""
    return digest_text(*(part for file in sorted(files) for part in (file.name, _code(file))))


def _code(file: Path) -> str:
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def with_headers(source: Path, folders: Sequence[Path]) -> list[Path]:
    """A C++ file and all headers of ours that it includes, directly or not. Those in quotes are ours."""
    found, left = {source}, [source]
    while left:
        file = left.pop()
        for name in re.findall(r'^\s*#\s*include\s*"(.+?)"', file.read_text(), re.MULTILINE):
            header = next((path for folder in (file.parent, *folders) if (path := folder / name).is_file()), None)
            if header is None:
                raise FileNotFoundError(
                    f"tests.harness.kept_figures: {file} includes {name!r}, which is in none of {folders}"
                )
            if (header := header.resolve()) not in found:
                found.add(header)
                left.append(header)
    return sorted(found)


def with_imports(files: Iterable[Path]) -> set[Path]:
    """Files of the package and all modules of it that they import, directly or not; no `__init__.py`."""
    found, left = set(files), list(files)
    while left:
        for node in ast.walk(ast.parse(left.pop().read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE.name):
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                modules = {ROOT / f"{name.replace('.', '/')}.py" for name in names}
                new = {module for module in modules if module.is_file()} - found
                found |= new
                left += new
    return found
