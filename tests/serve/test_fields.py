"""Every field that clients' own types know, and every field of ours, by route: followed, taken or refused; none is ignored.

A field that is followed changes what comes; one that is taken says who asks or what for, and changes nothing; the rest is refused, and
the error names it. The names come from the types of the clients of OpenAI and Anthropic and from our own bodies, so a client with a new
field fails here until it has a row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import pytest

import pdkernels as pd

pytest.importorskip("fastapi")
pytest.importorskip("openai")
pytest.importorskip("anthropic")
from anthropic.types import message_count_tokens_params, message_create_params
from fastapi.testclient import TestClient
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import input_token_count_params, response_create_params

from pdkernels.serve import create_app
from pdkernels.serve.messages_api import CountRequest, MessagesRequest
from pdkernels.serve.responses import InputRequest, ResponseRequest
from pdkernels.serve.schema import ChatRequest, CompletionRequest
from pdkernels.serve.tokenizing import DetokenizeRequest, TokenizeRequest
from tests.serve.clients import Chatting

DOCS = Path(__file__).resolve().parents[2] / "docs/server.md"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
    "{% if reasoning_effort %}#{{ reasoning_effort }}{% endif %}{% if add_generation_prompt %}<assistant>{% if enable_thinking %}<think>{% endif %}{% endif %}"
)
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
COUNT, TOKENIZE, DETOKENIZE = "/v1/messages/count_tokens", "/v1/tokenize", "/v1/detokenize"
INPUT = "/v1/responses/input_tokens"
PROMPT = "import os\nimport sys\n" * 4
ASKED = [{"role": "user", "content": PROMPT}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": ASKED, "max_tokens": 8, "temperature": 0},
    TEXT: {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0},
    RESPONSES: {"model": "tiny", "input": PROMPT, "max_output_tokens": 8, "temperature": 0},
    MESSAGES: {"model": "tiny", "messages": ASKED, "max_tokens": 8, "temperature": 0},
    COUNT: {"model": "tiny", "messages": ASKED},
    INPUT: {"model": "tiny", "input": PROMPT},
    TOKENIZE: {"model": "tiny", "messages": ASKED},
    DETOKENIZE: {"model": "tiny", "tokens": [97, 98]},
}
OURS: dict[str, Any] = {
    CHAT: ChatRequest, TEXT: CompletionRequest, RESPONSES: ResponseRequest, MESSAGES: MessagesRequest, COUNT: CountRequest,
    INPUT: InputRequest, TOKENIZE: TokenizeRequest, DETOKENIZE: DetokenizeRequest,
}  # fmt: skip
THEIRS: dict[str, list[Any]] = {
    CHAT: [chat_create_params.CompletionCreateParamsNonStreaming, chat_create_params.CompletionCreateParamsStreaming],
    TEXT: [
        completion_create_params.CompletionCreateParamsNonStreaming,
        completion_create_params.CompletionCreateParamsStreaming,
    ],
    RESPONSES: [
        response_create_params.ResponseCreateParamsNonStreaming,
        response_create_params.ResponseCreateParamsStreaming,
    ],
    MESSAGES: [
        message_create_params.MessageCreateParamsNonStreaming,
        message_create_params.MessageCreateParamsStreaming,
    ],
    COUNT: [message_count_tokens_params.MessageCountTokensParams],
    INPUT: [input_token_count_params.InputTokenCountParams],
    TOKENIZE: [],
    DETOKENIZE: [],
}


class Row(NamedTuple):
    """What a field does."""

    kind: str
    """"followed", "taken" or "refused"."""
    value: Any
    beside: dict[str, Any] = {}
    """Fields without which it says nothing."""
    refused: Any = None
    """Another value that is refused."""


def followed(value: Any, refused: Any = None, **beside: Any) -> Row:
    return Row("followed", value, beside, refused)


def taken(value: Any, refused: Any = None, **beside: Any) -> Row:
    return Row("taken", value, beside, refused)


def refused(value: Any, **beside: Any) -> Row:
    return Row("refused", value, beside)


DRAWN: dict[str, Any] = {"temperature": 2.0, "seed": 3}
LONG: dict[str, Any] = {"max_tokens": 24}
FUNCTION = {"name": "get", "parameters": {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}}
TOOL = {"type": "function", "function": FUNCTION}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
THINKS = {"chat_template_kwargs": {"enable_thinking": True}}
SAMPLING = {
    "adapter": refused("none"),  # no adapter has this name
    "temperature": followed(2.0, seed=3),
    "top_k": followed(1, **DRAWN), "top_p": followed(0.01, **DRAWN), "min_p": followed(1.0, **DRAWN), "typical_p": followed(0.01, **DRAWN),
    "seed": followed(4, **DRAWN),
    "repetition_penalty": followed(8.0), "presence_penalty": followed(2.0, max_tokens=24), "frequency_penalty": followed(2.0, max_tokens=24),
    "logit_bias": followed({"65": 100}), "bad_words_ids": followed([[32]]), "min_tokens": followed(8, stop_token_ids=list(range(97, 123))),
    "forced_tokens": followed({"2": 65}), "suppress_tokens": followed([32]), "begin_suppress_tokens": followed(list(range(10, 127))),
    "stop_token_ids": followed(list(range(256))), "max_time": followed(0.0, max_tokens=64),
}  # fmt: skip
OF_CHOICES = {"stop_sequences": followed([[one] for one in range(256)]), "n": followed(2), "logprobs": followed(1)}
COMMON = {
    "model": refused("another"), "stream": followed(True), "user": taken("me"), "safety_identifier": taken("me"),
    "prompt_cache_key": taken("key"), "prompt_cache_retention": taken("24h", refused="1h"), "service_tier": taken("auto", refused="flex"), "method": followed("jacobi", max_tokens=40),
    "options": followed({"draft": "lookup", "block_size": 8}, method="jacobi", max_tokens=40), "timeout": followed(1e-6, max_tokens=64),
    "ignore_eos": taken(True),  # this model has no end tokens
    "truncate_prompt_tokens": followed(4), "priority": taken(0, refused=1),
}  # fmt: skip
ENDS = {
    "stream_options": followed({"include_usage": True}, refused={"include_obfuscation": True}, stream=True),
    "metadata": taken({"a": "b"}), "store": taken(False, refused=True), "regex": followed("[0-9]{3}"), "choice": followed(["yes", "no"]),
    "provisional": refused(True, stream=True),  # of methods that fill positions in any order
    "stop": followed([chr(one) for one in range(100, 116)], max_tokens=24),
}  # fmt: skip
TOOLS: dict[str, Row] = {
    "tools": followed([TOOL]), "tool_choice": followed("required", tools=[TOOL], max_tokens=60),
    "parallel_tool_calls": taken(False, tools=[TOOL]),
}  # fmt: skip
FLAT: dict[str, Any] = {"type": "function", **FUNCTION}
FLAT_TOOLS = {name: row._replace(beside={**row.beside, "tools": [FLAT]}) for name, row in TOOLS.items()} | {
    "tools": followed([FLAT]),
    "parallel_tool_calls": followed(False),
}
THOUGHTS = {
    "chat_template_kwargs": followed({"enable_thinking": True}),
    "thinking_token_budget": followed(2, **THINKS, max_tokens=40),
}
TABLE: dict[str, dict[str, Row]] = {
    CHAT: {
        **SAMPLING, **OF_CHOICES, **COMMON, **ENDS, **TOOLS, **THOUGHTS, "logprobs": followed(True), "top_logprobs": followed(2, logprobs=True),
        "messages": followed([{"role": "user", "content": "x"}]), "max_tokens": followed(4), "max_completion_tokens": followed(4, max_tokens=None),
        "calls_in_thoughts": followed(True, **THINKS, tools=[TOOL], max_tokens=24), "modalities": taken(["text"], refused=["audio"]),
        "response_format": followed(FORM), "reasoning_effort": followed("low"),
        "separate_reasoning": followed(False, **THINKS), "include_reasoning": followed(False, chat_template_kwargs={"enable_thinking": True}, messages=[{"role": "user", "content": "x"}], max_tokens=32),
        "audio": refused({"voice": "alloy", "format": "wav"}), "function_call": refused("auto"), "functions": refused([FUNCTION]),
        "moderation": refused({"model": "m"}), "prediction": refused({"type": "content", "content": "x"}),
        "prompt_cache_options": refused({"mode": "implicit"}), "verbosity": taken("medium", refused="low"), "web_search_options": refused({}),
    },
    TEXT: {
        **SAMPLING, **OF_CHOICES, **COMMON, **ENDS, "prompt": followed("x"), "max_tokens": followed(4), "suffix": refused("x"),
        "echo": followed(True), "best_of": taken(1, refused=2),
    },
    RESPONSES: {
        **SAMPLING, **COMMON, **FLAT_TOOLS, **THOUGHTS, "user": followed("me"), "input": followed("x"), "instructions": followed("Be kind."),
        "previous_response_id": refused("resp_1"), "store": followed(False), "background": taken(False, refused=True),
        "stop": ENDS["stop"], "max_output_tokens": followed(4), "text": followed({"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}),
        "reasoning": followed({"effort": "low"}), "metadata": followed({"a": "b"}), "truncation": taken("disabled", refused="auto"),
        "client_metadata": taken({"x-codex-installation-id": "a"}),
        "include": taken(["reasoning.encrypted_content"], refused=["message.output_text.logprobs"]),
        "access_programs": refused({}), "background_options": refused({}), "context_management": refused([{"type": "compaction"}]),
        "conversation": refused("conv_1"), "image": refused({}), "max_tool_calls": refused(1), "moderation": refused({"model": "m"}),
        "prompt": refused({"id": "p"}), "prompt_cache_options": refused({"mode": "implicit"}),
        "stream_options": taken({"include_obfuscation": False}, refused={"include_obfuscation": True}, stream=True), "top_logprobs": refused(2),
    },
    MESSAGES: {},
    COUNT: {},
    INPUT: {
        "model": refused("another"), "input": followed("x"), "instructions": followed("Be kind."), "previous_response_id": refused("resp_1"),
        "tools": followed([FLAT]), "tool_choice": followed("none", tools=[FLAT]), "parallel_tool_calls": taken(False),
        "text": taken({"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}, refused={"format": {"type": "text", "name": "s"}}),
        "reasoning": followed({"effort": "low"}), "truncation": taken("disabled", refused="auto"), "chat_template_kwargs": followed({"enable_thinking": True}),
        "conversation": refused("conv_1"), "personality": refused("friendly"),
    },
    TOKENIZE: {
        "model": refused("another"), "prompt": followed("x", messages=None), "messages": followed([{"role": "user", "content": "x"}]),
        "add_special_tokens": refused(True), "return_token_strs": followed(True), "add_generation_prompt": followed(False),
        "continue_final_message": followed(True, messages=[{"role": "assistant", "content": "x"}]), "tools": followed([TOOL]),
        "chat_template_kwargs": followed({"enable_thinking": True}),
    },
    DETOKENIZE: {"model": refused("another"), "tokens": followed([99])},
}  # fmt: skip
CLAUDE_TOOL = {"name": "get", "input_schema": FUNCTION["parameters"]}
TABLE[COUNT] = {
    "model": refused("another"), "messages": followed([{"role": "user", "content": "x"}]), "system": followed("Be kind."),
    "tools": followed([CLAUDE_TOOL]), "tool_choice": followed({"type": "none"}, tools=[CLAUDE_TOOL]), "thinking": followed({"type": "adaptive"}),
    "context_management": taken({"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, refused={"edits": [{"type": "clear_tool_uses_20250919"}]}),
    "output_config": followed({"effort": "low"}), "cache_control": taken({"type": "ephemeral"}),
    "chat_template_kwargs": followed({"enable_thinking": True}), "speed": refused("fast"), "user_profile_id": refused("u"),
    "workspace_id": refused("w"),
}  # fmt: skip
TABLE[MESSAGES] = {
    **SAMPLING, **COMMON, **TABLE[COUNT], "max_tokens": followed(4), "stop_sequences": ENDS["stop"], "metadata": taken({"user_id": "me"}),
    "tool_choice": followed({"type": "any"}, tools=[CLAUDE_TOOL], max_tokens=60), "service_tier": taken("auto", refused="priority"),
    "container": refused("c"), "thread": refused({"type": "create"}), "diagnostics": refused({}), "inference_geo": refused("us"),
}  # fmt: skip
ROWS = [
    pytest.param(route, field, row, id=f"{route.removeprefix('/v1/')}-{field}")
    for route, rows in TABLE.items()
    for field, row in rows.items()
]


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    model = pd.models.load("tiny-code")
    model.tokenizer = Chatting(model.tokenizer, TEMPLATE)
    engine = pd.Engine(model, max_new_tokens=64, kept_prompt_tokens=0)  # nothing depends on what came before
    with TestClient(create_app(engine, "tiny"), raise_server_exceptions=False) as made:
        yield made


def beside(route: str, row: Row) -> dict[str, Any]:
    """The body without the field, in the words of the route."""
    names = {"max_tokens": "max_output_tokens"} if route == RESPONSES else {}
    return {**BODIES[route], **{names.get(name, name): value for name, value in row.beside.items()}}


def asked(client: Any, route: str, body: dict[str, Any]) -> tuple[Any, str]:
    """An answer, and what can be seen of it: its text, without names and times that are new in each, and the forwards that it took."""
    metrics = client.app.state.engine.metrics
    before = metrics().forwards
    answer = client.post(route, json=body)
    text = re.sub(
        r'"(id|item_id|call_id|response_id)": ?"[^"]*"|"(created|created_at|completed_at)": ?\d+', "", answer.text
    )
    return answer, f"{re.sub('(resp|msg|rs|fc|call|toolu)_[0-9a-f]+', '', text)} {metrics().forwards - before}"


@pytest.mark.parametrize(("route", "field", "row"), ROWS)
def test_a_field_does_what_its_row_says(client: Any, route: str, field: str, row: Row) -> None:
    body = beside(route, row)
    without, seen_without = asked(client, route, body)
    given, seen_given = asked(client, route, {**body, field: row.value})
    if row.kind == "refused":
        assert given.status_code in (400, 404), given.text
        error = given.json()["error"]
        assert field in f"{error['message']} {error['param']}"
        return
    assert given.status_code in (200, 408), given.text
    if row.kind == "followed":
        assert without.status_code != 200 or seen_without != seen_given
    else:
        assert without.status_code == 200
        assert seen_without == seen_given
    if row.refused is not None:
        other = client.post(route, json={**body, field: row.refused})
        assert other.status_code == 400 and field in other.json()["error"]["message"], other.text


@pytest.mark.parametrize("route", TABLE)
def test_every_field_has_a_row(route: str) -> None:
    official = {name for each in THEIRS[route] for name in get_type_hints(each)}
    assert TABLE[route].keys() == official | OURS[route].model_fields.keys()


@pytest.mark.parametrize("route", [CHAT, TEXT, RESPONSES, MESSAGES])
def test_fields_that_are_taken_are_in_the_docs(route: str) -> None:
    text = DOCS.read_text()
    section = text.partition("### Fields by route")[2].partition("\n### Tools")[0]
    missing = [field for field, row in TABLE[route].items() if row.kind != "refused" and f"`{field}" not in section]
    assert not missing, json.dumps(missing)
