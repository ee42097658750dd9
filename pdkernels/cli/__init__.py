"""The command line: ``python -m pdkernels generate | batch | chat | demo | predict | eval | methods | models | doctor``.

The only package that imports typer and rich, which the library itself does not need.
"""

from __future__ import annotations

import importlib.util
import io
import json
import re
import sys
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
    sys.exit("The pdkernels command line needs typer and rich: pip install 'pdkernels[cli]'")

import torch

from pdkernels import decoding, evaluation, models
from pdkernels._validation import check as demand
from pdkernels.cli._batch import batch
from pdkernels.cli._chat import chat
from pdkernels.cli._demo import demo
from pdkernels.cli._plans import COLUMNS, evaluate_plans
from pdkernels.cli._predict import predict
from pdkernels.cli._reproduce import reproduce
from pdkernels.cli._sweep import run_sweep
from pdkernels.cli._tables import evaluation_table, generation_table
from pdkernels.cli._terminal import (
    ACCEPTED,
    LEGEND,
    PROMPT,
    Stream,
    assigned_options,
    errors_reported,
    use_threads,
    visible,
)
from pdkernels.config import show_config
from pdkernels.decoding._method import SHARED
from pdkernels.decoding.methods import METHODS
from pdkernels.decoding.result import DecodeResult
from pdkernels.models.zoo import WEIGHTS

__all__ = ["app", "main"]

app = typer.Typer(
    help="Parallel decoding of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _help(option: str) -> str:
    """The help of an option of `generate`, from the decoders that have it."""
    texts: dict[str, list[str]] = {}
    for name, method in METHODS.items():
        if option in method.options:
            texts.setdefault(re.split(r"[:;.] |\.$", method.options[option].help)[0], []).append(name)
    return "; ".join(f"{', '.join(names)}: {text}" for text, names in texts.items())


@app.command()
def generate(
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    model: Annotated[str, typer.Option(help="Name of a model, a checkpoint's folder, or a .gguf file.")] = "tiny-code",
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Decoding method, or 'all' for all that the model can run; by default 'jacobi' or 'llada'. May be given several times."
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most new tokens; an end token stops earlier.")] = 128,
    block_size: Annotated[int | None, typer.Option(help=_help("block_size"))] = None,
    window: Annotated[int | None, typer.Option(help=_help("window"))] = None,
    seed: Annotated[int | None, typer.Option(help=SHARED["seed"])] = None,
    page_size: Annotated[int | None, typer.Option(help=SHARED["page_size"])] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Any other option of the method; may be given several times."),
    ] = None,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1, tokens of the text become less likely.")] = 1.0,
    stop: Annotated[
        list[str] | None, typer.Option(help="A string that ends the text; may be given several times.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; by default one for a tiny model, else torch's default.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare with greedy autoregressive decoding; exit code 1 if different.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(dir_okay=False, writable=True, help="Write a page that replays the decoding into this file."),
    ] = None,
) -> None:
    """Continue a prompt, show which tokens were accepted drafts, and what the generation cost."""
    console = Console(highlight=False)
    given = {"block_size": block_size, "window": window, "seed": seed, "page_size": page_size}
    options = {name: value for name, value in given.items() if value is not None}
    with errors_reported():
        options |= assigned_options("generate", option or [])
        language_model = models.load(model)
        usual = next(name for name in METHODS if name != "autoregressive" and METHODS[name].supports(language_model))
        methods = _methods(method or [usual], options, language_model)
        if check:
            greedy_exists = decoding.supports("autoregressive", language_model)
            demand(
                greedy_exists,
                "generate",
                "--check",
                "be for a model that decodes token by token",
                model,
                "Leave it out.",
            )
        if html is not None:
            demand(len(methods) == 1, "generate", "--html", "come with one --method", ", ".join(methods))
            _make_folder("generate", "--html", html)
        use_threads(threads, [language_model])
        asked: dict[str, Any] = {"repetition_penalty": repetition_penalty, "stop_strings": stop or []}
        traced = {"trace": html is not None, **asked}
        results = {
            name: _run(console, language_model, prompt, name, max_new_tokens, {**methods[name], **traced})
            for name in methods
        }
        if html is not None:
            next(iter(results.values())).save_html(html, f"{model}, {next(iter(methods))}")
        greedy = None
        if check:
            greedy = results.get("autoregressive") or decoding.generate(
                language_model, prompt, max_new_tokens=max_new_tokens, **asked
            )

    same = {name: greedy is None or result.tokens.equal(greedy.tokens) for name, result in results.items()}
    console.print(generation_table(results, same if check else None))
    if console.color_system is not None:
        console.print(LEGEND)
    if greedy is not None and any(same.values()):
        quickest = min((name for name in results if same[name]), key=lambda name: results[name].stats.forwards)
        fewer, all_of_them = results[quickest].stats.forwards, greedy.stats.forwards
        if fewer < all_of_them:
            console.print(f"{quickest}: the same tokens in {fewer} forwards of the model instead of {all_of_them}.")
    if not all(same[name] for name in same if decoding.is_lossless(name)):
        raise typer.Exit(1)


def _methods(names: list[str], options: dict[str, Any], model: Any) -> dict[str, dict[str, Any]]:
    """The options of each requested method. An option that none of them takes is an error, not ignored."""
    if "all" in names:
        fills_masks = model.mask_token is not None
        names = [
            name
            for name, method in METHODS.items()
            if method.supports(model) and (fills_masks or not method.needs_mask_token)
        ]
    accepted = {name: decoding.method_options(name) for name in names}
    for option in options:
        if not any(option in known for known in accepted.values()):
            raise typer.BadParameter(f"--{option.replace('_', '-')} is no option of {' or '.join(accepted)}.")
    return {
        name: {option: value for option, value in options.items() if option in known}
        for name, known in accepted.items()
    }


def _run(
    console: Console, model: Any, prompt: str, method: str, max_new_tokens: int, options: dict[str, Any]
) -> DecodeResult[torch.Tensor, str]:
    # A few unseen tokens after a short prompt first, so that no method pays for the start of the process.
    chosen = decoding.find(method)
    decoding.generate(model, prompt[:100], chosen, max_new_tokens=min(4, max_new_tokens), **options)
    console.rule(Text(method, "bold"), align="left", style="dim")
    console.print(Text(visible(prompt), PROMPT), end="", soft_wrap=True)
    if chosen.wing == "planned":  # their tokens do not come in text order, and not all are text
        result = decoding.generate(model, prompt, chosen, max_new_tokens=max_new_tokens, **options)
        console.print(Text(visible(result.text or ""), ACCEPTED), soft_wrap=True)
        return result
    stream = Stream(console, model.tokenizer)
    result = decoding.generate(model, prompt, chosen, max_new_tokens=max_new_tokens, on_tokens=stream, **options)
    stream.finish()
    return result


app.command("batch")(batch)
app.command("chat")(chat)
app.command("demo")(demo)
app.command("predict")(predict)
app.command("reproduce")(reproduce)


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
            min=1, help="Tokens of a block or draft. May be given several times; by default what suits the method."
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
    seed: Annotated[int, typer.Option(help="Seed of the choice of prompts.")] = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; by default one for tiny models, else torch's default.")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTION=VALUE,...",
            help="Values to try for an option of the methods, or METHOD.OPTION=...; all combinations if given several times.",
        ),
    ] = None,
    most_rows: Annotated[
        int | None, typer.Option(min=1, help="In a sweep, leave out candidates with more rows in a forward.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the sweep in the file of --json.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            writable=True,
            help="Draw the figures into this PNG (needs matplotlib); 'frontier', for a sweep, is frontier.png.",
        ),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, writable=True, help="Write the figures into this file.")
    ] = None,
) -> None:
    """Compare decoding methods: right answers, tokens per forward, and speed against autoregressive decoding.

    Under torchrun the prompts are shared by its processes.
    """
    console = Console(highlight=False)
    with errors_reported(), evaluation.launched_group() as group:
        console.quiet = not evaluation.is_first(group)
        # Fail now rather than after minutes.
        alone = group is None or not (sweep or family == "planned")
        demand(alone, "eval", "--sweep and --family planned", "be run by one process", "several of torchrun")
        if sweep and plot == Path("frontier"):
            plot = Path("frontier.png")
        demand(bool(sweep) or not (resume or most_rows), "eval", "--resume, --most-rows", "be with --sweep", "none")
        for option, path in (("--plot", plot), ("--json", json_path)):
            if path is not None:
                _make_folder("eval", option, path)
        if plot is not None:
            demand(plot.suffix == ".png", "eval", "--plot", "be a path that ends in .png", str(plot))
            if importlib.util.find_spec("matplotlib") is None:
                raise ImportError(
                    "pdkernels.eval: --plot must have matplotlib, got none. Install it with `pip install 'pdkernels[bench]'`."
                )
        if family == "planned":
            searched = resume or most_rows
            demand(not searched, "eval", "--resume, --most-rows", "be for another family than planned", repr(searched))
            one = method or width or task
            demand(not one, "eval", "--family planned", "be without --method, --width and --task", repr(one))
            swept = [evaluation.parse_sweep(each) for each in sweep or ()]
            settings = evaluation.planned_settings(swept) if swept else None
            loaded, absent = _load_all(model or ["tiny-planned"])
            demand(bool(loaded), "eval", "--model", "name at least one model that exists", "; ".join(absent))
            use_threads(threads, list(loaded.values()))
            written = evaluate_plans(loaded, problems, batch_size, seed, settings)
            if json_path is not None:
                json_path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
            if plot is not None:
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
            demand(not width, "eval", "--width", "be --sweep block_size=... in a sweep", width)
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
                most_rows=most_rows,
                path=json_path,
                resume=resume,
                plot=plot,
            )
            return
        competing, unable = evaluation.candidates(loaded, method or (), width or ())
        skipped = absent + unable
        for line in skipped:
            console.print(Text.assemble(("skipped ", "yellow"), line), soft_wrap=True)
        demand(bool(loaded), "eval", "--model", "name at least one model that exists", "none")
        use_threads(threads, list(loaded.values()))
        rows = []
        with Progress(*COLUMNS, console=console, transient=True) as progress:
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
            json_path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
        if plot is not None and evaluation.is_first(group):
            draw = {"recurrent": evaluation.plot_recurrent, "masked": evaluation.plot_masked}.get(
                family, evaluation.plot
            )
            draw([benchmark["extra_info"] for benchmark in written["benchmarks"]], plot)
    if any(row.broken for row in rows):
        console.print(
            Text("A lossless method did not give greedy decoding's tokens: it has no figures of speed.", "bold red")
        )
        raise typer.Exit(1)


def _make_folder(command: str, option: str, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        demand(False, command, option, "lie in a folder that can be made", f"{path} ({error.strerror})")


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
        list[str] | None, typer.Argument(help="Methods whose options are shown; none: all methods.")
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


@app.command("models")
def list_models() -> None:
    """List the models that can be loaded by name."""
    for name in models.available():
        typer.echo(name)


@app.command()
def doctor() -> None:
    """Show versions, what was compiled and what each op uses on each device."""
    with errors_reported():
        typer.echo(show_config())


def main() -> None:
    """Entry point of the console script."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # generated text may have characters that this output cannot encode
    app(prog_name="pdkernels")
