"""Numbers of JSON schemas as expressions: bounds, steps and formats."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal, localcontext
from typing import Any, NamedTuple

from pdkernels.grammar.language import NOTHING, Alt, Expression, Seq, is_nothing
from pdkernels.grammar.numbers import MAX_FRACTION, POINTED, SHORT, Range, integers, multiples, numbers
from pdkernels.grammar.products import both, without
from pdkernels.grammar.schema_formats import OF_NUMBERS
from pdkernels.grammar.schema_merge import FRACTIONAL, NO_MULTIPLE, unsupported

_MAX_STEP = 2_000
_MAX_LOW = 10**40 - 1  # each digit is a state


class _Bounds(NamedTuple):
    """What a schema says of numbers: those of `numbers`, of this kind."""

    kind: str
    low: float | None
    high: float | None
    above: bool
    below: bool


def _bounds_of(kind: str, schema: Mapping[str, Any], place: str) -> _Bounds:
    low, high = schema.get("minimum"), schema.get("maximum")
    names = schema.get("format", ())
    for name in (names,) if isinstance(names, str) else names:
        if name not in OF_NUMBERS:  # it is for strings
            continue
        minimum, maximum = OF_NUMBERS[name]
        low = minimum if low is None else low if minimum is None else max(low, minimum)
        high = maximum if high is None else high if maximum is None else min(high, maximum)
        kind = "integer" if name not in ("float", "double") else kind
    beyond, before = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    above = beyond is not None and (low is None or beyond >= low)
    below = before is not None and (high is None or before <= high)
    return _Bounds(kind, beyond if above else low, before if below else high, above, below)


def has_number(schema: Mapping[str, Any], value: float, place: str) -> bool:
    """Whether a number is within what a schema says of numbers."""
    bounds = _bounds_of("number", schema, place)
    exact = Decimal(repr(value))
    is_whole = exact == exact.to_integral_value()
    with localcontext() as context:
        context.prec = 1000  # more than doubles have digits
        is_multiple = all(exact % Decimal(repr(step)) == 0 for step in _steps(schema, "multipleOf"))
        is_denied = any(exact % Decimal(repr(step)) == 0 for step in _steps(schema, NO_MULTIPLE))
    has_steps = is_multiple and not is_denied and not (is_whole and FRACTIONAL in schema)
    return has_steps and Range.of(*bounds[1:]).has(exact) and (bounds.kind == "number" or is_whole)


def _steps(schema: Mapping[str, Any], name: str) -> tuple[float, ...]:
    steps = schema.get(name, ())
    return steps if isinstance(steps, tuple) else (steps,)


def number_of(
    kind: str, schema: Mapping[str, Any], place: str, *, complete: bool = False, pointed: bool = False
) -> Expression:
    """The numbers of a schema, whose kind is "integer" or "number"; `complete`: of any number of digits, where there are
    no bounds; `pointed`: whole numbers may be written as ``1.0``."""
    kind, low, high, above, below = _bounds_of(kind, schema, place)
    if FRACTIONAL in schema and kind == "integer":
        return NOTHING
    range_ = Range.of(low, high, above, below)
    far = any(half.low > _MAX_LOW for _, half in range_.halves)
    within = numbers if kind == "number" else integers
    expression = NOTHING if far else within(low, high, above=above, below=below, complete=complete)
    few = kind == "number" and is_nothing(expression) and any(range_.halves)
    fault = f"numbers that need more than {MAX_FRACTION} digits after the point, or {len(str(_MAX_LOW))} before it"
    unsupported(far or few, place, fault)
    source, steps = f"the schema at {place}", _steps(schema, "multipleOf")
    excluded_steps = _steps(schema, NO_MULTIPLE)
    exact = bool(steps or excluded_steps or FRACTIONAL in schema)  # what a double rounds would be told wrongly
    if kind == "number" and exact:
        expression = both(expression, SHORT, source)
    if pointed and kind == "integer" and not is_nothing(expression):
        with_point: Expression = Seq((expression, POINTED))
        if exact or low is not None or high is not None:
            with_point = both(with_point, SHORT, source)
        expression = Alt((expression, with_point))
    for step in steps:
        expression = both(expression, _multiples(step, f"{place}/multipleOf"), source)
    excluded = [_multiples(step, f"{place}/not/multipleOf") for step in excluded_steps]
    excluded += [multiples(Decimal(1))] if FRACTIONAL in schema else []
    for machine in excluded:
        expression = without(expression, machine, source)
    return expression


def _multiples(step: float, place: str) -> Expression:
    exact = Decimal(repr(step)).normalize()
    _, digits, exponent = exact.as_tuple()
    assert isinstance(exponent, int)
    size = int("".join(map(str, digits))) * (10 ** max(0, exponent))
    small = exponent > -MAX_FRACTION and size * (2 + max(0, -exponent)) <= 2 * _MAX_STEP
    unsupported(
        not small, place, f"multipleOf {step}", f"Whole numbers up to {_MAX_STEP} are, and decimals of few digits."
    )
    return multiples(exact)
