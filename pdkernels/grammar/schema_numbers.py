"""Numbers of JSON schemas as expressions: bounds, steps and formats."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal, localcontext
from typing import Any, NamedTuple

from pdkernels.grammar.language import NOTHING, Expression, both, is_nothing
from pdkernels.grammar.numbers import MAX_FRACTION, Range, integers, multiples, numbers
from pdkernels.grammar.schema_formats import OF_NUMBERS
from pdkernels.grammar.schema_merge import unsupported

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
        if name not in OF_NUMBERS:
            beside_strings = "string" in schema.get("type", ("string",))  # it is for them
            supported = f"Of numbers known: {', '.join(OF_NUMBERS)}."
            unsupported(not beside_strings, f"{place}/format", f"{name!r}", supported)
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
    steps = schema.get("multipleOf", ())
    exact = Decimal(repr(value))
    with localcontext() as context:
        context.prec = 1000  # more than doubles have digits
        is_multiple = all(
            exact % Decimal(repr(step)) == 0 for step in (steps if isinstance(steps, tuple) else (steps,))
        )
    return (
        is_multiple
        and Range.of(*bounds[1:]).has(exact)
        and (bounds.kind == "number" or exact == exact.to_integral_value())
    )


def number_of(kind: str, schema: Mapping[str, Any], place: str) -> Expression:
    """The numbers of a schema, whose kind is "integer" or "number"."""
    step = schema.get("multipleOf", 1)
    integral = type(step) in (int, float) and step == int(step) and 1 <= step <= _MAX_STEP
    unsupported(not integral, f"{place}/multipleOf", f"multipleOf {step}", f"Whole numbers up to {_MAX_STEP} are.")
    kind, low, high, above, below = _bounds_of(kind, schema, place)
    range_ = Range.of(low, high, above, below)
    far = any(half.low > _MAX_LOW for _, half in range_.halves)
    expression = NOTHING if far else (numbers if kind == "number" else integers)(low, high, above=above, below=below)
    few = kind == "number" and is_nothing(expression) and any(range_.halves)
    fault = f"numbers that need more than {MAX_FRACTION} digits after the point, or {len(str(_MAX_LOW))} before it"
    unsupported(far or few, place, fault)
    return both(expression, multiples(int(step)), f"the schema at {place}") if "multipleOf" in schema else expression
