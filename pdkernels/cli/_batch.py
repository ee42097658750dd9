"""``python -m pdkernels batch``: files of prompts in, a file of texts out, on as many workers as Ray has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pdkernels.cli._terminal import assigned_options, errors_reported
from pdkernels.decoding._method import SHARED
from pdkernels.integrations.ray import generate_files

_COLUMNS = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())


def batch(
    prompts: Annotated[
        list[Path], typer.Argument(help="Files: .jsonl (an object a line), .txt (a prompt a line), .parquet.")
    ],
    output: Annotated[Path, typer.Option(help="A .jsonl or .parquet file for prompts and texts; it must be new.")],
    model: Annotated[str, typer.Option(help="Name of a model, a checkpoint's folder, or a .gguf file.")] = "tiny-code",
    method: Annotated[str, typer.Option(help="Decoding method.")] = "autoregressive",
    workers: Annotated[
        int, typer.Option(min=0, help="Processes of a Ray cluster, each with a model; 0: this one, without Ray.")
    ] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts per generation.")] = 8,
    column: Annotated[str, typer.Option(help="Field with the prompt.")] = "prompt",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="New tokens of a prompt at most.")] = 128,
    seed: Annotated[int, typer.Option(min=0, help=SHARED["seed"])] = 0,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Of the method, as block_size=16. May be given several times."),
    ] = None,
    device: Annotated[str, typer.Option(help="Where the models go: cpu or cuda.")] = "cpu",
    cpus: Annotated[float, typer.Option(min=0, help="Cores that a worker takes.")] = 1,
) -> None:
    """Generate for all prompts of files. The same command goes on with what was cut off."""
    console = Console(stderr=True, highlight=False)
    with errors_reported(), Progress(*_COLUMNS, console=console, transient=True) as progress:
        bar = progress.add_task("", total=None)
        report = generate_files(
            prompts,
            output,
            model,
            method,
            workers=workers,
            batch_size=batch_size,
            column=column,
            seed=seed,
            device=device,
            cpus=cpus,
            progress=lambda done, total: progress.update(bar, completed=done, total=total),
            max_new_tokens=max_new_tokens,
            **assigned_options("batch", option or []),
        )
    speed = report.tokens / report.seconds if report.seconds else 0.0
    earlier = f", {report.resumed} of them by an earlier run" if report.resumed else ""
    by = f" by {len(report.workers)} workers" if workers else ""
    console.print(f"{output}: {report.prompts} texts{earlier}; {report.tokens} new tokens{by}, {speed:.0f} a second")
