"""Shared by the commands: streamed text, errors in one sentence, threads."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.text import Text

from pdkernels import models
from pdkernels._validation import check, check_choice, message
from pdkernels.models.checkpoints.drafters.folder import drafter_method, is_own_folder
from pdkernels.models.files.layout import DTYPES
from pdkernels.models.text.tokenizers import Tokenizer, incremental

ACCEPTED = "bold green"
GIVEN = "default"
PROMPT = "dim"
LEGEND = Text.assemble(("accepted drafts", ACCEPTED), ", ", ("the model's own tokens", GIVEN))

_CACHE_DTYPES = {"int8": torch.int8, "float16": torch.float16}

# Below this number of parameters, more threads cost more than they save.
_TINY = 20_000_000


class Output(Console):
    """A console that remembers whether it has printed, and holds headings back until what they head is printed.

    >>> output = Output()
    >>> output.heading("never shown")
    >>> output.printed
    False
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, **options)
        self.printed = False
        self._headings: list[tuple[Any, dict[str, Any]]] = []

    def heading(self, content: Any, **options: Any) -> None:
        """Prints `content` before whatever is printed next."""
        self._headings.append((content, options))

    def print(self, *objects: Any, **options: Any) -> None:
        self.printed = True
        headings, self._headings = self._headings, []
        for content, style in headings:
            super().print(content, **style)
        super().print(*objects, **options)


class Stream:
    """Prints tokens as they come: accepted drafts in colour, the model's own tokens plain."""

    def __init__(self, console: Console, tokenizer: Tokenizer) -> None:
        self._console = console
        self._text = incremental(tokenizer)

    def __call__(self, sequence: int, ids: list[int], accepted: int) -> None:
        self._print(self._text.feed(ids[:accepted]), ACCEPTED)
        self._print(self._text.feed(ids[accepted:]), GIVEN)

    def finish(self) -> None:
        """Prints the bytes of an incomplete character, and ends the line."""
        self._print(self._text.flush(), GIVEN)
        self._console.print()

    def _print(self, text: str, style: str) -> None:
        if text:
            self._console.print(Text(visible(text), style), end="", soft_wrap=True)
            self._console.file.flush()


def visible(text: str) -> str:
    """`text` without characters that control the terminal, which a model may emit."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for character in text
    )


def is_ours(error: BaseException) -> bool:
    """Whether an error is one of ours about the input; any other is a bug."""
    kinds = (ValueError, TypeError, NotImplementedError, ImportError, OSError, RuntimeError)
    return isinstance(error, kinds) and str(error).startswith(("pdkernels.", "pdkernels: "))


def report(error: BaseException) -> None:
    """Prints an error's sentence to stderr."""
    text = in_flags(str(error), FLAGS)
    typed = "|".join(map(re.escape, FLAGS.values()))
    if RUNNING and typed:  # it was the command that took the argument, and no op: these have one name
        text = re.sub(rf"^pdkernels\.\w+\.[\w.]+: (?=({typed}) must )", f"pdkernels.{RUNNING[0]}: ", text)
    Console(stderr=True, highlight=False).print(Text.assemble(("error: ", "bold red"), text), soft_wrap=True)


RUNNING: list[str] = []
"""The name of the running command."""

FLAGS: dict[str, str] = {}
"""What is typed for each argument in Python: "--max-new-tokens" for "max_new_tokens", "--option pool=" for an option of
a method."""


def in_flags(text: str, flags: Mapping[str, str]) -> str:
    """An error's sentence with the options of the command line in place of Python's arguments.

    >>> in_flags("lower max_new_tokens, or pass overflow='warn'", {"max_new_tokens": "--max-new-tokens", "overflow": "--overflow"})
    'lower --max-new-tokens, or pass --overflow warn'

    >>> in_flags("pdkernels.x: seed must be an int. It accepts: seed, pool.", {"seed": "--seed", "pool": "--option pool="})
    'pdkernels.x: --seed must be an int. It accepts: --seed, --option pool=.'
    """

    def listed(match: re.Match[str]) -> str:
        return match[1] + ", ".join(flags.get(name, name) for name in match[2].split(", "))

    text = re.sub(r"(^pdkernels[\w.]*: |\bPass )([a-z]\w*)(?= must |, or )", listed, text)
    text = re.sub(r"(\bIt accepts: |\bThe options: )([\w, ]+)", listed, text)

    def flag(match: re.Match[str]) -> str:
        option, value = flags.get(match["name"], ""), match["value"]
        if value is None:  # "model", "seed" and names of options of methods are English, too
            return match[0] if "_" not in match["name"] or option.endswith("=") else option or match[0]
        return f"{option}{'' if option.endswith('=') else ' '}{value.strip(chr(39))}" if option else match[0]

    return re.sub(r"(?<![\w.'-])(?P<name>[a-z]\w*)(?:=(?P<value>'[^']*'|[\w.+-]*\w))?(?![\w=-])", flag, text)


def show_warning(warning: Warning | str, *_: Any, **__: Any) -> None:
    """Prints a warning's sentence to stderr, in place of Python's two lines."""
    sentence = Text.assemble(("warning: ", "bold yellow"), in_flags(str(warning), FLAGS))
    Console(stderr=True, highlight=False).print(sentence, soft_wrap=True)


@contextmanager
def errors_reported(output: Output | None = None) -> Iterator[None]:
    """Turns errors into one sentence. Exit code 2 is for arguments that were refused before `output` printed anything,
    1 for other failures, such as a full disk."""
    try:
        yield
    except (ValueError, TypeError, NotImplementedError, ImportError, OSError, RuntimeError) as error:
        if not is_ours(error):
            raise
        report(error)
        failed = isinstance(error, (OSError, RuntimeError)) and not isinstance(error, NotImplementedError)
        raise typer.Exit(1 if failed or (output is not None and output.printed) else 2) from None


def load(
    command: str,
    model: str,
    device: str,
    dtype: str | None,
    packed: bool | None,
    cache_dtype: str | None,
    drafter: str | None = None,
    adapter: str | None = None,
) -> Any:
    """The model that the command line names, with its drafter, and its adapter under the name of the folder. `packed`
    and `cache_dtype` are for the model alone."""
    if cache_dtype is not None:
        names = " or ".join(_CACHE_DTYPES)
        check(cache_dtype in _CACHE_DTYPES, command, "--cache-dtype", f"be {names}", repr(cache_dtype[:40]))
    placement = _asked(command, device, dtype)
    options = placement if packed is None else {**placement, "packed": packed}
    options = options if cache_dtype is None else {**options, "cache_dtype": _CACHE_DTYPES[cache_dtype]}
    language_model: Any = models.load(model, **options)
    if adapter is not None:
        models.load_adapter(language_model, adapter, adapter)
    if drafter is not None:
        language_model.drafters = dict([load_drafter(command, model, language_model, drafter, device, dtype)])
    return language_model


def needs_chats(command: str, tokenizer: Any, model: str) -> None:
    """A model that only continues texts is refused before anything is asked of it."""
    chats = hasattr(tokenizer, "encode_chat") and getattr(tokenizer, "chat_template", True) is not None
    check(chats, command, "--model", "have a chat template", model, "Use generate to continue a text.")


def load_drafter(
    command: str, model: str, target: Any, drafter: str, device: str, dtype: str | None
) -> tuple[str, Any]:
    """A drafter that the command line names, for the `target` that it calls `model`, after the method that it is
    for."""
    FLAGS["name_or_path"] = "--drafter"  # in the errors of both loaders
    if drafter_method(drafter) or is_own_folder(model, drafter):
        head = models.load_drafter(drafter, target)
        return head.method, head
    return "draft_model", models.load(drafter, **_asked(command, device, dtype))


def _asked(command: str, device: str, dtype: str | None) -> dict[str, Any]:
    placement = {"dtype": named_dtype(command, dtype), "device": named_device(command, device)}
    return {name: value for name, value in placement.items() if value not in (None, "cpu")}


def block_size_of(command: str, value: str | None) -> int | str | None:
    """What ``--block-size`` says: a number, or "auto"."""
    if value in (None, "auto"):
        return value
    is_integer = value.removeprefix("-").isdecimal() and len(value) < 20
    check(is_integer, command, "--block-size", "be a number or auto", repr(value[:40]))
    return int(value)


def check_file(command: str, option: str, path: Path) -> None:
    """Refuses, before anything runs, a file that could not be written at the end."""
    check(not path.is_dir(), command, option, "be a file", f"the folder {path}")
    check(path.parent.is_dir(), command, option, "lie in a folder that exists", str(path), "Make the folder first.")
    writable = os.access(path if path.exists() else path.parent, os.W_OK)
    check(writable, command, option, "be a file that can be written", str(path))


@contextmanager
def writing(command: str, option: str, path: Path) -> Iterator[None]:
    """Names the option whose file cannot be written."""
    try:
        yield
    except OSError as error:
        actual = f"{path} ({error.strerror})"
        raise OSError(message(command, option, "be a file that can be written", actual)) from error


def named_device(command: str, name: str) -> str:
    """The device that the command line names; `load` refuses one that torch does not find."""
    check(re.fullmatch(r"cpu|cuda(:\d+)?", name) is not None, command, "--device", "be cpu or cuda", repr(name[:40]))
    return name


def named_dtype(command: str, name: str | None) -> torch.dtype | None:
    """The dtype that the command line names."""
    if name is not None:
        check_choice(command, "--dtype", name, list(DTYPES))
    return None if name is None else DTYPES[name]


def use_threads(threads: int | None, language_models: Sequence[Any]) -> None:
    """Sets the requested number of threads; by default one for tiny models, else torch's default."""
    tiny = all(sum(parameter.numel() for parameter in model.parameters()) < _TINY for model in language_models)
    if threads is not None or tiny:
        torch.set_num_threads(threads or 1)
