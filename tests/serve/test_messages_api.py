"""Anthropic's Messages, as its client reads them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.speaking import serve_speaking, speaking
from tests.support.chat_templates import QWEN3

anthropic = pytest.importorskip("anthropic")
QWEN = QWEN3.replace("#}", "").replace("{#", "")
CALL = '<tool_call>\n{"name": "get", "arguments": {"city": "Rome"}}\n</tool_call>'
SAID = f"<think>\nHm.\n</think>\n\nSo:\n{CALL}"
GET: Any = {
    "name": "get", "description": "Looks it up.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}  # fmt: skip
ASKED: Any = {"model": "tiny", "max_tokens": 300, "messages": [{"role": "user", "content": "?"}]}


def client_of(address: str, key: str = "none") -> Any:
    return anthropic.Anthropic(base_url=address, api_key=key, max_retries=0, timeout=60)


def create(client: Any, **more: Any) -> Any:
    return client.messages.create(**ASKED | {"extra_body": {"temperature": 0}} | more)


def test_a_message_and_its_stream(serve: Any) -> None:
    address, _ = serve_speaking(serve, SAID, "It rains.", template=QWEN)
    client = client_of(address)
    whole = create(client, tools=[GET])
    anthropic.types.Message.model_validate(whole.to_dict())
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    assert (whole.content[0].thinking, whole.content[1].text) == ("Hm.", "So:")
    assert (whole.content[2].name, whole.content[2].input) == ("get", {"city": "Rome"})
    assert whole.stop_reason == "tool_use" and whole.usage.output_tokens == len(SAID) + 1
    with client.messages.stream(**ASKED, tools=[GET], extra_body={"temperature": 0}) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and kinds.count("content_block_stop") == 3
    assert [_bare(block) for block in final.content] == [_bare(block) for block in whole.content]
    assert final.usage.output_tokens == whole.usage.output_tokens and final.stop_reason == "tool_use"
    # The message goes back with what the tool has answered.
    result = {"type": "tool_result", "tool_use_id": whole.content[2].id, "content": [{"type": "text", "text": "rain"}]}
    chat = [*ASKED["messages"], {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    after = create(client, tools=[GET], messages=chat)
    assert [block.text for block in after.content] == ["It rains."] and after.stop_reason == "end_turn"
    usage = after.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == 4
    assert client.messages.count_tokens(model="tiny", messages=chat, tools=[GET]).input_tokens == 4
    assert client.messages.count_tokens(model="tiny", messages=chat, system="Hi").input_tokens == 5


def _bare(block: Any) -> Any:
    return {name: one for name, one in block.to_dict().items() if name not in ("id", "parsed_output")}


def test_choices_and_limits(serve: Any) -> None:
    address, _ = serve_speaking(serve, SAID, template=QWEN)
    client = client_of(address)
    cut = create(client, max_tokens=10)
    assert cut.stop_reason == "max_tokens" and cut.content[0].type == "thinking"
    stopped = create(client, stop_sequences=["o:"], thinking={"type": "adaptive", "display": "omitted"})
    assert [block.text for block in stopped.content] == ["S"]
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "o:")
    spent = create(client, thinking={"type": "enabled", "budget_tokens": 3})
    assert spent.content[0].thinking == "Hm" and spent.usage.output_tokens_details.thinking_tokens == 1 + 3 + 10
    for choice in ({"type": "any"}, {"type": "tool", "name": "get"}):
        forced = create(client, tools=[GET], tool_choice={**choice, "disable_parallel_tool_use": True})
        assert [block.type for block in forced.content] == ["tool_use"] and forced.content[0].input.keys() == {"city"}
    assert not any(
        block.type == "tool_use" for block in create(client, tools=[GET], tool_choice={"type": "none"}).content
    )
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    formed = create(client, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert formed.content[0].text.startswith("{") and '"age"' in formed.content[0].text


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": 301}, "max_tokens must be at most 300 here"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages.0.role must be 'user' or 'assistant'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0: a block of type 'image'"),
        ({"container": "x"}, "container is not supported here"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0"),
        ({"output_config": {"effort": "low"}}, "does not know output_config.effort"),
        ({"stop_sequences": [""]}, "stop_sequences.0"),
        ({"thinking": {"type": "enabled", "budget_tokens": 399}}, "thinking.budget_tokens must leave room"),
    ],
)  # fmt: skip
def test_what_is_refused(refusing: Any, body: Any, words: str) -> None:
    answer = refusing.post("/v1/messages", json=ASKED | body)
    error = anthropic.types.ErrorResponse.model_validate(answer.json())
    assert answer.status_code == 400 and words in error.error.message and error.error.type == "invalid_request_error"


@pytest.fixture(scope="module")
def refusing() -> Any:
    from fastapi.testclient import TestClient

    from pdkernels.engine import Engine
    from pdkernels.serve import create_app

    engine = Engine(speaking("", template="tools"), max_new_tokens=300, max_prompt_tokens=399)
    with TestClient(create_app(engine, "tiny")) as client:
        yield client


def test_the_key_in_the_clients_own_header(serve: Any) -> None:
    model = speaking("Yes.", template="")
    address, _ = serve(model=model, engine={"max_new_tokens": 300, "max_prompt_tokens": 399}, api_key="geheim")
    assert create(client_of(address, "geheim")).content[0].text == "Yes."
    with pytest.raises(anthropic.AuthenticationError):
        create(client_of(address, "other"))


def test_the_tool_runner_goes_on_without_a_thread(serve: Any) -> None:
    """It asks the server to keep the conversation, and sends all of it where that is refused by this code."""
    address, _ = serve_speaking(serve, SAID, "It rains.", template=QWEN)
    client, cities = client_of(address), list[str]()

    @anthropic.beta_tool  # type: ignore[untyped-decorator]
    def get(city: str) -> str:
        """Looks it up."""
        cities.append(city)
        return "rain"

    for stream in (False, True):
        runner = client.beta.messages.tool_runner(**ASKED, tools=[get], stream=stream, extra_body={"temperature": 0})
        messages = [message.get_final_message() if stream else message for message in runner]
        assert [message.stop_reason for message in messages] == ["tool_use", "end_turn"]
        assert messages[-1].content[0].text == "It rains."
    assert cities == ["Rome", "Rome"]
    with pytest.raises(anthropic.BadRequestError, match="thread is not supported here"):
        create(client, extra_body={"thread": {"type": "create"}})
