"""Objects of JSON schemas as expressions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from pdkernels.grammar.language import (
    EMPTY,
    NOTHING,
    Alt,
    Expression,
    Seq,
    check_without_calls,
    compiled,
    either,
    is_nothing,
    separated,
)
from pdkernels.grammar.products import both, without
from pdkernels.grammar.schema_keywords import counts
from pdkernels.grammar.schema_merge import property_of, together, unsupported
from pdkernels.grammar.schema_parts import Parts
from pdkernels.grammar.schema_strings import matching, string

_MAX_CROSSED = 4
"""Patterns of which a name may match several."""


class Objects(Parts):
    """The objects of a schema."""

    def _object(self, schema: Mapping[str, Any], place: str) -> Expression:
        required = set(schema.get("required", []))
        other_properties = schema.get("additionalProperties", schema.get("unevaluatedProperties", True))
        minimum, maximum = counts(schema, "minProperties", "maxProperties", place)
        if maximum is not None and maximum < max(minimum, len(required)):
            return NOTHING
        names = schema.get("propertyNames", True)
        names = names if names is True else self.value(together({"type": "string"}, names), f"{place}/propertyNames")
        property_schemas = {name: property_of(schema, name, other_properties) for name in _ordered(schema)}
        if names is not True and is_nothing(names):
            return NOTHING if minimum or required else self._enclosed("{", "}", EMPTY)
        if names is not True:
            name_automaton = compiled(names, f"the schema at {place}/propertyNames")
            check_without_calls(name_automaton, f"the schema at {place}/propertyNames")
            property_schemas = {
                name: property_schema if name_automaton.accepts(_written(name).encode()) else False
                for name, property_schema in property_schemas.items()
            }
        if any(property_schema is not False for property_schema in property_schemas.values()) or required:
            pairs = []
            for name, property_schema in property_schemas.items():
                value = self.value(property_schema, f"{place}/properties/{name}")
                if not is_nothing(value):
                    pairs.append((name in required, Seq((self._exactly(name), self._colon, value))))
                elif name in required:
                    return NOTHING
            other_items = (
                self._others(schema, names, other_properties, property_schemas, place) if self._complete else []
            )
            other_item = either(other_items) if other_items else None
            if self._any_order:
                content = self._in_any_order(pairs, place, minimum, maximum, other_item)
            else:
                content = self._some(pairs, minimum, maximum, other_item)
            return self._enclosed("{", "}", content)
        fault = "minProperties above 1 of an object without properties"
        unsupported(minimum > 1, place, fault, "Its names may repeat.")
        free = self._others(schema, names, other_properties, property_schemas, place)
        content = separated(either(free), self._comma, minimum, maximum) if free else NOTHING if minimum else EMPTY
        return self._enclosed("{", "}", content)

    def _others(
        self, schema: Mapping[str, Any], names: Any, other_properties: Any, named_schemas: Mapping[str, Any], place: str
    ) -> list[Expression]:
        """The properties that a schema does not name, each kind with its colon and its value."""
        property_names = Alt(tuple(map(self._exactly, named_schemas)))
        free = list[Expression]()
        for name, value in self._kinds_of_names(schema, other_properties, place):
            if names is not True:
                name = both(name, names, f"the schema at {place}/propertyNames")
            if named_schemas:
                name = without(name, property_names, f"the schema at {place}")
            if not is_nothing(name) and not is_nothing(value):
                free.append(Seq((name, self._colon, value)))
        return free

    def _kinds_of_names(
        self, schema: Mapping[str, Any], other_properties: Any, place: str
    ) -> list[tuple[Expression, Expression]]:
        """The names that an object without properties may have, and their values."""
        patterns, kinds = schema.get("patternProperties", {}), list[tuple[Expression, Expression]]()
        for chosen in _crossed(patterns):
            name, subschema = matching(chosen[0], complete=self._complete), patterns[chosen[0]]
            for pattern in chosen[1:]:
                name = both(name, matching(pattern, complete=self._complete), f"the schema at {place}")
                subschema = together(subschema, patterns[pattern])
            for pattern, other in patterns.items():
                if pattern not in chosen and not (len(chosen) == 1 and other == subschema):
                    # A name of both would need a value of both.
                    name = without(
                        name, matching(pattern, wide=True, complete=self._complete), f"the schema at {place}"
                    )
            if not is_nothing(name):
                kinds.append((name, self.value(subschema, f"{place}/patternProperties")))
        if other_properties is False or (patterns and other_properties is True and not self._complete):
            return kinds
        name = string(0 if self._complete else 1, None, self._complete)
        for pattern in patterns:
            name = without(name, matching(pattern, wide=True, complete=self._complete), f"the schema at {place}")
        return [*kinds, (name, self.value(other_properties, f"{place}/additionalProperties"))]


def _crossed(patterns: Mapping[str, Any]) -> list[Sequence[str]]:
    """Which patterns a name may match at once: any of them, where they are few and demand different things."""
    alone: list[Sequence[str]] = [[pattern] for pattern in patterns]
    first = next(iter(patterns.values()), None)
    if len(patterns) > _MAX_CROSSED or all(subschema == first for subschema in patterns.values()):
        return alone
    choices = product((False, True), repeat=len(patterns))
    return [[pattern for pattern, chosen in zip(patterns, choice) if chosen] for choice in choices if any(choice)]


def _ordered(schema: Mapping[str, Any]) -> list[str]:
    """The names that an object has, in the order in which they are written."""
    properties, first = schema.get("properties", {}), schema.get("propertyOrdering", [])
    orders = {
        name: subschema.get("propertyOrder", 1000) if isinstance(subschema, Mapping) else 1000
        for name, subschema in properties.items()
    }
    comparable = all(type(order) in (int, float) for order in orders.values())
    names = sorted(properties, key=lambda name: orders[name]) if comparable else list(properties)
    every_name = dict.fromkeys([*names, *schema.get("required", [])])
    return list(dict.fromkeys([*(name for name in first if name in every_name), *every_name]))


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
