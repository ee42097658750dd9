"""Fields inside messages, parts, blocks, items and tools: what clients' types know is taken or followed, and the rest is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest

import pdkernels as pd

pytest.importorskip("fastapi")
pytest.importorskip("openai")
pytest.importorskip("anthropic")
from anthropic.types import text_block_param, thinking_block_param, tool_result_block_param, tool_use_block_param
from fastapi.testclient import TestClient
from openai.types import responses

from pdkernels.serve import create_app
from pdkernels.serve.errors import Refused
from pdkernels.serve.items import _ITEMS, _PARTS
from pdkernels.serve.messages import CACHED, plain
from pdkernels.serve.messages_api import _BLOCKS
from tests.serve.clients import Chatting

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.name }}{{ m.tone }}{{ m.reasoning_content }}{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}"
    "{% for tool in tools or [] %}{{ tool | tojson }}{{ tool.function.examples }}{% endfor %}"
)
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COUNT, INPUT, TOKENIZE = "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/v1/tokenize"
FUNCTION = {"name": "get", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    model = pd.models.load("tiny-code")
    model.tokenizer = Chatting(model.tokenizer, TEMPLATE)
    engine = pd.Engine(model, max_new_tokens=8)
    with TestClient(create_app(engine, "tiny"), raise_server_exceptions=False) as made:
        yield made


def tokens(client: Any, route: str, body: dict[str, Any]) -> Any:
    """How many a prompt has."""
    answer = client.post(route, json={"model": "tiny", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["count" if route == TOKENIZE else "input_tokens"]


def chat(part: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", **part}]}]}


def block(kind: str, **fields: Any) -> dict[str, Any]:
    known = {
        "text": ("user", {"text": "a"}), "tool_result": ("user", {"tool_use_id": "c", "content": "a"}),
        "thinking": ("assistant", {"thinking": "a"}), "tool_use": ("assistant", {"id": "c", "name": "get", "input": {}}),
    }  # fmt: skip
    role, content = known[kind]
    return {"messages": [{"role": role, "content": [{"type": kind, **content, **fields}]}]}


def item(kind: str, **fields: Any) -> dict[str, Any]:
    known: dict[str, dict[str, Any]] = {
        "message": {"role": "user", "content": "a"}, "reasoning": {"summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
        "function_call": {"call_id": "c", "name": "get", "arguments": "{}"}, "function_call_output": {"call_id": "c", "output": "a"},
    }  # fmt: skip
    return {"input": [{"type": kind, **known[kind], **fields}]}


def said(kind: str, **fields: Any) -> dict[str, Any]:
    return item("message", content=[{"type": kind, "text": "a", **fields}])


BREAK = {"mode": "explicit"}
TAKEN = [
    (TOKENIZE, chat({}), chat({"cache_control": {"type": "ephemeral"}, "prompt_cache_breakpoint": BREAK, "title": None})),
    (TOKENIZE, chat({}), chat({"id": "lc_1", "index": 0, "annotations": [], "_meta": {"a": 1}})),
    *(
        (TOKENIZE, {**chat({}), "tools": [{"type": "function", "function": FUNCTION}]}, {**chat({}), "tools": [tool]})
        for tool in (
            {"type": "function", "function": {**FUNCTION, "type": "function"}},
            {"type": "function", "function": FUNCTION, "cache_control": {"type": "ephemeral"}},
        )
    ),
    (COUNT, block("tool_result"), block("tool_result", content=[{"type": "text", "text": "a", "id": "lc_1"}])),
    (COUNT, block("text"), {**block("text"), "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}),
    (COUNT, {**block("text"), "tools": [{"name": "a", "input_schema": {}}]}, {**block("text"), "tools": [{"name": "a", "input_schema": {}, "eager_input_streaming": True, "defer_loading": False, "input_examples": []}]}),
    (INPUT, item("message"), item("message", internal_chat_message_metadata_passthrough={"a": 1})),
    (INPUT, item("function_call"), item("function_call", caller={"type": "direct"})),
    (INPUT, item("reasoning"), item("reasoning", encrypted_content="")),
    (COUNT, block("text"), block("text", cache_control={"type": "ephemeral"}, citations=[])),
    (COUNT, block("tool_result"), block("tool_result", cache_control={"type": "ephemeral"}, is_error=True)),
    (COUNT, block("thinking"), block("thinking", signature="s")),
    (COUNT, block("tool_use"), block("tool_use", cache_control={"type": "ephemeral"}, caller={"type": "direct"})),
    (INPUT, item("message"), item("message", id="m", status="completed", phase="commentary")),
    (INPUT, item("reasoning"), item("reasoning", id="r", status="completed", encrypted_content=None)),
    (INPUT, item("function_call"), item("function_call", id="f", status="completed")),
    (INPUT, item("function_call_output"), item("function_call_output", id="f", status="completed")),
    (INPUT, said("input_text"), said("input_text", prompt_cache_breakpoint=BREAK)),
    (INPUT, said("output_text"), said("output_text", annotations=[{"type": "url_citation"}], logprobs=[])),
]  # fmt: skip


@pytest.mark.parametrize(("route", "without", "beside"), TAKEN)
def test_fields_that_change_no_text_are_taken(route: str, without: Any, beside: Any, client: Any) -> None:
    assert tokens(client, route, without) == tokens(client, route, beside)


FOLLOWED = [
    (TOKENIZE, chat({}), {"messages": [{**chat({})["messages"][0], "tone": "kind"}]}),  # which this template reads
    (TOKENIZE, {**chat({}), "tools": [{"type": "function", "function": FUNCTION}]}, {**chat({}), "tools": [{"type": "function", "function": {**FUNCTION, "return": {"type": "string"}}}]}),
    (TOKENIZE, {**chat({}), "tools": [{"type": "function", "function": FUNCTION}]}, {**chat({}), "tools": [{"type": "function", "function": {**FUNCTION, "examples": ["a"]}}]}),
    (INPUT, item("function_call_output"), item("function_call_output", name="get")),
]  # fmt: skip


@pytest.mark.parametrize(("route", "without", "beside"), FOLLOWED)
def test_fields_that_the_template_reads(route: str, without: Any, beside: Any, client: Any) -> None:
    assert tokens(client, route, without) < tokens(client, route, beside)


TOOL = "tools.0.function"
REFUSED = [
    (CHAT, chat({"detail": "high"}), "messages.0.content.0.detail"),
    (CHAT, chat({"citations": ["a"]}), "messages.0.content.0.citations"),
    (CHAT, chat({"x" * 300: 1}), "messages.0.content.0.xxx"),
    (CHAT, {"messages": [{"role": "assistant", "content": "a", "audio": {"id": "a"}}]}, "messages.0.audio"),
    (CHAT, {"messages": [{"role": "assistant", "content": "a", "refusal": "No."}]}, "messages.0.refusal"),
    *((route, {**chat({}), "tools": [{"type": "function", "function": {**FUNCTION, "descripton": "Gets."}}]}, f"{TOOL}.descripton") for route in (CHAT, TOKENIZE)),
    *((CHAT, {**chat({}), "tools": [{"type": "function", "function": {**FUNCTION, name: "Gets."}}]}, f"{TOOL}.{name}") for name in ("example", "func", "m")),
    *((route, body, field) for kind in (["text"], {"a": 1}) for route, body, field in (
        (COUNT, {"messages": [{"role": "user", "content": [{"type": kind, "text": "a"}]}]}, "messages.0.content.0"),
        (INPUT, {"input": [{"type": kind, "role": "user", "content": "a"}]}, "input.0"),
        (INPUT, {"input": [{"role": "user", "content": [{"type": kind, "text": "a"}]}]}, "input.0.content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": kind, "text": "a"}]}]}, "messages.0.content"),
    )),
    (CHAT, {**chat({}), "tools": [{"type": "function", "function": FUNCTION, "async": True}]}, "tools.0.async"),
    (CHAT, {**chat({}), "stream": True, "stream_options": {"include_usage": True, "include_all": True}}, "stream_options.include_all"),
    (CHAT, {**chat({}), "response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
    (CHAT, {**chat({}), "response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strickt": True}}}, "response_format.json_schema.strickt"),
    (CHAT, {**chat({}), "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": {"type": "function", "function": {"name": "get", "mode": "auto"}}}, "tool_choice"),
    *((route, {"max_tokens": 4, "messages": [{"role": "user", "content": "a", "name": "me"}]} if route == MESSAGES else {"messages": [{"role": "user", "content": "a", "name": "me"}]}, "messages.0.name") for route in (MESSAGES, COUNT)),
    *((COUNT, block(kind, title="a"), "messages.0.content.0.title") for kind in _BLOCKS),
    (COUNT, {**block("text"), "system": [{"type": "text", "text": "a"}, {"type": "text", "text": "a", "title": "b"}]}, "system.1.title"),
    (COUNT, block("tool_result", content=[{"type": "text", "text": "a", "title": "b"}]), "messages.0.content.0.content.0.title"),
    (COUNT, {**block("text"), "tools": [{"name": "a", "input_schema": {}, "parameters": {}}]}, "tools.0.parameters"),
    (COUNT, {**block("text"), "tool_choice": {"type": "auto", "mode": "a"}}, "tool_choice.mode"),
    *((route, item(kind, title="a"), "input.0.title") for route in (RESPONSES, INPUT) for kind in _ITEMS),
    *((INPUT, said(kind, title="a"), "input.0.content.0.title") for kind in _PARTS),
    (INPUT, item("reasoning", encrypted_content="gAAA"), "input.0.encrypted_content"),
    (INPUT, item("function_call", namespace="n"), "input.0.namespace"),
    (INPUT, {"input": "a", "tools": [{"type": "function", **FUNCTION, "defer_loading": True}]}, "tools.0.defer_loading"),
    (INPUT, {"input": "a", "tools": [{"type": "function", **FUNCTION, "descripton": "a"}]}, "tools.0.descripton"),
    (INPUT, {"input": "a", "text": {"format": {"type": "json_schema", "schema": {}, "strickt": True}}}, "text.format.strickt"),
    (INPUT, {"input": "a", "reasoning": {"context": "all"}}, "reasoning.context"),
]  # fmt: skip


@pytest.mark.parametrize(("route", "body", "field"), REFUSED)
def test_other_fields_are_refused_by_name(route: str, body: Any, field: str, client: Any) -> None:
    answer = client.post(route, json={"model": "tiny", **body})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"].startswith(field), answer.text
    assert len(error["message"]) < 800 and field.rpartition(".")[2] in error["message"]


def test_what_the_template_names_is_no_misspelling() -> None:
    message = {"role": "assistant", "content": "a", "refusal": "No.", "audio": None}
    for template in ("{{ m.refusal }}", "{{ m['refusal'] }}", '{{ m.get("refusal") }}'):
        assert plain([message], template)[0]["refusal"] == "No."
    with pytest.raises(Refused, match="does not show refusal"):
        plain([message], "{% if m.kind == 'refusal' %}{{ m.refusals }}{% endif %}")
    with pytest.raises(Refused, match="does not show refusal"):
        plain([message], "{{ m.content }}")


def test_every_field_of_the_clients_is_in_a_row() -> None:
    """A client with a new field fails here until it has a row."""
    theirs = {
        "text": text_block_param.TextBlockParam, "tool_result": tool_result_block_param.ToolResultBlockParam,
        "thinking": thinking_block_param.ThinkingBlockParam, "tool_use": tool_use_block_param.ToolUseBlockParam,
    }  # fmt: skip
    for kind, params in theirs.items():
        assert set(get_type_hints(params)) - {*_BLOCKS[kind], *CACHED} <= {"toolset_name"}
    items = {
        "message": responses.ResponseOutputMessageParam, "reasoning": responses.ResponseReasoningItemParam,
        "function_call": responses.ResponseFunctionToolCallParam,
    }  # fmt: skip
    for kind, params in items.items():
        refused = {"encrypted_content", "async", "namespace"}
        assert set(get_type_hints(params)) - {"id", "type", "status", *_ITEMS[kind]} <= refused
    for kind, params in {
        "input_text": responses.ResponseInputTextParam,
        "output_text": responses.ResponseOutputTextParam,
    }.items():
        assert set(get_type_hints(params)) == {"type", "text", *_PARTS[kind]} - {"cache_control"}


def test_inputs_are_counted_as_they_are_read(client: Any) -> None:
    body = {"model": "tiny", "input": "Hi", "instructions": "Be brief.", "tools": [{"type": "function", **FUNCTION}]}
    counted = client.post(INPUT, json=body).json()
    assert counted["object"] == "response.input_tokens"
    answer = client.post(RESPONSES, json=body).json()
    assert counted["input_tokens"] == answer["usage"]["input_tokens"]
    body |= {"previous_response_id": answer["id"]}
    assert client.post(INPUT, json=body).json()["input_tokens"] > counted["input_tokens"]


def test_items_that_are_kept_can_be_named(client: Any) -> None:
    """As clients do in the next step of a loop over tools."""
    first = client.post(RESPONSES, json={"model": "tiny", "input": "Hi"}).json()
    question = {"role": "user", "content": "Hi"}
    whole = [question, *first["output"], question]
    named = [question, *({"type": "item_reference", "id": item["id"]} for item in first["output"]), question]
    counts = [
        client.post(INPUT, json={"model": "tiny", "input": items}).json()["input_tokens"] for items in (whole, named)
    ]
    assert first["output"] and counts[0] == counts[1]
    assert (
        client.post(RESPONSES, json={"model": "tiny", "input": named, "client_metadata": {"a": "b"}}).status_code == 200
    )
    assert client.delete(f"{RESPONSES}/{first['id']}").status_code == 200
    error = client.post(INPUT, json={"model": "tiny", "input": named}).json()["error"]
    assert error["param"] == "input.1.id" and "is not kept here" in error["message"]
