"""Which texts a schema has: all of its values, or those of a smaller language that fits; references by URI, and anchors."""

from __future__ import annotations

import itertools
import json
import re
import warnings
from typing import Any

import pytest

from pdkernels.decoding import Grammar
from tests.decoding.test_grammar_keywords import DIGIT, FORMATS, FOUR, WORD, _of
from tests.support.grammar_texts import drawn

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")


def test_a_smaller_language_that_fits() -> None:
    """What is left out is named, and everything that is left satisfies the schema."""
    long = _of(title={"type": "string", "maxLength": 30}, text={"type": "string", "minLength": 2, "maxLength": 5000})
    with pytest.warns(UserWarning, match="the schema needs too many states: .*maxLength and maxItems are at most 256"):
        grammar = Grammar.json_schema(long, fit=True)
    assert grammar.matches(json.dumps({"title": "a" * 30, "text": "b" * 256}))
    assert not grammar.matches(json.dumps({"text": "b" * 257})) and not grammar.matches('{"text": "b"}')
    many = {"type": "array", "maxItems": 900, "items": {"type": "array", "maxItems": 900, "items": WORD}}
    with pytest.warns(UserWarning, match="maxItems are at most 32"):
        assert Grammar.json_schema(many, fit=True).matches('[["a", "b"], []]')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Grammar.json_schema(DIGIT, fit=True).matches("3")
    with pytest.raises(TypeError, match="fit must be a bool"):
        Grammar.json_schema(DIGIT, fit=1)  # type: ignore[arg-type]


def test_references_by_uri() -> None:
    """An `$id` is the base of the references inside it; jsonschema's registry reads them in the same way."""
    schema = {
        "$id": "https://a.org/root.json",
        **_of(
            n={"$ref": "inner/n.json"}, w={"$ref": "https://a.org/inner/w.json#word"}, m={"$ref": "#/$defs/in/$defs/n"}
        ),
        "$defs": {
            "in": {"$id": "inner/n.json", "$ref": "#/$defs/n", "$defs": {"n": DIGIT}},
            "w": {"$id": "inner/w.json", "$defs": {"w": {"$anchor": "word", **WORD}}},
        },
    }
    grammar, check = Grammar.json_schema(schema), jsonschema.Draft202012Validator(schema)
    for value in ({"n": 3}, {"w": "ab"}, {"m": 4}, {"n": "a"}, {"w": 3}, {"m": 10}):
        assert grammar.matches(json.dumps(value)) == check.is_valid(value), value
    unknown = {"note": {"$id": "https://a.org/n.json", **DIGIT}, "$ref": "https://a.org/n.json"}
    with pytest.raises(NotImplementedError, match="the reference 'https://a.org/n.json'"):
        Grammar.json_schema(unknown, unknown="ignore")


@pytest.mark.parametrize(
    "pattern", ["^$|^[ab]+$", "^(a|b$)", "(^a|b)$", "a?^b", "(^a)?b", "^(a(b$|a)|-)", "(?<x>a)b$", "(?:^|-)a(?:-|$)"]
)
def test_anchors_inside_patterns(pattern: str) -> None:
    grammar = Grammar.json_schema({"type": "string", "pattern": pattern})
    read = re.compile(pattern.replace("?<x>", "?P<x>"))
    for text in ("".join(letters) for length in range(5) for letters in itertools.product("ab-", repeat=length)):
        assert grammar.matches(json.dumps(text)) == bool(read.search(text)), text


# Schemas, texts that only `texts="all"` has, and texts of no language.
EVERY: list[tuple[Any, list[str], list[str]]] = [
    ({"type": "integer"}, ["1.0", "-3.000", "12345678901234567890123"], ["1.5", "01", "1e0"]),
    ({"type": "integer", "minimum": 1, "multipleOf": 3}, ["3.0"], ["4.0", "-3.0"]),
    ({"enum": [1, "é"]}, ["1.0", '"\\u00e9"', '"\\u00E9"'], ['"e"']),
    ({"type": "string", "maxLength": 2}, ['"\\u00e9\\ud83d\\ude00"', '"\\u0007"'], ['"\\ud83d"', '"\\ude00"', '"\\u00e9ab"', '"\\u00g0"']),
    ({"type": "string", "pattern": "^[à-ü]+$"}, ['"\\u00e0\\u00fc"'], ['"\\u00df"', '"a"']),
    (_of(a=DIGIT), ['{"b": [1, {}]}', '{"a": 1, "b": 2, "c": null}', "3", '"x"'][:2], ['{"a": "b"}', '{"b": 1, "a": 2}']),
    ({"properties": {"a": DIGIT}}, ["3", '"x"', "[{}]"], ['{"a": "b"}']),
    ({**_of(é=DIGIT), "additionalProperties": WORD}, ['{"\\u00e9": 1}', '{"e": "x"}'], ['{"\\u00e9": "x"}', '{"é": "x"}']),
    ({**_of(a=DIGIT), "patternProperties": {"^b": WORD}, "additionalProperties": False}, ['{"a": 1, "bc": "x"}', '{"b": "y"}'], ['{"a": 1, "c": "x"}', '{"b": 1}']),
    ({**_of(a=DIGIT), "maxProperties": 2}, ['{"a": 1, "b": 2}', '{"b": 1, "c": 2}'], ['{"a": 1, "b": 2, "c": 3}']),
    ({**_of(a=DIGIT, b=DIGIT), "minProperties": 2}, ['{"a": 1, "c": 2}', '{"a": 1, "b": 2, "c": 3}'], ['{"c": 1}', "{}", '{"c": 1, "c": 2}']),
    ({**_of(a=DIGIT), "minProperties": 1, "maxProperties": 2}, ['{"c": 1}', '{"b": 1, "c": 1}', '{"a": 1, "c": 1}'], ["{}", '{"a": 1, "b": 1, "c": 1}']),
    ({**_of(a=DIGIT), "required": ["a"], "propertyNames": {"maxLength": 1}}, ['{"a": 1, "b": 2}'], ['{"a": 1, "bc": 2}', '{"b": 2}']),
    ({**_of(a=DIGIT, b=DIGIT), "if": {"required": ["c"]}, "then": {"required": ["b"]}}, ['{"a": 1, "d": 2}', '{"b": 1, "c": 2, "d": 3}'], ['{"a": 1, "c": 2}']),
    ({**FOUR, "type": "integer"}, ["12345678901234567890"], ["1.0"]),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(EVERY)))
def test_every_text_of_a_schema(number: int) -> None:
    schema, more, none = EVERY[number]
    usual, every = Grammar.json_schema(schema), Grammar.json_schema(schema, texts="all")
    check = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema, format_checker=FORMATS)
    for text in more:
        assert every.matches(text) and not usual.matches(text), text
        assert check.is_valid(json.loads(text)), f"the test is wrong: {text}"
    for text in none:
        assert not every.matches(text) and not usual.matches(text), text
    for text in [*drawn(usual, 8), *drawn(every, 16)]:
        assert every.matches(text) and check.is_valid(json.loads(text)), text
