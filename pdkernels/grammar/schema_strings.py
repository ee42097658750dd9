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
    (Chars(_PLAIN), Seq((text("\\"), Chars(normal((ord(char), ord(char)) for char in '"\\bfnrt')))))
)
"""One character of a string, as `json.dumps` writes it."""


@lru_cache(maxsize=256)  # the same object: equal endings of objects are then one part of an automaton
def string(minimum: int, maximum: int | None) -> Expression:
    """Any string of `least` to `most` characters."""
    return sequence('"', Repeat(CHARACTER, minimum, maximum), '"')


def matching(pattern: str, wide: bool = False) -> Expression:
    """The strings in which a pattern is found, as `parsed` reads it."""
    return quoted(parsed(pattern, search=True, wide=wide))


def of_format(name: str) -> Expression:
    """Strings of a format."""
    return quoted(parsed(PATTERNS[name]))


def quoted(expression: Expression) -> Expression:
    """The strings whose values are the texts of `expression`."""
    return sequence('"', escaped(expression), '"')


def escaped(expression: Expression) -> Expression:
    """The texts of `expression` inside the quotes of JSON."""
    if isinstance(expression, Seq):
        return Seq(tuple(map(escaped, expression.items)))
    if isinstance(expression, Alt):
        return Alt(tuple(map(escaped, expression.items)))
    if isinstance(expression, Repeat):
        return expression._replace(item=escaped(expression.item))
    assert not isinstance(expression, (Machine, Subsequence))  # patterns have none
    overlaps = [(max(first, low), min(last, high)) for first, last in expression.ranges for low, high in _PLAIN]
    unescaped = normal((first, last) for first, last in overlaps if first <= last)
    escapes = [
        text(escape)
        for point, escape in _ESCAPES.items()
        if any(first <= point <= last for first, last in expression.ranges)
    ]
    return Alt((*((Chars(unescaped),) if unescaped else ()), *escapes))


def string_of(schema: Mapping[str, Any], place: str, wide: bool = False) -> Expression:
    """The strings of a schema; `wide`: those that others are told from."""
    conjuncts: list[Expression] = []
    for name in ("pattern", "format"):
        names = schema.get(name, ())
        for entry in (names,) if isinstance(names, str) else names:
            if name == "format":
                if entry in ANY:
                    continue
                supported = f"Known: {', '.join(sorted([*PATTERNS, *ANY]))}."
                unsupported(entry not in PATTERNS, f"{place}/format", f"{entry!r}", supported)
            conjuncts.append(of_format(entry) if name == "format" else matching(entry, wide))
    minimum, maximum = counts(schema, "minLength", "maxLength", place)
    if maximum is not None and maximum < minimum:
        return NOTHING
    if minimum > 0 or maximum is not None or not conjuncts:
        conjuncts.append(string(minimum, maximum))
    expression = conjuncts[0]
    for conjunct in conjuncts[1:]:
        expression = both(expression, conjunct, f"the schema at {place}")
    return expression
