"""Two JSON schemas as one that demands what both do. Neither has `allOf` or `$ref` at its top, and `CONDITIONS` stands
for `if`."""

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
    """A schema that needs no more of this: `pattern` and `format` may be tuples of several, and `if` is in
    `CONDITIONS`."""


class _Both(dict[str, Any]):
    """A schema of two, which is equal only to itself: comparing what many of them share would take long."""

    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__  # type: ignore[assignment]


Flat = Merged | bool
CONDITIONS = "$conditions"
"""A list of triples: where the first schema holds, the second must, elsewhere the third."""
NO_MULTIPLE = "$noMultiple"
"""A tuple of steps of which a number is no multiple."""
FRACTIONAL = "$fractional"
"""Of a number that is not whole."""
UNSEEN = "$unseen"
"""A tuple of properties that are named to exclude values, so that `unevaluatedProperties` holds for them; "*" for all
that may be."""
UNSEEN_ITEMS = "$unseenItems"
"""Of arrays whose items are spoken of to exclude values, so that `unevaluatedItems` holds for them."""
ALSO = "$also"
"""A list of schemas that hold, too, each with a second choice of its keyword."""
CONTAINED = "$contained"
"""A list of schemas with a further `contains` and its bounds."""
CONTAINS = ("contains", "minContains", "maxContains")

_HIGHER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minContains", "minProperties")
_LOWER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxContains", "maxProperties")
_NESTED = ("items", "unevaluatedItems", "additionalProperties", "unevaluatedProperties", "propertyNames")
_MAX_PRODUCT = 64


class Narrower(list[Any]):
    """Branches of an `anyOf` that leave out values of what they stand for: what is denied of them would be too much."""


def unsupported(condition: bool, place: str, fault: str, remedy: str = "") -> None:
    """Raises for a schema that has `words` at `place`."""
    if condition:
        fault = f"the schema has {fault} at {place}, which is not supported"
        raise NotImplementedError(sentence(OP, fault, remedy))


def same(first: Any, second: Any) -> bool:
    """Whether two values are equal as JSON: true is not 1, but 1.0 is."""
    return first == second and plain(first) == plain(second)


def plain(value: Any) -> str:
    """The same text for values that are equal as JSON, and only for them."""
    return json.dumps(whole(value), sort_keys=True)


def whole(value: Any) -> Any:
    """The same value of JSON, whose whole numbers have no point."""
    if isinstance(value, Mapping):
        return {name: whole(item) for name, item in value.items()}
    if isinstance(value, list):
        return [whole(item) for item in value]
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


def together(first: Any, second: Any) -> Any:
    """A schema of both, to be merged where it is reached; the same one for the same two."""
    if first is False or second is False:
        return False
    if second is True or first is second:
        return first
    if first is True:
        return second
    memo, key = current().memo, (id(first), id(second))
    if key not in memo:
        spend()
        memo[key] = first, second, first if same(first, second) else _Both(allOf=[first, second])
    return memo[key][2]


def found_in(pattern: str, text: str) -> bool:
    """Whether a pattern is found in a text: by an automaton, which takes a step for a byte."""
    memo, key = current().memo, ("pattern", pattern)
    spend(1 + len(text) // 32)
    if key not in memo:
        memo[key] = compiled(parsed(pattern, search=True), f"the pattern {pattern[:60]!r}")
    return bool(memo[key].accepts(text.encode()))


def merged_all(first: Merged, schemas: Sequence[Flat], place: str) -> Flat:
    """One schema of several: of halves, so that no property is copied once for each of them."""
    if any(schema is False for schema in schemas):
        return False
    level: list[Any] = [first, *(schema if isinstance(schema, bool) else _closed(schema, place) for schema in schemas)]
    while len(level) > 1:
        unpaired = level[len(level) // 2 * 2 :]
        level = [
            merged(schema, other, place) for schema, other in zip(level[::2], level[1::2], strict=False)
        ] + unpaired
    return level[0] if isinstance(level[0], bool) else Merged(level[0])


def merged(first: Mapping[str, Any] | bool, second: Mapping[str, Any] | bool, place: str) -> Flat:
    """One schema of two.

    >>> merged({"minimum": 1, "type": "number"}, {"minimum": 3, "type": ["integer", "null"]}, "#")
    {'minimum': 3, 'type': ['integer']}
    """
    if isinstance(first, bool) or isinstance(second, bool):
        schema = second if first is True else first
        return False if first is False or second is False else schema if isinstance(schema, bool) else Merged(schema)
    second = _closed(second, place)
    for schema, other in ((first, second), (second, first)):
        closed = schema.get("unevaluatedProperties", True) not in (True, {})
        unseen = set(other.get(UNSEEN, ())) - schema.get("properties", {}).keys() if closed else ()
        unsupported(bool(unseen), place, "unevaluatedProperties beside values that are excluded of other properties")
    first, second = _closed_items(first, second, place), _closed_items(second, first, place)
    spend(1 + len(first) + len(second))
    second = _apart(first, second)
    result = Merged(first)
    for name, value in second.items():
        if name not in result:
            result[name] = value
        elif name not in ("properties", "patternProperties", "prefixItems"):
            keyword_value = _both(name, result[name], value, place)
            if keyword_value is False and name in ("type", "const"):
                return False
            result[name] = keyword_value
    properties = _properties(first, second)
    if properties:
        result["properties"] = properties
    if "prefixItems" in result:
        result["prefixItems"] = _prefix(first, second)
    if "patternProperties" in result:
        result["patternProperties"] = _patterns(first, second, place)
    return result


def _closed_items(schema: Mapping[str, Any], other: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    """A schema whose `unevaluatedItems` are its `items` before one is merged that speaks of items to exclude values."""
    if UNSEEN_ITEMS not in other or schema.get("unevaluatedItems", True) in (True, {}) or "items" in schema:
        return schema
    later = schema.keys() & {"anyOf", "oneOf", CONDITIONS, ALSO, "contains"}
    unsupported(bool(later), place, "unevaluatedItems beside items that are excluded, and a choice or contains")
    closed = dict(schema)
    return {"items": closed.pop("unevaluatedItems"), **closed}


def _apart(first: Mapping[str, Any], second: Mapping[str, Any]) -> Mapping[str, Any]:
    """The second schema, with those keywords in schemas of their own that cannot be one with the first one's."""
    for name in ("anyOf", "oneOf"):
        if name not in first or name not in second or same(first[name], second[name]):
            continue
        if name == "oneOf" or len(first[name]) * len(second[name]) > _MAX_PRODUCT:
            choice = {name: second[name]}
            second = {key: value for key, value in second.items() if key != name}
            second[ALSO] = [*second.get(ALSO, ()), choice]
    pairs = ([schema.get(name) for name in CONTAINS] for schema in (first, second))
    if "contains" in first and "contains" in second and not same(*pairs):
        contained = Merged({name: second[name] for name in CONTAINS if name in second})
        second = {key: value for key, value in second.items() if key not in CONTAINS}
        second[CONTAINED] = [*second.get(CONTAINED, ()), contained]
    return second


def _both(name: str, first: Any, second: Any, place: str) -> Any:
    if name in _HIGHER:
        return max(first, second)
    if name in _LOWER:
        return min(first, second)
    if name in _NESTED:
        return together(first, second)
    rule = _RULES.get(name)
    if rule is not None:
        return rule(first, second)
    differ = not same(first, second)
    if name == "anyOf" and differ:
        branches = [together(a, b) for a in first for b in second]
        return Narrower(branches) if isinstance(first, Narrower) or isinstance(second, Narrower) else branches
    unsupported(differ, place, f"{name!r} twice in allOf")
    return first


def _types(first: Any, second: Any) -> Any:
    first_names, second_names = ([kinds] if isinstance(kinds, str) else list(kinds) for kinds in (first, second))
    allowed = set(second_names)
    common = [kind for kind in first_names if kind in allowed or (kind == "integer" and "number" in allowed)]
    common += ["integer"] if "integer" in allowed and "number" in first_names and "integer" not in common else []
    return common or False


def _several(first: Any, second: Any) -> Any:
    first_values, second_values = (values if isinstance(values, tuple) else (values,) for values in (first, second))
    return tuple(dict.fromkeys((*first_values, *second_values)))


def _common(first: Any, second: Any) -> Any:
    integral = type(first) is int and type(second) is int and first > 0 and second > 0
    return math.lcm(first, second) if integral else first if first == second else _several(first, second)


_RULES: dict[str, Callable[[Any, Any], Any]] = {
    "type": _types,
    "const": lambda first, second: first if same(first, second) else False,
    "enum": lambda first, second: [value for value in first if is_among(value, second)],
    "required": lambda first, second: list(dict.fromkeys([*first, *second])),
    "pattern": _several,
    "format": _several,
    "not": lambda first, second: {"anyOf": [first, second]},
    "uniqueItems": lambda first, second: first or second,
    "multipleOf": _common,
    NO_MULTIPLE: _several,
    UNSEEN: _several,
    ALSO: lambda first, second: [*first, *second],
    CONTAINED: lambda first, second: [*first, *second],
    CONDITIONS: lambda first, second: [*first, *second],
}


def _properties(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """The properties of both. What one schema says of all others holds for those that the other one names."""
    first_properties, second_properties = first.get("properties", {}), second.get("properties", {})
    return {
        name: together(_said(first, name), _said(second, name)) for name in {**first_properties, **second_properties}
    }


def _closed(inner: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    """A schema inside another, whose `unevaluatedProperties` and `unevaluatedItems` do not see what is beside it: they are
    those of its additional properties, and of its items."""
    closed = dict(inner)
    for name in ("unevaluatedProperties", "unevaluatedItems"):
        choices = name in inner and inner.keys() & {"anyOf", "oneOf", CONDITIONS, ALSO}
        unsupported(bool(choices), place, f"{name} beside a choice, inside another schema")
    if "unevaluatedProperties" in inner:
        closed = {"additionalProperties": closed.pop("unevaluatedProperties"), **closed}
    if "unevaluatedItems" in inner:
        unevaluated = closed.pop("unevaluatedItems")
        contains = "contains" in inner and unevaluated not in (True, {})
        unsupported(contains, place, "unevaluatedItems beside contains, inside another schema")
        closed = {"items": unevaluated, **closed}
    return closed


def _prefix(first_schema: Mapping[str, Any], second_schema: Mapping[str, Any]) -> list[Any]:
    """The first items of both. What one schema says of all later ones holds for those that the other one lists."""
    first_prefix, second_prefix = first_schema.get("prefixItems", []), second_schema.get("prefixItems", [])
    first_items = [*first_prefix, *[first_schema.get("items", True)] * (len(second_prefix) - len(first_prefix))]
    second_items = [*second_prefix, *[second_schema.get("items", True)] * (len(first_prefix) - len(second_prefix))]
    return [together(a, b) for a, b in zip(first_items, second_items, strict=True)]


def _patterns(first_schema: Mapping[str, Any], second_schema: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The patterns of both. A schema that forbids all other properties forbids those of the other one's patterns."""
    first_patterns, second_patterns = (
        first_schema.get("patternProperties", {}),
        second_schema.get("patternProperties", {}),
    )
    patterns = {
        pattern: together(first_patterns.get(pattern, True), second_patterns.get(pattern, True))
        for pattern in {**first_patterns, **second_patterns}
    }
    for schema, own_patterns in ((first_schema, first_patterns), (second_schema, second_patterns)):
        additional = schema.get("additionalProperties", True)
        if additional not in (True, {}) and patterns.keys() - own_patterns.keys():
            fault = "patternProperties beside additionalProperties of another schema"
            unsupported(additional is not False or bool(own_patterns), place, fault)
            patterns = {}
    return patterns


def _said(schema: Mapping[str, Any], name: str) -> Any:
    return property_of(schema, name, schema.get("additionalProperties", True))


def property_of(schema: Mapping[str, Any], name: str, otherwise: Any) -> Any:
    """What a schema demands of a property: by its name, by the patterns that are found in it, and without those what it
    demands of `others`.

    >>> property_of({"properties": {"a": {"type": "null"}}, "patternProperties": {"^x": {"type": "string"}}}, "xy", False)
    {'type': 'string'}
    """
    properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    spend()
    conjuncts = [properties[name]] if name in properties else []
    conjuncts += [subschema for pattern, subschema in patterns.items() if found_in(pattern, name)]
    result: Any = True
    for conjunct in conjuncts:
        result = together(result, conjunct)
    return result if conjuncts else otherwise
