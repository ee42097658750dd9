"""Branches of a `oneOf`: whether a value can satisfy two of them, and which of them a `not` can exclude."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pdkernels.decoding.grammar.schema_keywords import TYPES, counts, kinds_of
from pdkernels.decoding.grammar.schema_merge import Flat, found_in, merged, property_of, same, together, unsupported

Flatten = Callable[[Any, str], Flat]

ENUMERATED = frozenset("type const enum".split())
OF_STRINGS = ENUMERATED | frozenset("pattern minLength maxLength".split())
OF_OBJECTS = frozenset("type properties required".split())


class _Fact(NamedTuple):
    """What tells a branch of a oneOf from others."""

    types: set[str]
    named: dict[str, list[Any]]
    """Required properties with listed values."""
    values: list[Any] | None
    """Its own listed values."""
    required: set[str]
    schema: Mapping[str, Any]

    def forbids(self, name: str) -> bool:
        return property_of(self.schema, name, self.schema.get("additionalProperties", True)) is False


def _differ(one: _Fact, other: _Fact) -> bool:
    """Whether no value satisfies both."""

    def apart(values: list[Any] | None, others: list[Any] | None) -> bool:
        return values is not None and others is not None and not any(same(a, b) for a in values for b in others)

    objects = one.types == other.types == {"object"}
    named = objects and any(apart(values, other.named.get(name)) for name, values in one.named.items())
    absent = objects and (any(map(other.forbids, one.required)) or any(map(one.forbids, other.required)))
    return not one.types & other.types or apart(one.values, other.values) or named or absent


def of_objects(schema: Mapping[str, Any]) -> bool:
    """Whether a schema speaks of objects alone, of what they must have and of properties."""
    return schema.keys() <= OF_OBJECTS and schema.keys() != {"type"} and schema.get("type", "object") == "object"


def holds(flat_of: Flatten, schema: Any, value: Any, place: str) -> bool:
    """Whether a value satisfies the schema of a `not`."""
    flat = flat_of(schema, f"{place}/not")
    if isinstance(flat, bool):
        return flat
    if "anyOf" in flat and len(flat) == 1:
        return any(holds(flat_of, one, value, place) for one in flat["anyOf"])
    stray = sorted(flat.keys() - OF_STRINGS)
    unsupported(bool(stray), f"{place}/not", f"{stray and stray[0]!r} in a not")
    fits = "type" not in flat or any(TYPES[kind](value) for kind in kinds_of({"type": flat["type"]}, place))
    fits = fits and ("const" not in flat or same(value, flat["const"]))
    fits = fits and ("enum" not in flat or any(same(value, one) for one in flat["enum"]))
    if isinstance(value, str):
        patterns = flat.get("pattern", ())
        least, most = counts(flat, "minLength", "maxLength", place)
        several = (patterns,) if isinstance(patterns, str) else patterns
        fits = fits and all(found_in(pattern, value) for pattern in several)
        fits = fits and least <= len(value) and (most is None or len(value) <= most)
    return fits


def told_apart(flat_of: Flatten, branches: list[Any], rest: Mapping[str, Any], place: str) -> list[Any]:
    """The branches of a oneOf, without what others of them allow."""
    flats = [flat_of(branch, f"{place}/oneOf/{n}") for n, branch in enumerate(branches)]
    facts = [_fact(flat_of, merged(rest, flat, place), place) for flat in flats]
    made = list(branches)
    for n, one in enumerate(facts):
        for other, flat in enumerate(flats):
            if other == n or _differ(one, facts[other]):
                continue
            fits = _excludable(flat, place)
            remedy = "Give them different types, or a required property with different values, or use anyOf."
            unsupported(not fits, place, "oneOf with branches that may overlap", remedy)
            made[n] = together(made[n], {"not": branches[other]})
    return made


def _excludable(flat: Flat, place: str) -> bool:
    """Whether a `not` of it can be followed."""
    if isinstance(flat, bool) or not flat or (flat.keys() == {"type"} and "integer" in kinds_of(flat, place)):
        return False
    return flat.keys() <= OF_STRINGS or of_objects(flat)


def _fact(flat_of: Flatten, schema: Flat, place: str) -> _Fact:
    if isinstance(schema, bool):
        return _Fact(set(TYPES) if schema else set(), {}, None, set(), {})
    kinds = schema.get("type", list(TYPES))
    types = {kinds} if isinstance(kinds, str) else set(kinds)
    if "number" in types:
        types.add("integer")
    required, named = set(schema.get("required", ())), {}
    for name in required & schema.get("properties", {}).keys():
        flat = flat_of(schema["properties"][name], f"{place}/properties/{name}")
        if not isinstance(flat, bool) and flat.keys() & {"const", "enum"}:
            named[name] = [flat["const"]] if "const" in flat else flat["enum"]
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return _Fact(types, named, values, required, schema)
