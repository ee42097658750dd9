"""Keywords of JSON schemas, alone and together: every text of a language satisfies its schema by jsonschema, whatever the keywords."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from pdkernels.decoding import Grammar
from tests.support.grammar_texts import drawn

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER

OLD = {"$schema": "http://json-schema.org/draft-07/schema#"}
FOUR = {"$schema": "http://json-schema.org/draft-04/schema#"}
WORD = {"type": "string", "pattern": "^[a-z]{1,6}$"}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}


def _of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


# A schema, some of its values as they are written, and values that it does not have.
CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "pattern and length": (
        {"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 4},
        ['"ab"', '"abcd"'],
        ['"a"', '"abcde"', '"AB"'],
    ),
    "format and length": ({"type": "string", "format": "email", "maxLength": 9}, ['"a@b.cd"'], ['"abcdef@gh.ijk"']),
    "two patterns": (
        {"allOf": [{"type": "string", "pattern": "^a"}, {"pattern": "b$"}, {"maxLength": 5}]},
        ['"ab"', '"axyzb"'],
        ['"a"', '"b"', '"axyzzb"'],
    ),
    "multiples": ({"type": "integer", "multipleOf": 7, "minimum": -30, "maximum": 100}, ["-28", "0", "98"], ["-35", "8", "105", "07"]),
    "common multiples": ({"allOf": [{"type": "integer", "multipleOf": 4}, {"multipleOf": 6, "maximum": 50, "minimum": 0}]}, ["0", "12", "48"], ["4", "6", "60"]),
    "large numbers": ({"type": "integer", "format": "int32", "minimum": 5}, ["5", "2147483647"], ["4", "2147483648"]),
    "listed, and a pattern": ({"enum": ["ab", "b", 3, None], "pattern": "^a", "type": ["string", "null"]}, ['"ab"', "null"], ['"b"', "3"]),
    "listed, a format and a bound": ({"enum": ["b", "2024-02-29", 1, 3], "format": "date", "minimum": 2}, ['"2024-02-29"', "3"], ['"b"', "1"]),
    "not listed": ({"type": "string", "maxLength": 2, "not": {"enum": ["a", "bc"]}}, ['"b"', '""'], ['"a"', '"bc"']),
    "not a pattern": ({"type": "string", "pattern": "^[ab]{1,3}$", "not": {"pattern": "aa"}}, ['"aba"', '"b"'], ['"aab"', '"aa"']),
    "no whole numbers": ({"type": "integer", "minimum": 1, "maximum": 4, "not": {"const": 3}}, ["1", "4"], ["3"]),
    "no zero": ({"type": "integer", "minimum": -1, "maximum": 2, "not": {"const": 0.0}}, ["-1", "1", "2"], ["0", "-0"]),
    "not there": ({**_of(a=DIGIT, b=DIGIT), "not": {"required": ["a"]}}, ["{}", '{"b": 1}'], ['{"a": 1}']),
    "neither": ({**_of(a=DIGIT, b=DIGIT, c=DIGIT), "not": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}}, ["{}", '{"c": 1}'], ['{"a": 1}', '{"b": 1}']),
    "exactly one": (
        {**_of(a=DIGIT, b=DIGIT), "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"a": 1}', '{"b": 1}'],
        ["{}", '{"a": 1, "b": 1}'],
    ),
    "one pattern of two": ({"oneOf": [{"type": "string", "pattern": "^a.?$"}, {"type": "string", "pattern": "^.?b$"}]}, ['"ac"', '"cb"'], ['"ab"', '"c"']),
    "a closed branch": (
        {"oneOf": [{**_of(a=DIGIT), "additionalProperties": False}, {**_of(a=DIGIT, b=DIGIT), "required": ["b"]}]},
        ["{}", '{"a": 1}', '{"b": 1}', '{"a": 1, "b": 2}'],
        ['{"c": 1}'],
    ),
    "both choices": (
        {**_of(a=DIGIT, b=DIGIT, c=DIGIT), "anyOf": [{"required": ["a"]}, {"required": ["b"]}], "oneOf": [{"required": ["c"]}, {"properties": {"c": False}}]},
        ['{"a": 1}', '{"b": 1, "c": 2}'],
        ["{}", '{"c": 1}'],
    ),
    "if": (
        {
            **_of(kind={"enum": ["dog", "cat"]}, bark={"type": "boolean"}, lives=DIGIT),
            "required": ["kind"],
            "if": {"properties": {"kind": {"const": "dog"}}},
            "then": {"required": ["bark"]},
            "else": {"required": ["lives"]},
        },
        ['{"kind": "dog", "bark": true}', '{"kind": "cat", "lives": 9}'],
        ['{"kind": "dog"}', '{"kind": "cat"}', '{"kind": "cat", "bark": true}'],
    ),
    "several ifs": (
        {
            **_of(a={"enum": [1, 2, 3]}, b=WORD),
            "allOf": [
                {"if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "then": {"required": ["b"]}},
                {"if": {"properties": {"a": {"enum": [2]}}, "required": ["a"]}, "then": {"properties": {"b": False}}},
            ],
        },
        ["{}", '{"a": 1, "b": "x"}', '{"a": 2}', '{"a": 3, "b": "y"}', '{"b": "z"}'],
        ['{"a": 1}', '{"a": 2, "b": "x"}'],
    ),
    "an if of a word": (
        {**_of(a=WORD, b=DIGIT), "required": ["a"], "if": {"properties": {"a": {"const": "x"}}}, "then": {"required": ["b"]}},
        ['{"a": "x", "b": 1}', '{"a": "xy"}'],
        ['{"a": "x"}'],
    ),
    "depends": ({**_of(a=DIGIT, b=DIGIT), "dependentRequired": {"a": ["b"]}}, ["{}", '{"b": 1}', '{"a": 1, "b": 2}'], ['{"a": 1}']),
    "depends, draft 7": (
        {**OLD, **_of(a=DIGIT, b=DIGIT, c=DIGIT), "dependencies": {"a": ["b"], "b": {"required": ["c"]}}},
        ["{}", '{"c": 1}', '{"b": 1, "c": 2}', '{"a": 1, "b": 2, "c": 3}'],
        ['{"a": 1}', '{"a": 1, "b": 2}', '{"b": 2}'],
    ),
    "names by a pattern": (
        {"type": "object", "patternProperties": {"^x_[a-z]{1,3}$": DIGIT}, "additionalProperties": False, "maxProperties": 2},
        ["{}", '{"x_a": 1}', '{"x_a": 1, "x_b": 2}'],
        ['{"y": 1}', '{"x_a": 10}', '{"x_a": 1, "x_b": 2, "x_c": 3}'],
    ),
    "names by several patterns": (
        {"type": "object", "patternProperties": {"^a[a-z]?$": DIGIT, "z$": WORD}, "additionalProperties": {"type": "null"}},
        ['{"a": 1}', '{"bz": "x"}', '{"c": null}'],
        ['{"az": 1}', '{"a": null}', '{"z": 3}'],
    ),
    "a named one of a pattern": (
        {**_of(ab={"minimum": 3}), "required": ["ab"], "patternProperties": {"^a": DIGIT}, "additionalProperties": False},
        ['{"ab": 3}'],
        ['{"ab": 2}', '{"ab": 10}', "{}"],
    ),
    "names": ({"type": "object", "propertyNames": {"pattern": "^[a-c]{2}$"}, "additionalProperties": DIGIT, "maxProperties": 2}, ['{"ab": 1}'], ['{"a": 1}', '{"abc": 1}']),
    "names that are known": ({**_of(a=DIGIT, bb=DIGIT), "propertyNames": {"maxLength": 1}}, ["{}", '{"a": 1}'], ['{"bb": 1}']),
    "at least two": ({**_of(a=DIGIT, b=DIGIT, c=DIGIT), "minProperties": 2}, ['{"a": 1, "c": 2}', '{"a": 1, "b": 2, "c": 3}'], ["{}", '{"a": 1}']),
    "at most one": ({**_of(a=DIGIT, b=DIGIT, c=DIGIT), "maxProperties": 1, "minProperties": 1}, ['{"a": 1}', '{"c": 2}'], ["{}", '{"a": 1, "b": 2}']),
    "different": ({"type": "array", "items": {"enum": ["r", "g", "b"]}, "uniqueItems": True, "minItems": 1}, ['["r"]', '["r", "b"]', '["r", "g", "b"]'], ["[]", '["r", "r"]']),
    "two of three": ({"type": "array", "items": {"enum": [1, 2, 1.0, 3]}, "uniqueItems": True, "minItems": 2, "maxItems": 2}, ["[1, 2]", "[1, 3]"], ["[1, 1.0]", "[1]", "[1, 2, 3]"]),
    "a tuple of draft 7": ({**OLD, "type": "array", "items": [WORD, DIGIT], "additionalItems": False, "minItems": 1}, ['["a"]', '["a", 1]'], ['["a", 1, 2]', "[1]"]),
    "bounds of draft 4": ({**FOUR, "type": "integer", "minimum": 1, "exclusiveMinimum": True, "maximum": 3}, ["2", "3"], ["1", "4"]),
    "beside a reference": ({"$ref": "#/$defs/n", "maximum": 5, "$defs": {"n": DIGIT}}, ["0", "5"], ["6"]),
    "closed, and a choice": (
        {**_of(a=DIGIT), "additionalProperties": False, "anyOf": [{"required": ["a"]}, {"properties": {"b": DIGIT}, "maxProperties": 0}]},
        ['{"a": 1}', "{}"],
        ['{"b": 1}', '{"a": 1, "b": 2}'],
    ),
    "closed twice": (
        {"allOf": [{**_of(a=DIGIT, b=DIGIT), "additionalProperties": False}, {**_of(b={"minimum": 4}), "required": ["b"]}]},
        ['{"b": 4}', '{"a": 1, "b": 5}'],
        ['{"b": 3}', '{"a": 1}'],
    ),
    "unevaluated": ({"allOf": [_of(a=DIGIT)], "properties": {"b": WORD}, "unevaluatedProperties": False, "type": "object"}, ['{"b": "x", "a": 1}'], ['{"c": 1}']),
    "unevaluated inside": (
        {"type": "object", "allOf": [{**_of(a=DIGIT), "unevaluatedProperties": False}, _of(b=DIGIT)]},
        ["{}", '{"a": 1}'],
        ['{"b": 1}', '{"a": 1, "b": 2}'],
    ),
    "patterns, closed elsewhere": (
        {"type": "object", "allOf": [{"patternProperties": {"^a": DIGIT}}, {**_of(ab={"minimum": 3}), "additionalProperties": False}]},
        ["{}", '{"ab": 3}'],
        ['{"a": 3}', '{"ab": 2}', '{"ab": 10}'],
    ),
    "a tuple, and items elsewhere": (
        {"type": "array", "maxItems": 2, "allOf": [{"prefixItems": [DIGIT]}, {"items": {"type": "integer", "minimum": 4}}]},
        ["[]", "[4]", "[4, 50]"],
        ["[3]", "[10]", "[4, 3]"],
    ),
    "tuples of two lengths": (
        {"type": "array", "allOf": [{"prefixItems": [DIGIT, WORD]}, {"prefixItems": [{"minimum": 2}], "items": False}]},
        ["[]", "[2]"],
        ["[1]", '[2, "a"]'],
    ),
    "contains": (
        {"type": "array", "items": {"enum": ["a", "b", "c"]}, "contains": {"const": "a"}, "minItems": 2, "maxItems": 3},
        ['["a", "b"]', '["b", "a"]', '["b", "c", "a"]', '["a", "a"]'],
        ["[]", '["a"]', '["b", "c"]', '["a", "b", "c", "b"]'],
    ),
    "contains two": (
        {"type": "array", "items": DIGIT, "contains": {"minimum": 8}, "minContains": 2},
        ["[8, 9]", "[1, 8, 2, 9, 3]", "[8, 8, 8]"],
        ["[]", "[8]", "[1, 8, 2]"],
    ),
    "contains, in a tuple": (
        {"type": "array", "prefixItems": [WORD, DIGIT], "items": {"type": "null"}, "contains": {"enum": ["x", 3]}},
        ['["x"]', '["y", 3]', '["x", 4, null]'],
        ['["y"]', '["y", 4, null]', "[3]"],
    ),
    "contains an object": (
        {"type": "array", "items": {**_of(k={"enum": ["x", "y"]}, v=DIGIT), "required": ["k"]}, "contains": {"properties": {"k": {"const": "x"}}}},
        ['[{"k": "x"}]', '[{"k": "y", "v": 1}, {"k": "x"}]'],
        ["[]", '[{"k": "y"}]'],
    ),
    "contains nothing in particular": ({"type": "array", "items": DIGIT, "contains": {"const": 3}, "minContains": 0}, ["[]", "[4]", "[3]"], ["[10]"]),
    "an anchor": ({**_of(a={"$ref": "#n"}), "$defs": {"n": {"$anchor": "n", **DIGIT}}}, ["{}", '{"a": 3}'], ['{"a": 10}', '{"a": {}}']),
    "an anchor of draft 7": ({**OLD, **_of(a={"$ref": "#n"}), "definitions": {"n": {"$id": "#n", **DIGIT}}}, ['{"a": 3}'], ['{"a": 10}']),
    "what looks like a schema and is none": (
        {**_of(const={"const": {"$id": "https://b.org"}}, enum={"$ref": "#n"}, b={"$anchor": "n", **DIGIT}), "default": {"$anchor": "n", "$ref": "#"}},
        ['{"const": {"$id": "https://b.org"}, "enum": 3}'],
        ['{"enum": {}}'],
    ),
    "by its own name": ({"$id": "https://a.org/s.json", "$ref": "https://a.org/s.json#/$defs/n", "$defs": {"n": DIGIT}}, ["3"], ["10"]),
    "types together": ({"allOf": [{"type": ["number", "string"]}, {"type": ["integer", "null"], "maximum": 9, "minimum": 0}]}, ["3"], ["null", '"a"', "3.5"]),
    "several without a type": ({"minLength": 2, "maxLength": 3, "minimum": 0, "maximum": 5}, ['"ab"', "4"], ['"a"', "7"]),
    "notes": ({**DIGIT, "x-order": 3, "markdownDescription": "no", "nullable": True}, ["4"], ["null"]),
    "uri": ({"type": "string", "format": "uri"}, ['"https://a.io/b?c=d"'], ['"a"']),
    "uri-reference": ({"type": "string", "format": "uri-reference"}, ['"/a/b#c"'], ['"a b"']),
    "hostname": ({"type": "string", "format": "hostname"}, ['"www.a-b.org"'], ['"-a.org"']),
    "ipv6": ({"type": "string", "format": "ipv6"}, ['"::1"', '"1:2:3:4:5:6:7:8"'], ['"1:2"']),
    "duration": ({"type": "string", "format": "duration"}, ['"P1DT2H"', '"P3W"'], ['"P"', '"PT"', '"P1"']),
    "pointer": ({"type": "string", "format": "json-pointer", "maxLength": 8}, ['"/a/~0b"', '""'], ['"a"', '"/~2"']),
    "listed whole numbers within bounds": ({"type": "integer", "minimum": 0, "enum": [1.0, 2, -3.0, 1e22]}, ["1.0", "2", "1e+22"], ["-3.0", "3"]),
    "listed multiples": ({"type": "number", "enum": [0.3, 0.5, 2, 7.25], "multipleOf": 0.25}, ["0.5", "2", "7.25"], ["0.3"]),
    "listed, with keywords for other types": ({"enum": [1, "a", None, "abc", {}], "minLength": 2}, ["1", "null", '"abc"', "{}"], ['"a"']),
    "listed lists of whole numbers": ({"const": [1.0, 2], "items": {"type": "integer"}}, ["[1.0, 2]"], ["[1, 3]", "[]"]),
    "listed lists, of which one does not fit": ({"type": "array", "enum": [[1.0], [2.5], ["a"]], "items": {"type": ["integer", "string"]}}, ["[1.0]", '["a"]'], ["[2.5]"]),
    "listed, and a choice": ({"enum": [1.0, "x", 5], "anyOf": [{"type": "integer", "maximum": 3}, {"type": "string"}]}, ["1.0", '"x"'], ["5"]),
    "no name": ({"type": "object", "propertyNames": False}, ["{}"], ['{"a": 1}']),
    "no name of two": ({**_of(a=DIGIT), "propertyNames": {"type": "null"}}, ["{}"], ['{"a": 1}']),
    "a number, or an object without a": ({**_of(a=DIGIT, b=DIGIT), "type": ["integer", "object"], "not": {"type": "object", "required": ["a"]}}, ["3", "{}", '{"b": 1}'], ['{"a": 1}']),
    "a number, or an object that depends": ({**_of(a=DIGIT, b=DIGIT), "type": ["integer", "object"], "dependentSchemas": {"a": {"type": "object", "required": ["b"]}}}, ["3", "{}", '{"b": 1}'], ['{"a": 1}']),
    "a number, or a date": ({"type": ["integer", "string"], "format": "date"}, ["3", '"2024-02-29"'], ['"2023-02-29"']),
    "a number that is not whole": ({"oneOf": [{"type": "integer"}, {"type": "number"}], "minimum": 0, "maximum": 2}, ["0.5", "1.25"], ["1", "1.0", "2", "2.5"]),
    "decimal steps": ({"type": "number", "multipleOf": 0.25, "minimum": -1, "maximum": 1}, ["0.25", "-0.750", "1", "0.5"], ["0.3", "1.25", "0.255"]),
    "two steps": ({"allOf": [{"type": "number", "multipleOf": 1.5}, {"multipleOf": 2}], "minimum": 0, "maximum": 12}, ["0", "6", "12"], ["3", "1.5", "2", "4"]),
    "no multiple": ({"type": "integer", "minimum": 0, "maximum": 9, "not": {"multipleOf": 3}}, ["1", "8"], ["0", "3", "9"]),
    "not so many": ({**_of(a=DIGIT, b=DIGIT, c=DIGIT), "not": {"minProperties": 2}}, ["{}", '{"b": 1}'], ['{"a": 1, "b": 1}']),
    "not of a type": ({"type": ["integer", "string", "null"], "not": {"type": ["string", "array"]}}, ["3", "null"], ['"a"']),
    "no number that is listed": ({"type": "number", "minimum": 0, "maximum": 3, "not": {"enum": [0, 2, 2.5]}}, ["1", "2.25", "3"], ["0", "2", "2.5", "2.50", "2.0"]),
    "no list that is listed": ({"type": "array", "items": DIGIT, "maxItems": 2, "not": {"enum": [[], [1, 2]]}}, ["[1]", "[2, 1]", "[1, 3]"], ["[]", "[1, 2]"]),
    "at most two": ({"type": "array", "items": DIGIT, "contains": {"maximum": 3}, "maxContains": 2}, ["[1]", "[9, 0, 8, 1]"], ["[]", "[7]", "[0, 1, 2]"]),
    "none or one": ({"type": "array", "items": DIGIT, "contains": {"const": 0}, "minContains": 0, "maxContains": 1}, ["[]", "[1, 2]", "[1, 0, 2]"], ["[0, 0]"]),
    "two or three": ({"type": "array", "items": DIGIT, "contains": {"const": 0}, "minContains": 2, "maxContains": 3}, ["[0, 0]", "[1, 0, 2, 0, 0]"], ["[0]", "[0, 0, 0, 0]"]),
    "no item": ({"type": "array", "items": DIGIT, "not": {"contains": {"minimum": 5}}}, ["[]", "[4, 0]"], ["[5]", "[1, 9]"]),
    "an if of a number": (
        {**_of(n={"type": "integer", "minimum": 0, "maximum": 99}, w=WORD), "required": ["n"], "if": {"properties": {"n": {"minimum": 50}}}, "then": {"required": ["w"]}, "else": {"properties": {"w": False}}},
        ['{"n": 49}', '{"n": 50, "w": "a"}'],
        ['{"n": 50}', '{"n": 49, "w": "a"}'],
    ),
    "exactly one of what overlaps": (
        {"type": "integer", "minimum": 0, "maximum": 20, "oneOf": [{"multipleOf": 3}, {"minimum": 10}]},
        ["0", "9", "10", "20"],
        ["1", "12", "18"],
    ),
    "labels that overlap": ({"oneOf": [{**_of(k={"const": n}), "required": ["k"]} for n in (1, 2)] + [{**_of(k={"enum": [2.0, 3]}), "required": ["k"]}]}, ['{"k": 1}', '{"k": 3}'], ['{"k": 2}', '{"k": 2.0}']),
    "names of two patterns": (
        {"type": "object", "patternProperties": {"^a": DIGIT, "b$": {"minimum": 4}}, "additionalProperties": False},
        ['{"ab": 4}', '{"a": 1}', '{"cb": 40}'],
        ['{"ab": 3}', '{"ab": 40}', '{"cb": 3}'],
    ),
    "a keyword for other types": ({**DIGIT, "minLength": 3, "properties": {"a": False}}, ["4"], ["44"]),
    "whole numbers, each once": ({"type": "array", "items": {"type": "integer", "minimum": 3, "maximum": 5}, "uniqueItems": True}, ["[]", "[3, 5]", "[3, 4, 5]"], ["[3, 3]", "[6]"]),
    "password": ({"type": "string", "format": "password", "minLength": 1, "maxLength": 3}, ['"abc"'], ['""']),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    schema, values, others = CASES[name]
    grammar = Grammar.json_schema(schema)
    check = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema, format_checker=FORMATS)
    for text in values:
        assert check.is_valid(json.loads(text)), f"the test is wrong: {text}"
        assert grammar.matches(text), text
    for text in others:
        assert not grammar.matches(text), text
    for text in drawn(grammar, 30):
        assert check.is_valid(json.loads(text)), text


def test_listed_values_have_the_spaces_of_the_grammar() -> None:
    listed = {"type": "array", "enum": [[1, 2], [3]], "minItems": 2}
    assert Grammar.json_schema(listed, whitespace="").matches("[1,2]")
    assert not Grammar.json_schema(listed, whitespace="").matches("[3]")


def test_long_bounds() -> None:
    """They are refused by name, or replaced by `longest`; in a `not`, where that would allow more, they stay."""
    schema = {
        **_of(name={"type": "string", "maxLength": 5}, text={"type": "string", "maxLength": 4000}),
        "required": ["text"],
    }
    with pytest.raises(ValueError, match="too large. Shorten its repetitions, or set longest for those of a schema"):
        Grammar.json_schema(schema)
    grammar = Grammar.json_schema(schema, longest=20)
    assert grammar.matches(json.dumps({"name": "12345", "text": "x" * 20}))
    assert not grammar.matches(json.dumps({"name": "123456", "text": ""}))
    assert not grammar.matches(json.dumps({"text": "x" * 21}))
    array = {"type": "array", "items": DIGIT, "maxItems": 10**6}
    assert Grammar.json_schema(array, longest=3).matches("[1, 2, 3]")
    assert not Grammar.json_schema(array, longest=3).matches("[1, 2, 3, 4]")
    denied = {"type": "string", "maxLength": 30, "not": {"maxLength": 12}}
    assert not Grammar.json_schema(denied, longest=20).matches(json.dumps("x" * 12))
    assert Grammar.json_schema(denied, longest=20).matches(json.dumps("x" * 13))
    with pytest.raises(ValueError, match="no text satisfies"):
        Grammar.json_schema({"type": "string", "minLength": 21, "maxLength": 50}, longest=20)
    with pytest.raises(ValueError, match="longest must be at least 1, got 0"):
        Grammar.json_schema(schema, longest=0)
    with pytest.raises(TypeError, match="longest must be an int, got str"):
        Grammar.json_schema(schema, longest="20")  # type: ignore[arg-type]


def test_the_order_that_a_schema_asks_for() -> None:
    written = '{"c": 1, "a": 2, "b": 3}'
    listed = {**_of(a=DIGIT, b=DIGIT, c=DIGIT), "required": ["a", "b", "c"], "propertyOrdering": ["c"]}
    assert Grammar.json_schema(listed).matches(written)
    numbered = _of(a={**DIGIT, "propertyOrder": 2}, b={**DIGIT, "propertyOrder": 3}, c={**DIGIT, "propertyOrder": 1})
    assert Grammar.json_schema(numbered).matches(written)
    assert not Grammar.json_schema(_of(a=DIGIT, b=DIGIT, c=DIGIT)).matches(written)


# ------------------------------------------------------------------------------------------------ random schemas

NAMES = ["a", "b", "ab", "x"]
VALUES: list[Any] = [0, 1, 2, "a", "ab", "b", True, None]


class Writer:
    """Random schemas of a few names and values, so that their parts often speak of the same."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def some(self, values: list[Any], most: int = 3) -> list[Any]:
        return self.draw.sample(values, self.draw.randint(1, min(most, len(values))))

    def value(self) -> dict[str, Any]:
        kind = self.draw.choice(["integer", "string", "listed", "null", "boolean"])
        if kind == "listed":
            return {"enum": self.some(VALUES)}
        made: dict[str, Any] = {"type": kind}
        if kind == "integer":
            made |= self.draw.choice([{}, {"minimum": 1}, {"maximum": 2}, {"multipleOf": 2}, {"not": {"const": 1}}])
        if kind == "string":
            choices = [{"maxLength": 2}, {"pattern": "^a"}, {"pattern": "b$", "maxLength": 3}, {"not": {"enum": ["a"]}}]
            made |= self.draw.choice(choices)
        return made

    def part(self) -> dict[str, Any]:
        """Of an object."""
        made: dict[str, Any] = {}
        if self.draw.random() < 0.7:
            made["properties"] = {name: self.value() if self.draw.random() < 0.8 else True for name in self.some(NAMES)}
        if self.draw.random() < 0.4:
            made["required"] = self.some(NAMES, 2)
        if self.draw.random() < 0.3:
            made["additionalProperties"] = self.draw.choice([False, self.value()])
        if self.draw.random() < 0.1:
            made["unevaluatedProperties"] = False
        if self.draw.random() < 0.15:
            made["patternProperties"] = {self.draw.choice(["^a", "b$", "x"]): self.value()}
        if self.draw.random() < 0.15:
            made |= self.draw.choice([{"minProperties": 1}, {"maxProperties": 1}, {"maxProperties": 2}])
        if self.draw.random() < 0.1:
            made["propertyNames"] = self.draw.choice([{"maxLength": 1}, {"enum": ["a", "b", "x"]}])
        return made

    def condition(self) -> dict[str, Any]:
        name = self.draw.choice(NAMES)
        made: dict[str, Any] = {"properties": {name: {"const": self.draw.choice(VALUES)}}}
        return self.draw.choice([made, made | {"required": [name]}, {"required": self.some(NAMES, 2)}])

    def schema(self) -> dict[str, Any]:
        made = {"type": "object", **self.part()}
        if self.draw.random() < 0.4:
            made["allOf"] = [self.part() for _ in range(self.draw.randint(1, 2))]
        if self.draw.random() < 0.3:
            made["anyOf"] = [self.part() for _ in range(2)]
        if self.draw.random() < 0.25:
            made["oneOf"] = [self.draw.choice([self.part(), {"required": [name]}]) for name in self.some(NAMES, 2)]
        if self.draw.random() < 0.25:
            made |= {"if": self.condition(), "then": self.part(), "else": self.part()}
        if self.draw.random() < 0.15:
            made["not"] = self.condition()
        if self.draw.random() < 0.15:
            made["dependentRequired"] = {self.draw.choice(NAMES): self.some(NAMES, 2)}
        return made


def outcome(seed: int) -> str:
    """What becomes of a random schema: "followed", its texts being valid, or why there is none."""
    schema = Writer(seed).schema()
    try:
        grammar = Grammar.json_schema(schema)
    except NotImplementedError as error:
        assert "which is not supported" in str(error)
        return "refused"
    except ValueError as error:
        assert "no text satisfies" in str(error), error
        return "empty"
    check = jsonschema.Draft202012Validator(schema)
    for text in drawn(grammar, 8, seed):
        assert check.is_valid(json.loads(text)), (seed, json.dumps(schema), text)
    return "followed"


def test_random_schemas() -> None:
    found = [outcome(seed) for seed in range(80)]
    assert found.count("followed") >= 40


@pytest.mark.slow
def test_more_random_schemas() -> None:
    found = [outcome(seed) for seed in range(80, 3000)]
    assert found.count("followed") >= 0.5 * len(found)


def test_few_values_are_lost() -> None:
    """Of small closed objects without choices every value that jsonschema accepts is written, in the order of the schema."""
    candidates = [
        dict(zip(names, values, strict=True))
        for names in ([], ["a"], ["b"], ["a", "b"])
        for values in ([[]] if not names else [[one] for one in VALUES] if len(names) == 1 else [[x, y] for x in VALUES for y in VALUES])
    ]  # fmt: skip
    for seed in range(60):
        write = Writer(seed)
        schema = {**_of(a=write.value(), b=write.value()), "additionalProperties": False}
        schema |= write.draw.choice(
            [{}, {"required": ["b"]}, {"dependentRequired": {"a": ["b"]}}, {"minProperties": 1}, {"not": {"required": ["a"]}},
             {"if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "then": {"required": ["b"]}}]
        )  # fmt: skip
        try:
            grammar = Grammar.json_schema(schema)
        except (NotImplementedError, ValueError):
            continue
        check = jsonschema.Draft202012Validator(schema)
        for value in candidates:
            assert grammar.matches(json.dumps(value)) == check.is_valid(value), (schema, value)
