"""Strings of JSON schemas as expressions: escapes, lengths, patterns and formats."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from pdkernels.grammar.language import (
    NOTHING,
    Alt,
    Chars,
    Expression,
    Machine,
    Repeat,
    Seq,
    Subsequence,
    both,
    complement,
    normal,
    sequence,
    text,
)
from pdkernels.grammar.regex import parsed
from pdkernels.grammar.schema_formats import ANY, PATTERNS
from pdkernels.grammar.schema_keywords import counts
from pdkernels.grammar.schema_merge import unsupported

_CONTROL = ((0, 31),)
_PLAIN = complement(normal([*_CONTROL, (34, 34), (92, 92)]))
_ESCAPES = {34: '\\"', 92: "\\\\", 8: "\\b", 9: "\\t", 10: "\\n", 12: "\\f", 13: "\\r"}
CHARACTER: Expression = Alt(
    (Chars(_PLAIN), Seq((text("\\"), Chars(normal((ord(one), ord(one)) for one in '"\\bfnrt')))))
)
"""One character of a string, as `json.dumps` writes it."""


@lru_cache(maxsize=256)  # the same object: equal endings of objects are then one part of an automaton
def string(least: int, most: int | None) -> Expression:
    """Any string of `least` to `most` characters."""
    return sequence('"', Repeat(CHARACTER, least, most), '"')


def matching(pattern: str, wide: bool = False) -> Expression:
    """The strings in which a pattern is found, as `parsed` reads it."""
    return quoted(parsed(pattern, search=True, wide=wide))


def of_format(name: str) -> Expression:
    """Strings of a format."""
    return quoted(parsed(PATTERNS[name]))


def quoted(part: Expression) -> Expression:
    """The strings whose values are the texts of `part`."""
    return sequence('"', escaped(part), '"')


def escaped(part: Expression) -> Expression:
    """The texts of `part` inside the quotes of JSON."""
    if isinstance(part, Seq):
        return Seq(tuple(map(escaped, part.parts)))
    if isinstance(part, Alt):
        return Alt(tuple(map(escaped, part.parts)))
    if isinstance(part, Repeat):
        return part._replace(part=escaped(part.part))
    assert not isinstance(part, (Machine, Subsequence))  # patterns have none
    inside = [(max(first, low), min(last, high)) for first, last in part.ranges for low, high in _PLAIN]
    plain = normal((first, last) for first, last in inside if first <= last)
    written = [
        text(escape) for point, escape in _ESCAPES.items() if any(first <= point <= last for first, last in part.ranges)
    ]
    return Alt((*((Chars(plain),) if plain else ()), *written))


def string_of(schema: Mapping[str, Any], place: str, wide: bool = False) -> Expression:
    """The strings of a schema; `wide`: those that others are told from."""
    parts: list[Expression] = []
    for name in ("pattern", "format"):
        given = schema.get(name, ())
        for one in (given,) if isinstance(given, str) else given:
            if name == "format":
                if one in ANY:
                    continue
                words = f"Known: {', '.join(sorted([*PATTERNS, *ANY]))}."
                unsupported(one not in PATTERNS, f"{place}/format", f"{one!r}", words)
            parts.append(of_format(one) if name == "format" else matching(one, wide))
    least, most = counts(schema, "minLength", "maxLength", place)
    if most is not None and most < least:
        return NOTHING
    if least > 0 or most is not None or not parts:
        parts.append(string(least, most))
    made = parts[0]
    for part in parts[1:]:
        made = both(made, part, f"the schema at {place}")
    return made
