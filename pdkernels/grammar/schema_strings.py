"""Strings of JSON schemas as expressions: escapes, lengths, patterns and formats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from pdkernels.grammar.budget import current
from pdkernels.grammar.language import (
    EMPTY,
    NOTHING,
    Alt,
    Chars,
    Expression,
    Machine,
    Ranges,
    Repeat,
    Seq,
    Subsequence,
    complement,
    normal,
    sequence,
    text,
)
from pdkernels.grammar.machines import smallest
from pdkernels.grammar.products import both
from pdkernels.grammar.regex import ANYTHING, parsed
from pdkernels.grammar.schema_formats import ANY, PATTERNS
from pdkernels.grammar.schema_keywords import counts
from pdkernels.grammar.schema_merge import unsupported

_CONTROL = ((0, 31),)
_PLAIN = complement(normal([*_CONTROL, (34, 34), (92, 92)]))
_ESCAPES = {34: '\\"', 92: "\\\\", 8: "\\b", 9: "\\t", 10: "\\n", 12: "\\f", 13: "\\r"}
_BY_NUMBER = complement(normal([(32, 126)]))
"""The characters that `json.dumps` writes as ``\\u00e9``, but for those that have a short escape."""
_HEX = [Chars(normal((ord(digit), ord(digit)) for digit in {f"{n:x}", f"{n:X}"})) for n in range(16)]


@lru_cache(maxsize=256)  # the same object: equal endings of objects are then one part of an automaton
def string(minimum: int, maximum: int | None, complete: bool = False) -> Expression:
    """Any string of `minimum` to `maximum` characters."""
    return sequence('"', Repeat(_any_character(complete), minimum, maximum), '"')


@lru_cache
def _any_character(complete: bool) -> Expression:
    """One character, as an automaton: bounds repeat it often."""
    return smallest(_character(ANYTHING.ranges, complete), "a character")


def matching(pattern: str, wide: bool = False, complete: bool = False) -> Expression:
    """The strings in which a pattern is found, as `parsed` reads it; the same expression all through a compile."""
    memo, key = current().memo, ("strings", pattern, wide, complete)
    if key not in memo:
        memo[key] = quoted(parsed(pattern, search=True, wide=wide), complete)
    expression: Expression = memo[key]
    return expression


@lru_cache(maxsize=128)
def of_format(name: str, complete: bool = False) -> Expression:
    """Strings of a format."""
    return quoted(parsed(PATTERNS[name]), complete)


def quoted(expression: Expression, complete: bool = False) -> Expression:
    """The strings whose values are the texts of `expression`; with `complete`, also those that write a character beyond
    ASCII, or a control character, by its number."""
    return sequence('"', escaped(expression, complete), '"')


def escaped(expression: Expression, complete: bool = False) -> Expression:
    """The texts of `expression` inside the quotes of JSON."""
    if isinstance(expression, Seq):
        return Seq(tuple(escaped(item, complete) for item in expression.items))
    if isinstance(expression, Alt):
        return Alt(tuple(escaped(item, complete) for item in expression.items))
    if isinstance(expression, Repeat):
        return expression._replace(item=escaped(expression.item, complete))
    assert not isinstance(expression, (Machine, Subsequence))  # patterns have none
    return _character(expression.ranges, complete)


@lru_cache(maxsize=256)
def _character(ranges: Ranges, complete: bool) -> Expression:
    """One character of a string."""
    unescaped = _common(ranges, _PLAIN)
    escapes: list[Expression] = [
        text(escape) for point, escape in _ESCAPES.items() if any(first <= point <= last for first, last in ranges)
    ]
    if complete:
        escapes += (sequence("\\u", number) for number in _numbers(_common(ranges, _BY_NUMBER)))
    return Alt((*((Chars(unescaped),) if unescaped else ()), *escapes))


def _common(first_ranges: Ranges, second_ranges: Ranges) -> Ranges:
    overlaps = [(max(first, low), min(last, high)) for first, last in first_ranges for low, high in second_ranges]
    return normal((first, last) for first, last in overlaps if first <= last)


def _numbers(ranges: Ranges) -> Iterator[Expression]:
    """The numbers of characters as four hexadecimal digits; beyond 65,535, of the two halves of a surrogate pair."""
    for first, last in ranges:
        if first <= 0xFFFF:
            yield from _hexadecimal(first, min(last, 0xFFFF), 4)
        if last > 0xFFFF:
            low, high = max(first, 0x10000) - 0x10000, last - 0x10000
            for start, end in _blocks(low, high):
                halves = (0xD800 + (start >> 10), 0xD800 + (end >> 10)), (0xDC00 + start % 1024, 0xDC00 + end % 1024)
                leading, trailing = (Alt(tuple(_hexadecimal(*half, 4))) for half in halves)
                yield sequence(leading, "\\u", trailing)


def _blocks(low: int, high: int) -> Iterator[tuple[int, int]]:
    """Ranges of numbers whose last ten bits are all there, or in which the others are the same."""
    if low >> 10 == high >> 10:
        yield low, high
        return
    first, last = -(-low // 1024) * 1024, (high + 1) // 1024 * 1024
    if low < first:
        yield low, first - 1
    if first < last:
        yield first, last - 1
    if last <= high:
        yield last, high


def _hexadecimal(low: int, high: int, digits: int) -> Iterator[Expression]:
    if digits == 0:
        yield EMPTY
        return
    unit = 16 ** (digits - 1)
    first, last = low // unit, high // unit
    if first == last or (low % unit == 0 and high % unit == unit - 1):
        digit = Chars(normal(bounds for value in range(first, last + 1) for bounds in _HEX[value].ranges))
        for later_digits in _hexadecimal(low % unit, high % unit, digits - 1):
            yield Seq((digit, later_digits))
        return
    middle = (first + 1) * unit if low % unit else last * unit
    yield from _hexadecimal(low, middle - 1, digits)
    yield from _hexadecimal(middle, high, digits)


def string_of(schema: Mapping[str, Any], place: str, wide: bool = False, complete: bool = False) -> Expression:
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
            conjuncts.append(of_format(entry, complete) if name == "format" else matching(entry, wide, complete))
    minimum, maximum = counts(schema, "minLength", "maxLength", place)
    if maximum is not None and maximum < minimum:
        return NOTHING
    if minimum > 0 or maximum is not None or not conjuncts:
        conjuncts.append(string(minimum, maximum, complete))
    expression = conjuncts[0]
    for conjunct in conjuncts[1:]:
        expression = both(expression, conjunct, f"the schema at {place}")
    return expression
