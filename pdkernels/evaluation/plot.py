"""Draws an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pdkernels._validation import check
from pdkernels.evaluation.plot_rows import plot_rows


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws accuracy, tokens per forward and speed: a row of panels for each task, with candidates grouped by model.

    Args:
        rows: the ``extra_info`` of `as_json`. Rows without costs are left out.
        path: of the PNG.

    Raises:
        ValueError: no row with figures.
        ImportError: no matplotlib.
    """
    rows = [row for row in rows if row["speedup"] is not None]
    check(bool(rows), "evaluation.plot", "rows", "hold figures to draw", "none")
    plot_rows(rows, path, "The number after a method is its width: tokens of a block or draft.")
