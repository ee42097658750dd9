"""Items of arrays that several keywords speak of: each small array, beside jsonschema."""

from __future__ import annotations

import itertools
import json
import unicodedata
from typing import Any

import pytest

from pdkernels.decoding import Grammar

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")

VALUES = [1, 2, "a", None]
ARRAYS = [[*items] for length in range(4) for items in itertools.product(VALUES, repeat=length)]
ONE, TWO = {"const": 1}, {"const": 2}
OF_2019 = {"$schema": "https://json-schema.org/draft/2019-09/schema"}
CLOSED = {"type": "array", "unevaluatedItems": False}
CASES: dict[str, dict[str, Any]] = {
    "after a prefix": {"prefixItems": [{"type": "string"}], "unevaluatedItems": TWO, "type": "array"},
    "a prefix elsewhere": {"allOf": [{"prefixItems": [True, ONE]}], **CLOSED},
    "of a reference": {"$ref": "#/$defs/x", "$defs": {"x": {"prefixItems": [ONE]}}, "unevaluatedItems": TWO, "type": "array"},
    "contains": {"allOf": [{"contains": ONE}], "contains": {"const": "a"}, **CLOSED},
    "contains none": {"contains": ONE, "minContains": 0, "unevaluatedItems": {"type": "null"}, "type": "array"},
    "contains evaluates nothing in draft 2019-09": {**OF_2019, "contains": ONE, "unevaluatedItems": {"enum": [1, 2]}, "type": "array"},
    "a list of items in draft 2019-09": {**OF_2019, "items": [ONE], **CLOSED},
    "of a condition": {"if": {"prefixItems": [ONE]}, "then": {"prefixItems": [True, TWO]}, "else": {"prefixItems": [True] * 3}, **CLOSED},
    "of one branch": {"oneOf": [{"prefixItems": [ONE]}, {"prefixItems": [True, TWO]}], **CLOSED},
    "denied twice": {"not": {"not": {"prefixItems": [ONE]}}, "unevaluatedItems": {"enum": [1, 2]}, "type": "array"},
    "denied": {"not": {"prefixItems": [ONE, TWO]}, "prefixItems": [True], "unevaluatedItems": ONE, "type": "array"},
    "inside, which sees nothing beside it": {"allOf": [{"unevaluatedItems": ONE}], "prefixItems": [True, True], "type": "array"},
    "all are evaluated": {"allOf": [{"items": {"enum": [1, 2]}}], **CLOSED},
    "two of contains": {"allOf": [{"contains": ONE}, {"contains": TWO, "maxContains": 1}], "type": "array"},
    "two of contains, denied": {"not": {"allOf": [{"contains": ONE}, {"contains": TWO, "maxContains": 1}]}, "type": "array"},
    "two choices": {"allOf": [{"oneOf": [ONE, TWO]}, {"oneOf": [TWO, {"const": "a"}]}]},
    "two long choices": {"allOf": [{"anyOf": [{"const": n} for n in range(10)]}, {"anyOf": [{"const": n} for n in range(-8, 3)]}]},
    "two choices, denied": {"type": "array", "items": {"not": {"allOf": [{"oneOf": [ONE, TWO]}, {"oneOf": [TWO, {"const": "a"}]}]}}},
}  # fmt: skip


@pytest.mark.parametrize("texts", ["usual", "all"])
@pytest.mark.parametrize("name", CASES)
def test_arrays(name: str, texts: Any) -> None:
    schema = CASES[name]
    grammar = Grammar.json_schema(schema, texts=texts)
    check = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    taken = [value for value in [*ARRAYS, *VALUES] if grammar.matches(json.dumps(value))]
    assert taken == [value for value in [*ARRAYS, *VALUES] if check.is_valid(value)]


@pytest.mark.parametrize(
    "schema",
    [
        {"prefixItems": [True, {"enum": [1, 2]}], "contains": {"enum": [True, 2]}, "maxItems": 2},
        {"items": {"enum": [0, 1]}, "contains": {"enum": [False, 1]}},
        {"allOf": [{"contains": {"const": 1}}, {"contains": {"const": True}}]},
        {"allOf": [{"anyOf": [{"const": [1]}, {"const": [0]}]}, {"anyOf": [{"const": [True]}, {"const": [0]}]}]},
        {"allOf": [{"oneOf": [{"const": [1]}, {"const": [0]}]}, {"oneOf": [{"const": [True]}, {"const": [0]}]}]},
        {"allOf": [{"items": {"enum": [0, 2]}}, {"items": {"enum": [False, 2]}}]},
    ],
    ids=json.dumps,
)
def test_true_is_not_one(schema: dict[str, Any]) -> None:
    """Schemas that Python takes for equal, beside jsonschema."""
    arrays = [[*items] for length in range(3) for items in itertools.product([0, 1, 2, False, True], repeat=length)]
    grammar = Grammar.json_schema({"type": "array", **schema})
    check = jsonschema.Draft202012Validator({"type": "array", **schema})
    assert [one for one in arrays if grammar.matches(json.dumps(one))] == [one for one in arrays if check.is_valid(one)]


@pytest.mark.parametrize(
    "inner",
    [
        {"propertyNames": {"maxLength": 1}},
        {"patternProperties": {"^a": {"type": "string"}}},
        {"additionalProperties": False},
        {"propertyNames": {"maxLength": 1}, "required": ["a"]},
    ],
    ids=json.dumps,
)
@pytest.mark.parametrize("outer", ["not", "oneOf", "beside", "anyOf"])
def test_what_a_not_leaves_out_is_not_denied_again(inner: dict[str, Any], outer: str) -> None:
    """A not of names that a schema does not list leaves objects out: nothing is allowed because of it."""
    objects = {"properties": {"ab": {"type": "integer"}}, "type": "object"}
    denied = {"not": {"type": "object", **inner}}
    schema: dict[str, Any] = {
        "not": {**objects, "not": denied},
        "oneOf": {"oneOf": [objects, denied]},
        "beside": {**objects, "not": {"minLength": 1, **denied}},
        "anyOf": {**objects, "not": {"anyOf": [{"type": "string"}, denied]}},
    }[outer]
    try:
        grammar = Grammar.json_schema(schema)
    except (NotImplementedError, ValueError):
        return
    check = jsonschema.Draft202012Validator(schema)
    for value in ({}, {"ab": 3}, {"a": 3}, {"ab": 3, "a": "x"}, {"c": None}, "x", 1):
        assert check.is_valid(value) or not grammar.matches(json.dumps(value))


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ({"not": {"unevaluatedItems": False}}, "'unevaluatedItems' in a not"),
        ({"allOf": [{"anyOf": [{"prefixItems": [ONE]}, {"items": TWO}], **CLOSED}, {"maxItems": 2}]}, "unevaluatedItems beside a choice"),
        ({"allOf": [{"contains": ONE, **CLOSED}], "maxItems": 2}, "unevaluatedItems beside contains, inside another schema"),
        ({"not": {"prefixItems": [ONE]}, "contains": TWO, **CLOSED}, "unevaluatedItems beside items that are excluded"),
    ],
)  # fmt: skip
def test_what_is_not_followed_is_refused_by_name(schema: dict[str, Any], fault: str) -> None:
    with pytest.raises(NotImplementedError, match=fault):
        Grammar.json_schema({"type": "array", **schema})


def test_items_that_are_not_listed_are_different_where_fewer_texts_will_do() -> None:
    words = {
        "type": "array",
        "items": {"type": "string", "pattern": "^[A-Za-z]{1,5}$"},
        "uniqueItems": True,
        "minItems": 2,
    }
    with pytest.raises(NotImplementedError, match="uniqueItems of items that are not listed at #/uniqueItems"):
        Grammar.json_schema(words)
    with pytest.warns(
        UserWarning, match="cannot be followed whole: items of uniqueItems .* ascend by their first letters"
    ):
        grammar = Grammar.json_schema(words, fit=True)
    assert grammar.matches('["ant", "Bee", "cow"]')
    for text in ('["ant", "ant"]', '["bee", "ant"]', '["ant", "Ant"]', '["ant"]', '["ant", "b2"]'):
        assert not grammar.matches(text), text
    numbers = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    with pytest.warns(UserWarning, match="or are one"):
        grammar = Grammar.json_schema(numbers, fit=True)
    assert [grammar.matches(text) for text in ("[]", "[7]", "[7, 7]", "[7, 8]")] == [True, True, False, False]


SCRIPTS = {
    "Greek": "GREEK",
    "Cyrl": "CYRILLIC",
    "Latin": "LATIN",
    "Hira": "HIRAGANA",
    "Hebrew": "HEBREW",
    "Han": "CJK UNIFIED",
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts(script: str) -> None:
    """Letters are of the script that their names begin with, and of no other one."""
    taken, others = (
        Grammar.json_schema({"type": "string", "pattern": pattern})
        for pattern in (rf"^\p{{Script={script}}}$", rf"^[^\p{{sc={script}}}]$")
    )
    counted = 0
    for point in [*range(0x41, 0x3400), *range(0x3400, 0xD800, 89), *range(0x1F100, 0x20000)]:
        name = unicodedata.name(chr(point), "")
        mine = name.startswith(SCRIPTS[script] + " ") or name.startswith(SCRIPTS[script] + "-")
        if unicodedata.category(chr(point)) in ("Lu", "Ll", "Lo") and (mine or name.split(" ")[0] in SCRIPTS.values()):
            counted += mine
            text = f'"{chr(point)}"'
            assert (taken.matches(text), others.matches(text)) == (mine, not mine), name
    assert counted > 10
