"""OpenAI's Responses, as its client reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serve.clients import client_of
from tests.serve.speaking import serve_speaking
from tests.support.chat_templates import QWEN3

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")
QWEN = QWEN3.replace("#}", "").replace("{#", "")
CALL = '<tool_call>\n{"name": "get", "arguments": {"city": "Rome"}}\n</tool_call>'
SAID = f"<think>\nHm.\n</think>\n\nSo:\n{CALL}\n{CALL}"
GET: Any = {
    "type": "function", "name": "get", "strict": False, "description": "Looks it up.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}  # fmt: skip
ORDER = [
    "created", "in_progress",
    "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done",
    "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done", "output_item.done",
    "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
    "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
    "completed",
]  # fmt: skip


def checked(response: Any) -> Any:
    """The response, if it has the fields of the client's type with values of their types."""
    types = openai.types.responses
    given = response.to_dict() if hasattr(response, "to_dict") else response
    return types.Response.model_validate(given, strict=False)


def test_a_response_and_its_stream(serve: Any) -> None:
    address, _ = serve_speaking(serve, SAID, template=QWEN)
    client = client_of(address)
    asked: Any = {"model": "tiny", "input": "?", "tools": [GET], "temperature": 0}
    assert client.responses.create(**asked, instructions="Be brief.").usage.input_tokens == 3
    whole = checked(client.responses.create(**asked, metadata={"a": "b"}))
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert whole.output[0].content[0].text == "Hm." and whole.output_text == "So:"
    assert [json.loads(item.arguments) for item in whole.output[2:]] == [{"city": "Rome"}] * 2
    assert whole.status == "completed" and whole.metadata == {"a": "b"} and whole.tools[0].name == "get"
    assert whole.usage.output_tokens == len(SAID) + 1 and whole.usage.output_tokens_details.reasoning_tokens > 5
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert [kind for at, kind in enumerate(kinds) if not at or kind != kinds[at - 1]] == ORDER
    checked(events[0].response)
    final = checked(events[-1].response)
    assert [_bare(item) for item in final.output] == [_bare(item) for item in whole.output]
    for event in events:
        if hasattr(event, "item_id"):
            assert event.item_id == final.output[event.output_index].id
    with client.responses.stream(**asked) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(texts) == "So:" and stream.get_final_response().output_text == "So:"


def _bare(item: Any) -> Any:
    return {name: one for name, one in item.to_dict().items() if name not in ("id", "call_id")}


class Person(pydantic.BaseModel):  # type: ignore[name-defined,misc]
    age: int


def test_forms_and_limits(serve: Any) -> None:
    address, _ = serve_speaking(serve, "Well, I think so.")
    client = client_of(address)
    asked: Any = {"model": "tiny", "input": [{"role": "user", "content": [{"type": "input_text", "text": "?"}]}]}
    parsed = client.responses.parse(**asked, text_format=Person, temperature=1, extra_body={"seed": 3})
    assert isinstance(parsed.output_parsed, Person)
    with client.responses.stream(**asked, text_format=Person, temperature=1, extra_body={"seed": 3}) as stream:
        assert stream.get_final_response().output_parsed == parsed.output_parsed
    anything = client.responses.create(**asked, text={"format": {"type": "json_object"}}, temperature=1)
    assert isinstance(json.loads(anything.output_text), dict)
    cut = checked(client.responses.create(**asked, max_output_tokens=4, temperature=0))
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert cut.output_text == "Well" and cut.output[0].status == "incomplete"
    events = list(client.responses.create(**asked, max_output_tokens=4, temperature=0, stream=True))
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == "Well"
    stopped = client.responses.create(**asked, temperature=0, extra_body={"stop": [" think"]})
    assert stopped.output_text == "Well, I" and stopped.status == "completed"
    chosen = client.responses.create(**asked, tools=[GET], tool_choice={"type": "function", "name": "get"})
    assert chosen.output[0].name == "get" and json.loads(chosen.output[0].arguments).keys() == {"city"}


def test_responses_that_follow_each_other(serve: Any) -> None:
    """The chat that is kept has the answers, with their thoughts and calls."""
    said = "<think>\nHm.\n</think>\n\nYes."
    address, engine = serve_speaking(serve, said, f"So: {CALL}", "", "Rain.", template=QWEN)
    client = client_of(address)
    asked: Any = {"model": "tiny", "temperature": 0, "tools": [GET]}
    first = client.responses.create(**asked, input="?")
    second = client.responses.create(**asked, input="?", previous_response_id=first.id)
    assert (first.output_text, second.output_text) == ("Yes.", "So:")
    call = second.output[-1]
    answer = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    more = [
        answer,
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "?"},
    ]
    third = client.responses.create(**asked, input=more, previous_response_id=second.id)
    # The client may keep the chat itself, and send back what it was given.
    own = [{"role": "user", "content": "?"}, *first.output, {"role": "user", "content": "?"}, *second.output, *more]
    same = client.responses.create(**asked, input=own, store=False)
    assert third.usage.input_tokens == same.usage.input_tokens == 9
    assert third.previous_response_id == second.id
    again = client.responses.retrieve(second.id)
    assert again.to_dict() == second.to_dict()
    client.responses.delete(second.id)
    for missing in (second.id, same.id):
        with pytest.raises(openai.NotFoundError, match="not kept here"):
            client.responses.retrieve(missing)
    with pytest.raises(openai.BadRequestError, match="not kept here") as wrong:
        client.responses.create(**asked, input="?", previous_response_id=second.id)
    assert wrong.value.code == "previous_response_not_found"
    assert "error" not in engine.metrics().finished


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": 3}, "max_tokens is not supported here"),
        ({"n": 2}, "n is not supported here"),
        ({"truncation": "auto"}, "truncation: Input should be 'disabled'"),
        ({"background": True}, "background: Input should be false"),
        ({"conversation": "c"}, "conversation is not supported here"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"include": ["message.output_text.logprobs"]}, "include.0"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0: the item 'x' is not kept here"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content: a part of type 'input_image'"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": "?"}] * 400}, "the prompt has 401 tokens"),
        ({"max_output_tokens": 301}, "max_output_tokens must be at most 300 here, got 301"),
        ({"reasoning": {"effort": "low"}}, "does not know reasoning.effort"),
        ({"tools": [{**GET, "name": "a b"}]}, "tools.0.name"),
    ],
)  # fmt: skip
def test_what_is_refused(refusing: Any, body: Any, words: str) -> None:
    answer = refusing.post("/v1/responses", json={"model": "tiny", "input": "?"} | body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.json()


@pytest.fixture(scope="module")
def refusing() -> Any:
    from fastapi.testclient import TestClient

    from pdkernels.engine import Engine
    from pdkernels.serve import create_app
    from tests.serve.speaking import speaking

    engine = Engine(speaking("", template="tools"), max_new_tokens=300, max_prompt_tokens=399)
    with TestClient(create_app(engine, "tiny")) as client:
        yield client


def test_the_store_is_bounded() -> None:
    from pdkernels.serve.errors import Refused
    from pdkernels.serve.responses import ResponseStore, Stored

    store = ResponseStore(most=2, nbytes=200)
    for number in range(3):
        store.keep(Stored.of({"id": str(number)}, [{"role": "user", "content": "x"}]))
    assert store.response("2") and store.messages("1")[0]["content"] == "x" and store.messages(None) == []
    for gone in ("0", "none"):
        with pytest.raises(Refused, match="not kept"):
            store.response(gone)
    store.keep(Stored.of({"id": "long"}, [{"role": "user", "content": "x" * 120}]))
    assert store.response("long")
    with pytest.raises(Refused, match="not kept"):
        store.response("2")
    store.keep(Stored.of({"id": "longer"}, [{"role": "user", "content": "x" * 300}]))  # than all may be
    assert store.response("long")
    with pytest.raises(Refused, match="not kept"):
        store.response("longer")
