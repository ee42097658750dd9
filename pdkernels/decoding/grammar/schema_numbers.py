"""Numbers of JSON schemas as expressions: bounds, steps and formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdkernels.decoding.grammar.language import NOTHING, Expression, both, is_nothing
from pdkernels.decoding.grammar.numbers import MAX_FRACTION, Range, integers, multiples, numbers
from pdkernels.decoding.grammar.schema_formats import OF_NUMBERS
from pdkernels.decoding.grammar.schema_merge import unsupported

_MAX_STEP = 2_000
_MAX_LOW = 10**40 - 1  # each digit is a state


def number_of(kind: str, schema: Mapping[str, Any], place: str) -> Expression:
    """The numbers of a schema, whose kind is "integer" or "number"."""
    low, high = schema.get("minimum"), schema.get("maximum")
    names = schema.get("format", ())
    for name in (names,) if isinstance(names, str) else names:
        known = name in OF_NUMBERS
        unsupported(not known, f"{place}/format", f"{name!r}", f"Of numbers known: {', '.join(OF_NUMBERS)}.")
        least, most = OF_NUMBERS[name]
        low = least if low is None else low if least is None else max(low, least)
        high = most if high is None else high if most is None else min(high, most)
        kind = "integer" if name not in ("float", "double") else kind
    step = schema.get("multipleOf", 1)
    whole = type(step) in (int, float) and step == int(step) and 1 <= step <= _MAX_STEP
    unsupported(not whole, f"{place}/multipleOf", f"multipleOf {step}", f"Whole numbers up to {_MAX_STEP} are.")
    beyond, before = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    above = beyond is not None and (low is None or beyond >= low)
    below = before is not None and (high is None or before <= high)
    low, high = (beyond if above else low), (before if below else high)
    inside = Range.of(low, high, above, below)
    far = any(half.low > _MAX_LOW for _, half in inside.halves)
    made = NOTHING if far else (numbers if kind == "number" else integers)(low, high, above=above, below=below)
    few = kind == "number" and is_nothing(made) and any(inside.halves)
    words = f"numbers that need more than {MAX_FRACTION} digits after the point, or {len(str(_MAX_LOW))} before it"
    unsupported(far or few, place, words)
    return both(made, multiples(int(step)), f"the schema at {place}") if "multipleOf" in schema else made
