"""What the compiled kernels issue and wait for, all that the model reads."""

from __future__ import annotations

from typing import Any

from bench.predict import gluon, loop_figures, statistics_figures


def measure() -> dict[str, Any]:
    """Figures by kernel. Those under "statistics" are empty without nvcc."""
    return {**loop_figures.measure(), **gluon.measure(), "statistics": statistics_figures.measure()}
