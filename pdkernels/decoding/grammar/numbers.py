"""The texts of whole numbers in a range, and of numbers in JSON."""

from __future__ import annotations

import math

from pdkernels.decoding.grammar.language import (
    EMPTY,
    NOTHING,
    Alt,
    Chars,
    Expression,
    Machine,
    Repeat,
    Seq,
    either,
    optional,
    sequence,
    text,
)

DIGIT = Chars(((48, 57),))
_FIRST = Chars(((49, 57),))
_MOST = 15  # digits of a number without bounds: all of a double, and a text that ends
_FRACTION = sequence(".", Repeat(DIGIT, 1, 10))
_EXPONENT = Seq((Chars(((69, 69), (101, 101))), optional(Chars(((43, 43), (45, 45)))), Repeat(DIGIT, 1, 2)))
_WHOLE = Alt((text("0"), Seq((_FIRST, Repeat(DIGIT, 0, _MOST - 1)))))


def integers(low: float | None, high: float | None) -> Expression:
    """Whole numbers from `low` to `high`; None: no bound but that of 15 digits."""
    if low is None and high is None:
        return Seq((optional(text("-")), _WHOLE))
    most = 10**_MOST - 1
    first = -most if low is None else math.ceil(low)
    last = most if high is None else math.floor(high)
    if first > last:
        return NOTHING
    parts = []
    if first < 0:
        parts.append(sequence("-", _natural(max(1, -last), -first)))
    if last >= 0:
        parts.append(_natural(max(0, first), last))
    return either(parts)


def multiples(step: int) -> Expression:
    """The multiples of a whole number, with any zeros before them: a state for each remainder."""
    minus, first = 1, 2
    edges = [(0, 45, 45, minus)]
    for digit in range(10):
        byte = 48 + digit
        edges += [(start, byte, byte, first + digit % step) for start in (0, minus)]
        edges += [(first + left, byte, byte, first + (10 * left + digit) % step) for left in range(step)]
    return Machine(first + step, tuple(edges), (first,))


def numbers(low: float | None, high: float | None, *, above: bool = False, below: bool = False) -> Expression:
    """Numbers from `low` to `high`, or `above` and `below` them; with bounds, those whose whole part shows that they are inside."""
    if low is None and high is None:
        return Seq((optional(text("-")), _WHOLE, optional(_FRACTION), optional(_EXPONENT)))
    most = 10.0**_MOST
    first, last = -most if low is None else low, most if high is None else high
    start = math.floor(first) + 1 if above else math.ceil(first)
    end = math.ceil(last) - 1 if below else math.floor(last)
    parts = [integers(start, end)]
    up, down = _bounded(max(0, start), end - 1), _bounded(max(0, -end), -start - 1)
    parts += [Seq((up, _FRACTION))] if up != NOTHING else []
    parts += [sequence("-", down, _FRACTION)] if down != NOTHING else []
    return Alt(tuple(parts))


def _bounded(low: int, high: int) -> Expression:
    return NOTHING if low > high else _natural(low, high)


def _natural(low: int, high: int) -> Expression:
    """The texts of the numbers from `low` to `high`, 0 <= low <= high, without zeros before them."""
    parts: list[Expression] = []
    for digits in range(len(str(low)), len(str(high)) + 1):
        first, last = max(low, 10 ** (digits - 1) if digits > 1 else 0), min(high, 10**digits - 1)
        if first <= last:
            parts.append(_same_length(str(first), str(last)))
    return either(parts)


def _same_length(low: str, high: str) -> Expression:
    if not low:
        return EMPTY
    if set(low) == {"0"} and set(high) == {"9"}:
        return Repeat(DIGIT, len(low), len(low))
    first, last = int(low[0]), int(high[0])
    if first == last:
        return sequence(low[0], _same_length(low[1:], high[1:]))
    rest = len(low) - 1
    parts = [sequence(low[0], _same_length(low[1:], "9" * rest))]
    if last - first > 1:
        parts.append(Seq((Chars(((48 + first + 1, 48 + last - 1),)), Repeat(DIGIT, rest, rest))))
    parts.append(sequence(high[0], _same_length("0" * rest, high[1:])))
    return Alt(tuple(parts))
