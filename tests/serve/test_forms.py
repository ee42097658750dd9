"""The grammars of answers that requests ask for."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

pytest.importorskip("pydantic")

import pdkernels as pd
from pdkernels.serve.calls import HERMES
from pdkernels.serve.errors import Refused
from pdkernels.serve.forms import asked_grammar
from pdkernels.serve.messages_api import CountRequest
from pdkernels.serve.responses import ResponseRequest
from pdkernels.serve.schema import ChatRequest


def grammar_of(form: dict[str, Any]) -> Any:
    body = ChatRequest(model="m", messages=[{"role": "user", "content": "x"}], response_format=form)  # type: ignore[arg-type]
    asked = asked_grammar(body)
    assert asked is not None
    return asked.grammar()


def test_json_object_takes_nested_values() -> None:
    matches = grammar_of({"type": "json_object"}).matches
    assert all(
        map(matches, ["{}", '{"a": {"b": {"c": 1}}}', '{"a": [[1], {"b": null}], "c": ""}', '{"a": {"b": {"c": {}}}}'])
    )
    assert not any(map(matches, ["[]", "1", '{"a": 1', '{"a": {"b": {"c": {"d": {}}}}}']))


def test_unknown_keywords_of_a_schema_print_nothing() -> None:
    """Clients choose the names, so warnings of them would fill the log."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schema = {"type": "string", "maxLength": 2, "coment": "anything", "format": "money"}
        assert grammar_of({"type": "json_schema", "json_schema": {"schema": schema}}).matches('"ab"')


PAIR = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, "required": ["a", "b"]}
TEXTS = ['{"a": 1, "b": 2}', '{"b": 2, "a": 1}', '{"a":1,"b":2}', '{"b":2,"a":1}', '{"a":  1,"b":2}']


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({}, [0, 2]),
        ({"key_order": "any"}, [0, 1, 2, 3]),
        ({"whitespace": "compact"}, [2]),
        ({"key_order": "any", "whitespace": "single"}, [0, 1]),
        ({"whitespace": "any"}, [0, 2, 4]),
        ({"whitespace": "[ ]{0,2}"}, [0, 2, 4]),
    ],
)
def test_orders_and_spaces_of_a_schema(options: dict[str, Any], taken: list[int]) -> None:
    """By each interface, and beside tools that may be called instead."""
    messages = [{"role": "user", "content": "x"}]
    named = {"name": "pair", "schema": PAIR, **options}
    chat = {"messages": messages, "response_format": {"type": "json_schema", "json_schema": named}}
    flat = {"type": "json_schema", "schema": PAIR, **options}
    bodies: list[ChatRequest] = [
        ChatRequest(model="m", **chat),  # type: ignore[arg-type]
        ResponseRequest(model="m", input="x", text={"format": {**flat, "name": "pair"}}).chat([]),  # type: ignore[arg-type]
        CountRequest(model="m", messages=messages, output_config={"format": flat}).chat(),  # type: ignore[arg-type]
    ]
    for body in bodies:
        asked = asked_grammar(body)
        assert asked is not None
        calling = asked._replace(calling=(HERMES, (("f", "{}"),), True, False))
        for form in (asked, calling):
            grammar = form.grammar()
            assert [number for number, text in enumerate(TEXTS) if grammar.matches(text)] == taken


NESTED = {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}


@pytest.mark.parametrize(("depth", "most"), [({}, 5), ({"depth": None}, 5), ({"depth": 0}, 2), ({"depth": "any"}, 90)])
def test_depths_of_a_schema(depth: dict[str, Any], most: int) -> None:
    """By each interface, of a recursive schema; numbers also beside tools."""
    messages = [{"role": "user", "content": "x"}]
    chat = {"type": "json_schema", "json_schema": {"name": "n", "schema": NESTED, **depth}}
    flat = {"type": "json_schema", "schema": NESTED, **depth}
    bodies: list[ChatRequest] = [
        ChatRequest(model="m", messages=messages, response_format=chat),  # type: ignore[arg-type]
        ResponseRequest(model="m", input="x", text={"format": {**flat, "name": "n"}}).chat([]),  # type: ignore[arg-type]
        CountRequest(model="m", messages=messages, output_config={"format": flat}).chat(),  # type: ignore[arg-type]
    ]
    for body in bodies:
        asked = asked_grammar(body)
        assert asked is not None
        calling = asked._replace(calling=(HERMES, (("f", "{}"),), True, False))
        if most == 90:
            with pytest.raises(Refused, match="a depth of 'any' beside tools or a thought"):
                calling.grammar()
        for form in (asked,) if most == 90 else (asked, calling):
            grammar = form.grammar()
            assert grammar.matches("[" * most + "]" * most)
            assert grammar.matches("[" * (most + 1) + "]" * (most + 1)) == (most == 90)
    model = pd.models.load("tiny-code")
    whole = grammar_of(chat)
    assert whole.nbytes(model, model.end_tokens) > whole.nbytes(model, ()) > 1024


def test_depths_that_are_none_are_refused() -> None:
    for depth in (-1, 65, "all", 1.5, True):
        with pytest.raises(ValueError, match="depth"):
            grammar_of({"type": "json_schema", "json_schema": {"schema": NESTED, "depth": depth}})


def test_orders_and_spaces_that_are_none_are_refused() -> None:
    for options, words in (({"whitespace": "x"}, "no space in JSON"), ({"whitespace": "("}, "regular expression")):
        with pytest.raises(Refused, match=words):
            grammar_of({"type": "json_schema", "json_schema": {"schema": PAIR, **options}})
    with pytest.raises(ValueError, match="key_order"):
        grammar_of({"type": "json_schema", "json_schema": {"schema": PAIR, "key_order": "none"}})
    many = {"properties": {f"n{n}": {"const": n} for n in range(9)}}
    with pytest.raises(Refused, match="9 properties in any order, more than 8"):
        grammar_of({"type": "json_schema", "json_schema": {"schema": many, "key_order": "any"}})
