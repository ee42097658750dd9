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
    """The texts that satisfy a schema, as `Grammar.json_schema` describes them. What JSON Schema does not have is added to `unknown`.

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
        found, level = self._flat.found(reference, place), self._open.get(reference, 0)
        if level > self._depth:
            return NOTHING
        if self._cycles is None:
            self._cycles = self._flat.cycles()
        alone = all(name == "$ref" or is_note(name) for name in schema)
        key = reference, tuple(self._open.get(one, 0) for one in self._cycles[reference])
        if alone and key in self._followed:
            return self._followed[key]
        self._open[reference] = level + 1
        made = self.value(found if alone else {"allOf": [schema]}, reference if alone else place)
        self._open[reference] = level
        if alone:
            self._followed[key] = made
        return made

    def _conditional(self, schema: Mapping[str, Any], place: str) -> Expression:
        """Where the first condition holds and where it does not: what it names has the values or is absent, or not."""
        (when, then, otherwise), *more = schema[CONDITIONS]
        rest = {name: value for name, value in schema.items() if name != CONDITIONS} | (
            {CONDITIONS: more} if more else {}
        )
        condition = self._flat(when, f"{place}/if")
        words = "an if, a not or a oneOf that is none of required properties and listed values"
        unsupported(isinstance(condition, bool) or not condition.keys() <= OF_OBJECTS, place, words)
        assert not isinstance(condition, bool)
        unsupported(condition.get("type", "object") != "object", place, words)
        listed = {}
        for name, one in condition.get("properties", {}).items():
            flat = self._flat(one, f"{place}/if/properties/{name}")
            fits = not isinstance(flat, bool) and flat.keys() <= ENUMERATED and flat.keys() & {"const", "enum"}
            unsupported(not fits, place, words)
            listed[name] = flat
        branches: list[tuple[Mapping[str, Any], Any]] = [(condition, then)]
        for name, one in listed.items():
            branches.append(({"type": "object", "properties": {name: {"not": one}}, "required": [name]}, otherwise))
        for name in condition.get("required", ()):
            branches.append(({"type": "object", "properties": {name: False}}, otherwise))
        if "type" in rest and "type" in condition:  # other values than objects do not satisfy it
            kinds = [kind for kind in kinds_of(rest, place) if kind != "object"]
            branches += [({"type": kinds}, otherwise)] if kinds else []
        found = [merged(merged(rest, one, place), self._flat(part, place), place) for one, part in branches]
        return either([self.value(one, place) for one in found])

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
            several = kinds_of({"type": kinds}, place)
            values = [value for value in values if any(TYPES[kind](value) for kind in several)]
        more = {name: value for name, value in schema.items() if name not in ("enum", "const", "not", "type")}
        spend(len(values))
        if not more or not values:
            return Alt(tuple(map(self._exactly, values)))
        spoken = kinds_of(more if kinds is None else {"type": kinds}, place)
        parts, others = list[Expression](), list[Any]()
        for value in values:
            if type(value) in (int, float):
                parts += [self._exactly(value)] if has_number(more, value, place) else []
            elif any(TYPES[kind](value) for kind in spoken):
                others.append(value)
            else:
                parts.append(self._exactly(value))  # keywords for other types demand nothing of it
        if others:
            # Whole numbers inside may be listed as 1.0, which is no text of the type integer.
            rest, words = self.value(Merged(more, type=spoken), place), f"the schema at {place}"
            texts = [(self._exactly(value), self._exactly(whole(value))) for value in others]
            parts.append(both(Alt(tuple(one for one, plain in texts if one == plain)), rest, words))
            parts += [one for one, plain in texts if one != plain and not is_nothing(both(plain, rest, words))]
        return either([part for part in parts if not is_nothing(part)])

    def _exactly(self, value: Any) -> Expression:
        if isinstance(value, Mapping):
            pairs = [Seq((self._exactly(name), self._colon, self._exactly(one))) for name, one in value.items()]
            return self._enclosed("{", "}", self._joined(pairs))
        if isinstance(value, list):
            return self._enclosed("[", "]", self._joined([self._exactly(one) for one in value]))
        return text(json.dumps(value, ensure_ascii=False, allow_nan=False))

    def _joined(self, parts: Sequence[Expression]) -> Expression:
        return Seq(tuple(one for n, part in enumerate(parts) for one in ((self._comma, part) if n else (part,))))

    def _enclosed(self, first: str, last: str, inside: Expression) -> Expression:
        return Seq((text(first), self._gap, inside, self._gap, text(last)))

    def _choice(self, schema: Mapping[str, Any], name: str, place: str) -> Expression:
        branches = schema[name]
        several = isinstance(branches, list) and len(branches) > 0
        check(several, OP, f"{name} at {place}", "be a list with an entry", branches)
        rest = {key: value for key, value in schema.items() if key != name}
        if name == "oneOf":
            branches = told_apart(self._flat, branches, rest, place)
        if rest:
            branches = [
                merged(rest, self._flat(branch, f"{place}/{name}/{n}"), place) for n, branch in enumerate(branches)
            ]
        return Alt(tuple(self.value(branch, f"{place}/{name}/{n}") for n, branch in enumerate(branches)))

    # Types

    def _typed(self, kind: str, schema: Mapping[str, Any], place: str) -> Expression:
        if self._longest is not None:
            shorter = {name: min(schema[name], self._longest) for name in ("maxLength", "maxItems") if name in schema}
            schema = Merged(schema, **shorter)
        if kind == "null":
            made: Expression = text("null")
        elif kind == "boolean":
            made = Alt((text("true"), text("false")))
        elif kind == "string":
            made = string_of(schema, place)
        elif kind == "array":
            made = self._array(schema, place)
            if "contains" in schema:
                made = both(made, self._containing(schema, place), f"the schema at {place}")
        elif kind == "object":
            made = self._object(schema, place)
        else:
            made = number_of(kind, schema, place)
        return self._denied(made, kind, schema["not"], place) if "not" in schema else made

    def _denied(self, made: Expression, kind: str, schema: Any, place: str) -> Expression:
        """The texts of `made`, of values of one type, whose values do not satisfy the schema of a `not`."""
        flat = self._flat(schema, f"{place}/not")
        if isinstance(flat, bool):
            return NOTHING if flat else made
        if flat.keys() == {"anyOf"}:
            for one in flat["anyOf"]:
                made = self._denied(made, kind, one, place)
            return made
        if "const" in flat or "enum" in flat:
            listed = [flat["const"]] if "const" in flat else flat["enum"]
            values = [value for value in listed if TYPES[kind](value) and holds(self._flat, flat, value, place)]
            several = kind in ("number", "array", "object") and len(values) > 0
            unsupported(
                several, f"{place}/not", f"listed values of type {kind}", "They may be written in several ways."
            )
            if not values:
                return made
            # Whole numbers are written without a point, and zero also with a sign.
            texts = [self._exactly(int(value) if kind == "integer" else value) for value in values]
            zero = [text("-0")] if kind == "integer" and 0 in values else []
            return without(made, Alt((*texts, *zero)), f"the schema at {place}")
        stray = sorted(flat.keys() - OF_STRINGS)
        unsupported(bool(stray), f"{place}/not", f"{stray and stray[0]!r} in a not")
        if "type" in flat:
            kinds = kinds_of({"type": flat["type"]}, place)
            unsupported(kind == "number" and "integer" in kinds, f"{place}/not", "integers in a not of a number")
            if kind not in kinds and not (kind == "integer" and "number" in kinds):
                return made
        strings = {name: value for name, value in flat.items() if name != "type"}
        if kind != "string" or not strings:
            return NOTHING
        return without(made, string_of(strings, f"{place}/not", wide=True), f"the schema at {place}")

    def _array(self, schema: Mapping[str, Any], place: str) -> Expression:
        first = [self.value(one, f"{place}/prefixItems") for one in schema.get("prefixItems", ())]
        items = schema.get("items", True)
        least, most = counts(schema, "minItems", "maxItems", place)
        if most is not None and most < least:
            return NOTHING
        if schema.get("uniqueItems", False) and (most is None or most > 1):
            return self._unique(schema, least, most, place)
        if not first:
            item = self.value(items, f"{place}/items") if most != 0 else EMPTY
            return self._enclosed("[", "]", separated(item, self._comma, least, most))
        # Without a prefix item there are no later ones.
        top = len(first) if most is None or most > len(first) else most
        forms = [self._joined(first[:count]) for count in range(least, top)] if least < top else []
        whole = first[:top]
        if items is False or (most is not None and most <= len(first)):
            if least > top:
                return NOTHING
            forms.append(self._joined(whole))
        else:
            item = Seq((self._comma, self.value(items, f"{place}/items")))
            rest = Repeat(item, max(0, least - len(first)), None if most is None else most - len(first))
            forms.append(Seq((self._joined(whole), rest)))
        return self._enclosed("[", "]", either(forms))

    def _containing(self, schema: Mapping[str, Any], place: str) -> Expression:
        """Arrays of the items of a schema in which so many satisfy `contains`."""
        unsupported("maxContains" in schema, f"{place}/maxContains", "maxContains")
        kinds = list(schema.get("prefixItems", ()))
        kinds += [schema.get("items", True)] if schema.get("items", True) is not False else []
        item = Alt(tuple(self.value(one, f"{place}/items") for one in kinds))
        found = Alt(tuple(self.value(together(one, schema["contains"]), f"{place}/contains") for one in kinds))
        more, least = Repeat(Seq((self._comma, item)), 0, None), schema["minContains"]
        first = Alt((found, Seq((item, more, self._comma, found))))  # the first that satisfies it, and those before it
        others = Repeat(Seq((more, self._comma, found)), least - 1, least - 1)
        return self._enclosed("[", "]", Seq((first, others, more)))

    def _unique(self, schema: Mapping[str, Any], least: int, most: int | None, place: str) -> Expression:
        """An array of different items, which are listed: in the order of the list."""
        words = "uniqueItems of items that are not listed"
        flat = self._flat(schema.get("items", True), f"{place}/items")
        listed = not isinstance(flat, bool) and (flat.keys() & {"const", "enum"} or flat.get("type") == "boolean")
        unsupported(
            not listed or "prefixItems" in schema,
            f"{place}/uniqueItems",
            words,
            "Give items an enum, or set maxItems to 1.",
        )
        assert not isinstance(flat, bool)
        values = [flat["const"]] if "const" in flat else flat.get("enum", [False, True])
        if "const" in flat:
            values = [value for value in values if is_among(value, flat.get("enum", values))]
        rest = Merged({name: one for name, one in flat.items() if name not in ("const", "enum")})
        parts = [self.value(Merged(rest, const=value), f"{place}/items") for value in different(values)]
        return self._enclosed("[", "]", self._some([(False, one) for one in parts if not is_nothing(one)], least, most))

    def _object(self, schema: Mapping[str, Any], place: str) -> Expression:
        own, required = schema.get("properties", {}), set(schema.get("required", []))
        others = schema.get("additionalProperties", schema.get("unevaluatedProperties", True))
        least, most = counts(schema, "minProperties", "maxProperties", place)
        names = schema.get("propertyNames", True)
        names = names if names is True else self.value(together({"type": "string"}, names), f"{place}/propertyNames")
        known = {name: property_of(schema, name, others) for name in _ordered(schema)}
        if names is not True and is_nothing(names):
            return NOTHING if least or required else self._enclosed("{", "}", EMPTY)
        if names is not True:
            fits = compiled(names, f"the schema at {place}/propertyNames")
            known = {name: one if fits.accepts(_written(name).encode()) else False for name, one in known.items()}
        if any(one is not False for one in known.values()) or required:
            pairs = []
            for name, one in known.items():
                value = self.value(one, f"{place}/properties/{name}")
                pairs.append((name in required, Seq((self._exactly(name), self._colon, value))))
            return self._enclosed("{", "}", self._some(pairs, least, most))
        words = "minProperties above 1 of an object without properties"
        unsupported(least > 1, place, words, "Its names may repeat.")
        kinds = self._kinds_of_names(schema, others, place)
        free = []
        for name_, value in kinds:
            name_ = name_ if names is True else both(name_, names, f"the schema at {place}/propertyNames")
            listed = Alt(tuple(map(self._exactly, own)))
            free.append(Seq((without(name_, listed, f"the schema at {place}") if own else name_, self._colon, value)))
        inside = separated(either(free), self._comma, least, most) if free else NOTHING if least else EMPTY
        return self._enclosed("{", "}", inside)

    def _kinds_of_names(
        self, schema: Mapping[str, Any], others: Any, place: str
    ) -> list[tuple[Expression, Expression]]:
        """The names that an object without properties may have, and their values."""
        patterns, found = schema.get("patternProperties", {}), list[tuple[Expression, Expression]]()
        for pattern, one in patterns.items():
            name = matching(pattern)
            for other, two in patterns.items():
                if two != one:  # a name of both would need a value of both
                    name = without(name, matching(other, wide=True), f"the schema at {place}")
            found.append((name, self.value(one, f"{place}/patternProperties")))
        if others is False or (patterns and others is True):
            return found
        name = string(1, None)
        for pattern in patterns:
            name = without(name, matching(pattern, wide=True), f"the schema at {place}")
        return [*found, (name, self.value(others, f"{place}/additionalProperties"))]

    def _some(self, parts: Sequence[tuple[bool, Expression]], least: int, most: int | None) -> Expression:
        """From `least` to `most` of the parts in their order, those that must be there among them."""
        return Subsequence(tuple(parts), self._comma, least, most if most is None or most < len(parts) else None)


@lru_cache(maxsize=8)
def _anything(depth: int, gap: Expression, comma: Expression, colon: Expression) -> Expression:
    """A value without a schema, with no more than `depth` arrays or objects inside each other."""
    parts = [string(0, None), numbers(None, None), text("true"), text("false"), text("null")]
    if depth > 0:
        inner = _anything(depth - 1, gap, comma, colon)
        for first, part, last in (("[", inner, "]"), ("{", Seq((string(0, None), colon, inner)), "}")):
            # A part and its comma, or the last part: as one automaton they share their states.
            several = optional(Seq((Repeat(Seq((part, comma)), 0, None), part)))
            parts.append(Seq((text(first), gap, several, gap, text(last))))
    return deterministic(Alt(tuple(parts)), "a value without a schema")


def _ordered(schema: Mapping[str, Any]) -> list[str]:
    """The names that an object has, in the order in which they are written."""
    own, first = schema.get("properties", {}), schema.get("propertyOrdering", [])
    orders = {name: one.get("propertyOrder", 1000) if isinstance(one, Mapping) else 1000 for name, one in own.items()}
    fits = all(type(order) in (int, float) for order in orders.values())
    names = sorted(own, key=lambda name: orders[name]) if fits else list(own)
    known = dict.fromkeys([*names, *schema.get("required", [])])
    return list(dict.fromkeys([*(name for name in first if name in known), *known]))


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _characters(part: Expression) -> Ranges:
    """All that occur in an expression."""
    if isinstance(part, Chars):
        return part.ranges
    if isinstance(part, Repeat):
        return _characters(part.part)
    assert not isinstance(part, (Machine, Subsequence))
    return normal(one for inner in part.parts for one in _characters(inner))
