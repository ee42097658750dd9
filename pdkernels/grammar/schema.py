"""JSON schemas as expressions of `language`: texts that satisfy the schema, written as `json.dumps` writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from pdkernels._validation import check, check_type, refuse, sentence
from pdkernels.grammar.budget import spend
from pdkernels.grammar.language import (
    EMPTY,
    NOTHING,
    OP,
    Alt,
    Chars,
    Expression,
    Machine,
    Ranges,
    Repeat,
    Seq,
    Subsequence,
    both,
    compiled,
    either,
    is_nothing,
    normal,
    optional,
    separated,
    text,
    without,
)
from pdkernels.grammar.machines import deterministic
from pdkernels.grammar.numbers import numbers
from pdkernels.grammar.regex import parsed
from pdkernels.grammar.schema_apart import ENUMERATED, OF_OBJECTS, OF_STRINGS, holds, told_apart
from pdkernels.grammar.schema_flat import Flattener
from pdkernels.grammar.schema_keywords import TYPES, Unknown, check_keywords, check_values, counts, is_note, kinds_of
from pdkernels.grammar.schema_merge import (
    CONDITIONS,
    Merged,
    different,
    is_among,
    merged,
    property_of,
    together,
    unsupported,
    whole,
)
from pdkernels.grammar.schema_numbers import has_number, number_of
from pdkernels.grammar.schema_strings import matching, string, string_of

Schema = Mapping[str, Any] | bool

_MAX_PARTS = 3_000
_ANYTHING_DEPTH = 3  # of arrays and objects inside each other in a value without a schema


def parsed_schema(
    schema: Schema | str, whitespace: str | None, depth: int, longest: int | None, unknown: Unknown | None = None
) -> Expression:
    """The texts that satisfy a schema, as `Grammar.json_schema` describes them. What JSON Schema does not have is added
    to `unknown`.

    Raises:
        ValueError: not a JSON schema.
        NotImplementedError: a keyword that is not followed.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ValueError(sentence(OP, f"the schema is not JSON: {error}")) from None
    check_type(isinstance(schema, (Mapping, bool)), OP, "schema", "be a dict", type(schema).__name__)
    check_values(schema)
    try:
        return _Compiler(schema, whitespace, depth, longest, {} if unknown is None else unknown).value(schema, "#")
    except RecursionError:
        raise ValueError(sentence(OP, "the schema has too many levels", "Lower the depth.")) from None


class _Compiler:
    def __init__(self, root: Any, whitespace: str | None, depth: int, longest: int | None, unknown: Unknown) -> None:
        self._flat, self._depth, self._longest = Flattener(root, unknown), depth, longest
        self._open: dict[str, int] = {}  # how often each reference is being followed
        self._cycles: dict[str, list[str]] | None = None
        self._followed: dict[tuple[str, tuple[int, ...]], Expression] = {}
        gap = EMPTY if whitespace is None else parsed(whitespace)
        space = optional(text(" ")) if whitespace is None else gap
        wide = any(not {9, 10, 13, 32}.issuperset(range(first, last + 1)) for first, last in _characters(gap))
        refuse(wide, OP, "whitespace matches characters that are no space in JSON", r"Write [ \t\n\r], not \s.")
        self._gap, self._parts = gap, 0
        self._comma, self._colon = Seq((gap, text(","), space)), Seq((gap, text(":"), space))

    @property
    def _any(self) -> Expression:
        return _anything(_ANYTHING_DEPTH, self._gap, self._comma, self._colon)

    def value(self, schema: Any, place: str) -> Expression:
        """The texts of the values of a schema, which errors call `place`."""
        self._parts += 1
        refuse(self._parts > _MAX_PARTS, OP, f"the schema unfolds to more than {_MAX_PARTS} parts", "Lower the depth.")
        spend()
        if isinstance(schema, Mapping) and "$ref" in schema:
            return self._reference(schema, place)
        flat = self._flat(schema, place)
        if isinstance(flat, bool):
            return self._any if flat else NOTHING
        if not flat:
            return self._any
        if flat.get(CONDITIONS):
            return self._conditional(flat, place)
        for name in ("anyOf", "oneOf"):
            if name in flat:
                return self._choice(flat, name, place)
        if "const" in flat or "enum" in flat:
            return self._listed(flat, place)
        return either([self._typed(kind, flat, place) for kind in kinds_of(flat, place)])

    def _reference(self, schema: Mapping[str, Any], place: str) -> Expression:
        """A reference, no more than `depth` times inside itself: a value that needs more levels is none."""
        check_keywords(schema, place, self._flat.unknown)
        reference = schema["$ref"]
        target, level = self._flat.found(reference, place), self._open.get(reference, 0)
        if level > self._depth:
            return NOTHING
        if self._cycles is None:
            self._cycles = self._flat.cycles()
        alone = all(name == "$ref" or is_note(name) for name in schema)
        key = reference, tuple(self._open.get(member, 0) for member in self._cycles[reference])
        if alone and key in self._followed:
            return self._followed[key]
        self._open[reference] = level + 1
        expression = self.value(target if alone else {"allOf": [schema]}, reference if alone else place)
        self._open[reference] = level
        if alone:
            self._followed[key] = expression
        return expression

    def _conditional(self, schema: Mapping[str, Any], place: str) -> Expression:
        """Where the first condition holds and where it does not: what it names has the values or is absent, or not."""
        (when, then, otherwise), *later_conditions = schema[CONDITIONS]
        unconditional = {name: value for name, value in schema.items() if name != CONDITIONS} | (
            {CONDITIONS: later_conditions} if later_conditions else {}
        )
        condition = self._flat(when, f"{place}/if")
        fault = "an if, a not or a oneOf that is none of required properties and listed values"
        unsupported(isinstance(condition, bool) or not condition.keys() <= OF_OBJECTS, place, fault)
        assert not isinstance(condition, bool)
        unsupported(condition.get("type", "object") != "object", place, fault)
        enums = {}
        for name, subschema in condition.get("properties", {}).items():
            flat = self._flat(subschema, f"{place}/if/properties/{name}")
            is_enum = not isinstance(flat, bool) and flat.keys() <= ENUMERATED and flat.keys() & {"const", "enum"}
            unsupported(not is_enum, place, fault)
            enums[name] = flat
        branches: list[tuple[Mapping[str, Any], Any]] = [(condition, then)]
        for name, subschema in enums.items():
            branches.append(
                ({"type": "object", "properties": {name: {"not": subschema}}, "required": [name]}, otherwise)
            )
        for name in condition.get("required", ()):
            branches.append(({"type": "object", "properties": {name: False}}, otherwise))
        if "type" in unconditional and "type" in condition:  # other values than objects do not satisfy it
            kinds = [kind for kind in kinds_of(unconditional, place) if kind != "object"]
            branches += [({"type": kinds}, otherwise)] if kinds else []
        alternatives = [
            merged(merged(unconditional, subschema, place), self._flat(consequence, place), place)
            for subschema, consequence in branches
        ]
        return either([self.value(subschema, place) for subschema in alternatives])

    # Listed values, and choices

    def _listed(self, schema: Mapping[str, Any], place: str) -> Expression:
        """One of the values of an enum or a const that satisfy the rest of the schema."""
        values = [schema["const"]] if "const" in schema else schema["enum"]
        check(isinstance(values, list), OP, f"enum at {place}", "be a list", type(values).__name__)
        if "const" in schema and "enum" in schema:
            values = [value for value in values if is_among(value, schema["enum"])]
        if "not" in schema:
            values = [value for value in values if not holds(self._flat, schema["not"], value, place)]
        kinds = schema.get("type")
        if kinds is not None:
            type_names = kinds_of({"type": kinds}, place)
            values = [value for value in values if any(TYPES[kind](value) for kind in type_names)]
        constraints = {name: value for name, value in schema.items() if name not in ("enum", "const", "not", "type")}
        spend(len(values))
        if not constraints or not values:
            return Alt(tuple(map(self._exactly, values)))
        spoken = kinds_of(constraints if kinds is None else {"type": kinds}, place)
        branches, checked_values = list[Expression](), list[Any]()
        for value in values:
            if type(value) in (int, float):
                branches += [self._exactly(value)] if has_number(constraints, value, place) else []
            elif any(TYPES[kind](value) for kind in spoken):
                checked_values.append(value)
            else:
                branches.append(self._exactly(value))  # keywords for other types demand nothing of it
        if checked_values:
            # Whole numbers inside may be listed as 1.0, which is no text of the type integer.
            constrained, source = self.value(Merged(constraints, type=spoken), place), f"the schema at {place}"
            texts = [(self._exactly(value), self._exactly(whole(value))) for value in checked_values]
            branches.append(
                both(Alt(tuple(literal for literal, integral in texts if literal == integral)), constrained, source)
            )
            branches += [
                literal
                for literal, integral in texts
                if literal != integral and not is_nothing(both(integral, constrained, source))
            ]
        return either([branch for branch in branches if not is_nothing(branch)])

    def _exactly(self, value: Any) -> Expression:
        if isinstance(value, Mapping):
            pairs = [Seq((self._exactly(name), self._colon, self._exactly(item))) for name, item in value.items()]
            return self._enclosed("{", "}", self._joined(pairs))
        if isinstance(value, list):
            return self._enclosed("[", "]", self._joined([self._exactly(item) for item in value]))
        return text(json.dumps(value, ensure_ascii=False, allow_nan=False))

    def _joined(self, items: Sequence[Expression]) -> Expression:
        return Seq(
            tuple(expression for n, item in enumerate(items) for expression in ((self._comma, item) if n else (item,)))
        )

    def _enclosed(self, first: str, last: str, content: Expression) -> Expression:
        return Seq((text(first), self._gap, content, self._gap, text(last)))

    def _choice(self, schema: Mapping[str, Any], name: str, place: str) -> Expression:
        branches = schema[name]
        is_list = isinstance(branches, list) and len(branches) > 0
        check(is_list, OP, f"{name} at {place}", "be a list with an entry", branches)
        siblings = {key: value for key, value in schema.items() if key != name}
        if name == "oneOf":
            branches = told_apart(self._flat, branches, siblings, place)
        if siblings:
            branches = [
                merged(siblings, self._flat(branch, f"{place}/{name}/{n}"), place) for n, branch in enumerate(branches)
            ]
        return Alt(tuple(self.value(branch, f"{place}/{name}/{n}") for n, branch in enumerate(branches)))

    # Types

    def _typed(self, kind: str, schema: Mapping[str, Any], place: str) -> Expression:
        if self._longest is not None:
            shorter = {name: min(schema[name], self._longest) for name in ("maxLength", "maxItems") if name in schema}
            schema = Merged(schema, **shorter)
        if kind == "null":
            expression: Expression = text("null")
        elif kind == "boolean":
            expression = Alt((text("true"), text("false")))
        elif kind == "string":
            expression = string_of(schema, place)
        elif kind == "array":
            expression = self._array(schema, place)
            if "contains" in schema:
                expression = both(expression, self._containing(schema, place), f"the schema at {place}")
        elif kind == "object":
            expression = self._object(schema, place)
        else:
            expression = number_of(kind, schema, place)
        return self._denied(expression, kind, schema["not"], place) if "not" in schema else expression

    def _denied(self, expression: Expression, kind: str, schema: Any, place: str) -> Expression:
        """The texts of `made`, of values of one type, whose values do not satisfy the schema of a `not`."""
        flat = self._flat(schema, f"{place}/not")
        if isinstance(flat, bool):
            return NOTHING if flat else expression
        if flat.keys() == {"anyOf"}:
            for alternative in flat["anyOf"]:
                expression = self._denied(expression, kind, alternative, place)
            return expression
        if "const" in flat or "enum" in flat:
            enum = [flat["const"]] if "const" in flat else flat["enum"]
            values = [value for value in enum if TYPES[kind](value) and holds(self._flat, flat, value, place)]
            ambiguous = kind in ("number", "array", "object") and len(values) > 0
            unsupported(
                ambiguous, f"{place}/not", f"listed values of type {kind}", "They may be written in several ways."
            )
            if not values:
                return expression
            # Whole numbers are written without a point, and zero also with a sign.
            texts = [self._exactly(int(value) if kind == "integer" else value) for value in values]
            zero = [text("-0")] if kind == "integer" and 0 in values else []
            return without(expression, Alt((*texts, *zero)), f"the schema at {place}")
        stray = sorted(flat.keys() - OF_STRINGS)
        unsupported(bool(stray), f"{place}/not", f"{stray and stray[0]!r} in a not")
        if "type" in flat:
            kinds = kinds_of({"type": flat["type"]}, place)
            unsupported(kind == "number" and "integer" in kinds, f"{place}/not", "integers in a not of a number")
            if kind not in kinds and not (kind == "integer" and "number" in kinds):
                return expression
        strings = {name: value for name, value in flat.items() if name != "type"}
        if kind != "string" or not strings:
            return NOTHING
        return without(expression, string_of(strings, f"{place}/not", wide=True), f"the schema at {place}")

    def _array(self, schema: Mapping[str, Any], place: str) -> Expression:
        first = [self.value(item_schema, f"{place}/prefixItems") for item_schema in schema.get("prefixItems", ())]
        items = schema.get("items", True)
        minimum, maximum = counts(schema, "minItems", "maxItems", place)
        if maximum is not None and maximum < minimum:
            return NOTHING
        if schema.get("uniqueItems", False) and (maximum is None or maximum > 1):
            return self._unique(schema, minimum, maximum, place)
        if not first:
            item = self.value(items, f"{place}/items") if maximum != 0 else EMPTY
            return self._enclosed("[", "]", separated(item, self._comma, minimum, maximum))
        # Without a prefix item there are no later ones.
        top = len(first) if maximum is None or maximum > len(first) else maximum
        forms = [self._joined(first[:count]) for count in range(minimum, top)] if minimum < top else []
        prefix = first[:top]
        if items is False or (maximum is not None and maximum <= len(first)):
            if minimum > top:
                return NOTHING
            forms.append(self._joined(prefix))
        else:
            item = Seq((self._comma, self.value(items, f"{place}/items")))
            later_items = Repeat(item, max(0, minimum - len(first)), None if maximum is None else maximum - len(first))
            forms.append(Seq((self._joined(prefix), later_items)))
        return self._enclosed("[", "]", either(forms))

    def _containing(self, schema: Mapping[str, Any], place: str) -> Expression:
        """Arrays of the items of a schema in which so many satisfy `contains`."""
        unsupported("maxContains" in schema, f"{place}/maxContains", "maxContains")
        kinds = list(schema.get("prefixItems", ()))
        kinds += [schema.get("items", True)] if schema.get("items", True) is not False else []
        item = Alt(tuple(self.value(item_schema, f"{place}/items") for item_schema in kinds))
        matching_item = Alt(
            tuple(self.value(together(item_schema, schema["contains"]), f"{place}/contains") for item_schema in kinds)
        )
        any_items, minimum = Repeat(Seq((self._comma, item)), 0, None), schema["minContains"]
        first = Alt(
            (matching_item, Seq((item, any_items, self._comma, matching_item)))
        )  # the first that satisfies it, and those before it
        later_matches = Repeat(Seq((any_items, self._comma, matching_item)), minimum - 1, minimum - 1)
        return self._enclosed("[", "]", Seq((first, later_matches, any_items)))

    def _unique(self, schema: Mapping[str, Any], minimum: int, maximum: int | None, place: str) -> Expression:
        """An array of different items, which are listed: in the order of the list."""
        fault = "uniqueItems of items that are not listed"
        flat = self._flat(schema.get("items", True), f"{place}/items")
        is_enum = not isinstance(flat, bool) and (flat.keys() & {"const", "enum"} or flat.get("type") == "boolean")
        unsupported(
            not is_enum or "prefixItems" in schema,
            f"{place}/uniqueItems",
            fault,
            "Give items an enum, or set maxItems to 1.",
        )
        assert not isinstance(flat, bool)
        values = [flat["const"]] if "const" in flat else flat.get("enum", [False, True])
        if "const" in flat:
            values = [value for value in values if is_among(value, flat.get("enum", values))]
        constraints = Merged({name: entry for name, entry in flat.items() if name not in ("const", "enum")})
        items = [self.value(Merged(constraints, const=value), f"{place}/items") for value in different(values)]
        return self._enclosed(
            "[", "]", self._some([(False, entry) for entry in items if not is_nothing(entry)], minimum, maximum)
        )

    def _object(self, schema: Mapping[str, Any], place: str) -> Expression:
        properties, required = schema.get("properties", {}), set(schema.get("required", []))
        other_properties = schema.get("additionalProperties", schema.get("unevaluatedProperties", True))
        minimum, maximum = counts(schema, "minProperties", "maxProperties", place)
        names = schema.get("propertyNames", True)
        names = names if names is True else self.value(together({"type": "string"}, names), f"{place}/propertyNames")
        property_schemas = {name: property_of(schema, name, other_properties) for name in _ordered(schema)}
        if names is not True and is_nothing(names):
            return NOTHING if minimum or required else self._enclosed("{", "}", EMPTY)
        if names is not True:
            name_automaton = compiled(names, f"the schema at {place}/propertyNames")
            property_schemas = {
                name: property_schema if name_automaton.accepts(_written(name).encode()) else False
                for name, property_schema in property_schemas.items()
            }
        if any(property_schema is not False for property_schema in property_schemas.values()) or required:
            pairs = []
            for name, property_schema in property_schemas.items():
                value = self.value(property_schema, f"{place}/properties/{name}")
                pairs.append((name in required, Seq((self._exactly(name), self._colon, value))))
            return self._enclosed("{", "}", self._some(pairs, minimum, maximum))
        fault = "minProperties above 1 of an object without properties"
        unsupported(minimum > 1, place, fault, "Its names may repeat.")
        kinds = self._kinds_of_names(schema, other_properties, place)
        free = []
        for name_, value in kinds:
            name_ = name_ if names is True else both(name_, names, f"the schema at {place}/propertyNames")
            property_names = Alt(tuple(map(self._exactly, properties)))
            free.append(
                Seq(
                    (
                        without(name_, property_names, f"the schema at {place}") if properties else name_,
                        self._colon,
                        value,
                    )
                )
            )
        content = separated(either(free), self._comma, minimum, maximum) if free else NOTHING if minimum else EMPTY
        return self._enclosed("{", "}", content)

    def _kinds_of_names(
        self, schema: Mapping[str, Any], other_properties: Any, place: str
    ) -> list[tuple[Expression, Expression]]:
        """The names that an object without properties may have, and their values."""
        patterns, kinds = schema.get("patternProperties", {}), list[tuple[Expression, Expression]]()
        for pattern, subschema in patterns.items():
            name = matching(pattern)
            for other, two in patterns.items():
                if two != subschema:  # a name of both would need a value of both
                    name = without(name, matching(other, wide=True), f"the schema at {place}")
            kinds.append((name, self.value(subschema, f"{place}/patternProperties")))
        if other_properties is False or (patterns and other_properties is True):
            return kinds
        name = string(1, None)
        for pattern in patterns:
            name = without(name, matching(pattern, wide=True), f"the schema at {place}")
        return [*kinds, (name, self.value(other_properties, f"{place}/additionalProperties"))]

    def _some(self, items: Sequence[tuple[bool, Expression]], minimum: int, maximum: int | None) -> Expression:
        """From `least` to `most` of the parts in their order, those that must be there among them."""
        return Subsequence(
            tuple(items), self._comma, minimum, maximum if maximum is None or maximum < len(items) else None
        )


@lru_cache(maxsize=8)
def _anything(depth: int, gap: Expression, comma: Expression, colon: Expression) -> Expression:
    """A value without a schema, with no more than `depth` arrays or objects inside each other."""
    branches = [string(0, None), numbers(None, None), text("true"), text("false"), text("null")]
    if depth > 0:
        inner = _anything(depth - 1, gap, comma, colon)
        for first, item, last in (("[", inner, "]"), ("{", Seq((string(0, None), colon, inner)), "}")):
            # A part and its comma, or the last part: as one automaton they share their states.
            items = optional(Seq((Repeat(Seq((item, comma)), 0, None), item)))
            branches.append(Seq((text(first), gap, items, gap, text(last))))
    return deterministic(Alt(tuple(branches)), "a value without a schema")


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


def _characters(expression: Expression) -> Ranges:
    """All that occur in an expression."""
    if isinstance(expression, Chars):
        return expression.ranges
    if isinstance(expression, Repeat):
        return _characters(expression.item)
    assert not isinstance(expression, (Machine, Subsequence))
    return normal(bounds for inner in expression.items for bounds in _characters(inner))
