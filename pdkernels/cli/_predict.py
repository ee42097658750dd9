"""``python -m pdkernels predict``: how long the kernels would take on a GPU, from their machine code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from pdkernels._validation import check as demand
from pdkernels.cli._terminal import errors_reported

_ROOT = Path(__file__).resolve().parents[2]


def predict(device: Annotated[str, typer.Option(help="'h200' or 'h100'.")] = "h200") -> None:
    """Predict times of the kernels on a GPU, without one: they are compiled, and their machine code is read."""
    with errors_reported():
        there = (_ROOT / "tests" / "harness" / "predict.py").is_file()
        demand(there, "predict", "the package", "run from a checkout, whose sources it compiles", "an installed one")
        demand(device in ("h200", "h100"), "predict", "--device", "be h200 or h100", repr(device))
    # A process of its own: whether Triton compiles or interprets is decided when it is imported.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.harness.predict", "--device", device]
    raise typer.Exit(subprocess.run(command, cwd=_ROOT, env=environment, check=False).returncode)
