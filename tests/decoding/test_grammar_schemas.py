"""What schemas may hold: names that JSON Schema does not have, counts written as 2.0, values that JSON has not, and formats as their RFCs have them."""

from __future__ import annotations

import itertools
import json
import re
import warnings
from typing import Any

import pytest

from pdkernels.decoding import Grammar

LONE = "\ud800"
WORD = {"type": "string", "pattern": "^[a-z]{1,3}$"}


def test_unknown_names_are_annotations() -> None:
    """JSON Schema's rule. They are named once, and do not change the language."""
    schema = {
        "type": "object",
        "properties": {"unit": {**WORD, "minLenght": 2, "unit": "m"}},
        "required": ["unit"],
        "order": [3],
        "$conditions": 3,
    }
    schema |= {"x-y": 1, "title": "t", "examples": [{"foo": 1}], "allOf": [{"order": 1, "format": "money"}]}
    with pytest.warns(UserWarning) as caught:
        grammar = Grammar.json_schema(schema)
    assert [str(one.message) for one in caught] == [
        "pdkernels.decoding.Grammar: JSON Schema does not have the keyword 'order' at #, the keyword '$conditions' at # (Did you mean 'contains'?), the format 'money' at #, "
        "the keyword 'minLenght' at #/properties/unit (Did you mean 'minLength'?), the keyword 'unit' at #/properties/unit, which demand nothing."
    ]  # fmt: skip
    assert grammar.matches('{"unit": "a"}') and not grammar.matches('{"unit": "A"}')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Grammar.json_schema(schema, unknown="ignore").matches('{"unit": "a"}')
        assert Grammar.json_schema({"$ref": "#/$defs/a", "note": 1, "$defs": {"a": WORD}}, unknown="ignore").matches(
            '"a"'
        )
        with pytest.raises(
            NotImplementedError, match=r"does not have the keyword 'minLenght' at # \(Did you mean 'minLength'\?\)"
        ):
            Grammar.json_schema({**WORD, "minLenght": 2}, unknown="refuse")
    with pytest.raises(ValueError, match="unknown must be one of 'warn', 'ignore', 'refuse'"):
        Grammar.json_schema(WORD, unknown="no")  # type: ignore[arg-type]


def test_many_unknown_names_make_a_short_warning() -> None:
    with pytest.warns(UserWarning, match="'n4' at # and 995 more, which demand nothing") as caught:
        Grammar.json_schema({**WORD, **{f"n{n}": 0 for n in range(999)}, "y" * 10**5: 1})
    assert len(str(caught[0].message)) < 1000


@pytest.mark.parametrize("name", ["$dynamicRef", "$recursiveRef", "disallow", "extends", "divisibleBy"])
def test_keywords_that_are_not_followed_are_refused(name: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"the keyword '{re.escape(name)}' at #/{re.escape(name)}"):
        Grammar.json_schema({"type": "array", name: {}})


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"type": "string", "minLength": 2.0, "maxLength": 3.0}, ["a", "ab", "abc", "abcd"]),
        ({"type": "array", "items": {"type": "null"}, "minItems": 1.0, "maxItems": 2.0}, [[], [None], [None, None], [None] * 3]),
        ({"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 1}, "minContains": 2.0}, [[1], [1, 1], [1, 2, 1], [2]]),
        ({"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 1}, "minContains": 0.0}, [[], [1], [2]]),
        ({"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 1}}, "minProperties": 1.0, "maxProperties": 1.0}, [{}, {"a": 1}, {"a": 1, "b": 1}]),
        ({"allOf": [{"type": "string", "maxLength": 3.0}, {"maxLength": 2}]}, ["ab", "abc"]),
        ({"type": "string", "maxLength": 5, "not": {"minLength": 3.0}}, ["ab", "abc"]),
        ({"type": "integer", "minimum": 0, "maximum": 12, "allOf": [{"multipleOf": 2.0}, {"multipleOf": 3}]}, [0, 2, 3, 6, 12, 18]),
        ({"type": "integer", "multipleOf": 2.0, "minimum": 1.0, "maximum": 4.0}, [0, 1, 2, 3, 4, 6]),
    ],
)  # fmt: skip
def test_counts_with_a_point_are_whole_numbers(schema: dict[str, Any], values: list[Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    grammar, check = Grammar.json_schema(schema), jsonschema.Draft202012Validator(schema)
    assert [grammar.matches(json.dumps(value)) for value in values] == [check.is_valid(value) for value in values]
    assert Grammar.json_schema({"type": "string", "maxLength": 9.0}, longest=2).matches('"ab"')


@pytest.mark.parametrize(
    "make",
    [
        lambda: Grammar.choice(["a", "b" + LONE]),
        lambda: Grammar.regex("a|" + LONE),
        lambda: Grammar.regex(r"\ud83d\ude00"),
        lambda: Grammar.regex(r"[a\ud83d]"),
        lambda: Grammar.ebnf(f'start: "{LONE}"'),
        lambda: Grammar.ebnf(r'start: "\ud800"'),
        lambda: Grammar.ebnf(r'start: "\ud800".."\ud8ff"'),
        lambda: Grammar.lark(f'start: "{LONE}"'),
        lambda: Grammar.json_schema({"enum": ["a", LONE]}),
        lambda: Grammar.json_schema({"const": {"a": [LONE]}}),
        lambda: Grammar.json_schema({"properties": {LONE: {}}}),
        lambda: Grammar.json_schema({"type": "object", "required": [LONE]}),
        lambda: Grammar.json_schema({"patternProperties": {LONE: {}}}),
        lambda: Grammar.json_schema({"type": "string", "pattern": r"^\ud800$"}),
        lambda: Grammar.json_schema(r'{"dependentRequired": {"a": ["\ud800"]}}'),
        lambda: Grammar.json_schema({"type": "null"}, whitespace=LONE),
    ],
)
def test_lone_surrogates_are_refused(make: Any) -> None:
    """No text in UTF-8 has one, so a text that must be one of these would be none of them."""
    with pytest.raises(ValueError, match="must hold only Unicode characters, got the surrogate '.ud8") as caught:
        make()
    str(caught.value).encode()


def test_ranges_around_surrogates() -> None:
    for grammar in (
        Grammar.ebnf(r'start: "\u0001".."\uffff"'),
        Grammar.regex(r"[\u0001-\uffff]"),
        Grammar.regex(r"[^\ud800-\udfff]"),
    ):
        assert grammar.matches("a") and grammar.matches("\ufffd") and not grammar.matches(LONE)
        assert not grammar.automaton.accepts(LONE.encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"const": float("nan")}, "const at # must be a finite number, got nan"),
        ({"enum": [1, float("inf")]}, r"enum\[1\] at # must be a finite number, got inf"),
        ('{"type": "null", "default": NaN}', "default at # must be a finite number, got nan"),
        ({"properties": {"a": {"not": {"const": -float("inf")}}}}, "const at #/properties/a/not must be a finite number, got -inf"),
        ({"type": "number", "minimum": -float("inf")}, "minimum at # must be a finite number, got -inf"),
        ({"type": "number", "multipleOf": float("nan")}, "multipleOf at # must be a finite number, got nan"),
        ({"type": "string", "maxLength": float("inf")}, "maxLength at # must be a finite number, got inf"),
        ({"type": "integer", "multipleOf": 0}, "multipleOf at # must be above 0, got 0"),
        ({"type": "integer", "multipleOf": -2}, "multipleOf at # must be above 0, got -2"),
        ({"const": 10**5000}, "const at # must be a number of at most 1,023 bits, as doubles are, got an int of"),
        ({"type": "string", "maxLength": 1.5}, "maxLength at # must be a whole number of at least 0, got 1.5"),
    ],
)  # fmt: skip
def test_numbers_that_json_has_not_are_refused(schema: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Grammar.json_schema(schema)


def test_names_are_strings() -> None:
    with pytest.raises(TypeError, match="a name at # must be a str, got int"):
        Grammar.json_schema({1: {}})


def is_duration(text: str) -> bool:
    """Appendix A of RFC 3339: between the first and the last unit of a part none is left out, and weeks stand alone."""
    match = re.fullmatch(r"P((?:\d+[YMD])*)(T(?:\d+[HMS])+)?|P\d+W", text)
    if match is None or text == "P":
        return False
    units = [re.sub("[^A-Z]", "", part or "").lstrip("T") for part in match.groups()]
    return units[0] in "YMD" and units[1] in "HMS"


def test_durations_are_those_of_the_rfc() -> None:
    grammar = Grammar.json_schema({"type": "string", "format": "duration"})
    found = 0
    for count in range(4):
        for days, hours in itertools.product(
            itertools.product("YMDW", repeat=count), itertools.product("HMS", repeat=min(count, 2))
        ):
            for time in ("", "T" + "".join(f"1{unit}" for unit in hours)):
                text = "P" + "".join(f"12{unit}" for unit in days) + time
                assert grammar.matches(f'"{text}"') == is_duration(text), text
                found += is_duration(text)
    assert found > 20 and grammar.matches('"PT1H2M3S"') and not grammar.matches('"PT1H2S"')


def test_days_of_leap_years() -> None:
    from datetime import date

    grammar = Grammar.json_schema({"type": "string", "format": "date"})
    for year in [*range(1896, 2110), 1000, 1200, 4000, 9996, 9999]:
        for day in ("02-28", "02-29", "02-30", "04-31", "12-31"):
            try:
                valid = bool(date.fromisoformat(f"{year}-{day}"))
            except ValueError:
                valid = False
            assert grammar.matches(f'"{year}-{day}"') == valid, (year, day)


def test_base64_without_stray_bits() -> None:
    """RFC 4648: the bits that padding leaves over are zero."""
    import base64

    grammar = Grammar.json_schema({"type": "string", "format": "byte"})
    for text in ("", "QQ==", "QR==", "QUI=", "QUJ=", "QUJD", "QUJDRA==", "Q"):
        try:
            valid = base64.b64encode(base64.b64decode(text)).decode() == text
        except ValueError:
            valid = False
        assert grammar.matches(f'"{text}"') == valid, text


SPACES_OF_JAVASCRIPT = "\t\n\v\f\r \u00a0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff" + "".join(
    map(chr, range(0x2000, 0x200B))
)
OF_JAVASCRIPT = {r"\s": f"[{SPACES_OF_JAVASCRIPT}]", r"\S": f"[^{SPACES_OF_JAVASCRIPT}]", r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[A-Za-z0-9_]"}  # fmt: skip
OF_JAVASCRIPT |= {r"\W": "[^A-Za-z0-9_]", ".": "[^\n\r\u2028\u2029]", "$": r"\Z"}


@pytest.mark.parametrize(
    "pattern", [r"^\s$", r"^\S$", r"^\d$", r"^\D$", r"^\w$", r"^\W$", "^.$", "a$", r"\S\s$", r"^[^\s]$", r"^[^\Wa]"]
)
def test_classes_of_patterns_in_two_languages(pattern: str) -> None:
    """JSON Schema's patterns are those of JavaScript, and jsonschema's those of Python. Texts satisfy a schema in both, with `not` before it too."""
    theirs = (
        re.sub(r"\\[sSdDwW]|\.|\$", lambda match: OF_JAVASCRIPT[match[0]], pattern) if "[" not in pattern else pattern
    )
    short = {"type": "string", "maxLength": 2}
    grammar = Grammar.json_schema({**short, "pattern": pattern})
    others = Grammar.json_schema({**short, "not": {"pattern": pattern}})
    found = 0
    for count in range(3):
        for characters in itertools.product("a1_ \n\r\u2028\u00a0\ufeff\u0663é\x85-\v", repeat=count):
            text = "".join(characters)
            matches = [bool(re.search(one, text)) for one in (pattern, theirs)]
            written = json.dumps(text, ensure_ascii=False)
            assert all(matches) or not grammar.matches(written), text
            assert not any(matches) or not others.matches(written), text
            found += grammar.matches(written) + others.matches(written)
    assert found > 50


def test_schemas_that_llguidance_reads_wrongly() -> None:
    """Integers that are no doubles are refused; a name that is spelled with an escape counts as another property there, which a warning says."""
    pytest.importorskip("llguidance")
    for number in (2**53 + 1, -(2**60)):
        with pytest.raises(
            ValueError,
            match="llguidance rounds .* in a schema of %json to a double of 53 bits. Use Grammar.json_schema",
        ):
            Grammar.lark('start: "<" %json ' + json.dumps({"type": "array", "items": {"enum": [1, number]}}) + ' ">"')
    exact = Grammar.json_schema({"enum": [2**53 + 1]})
    assert exact.matches(str(2**53 + 1)) and not exact.matches(str(2**53))
    named, spelled = {"type": "object", "properties": {"a": {"type": "integer"}}}, r'{"\u0061": "x"}'
    with pytest.warns(
        UserWarning,
        match="takes a named one with any value if its name has an escape. Set additionalProperties to false",
    ) as told:
        Grammar.lark("start: %json " + json.dumps(named))
    assert [warning.filename for warning in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        closed = Grammar.lark("start: %json " + json.dumps({**named, "additionalProperties": False}))
        assert Grammar.lark('start: "%json" | /a/').matches("%json")
    assert closed.matches('{"a": 1}') and not closed.matches(spelled)
    assert not Grammar.json_schema(named).matches(spelled)


def test_values_without_a_schema_have_three_levels() -> None:
    def nested(opening: str, closing: str, levels: int) -> str:
        return opening * levels + "1" + closing * levels

    anything, objects = Grammar.json_schema(True), Grammar.json_schema({"type": "object"})
    for levels in range(6):
        for text in (nested("[", "]", levels), nested('{"a": ', "}", levels), nested('[{"a": ', "}]", levels // 2)):
            assert anything.matches(text) == (text.count("{") + text.count("[") <= 3), text
        assert objects.matches('{"k": ' + nested("[", "]", levels) + "}") == (levels <= 3)
        assert objects.matches(nested('{"k": ', "}", levels)) == (1 <= levels <= 4)
