"""What clients do that few do: gone before a stream begins, halves of characters and of calls, numbers that are none, wrong types."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient

import pdkernels as pd
from pdkernels.models import ByteTokenizer, from_callable
from pdkernels.serve import create_app
from pdkernels.serve.blocks import block_steps
from pdkernels.serve.choices import Choice
from pdkernels.serve.parser import AnswerParser
from pdkernels.serve.tagged import GLM, QWEN_CODER, json_of, kinds_of
from pdkernels.serve.thoughts import THINK
from tests.serve.clients import Chatting, client_of
from tests.serve.speaking import serve_speaking, speaking
from tests.support.chat_templates import QWEN3

httpx = pytest.importorskip("httpx")
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
ASKED = [{"role": "user", "content": "Hi"}]
THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '<think>' }}"
FUNCTION = {"name": "get", "parameters": {"type": "object"}}


def chatting(template: str = THINKS, **engine: Any) -> Any:
    model = pd.models.load("tiny-code")
    model.tokenizer = Chatting(model.tokenizer, template)
    return pd.Engine(model, **({"max_new_tokens": 300} | engine))


@pytest.fixture(scope="module")
def client() -> Any:
    with TestClient(create_app(chatting(), "tiny"), raise_server_exceptions=False) as made:
        yield made


def sent(client: Any, route: str, body: str) -> Any:
    """The answer to a body as it is."""
    return client.post(route, content=body, headers={"Content-Type": "application/json"})


def test_tokens_of_several_prompts_are_counted_once_each(client: Any) -> None:
    prompts = ["import os\n", "def f(x):\n    return x + 1\n\n\n"]
    for many in (1, 3):
        body = {"model": "tiny", "prompt": prompts, "n": many, "max_tokens": 2}
        answer = client.post(TEXT, json=body).json()
        assert len(answer["choices"]) == 2 * many
        assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_stop_string_in_the_tag_that_a_budget_writes_ends_nothing(serve: Any, stream: bool) -> None:
    """It is searched for in what the model writes: before the tag, and from the answer's beginning on."""
    said = f"<think>{'w' * 5}{'.' * len('</think>') + '..'}The answer END and more"
    address, _ = serve_speaking(serve, said, template="<think>")
    asked: dict[str, Any] = {
        "model": "tiny", "messages": ASKED, "temperature": 0, "stop": [">\n\n", "</", "END"], "stream": stream,
        "extra_body": {"thinking_token_budget": 5},
    }  # fmt: skip
    found = client_of(address).chat.completions.create(**asked)
    if stream:
        chunks = [chunk.choices[0] for chunk in found]
        text, reason = "".join(chunk.delta.content or "" for chunk in chunks), chunks[-1].finish_reason
    else:
        text, reason = found.choices[0].message.content, found.choices[0].finish_reason
    assert (text, reason) == ("The answer ", "stop")


def test_a_stop_string_over_the_end_of_a_budget_ends_the_answer(serve: Any) -> None:
    """The thought has ended before, and nothing is written between the two parts."""
    address, _ = serve_speaking(serve, "<think>a</think>one END of it" + "x" * 200, template="<think>")
    for budget in range(12, 22):
        body: dict[str, Any] = {"thinking_token_budget": budget}
        answer = client_of(address).chat.completions.create(
            model="tiny", messages=ASKED, temperature=0, stop=["END"], max_tokens=150, extra_body=body
        )
        choice = answer.choices[0]
        assert (choice.message.content, choice.finish_reason) == ("one ", "stop"), budget
        assert answer.usage.completion_tokens < 100


def test_the_rest_after_a_budget_waits_where_a_new_request_is_refused() -> None:
    """The request was let in once, and others that came meanwhile do not cost it its answer."""
    engine = chatting(max_running=1, max_waiting=1)
    with TestClient(create_app(engine, "tiny"), raise_server_exceptions=False) as made:
        submit, refused = engine.submit, list[None]()

        def full(*arguments: Any, **options: Any) -> Any:
            prompt = arguments[0]
            if len(prompt) > len("class Node:<think>") and len(refused) < 3:
                refused.append(None)
                raise pd.engine.EngineFull("many wait")
            return submit(*arguments, **options)

        engine.submit = full
        chat = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "class Node:"}],
            "max_tokens": 30,
            "thinking_token_budget": 4,
        }
        answer = made.post(CHAT, json=chat)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 30 and len(refused) == 3


def test_a_block_before_the_last_is_whole_however_late_it_is_read() -> None:
    """The engine may have ended before a thought is read, whose item is complete."""
    said = "<think>Well.</think>It goes on and on"
    model = speaking(said, template="")
    with pd.Engine(model, max_new_tokens=60, max_prompt_tokens=100) as engine:
        handle = engine.submit(".!", max_new_tokens=len(said) - 4)
        handle.result()
        choice = Choice(handle, model.tokenizer, (), parser=AnswerParser(None, thoughts=(THINK,)))

        async def ends() -> list[tuple[str, bool]]:
            return [(block.kind, block.last) async for step, block, _ in block_steps(choice) if step == "end"]

        assert asyncio.run(ends()) == [("thought", False), ("text", True)] and choice.reason == "length"


@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        (RESPONSES, {"input": "Hi", "max_output_tokens": 1 << 40}, "max_output_tokens"),
        (RESPONSES, {"input": "Hi", "tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
        (RESPONSES, {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        (RESPONSES, {"input": "Hi", "text": {"format": {"type": "text", "schema": {}}}}, "text.format"),
        (RESPONSES, {"input": [{"content": "x"}], "instructions": "y"}, "input.0.role"),
        (RESPONSES, {"input": [{"role": 5, "content": "x"}]}, "input.0.role"),
        (RESPONSES, {"input": [{"type": "function_call", "call_id": "a", "arguments": "{}"}]}, "input.0.name"),
        (RESPONSES, {"input": [{"type": "function_call", "call_id": "a", "name": "b", "arguments": {}}]}, "input.0.arguments"),
        (RESPONSES, {"input": [{"type": "function_call_output", "call_id": 5, "output": "x"}]}, "input.0.call_id"),
        (MESSAGES, {"max_tokens": 1 << 40}, "max_tokens"),
        (MESSAGES, {"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name"),
        (MESSAGES, {"tool_choice": {"type": "auto", "name": "get"}, "tools": [{"name": "get", "input_schema": {}}]}, "tool_choice"),
        (MESSAGES, {"tool_choice": {"type": "tool"}, "tools": [{"name": "get", "input_schema": {}}]}, "tool_choice"),
        (MESSAGES, {"thinking": {"type": "disabled", "budget_tokens": 1024}}, "thinking"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": 0}]}]}, "messages.0.content.0.content"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}, "messages.0.content.0.tool_use_id"),
        (MESSAGES, {"messages": [*ASKED, {"role": "assistant", "content": [{"type": "thinking", "thinking": ["x"]}]}]}, "messages.1.content.0.thinking"),
        (MESSAGES, {"system": "y", "messages": [*ASKED, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": []}]}]}, "messages.1.content.0.input"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"response_format": {"type": "text", "json_schema": {"name": "a", "schema": {}}}}, "response_format"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_by_its_field(
    client: Any, route: str, body: dict[str, Any], field: str
) -> None:
    whole = {"model": "tiny", **({} if route == RESPONSES else {"messages": ASKED, "max_tokens": 4}), **body}
    answer = client.post(route, json=whole)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == field, error


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1E+9999"])
@pytest.mark.parametrize("stream", ["false", "true"])
def test_numbers_that_json_does_not_have_are_refused(client: Any, number: str, stream: str) -> None:
    """Wherever they stand, such as in a schema that an answer shows again."""
    tool = f'{{"type": "function", "name": "get", "parameters": {{"maximum": {number}}}}}'
    body = f'{{"model": "tiny", "input": "Hi", "max_output_tokens": 2, "stream": {stream}, "tool_choice": "none", "tools": [{tool}]}}'
    answer = sent(client, RESPONSES, body)
    assert answer.status_code == 400 and number in answer.json()["error"]["message"], answer.text
    words = sent(
        client, TEXT, f'{{"model": "tiny", "prompt": "{number} 1e999", "max_tokens": 1, "temperature": 1e-999}}'
    )
    assert words.status_code == 200, words.text


@pytest.mark.parametrize(
    ("route", "body", "status"),
    [
        (TEXT, '{"model": "tiny", "prompt": "a", "\\ud800": 1}', 400),
        (TEXT, '{"model": "tiny", "prompt": "a", "logit_bias": {"\\ud800": 1}}', 400),
        (CHAT, '{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}', 400),
        (RESPONSES, '{"model": "tiny", "input": "a", "max_output_tokens": 2, "tool_choice": "none", "tools": [{"type": "function", "name": "get", "parameters": {"title": "\\ud800"}}]}', 200),
    ],
)  # fmt: skip
def test_half_of_a_character_in_a_body(client: Any, route: str, body: str, status: int) -> None:
    answer = sent(client, route, body)
    assert answer.status_code == status, answer.text
    if status == 200:
        shown = client.get(f"{RESPONSES}/{answer.json()['id']}")
        assert shown.status_code == 200 and shown.json()["tools"][0]["parameters"]["title"] == "\ud800"


def test_a_response_that_is_kept_does_not_come_as_a_stream(client: Any) -> None:
    """A client that asks for one would read no event and no error."""
    made = client.post(RESPONSES, json={"model": "tiny", "input": "Hi", "max_output_tokens": 2}).json()
    path = f"{RESPONSES}/{made['id']}"
    assert (
        client.get(path).json()
        == client.get(f"{path}?stream=false&include[]=reasoning.encrypted_content").json()
        == made
    )
    for name, value in (("stream", "true"), ("starting_after", "3"), ("include[]", "message.output_text.logprobs")):
        answer = client.get(path, params={name: value})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name


def test_log_probabilities_of_what_is_impossible_are_json() -> None:
    """A model may give some tokens no chance at all; OpenAI writes -9999."""
    table = torch.full((300, 257), -torch.inf)
    table[:, ord("a")], table[:, ord("b")] = 1.0, 0.0
    model = from_callable(
        lambda tokens: table[: tokens.shape[1]].expand(len(tokens), -1, -1),
        vocab_size=257, end_tokens=[256], tokenizer=Chatting(ByteTokenizer(), "{{ messages[0].content }}"), max_positions=300,
    )  # fmt: skip
    engine = pd.Engine(model, max_new_tokens=20, max_prompt_tokens=100)
    with TestClient(create_app(engine, "tiny"), raise_server_exceptions=False) as made:
        body: dict[str, Any] = {
            "model": "tiny",
            "messages": ASKED,
            "max_tokens": 2,
            "logprobs": True,
            "top_logprobs": 3,
        }
        answer = made.post(CHAT, json=body | {"temperature": 0})
        assert answer.status_code == 200, answer.text
        tops = answer.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        assert [round(top["logprob"], 3) for top in tops] == [-0.313, -1.313, -9999.0]
        stream = made.post(CHAT, json=body | {"temperature": 0, "stream": True})
        assert "Infinity" not in stream.text and "-9999" in stream.text


@pytest.mark.parametrize(
    ("said", "stop", "text", "offsets"),
    [
        (b"a\xffb\xe2\x82END and more", "END", "a\ufffdb\ufffd", [0, 1, 2, 3, 3]),
        (b"a\xffb\xe2\x82END", None, "a\ufffdb\ufffdEND", [0, 1, 2, 3, 3, 4, 5, 6]),
        (b"\xf0\x9f\x98aEND", "END", "\ufffda", [0, 0, 0, 1]),
        ("a\u20acb".encode(), None, "a\u20acb", [0, 1, 1, 1, 2]),
        (b"a\xe2\x82", None, "a\ufffd", [0, 1, 1]),
    ],
)
def test_log_probabilities_beside_bytes_that_are_no_character(
    said: bytes, stop: Any, text: str, offsets: list[int]
) -> None:
    """They are of the text's tokens, without a stop string and an end token, and at their places."""
    table = 9 * torch.nn.functional.one_hot(torch.tensor([*said, *[256] * 100]), 257).float()
    model = from_callable(
        lambda tokens: table[: tokens.shape[1]].expand(len(tokens), -1, -1),
        vocab_size=257, end_tokens=[256], tokenizer=ByteTokenizer(), max_positions=100,
    )  # fmt: skip
    engine = pd.Engine(model, max_new_tokens=40, max_prompt_tokens=20)
    with TestClient(create_app(engine, "tiny"), raise_server_exceptions=False) as made:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 40, "temperature": 0, "logprobs": 1, "stop": stop}
        choice = made.post(TEXT, json=body).json()["choices"][0]
    assert choice["text"] == text and choice["logprobs"]["text_offset"] == offsets
    assert len(choice["logprobs"]["tokens"]) == len(offsets)


@pytest.mark.parametrize("kind", [None, "number", "string"])
@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_arguments_between_tags_are_json(kind: str | None, word: str) -> None:
    written = json_of(word, frozenset({kind} if kind else ()))
    assert json.loads(written) == word


@pytest.mark.parametrize("form", [QWEN_CODER, GLM], ids=["qwen-coder", "glm"])
@pytest.mark.parametrize("kind", [5, [["a"]], {"a": 1}, [None, "string"], True])
def test_a_schema_of_no_kind_costs_no_call(form: Any, kind: Any) -> None:
    schema = {"properties": {"a": {"type": kind}}}
    assert kinds_of(schema["properties"]["a"], schema) <= {"string"}
    call = (
        "<tool_call>\n<function=get>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
        if form is QWEN_CODER
        else "<tool_call>get\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
    )
    parser = AnswerParser(form, {"get": schema})
    news = [*parser.feed(call), *parser.flush()]
    assert json.loads("".join(new.arguments for new in news if not isinstance(new, str)))["a"] in (1, "1")


def test_properties_that_are_no_object_are_refused_by_their_tool() -> None:
    model = speaking("", template="tools <tool_call><function=")
    engine = pd.Engine(model, max_new_tokens=20, max_prompt_tokens=100)
    tool = {"type": "function", "function": {**FUNCTION, "parameters": {"type": "object", "properties": [1]}}}
    with TestClient(create_app(engine, "tiny"), raise_server_exceptions=False) as made:
        answer = made.post(CHAT, json={"model": "tiny", "messages": ASKED, "tools": [tool], "tool_choice": "required"})
        assert answer.status_code == 400 and "tool 'get'" in answer.json()["error"]["message"], answer.text


def test_what_may_still_change_does_not_pile_up_for_a_slow_reader() -> None:
    """A reader gets the latest of it."""
    model = pd.models.load("tiny-trimode")
    model.tokenizer = Chatting(model.tokenizer, QWEN3)
    engine, counts = pd.Engine(model, max_new_tokens=64), list[int]()
    with TestClient(create_app(engine, "tiny"), raise_server_exceptions=False) as made:
        service = next(
            cell.cell_contents
            for route in made.app.routes
            for cell in (getattr(route, "endpoint", None).__closure__ or ())
            if type(cell.cell_contents).__name__ == "Service"
        )
        from pdkernels.serve.schema import CompletionRequest

        async def read(slowly: bool) -> int:
            body = CompletionRequest(
                model="tiny", prompt="482 + 967 = ?", method="block_diffusion", max_tokens=64, stream=True, provisional=True, ignore_eos=True,
            )  # fmt: skip
            draft = service.front.completion(body)
            answer = service.front.submit(body, draft, None)
            events = answer.events(False)
            await anext(events)
            while slowly and not answer.choices[0].handle.done:
                await asyncio.sleep(0.01)
            return sum([1 async for event in events if "provisional" in event])

        counts = [asyncio.run(read(slowly)) for slowly in (False, True)]
    assert counts[1] <= 4 < counts[0] - 4, counts
