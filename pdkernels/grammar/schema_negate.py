"""What a schema denies, as schemas: the complement of each of its keywords, among the values of the type that the
keyword is for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from pdkernels.grammar.budget import spend
from pdkernels.grammar.schema_formats import ANY
from pdkernels.grammar.schema_keywords import KEYWORDS, TYPES, counts
from pdkernels.grammar.schema_merge import (
    ALSO,
    CONDITIONS,
    CONTAINED,
    FRACTIONAL,
    NO_MULTIPLE,
    UNSEEN,
    UNSEEN_ITEMS,
    Flat,
    Merged,
    Narrower,
    different,
    unsupported,
)

_FREE = frozenset({"propertyOrdering", "minContains", "maxContains", "uniqueItems", UNSEEN, UNSEEN_ITEMS})
"""Keywords that demand nothing alone; `uniqueItems` is looked at where it is true."""
_OTHER_NAMES = frozenset("additionalProperties unevaluatedProperties patternProperties propertyNames".split())
"""What denies these has a property that the schema does not name, and texts have none."""
_SILENT = Merged({UNSEEN: ("*",), UNSEEN_ITEMS: True})
"""Beside a schema that holds because it is denied twice: no property and no item is known by it."""
_MAX_PAIRS = 15
_EXCLUSIVE = {
    "minimum": "exclusiveMaximum",
    "exclusiveMinimum": "maximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMaximum": "minimum",
}


def negated(schema: Flat, place: str) -> list[Any]:
    """Schemas whose values, taken together, are those that a flat schema does not have.

    Objects with properties that the schema does not name are left out, as they are elsewhere.

    >>> negated(Merged(type="string", minLength=2), "#")
    [{'type': ['integer', 'number', 'array', 'object', 'boolean', 'null']}, {'type': 'string', 'maxLength': 1}]

    Raises:
        NotImplementedError: a keyword whose complement is not known.
    """
    if isinstance(schema, bool):
        return [] if schema else [True]
    alternatives, unnamed = list[Any](), ""
    for name, value in schema.items():
        spend()
        unsupported(name == "uniqueItems" and value, place, "'uniqueItems' in a not")
        closed = name == "unevaluatedItems" and value not in (True, {})
        unsupported(closed, place, "'unevaluatedItems' in a not")
        if name in _OTHER_NAMES:
            unnamed = name
        elif name not in _FREE:
            alternatives += _without(name, value, schema, place)
    unsupported(bool(unnamed) and not alternatives, place, f"{unnamed!r} in a not")
    return Narrower(alternatives) if unnamed else alternatives


def _without(name: str, value: Any, schema: Mapping[str, Any], place: str) -> Iterator[Any]:
    """The values for which one keyword does not hold."""
    if name == "type":
        yield from _of_other_types([value] if isinstance(value, str) else value)
    elif name in ("const", "enum"):
        yield from _unlisted(different([value] if name == "const" else value))
    elif name == "not":
        yield {"allOf": [value, _SILENT]}
    elif name == "anyOf":
        yield {"allOf": [{"not": branch} for branch in value]}
    elif name == "oneOf":
        yield {"allOf": [{"not": branch} for branch in value]}
        unsupported(len(value) > _MAX_PAIRS, place, "so many branches of a oneOf in a not")
        yield from ({"allOf": [*pair, _SILENT]} for pair in combinations(value, 2))
    elif name == CONDITIONS:
        for when, then, otherwise in value:
            yield {"allOf": [when, {"not": then}, _SILENT]}
            yield {"allOf": [{"not": when}, {"not": otherwise}]}
    elif name in KEYWORDS["string"] and name != "format":
        yield from _of_strings(name, value)
    elif name == "format":
        names = (value,) if isinstance(value, str) else value
        unsupported(any(entry not in ANY for entry in names), place, "'format' in a not")
    elif name == ALSO:
        yield from ({"allOf": [{"not": schema}]} for schema in value)
    elif name == CONTAINED:
        for contained in value:
            yield from _of_items("contains", contained["contains"], contained, place)
    elif name in KEYWORDS["array"]:
        yield from _of_items(name, value, schema, place)
    elif name in KEYWORDS["object"]:
        yield from _of_objects(name, value, schema)
    elif name in _EXCLUSIVE:
        yield Merged(type="number", **{_EXCLUSIVE[name]: value})
    elif name == "multipleOf":
        for step in value if isinstance(value, tuple) else (value,):
            yield Merged(type="number", **{NO_MULTIPLE: (step,)})
    elif name == NO_MULTIPLE:
        yield from (Merged(type="number", multipleOf=step) for step in value)
    elif name == FRACTIONAL:
        yield Merged(type="integer")
    else:
        unsupported(True, place, f"{name!r} in a not")


def _of_other_types(kinds: list[str]) -> Iterator[Merged]:
    other_kinds = [
        kind for kind in TYPES if kind not in kinds and not (kind in ("integer", "number") and "number" in kinds)
    ]
    if "integer" in kinds and "number" in other_kinds:
        other_kinds.remove("number")
        yield Merged({"type": "number", FRACTIONAL: True})
    if other_kinds:
        yield Merged(type=other_kinds)


def _unlisted(values: list[Any]) -> Iterator[Any]:
    """All values but some."""
    types = {"number" if TYPES["number"](value) else _type_of(value) for value in values}
    yield from _of_other_types([*types])
    strings = [value for value in values if isinstance(value, str)]
    if strings:
        yield Merged({"type": "string", "not": {"type": "string", "enum": strings}})
    truths = [value for value in values if type(value) is bool]
    if len(truths) == 1:
        yield Merged(const=not truths[0])
    numbers = sorted(value for value in values if TYPES["number"](value))
    for low, high in zip([None, *numbers], [*numbers, None]) if numbers else ():
        bounds = {"exclusiveMinimum": low, "exclusiveMaximum": high}
        yield Merged(type="number", **{name: bound for name, bound in bounds.items() if bound is not None})
    for kind in ("array", "object"):
        containers = [value for value in values if TYPES[kind](value)]
        if containers:
            yield {"allOf": [{"anyOf": [*(_differing(value, kind))]} for value in containers]}


def _type_of(value: Any) -> str:
    return next(kind for kind, holds in TYPES.items() if holds(value))


def _differing(value: Any, kind: str) -> Iterator[Merged]:
    """Arrays, or objects, that are not this one."""
    if kind == "array":
        yield Merged(type=kind, minItems=len(value) + 1)
        if value:
            yield Merged(type=kind, maxItems=len(value) - 1)
        for at, item in enumerate(value):
            items = {"prefixItems": [True] * at + [{"not": {"const": item}}], "minItems": at + 1}
            yield Merged({"type": kind, **items, UNSEEN_ITEMS: True})
        return
    yield Merged(type=kind, minProperties=len(value) + 1)
    for name, item in value.items():
        yield Merged(type=kind, properties={name: False})
        yield from other_objects((), {name: {"const": item}})


def other_objects(required: Sequence[str], properties: Mapping[str, Any]) -> Iterator[Merged]:
    """Objects that lack a property that is required, or have one with a value that does not have its schema. Each is
    among those of one schema only, so that their automata do not run side by side. To `unevaluatedProperties` no property is
    known by this."""
    there, held_schemas = list[str](), dict[str, Any]()
    for name in dict.fromkeys(required):
        yield Merged(type="object", properties={name: False}, required=[*there])
        there.append(name)
    for name, schema in properties.items():
        if schema not in (True, {}):
            value = True if schema is False else {"not": schema}
            property_schemas = {**held_schemas, name: value}
            yield Merged(
                {
                    "type": "object",
                    "properties": property_schemas,
                    "required": [*there, name],
                    UNSEEN: tuple(property_schemas),
                }
            )
            held_schemas[name] = schema


def _of_strings(name: str, value: Any) -> Iterator[Merged]:
    if name == "minLength" and value > 0:
        yield Merged(type="string", maxLength=value - 1)
    elif name == "maxLength":
        yield Merged(type="string", minLength=value + 1)
    elif name == "pattern":
        for pattern in (value,) if isinstance(value, str) else value:
            yield Merged({"type": "string", "not": {"type": "string", "pattern": pattern}})


def _of_items(name: str, value: Any, schema: Mapping[str, Any], place: str) -> Iterator[Merged]:
    for array in _of_arrays(name, value, schema, place):
        yield Merged(array, **{UNSEEN_ITEMS: True})


def _of_arrays(name: str, value: Any, schema: Mapping[str, Any], place: str) -> Iterator[Merged]:
    if name == "minItems" and value > 0:
        yield Merged(type="array", maxItems=value - 1)
    elif name == "maxItems":
        yield Merged(type="array", minItems=value + 1)
    elif name == "prefixItems":
        for at, item in enumerate(value):
            yield Merged(type="array", prefixItems=[True] * at + [{"not": item}], minItems=at + 1)
    elif name == "items" and value not in (True, {}):
        first = len(schema.get("prefixItems", ()))
        unsupported(first > 0 and value is not False, place, "'items' after 'prefixItems' in a not")
        array = Merged(type="array", contains={"not": value}, minContains=1)
        yield Merged(type="array", minItems=first + 1) if value is False else array
    elif name == "contains":
        minimum, maximum = counts(schema, "minContains", "maxContains", place)
        if minimum > 0:
            few = Merged(type="array", items={"not": value})
            yield few if minimum == 1 else Merged(type="array", contains=value, minContains=0, maxContains=minimum - 1)
        if maximum is not None:
            yield Merged(type="array", contains=value, minContains=maximum + 1)


def _of_objects(name: str, value: Any, schema: Mapping[str, Any]) -> Iterator[Merged]:
    if name == "required":
        yield from other_objects(value, schema.get("properties", {}))
    elif name == "properties" and "required" not in schema:
        yield from other_objects((), value)
    elif name == "minProperties" and value > 0:
        yield Merged(type="object", maxProperties=value - 1)
    elif name == "maxProperties":
        yield Merged(type="object", minProperties=value + 1)
