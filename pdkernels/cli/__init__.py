"""The command line: ``python -m pdkernels generate | batch | chat | serve | demo | eval | methods | models | doctor``.

The only package that imports typer and rich, which the library itself does not need.
"""

from __future__ import annotations

import importlib.util
import io
import json
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich import box
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as missing:
    if (missing.name or "").partition(".")[0] not in ("typer", "rich"):
        raise
    if sys.argv[1:] == ["doctor"]:  # which says what is missing
        from pdkernels.config import show_config

        print(show_config())
    sys.exit("The pdkernels command line needs typer and rich: pip install typer rich")


from pdkernels import decoding, evaluation, models
from pdkernels._early_answers import SUMMARY, VERSION_HELP
from pdkernels._validation import check as demand
from pdkernels._validation import refuse
from pdkernels.cli import _flags as flags
from pdkernels.cli._batch import batch
from pdkernels.cli._chat import chat
from pdkernels.cli._demo import demo
from pdkernels.cli._doctor import doctor
from pdkernels.cli._generate import generate
from pdkernels.cli._models import list_models
from pdkernels.cli._plans import COLUMNS, evaluate_plans
from pdkernels.cli._serve import serve
from pdkernels.cli._sweep import run_sweep
from pdkernels.cli._tables import evaluation_table
from pdkernels.cli._terminal import Output, check_file, errors_reported, show_warning, use_threads, writing
from pdkernels.cli._usage import Commands, Sectioned, print_version
from pdkernels.decoding.methods import METHODS
from pdkernels.models.checkpoints.zoo import WEIGHTS

__all__ = ["app", "main"]

app = typer.Typer(
    cls=Commands,
    help=SUMMARY,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its columns cut names of options at 80 columns
)


app.command(cls=Sectioned)(generate)
app.command("batch", cls=Sectioned)(batch)
app.command("chat", cls=Sectioned)(chat)
app.command("serve")(serve)
app.command("demo")(demo)


@app.callback()
def shared(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=print_version, help=VERSION_HELP)
    ] = False,
) -> None:
    """Parallel decoding of language models."""


@app.command("eval")
def evaluate(
    family: Annotated[
        str,
        typer.Option(help="'causal', 'recurrent', 'masked' or 'planned': selects the default tiny models and tasks."),
    ] = "causal",
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of a tiny model, or a checkpoint's folder. May be given several times; by default the family's."
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="Decoding method. May be given several times; token-by-token decoding always runs too."),
    ] = None,
    width: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Tokens per block or draft. May be given several times; the default depends on the method."
        ),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="'sums', 'source' or 'chains'. By default the first two; chains for recurrent depth, sums for the other families."
        ),
    ] = None,
    problems: Annotated[int, typer.Option(min=1, help="Prompts per task.")] = 30,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts per generation.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed for choosing the prompts.")] = 0,
    threads: flags.Threads = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTION=VALUE,...",
            help="Values to try for an option of the methods, or METHOD.OPTION=...; all combinations if given several times.",
        ),
    ] = None,
    max_rows: Annotated[
        int | None, typer.Option(min=1, help="In a sweep, skip candidates whose forwards have more rows than this.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the sweep in the file given by --json.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            writable=True,
            help="Plot the figures into this PNG file (needs matplotlib); for a sweep, 'frontier' means frontier.png.",
        ),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, writable=True, help="Write the figures to this JSON file.")
    ] = None,
) -> None:
    """Compare methods: right answers, tokens per forward, speed.

    Speed is that against autoregressive decoding. Under torchrun the processes share the prompts.
    """
    console = Output()
    with errors_reported(console), evaluation.launched_group() as group:
        console.quiet = not evaluation.is_first(group)
        # Fail now rather than after minutes.
        shared_out = group is not None and (sweep or family == "planned")
        refuse(
            bool(shared_out), "eval", "--sweep and --family planned run in one process, but torchrun started several"
        )
        if sweep and plot == Path("frontier"):
            plot = Path("frontier.png")
        refuse(not sweep and bool(resume or max_rows), "eval", "--resume and --max-rows need --sweep")
        for option, path in (("--plot", plot), ("--json", json_path)):
            if path is not None:
                check_file("eval", option, path)
        if plot is not None:
            demand(plot.suffix == ".png", "eval", "--plot", "be a path that ends in .png", str(plot))
            if importlib.util.find_spec("matplotlib") is None:
                raise ImportError("pdkernels.eval: --plot needs matplotlib. Install it with `pip install matplotlib`.")
        if family == "planned":
            refuse(bool(resume or max_rows), "eval", "--family planned takes neither --resume nor --max-rows")
            refuse(bool(method or width or task), "eval", "--family planned takes no --method, --width or --task")
            swept = [evaluation.parse_sweep(each) for each in sweep or ()]
            settings = evaluation.planned_settings(swept) if swept else None
            loaded, absent = _load_all(model or ["tiny-planned"])
            demand(bool(loaded), "eval", "--model", "name at least one model that exists", "; ".join(absent))
            use_threads(threads, list(loaded.values()))
            written = evaluate_plans(loaded, problems, batch_size, seed, settings)
            if json_path is not None:
                with writing("eval", "--json", json_path):
                    json_path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
            if plot is not None:
                with writing("eval", "--plot", plot):
                    evaluation.plot_planned([benchmark["extra_info"] for benchmark in written["benchmarks"]], plot)
            return
        demand(
            family in evaluation.FAMILIES,
            "eval",
            "--family",
            f"be one of {', '.join([*evaluation.FAMILIES, 'planned'])}",
            repr(family),
        )
        known = evaluation.FAMILIES[family]
        tasks = [
            evaluation.make_task(name, problems, seed, canvas=known.canvas)
            for name in dict.fromkeys(task or known.tasks)
        ]
        loaded, absent = _load_all(model or list(known.models))
        if sweep:
            demand(tasks[0].problems is not None, "eval", "--task", "be sums or chains in a sweep", tasks[0].name)
            refuse(bool(width), "eval", "--width is not for sweeps", "Write --sweep block_size=... instead.")
            demand(bool(loaded), "eval", "--model", "name at least one model that exists", "none")
            use_threads(threads, list(loaded.values()))
            chosen_methods = [decoding.find(name).name for name in method or ()]
            run_sweep(
                console,
                loaded,
                sweep,
                chosen_methods,
                tasks[0],
                seed=seed,
                batch_size=batch_size,
                max_rows=max_rows,
                path=json_path,
                resume=resume,
                plot=plot,
            )
            return
        competing, unable = evaluation.candidates(loaded, method or (), width or ())
        skipped = absent + unable
        for line in skipped:
            console.heading(Text.assemble(("skipped ", "yellow"), line), soft_wrap=True)
        demand(bool(loaded), "eval", "--model", "name at least one model that exists", "none")
        use_threads(threads, list(loaded.values()))
        rows = []
        with Progress(*COLUMNS, console=console, transient=True, disable=not console.is_terminal) as progress:
            bar = progress.add_task("", total=len(tasks))
            for number, chosen in enumerate(tasks):

                def show(what: str, share: float, number: int = number, name: str = chosen.name) -> None:
                    progress.update(bar, description=f"{name}, {what}", completed=number + share)

                rows += evaluation.evaluate(
                    loaded,
                    competing,
                    chosen,
                    batch_size=batch_size,
                    memory=family == "recurrent",
                    group=group,
                    progress=show,
                )
        for chosen in tasks:
            console.print(evaluation_table([row for row in rows if row.task == chosen.name], console.width))
        written = evaluation.as_json(rows, skipped)
        if json_path is not None and evaluation.is_first(group):
            with writing("eval", "--json", json_path):
                json_path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
        if plot is not None and evaluation.is_first(group):
            draw = {"recurrent": evaluation.plot_recurrent, "masked": evaluation.plot_masked}.get(
                family, evaluation.plot
            )
            with writing("eval", "--plot", plot):
                draw([benchmark["extra_info"] for benchmark in written["benchmarks"]], plot)
    if any(row.broken for row in rows):
        console.print(Text("A lossless method differed from greedy decoding, so its speed is not shown.", "bold red"))
        raise typer.Exit(1)


def _load_all(names: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Models by name, and a line for each of the package's models that is missing here."""
    ours = {"tiny-planned", *(name for family in evaluation.FAMILIES.values() for name in family.models)}
    absent = [name for name in dict.fromkeys(names) if name in ours and name not in models.available()]
    loaded = {name: models.load(name) for name in dict.fromkeys(names) if name not in absent}
    return loaded, [
        f"{name}: it is not in this package; python examples/train_{name.replace('-', '_')}.py "
        f"--output {WEIGHTS / name}.safetensors makes it"
        for name in absent
    ]


@app.command("methods")
def list_methods(
    names: Annotated[
        list[str] | None, typer.Argument(help="Methods whose options to show; without any, all methods are listed.")
    ] = None,
) -> None:
    """List the decoding methods, or the options of some of them."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    with errors_reported():
        for method in [decoding.find(name) for name in names] if names else METHODS.values():
            table.add_row(Text(method.name, "bold"), Text(method.summary))
            for option in method.options.values() if names else ():
                table.add_row(Text(f"  {option}"), Text(option.help))
    Console(highlight=False).print(table)


app.command("models")(list_models)
app.command()(doctor)


def main() -> None:
    """Entry point of the console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # generated text may have characters that this output cannot encode
    warnings.showwarning = show_warning  # type: ignore[assignment]  # it ignores where the warning is from
    app(prog_name="pdkernels")
