"""Generates tables of the docs and signatures for type checkers from the registry of decoding methods.

``python -m scripts.methods`` writes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from pdkernels.decoding.method import SHARED, Method
from pdkernels.decoding.methods import METHODS
from pdkernels.generation.params import SETTINGS, names_of
from pdkernels.models.capabilities import CAPABILITIES

ROOT = Path(__file__).resolve().parent.parent
PAGES = tuple(ROOT / "docs" / name for name in ("decoding.md", "sampling.md", "server.md"))
REGISTRY = ROOT / "pdkernels" / "decoding" / "signatures.pyi"

REQUEST = {
    "params": "SamplingParams | None",
    "on_tokens": "OnTokens | None",
    "trace": "bool",
    "overflow": 'Literal["error", "warn"]',
    "infill": "bool",
}
KINDS = {"Prompt": "One", "Batch": "Many"}  # type of a single prompt, and of its result


def methods_table() -> str:
    """Every method, the models that it is for and its promise."""
    lines = ["| method | requires | as greedy | what it does |", "|---|---|---|---|"]
    for method in METHODS.values():
        models = ", ".join(name.replace("_", "-") for name in CAPABILITIES if name in method.requires)
        promise = "yes" if method.lossless else "no"
        lines.append(f"| `{method.name}` | {models} | {promise} | {method.summary} |")
    return "\n".join(lines)


def options_table() -> str:
    """Every option: those of one method, then those that several share."""
    lines = ["| method | option | |", "|---|---|---|"]
    for method in METHODS.values():
        name = f"`{method.name}`"
        for option in method.options.values():
            if not option.shared:
                lines.append(f"| {name} | `{option}` | {_cell(option.help)} |")
                name = ""
    name = "shared"
    for option, text in SHARED.items():
        lines.append(f"| {name} | `{option}` | {_cell(text)} |")
        name = ""
    return "\n".join(lines)


def follows(method: Method, setting: str) -> str:
    """ "yes", "no", or the part of a setting that a method follows."""
    if not method.refusal(setting, ((1, 2),)):
        return "yes"
    return "single tokens" if setting == "bad_words" else "no"


def settings_table() -> str:
    """Which settings of sampling each method follows; settings that the same methods follow share a column."""
    columns: dict[tuple[str, ...], list[str]] = {}
    for name in (*names_of("draw"), *names_of("filter"), "logprobs"):
        columns.setdefault(tuple(follows(method, name) for method in METHODS.values()), []).append(f"`{name}`")
    lines = [f"| method | {' | '.join(', '.join(names) for names in columns.values())} |"]
    lines.append("|---" * (1 + len(columns)) + "|")
    for place, name in enumerate(METHODS):
        lines.append(f"| `{name}` | {' | '.join(cells[place] for cells in columns)} |")
    return "\n".join(lines)


JSON = {
    "integers": "list of integers",
    "sequences": "list of lists of integers",
    "numbers by token": "object, from tokens to numbers",
    "tokens by place": "object, from places to tokens",
    "strings": "text, or a list of at most 16",
    "name": "text",
}
"""What a request has for a setting; numbers and integers are called so."""


def fields_table() -> str:
    """The settings that a request of the server can have."""
    lines = ["| field | value | setting | |", "|---|---|---|---|"]
    for setting in SETTINGS.values():
        minimum, maximum = setting.wire_bounds
        limits = [
            f"{word} {limit if isinstance(limit, int) else f'{limit:g}'}"
            for word, limit in (("from", minimum), ("to", maximum))
            if limit is not None
        ]
        value = " ".join([JSON.get(setting.kind, setting.kind), *limits])
        if setting.wire:
            lines.append(f"| `{setting.wire}` | {value} | `{setting.name}` | {_cell(setting.help)} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def page(text: str) -> str:
    """A page with its tables regenerated."""
    tables = {"methods": methods_table, "settings": settings_table, "options": options_table, "fields": fields_table}
    for name, made in tables.items():
        text = re.sub(f"(<!-- {name} -->\n).*?(?=<!-- /{name} -->)", _filled(made), text, flags=re.DOTALL)
    return text


def _filled(made: Callable[[], str]) -> Callable[[re.Match[str]], str]:
    return lambda match: f"{match[1]}{made()}\n"


def registry(text: str) -> str:
    """The registry's source with its signatures regenerated."""
    return re.sub(r"(?<=\n# -{117}\n).*", lambda _: signatures(), text, flags=re.DOTALL)


def signatures() -> str:
    """Options as `TypedDict`, a class for each method, and `generate` with each of them.

    A class inherits from the largest earlier one whose options it all has, with the same types.
    """
    settings = {setting.name: setting.type for setting in SETTINGS.values()}
    classes: dict[str, dict[str, str]] = {"Request": REQUEST}
    lines = ["", "One = DecodeResult[Tensor, str]", "Many = DecodeResult[list[Tensor], list[str]]"]
    lines += ["", "class Request(TypedDict, total=False):", *_fields(settings | REQUEST)]
    calls = []
    for method in METHODS.values():
        name = "".join(part.title() for part in method.name.split("_"))
        options = [option for option in method.options.values() if option.name not in SETTINGS]
        fields = REQUEST | {option.name: option.type for option in options}
        base = max(
            (other for other in classes if classes[other].items() <= fields.items()), key=lambda n: len(classes[n])
        )
        own = {field: kind for field, kind in fields.items() if field not in classes[base]}
        classes[name] = fields
        lines += ["", f"class {name}({base}, total=False):", *_fields(own)]
        default = ' = "autoregressive"' if method.name == "autoregressive" else ""
        arguments = f'method: Literal["{method.name}"]{default}, **options: Unpack[{name}]'
        calls += [_call(prompt, arguments, result) for prompt, result in KINDS.items()]
    calls += [_call(prompt, "method: Method, **options: Any", result) for prompt, result in KINDS.items()]
    calls += [_call("Mapping[str, Any]", "method: str | Method = ..., **options: Any", "DecodeResult[Any, Any]")]
    lines += ["", "class Generate(Protocol):", '    """The type of `pdkernels.decoding.generate`."""']
    return "\n".join([*lines, "", *(line for call in calls for line in call), ""])


def _fields(fields: dict[str, str]) -> list[str]:
    return [line for name, kind in fields.items() for line in _field(name, kind)] or ["    pass"]


def _field(name: str, kind: str) -> list[str]:
    line = f"    {name}: {kind}"
    return [line] if len(line) <= 120 else [f"    {name}: (", f"        {kind}", "    )"]


def _call(prompt: str, options: str, result: str) -> list[str]:
    """`generate` for one kind of prompt and one method, with the line breaks of the project's formatter."""
    arguments, end = ["self", "model: Any", f"prompt: {prompt}", *options.split(", ")], f") -> {result}: ..."
    line = f"    def __call__({', '.join(arguments)}{end}"
    second = f"        {', '.join(arguments)}"
    if len(line) <= 120:
        return ["    @overload", line]
    return [
        "    @overload",
        "    def __call__(",
        *([second] if len(second) <= 120 else _broken(arguments)),
        f"    {end}",
    ]


def _broken(arguments: list[str]) -> list[str]:
    return [f"        {argument}," for argument in arguments]


def main() -> None:
    for path, made in (*((path, page) for path in PAGES), (REGISTRY, registry)):
        path.write_text(made(path.read_text()))


if __name__ == "__main__":
    main()
