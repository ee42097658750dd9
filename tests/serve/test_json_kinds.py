"""A value in a body is of the kind that its field has: true is no number, and 1 is no flag."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import pdkernels as pd

pytest.importorskip("fastapi")
from fastapi.testclient import TestClient
from pydantic import ValidationError

from pdkernels.serve import create_app
from pdkernels.serve.errors import Refused
from pdkernels.serve.messages import plain
from pdkernels.serve.responses import ResponseRequest
from pdkernels.serve.schema import ChatRequest, CompletionRequest
from tests.serve.clients import Chatting
from tests.serve.test_fields import ASKED, BODIES, CHAT, MESSAGES, RESPONSES, TEMPLATE, TEXT, TOKENIZE

JSON = {"Content-Type": "application/json"}
Place = tuple[str, ...]
WRONG: dict[str, list[Any]] = {
    "integer": [True, False, "1"],
    "number": [True, False, "0.5"],
    "boolean": [1, 0, "true", "yes"],
}


@pytest.fixture(scope="module")
def client() -> Any:
    model = pd.models.load("tiny-code")
    model.tokenizer = Chatting(model.tokenizer, TEMPLATE)
    with TestClient(create_app(pd.Engine(model, max_new_tokens=32), "tiny"), raise_server_exceptions=False) as made:
        yield made


def many(item: bytes) -> bytes:
    return b'{"options": [%s]}' % b",".join([item] * 66_000)


def places(schema: dict[str, Any], known: dict[str, Any], at: Place = ()) -> Iterator[tuple[Place, str]]:
    """Where a body has numbers and flags, and which of them, by the server's own description."""
    schema = known[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    others = [one for one in schema.get("anyOf", []) if one.get("type") != "null"]
    for one in others if len(others) == 1 or not at else []:
        yield from places(one, known, at)
    if schema.get("type") in WRONG and "const" not in schema and "enum" not in schema:
        yield at, schema["type"]
    for name, one in schema.get("properties", {}).items():
        yield from places(one, known, (*at, name))
    if isinstance(more := schema.get("additionalProperties"), dict) and more.get("type") != "null":
        yield from places(more, known, (*at, "7"))
    if "items" in schema:
        yield from places(schema["items"], known, (*at, "0"))


def resolved(schema: dict[str, Any], known: dict[str, Any], name: str = "") -> dict[str, Any]:
    """Without references, and of several forms the one with a field of this name."""
    schema = known[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    forms = [resolved(one, known, name) for one in schema.get("anyOf", []) if one.get("type") != "null"]
    holding = [one for one in forms if name in one.get("properties", {}) or (name == "0" and "items" in one)]
    return [*holding, *forms, schema][0]


def least(schema: dict[str, Any], known: dict[str, Any]) -> Any:
    """A value that it allows."""
    schema = resolved(schema, known)
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    kind = schema.get("type", "object")
    if kind == "object":
        return {name: least(schema["properties"][name], known) for name in schema.get("required", [])}
    return {"string": "a", "array": [], "boolean": False}.get(kind, schema.get("minimum", 1))


def holding(schema: dict[str, Any], known: dict[str, Any], at: Place, value: Any) -> Any:
    """A body's part with this value there, and with what must be beside it."""
    if not at:
        return value
    schema = resolved(schema, known, at[0])
    if at[0] == "0" and "items" in schema:
        return [holding(schema["items"], known, at[1:], value)]
    inner = schema.get("properties", {}).get(at[0]) or schema["additionalProperties"]
    return least(schema, known) | {at[0]: holding(inner, known, at[1:], value)}


def test_every_number_and_flag_of_every_route_is_one(client: Any) -> None:
    description = client.get("/openapi.json").json()
    known, count = description["components"]["schemas"], 0
    bodies = {**BODIES, "/replay": {"prompt": "a"}, "/tokenize": BODIES[TOKENIZE], "/detokenize": {"tokens": [97]}}
    for route, body in bodies.items():
        schema = description["paths"][route]["post"]["requestBody"]["content"]["application/json"]["schema"]
        for at, kind in places(schema, known):
            for value in WRONG[kind]:
                inner = resolved(schema, known)["properties"][at[0]]
                answer = client.post(route, json=body | {at[0]: holding(inner, known, at[1:], value)})
                error = answer.json().get("error", {"param": None})
                assert (answer.status_code, error["param"]) == (400, ".".join(at)), (route, at, value, answer.text)
                assert "must be" in error["message"], (route, at, value, answer.text)
                count += 1
    assert count > 300


@pytest.mark.parametrize("value", [[True, 1], [[True, 1]], [1.0, 2], [["a"]], True, 1])
def test_prompts_of_ids_are_integers(client: Any, value: Any) -> None:
    answer = client.post(TEXT, json=BODIES[TEXT] | {"prompt": value})
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("prompt")


def test_whole_numbers_may_have_a_point(client: Any) -> None:
    answer = client.post(CHAT, json=BODIES[CHAT] | {"max_tokens": 2.0, "temperature": 0, "seed": 3.0})
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 2


HALF = "a \ud83d"
SAID = {"messages": [{"role": "user", "content": HALF}]}


@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        (TEXT, {"prompt": HALF}, "prompt"), (TEXT, {"prompt": ["b", HALF]}, "prompt"), (TEXT, {"suffix": HALF}, "suffix"),
        (TEXT, {"stop": HALF}, "stop"), (TEXT, {"choice": [HALF]}, "choice"), (TEXT, {"regex": HALF}, "regex"), (TEXT, {HALF: 1}, None),
        ("/replay", {"prompt": HALF}, "prompt"), (TOKENIZE, {"prompt": HALF, "messages": None}, "prompt"),
        (TOKENIZE, SAID, "messages"), (CHAT, SAID, "messages"), (MESSAGES, SAID, "messages"), (MESSAGES, {"system": HALF}, "system"),
        (RESPONSES, {"input": HALF}, "input"), (MESSAGES, {"system": [{"type": "text", "text": HALF}]}, "system"),
        (CHAT, {"chat_template_kwargs": {"reasoning_effort": HALF}}, "chat_template_kwargs"),
    ],
)  # fmt: skip
def test_half_a_character_in_what_the_model_reads_is_refused_by_name(
    client: Any, route: str, body: Any, field: Any
) -> None:
    answer = client.post(route, content=json.dumps(BODIES.get(route, {}) | body), headers=JSON)
    error = answer.json()["error"]
    assert answer.status_code == 400 and "must hold only Unicode characters" in error["message"], answer.text
    assert (error["param"] or "").startswith(field or "") and (field is not None or error["param"] is None), error


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"prompt": "\xe9"}', "in UTF-8: byte 12 is part of no character"), (b"[" * 50_000, "it is too deep"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "a number has too many digits"), (b'{"seed": 1e999}', "'1e999' is no number there"),
        (b'{"seed": }', "Expecting value, at character 9"), (many(b"[]"), "must have at most 65536 lists and objects"),
        (many(b'{"":"\\\\[\\""}'), "must have at most 65536 lists and objects"),
    ],
    ids=["bytes", "depth", "digits", "number", "syntax", "lists", "objects"],
)  # fmt: skip
def test_what_is_wrong_with_json_is_said(client: Any, body: bytes, words: str) -> None:
    answer = client.post(TEXT, content=body, headers=JSON)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text


def test_brackets_in_a_text_are_no_lists(client: Any) -> None:
    """However many there are, behind quotes that are escaped and in whatever encoding."""
    text = '\\"[{' * 40_000
    for encoding in ("utf-8", "utf-16", "utf-32-be"):
        content = json.dumps({"model": "tiny", "prompt": text}, ensure_ascii=False).encode(encoding)
        answer = client.post(TEXT, content=content, headers=JSON)
        assert answer.json()["error"]["code"] == "context_length_exceeded", answer.text


def test_of_a_long_list_or_object_the_first_wrong_item_is_told() -> None:
    """Errors of all items would take longer than the request may."""
    wrong: list[Any] = [{}] * 10_000
    many = {f"a{number}": 1 for number in range(10_000)}
    for kind, body in (
        (CompletionRequest, {"prompt": wrong}), (ChatRequest, {"messages": [1] * 10_000}), (ChatRequest, {"messages": ASKED, **many}),
        *((ChatRequest, {"messages": ASKED, name: many}) for name in ("metadata", "logit_bias", "forced_tokens")),
        (ChatRequest, {"messages": ASKED, "tools": [{"type": "function", "function": {"name": "a"}}] * 5000}),
        (ResponseRequest, {"input": "a", "metadata": many}),
    ):  # fmt: skip
        with pytest.raises(ValidationError) as error:
            kind.model_validate({"model": "tiny", **body})
        assert error.value.error_count() == 1


def test_a_template_shows_what_it_reads() -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "a"}, CALLED]
    for template in ("{{ m.function_call }}", "{% if m['function_call'] %}", '{{ m["function_call"] }}'):
        assert plain(messages, template)
    for template in ("<start_function_call>", "{# function_call #}", "{{ m.function_calls }}"):
        with pytest.raises(Refused, match="does not show function_call"):
            plain(messages, template)


CALLED = {"role": "assistant", "content": None, "function_call": {"name": "get", "arguments": "{}"}}
COUNT = "/v1/messages/count_tokens"


@pytest.mark.parametrize(
    ("route", "body", "field", "words"),
    [
        (RESPONSES, {"input": []}, "input", "a text or a list of items"), (RESPONSES, {"input": ""}, "input", "not empty"),
        (RESPONSES, {"tool_choice": {"type": "file_search"}}, "tool_choice", '"auto", "none", "required", or a function'),
        (RESPONSES, {"instructions": HALF}, "instructions", "Unicode"), (MESSAGES, {"system": HALF}, "system", "Unicode"),
        (MESSAGES, {"system": 1}, "system", "a text or a list of blocks"), (MESSAGES, {"n": 2}, "n", "n is not supported here"),
        (COUNT, {"max_tokens": 2}, "max_tokens", "max_tokens is not supported here"),
        *((route, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "must leave a token") for route in (TEXT, CHAT, RESPONSES, MESSAGES)),
        *((TOKENIZE, {"prompt": "a", "messages": None, name: value}, name, "is of a chat") for name, value in {
            "tools": [{"type": "function", "function": {"name": "a"}}], "chat_template_kwargs": {"a": 1}, "add_generation_prompt": True,
            "continue_final_message": True}.items()),
        (CHAT, {"messages": [{"role": "user", "content": "a"}, CALLED]}, "messages.1.function_call", "does not show function_call"),
        *((TEXT, {"logit_bias": {key: 1}}, "logit_bias", "must be an integer") for key in ("01", " 1", "1.0", "1_0", "+1", "true", "-0")),
        *((CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "depth": depth}}}, "response_format.json_schema.depth",
           'an integer from 0 to 64, or "any"') for depth in (True, "x", 65)),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_by_the_name_of_its_field(
    client: Any, route: str, body: Any, field: str, words: str
) -> None:
    answer = client.post(route, content=json.dumps(BODIES[route] | body), headers=JSON)
    error = answer.json().get("error", {"param": None, "message": ""})
    assert answer.status_code == 400 and (error["param"] or "").startswith(field) and words in error["message"], (
        answer.text
    )
    assert "its field is" not in error["message"] and not (
        set("[]'") & set(error["param"]) - set("[]" if "key" in error["param"] else "")
    )
