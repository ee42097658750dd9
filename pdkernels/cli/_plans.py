"""`eval --family planned`: scores models that plan under several settings, and other models token by token."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pdkernels import evaluation

COLUMNS = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())


def evaluate_plans(
    loaded: dict[str, Any], problems: int, batch_size: int, seed: int, settings: Sequence[Mapping[str, Any]] | None
) -> dict[str, Any]:
    """Scores all models, prints results as they come, and returns them as JSON."""
    orders, scores = evaluation.held_out_orders(problems, seed), {}
    stems = [Path(name).stem for name in loaded]
    for name, model in loaded.items():
        label_of_model = name if stems.count(Path(name).stem) > 1 else Path(name).stem
        with Progress(*COLUMNS, transient=True, disable=not sys.stdout.isatty()) as progress:
            bar = progress.add_task(label_of_model, total=1.0)
            scores[label_of_model] = evaluation.evaluate_planned(
                label_of_model,
                model,
                orders,
                batch_size=batch_size,
                settings=settings,
                progress=lambda what, share, bar=bar: progress.update(bar, description=what, completed=share),  # type: ignore[misc]
            )
        for label, score in scores[label_of_model].items():
            typer.echo(f"{label_of_model}, {label}: {score}; ends: {score.reasons}")
    return evaluation.planned_json(scores, batch_size)
