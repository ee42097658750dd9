"""``python -m pdkernels chat``: a chat in the terminal, or line by line through a pipe."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from pdkernels import decoding
from pdkernels._validation import check as demand
from pdkernels.cli import _flags as flags
from pdkernels.cli._grammar import grammar_of
from pdkernels.cli._settings import ONE_TEXT, read_settings, takes_settings
from pdkernels.cli._suggested import DRAWS, as_flags, settings
from pdkernels.cli._terminal import (
    LEGEND,
    Stream,
    block_size_of,
    errors_reported,
    is_ours,
    load,
    needs_chats,
    report,
    use_threads,
    visible,
)
from pdkernels.decoding import SamplingParams
from pdkernels.generation.generation_config import completed

COMMANDS = "Commands: /reset forgets the chat, /exit or Ctrl-D ends it; Ctrl-C stops an answer."


class Chat:
    """A model, its decoding options, and the messages so far. Every turn processes the whole chat again."""

    def __init__(
        self, model: Any, method: str, params: SamplingParams, options: dict[str, Any], system: str | None
    ) -> None:
        self.model, self.method, self.params, self.options = model, method, params, options
        self._opening = [{"role": "system", "content": system}] if system else []
        self.reset()

    def reset(self) -> None:
        self.messages = list(self._opening)

    def answer(self, console: Console, question: str) -> str:
        """Streams the model's answer to a question and returns a line with its cost. An interrupted answer is kept."""
        messages = [*self.messages, {"role": "user", "content": question}]
        prompt = self.model.tokenizer.encode_chat(messages)
        stream, token_ids = Stream(console, self.model.tokenizer), list[int]()
        params, started = self._fitting(len(prompt)), time.perf_counter()

        interrupts = 0

        def interrupt(*_: Any) -> None:
            """The first interrupt waits for the end of a forward, so that the line is complete; a second one does
            not."""
            nonlocal interrupts
            interrupts += 1
            if interrupts > 1:
                raise KeyboardInterrupt

        def listen(sequence: int, ids: list[int], accepted: int) -> None:
            token_ids.extend(ids)
            stream(sequence, ids, accepted)
            if interrupts:
                raise KeyboardInterrupt

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            stats = decoding.generate(
                self.model, prompt, decoding.find(self.method), params=params, on_tokens=listen, **self.options
            ).stats
        except KeyboardInterrupt:
            figures = f"{len(token_ids)} tokens, stopped after {time.perf_counter() - started:.1f} s"
        else:
            figures = f"{stats.tokens} tokens, {stats.forwards} forwards, {stats.tokens_per_forward:.2f} tokens/forward"
            figures += f", {stats.tokens_per_second:.1f} tokens/s"
        finally:
            signal.signal(signal.SIGINT, before)
        stream.finish()
        self.messages = [*messages, {"role": "assistant", "content": self.model.tokenizer.decode(token_ids)}]
        return figures

    def _fitting(self, tokens: int) -> SamplingParams:
        """The settings, with as many new tokens as fit into the model's positions after a prompt."""
        maximum = getattr(self.model.config, "max_positions", None)
        if maximum is None:
            return self.params
        expectation = f"leave room for an answer in {maximum} positions"
        demand(tokens < maximum, "chat", "the chat", expectation, f"{tokens} tokens", "Start again with /reset.")
        return self.params.shortened(int(maximum) - tokens)


@takes_settings(ONE_TEXT)
def chat(
    model: flags.Model = "smollm2-135m-instruct",
    method: flags.Method = None,
    draft: Annotated[
        str | None,
        typer.Option(help="For 'jacobi': 'lookup' for any model, 'model' for one that was trained to jump ahead."),
    ] = None,
    block_size: Annotated[
        str | None, typer.Option(metavar="INTEGER|auto", help="Tokens per draft or block; by default the method's.")
    ] = None,
    drafter: flags.Drafter = None,
    adapter: flags.Adapter = None,
    option: flags.Assignments = None,
    system: Annotated[str | None, typer.Option(help="The system message that opens the chat.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens per answer.")] = 512,
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
    **typed: Any,
) -> None:
    """Chat with a model. Accepted drafts are in colour; each answer ends with a line of figures.

    Without an option of a draw, such as a temperature, it samples as the model's authors suggest.
    """
    console = Console(highlight=False)
    with errors_reported():
        if method is not None:
            decoding.find(method)
        options: dict[str, Any] = {"draft": draft, "block_size": block_size_of("chat", block_size)}
        chosen, options = read_settings("chat", typed, option, options, ONE_TEXT)
        params = SamplingParams(op="chat", max_new_tokens=max_new_tokens, adapter=adapter, **chosen)
        grammar = grammar_of(
            "chat", json_schema, regex, choice, ebnf, depth, key_order=key_order, whitespace=whitespace
        )
        language_model: Any = load("chat", model, device, dtype, packed, cache_dtype, drafter, adapter)
        use_threads(threads, [language_model])
        needs_chats("chat", language_model.tokenizer, model)
        suggestion = {} if chosen.keys() & set(DRAWS) else settings(model)
        if method is None:
            method, defaults = decoding.default_method(language_model, options, name=model)
            options = {**defaults, **options}
        elif method == "jacobi":
            options.setdefault("draft", "lookup")
        # A first, hidden answer absorbs the start-up cost, that of measuring included, and refuses unsupported options
        # before the first question. Three tokens have room for a draft.
        method_entry = decoding.find(method)
        suggestion = {
            name: value
            for name, value in suggestion.items()
            if name not in chosen and not method_entry.refusal(name, value)
        }
        params = completed("chat", params.replace("chat", **suggestion), language_model)
        first = [{"role": "user", "content": "Hi"}]
        decoding.generate(language_model, first, method_entry, params=params.shortened(3), **options)
        if suggestion:
            note = f"Sampling as the model's authors suggest: {as_flags(suggestion)}. --temperature 0 decodes greedily."
            console.print(Text(note, "dim"), soft_wrap=True)
        if grammar is not None:
            grammar.for_model(language_model, language_model.end_tokens)
            params = params.replace(grammar=grammar)
        talk(console, Chat(language_model, method, params, options, system))


def talk(console: Console, chat: Chat) -> None:
    """Questions and answers until there are no more."""
    console.print(Text(COMMANDS, "dim"), soft_wrap=True)
    if console.color_system is not None:
        console.print(LEGEND)
    for line in questions(console):
        question = line.strip()
        if question in ("/exit", "/quit"):
            return
        if question == "/reset":
            chat.reset()
            console.print(Text("A new chat.", "dim"))
        elif question.startswith("/"):
            console.print(Text(COMMANDS, "dim"), soft_wrap=True)
        elif question:
            before = chat.messages
            try:
                console.print(Text(chat.answer(console, question), "dim"), soft_wrap=True)
            except (ValueError, TypeError) as error:
                if not is_ours(error):
                    raise
                chat.messages = before
                report(error)


def questions(console: Console) -> Iterator[str]:
    """Lines from the terminal, with line editing where Python has it, or lines of a pipe, each echoed before its
    answer."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
            console.print(Text(f"> {visible(line.strip())}", "bold"), soft_wrap=True)
            yield line
        return
    try:
        import_module("readline")
    except ImportError:
        pass
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:  # while a line is being typed
            console.print()
        except EOFError:
            console.print()
            return
