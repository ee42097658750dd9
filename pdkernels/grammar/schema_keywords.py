"""The keywords of JSON schemas: which there are, what their values must be, and those of earlier drafts as those of
2020-12."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

from pdkernels._validation import check, check_text, did_you_mean, refuse
from pdkernels.grammar.language import OP
from pdkernels.grammar.regex import parsed
from pdkernels.grammar.schema_formats import KNOWN as FORMATS
from pdkernels.grammar.schema_formats import OF_STRINGS
from pdkernels.grammar.schema_merge import CONDITIONS, unsupported

_NOTES = frozenset(
    "title description default examples example $schema $id id $comment $anchor $dynamicAnchor $vocabulary deprecated readOnly writeOnly "
    "$defs definitions contentMediaType contentEncoding contentSchema nullable discriminator externalDocs xml markdownDescription "
    "enumDescriptions markdownEnumDescriptions deprecationMessage defaultSnippets propertyOrder errorMessage patternErrorMessage doNotSuggest "
    "suggestSortText allowComments allowTrailingCommas tsType tsEnumNames enumNames".split()
)
"""Keywords that demand nothing; those that begin with ``x-`` do not either."""
KEYWORDS = {
    "string": frozenset("minLength maxLength pattern format".split()),
    "integer": frozenset("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf format".split()),
    "number": frozenset("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf format".split()),
    "array": frozenset(
        "items prefixItems additionalItems unevaluatedItems minItems maxItems uniqueItems contains minContains maxContains".split()
    ),
    "object": frozenset(
        "properties required additionalProperties unevaluatedProperties patternProperties propertyNames minProperties maxProperties "
        "dependencies dependentRequired dependentSchemas propertyOrdering".split()
    ),
    "boolean": frozenset[str](),
    "null": frozenset[str](),
}
_APPLIED = frozenset("type enum const anyOf oneOf allOf not if then else $ref".split())
_REFUSED = frozenset("$dynamicRef $recursiveRef extends disallow divisibleBy".split())
"""Keywords that demand something, in one draft or another, and are not followed."""
_DEMANDS = _REFUSED | _APPLIED | frozenset().union(*KEYWORDS.values())
_BOUNDS = [(f"min{subject}", f"max{subject}") for subject in ("Length", "Items", "Contains", "Properties")]
_COUNTS = frozenset({"multipleOf"}).union(
    name for names in KEYWORDS.values() for name in names if name[:3] in ("min", "max") and not name.endswith("imum")
)
TYPES: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: type(value) is int or (type(value) is float and value.is_integer()),
    "number": lambda value: type(value) in (int, float),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "boolean": lambda value: type(value) is bool,
    "null": lambda value: value is None,
}
_SHAPES: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(
        "properties patternProperties dependencies dependentRequired dependentSchemas".split(), (Mapping, "an object")
    ),
    **dict.fromkeys("required enum anyOf oneOf allOf prefixItems propertyOrdering".split(), (list, "a list")),
    **dict.fromkeys(["pattern", "format"], (str, "a string")),
    "uniqueItems": (bool, "true or false"),
}


Unknown = dict[tuple[str, str], str]
"""Where keywords and formats are first that JSON Schema does not have."""
_MAX_NAMED = 5
_MAX_VALUES = 100_000


def check_values(schema: Any) -> None:
    """Refuses what JSON has not, and too many values, those that a schema holds several times counted each time, before
    anything walks through it."""
    queue, seen = [("the schema", "#", schema)], 0
    while queue:
        seen += 1
        name, place, node = queue.pop()
        if isinstance(node, str):
            check_text(OP, node, f"{name} at {place}")
        check(not isinstance(node, float) or isfinite(node), OP, f"{name} at {place}", "be a finite number", node)
        large = type(node) is int and node.bit_length() > 1023
        check(not large, OP, f"{name} at {place}", "be a number of at most 1,023 bits, as doubles are", node)
        if isinstance(node, Mapping):
            here = place if seen == 1 else f"{place}/{name}"
            for key in node:
                check_text(OP, key, f"a name at {here}")
            queue += [(key, here, value) for key, value in node.items()]
        elif isinstance(node, (list, tuple)):
            queue += [(f"{name}[{number}]", place, value) for number, value in enumerate(node)]
        large = seen + len(queue) > _MAX_VALUES
        refuse(large, OP, f"the schema has more than {_MAX_VALUES} values")


def is_note(name: str) -> bool:
    """Whether a keyword demands nothing. Those that JSON Schema does not have are annotations."""
    return name not in _DEMANDS


def demands(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a schema that demand something."""
    constraints = {name: value for name, value in schema.items() if not is_note(name)}
    if constraints.get("format", "date") not in FORMATS:
        del constraints["format"]
    return constraints


def check_keywords(schema: Mapping[str, Any], place: str, unknown: Unknown) -> None:
    """Checks the keywords of a schema and their values, and adds those that JSON Schema does not have to `unknown`."""
    for name, value in schema.items():
        unsupported(name in _REFUSED, f"{place}/{name}", f"the keyword {name!r}")
        if is_note(name) and name not in _NOTES and not name.startswith("x-"):
            unknown.setdefault(("keyword", name), place)
        kind, expectation = _SHAPES.get(name, (object, ""))
        check(isinstance(value, kind), OP, f"{name} at {place}", f"be {expectation}", type(value).__name__)
        if name == "format" and value not in FORMATS:
            unknown.setdefault((name, value), place)
    for name in KEYWORDS["number"] & schema.keys() - {"format"}:
        number = schema[name]
        finite = type(number) is int or (type(number) is float and isfinite(number))
        valid = finite or (type(number) is bool and name.startswith("exclusive"))
        check(valid, OP, f"{name} at {place}", "be a finite number", number)
    check(schema.get("multipleOf", 1) > 0, OP, f"multipleOf at {place}", "be above 0", schema.get("multipleOf"))
    for low, high in _BOUNDS:
        if low in schema or high in schema:
            counts(schema, low, high, place)
    for pattern in schema.get("patternProperties", {}):
        parsed(pattern)
    of = schema.get("type")
    kinds = [of] if isinstance(of, str) else of if isinstance(of, list) else []
    for keyword, values in (
        ("type", kinds),
        *((name, schema.get(name, ())) for name in ("required", "propertyOrdering")),
    ):
        for entry in values:
            check(isinstance(entry, str), OP, f"{keyword} at {place}", "hold strings", type(entry).__name__)
    applicable = frozenset[str]().union(*(KEYWORDS.get(entry, frozenset()) for entry in kinds))
    stray = sorted(name for name in schema if not is_note(name) and name not in _APPLIED | applicable) if kinds else []
    if kinds and "string" not in kinds and schema.get("format") in OF_STRINGS:
        stray.append("format")
    for name in dict.fromkeys(stray):
        unknown.setdefault((f"type {of!r}", name), place)


def warning_of(unknown: Unknown) -> str:
    """What a warning says of keywords and formats that demand nothing: those that JSON Schema does not have, and those
    for values of other types than the schema has; empty without any."""
    foreign, stray = list[str](), list[str]()
    for (subject, name), place in unknown.items():
        if subject in ("keyword", "format"):
            hint = did_you_mean(name, _DEMANDS | _NOTES if subject == "keyword" else FORMATS).strip()
            foreign.append(f"the {subject} {name[:40]!r} at {place[:80]}{f' ({hint})' if hint else ''}")
        else:
            stray.append(f"{name!r} beside {subject[:80]} at {place[:80]}")
    sentence_of_foreign = f"JSON Schema does not have {_few(foreign)}, which demand nothing" if foreign else ""
    return (
        sentence_of_foreign
        + ("; " if foreign and stray else "")
        + (f"{_few(stray)} demand nothing there" if stray else "")
    )


def _few(mentions: list[str]) -> str:
    remainder = f" and {len(mentions) - _MAX_NAMED} more" if len(mentions) > _MAX_NAMED else ""
    return ", ".join(mentions[:_MAX_NAMED]) + remainder


def modern(schema: dict[str, Any]) -> dict[str, Any]:
    """The keywords of earlier drafts as those of 2020-12, all conditions under one name, and whole numbers as ints."""
    integers = {name: int(value) for name, value in schema.items() if name in _COUNTS and value == value // 1}
    schema.update(integers)
    later_items = schema.pop("additionalItems", None)
    if isinstance(schema.get("items"), list):
        schema["prefixItems"] = schema.pop("items")
        if later_items is not None:
            schema["items"] = later_items
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if type(schema.get(exclusive)) is bool:
            if schema.pop(exclusive) and bound in schema:
                schema[exclusive] = schema.pop(bound)
    minimum = schema.pop("minContains", 1)
    if "contains" not in schema:
        schema.pop("maxContains", None)
    else:
        schema["minContains"] = minimum
    conditions = []
    then, otherwise = schema.pop("then", True), schema.pop("else", True)
    if "if" in schema:
        conditions.append((schema.pop("if"), then, otherwise))
    for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
        for name, dependency in schema.pop(keyword, {}).items():
            when = {"type": "object", "required": [name]}
            conditions.append((when, {"required": dependency} if isinstance(dependency, list) else dependency, True))
    if conditions:
        schema[CONDITIONS] = conditions
    return schema


def counts(schema: Mapping[str, Any], low: str, high: str, place: str) -> tuple[int, int | None]:
    for name in (low, high):
        bound = schema.get(name, 0)
        valid = type(bound) in (int, float) and bound >= 0 and bound == bound // 1
        check(valid, OP, f"{name} at {place}", "be a whole number of at least 0", bound)
    refuse(schema.get(high) is not None and schema[high] > 10**6, OP, f"{high} at {place} is above {10**6}")
    minimum, maximum = schema.get(low, 0), schema.get(high)
    return int(minimum), None if maximum is None else int(maximum)


def kinds_of(schema: Mapping[str, Any], place: str) -> list[str]:
    """The types of a schema without listed values: those that it names, else those that its keywords are for."""
    kinds = schema.get("type")
    if kinds is None:
        keywords = schema.keys() - {"format"} or schema.keys()
        kinds = [kind for kind, kind_keywords in KEYWORDS.items() if kind_keywords & keywords and kind != "integer"]
        kinds = kinds or [kind for kind in KEYWORDS if kind != "integer"]
        if schema.keys() == {"format"}:
            kinds = ["string"]
    names = [kinds] if isinstance(kinds, str) else kinds
    valid = isinstance(names, list) and all(isinstance(kind, str) and kind in KEYWORDS for kind in names)
    check(valid, OP, f"type at {place}", f"be among {', '.join(KEYWORDS)}", kinds)
    return [kind for kind in names if kind != "integer" or "number" not in names]
