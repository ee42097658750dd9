"""``python -m pdkernels generate``: continues a prompt with one or several methods, and shows the cost of each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.rule import Rule
from rich.text import Text

from pdkernels import decoding
from pdkernels._validation import check as demand
from pdkernels._validation import did_you_mean, refuse
from pdkernels.cli import _flags as flags
from pdkernels.cli._grammar import grammar_of
from pdkernels.cli._settings import ONE_TEXT, read_settings, takes_settings
from pdkernels.cli._suggested import advice
from pdkernels.cli._tables import generation_table
from pdkernels.cli._terminal import (
    ACCEPTED,
    FLAGS,
    LEGEND,
    PROMPT,
    Output,
    Stream,
    block_size_of,
    check_file,
    errors_reported,
    load,
    use_threads,
    visible,
    writing,
)
from pdkernels.decoding import SamplingParams
from pdkernels.decoding.method import SHARED
from pdkernels.decoding.methods import METHODS
from pdkernels.generation.result import DecodeResult


def _help(option: str) -> str:
    """The help of an option of `generate`, from the decoders that have it."""
    texts: dict[str, list[str]] = {}
    for name, method in METHODS.items():
        if option in method.options:
            texts.setdefault(re.split(r"[:;.] |\.$", method.options[option].help)[0], []).append(name)
    return "; ".join(f"{', '.join(names)}: {text}" for text, names in texts.items())


@takes_settings(ONE_TEXT)
def generate(
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    model: flags.Model = "tiny-code",
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Decoding method, or 'all' for every method that the model supports; by default the one it was trained for, else 'jacobi' with prompt lookup where that pays. May be given several times."
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum new tokens; an end token stops earlier.")] = 128,
    block_size: Annotated[str | None, typer.Option(metavar="INTEGER|auto", help=_help("block_size"))] = None,
    drafter: flags.Drafter = None,
    adapter: flags.Adapter = None,
    window: Annotated[int | None, typer.Option(help=_help("window"))] = None,
    page_size: Annotated[int | None, typer.Option(help=SHARED["page_size"])] = None,
    option: flags.Assignments = None,
    overflow: Annotated[
        str,
        typer.Option(
            metavar="error|warn", help="What to do if the text may grow longer than the model was trained for."
        ),
    ] = "error",
    json_schema: flags.Schema = None,
    key_order: flags.KeyOrder = None,
    whitespace: flags.Whitespace = None,
    depth: flags.Depth = None,
    regex: flags.Regex = None,
    choice: flags.Choice = None,
    ebnf: flags.Ebnf = None,
    device: flags.Device = "cpu",
    dtype: flags.Dtype = None,
    packed: flags.Packed = None,
    cache_dtype: flags.CacheDtype = None,
    threads: flags.Threads = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Compare with greedy autoregressive decoding; exit code 1 if the tokens differ."),
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(dir_okay=False, writable=True, help="Write a page that replays the decoding into this file."),
    ] = None,
    **typed: Any,
) -> None:
    """Continue a prompt; show accepted drafts and the cost."""
    console = Output()
    with errors_reported(console):
        options: dict[str, Any] = {"block_size": block_size_of("generate", block_size)}
        options |= {"window": window, "page_size": page_size}
        settings, options = read_settings("generate", typed, option, options, ONE_TEXT)
        grammar = grammar_of(
            "generate", json_schema, regex, choice, ebnf, depth, key_order=key_order, whitespace=whitespace
        )
        params = SamplingParams(
            op="generate", max_new_tokens=max_new_tokens, grammar=grammar, adapter=adapter, **settings
        )
        if html is not None:
            check_file("generate", "--html", html)
            demand(len(method or [""]) == 1, "generate", "--html", "come with one --method", ", ".join(method or ()))
            demand("all" not in (method or ()), "generate", "--html", "come with one --method", "all")
        for name in set(method or ()) - {"all"}:
            decoding.find(name)
        language_model = load("generate", model, device, dtype, packed, cache_dtype, drafter, adapter)
        if method:
            methods = _methods(method, options, language_model)
        else:
            default, chosen = decoding.default_method(language_model, options, name=model)
            methods = _methods([default], options, language_model)
            methods[default] = {**chosen, **methods[default]}
        if check:
            sampled = params.temperature > 0
            refuse(sampled, "generate", "--check compares with greedy decoding", "Leave out the temperature.")
            fault = f"--check needs a model that decodes token by token; {model} does not"
            refuse(not decoding.supports("autoregressive", language_model), "generate", fault)
        use_threads(threads, [language_model])
        if fault := advice(model, settings.get("temperature")):
            console.heading(Text(fault, "dim"), soft_wrap=True)
        common: dict[str, Any] = {"overflow": overflow, "trace": html is not None}
        results = {
            name: _run(console, language_model, prompt, name, params, {**options_of_method, **common})
            for name, options_of_method in methods.items()
        }
        if html is not None:
            with writing("generate", "--html", html):
                next(iter(results.values())).save_html(html, f"{model}, {next(iter(methods))}")
        greedy = None
        if check:
            greedy = results.get("autoregressive") or decoding.generate(
                language_model, prompt, decoding.find("autoregressive"), params=params, overflow=overflow
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
    """The options of each requested method. One that none of them takes is an error, in the form it was typed."""
    if "all" in names:
        fills_masks = model.mask_token is not None
        names = [
            name
            for name, method in METHODS.items()
            if method.supports(model) and (fills_masks or not method.needs_mask_token)
        ]
    accepted = {name: decoding.method_options(name) for name in names}
    all_options = list(dict.fromkeys(option for method_options in accepted.values() for option in method_options))
    for option in options:
        fault = f"{FLAGS.get(option, f'--option {option}=')} is not an option of {' or '.join(accepted)}"
        remedy = (
            ""
            if option in all_options
            else f"{did_you_mean(option, all_options)}The options: {', '.join(all_options)}."
        )
        refuse(option not in all_options, "generate", fault, remedy)
    return {
        name: {option: value for option, value in options.items() if option in method_options}
        for name, method_options in accepted.items()
    }


def _run(
    console: Output, model: Any, prompt: str, method: str, params: SamplingParams, options: dict[str, Any]
) -> DecodeResult[torch.Tensor, str]:
    chosen = decoding.find(method)
    # A few hidden tokens after a short prompt, so that no method pays for the start of the process. A grammar may need
    # more of them.
    hidden = params.replace(grammar=None).shortened(4)
    decoding.generate(model, prompt[:100], chosen, params=hidden, **options)
    console.heading(Rule(Text(method, "bold"), align="left", style="dim"))
    console.heading(Text(visible(prompt), PROMPT), end="", soft_wrap=True)
    if chosen.wing == "planned":  # their tokens do not come in text order, and not all are text
        result = decoding.generate(model, prompt, chosen, params=params, **options)
        console.print(Text(visible(result.text or ""), ACCEPTED), soft_wrap=True)
        return result
    stream = Stream(console, model.tokenizer)
    result = decoding.generate(model, prompt, chosen, params=params, on_tokens=stream, **options)
    stream.finish()
    return result
