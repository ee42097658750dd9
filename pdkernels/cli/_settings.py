"""The settings of a request, the fields of `SamplingParams`, as options of a command; and options in the form
NAME=VALUE."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import typer

from pdkernels._validation import check, refuse
from pdkernels.batch.ray import generate_files
from pdkernels.cli._terminal import FLAGS
from pdkernels.decoding import generate
from pdkernels.engine import Engine
from pdkernels.evaluation.sweep import parse_value
from pdkernels.generation.params import MAX_POSITIONS, SETTINGS, Kind, Setting

Command = TypeVar("Command", bound=Callable[..., None])

ONE_TEXT = {"n": "it shows one text", "logprobs": "it shows the text alone"}
"""Why commands that show a text refuse these settings."""
OF_REQUESTS = dict.fromkeys(ONE_TEXT, "each request has its own")
_FUNCTIONS: tuple[Callable[..., Any], ...] = (generate, Engine.submit, generate_files)
_ARGUMENTS = {name for function in _FUNCTIONS for name in inspect.signature(function).parameters}
RESERVED = _ARGUMENTS - SETTINGS.keys() - {"overflow"} | {"max_new_tokens", "adapter"}
"""Arguments of these functions that a command sets itself."""

_TYPES: dict[Kind, Any] = {"number": float, "integer": int, "integers": list[int], "strings": list[str]}
_JSON: tuple[Kind, ...] = ("sequences", "numbers by token", "tokens by place")


def takes_settings(refused: Mapping[str, str]) -> Callable[[Command], Command]:
    """Gives a command that takes ``**typed`` an option for each setting that it has no parameter for; the help leaves
    out those that are `refused`. Functions cannot be typed."""

    def decorate(command: Command) -> Command:
        *parameters, _ = inspect.signature(command, eval_str=True).parameters.values()
        existing = {parameter.name for parameter in parameters}
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters += [
            inspect.Parameter(name, keyword, default=None, annotation=_annotation(setting, name in refused))
            for name, setting in SETTINGS.items()
            if name not in existing and setting.kind in (*_TYPES, *_JSON)
        ]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def flag(setting: Setting) -> str:
    """The option of a setting; that of a list is in the singular, as it is given once for each item.

    >>> flag(SETTINGS["top_k"]), flag(SETTINGS["end_tokens"]), flag(SETTINGS["stop_strings"])
    ('--top-k', '--end-token', '--stop')
    """
    name = setting.name.removesuffix("s") if setting.kind == "integers" else setting.name
    return f"--{(setting.wire if setting.kind == 'strings' else name).replace('_', '-')}"


def _annotation(setting: Setting, hidden: bool) -> Any:
    """The annotation that makes its option for typer: its type, its range and the first sentence of its help."""
    text = re.split(r"; None\b|[:.] |\.$", setting.help)[0]
    bounds = [bound for bound in (setting.minimum, setting.maximum) if type(bound) is int and bound < MAX_POSITIONS]
    text += f" [{' .. '.join(map(str, bounds))}{'' if len(bounds) > 1 else ' or more'}]" if bounds else ""
    text += "; may be given several times." if setting.kind in ("integers", "strings") else "."
    option_fields: dict[str, Any] = {
        "help": text[0].upper() + text[1:],
        "hidden": hidden,
        "rich_help_panel": "Sampling",
    }
    if setting.kind in _JSON:
        return Annotated[str | None, typer.Option(flag(setting), metavar="JSON", parser=_json, **option_fields)]
    return Annotated[_TYPES[setting.kind] | None, typer.Option(flag(setting), **option_fields)]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise typer.BadParameter(f"{text[:40]!r} is not JSON.") from None


def read_settings(
    command: str,
    typed: Mapping[str, Any],
    assignments: Sequence[str] | None,
    options: Mapping[str, Any],
    refused: Mapping[str, str],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings and the options of the method that a command got, by options of its own and as NAME=VALUE.

    `refused`: settings that the command cannot follow, each with the reason.
    """
    repeated = {
        name for name, setting in SETTINGS.items() if setting.kind not in _JSON
    }  # [] is a flag that was left out
    settings = {
        name: value for name, value in typed.items() if value is not None and not (value == [] and name in repeated)
    }
    options = {name: value for name, value in options.items() if value is not None}
    options |= assigned_options(command, assignments or (), {*settings, *options}, RESERVED)
    settings |= {name: options.pop(name) for name in SETTINGS if name in options}
    for name, value in settings.items():
        setting = SETTINGS[name]
        fault = f"--option {name}= needs an object of Python, which cannot be typed"
        refuse(setting.kind in ("functions", "grammar"), command, fault)
        fault = f"{FLAGS.get(name) or f'--option {name}='} cannot be followed here: {refused.get(name)}"
        refuse(name in refused and setting.changes(value), command, fault)
        if isinstance(value, dict):  # whose keys are strings in JSON
            settings[name] = {int(key) if key.isdecimal() and len(key) < 20 else key: value[key] for key in value}
    return settings, options


def assigned_options(
    command: str, assignments: Sequence[str], typed_flags: Collection[str] = (), reserved: Collection[str] = ()
) -> dict[str, Any]:
    """Parses options in the form NAME=VALUE; a value is JSON, or a value as in a sweep. `taken`: options that were set
    by flags; `reserved`: arguments that the command sets.

    >>> assigned_options("generate", ["block-size=8", 'stop_strings=["a", "b"]', "threshold=none", "order=entropy"])
    {'block_size': 8, 'stop_strings': ['a', 'b'], 'threshold': None, 'order': 'entropy'}
    """
    options: dict[str, Any] = {}
    for text in assignments:
        name, sign, value = text.partition("=")
        check(bool(name and sign and value), command, "--option", "be NAME=VALUE", repr(text))
        name = name.replace("-", "_")
        typed = FLAGS.get(name, "")
        refuse(name in typed_flags, command, f"{name} is given twice, by {typed} and by --option")
        refuse(name in options, command, f"--option {name}= is given twice")
        remedy = f"Give {typed}." if typed else ""
        refuse(name in reserved, command, f"--option {name}= is not an option of a method", remedy)
        try:
            options[name] = json.loads(value)
        except (json.JSONDecodeError, RecursionError):
            options[name] = parse_value(value)
    return options
