"""``python -m pdkernels batch``: reads files of prompts and writes a file of texts, on Ray workers if asked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from pdkernels._validation import refuse
from pdkernels.batch.ray import REFUSED, generate_files
from pdkernels.cli import _flags as flags
from pdkernels.cli._settings import read_settings, takes_settings
from pdkernels.cli._terminal import errors_reported, named_device, named_dtype

_COLUMNS = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())


@takes_settings(REFUSED)
def batch(
    prompts: Annotated[
        list[Path],
        typer.Argument(help="Files of prompts: .jsonl (one object per line), .txt (one prompt per line) or .parquet."),
    ],
    output: Annotated[Path, typer.Option(help="A .jsonl or .parquet file for prompts and texts; it must be new.")],
    model: flags.Model = "tiny-code",
    method: Annotated[
        str | None, typer.Option(help="Decoding method; by default the model's own, else token by token.")
    ] = None,
    workers: Annotated[
        int,
        typer.Option(
            min=0,
            help="Number of worker processes in a Ray cluster, each with its own model; 0: run in this process, without Ray.",
        ),
    ] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts per generation.")] = 8,
    column: Annotated[str, typer.Option(help="Name of the field that holds the prompt.")] = "prompt",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum new tokens per prompt.")] = 128,
    option: flags.Assignments = None,
    device: Annotated[str, typer.Option(help="Device of the models: cpu or cuda.")] = "cpu",
    dtype: flags.Dtype = None,
    adapter: Annotated[Path | None, typer.Option(help="Folder of a PEFT LoRA adapter.")] = None,
    on_error: Annotated[
        str, typer.Option(help="What to do when a prompt fails: 'record' its error instead of a text, or 'stop'.")
    ] = "record",
    threads: Annotated[
        int | None, typer.Option(min=1, max=flags.MAX_THREADS, help="CPU threads of this process, without workers.")
    ] = None,
    cpus: Annotated[float, typer.Option(min=0, help="CPU cores per worker.")] = 1,
    **typed: Any,
) -> None:
    """Generate for all prompts of files. The same command resumes an interrupted run.

    Exit code 0: every prompt has a text. 1: some have an error instead, or the run could not finish. 2: the arguments
    were refused.
    """
    console = Console(stderr=True, highlight=False)
    with (
        errors_reported(),
        Progress(*_COLUMNS, console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        bar = progress.add_task("", total=None)
        refuse(bool(threads and workers), "batch", "--threads is for this process", "Pass --cpus for --workers.")
        if threads:
            torch.set_num_threads(threads)
        settings, options = read_settings("batch", typed, option, {}, REFUSED)
        report = generate_files(
            prompts,
            output,
            model,
            method,
            workers=workers,
            batch_size=batch_size,
            column=column,
            device=named_device("batch", device),
            dtype=named_dtype("batch", dtype),
            adapter=adapter,
            on_error=on_error,  # type: ignore[arg-type]  # checked there
            cpus=cpus,
            progress=lambda done, total: progress.update(bar, completed=done, total=total),
            max_new_tokens=max_new_tokens,
            **settings,
            **options,
        )
    speed = report.tokens / report.seconds if report.seconds else 0.0
    earlier = f", {report.resumed} in all by an earlier run" if report.resumed else ""
    by = f" by {len(report.workers)} workers" if workers else ""
    bad = f", and {report.failed} prompts with an error in place of a text" if report.failed else ""
    done = f"{output}: {report.prompts - report.failed} texts{bad}{earlier}"
    console.print(Text(f"{done}; {report.tokens} new tokens{by}, {speed:.0f} a second"), soft_wrap=True)
    if report.failed:
        raise typer.Exit(1)
