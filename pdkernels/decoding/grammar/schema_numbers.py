"""Numbers of JSON schemas as expressions: bounds, steps and formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdkernels.decoding.grammar.language import NOTHING, Expression, both
from pdkernels.decoding.grammar.numbers import Range, integers, multiples, numbers
from pdkernels.decoding.grammar.schema_merge import unsupported

_INTEGER_FORMATS: dict[str, tuple[int | None, int | None]] = {
    "int8": (-(2**7), 2**7 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint8": (0, 2**8 - 1),
    "uint16": (0, 2**16 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**64 - 1),
    "uint": (0, None),
    "float": (None, None),
    "double": (None, None),
}
"""OpenAPI's and Rust's."""
_MAX_STEP = 2_000
_MAX_LOW = 10**40  # each digit is a state


def number_of(kind: str, schema: Mapping[str, Any], place: str) -> Expression:
    """The numbers of a schema, whose kind is "integer" or "number"."""
    low, high = schema.get("minimum"), schema.get("maximum")
    names = schema.get("format", ())
    for name in (names,) if isinstance(names, str) else names:
        known = name in _INTEGER_FORMATS
        unsupported(not known, f"{place}/format", f"{name!r}", f"Of numbers known: {', '.join(_INTEGER_FORMATS)}.")
        least, most = _INTEGER_FORMATS[name]
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
    few = kind == "number" and made == NOTHING and any(inside.halves)
    unsupported(far or few, place, f"numbers from {low} to {high}", "Their texts have too many digits.")
    return both(made, multiples(int(step)), f"the schema at {place}") if "multipleOf" in schema else made
