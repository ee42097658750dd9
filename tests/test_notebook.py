"""The notebook in examples/ runs, cell after cell, without an installed Jupyter."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pdkernels import decoding

NOTEBOOK = Path(__file__).resolve().parent.parent / "examples/tour.ipynb"


def test_the_cells_of_the_tour_run(capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] for cell in cells if cell["cell_type"] == "code"), "commit it without outputs"
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, source in enumerate(sources):
        exec(compile(source, f"cell {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert "answer 1449" in printed and "305 + 61 = ? answer 366" in printed and printed.count("answer 1449\n") == 3
    verdicts = dict(re.findall(r"^(\w+) +\d+ +[\d.]+  (yes|no)", printed, re.MULTILINE))
    assert all(verdicts[name] == "yes" for name in verdicts if decoding.is_lossless(name)) and "no" in verdicts.values()
