"""`eval --sweep`: combinations of options on the same prompts, saved as they come, so that a long sweep can be
interrupted and resumed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from pdkernels import evaluation
from pdkernels._validation import refuse
from pdkernels.cli._terminal import writing
from pdkernels.evaluation import machine
from pdkernels.evaluation.frontier import Comparison
from pdkernels.evaluation.sweep import Measured, SweepRow

_SAVED_EVERY = 5.0  # seconds


def run_sweep(
    console: Console,
    loaded: dict[str, Any],
    swept: Sequence[str],
    methods: Sequence[str],
    task: evaluation.Task,
    *,
    seed: int,
    batch_size: int,
    max_rows: int | None,
    path: Path | None,
    resume: bool,
    plot: Path | None,
) -> None:
    """Measures, prints, writes JSON and draws. With `resume`, measurements of the same sweep in `path` are not
    repeated."""
    candidates = evaluation.sweep_candidates(loaded, [evaluation.parse_sweep(text) for text in swept], methods)
    if max_rows is not None:
        candidates, left_out = evaluation.without_many_rows(candidates, max_rows)
        for line in left_out:
            console.print(Text.assemble(("left out ", "yellow"), line), soft_wrap=True)
    facts = {"task": task.name, "problems": len(task.prompts), "seed": seed, "batch_size": batch_size} | machine.facts()
    measured = _kept(path, facts) if resume else {}
    saved = time.monotonic()

    def keep(measured_now: Measured, at_once: bool = False) -> None:
        nonlocal saved
        if path is not None and (at_once or time.monotonic() - saved > _SAVED_EVERY):
            _write(path, {"facts": facts, "measured": measured_now})
            saved = time.monotonic()

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            bar = progress.add_task("", total=1.0)

            def show(what: str, share: float) -> None:
                progress.update(bar, description=what, completed=share)

            rows = evaluation.sweep(
                loaded, candidates, task, batch_size=batch_size, measured=measured, keep=keep, progress=show
            )
    except KeyboardInterrupt:
        keep(measured, at_once=True)
        notice = (
            f"{path} holds the results so far; continue with --resume" if path else "without --json nothing is saved"
        )
        console.print(f"stopped: {notice}.", soft_wrap=True)
        raise typer.Exit(130) from None
    comparisons = evaluation.compare(rows)
    records = [row.as_json() for row in rows]
    fronts = evaluation.fronts(records)
    console.print(_table(rows, comparisons, fronts))
    console.print(
        "Forwards and seconds are per prompt. Speed is relative to the cheapest baseline whose accuracy is at most 3 points lower; - if "
        "there is none. * is on the front of accuracy over forwards, ° over seconds. Intervals are 95 %."
    )
    if path is not None:
        results = {"rows": records, "fronts": fronts, "comparisons": [vars(one) for one in comparisons]}
        _write(path, {"facts": facts, "measured": measured, **results})
    if plot is not None:
        with writing("eval", "--plot", plot):
            evaluation.plot_frontier(records, plot)


def _kept(path: Path | None, facts: dict[str, Any]) -> Measured:
    refuse(path is None, "eval", "--resume needs --json, which names the file to continue")
    assert path is not None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        before, measured = record["facts"], record["measured"]
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError):
        before, measured = None, {}
    refuse(before is None, "eval", f"--resume cannot continue {path}, which no sweep wrote")
    for name, value in facts.items():
        other = before.get(name)
        refuse(
            other != value,
            "eval",
            f"--resume cannot continue {path}: its {name} is {other}, that of this run is {value}",
        )
    measurements: Measured = measured
    return measurements


def _write(path: Path, content: dict[str, Any]) -> None:
    """Writes the file atomically."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    with writing("eval", "--json", path):
        try:
            partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def _table(
    rows: Sequence[SweepRow], comparisons: Sequence[Comparison], fronts: dict[str, dict[str, list[str]]]
) -> Table:
    first = rows[0]
    title = f"{first.problems} prompts, batches of {-(-first.problems // len(first.batches))}"
    table = Table(box=box.SIMPLE_HEAD, padding=0, title=title, title_justify="left", title_style="bold")
    table.add_column("", overflow="fold")
    for heading in ("right", "forwards", "tokens/\nforward", "seconds", "speed"):
        table.add_column(heading, justify="right", no_wrap=True)
    is_many = len({(row.model, row.label) for row in rows if row.baseline}) > len(fronts)
    if is_many:
        table.add_column("against", overflow="fold")
    against = {(comparison.model, comparison.label): comparison for comparison in comparisons}
    before: tuple[str, str] | None = None
    for row in rows:
        if before is None or before[0] != row.model:
            table.add_row(Text(row.model, "bold"))
        if before != (row.model, row.method) and row.settings:
            table.add_row(f" {row.method}")
        before = (row.model, row.method)
        low, high = row.interval
        marks = "*" * (row.label in fronts[row.model]["forwards"]) + "°" * (row.label in fronts[row.model]["seconds"])
        comparison = against.get((row.model, row.label))
        speed = (
            "-"
            if comparison is None or comparison.speedup is None
            else "{:.2f}x ({:.2f}-{:.2f})".format(*comparison.speedup)
        )
        name = "  " + _settings(row.settings) if row.settings else f" {row.method}"
        table.add_row(
            f"{name} {marks}",
            f"{row.share:.0%} ({low:.0%}-{high:.0%})",
            f"{row.forwards / row.problems:.1f}",
            f"{row.tokens / row.forwards:.2f}",
            f"{row.seconds / row.problems:.3f}",
            speed,
            *(
                [
                    ""
                    if comparison is None
                    else (comparison.baseline or "none").partition(", ")[2] or comparison.baseline or "none"
                ]
                if is_many
                else []
            ),
        )
    return table


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {'none' if value is None else value}" for name, value in settings.items())
