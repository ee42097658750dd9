"""The grammar of the command line: one of four options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pdkernels._validation import refuse, sentence
from pdkernels.decoding import Grammar


def grammar_of(
    command: str,
    json_schema: str | None,
    regex: str | None,
    choice: list[str] | None,
    ebnf: Path | None,
    depth: str | None = None,
    **of_schemas: str | None,
) -> Grammar | None:
    """The grammar that one of the options asks for; None without any. `depth` and `of_schemas` are
    options of `Grammar.json_schema`, None: not given."""
    values = {"--json-schema": json_schema, "--regex": regex, "--choice": choice or None, "--ebnf": ebnf}
    chosen = [name for name, value in values.items() if value is not None]
    refuse(len(chosen) > 1, command, f"{' and '.join(chosen)} exclude each other", "Give one of them.")
    options: dict[str, Any] = {name: value for name, value in of_schemas.items() if value is not None}
    for name in options if json_schema is None else ():
        refuse(True, command, f"--{name.replace('_', '-')} is an option of --json-schema", "Give both.")
    fault = "--depth is an option of --json-schema and --ebnf"
    refuse(depth is not None and json_schema is None and ebnf is None, command, fault, "Give one of them.")
    if depth is not None:
        number = depth.isascii() and depth.isdecimal() and len(depth) < 4
        refuse(not number and depth != "any", command, f"--depth must be a number or 'any', got {depth!r}")
        options["depth"] = int(depth) if number else None
    if json_schema is not None:
        inline = json_schema.lstrip().startswith(("{", "true", "false"))
        source = json_schema if inline else _read(command, "--json-schema", Path(json_schema))
        return Grammar.json_schema(source, **options)
    if regex is not None:
        return Grammar.regex(regex)
    if choice:
        return Grammar.choice(choice)
    return None if ebnf is None else Grammar.ebnf(_read(command, "--ebnf", ebnf), **options)


def _read(command: str, option: str, path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ValueError(sentence(command, f"{option} names {str(path)!r}, which cannot be read: {reason}")) from None
