"""Numbers of JSON schemas as expressions: bounds, steps and formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdkernels.decoding.grammar.language import Expression, both
from pdkernels.decoding.grammar.numbers import integers, multiples, numbers
from pdkernels.decoding.grammar.schema_merge import unsupported

_INTEGER_FORMATS: dict[str, tuple[int | None, int | None]] = {
    "int8": (-(2**7), 2**7 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "int64": (None, None),
    "uint8": (0, 2**8 - 1),
    "uint16": (0, 2**16 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, None),
    "uint": (0, None),
    "float": (None, None),
    "double": (None, None),
}
"""OpenAPI's and Rust's; whole numbers have at most 15 digits anyway."""
_MAX_STEP = 2_000


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
    if "multipleOf" in schema:
        kind = "integer"
    beyond, before = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    above = beyond is not None and (low is None or beyond >= low)
    below = before is not None and (high is None or before <= high)
    low, high = (beyond if above else low), (before if below else high)
    if kind == "number":
        return numbers(low, high, above=above, below=below)
    if above and low is not None:
        low = int(low // 1) + 1
    if below and high is not None:
        high = int(-(-high // 1)) - 1
    made = integers(low, high)
    return made if step == 1 else both(made, multiples(int(step)), f"the schema at {place}")
