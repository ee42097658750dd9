"""JSON schemas as expressions of `language`: texts that satisfy the schema, written as `json.dumps` writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from pdkernels._validation import check, check_type, refuse, sentence
from pdkernels.decoding.grammar.language import (
    EMPTY,
    NOTHING,
    OP,
    Alt,
    Chars,
    Expression,
    Ranges,
    Repeat,
    Seq,
    complement,
    either,
    normal,
    optional,
    separated,
    sequence,
    text,
)
from pdkernels.decoding.grammar.numbers import integers, numbers
from pdkernels.decoding.grammar.regex import parsed

Schema = Mapping[str, Any] | bool

_NOTES = frozenset(
    "title description default examples $schema $id $comment $anchor deprecated readOnly writeOnly $defs definitions".split()
)
"""Keywords that demand nothing."""
_KEYWORDS = {
    "string": frozenset("minLength maxLength pattern format".split()),
    "integer": frozenset("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split()),
    "number": frozenset("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split()),
    "array": frozenset("items prefixItems minItems maxItems uniqueItems".split()),
    "object": frozenset("properties required additionalProperties minProperties maxProperties".split()),
    "boolean": frozenset[str](),
    "null": frozenset[str](),
}
_APPLIED = frozenset("type enum const anyOf oneOf allOf $ref".split())
_KNOWN = _NOTES | _APPLIED | frozenset().union(*_KEYWORDS.values())
_TYPES: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: type(value) is int or (type(value) is float and value.is_integer()),
    "number": lambda value: type(value) in (int, float),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "boolean": lambda value: type(value) is bool,
    "null": lambda value: value is None,
}
_MAX_PARTS = 3_000
_ANYTHING_DEPTH = 1  # of arrays and objects inside a value without a schema

_CONTROL = ((0, 31),)
_PLAIN = complement(normal([*_CONTROL, (34, 34), (92, 92)]))
_ESCAPES = {34: '\\"', 92: "\\\\", 8: "\\b", 9: "\\t", 10: "\\n", 12: "\\f", 13: "\\r"}
_CHARACTER = Alt((Chars(_PLAIN), Seq((text("\\"), Chars(normal((ord(one), ord(one)) for one in '"\\bfnrt'))))))

_DAY = r"(0[1-9]|1\d|2[0-8])"
_DATE = rf"\d{{4}}-((0[1-9]|1[0-2])-{_DAY}|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_FORMATS = {
    "date": _DATE.replace(r"\d{4}", r"[1-9]\d{3}"),
    "time": _TIME,
    "date-time": _DATE.replace(r"\d{4}", r"[1-9]\d{3}") + "T" + _TIME,
    "uuid": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "email": r"[a-z0-9]+([._-][a-z0-9]+){0,3}@[a-z0-9]+(-[a-z0-9]+){0,2}(\.[a-z]{2,8}){1,3}",
}


def parsed_schema(schema: Schema | str, whitespace: str | None, depth: int) -> Expression:
    """The texts that satisfy a schema.

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
    try:
        return _Compiler(schema, whitespace, depth).value(schema, "#")
    except RecursionError:
        raise ValueError(sentence(OP, "the schema has too many levels", "Lower the depth.")) from None


class _Compiler:
    def __init__(self, root: Any, whitespace: str | None, depth: int) -> None:
        self._root, self._depth = root, depth
        self._open: dict[str, int] = {}  # how often each reference is being followed
        gap = EMPTY if whitespace is None else parsed(whitespace)
        space = optional(text(" ")) if whitespace is None else gap
        wide = any(not {9, 10, 13, 32}.issuperset(range(first, last + 1)) for first, last in _characters(gap))
        refuse(wide, OP, "whitespace matches characters that are no space in JSON", r"Write [ \t\n\r], not \s.")
        self._gap, self._parts = gap, 0
        self._comma, self._colon = Seq((gap, text(","), space)), Seq((gap, text(":"), space))
        self._any = self._anything(_ANYTHING_DEPTH)

    def value(self, schema: Any, place: str) -> Expression:
        """The texts of the values of a schema, which errors call `place`."""
        self._parts += 1
        refuse(self._parts > _MAX_PARTS, OP, f"the schema unfolds to more than {_MAX_PARTS} parts", "Lower the depth.")
        if schema is True or schema == {}:
            return self._any
        if schema is False:
            return NOTHING
        check(isinstance(schema, Mapping), OP, f"schema at {place}", "be an object or a bool", type(schema).__name__)
        self._check_keywords(schema, place)
        schema = {name: value for name, value in schema.items() if name not in _NOTES}
        if "allOf" in schema:
            return self.value(self._merged(schema, place), place)
        if "$ref" in schema:
            return self._reference(schema, place)
        if not schema:
            return self._any
        if "const" in schema or "enum" in schema:
            return self._listed(schema, place)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                return self._choice(schema, name, place)
        kinds = schema.get("type")
        if kinds is None:
            kinds = sorted(kind for kind, words in _KEYWORDS.items() if words & schema.keys() and kind != "integer")
            self._refuse(len(kinds) != 1, place, "without a type", f"Its keywords are those of {', '.join(kinds)}.")
        several = [kinds] if isinstance(kinds, str) else kinds
        fits = isinstance(several, list) and all(isinstance(kind, str) and kind in _KEYWORDS for kind in several)
        check(fits, OP, f"type at {place}", f"be among {', '.join(_KEYWORDS)}", kinds)
        if "number" in several:
            several = [kind for kind in several if kind != "integer"]
        return either([self._typed(kind, schema, place) for kind in several])

    def _check_keywords(self, schema: Mapping[str, Any], place: str) -> None:
        for name in schema:
            self._refuse(name not in _KNOWN, f"{place}/{name}", f"the keyword {name!r}")
        of = schema.get("type")
        kinds = {of} if isinstance(of, str) else set(of) if isinstance(of, list) else set()
        own = frozenset[str]().union(*(_KEYWORDS.get(one, frozenset()) for one in kinds if isinstance(one, str)))
        stray = sorted(schema.keys() - _NOTES - _APPLIED - own) if kinds else []
        words = f"{stray and stray[0]!r} beside type {of!r}"
        self._refuse(bool(stray), place, words, "It demands nothing there: leave it out.")

    @staticmethod
    def _refuse(condition: bool, place: str, words: str, remedy: str = "") -> None:
        if condition:
            raise NotImplementedError(
                sentence(OP, f"the schema has {words} at {place}, which is not supported", remedy)
            )

    def _merged(self, schema: Mapping[str, Any], place: str) -> dict[str, Any]:
        """All parts of an allOf in one schema."""
        made = {name: value for name, value in schema.items() if name != "allOf"}
        parts = schema["allOf"]
        check(isinstance(parts, list) and len(parts) > 0, OP, f"allOf at {place}", "be a list with an entry", parts)
        for part in parts:
            if part is True:
                continue
            self._refuse(part is False, place, "false in allOf")
            if "$ref" in part and len(part.keys() - _NOTES) == 1:
                part = self._found(part["$ref"], place)
            if "allOf" in part:
                part = self._merged(part, place)
            for name, value in part.items():
                if name in _NOTES:
                    continue
                if name not in made or made[name] == value:
                    made[name] = value
                elif name == "properties":
                    both = set(made[name]) & set(value)
                    clash = sorted(one for one in both if made[name][one] != value[one])
                    self._refuse(bool(clash), place, f"{clash and clash[0]!r} twice in allOf")
                    made[name] = {**made[name], **value}
                elif name == "required":
                    made[name] = [*made[name], *(one for one in value if one not in made[name])]
                elif name in ("minimum", "exclusiveMinimum", "minLength", "minItems"):
                    made[name] = max(made[name], value)
                elif name in ("maximum", "exclusiveMaximum", "maxLength", "maxItems"):
                    made[name] = min(made[name], value)
                else:
                    self._refuse(True, place, f"{name!r} twice in allOf")
        return made

    def _found(self, reference: Any, place: str) -> Any:
        local = isinstance(reference, str) and reference.startswith("#")
        self._refuse(
            not local, place, f"the reference {reference!r}", "Only those into the schema itself are followed."
        )
        found = self._root
        for part in reference[1:].split("/")[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
                continue
            there = isinstance(found, Mapping) and name in found
            check(there, OP, f"$ref at {place}", "point into the schema", repr(reference))
            found = found[name]
        return found

    def _reference(self, schema: Mapping[str, Any], place: str) -> Expression:
        """A reference, no more than `depth` times inside itself: a value that needs more levels is none."""
        reference, more = schema["$ref"], sorted(schema.keys() - {"$ref"})
        self._refuse(bool(more), place, f"{more and more[0]!r} beside a $ref", "Put both into an allOf.")
        found, level = self._found(reference, place), self._open.get(reference, 0)
        if level > self._depth:
            return NOTHING
        self._open[reference] = level + 1
        made = self.value(found, reference)
        self._open[reference] = level
        return made

    def _listed(self, schema: Mapping[str, Any], place: str) -> Expression:
        """One of the values of an enum or a const."""
        values = [schema["const"]] if "const" in schema else schema["enum"]
        check(isinstance(values, list), OP, f"enum at {place}", "be a list", type(values).__name__)
        if "const" in schema and "enum" in schema:
            values = [value for value in values if any(_same(value, one) for one in schema["enum"])]
        kinds = schema.get("type")
        if kinds is not None:
            several = [kinds] if isinstance(kinds, str) else kinds
            values = [value for value in values if any(_TYPES[kind](value) for kind in several)]
        more = sorted(schema.keys() - {"type", "enum", "const"})
        self._refuse(bool(more), place, f"{more and more[0]!r} beside listed values")
        return Alt(tuple(self._exactly(value) for value in values))

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
        check(
            isinstance(branches, list) and len(branches) > 0,
            OP,
            f"{name} at {place}",
            "be a list with an entry",
            branches,
        )
        rest = {key: value for key, value in schema.items() if key != name}
        self._refuse("anyOf" in rest or "oneOf" in rest, place, "both anyOf and oneOf")
        if rest:
            branches = [self._merged({**rest, "allOf": [branch]}, place) for branch in branches]
        if name == "oneOf":
            facts = [self._fact(branch, place) for branch in branches]
            apart = all(_apart(a, b) for n, a in enumerate(facts) for b in facts[n + 1 :])
            remedy = "Give them different types, or a required property with different values, or use anyOf."
            self._refuse(not apart, place, "oneOf with branches that may overlap", remedy)
        return Alt(tuple(self.value(branch, f"{place}/{name}/{n}") for n, branch in enumerate(branches)))

    def _fact(self, schema: Any, place: str) -> tuple[set[str], dict[str, list[Any]], list[Any] | None]:
        """What tells a branch from others: its types, its required properties with listed values, its own listed values."""
        for _ in range(16):
            if not isinstance(schema, Mapping) or "$ref" not in schema:
                break
            schema = self._found(schema["$ref"], place)
        if not isinstance(schema, Mapping):
            return set(_TYPES), {}, None
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        kinds = schema.get("type", list(_TYPES))
        types = {kinds} if isinstance(kinds, str) else set(kinds)
        if "number" in types:
            types.add("integer")
        named = {}
        for name, one in schema.get("properties", {}).items():
            if isinstance(one, Mapping) and name in schema.get("required", ()):
                listed = [one["const"]] if "const" in one else one.get("enum")
                if listed is not None:
                    named[name] = listed
        return types, named, values

    def _typed(self, kind: str, schema: Mapping[str, Any], place: str) -> Expression:
        if kind == "null":
            return text("null")
        if kind == "boolean":
            return Alt((text("true"), text("false")))
        if kind == "string":
            return self._string(schema, place)
        if kind == "array":
            return self._array(schema, place)
        if kind == "object":
            return self._object(schema, place)
        return self._number(kind, schema, place)

    def _number(self, kind: str, schema: Mapping[str, Any], place: str) -> Expression:
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            given = schema.get(name)
            check(given is None or type(given) in (int, float), OP, f"{name} at {place}", "be a number", given)
        self._refuse(schema.get("multipleOf", 1) != 1, f"{place}/multipleOf", "multipleOf other than 1")
        if "multipleOf" in schema:
            kind = "integer"
        low, high = schema.get("minimum"), schema.get("maximum")
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
        return integers(low, high)

    def _string(self, schema: Mapping[str, Any], place: str) -> Expression:
        given = sorted(schema.keys() & {"pattern", "format"})
        sized = sorted(schema.keys() & {"minLength", "maxLength"})
        self._refuse(
            len(given) + bool(sized) > 1, place, f"{(given + sized)[:2]} of one string", "Write one pattern for all."
        )
        if given == ["format"]:
            known = schema["format"] in _FORMATS
            self._refuse(not known, f"{place}/format", f"{schema['format']!r}", f"Known: {', '.join(_FORMATS)}.")
            return self._quoted(parsed(_FORMATS[schema["format"]]))
        if given:
            return self._quoted(parsed(schema["pattern"], search=True))
        least, most = _counts(schema, "minLength", "maxLength", place)
        if most is not None and most < least:
            return NOTHING
        return sequence('"', Repeat(_CHARACTER, least, most), '"')

    def _quoted(self, part: Expression) -> Expression:
        return sequence('"', _escaped(part), '"')

    def _array(self, schema: Mapping[str, Any], place: str) -> Expression:
        first = [self.value(one, f"{place}/prefixItems") for one in schema.get("prefixItems", ())]
        items = schema.get("items", True)
        least, most = _counts(schema, "minItems", "maxItems", place)
        if most is not None and most < least:
            return NOTHING
        one = most is not None and most <= 1
        self._refuse(schema.get("uniqueItems", False) is True and not one, f"{place}/uniqueItems", "uniqueItems")
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

    def _object(self, schema: Mapping[str, Any], place: str) -> Expression:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        check(isinstance(properties, Mapping), OP, f"properties at {place}", "be an object", type(properties).__name__)
        check(isinstance(required, list), OP, f"required at {place}", "be a list", type(required).__name__)
        others = schema.get("additionalProperties", True)
        missing = [name for name in required if name not in properties]
        if missing and others is False:
            return NOTHING
        properties = {**properties, **{name: others for name in missing}}
        for name in ("minProperties", "maxProperties"):
            self._refuse(name in schema, f"{place}/{name}", f"the keyword {name!r}")
        if not properties:
            return self._map(others, place)
        return self._record(properties, required, place)

    def _map(self, schema: Any, place: str) -> Expression:
        """An object with any names, and values of `schema`."""
        if schema is False:
            return self._enclosed("{", "}", EMPTY)
        value = self.value(schema, f"{place}/additionalProperties")
        pair = Seq((sequence('"', Repeat(_CHARACTER, 1, None), '"'), self._colon, value))
        return self._enclosed("{", "}", separated(pair, self._comma, 0, None))

    def _record(self, properties: Mapping[str, Any], required: Sequence[str], place: str) -> Expression:
        """The properties of an object in their order, all `required` ones among them."""
        pairs = []
        for name, schema in properties.items():
            value = self.value(schema, f"{place}/properties/{name}")
            pairs.append((name in required, Seq((self._exactly(name), self._colon, value))))
        forms = []
        for first, (needed, pair) in enumerate(pairs):
            rest = [Seq((self._comma, other)) for _, other in pairs[first + 1 :]]
            more = [one if must else optional(one) for one, (must, _) in zip(rest, pairs[first + 1 :], strict=True)]
            forms.append(Seq((pair, *more)))
            if needed:
                break
        else:
            forms.append(EMPTY)
        return self._enclosed("{", "}", Alt(tuple(forms)))

    def _anything(self, depth: int) -> Expression:
        """A value without a schema, with no more than `depth` arrays or objects inside each other."""
        string = sequence('"', Repeat(_CHARACTER, 0, None), '"')
        parts = [string, numbers(None, None), text("true"), text("false"), text("null")]
        if depth > 0:
            inner = self._anything(depth - 1)
            pair = Seq((string, self._colon, inner))
            parts += [
                self._enclosed("[", "]", separated(inner, self._comma, 0, None)),
                self._enclosed("{", "}", separated(pair, self._comma, 0, None)),
            ]
        return Alt(tuple(parts))


def _counts(schema: Mapping[str, Any], low: str, high: str, place: str) -> tuple[int, int | None]:
    for name in (low, high):
        given = schema.get(name, 0)
        fits = type(given) is int and given >= 0
        check(fits, OP, f"{name} at {place}", "be a whole number of at least 0", given)
    refuse(schema.get(high) is not None and schema[high] > 10**6, OP, f"{high} at {place} is above {10**6}")
    return schema.get(low, 0), schema.get(high)


def _characters(part: Expression) -> Ranges:
    """All that occur in an expression."""
    if isinstance(part, Chars):
        return part.ranges
    if isinstance(part, Repeat):
        return _characters(part.part)
    return normal(one for inner in part.parts for one in _characters(inner))


def _escaped(part: Expression) -> Expression:
    """The texts of `part` inside the quotes of JSON."""
    if isinstance(part, Seq):
        return Seq(tuple(map(_escaped, part.parts)))
    if isinstance(part, Alt):
        return Alt(tuple(map(_escaped, part.parts)))
    if isinstance(part, Repeat):
        return part._replace(part=_escaped(part.part))
    inside = [(max(first, low), min(last, high)) for first, last in part.ranges for low, high in _PLAIN]
    plain = normal((first, last) for first, last in inside if first <= last)
    escaped = [
        text(written)
        for point, written in _ESCAPES.items()
        if any(first <= point <= last for first, last in part.ranges)
    ]
    return Alt((*((Chars(plain),) if plain else ()), *escaped))


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal as JSON: true is not 1."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _apart(
    one: tuple[set[str], dict[str, list[Any]], list[Any] | None],
    other: tuple[set[str], dict[str, list[Any]], list[Any] | None],
) -> bool:
    def differ(values: list[Any] | None, others: list[Any] | None) -> bool:
        return values is not None and others is not None and not any(_same(a, b) for a in values for b in others)

    named = any(differ(values, other[1].get(name)) for name, values in one[1].items())
    return not one[0] & other[0] or differ(one[2], other[2]) or (one[0] == other[0] == {"object"} and named)
