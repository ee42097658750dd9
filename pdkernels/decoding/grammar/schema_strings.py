"""Strings of JSON schemas as expressions: escapes, lengths, patterns and formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdkernels.decoding.grammar.language import (
    NOTHING,
    Alt,
    Chars,
    Expression,
    Machine,
    Repeat,
    Seq,
    both,
    complement,
    normal,
    sequence,
    text,
)
from pdkernels.decoding.grammar.regex import parsed
from pdkernels.decoding.grammar.schema_keywords import counts
from pdkernels.decoding.grammar.schema_merge import unsupported

_CONTROL = ((0, 31),)
_PLAIN = complement(normal([*_CONTROL, (34, 34), (92, 92)]))
_ESCAPES = {34: '\\"', 92: "\\\\", 8: "\\b", 9: "\\t", 10: "\\n", 12: "\\f", 13: "\\r"}
CHARACTER: Expression = Alt(
    (Chars(_PLAIN), Seq((text("\\"), Chars(normal((ord(one), ord(one)) for one in '"\\bfnrt')))))
)
"""One character of a string, as `json.dumps` writes it."""

_DAY = r"(0[1-9]|1\d|2[0-8])"
_DATE = rf"[1-9]\d{{3}}-((0[1-9]|1[0-2])-{_DAY}|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_LABEL = r"[a-z0-9]{1,12}(-[a-z0-9]{1,12}){0,3}"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,3}}\.[a-z]{{2,8}}"
_AFTER = r"(\?[A-Za-z0-9_.~=&-]*)?(#[A-Za-z0-9_.~/-]*)?"
_PATH = r"(/[A-Za-z0-9_.~-]*)*"
_URI = rf"(https?|ftp)://{_HOST}(:[1-9]\d{{0,3}})?{_PATH}{_AFTER}"
_UNITS = r"(\d{1,4}H(\d{1,4}M)?(\d{1,4}S)?|\d{1,4}M(\d{1,4}S)?|\d{1,4}S)"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": rf"P(\d{{1,4}}(Y(\d{{1,2}}M)?(\d{{1,3}}D)?|M(\d{{1,3}}D)?|D)(T{_UNITS})?|\d{{1,4}}W|T{_UNITS})",
    "uuid": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": r"[0-9a-f]{1,4}(:[0-9a-f]{1,4}){7}|([0-9a-f]{1,4}(:[0-9a-f]{1,4}){0,5})?::[0-9a-f]{1,4}",
    "email": r"[a-z0-9]+([._-][a-z0-9]+){0,3}@[a-z0-9]+(-[a-z0-9]+){0,2}(\.[a-z]{2,8}){1,3}",
    "hostname": _HOST,
    "uri": _URI,
    "uri-reference": rf"{_URI}|{_PATH}{_AFTER}",
    "json-pointer": r"(/([^~/\x00-\x1f]|~[01])*)*",
    "byte": r"([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?",
}
"""Patterns of texts that have a format; not all that have it."""
FORMATS |= {"url": FORMATS["uri"], "idn-email": FORMATS["email"], "idn-hostname": FORMATS["hostname"]}
FORMATS |= {"iri": FORMATS["uri"], "iri-reference": FORMATS["uri-reference"]}
ANY_FORMAT = frozenset({"binary", "password"})
"""Formats that every string has."""


def string(least: int, most: int | None) -> Expression:
    """Any string of `least` to `most` characters."""
    return sequence('"', Repeat(CHARACTER, least, most), '"')


def matching(pattern: str) -> Expression:
    """The strings in which a pattern is found."""
    return quoted(parsed(pattern, search=True))


def of_format(name: str) -> Expression:
    """Strings of a format."""
    return quoted(parsed(FORMATS[name]))


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
    assert not isinstance(part, Machine)  # patterns have none
    inside = [(max(first, low), min(last, high)) for first, last in part.ranges for low, high in _PLAIN]
    plain = normal((first, last) for first, last in inside if first <= last)
    written = [
        text(escape) for point, escape in _ESCAPES.items() if any(first <= point <= last for first, last in part.ranges)
    ]
    return Alt((*((Chars(plain),) if plain else ()), *written))


def string_of(schema: Mapping[str, Any], place: str) -> Expression:
    """The strings of a schema."""
    parts: list[Expression] = []
    for name, make in (("pattern", matching), ("format", of_format)):
        given = schema.get(name, ())
        for one in (given,) if isinstance(given, str) else given:
            if name == "format":
                if one in ANY_FORMAT:
                    continue
                words = f"Known: {', '.join(sorted([*FORMATS, *ANY_FORMAT]))}."
                unsupported(one not in FORMATS, f"{place}/format", f"{one!r}", words)
            parts.append(make(one))
    least, most = counts(schema, "minLength", "maxLength", place)
    if most is not None and most < least:
        return NOTHING
    if least > 0 or most is not None or not parts:
        parts.append(string(least, most))
    made = parts[0]
    for part in parts[1:]:
        made = both(made, part, f"the schema at {place}")
    return made
