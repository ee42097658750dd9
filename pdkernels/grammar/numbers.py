"""The texts of numbers in JSON: within bounds, which are exact decimals, and multiples of whole numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from functools import lru_cache
from typing import NamedTuple

from pdkernels.grammar.language import (
    EMPTY,
    NOTHING,
    Alt,
    Chars,
    Expression,
    Repeat,
    Seq,
    either,
    is_nothing,
    machine,
    optional,
    sequence,
    text,
)
from pdkernels.grammar.machines import smallest

DIGIT = Chars(((48, 57),))
_FIRST = Chars(((49, 57),))
_MAX_WHOLE = 15  # digits before a point where there is no bound: all of a double, and a text that ends
_MAX_BOUNDED = 20  # digits before a point below a bound: those of 64 bits
MAX_FRACTION = 10
_MAX_EXPONENT = 99
_FRACTION = sequence(".", Repeat(DIGIT, 1, MAX_FRACTION))
_E = Chars(((69, 69), (101, 101)))
_EXPONENT = Seq((_E, optional(Chars(((43, 43), (45, 45)))), Repeat(DIGIT, 1, 2)))
_DIGITS = Repeat(DIGIT, 1, None)
POINTED = optional(sequence(".", Repeat(Chars(((48, 48),)), 1, None)))
"""What may follow a whole number."""
SHORT = Seq(
    (
        optional(text("-")),
        Alt(
            (
                Seq((Repeat(DIGIT, 1, 15), POINTED)),
                sequence(Repeat(DIGIT, 1, 9), ".", Repeat(DIGIT, 1, 6), Repeat(Chars(((48, 48),)), 0, None)),
                sequence(Repeat(DIGIT, 1, 5), ".", Repeat(DIGIT, 1, 10)),
            )
        ),
    )
)
"""Numbers without an exponent whose digits a double keeps."""
_ANY_WHOLE = Alt((text("0"), Seq((_FIRST, Repeat(DIGIT, 0, None)))))
_WHOLE = Alt((text("0"), Seq((_FIRST, Repeat(DIGIT, 0, _MAX_WHOLE - 1)))))


class Range(NamedTuple):
    """The numbers from `low` to `high`, or above and below them; None: no bound."""

    low: Decimal | None = None
    high: Decimal | None = None
    above: bool = False
    below: bool = False

    @classmethod
    def of(cls, low: float | None, high: float | None, above: bool, below: bool) -> Range:
        """With numbers as JSON writes them."""
        return cls(None if low is None else _decimal(low), None if high is None else _decimal(high), above, below)

    def has(self, number: Decimal) -> bool:
        """Whether it has a number."""
        above = self.low is None or number > self.low or (number == self.low and not self.above)
        return above and (self.high is None or number < self.high or (number == self.high and not self.below))

    @property
    def halves(self) -> Iterator[tuple[str, _Half]]:
        """Its numbers without a sign and those with one, as numbers from 0 on."""
        low, high = (None if end is None else end.copy_negate() for end in (self.low, self.high))
        for sign, half in (("", self), ("-", Range(high, low, self.below, self.above))):
            start, above = Decimal(0), False
            if half.low is not None and half.low >= 0:
                start, above = half.low, half.above
            if half.high is None or start < half.high or (start == half.high and not (above or half.below)):
                yield sign, _Half(start, half.high, above, half.below)


def _decimal(value: float) -> Decimal:
    return Decimal(value if isinstance(value, int) else repr(value))


class _Half(NamedTuple):
    """The same, of numbers from 0 on."""

    low: Decimal
    high: Decimal | None
    above: bool
    below: bool

    def whole(self) -> tuple[int, int]:
        """Its first and its last whole number."""
        first = int(self.low.to_integral_value(ROUND_CEILING))
        first += self.above and first == self.low
        end = self.end(first)
        if self.high is None:
            return first, end - 1
        last = int(self.high.to_integral_value(ROUND_FLOOR))
        return first, min(last - (self.below and last == self.high), end - 1)

    def end(self, first: int) -> int:
        """A power of ten that numbers stay below, since their texts have to end."""
        return int(10 ** max(_MAX_WHOLE if self.high is None else _MAX_BOUNDED, len(str(first))))


@lru_cache(maxsize=256)
def integers(
    low: float | None, high: float | None, *, above: bool = False, below: bool = False, complete: bool = False
) -> Expression:
    """Whole numbers from `low` to `high`, or above and below them; None: no bound. They have no point and no exponent,
    and no sign where none is below 0. `complete`: without bounds, those of any number of digits."""
    if low is None and high is None:
        return Seq((optional(text("-")), _ANY_WHOLE if complete else _WHOLE))
    branches = []
    for sign, half in Range.of(low, high, above, below).halves:
        first, last = half.whole()
        if first <= last and (not sign or last > 0):
            branches.append(sequence(sign, _natural(first, last)))
    return smallest(either(branches), "the numbers")


def multiples(step: Decimal) -> Expression:
    """The multiples of a decimal, with any zeros before them and after their digits, and no exponent: a state for each
    remainder after so many digits of the fraction.

    >>> from pdkernels.grammar.language import compiled
    >>> [compiled(multiples(Decimal("0.25")), "it").accepts(text) for text in (b"-1.5", b"0.750", b"0.3", b"7")]
    [True, True, False, True]
    """
    sign, digits, exponent = step.as_tuple()
    assert isinstance(exponent, int)
    places, unit = max(0, -exponent), int("".join(map(str, digits))) * 10 ** max(0, exponent)
    minus, first, zeros = 1, 2, 2 + unit * (places + 1)
    at = [first + unit * place for place in range(places + 1)]
    """The states after so many digits of the fraction, those before the point first; of each remainder."""
    point = zeros + 1
    edges = [(0, 45, 45, minus), (zeros, 48, 48, zeros)]
    for digit in range(10):
        byte = 48 + digit
        edges += [(start, byte, byte, first + digit % unit) for start in (0, minus)]
        for remainder in range(unit):
            edges.append((first + remainder, byte, byte, first + (10 * remainder + digit) % unit))
            after = (10 * remainder + digit) % unit
            edges += [(at[place] + remainder, byte, byte, at[place + 1] + after) for place in range(1, places)]
            if places:
                edges.append((point + remainder, byte, byte, at[1] + after))
    if places:
        edges += [(first + remainder, 46, 46, point + remainder) for remainder in range(unit)]
        edges.append((at[places], 48, 48, zeros))
    else:
        edges += [(first, 46, 46, point), (point, 48, 48, zeros)]
    accepting = [zeros]
    for place, start in enumerate(at):
        scale = 10 ** (places - place)
        accepting += [start + remainder for remainder in range(unit) if remainder * scale % unit == 0]
    return machine(point + (unit if places else 1), edges, accepting)


@lru_cache(maxsize=256)
def numbers(
    low: float | None, high: float | None, *, above: bool = False, below: bool = False, complete: bool = False
) -> Expression:
    """Numbers from `low` to `high`, or above and below them, plain ones and those with an exponent; with bounds, one
    digit is before the point of the latter. `complete`: without bounds, those of any number of digits."""
    if low is None and high is None and complete:
        return Seq((optional(text("-")), _ANY_WHOLE, optional(sequence(".", _DIGITS)), optional(_EXPONENT)))
    if low is None and high is None:
        return Seq((optional(text("-")), _WHOLE, optional(_FRACTION), optional(_EXPONENT)))
    halves = Range.of(low, high, above, below).halves
    branches = [_joined(sign, branch) for sign, half in halves for branch in (*_plain(half), *_scientific(half))]
    return smallest(_some(branches), "the numbers")


def _plain(half: _Half) -> Iterator[Expression]:
    first, low = _parts(half.low)
    end = half.end(first)
    last, high = (end, "") if half.high is None else _parts(half.high)
    if first == last:
        yield _joined(str(first), _fraction(low, high, half))
        return
    yield _joined(str(first), _fraction(low, None, half))
    if first + 1 < min(last, end):
        yield Seq((_natural(first + 1, min(last, end) - 1), optional(_FRACTION)))
    if last < end:
        yield _joined(str(last), _fraction(None, high, half))


def _parts(number: Decimal) -> tuple[int, str]:
    """What is before the point of a number, and the digits after it."""
    integer, _, digits = f"{number:f}".partition(".")
    return int(integer), digits


def _scientific(half: _Half) -> Iterator[Expression]:
    """Numbers above 0 with an exponent and one digit before the point."""
    if half.high == 0:
        return
    low, first = _normalised(half.low, -_MAX_EXPONENT - 1)
    high, last = _normalised(half.high, _MAX_EXPONENT + 1)
    if first == last:
        yield _joined(_mantissa(low, high, half), _exponents(first, first))
        return
    yield _joined(_mantissa(low, None, half), _exponents(first, first))
    yield _joined(_mantissa(None, None, half), _exponents(first + 1, last - 1))
    yield _joined(_mantissa(None, high, half), _exponents(last, last))


def _normalised(number: Decimal | None, missing_exponent: int) -> tuple[str | None, int]:
    """The digits of a number and its exponent; None and `absent` of 0 and of no number."""
    return ("".join(map(str, number.as_tuple().digits)), number.adjusted()) if number else (None, missing_exponent)


def _mantissa(low: str | None, high: str | None, half: _Half) -> Expression:
    """A digit and a fraction from the digits of `low` to those of `high`; None: no bound."""
    first, last = int(low[0]) if low else 1, int(high[0]) if high else 9
    branches = []
    for digit in range(first, last + 1):
        bounds = low[1:] if low and digit == first else None, high[1:] if high and digit == last else None
        branches.append(_joined(str(digit), _fraction(*bounds, half)))
    return _some(branches)


def _exponents(first: int, last: int) -> Expression:
    first, last = max(first, -_MAX_EXPONENT), min(last, _MAX_EXPONENT)
    branches = []
    for sign, low, high in ((optional(text("+")), max(first, 0), last), (text("-"), max(-last, 0), -first)):
        if low <= high:
            branches += [Seq((sign, _natural(low, high)))]
            branches += [Seq((sign, text("0"), _natural(low, min(high, 9))))] if low < 10 else []
    return Seq((_E, Alt(tuple(branches)))) if branches else NOTHING


def _fraction(low: str | None, high: str | None, half: _Half) -> Expression:
    """A point and digits, or neither, from the digits of `low` to those of `high`; None: no bound."""
    return _or_end(low, high, half, _joined(".", _digits(low, high, half, MAX_FRACTION)))


def _or_end(low: str | None, high: str | None, half: _Half, digits: Expression) -> Expression:
    """More digits, or none where zeros are between the bounds, of which these digits are left."""
    may_end = low is None or not (half.above or low.strip("0"))
    may_end = may_end and (high is None or not half.below or high.strip("0") != "")
    return digits if not may_end else EMPTY if is_nothing(digits) else optional(digits)


def _digits(low: str | None, high: str | None, half: _Half, longest: int) -> Expression:
    """From one to `most` digits between bounds."""
    if longest == 0:
        return NOTHING
    if low is not None and not half.above and not low.strip("0"):
        low = None
    if low is None and high is None:
        return Repeat(DIGIT, 1, longest)
    first, last = 0 if low is None else int(low[:1] or 0), 9 if high is None else int(high[:1] or 0)
    branches = []
    for digit in range(first, last + 1):
        bounds = None if low is None or digit > first else low[1:], None if high is None or digit < last else high[1:]
        branches.append(_joined(str(digit), _or_end(*bounds, half, _digits(*bounds, half, longest - 1))))
    return _some(branches)


def _joined(first: Expression | str, second: Expression) -> Expression:
    empty = any(is_nothing(expression) for expression in (first, second) if not isinstance(expression, str))
    return NOTHING if empty else sequence(first, second)


def _some(branches: Iterable[Expression]) -> Expression:
    """One of those that have texts."""
    return either([branch for branch in branches if not is_nothing(branch)])


def _natural(low: int, high: int) -> Expression:
    """The texts of the numbers from `low` to `high`, 0 <= low <= high, without zeros before them."""
    branches: list[Expression] = []
    for digits in range(len(str(low)), len(str(high)) + 1):
        first, last = max(low, 10 ** (digits - 1) if digits > 1 else 0), min(high, 10**digits - 1)
        if first <= last:
            branches.append(_same_length(str(first), str(last)))
    return either(branches)


def _same_length(low: str, high: str) -> Expression:
    if not low:
        return EMPTY
    if set(low) == {"0"} and set(high) == {"9"}:
        return Repeat(DIGIT, len(low), len(low))
    first, last = int(low[0]), int(high[0])
    if first == last:
        return sequence(low[0], _same_length(low[1:], high[1:]))
    tail = len(low) - 1
    branches = [sequence(low[0], _same_length(low[1:], "9" * tail))]
    if last - first > 1:
        branches.append(Seq((Chars(((48 + first + 1, 48 + last - 1),)), Repeat(DIGIT, tail, tail))))
    branches.append(sequence(high[0], _same_length("0" * tail, high[1:])))
    return Alt(tuple(branches))
