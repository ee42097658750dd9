"""``python -m bench.papers [PAPER] [TABLE]``: measures tables of the papers on the tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from bench.papers import by_paper, runs, tables
from bench.records import write
from pdkernels._validation import check as demand
from pdkernels._validation import fail
from pdkernels.cli._terminal import errors_reported, use_threads

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_COLUMNS = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())


@app.command()
def reproduce(
    paper: Annotated[str | None, typer.Argument(help=f"{', '.join(tables.PAPERS)}; none: what there is.")] = None,
    figure: Annotated[str | None, typer.Argument(help="Name of a table; none: all tables of the paper.")] = None,
    problems: Annotated[
        int | None,
        typer.Option(min=1, help="Prompts, for tables that have any; by default those of the committed table."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(file_okay=False, help="Write a JSON file for each table into this folder.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Skip tables whose file exists.")] = False,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    pages: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            exists=True,
            help="Measure nothing; put the files in FOLDER/results into the pages there and beside it.",
        ),
    ] = None,
) -> None:
    """Measure tables of the papers on the tiny models."""
    console = Console(highlight=False)
    with errors_reported():
        if pages is not None:
            for found in sorted([*pages.glob("*.md"), *pages.parent.glob("*.md")]):
                before = found.read_text(encoding="utf-8")
                if (text := by_paper.fill(tables.page(before, pages / "results"))) != before:
                    found.write_text(text, encoding="utf-8")
            return
        chosen = tables.find(paper, figure)
        demand(not resume or output is not None, "papers", "--resume", "be with --output", "none")
        if paper is None:
            table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
            for heading in ("paper", "table", "in the paper", "what it shows there"):
                table.add_column(heading, overflow="fold")
            for one in chosen:
                table.add_row(one.paper, one.name, one.source, one.shows)
            console.print(table)
            return
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
        use_threads(threads, [])
        for one in chosen:
            path = None if output is None else output / f"{one.paper}_{one.name}.json"
            if resume and path is not None and path.exists():
                console.print(f"{one.paper} {one.name}: {path} is there", soft_wrap=True)
                continue
            if one.run is None:
                fail("papers", one.name, "be measured by code of this checkout", "a table of released code")
            with Progress(*_COLUMNS, console=console, transient=True) as progress:
                result = one.run(problems or one.problems, _shown_by(progress, progress.add_task(one.name, total=1.0)))
            if path is not None:
                write(path, result)
            console.print(f"[bold]{tables.PAPERS[one.paper]}, {one.source}[/]", soft_wrap=True)
            console.print(one.shows, soft_wrap=True)
            console.print(tables.as_table(result), soft_wrap=True, markup=False)


def _shown_by(progress: Progress, bar: TaskID) -> runs.Progress:
    return lambda what, share: progress.update(bar, description=what, completed=share)


if __name__ == "__main__":
    app(prog_name="python -m bench.papers")
