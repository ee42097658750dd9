"""The languages of grammars: texts drawn from their automata are valid by jsonschema, `re` and llguidance, and bad input is refused soon."""

from __future__ import annotations

import json
import random
import re
import time
from typing import Any

import pytest

from pdkernels.decoding import Grammar
from pdkernels.grammar.language import Chars, compiled, complement
from pdkernels.grammar.numbers import integers, numbers
from tests.support.grammar_texts import drawn
from tests.support.grammars import PATTERNS, SCHEMAS, all_grammars

GRAMMARS = all_grammars()


def test_there_are_a_hundred() -> None:
    assert len(GRAMMARS) >= 100


@pytest.mark.parametrize("name", GRAMMARS)
def test_drawn_texts_are_valid(name: str) -> None:
    oracle = pytest.importorskip(
        "tests.support.grammar_oracle", reason="jsonschema is not installed", exc_type=ImportError
    )
    for text in drawn(GRAMMARS[name], 40):
        assert oracle.fault(name, text) == "", text


def variants(text: str, draw: random.Random) -> list[str]:
    """Texts near a text, most of them outside its language."""
    found = []
    for _ in range(12):
        at = draw.randrange(len(text) + 1)
        found.append(text[:at] + draw.choice(["", text[at : at + 1] * 2, "a", "7", " ", "é"]) + text[at + 1 :])
    return found


@pytest.mark.parametrize("name", [name for name in PATTERNS if name not in ("not digits",)])
def test_patterns_match_what_python_matches(name: str) -> None:
    draw = random.Random(1)
    for text in drawn(GRAMMARS[f"pattern {name}"], 15):
        for one in (text, *variants(text, draw)):
            # re's own classes are those of all of Unicode.
            assert GRAMMARS[f"pattern {name}"].matches(one) == bool(re.fullmatch(PATTERNS[name], one, re.ASCII)), one


def test_llguidance_agrees_on_patterns() -> None:
    """Another engine accepts, byte after byte, what the automata accept."""
    llguidance = pytest.importorskip("llguidance")

    class Bytes:
        eos_token_id, bos_token_id = 256, None
        tokens = [bytes([n]) for n in range(256)] + [b"<end>"]
        special_token_ids = [256]

        def __call__(self, text: bytes | str) -> list[int]:
            return list(text.encode() if isinstance(text, str) else text)

    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))
    draw = random.Random(2)
    for name, pattern in PATTERNS.items():
        if name in ("lines", "lazy", "not digits"):
            continue  # flags, laziness and the classes of Unicode mean something else there
        made = llguidance.LLMatcher.grammar_from_regex(pattern)
        for text in drawn(GRAMMARS[f"pattern {name}"], 6):
            for one in (text, *variants(text, draw)[:4]):
                if "\\w" in pattern and not one.isascii():
                    continue
                matcher = llguidance.LLMatcher(tokenizer, made)
                taken = matcher.validate_tokens(list(one.encode())) == len(one.encode())
                whole = taken and matcher.consume_tokens(list(one.encode())) and matcher.is_accepting()
                assert bool(whole) == GRAMMARS[f"pattern {name}"].matches(one), (name, one)


def test_ranges_of_numbers() -> None:
    for low, high in ((-17, 1234), (0, 0), (5, None), (None, -3), (99, 101), (-100, -10)):
        made = compiled(integers(low, high), "it")
        for n in range(-1500, 1500):
            inside = (low is None or n >= low) and (high is None or n <= high)
            assert made.accepts(str(n).encode()) == inside, n
    draw = random.Random(3)
    for low, high in ((0.5, 7.0), (-3.0, 3.0), (-10.5, -2.5), (0.0, 100.0), (-0.5, 0.5)):
        for open_ in (False, True):
            made = compiled(numbers(low, high, above=open_, below=open_), "it")
            assert made.accepts(b"0") == (low < 0 < high or (not open_ and low <= 0 <= high))
            for _ in range(3000):
                text = f"{draw.uniform(-20, 110):.{draw.randrange(3)}f}"
                if made.accepts(text.encode()):
                    assert (low < float(text) < high) if open_ else (low <= float(text) <= high), text


def test_characters_as_bytes() -> None:
    draw = random.Random(4)
    for _ in range(100):
        first, last = sorted(draw.choice([draw.randrange(0x100), draw.randrange(0x110000)]) for _ in range(2))
        made = compiled(Chars(complement(complement(((first, last),)))), "it")
        for point in (first, last, (first + last) // 2, first - 1, last + 1, draw.randrange(0x110000)):
            if 0 <= point < 0x110000 and not 0xD800 <= point <= 0xDFFF:
                assert made.accepts(chr(point).encode()) == (first <= point <= last)


def _branch(label: dict[str, object]) -> dict[str, object]:
    return {"type": "object", "properties": {"k": label, "v": {"type": "string"}}, "required": ["k", "v"]}


def _doubled(times: int) -> dict[str, Any]:
    """Each level holds the one inside twice."""
    made: dict[str, Any] = {"type": "integer"}
    for _ in range(times):
        made = {"anyOf": [made, {"type": "array", "items": made, "maxItems": 2}]}
    return made


BAD: list[tuple[Any, type[Exception], str]] = [
    (lambda: Grammar.regex("(a{1000}){1000}"), ValueError, "unfolds to more than"),
    (lambda: Grammar.regex("((((a{99}){99}){99}){99}){99}"), ValueError, "unfolds to more than"),
    (lambda: Grammar.regex("(a|b)*a(a|b){60}"), ValueError, "too large"),
    (lambda: Grammar.regex("a" * 200_000), ValueError, "more than 50000 characters"),
    (lambda: Grammar.regex("(" * 5000 + ")" * 5000), ValueError, "fewer groups"),
    (lambda: Grammar.regex("(a"), ValueError, "be a regular expression"),
    (lambda: Grammar.regex("[^\\x00-\\U0010ffff]"), ValueError, "no text satisfies"),
    (lambda: Grammar.regex(r"(a)\1"), NotImplementedError, "a reference to a group"),
    (lambda: Grammar.regex("(?=a)b"), NotImplementedError, "a lookahead"),
    (lambda: Grammar.regex("a^b"), NotImplementedError, "an anchor"),
    (lambda: Grammar.regex("(?i)a"), NotImplementedError, "IGNORECASE"),
    (lambda: Grammar.regex("(?i:a)"), NotImplementedError, "a flag"),
    (lambda: Grammar.regex(7), TypeError, "be a str, got int"),
    (lambda: Grammar.choice([]), ValueError, "hold a string, got none"),
    (lambda: Grammar.choice(["a" * 1_000_000]), ValueError, "more than 100000 characters"),
    (lambda: Grammar.choice([""] * 200_000), ValueError, "more than 100000 characters"),
    (lambda: Grammar.json_schema(_doubled(20)), ValueError, "more than 100000 values"),
    (lambda: Grammar.json_schema({"enum": [*range(200_000)]}), ValueError, "more than 100000 values"),
    (lambda: Grammar.choice("ab"), TypeError, "be a list of strings"),
    (lambda: Grammar.choice(["a", 1]), TypeError, "hold strings, got int"),
    (lambda: Grammar.json_schema(False), ValueError, "no text satisfies"),
    (lambda: Grammar.json_schema({"type": "integer", "minimum": 5, "maximum": 3}), ValueError, "no text satisfies"),
    (lambda: Grammar.json_schema({"enum": []}), ValueError, "no text satisfies"),
    (lambda: Grammar.json_schema({"type": "string", "enum": [1]}), ValueError, "no text satisfies"),
    (
        lambda: Grammar.json_schema({"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}}}),
        ValueError,
        "no text satisfies",
    ),
    (lambda: Grammar.json_schema({"type": "string", "minLength": 3, "maxLength": 2}), ValueError, "no text satisfies"),
    (lambda: Grammar.json_schema({"type": "string", "maxLength": 10**7}), ValueError, "is above"),
    (lambda: Grammar.json_schema({"type": "string", "maxLength": 10**6}), ValueError, "unfolds to more than"),
    (lambda: Grammar.json_schema({"type": "array", "items": {"type": "number", "multipleOf": 0.123456789}}), NotImplementedError, "multipleOf"),
    (lambda: Grammar.json_schema({"type": "integer", "multipleOf": 10**9}), NotImplementedError, "multipleOf"),
    (lambda: Grammar.json_schema('{"type": "integer", "minimum": 1e999}'), ValueError, "minimum at # must be a finite number, got inf"),
    (lambda: Grammar.json_schema({"type": [{}]}), ValueError, "type at # must hold strings, got dict"),
    (lambda: Grammar.json_schema({"type": "object", "propertyOrdering": [[]]}), ValueError, "propertyOrdering at # must hold strings, got list"),
    (
        lambda: Grammar.json_schema({"type": "object", "allOf": [{"patternProperties": {"^a": {}}}, {"additionalProperties": {"type": "null"}}]}),
        NotImplementedError,
        "additionalProperties of another schema",
    ),
    (
        lambda: Grammar.json_schema({"allOf": [{"type": "object", "anyOf": [{"required": ["a"]}], "unevaluatedProperties": False}]}),
        NotImplementedError,
        "unevaluatedProperties beside a choice",
    ),
    (lambda: Grammar.json_schema({"not": {}}), ValueError, "no text satisfies"),
    (lambda: Grammar.json_schema({"not": {"propertyNames": {"maxLength": 3}}, "type": "object"}), NotImplementedError, "in a not"),
    (lambda: Grammar.json_schema({"$dynamicRef": "#meta"}), NotImplementedError, "the keyword '$dynamicRef'"),
    (lambda: Grammar.json_schema({"$ref": "#name"}), ValueError, "point into the schema"),
    (lambda: Grammar.json_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$id": "b.json", "$ref": "#/$defs/a"}}}), ValueError, "point into the schema, got 'b.json#/$defs/a'"),
    (lambda: Grammar.json_schema({"type": "string", "maxLength": 4000}), ValueError, "too large. Shorten its repetitions, or set longest"),
    (lambda: Grammar.json_schema({"oneOf": [{"type": "string", "format": "uri"}, {"enum": ["."]}]}), NotImplementedError, "may overlap"),
    (lambda: Grammar.json_schema({"type": "array", "items": {"type": "string"}, "uniqueItems": True}), NotImplementedError, "uniqueItems of items that are not listed"),
    (lambda: Grammar.json_schema({"type": "object", "minProperties": 2}), NotImplementedError, "minProperties above 1"),
    (lambda: Grammar.json_schema({"type": "object", "patternProperties": {"(a": {}}}), ValueError, "be a regular expression"),
    (lambda: Grammar.json_schema({"type": "object", "patternProperties": {"(a+)+$": {}}, "properties": {"a" * 50 + "!": {}}, "required": ["b"], "additionalProperties": False}), ValueError, "no text satisfies"),
    (lambda: Grammar.json_schema({"type": "string", "pattern": "^(a|b)*a(a|b){40}$", "maxLength": 90}), ValueError, "too large"),
    (lambda: Grammar.json_schema({"type": "string", "allOf": [{"pattern": "^[a-z]{0,900}$"}, {"pattern": "^([a-y]{0,9}z){0,99}$"}]}), ValueError, "too large"),
    (lambda: Grammar.json_schema({"allOf": [{"$ref": "#"}]}), ValueError, "too many levels"),
    (lambda: Grammar.json_schema({"type": "object", "properties": {"a": 3}}), ValueError, "be an object or a bool"),
    (lambda: Grammar.json_schema({"type": "string", "minimum": 2}, unknown="refuse"), NotImplementedError, "'minimum' beside type"),
    (lambda: Grammar.json_schema({"type": "integer", "format": "date"}, unknown="refuse"), NotImplementedError, "'format' beside type 'integer'"),
    (lambda: Grammar.json_schema({"oneOf": [_branch({"const": i}) for i in range(2000)]}), ValueError, "unfolds to more than"),
    (lambda: Grammar.json_schema({"oneOf": [_branch({"minLength": i, "type": "string"}) for i in range(600)]}), NotImplementedError, "that no listed property tells apart, 600"),
    (lambda: Grammar.json_schema({"oneOf": [*(_branch({"const": i}) for i in range(9)), _branch({"enum": [10, 8.0], "format": "int8"})]}), NotImplementedError, "'format' in a not"),
    (lambda: Grammar.json_schema({"$ref": "http://example.com"}), NotImplementedError, "the reference"),
    (lambda: Grammar.json_schema({"$ref": "#/$defs/x"}), ValueError, "point into the schema"),
    (lambda: Grammar.json_schema({"type": "integr"}), ValueError, "type at # must be among"),
    (lambda: Grammar.json_schema("{"), ValueError, "not JSON"),
    (lambda: Grammar.json_schema(7), TypeError, "be a dict"),
    (lambda: Grammar.json_schema({}, depth=99), ValueError, "depth must be in"),
    (lambda: Grammar.json_schema({}, whitespace=r"\s?"), ValueError, "no space in JSON"),
    (
        lambda: Grammar.json_schema({"$ref": "#/$defs/0", "$defs": {str(n): {"type": "array", "prefixItems": [{"$ref": f"#/$defs/{n + 1}"}] * 3} for n in range(30)} | {"30": {}}}),
        ValueError,
        "unfolds to more than",
    ),
    (lambda: Grammar.ebnf('start: "a'), ValueError, "Lark's EBNF"),
    (lambda: Grammar.ebnf("start: other"), ValueError, "define what they name"),
    (lambda: Grammar.ebnf('start: start "a"'), ValueError, "no text satisfies"),
    (lambda: Grammar.ebnf('first: "a"'), ValueError, "name a rule"),
    (lambda: Grammar.ebnf('start: "a"\n%ignore " "'), NotImplementedError, "directive"),
    (lambda: Grammar.ebnf('start: ("a" ~ 1000) ~ 1000'), ValueError, "unfolds to more than"),
    (lambda: Grammar.ebnf('start: a a a a\n' + "\n".join(f"{x}: {y} {y} {y} {y}" for x, y in zip("abcdefgh", "bcdefghi")) + '\ni: "x"'), ValueError, "unfolds to more than"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(BAD)))
def test_bad_input_is_refused_within_two_seconds(number: int) -> None:
    make, kind, words = BAD[number]
    started = time.process_time()
    with pytest.raises(kind, match=re.escape(words)) as caught:
        make()
    assert time.process_time() - started < 2
    assert str(caught.value).startswith("pdkernels.decoding.Grammar: ")


def test_empty_alternatives_of_rules() -> None:
    """They are not rules without texts."""
    empty = Grammar.ebnf('start: sign "a"\nsign: "-" | | "" "+"')
    assert [empty.matches(text) for text in ("a", "-a", "+a", "", "-")] == [True, True, True, False, False]


def test_white_space_and_order() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "null"}}, "required": ["a"]}
    plain, loose = Grammar.json_schema(schema), Grammar.json_schema(schema, whitespace=r"[ \n]{0,4}")
    assert plain.matches('{"a": 1, "b": null}') and plain.matches('{"a":1,"b":null}')
    assert not plain.matches('{ "a": 1}') and not plain.matches('{"b": null, "a": 1}')
    assert loose.matches('{\n  "a" : 1,\n  "b": null\n}')
    for text in drawn(loose, 20):
        assert json.loads(text)["a"] is not None


def test_depth_of_recursion() -> None:
    for depth in range(4):
        made = Grammar.json_schema(SCHEMAS["node"], depth=depth)
        for levels in range(6):
            text = '{"value": 1, "next": ' * levels + '{"value": 1}' + "}" * levels
            assert made.matches(text) == (levels <= depth)
        brackets = Grammar.ebnf('start: "[" start "]" | "x"', depth=depth)
        assert [brackets.matches("[" * n + "x" + "]" * n) for n in range(6)] == [n <= depth for n in range(6)]
