"""``python -m pdkernels batch``: reads files of prompts and writes a file of texts, on Ray workers if asked."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from pdkernels._validation import refuse
from pdkernels.batch.ray import generate_files
from pdkernels.cli._terminal import (
    DTYPE_HELP,
    MAX_THREADS,
    assigned_options,
    errors_reported,
    named_device,
    named_dtype,
)
from pdkernels.decoding.method import SHARED

_COLUMNS = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())

_SET = ("prompt", "max_new_tokens", "on_tokens", "n")
"""Arguments of `generate` that are no options here."""


def batch(
    prompts: Annotated[
        list[Path],
        typer.Argument(help="Files of prompts: .jsonl (one object per line), .txt (one prompt per line) or .parquet."),
    ],
    output: Annotated[Path, typer.Option(help="A .jsonl or .parquet file for prompts and texts; it must be new.")],
    model: Annotated[str, typer.Option(help="Name of a model, a checkpoint's folder, or a .gguf file.")] = "tiny-code",
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
    seed: Annotated[int, typer.Option(min=0, help=SHARED["seed"])] = 0,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A method option, such as block_size=16. May be given several times."),
    ] = None,
    device: Annotated[str, typer.Option(help="Device of the models: cpu or cuda.")] = "cpu",
    dtype: Annotated[str | None, typer.Option(help=DTYPE_HELP)] = None,
    adapter: Annotated[Path | None, typer.Option(help="Folder of a PEFT LoRA adapter.")] = None,
    temperature: Annotated[float | None, typer.Option(help=SHARED["temperature"])] = None,
    top_k: Annotated[int | None, typer.Option(help=SHARED["top_k"])] = None,
    top_p: Annotated[float | None, typer.Option(help=SHARED["top_p"])] = None,
    min_p: Annotated[float | None, typer.Option(help=SHARED["min_p"])] = None,
    on_error: Annotated[
        str, typer.Option(help="What to do when a prompt fails: 'record' its error instead of a text, or 'stop'.")
    ] = "record",
    threads: Annotated[
        int | None, typer.Option(min=1, max=MAX_THREADS, help="CPU threads of this process, without workers.")
    ] = None,
    cpus: Annotated[float, typer.Option(min=0, help="CPU cores per worker.")] = 1,
) -> None:
    """Generate for all prompts of files. The same command resumes an interrupted run.

    Exit code 0: every prompt has a text. 1: some have an error instead, or the run could not finish. 2: the arguments were refused.
    """
    console = Console(stderr=True, highlight=False)
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    with (
        errors_reported(),
        Progress(*_COLUMNS, console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        bar = progress.add_task("", total=None)
        refuse(bool(threads and workers), "batch", "--threads is for this process", "Pass --cpus for --workers.")
        if threads:
            torch.set_num_threads(threads)
        options = {name: value for name, value in given.items() if value is not None}
        report = generate_files(
            prompts,
            output,
            model,
            method,
            workers=workers,
            batch_size=batch_size,
            column=column,
            seed=seed,
            device=named_device("batch", device),
            dtype=named_dtype("batch", dtype),
            adapter=adapter,
            on_error=on_error,  # type: ignore[arg-type]  # checked there
            cpus=cpus,
            progress=lambda done, total: progress.update(bar, completed=done, total=total),
            max_new_tokens=max_new_tokens,
            **options,
            **assigned_options("batch", option or [], options, {*_SET, *inspect.signature(generate_files).parameters}),
        )
    speed = report.tokens / report.seconds if report.seconds else 0.0
    earlier = f", {report.resumed} in all by an earlier run" if report.resumed else ""
    by = f" by {len(report.workers)} workers" if workers else ""
    bad = f", and {report.failed} prompts with an error in place of a text" if report.failed else ""
    done = f"{output}: {report.prompts - report.failed} texts{bad}{earlier}"
    console.print(Text(f"{done}; {report.tokens} new tokens{by}, {speed:.0f} a second"), soft_wrap=True)
    if report.failed:
        raise typer.Exit(1)
