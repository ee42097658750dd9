"""Figures of compiled kernels that lie in the checkout: tests compile what has changed since, and check the rest against these.

    make compiled      brings them up to date
    make test-all      does not look at them

A file has what one call measured, and a hash of all that it was compiled from.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.cudasim.build import ROOT, digest_text

FOLDER = ROOT / "tests" / "compiled"
VARIABLE = "PDKERNELS_COMPILED"  # "keep": write what is measured; "ignore": measure everything


def kept(name: str, key: str, measure: Callable[[], Any]) -> Any:
    """The figures under a name if they have this key, else those that `measure` finds: what JSON can hold."""
    file, mode = FOLDER / f"{name}.json", os.environ.get(VARIABLE)
    if mode != "ignore" and file.exists():
        found = json.loads(file.read_text())
        if found["key"] == key:
            return found["figures"]
    figures = measure()
    if mode == "keep":
        file.parent.mkdir(exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps({"key": key, "figures": figures}, indent=1) + "\n")
        partial.replace(file)
    return figures


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
