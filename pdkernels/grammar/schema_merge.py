"""Two JSON schemas as one that demands what both do. Neither has `allOf` or `$ref` at its top, and `CONDITIONS` stands for `if`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pdkernels._validation import sentence
from pdkernels.grammar.budget import OP, current, spend
from pdkernels.grammar.language import compiled
from pdkernels.grammar.regex import parsed


class Merged(dict[str, Any]):
    """A schema that needs no more of this: `pattern` and `format` may be tuples of several, and `if` is in `CONDITIONS`."""


class _Both(dict[str, Any]):
    """A schema of two, which is equal only to itself: comparing what many of them share would take long."""

    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__  # type: ignore[assignment]


Flat = Merged | bool
CONDITIONS = "$conditions"
"""A list of triples: where the first schema holds, the second must, elsewhere the third."""

_HIGHER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minContains", "minProperties")
_LOWER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxContains", "maxProperties")
_NESTED = ("items", "additionalProperties", "unevaluatedProperties", "propertyNames")
_MAX_PRODUCT = 64


def unsupported(condition: bool, place: str, words: str, remedy: str = "") -> None:
    """Raises for a schema that has `words` at `place`."""
    if condition:
        words = f"the schema has {words} at {place}, which is not supported"
        raise NotImplementedError(sentence(OP, words, remedy))


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal as JSON: true is not 1, but 1.0 is."""
    return plain(one) == plain(other)


def plain(value: Any) -> str:
    """The same text for values that are equal as JSON, and only for them."""
    return json.dumps(whole(value), sort_keys=True)


def whole(value: Any) -> Any:
    """The same value of JSON, whose whole numbers have no point."""
    if isinstance(value, Mapping):
        return {name: whole(one) for name, one in value.items()}
    if isinstance(value, list):
        return [whole(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def is_among(value: Any, values: Sequence[Any]) -> bool:
    """Whether a value equals one of a list, as JSON. The list is read once in a compile."""
    memo, key = current().memo, ("values", id(values))
    if key not in memo:
        spend(len(values))
        memo[key] = values, frozenset(map(plain, values))
    return plain(value) in memo[key][1]


def different(values: Sequence[Any]) -> list[Any]:
    """The values without those that equal an earlier one, as JSON."""
    first: dict[str, Any] = {}
    for value in values:
        first.setdefault(plain(value), value)
    return list(first.values())


def together(one: Any, other: Any) -> Any:
    """A schema of both, to be merged where it is reached; the same one for the same two."""
    if one is False or other is False:
        return False
    if other is True or one is other:
        return one
    if one is True:
        return other
    memo, key = current().memo, (id(one), id(other))
    if key not in memo:
        spend()
        memo[key] = one, other, one if one == other else _Both(allOf=[one, other])
    return memo[key][2]


def found_in(pattern: str, text: str) -> bool:
    """Whether a pattern is found in a text: by an automaton, which takes a step for a byte."""
    memo, key = current().memo, ("pattern", pattern)
    spend(1 + len(text) // 32)
    if key not in memo:
        memo[key] = compiled(parsed(pattern, search=True), f"the pattern {pattern[:60]!r}")
    return bool(memo[key].accepts(text.encode()))


def merged_all(first: Merged, others: Sequence[Flat], place: str) -> Flat:
    """One schema of several: of halves, so that no property is copied once for each of them."""
    if any(one is False for one in others):
        return False
    parts: list[Any] = [first, *(one if isinstance(one, bool) else _closed(one, place) for one in others)]
    while len(parts) > 1:
        rest = parts[len(parts) // 2 * 2 :]
        parts = [merged(one, other, place) for one, other in zip(parts[::2], parts[1::2], strict=False)] + rest
    return parts[0] if isinstance(parts[0], bool) else Merged(parts[0])


def merged(one: Mapping[str, Any] | bool, other: Mapping[str, Any] | bool, place: str) -> Flat:
    """One schema of two.

    >>> merged({"minimum": 1, "type": "number"}, {"minimum": 3, "type": ["integer", "null"]}, "#")
    {'minimum': 3, 'type': ['integer']}
    """
    if isinstance(one, bool) or isinstance(other, bool):
        left = other if one is True else one
        return False if one is False or other is False else left if isinstance(left, bool) else Merged(left)
    other = _closed(other, place)
    spend(1 + len(one) + len(other))
    made = Merged(one)
    for name, value in other.items():
        if name not in made:
            made[name] = value
        elif name not in ("properties", "patternProperties", "prefixItems"):
            found = _both(name, made[name], value, place)
            if found is False and name in ("type", "const"):
                return False
            made[name] = found
    properties = _properties(one, other)
    if properties:
        made["properties"] = properties
    if "prefixItems" in made:
        made["prefixItems"] = _prefix(one, other)
    if "patternProperties" in made:
        made["patternProperties"] = _patterns(one, other, place)
    return made


def _both(name: str, one: Any, other: Any, place: str) -> Any:
    if name in _HIGHER:
        return max(one, other)
    if name in _LOWER:
        return min(one, other)
    if name in _NESTED:
        return together(one, other)
    rule = _RULES.get(name)
    if rule is not None:
        return rule(one, other)
    if name == "anyOf" and len(one) * len(other) <= _MAX_PRODUCT:
        return [together(a, b) for a in one for b in other]
    unsupported(one != other, place, f"{name!r} twice in allOf")
    return one


def _types(one: Any, other: Any) -> Any:
    mine, theirs = ([kinds] if isinstance(kinds, str) else list(kinds) for kinds in (one, other))
    named = set(theirs)
    found = [kind for kind in mine if kind in named or (kind == "integer" and "number" in named)]
    found += ["integer"] if "integer" in named and "number" in mine and "integer" not in found else []
    return found or False


def _several(one: Any, other: Any) -> Any:
    mine, theirs = (part if isinstance(part, tuple) else (part,) for part in (one, other))
    return tuple(dict.fromkeys((*mine, *theirs)))


def _common(one: Any, other: Any) -> Any:
    both = type(one) is int and type(other) is int and one > 0 and other > 0
    return math.lcm(one, other) if both else one if one == other else (one, other)


_RULES: dict[str, Callable[[Any, Any], Any]] = {
    "type": _types,
    "const": lambda one, other: one if same(one, other) else False,
    "enum": lambda one, other: [value for value in one if is_among(value, other)],
    "required": lambda one, other: list(dict.fromkeys([*one, *other])),
    "pattern": _several,
    "format": _several,
    "not": lambda one, other: {"anyOf": [one, other]},
    "uniqueItems": lambda one, other: one or other,
    "multipleOf": _common,
    CONDITIONS: lambda one, other: [*one, *other],
}


def _properties(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The properties of both. What one schema says of all others holds for those that the other one names."""
    mine, theirs = one.get("properties", {}), other.get("properties", {})
    return {name: together(_said(one, name), _said(other, name)) for name in {**mine, **theirs}}


def _closed(inner: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    """A schema inside another, whose `unevaluatedProperties` do not see the properties beside it: they are its additional ones."""
    if "unevaluatedProperties" not in inner:
        return inner
    choices = inner.keys() & {"anyOf", "oneOf", CONDITIONS}
    unsupported(bool(choices), place, "unevaluatedProperties beside a choice, inside another schema")
    made = dict(inner)
    return {"additionalProperties": made.pop("unevaluatedProperties"), **made}


def _prefix(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[Any]:
    """The first items of both. What one schema says of all later ones holds for those that the other one lists."""
    first, second = one.get("prefixItems", []), other.get("prefixItems", [])
    mine = [*first, *[one.get("items", True)] * (len(second) - len(first))]
    theirs = [*second, *[other.get("items", True)] * (len(first) - len(second))]
    return [together(a, b) for a, b in zip(mine, theirs, strict=True)]


def _patterns(one: Mapping[str, Any], other: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The patterns of both. A schema that forbids all other properties forbids those of the other one's patterns."""
    mine, theirs = one.get("patternProperties", {}), other.get("patternProperties", {})
    made = {pattern: together(mine.get(pattern, True), theirs.get(pattern, True)) for pattern in {**mine, **theirs}}
    for schema, own in ((one, mine), (other, theirs)):
        others = schema.get("additionalProperties", True)
        if others not in (True, {}) and made.keys() - own.keys():
            words = "patternProperties beside additionalProperties of another schema"
            unsupported(others is not False or bool(own), place, words)
            made = {}
    return made


def _said(schema: Mapping[str, Any], name: str) -> Any:
    return property_of(schema, name, schema.get("additionalProperties", True))


def property_of(schema: Mapping[str, Any], name: str, others: Any) -> Any:
    """What a schema demands of a property: by its name, by the patterns that are found in it, and without those what it demands of
    `others`.

    >>> property_of({"properties": {"a": {"type": "null"}}, "patternProperties": {"^x": {"type": "string"}}}, "xy", False)
    {'type': 'string'}
    """
    properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    spend()
    said = [properties[name]] if name in properties else []
    said += [one for pattern, one in patterns.items() if found_in(pattern, name)]
    made: Any = True
    for part in said:
        made = together(made, part)
    return made if said else others
