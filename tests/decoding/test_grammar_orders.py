"""Properties in any order, spaces by name, and classes of Unicode in patterns."""

from __future__ import annotations

import itertools
import json
import re
import unicodedata
from typing import Any

import pytest

from pdkernels.decoding import Grammar
from tests.support.grammar_texts import drawn

jsonschema = pytest.importorskip("jsonschema")

from tests.support.schema_fuzz import FORMATS, Validator, Writer, has  # noqa: E402


@pytest.mark.parametrize("texts", ["usual", "all"])
def test_random_schemas_in_any_order(texts: Any) -> None:
    """What a schema's own order has in one order of its properties is there in each; a text that is drawn is valid."""
    others = taken = 0
    for seed in range(250):
        writer = Writer(seed)
        schema = writer.schema()
        options: dict[str, Any] = {"texts": texts, "unknown": "ignore"}
        try:
            fixed, free = (Grammar.json_schema(schema, key_order=order, **options) for order in ("schema", "any"))
        except (NotImplementedError, ValueError):
            continue
        check = Validator(schema, format_checker=FORMATS)
        for text in drawn(free, 4, seed):
            assert check.is_valid(json.loads(text)), (seed, schema, text)
        for value in (writer.value(1) for _ in range(20)):
            if not isinstance(value, dict):
                assert has(free, value) == has(fixed, value)
                continue
            expected = has(fixed, value) and check.is_valid(value)
            for names in itertools.permutations(value):
                assert has_exactly(free, {name: value[name] for name in names}) == expected, (seed, schema, value)
                taken += expected
                others += expected and not has_exactly(fixed, {name: value[name] for name in names})
    assert taken > 100 and others > (10 if texts == "all" else 0)


def has_exactly(grammar: Grammar, value: Any) -> bool:
    """Whether a value is taken as it is written, with or without escapes."""
    return any(grammar.matches(json.dumps(value, ensure_ascii=ascii)) for ascii in (False, True))


@pytest.mark.parametrize("least", [0, 1, 3])
@pytest.mark.parametrize("most", [None, 0, 2, 4])
@pytest.mark.parametrize("texts", ["usual", "all"])
def test_how_many_properties_there_are(least: int, most: int | None, texts: Any) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {name: {"const": 1} for name in "abc"}, "required": ["b"]}
    schema |= {"minProperties": least} | ({} if most is None else {"maxProperties": most})
    check = Validator(schema)
    objects = [dict.fromkeys(names, 1) for count in range(5) for names in itertools.permutations("abcxy", count)]
    if most is not None and most < max(least, 1):
        with pytest.raises(ValueError, match="no text satisfies"):
            Grammar.json_schema(schema, key_order="any", texts=texts)
        return
    grammar = Grammar.json_schema(schema, key_order="any", texts=texts)
    for each in objects:
        unnamed = len(each.keys() - set("abc"))
        taken = grammar.matches(json.dumps(each))
        assert check.is_valid(each) or not taken
        if unnamed <= (1 if least else 2) * (texts == "all"):  # of those without a name one counts for the minimum
            assert taken == check.is_valid(each), each


def test_listed_objects_are_in_any_order_too() -> None:
    grammar = Grammar.json_schema({"enum": [{"a": 1, "b": {"c": 2, "d": 3}}]}, key_order="any")
    assert grammar.matches('{"b": {"d": 3, "c": 2}, "a": 1}') and not grammar.matches('{"b": {"d": 3, "c": 2}}')


def test_too_many_properties_for_any_order() -> None:
    def schema(count: int) -> dict[str, Any]:
        return {"type": "object", "properties": {f"p{n}": {"type": "boolean"} for n in range(count)}}

    assert Grammar.json_schema(schema(8), key_order="any").matches('{"p7": true, "p0": false}')
    with pytest.raises(NotImplementedError, match="9 properties in any order, more than 8"):
        Grammar.json_schema(schema(9), key_order="any")
    with pytest.raises(ValueError, match="key_order"):
        Grammar.json_schema(schema(1), key_order="all")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("whitespace", "expected"),
    [
        (None, [True, True, False, False]),
        ("compact", [True, False, False, False]),
        ("single", [False, True, False, False]),
        ("any", [True, True, True, True]),
        ("", [True, False, False, False]),
        (" ?", [True, True, True, False]),
    ],
)
def test_spaces(whitespace: str | None, expected: list[bool]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"const": 1}}}, "required": ["a"]}
    grammar = Grammar.json_schema(schema, whitespace=whitespace)
    texts = ['{"a":[1,1]}', '{"a": [1, 1]}', '{ "a": [1 , 1 ]}', '{\n\t"a":   [\r1,1]}']
    assert [grammar.matches(text) for text in texts] == expected


CLASSES = {
    r"\p{L}": lambda category: category[0] == "L",
    r"\p{Lu}": lambda category: category == "Lu",
    r"\p{gc=Decimal_Number}": lambda category: category == "Nd",
    r"\p{LC}": lambda category: category in ("Lu", "Ll", "Lt"),
    r"\P{Letter}": lambda category: category[0] != "L",
    r"[\p{L}\p{Nd}_]": lambda category: category[0] == "L" or category == "Nd",
    r"[^\p{L}\P{N}]": lambda category: category[0] == "N",
}


@pytest.mark.parametrize("pattern", CLASSES)
def test_classes_of_unicode(pattern: str) -> None:
    """Each character, but for "_": those that Unicode does not have yet are never taken, and never by what denies them."""
    for denied in (False, True):
        form: dict[str, Any] = {"pattern": f"^{pattern}$"}
        schema = {"type": "string", "minLength": 1, "maxLength": 1, **({"not": form} if denied else form)}
        automaton = Grammar.json_schema(schema).automaton
        for point in [*range(0x20, 0x3000), *range(0x3000, 0x110000, 97)]:
            character = chr(point)
            category = unicodedata.category(character)
            if category != "Cs" and character not in '"\\_':
                expected = category != "Cn" and CLASSES[pattern](category) != denied
                assert automaton.accepts(json.dumps(character, ensure_ascii=False).encode()) == expected, hex(point)


def test_other_classes_are_refused_by_name() -> None:
    for name in (r"\p{Script=Klingon}", r"\p{gc=Greek}", r"\p{Emoji}", r"\pL", r"\p{}", r"\p{Lx}"):
        with pytest.raises(ValueError, match=re.escape("is neither a general category of Unicode nor a known script")):
            Grammar.json_schema({"type": "string", "pattern": name})
    assert Grammar.json_schema({"type": "string", "pattern": r"^\\p{1}$"}).matches(r'"\\p"')
    with pytest.raises(ValueError, match="regular expression"):
        Grammar.regex(r"\p{L}")  # Python's syntax has none
