"""Branches of a `oneOf`: whether a value can satisfy two of them, and which of them a `not` can exclude."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pdkernels.grammar.budget import spend
from pdkernels.grammar.schema_keywords import TYPES, counts, kinds_of
from pdkernels.grammar.schema_merge import (
    Flat,
    found_in,
    is_among,
    merged,
    plain,
    property_of,
    same,
    together,
    unsupported,
)
from pdkernels.grammar.schema_negate import negated

Flatten = Callable[[Any, str], Flat]

ENUMERATED = frozenset("type const enum".split())
OF_STRINGS = ENUMERATED | frozenset("pattern minLength maxLength".split())
OF_OBJECTS = frozenset("type properties required".split())
_MAX_PAIRS = 250_000  # of branches, compared in less than a second


class _Fact(NamedTuple):
    """What tells a branch of a oneOf from others."""

    types: set[str]
    labels: dict[str | None, frozenset[str]]
    """The values that are listed for required properties, where it speaks of objects alone, and at None for itself; as
    `plain` writes them."""
    required: set[str]
    schema: Mapping[str, Any]

    def forbids(self, name: str) -> bool:
        return property_of(self.schema, name, self.schema.get("additionalProperties", True)) is False


def _differ(first: _Fact, second: _Fact) -> bool:
    """Whether no value satisfies both."""
    spend()
    if not first.types & second.types:
        return True
    shared = first.labels.keys() & second.labels.keys()
    if any(first.labels[name].isdisjoint(second.labels[name]) for name in shared):
        return True
    objects = first.types == second.types == {"object"}
    return objects and (any(map(second.forbids, first.required)) or any(map(first.forbids, second.required)))


def _near(evidence: list[_Fact], place: str) -> list[list[int]]:
    """For each branch the others, ascending, that its best label does not already tell apart."""
    labelled: dict[str | None, set[int]] = {}
    having: dict[tuple[str | None, str], set[int]] = {}
    for n, branch in enumerate(evidence):
        for name, values in branch.labels.items():
            labelled.setdefault(name, set()).add(n)
            for value in values:
                having.setdefault((name, value), set()).add(n)
    branches, near, pairs = set(range(len(evidence))), [], 0
    for n, branch in enumerate(evidence):
        best, fewest = None, len(evidence)
        for name, values in branch.labels.items():
            size = len(evidence) - len(labelled[name]) + sum(len(having[name, value]) for value in values)
            if size < fewest:
                best, fewest = (name, values), size
        pairs += fewest
        fault = f"so many branches of a oneOf that no listed property tells apart, {len(evidence)}"
        unsupported(
            pairs > _MAX_PAIRS, place, fault, "Give them a required property with different values, or use anyOf."
        )
        candidates = branches
        if best is not None:
            name, values = best
            candidates = (branches - labelled[name]).union(*(having[name, value] for value in values))
        near.append(sorted(candidates - {n}))
    return near


def of_objects(schema: Mapping[str, Any]) -> bool:
    """Whether a schema speaks of objects alone, of what they must have and of properties."""
    return schema.keys() <= OF_OBJECTS and schema.keys() != {"type"} and schema.get("type", "object") == "object"


def of_texts(schema: Mapping[str, Any]) -> bool:
    """Whether a schema speaks of strings alone, so that what it denies is told by their texts."""
    if not schema.keys() <= OF_STRINGS or schema.get("type", "string") not in ("string", ["string"]):
        return False
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    return schema.keys() != {"type"} and all(isinstance(value, str) for value in values)


def holds(flat_of: Flatten, schema: Any, value: Any, place: str) -> bool:
    """Whether a value satisfies the schema of a `not`."""
    spend()
    flat = flat_of(schema, f"{place}/not")
    if isinstance(flat, bool):
        return flat
    if "anyOf" in flat and len(flat) == 1:
        return any(holds(flat_of, alternative, value, place) for alternative in flat["anyOf"])
    stray = sorted(flat.keys() - OF_STRINGS)
    unsupported(bool(stray), f"{place}/not", f"{stray and stray[0]!r} in a not")
    satisfied = "type" not in flat or any(TYPES[kind](value) for kind in kinds_of({"type": flat["type"]}, place))
    satisfied = satisfied and ("const" not in flat or same(value, flat["const"]))
    satisfied = satisfied and ("enum" not in flat or is_among(value, flat["enum"]))
    if isinstance(value, str):
        patterns = flat.get("pattern", ())
        minimum, maximum = counts(flat, "minLength", "maxLength", place)
        patterns_of_value = (patterns,) if isinstance(patterns, str) else patterns
        satisfied = satisfied and all(found_in(pattern, value) for pattern in patterns_of_value)
        satisfied = satisfied and minimum <= len(value) and (maximum is None or len(value) <= maximum)
    return satisfied


def told_apart(flat_of: Flatten, branches: list[Any], siblings: Mapping[str, Any], place: str) -> list[Any]:
    """The branches of a oneOf, without what others of them allow."""
    flats = [flat_of(branch, f"{place}/oneOf/{n}") for n, branch in enumerate(branches)]
    evidence = [_fact(flat_of, merged(siblings, flat, place), place) for flat in flats]
    separated = list(branches)
    for n, overlapping in enumerate(_near(evidence, place)):
        for other in overlapping:
            if _differ(evidence[n], evidence[other]):
                continue
            remedy = "Give them different types, or a required property with different values, or use anyOf."
            unsupported(not _excludable(flats[other], place), place, "oneOf with branches that may overlap", remedy)
            separated[n] = together(separated[n], {"not": branches[other]})
    return separated


def _excludable(flat: Flat, place: str) -> bool:
    """Whether a `not` of it can be followed."""
    if not isinstance(flat, bool) and (flat.keys() <= OF_STRINGS or of_objects(flat)):
        return True
    try:
        negated(flat, place)
    except NotImplementedError:
        return False
    return True


def _fact(flat_of: Flatten, schema: Flat, place: str) -> _Fact:
    if isinstance(schema, bool):
        return _Fact(set(TYPES) if schema else set(), {}, set(), {})
    kinds = schema.get("type", list(TYPES))
    types = {kinds} if isinstance(kinds, str) else set(kinds)
    if "number" in types:
        types.add("integer")
    required, labels = set(schema.get("required", ())), dict[str | None, frozenset[str]]()
    for name in required & schema.get("properties", {}).keys() if types == {"object"} else ():
        flat = flat_of(schema["properties"][name], f"{place}/properties/{name}")
        if not isinstance(flat, bool) and flat.keys() & {"const", "enum"}:
            labels[name] = _listed(flat)
    if schema.keys() & {"const", "enum"}:
        labels[None] = _listed(schema)
    return _Fact(types, labels, required, schema)


def _listed(schema: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(map(plain, [schema["const"]] if "const" in schema else schema["enum"]))
