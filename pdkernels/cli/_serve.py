"""``python -m pdkernels serve``: an HTTP server with OpenAI's interface."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from pdkernels import decoding
from pdkernels._validation import check as demand
from pdkernels.cli import _flags as flags
from pdkernels.cli._settings import OF_REQUESTS, read_settings
from pdkernels.cli._suggested import DRAWS, settings
from pdkernels.cli._terminal import errors_reported, load, load_drafter, use_threads
from pdkernels.engine import Engine
from pdkernels.models import load_adapter

KEY = "PDKERNELS_API_KEY"


def serve(
    model: flags.Model = "smollm2-135m-instruct",
    name: Annotated[str | None, typer.Option(help="What clients call the model; by default as --model does.")] = None,
    method: flags.DefaultMethod = None,
    option: flags.Assignments = None,
    host: Annotated[str, typer.Option(help="Address to listen on; only this machine can reach the default.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    max_running: Annotated[int, typer.Option(min=1, help="Requests in a batch at a time.")] = 8,
    max_waiting: Annotated[int, typer.Option(min=1, help="Requests that may wait; more are answered with 429.")] = 256,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Longest prompt.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer.")] = None,
    prompt_tokens_per_step: Annotated[
        int,
        typer.Option(
            min=1,
            help="Tokens of prompts between two steps: fewer make shorter gaps, and first tokens that come later.",
        ),
    ] = 256,
    cache_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens whose K and V are in memory, of running requests and recent prompts; layers with windows take less.",
        ),
    ] = None,
    prefix_dir: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="A folder where K and V of recent texts are kept for the next start."),
    ] = None,
    prefix_dir_bytes: Annotated[int, typer.Option(min=1, help="Bytes of the files there.")] = 1 << 32,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds after which an answer ends.")] = 600.0,
    shutdown_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests have to finish once the server is told to stop.")
    ] = 30.0,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="A site whose pages may send requests, such as http://localhost:3000, or *; may be given several times.",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST",
            help="A name by which clients reach the server, such as api.example.org, or *; by default any, but at a loopback address only this machine's.",
        ),
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH",
            help="A drafter that requests may name, a head for the model or a small model with its vocabulary; the first is the default. May be given several times.",
        ),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH",
            help="A PEFT LoRA adapter that requests may name, as the model or in the field `adapter`. May be given several times.",
        ),
    ] = None,
    allow_unload: Annotated[
        bool, typer.Option("--allow-unload", help="Whoever may send requests may also delete adapters, for all.")
    ] = False,
    device: flags.Device = "cpu",
    dtype: flags.Dtype = None,
    packed: flags.Packed = None,
    cache_dtype: flags.CacheDtype = None,
    threads: flags.Threads = None,
) -> None:
    """Serve a model over HTTP, for any client of OpenAI's interface.

    Clients must send the key in the environment variable PDKERNELS_API_KEY, if it is set.
    """
    console = Console(stderr=True, highlight=False)
    with errors_reported():
        from pdkernels.serve import Limits, create_app, run
        from pdkernels.serve.gate import is_loopback
        from pdkernels.serve.run import listeners

        if method is not None:
            decoding.find(method)
        for listener in listeners(host, port):  # what cannot work is said before a model is loaded
            listener.close()
        labelled, adapters = _labelled("drafter", drafter), _labelled("adapter", adapter)
        called = name or model
        demand(called not in dict(adapters), "serve", "--adapter", "not have the model's name", repr(called))
        for origin in allow_origin or ():
            right = re.fullmatch(r"\*|null|[a-z][a-z\d+.-]*://[^/\s]+", origin) is not None
            demand(right, "serve", "--allow-origin", "be SCHEME://HOST[:PORT], without a path, or *", repr(origin[:80]))
        for allowed in allow_host or ():
            right = re.fullmatch(r"\*|[^/\s]+", allowed) is not None
            demand(right, "serve", "--allow-host", "be HOST[:PORT] or *", repr(allowed[:80]))
        language_model: Any = load("serve", model, device, dtype, packed, cache_dtype)
        for label, path in adapters:
            load_adapter(language_model, label, path)
        heads = [load_drafter("serve", model, language_model, path, device, dtype) for _, path in labelled]
        if heads:
            language_model.drafters = dict(reversed(heads))  # the first one of a method is its default
        drafters = {label: one for (label, _), (_, one) in zip(labelled, heads, strict=True)}
        use_threads(threads, [language_model])
        sampling, options = read_settings("serve", {}, option, {}, OF_REQUESTS)
        if options.get("drafter") in drafters:
            options["drafter"] = drafters[options["drafter"]]
        if method is None:
            method, chosen = decoding.default_method(language_model, options, name=model)
            options = {**chosen, **options}
        elif method == "jacobi":
            options.setdefault("draft", "lookup")
        options |= sampling
        sizes: dict[str, Any] = {
            "max_prompt_tokens": max_prompt_tokens,
            "max_new_tokens": max_new_tokens,
            "prompt_tokens_per_step": prompt_tokens_per_step,
            "cache_tokens": cache_tokens,
            "prefix_dir": prefix_dir,
            "prefix_dir_bytes": prefix_dir_bytes,
        }
        engine = Engine(language_model, max_running=max_running, max_waiting=max_waiting, **sizes)
        with engine:
            # A first, hidden answer absorbs the start-up cost, and refuses unsupported options before the first
            # request.
            few = {"max_new_tokens": _canvas(method, engine), "min_new_tokens": 0}
            engine.submit([0], decoding.find(method), **(options | few)).result()
            for kind, one in heads:
                engine.submit([0], decoding.find(kind), max_new_tokens=1, drafter=one).result()
            key = os.environ.get(KEY) or None
            demand(key is None or key.isascii(), "serve", KEY, "be ASCII", "other characters")
            if key is None and not is_loopback(host):
                warning = f"Anyone who reaches {host}:{port} can use the model. Set {KEY} to ask for a key."
                console.print(Text(warning, "bold yellow"), soft_wrap=True)
            limits = Limits(seconds=timeout, shutdown=shutdown_timeout)
            place = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            console.print(Text(f"{called} by {method} on {place}/v1", "bold"), soft_wrap=True)
            console.print(Text(f"A page to try it: {place}/", "dim"), soft_wrap=True)
            suggestion = {} if options.keys() & set(DRAWS) else settings(model)
            if suggestion:
                values = ", ".join(f"{name} {value:g}" for name, value in suggestion.items())
                note = f"Requests without these fields sample as the model's authors suggest: {values}."
                console.print(Text(note, "dim"), soft_wrap=True)
            app_options: dict[str, Any] = {"sampling": suggestion, "limits": limits, "api_key": key}
            app_options |= {"origins": allow_origin or (), "hosts": allow_host or (), "drafters": drafters}
            app_options |= {"allow_unload": allow_unload}
            app = create_app(engine, called, method=method, options=options, **app_options)
            run(app, host=host, port=port)


def _labelled(kind: str, assignments: list[str] | None) -> list[tuple[str, str]]:
    """Names and paths of what was given as NAME=PATH."""
    labelled = [one.partition("=") for one in assignments or []]
    for label, sign, path in labelled:
        demand(bool(label and path), "serve", f"--{kind}", "be NAME=PATH", repr(f"{label}{sign}{path}"[:80]))
    once = len({label for label, _, _ in labelled}) == len(labelled)
    demand(once, "serve", f"--{kind}", f"name each {kind} once", "one twice")
    return [(label, path) for label, _, path in labelled]


def _canvas(method: str, engine: Engine) -> int:
    """New tokens of the first answer: a canvas may come in blocks."""
    steps = decoding.find(method).steps
    return 1 if steps is None or steps.any_limit else min(32, engine.max_new_tokens)
