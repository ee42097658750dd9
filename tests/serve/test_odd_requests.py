"""What clients do that few do: halves of characters and of calls, numbers that are none, times that are over, wrong types."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from concurrent.futures import CancelledError
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient

import pdkernels as pd
from pdkernels.models import ByteTokenizer, from_callable
from pdkernels.serve import create_app
from pdkernels.serve.answers import whole_choice
from pdkernels.serve.blocks import block_steps
from pdkernels.serve.choices import Choice, Rest
from pdkernels.serve.errors import Refused
from pdkernels.serve.forms import asked_grammar
from pdkernels.serve.messages import handed_on
from pdkernels.serve.parser import AnswerParser
from pdkernels.serve.schema import ChatRequest
from pdkernels.serve.tagged import DEEPSEEK_V3, DEEPSEEK_V31, GLM, HARMONY_CALLS, KIMI, QWEN_CODER, json_of, kinds_of
from pdkernels.serve.thoughts import THINK
from pdkernels.serve.tools import Reading, asked_calls
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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("budget", [4, 40])
def test_a_minimum_above_the_maximum_beside_a_budget(serve: Any, budget: int, stream: bool) -> None:
    address, _ = serve_speaking(serve, "<think>a</think>b", template="<think>")
    asked: dict[str, Any] = {"model": "tiny", "messages": ASKED, "max_tokens": 30, "stream": stream}
    openai = pytest.importorskip("openai")
    with pytest.raises(openai.BadRequestError, match=r"min_tokens must be at most max_tokens \(30\), got 50"):
        client_of(address).chat.completions.create(
            **asked, extra_body={"min_tokens": 50, "thinking_token_budget": budget}
        )


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


BUDGETED = {
    "model": "tiny", "messages": [{"role": "user", "content": "class Node:"}], "max_tokens": 30, "thinking_token_budget": 4, "ignore_eos": True,
}  # fmt: skip


def full_at_the_rest(monkeypatch: Any, engine: Any, on_tokens: Any = None) -> list[Any]:
    """Has others fill an engine whenever the rest of an answer is submitted; returns those requests."""
    submit, others = engine.submit, list[Any]()

    def submitted(*arguments: Any, **options: Any) -> Any:
        if len(arguments[0]) > len("class Node:<think>") and others.count(None) < 3:
            with pytest.raises(pd.engine.EngineFull):
                while True:
                    others.append(submit([0], max_new_tokens=64, end_tokens=(), on_tokens=on_tokens))
            others.append(None)
        return submit(*arguments, **options)

    monkeypatch.setattr(engine, "submit", submitted)
    return others


def test_the_rest_after_a_budget_waits_for_its_turn_in_a_full_engine(monkeypatch: Any) -> None:
    """The request was let in once: others that came meanwhile do not cost it its answer, and later ones go behind it."""
    engine = chatting(max_running=1, max_waiting=1)
    with TestClient(create_app(engine, "tiny"), raise_server_exceptions=False) as made:
        others = full_at_the_rest(monkeypatch, engine)
        answer = made.post(CHAT, json=BUDGETED)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 30 and others.count(None) == 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_rest_after_a_budget_waits_no_longer_than_its_time(monkeypatch: Any, stream: bool) -> None:
    """What there is comes, and the reason is that of any answer whose time is over."""
    engine = chatting(max_running=1, max_waiting=1)
    with TestClient(create_app(engine, "tiny"), raise_server_exceptions=False) as made:
        full_at_the_rest(monkeypatch, engine, lambda *_: time.sleep(0.05))
        answer = made.post(CHAT, json=BUDGETED | {"timeout": 0.5, "stream": stream})
        assert answer.status_code == 200, answer.text
        if stream:
            last = json.loads(answer.text.split("data: ")[-2])["choices"][0]
        else:
            last = answer.json()["choices"][0]
            assert 4 <= answer.json()["usage"]["completion_tokens"] < 30
        assert last["finish_reason"] == "timeout"
        engine.close(finish=False)


@pytest.mark.parametrize("late", [False, True], ids=["waiting", "submitted"])
def test_a_client_that_goes_between_the_parts_of_an_answer_ends_the_second_one(late: bool) -> None:
    """Its generation is made in a thread, which nobody may wait for any more."""
    engine = chatting()
    with engine:
        first, rests, going, gone = (
            engine.submit("a", max_new_tokens=2),
            list[Any](),
            threading.Event(),
            threading.Event(),
        )
        first.result()

        def go_on(*_: Any) -> Rest:
            if late:
                rests.append(
                    engine.submit("b", max_new_tokens=300, end_tokens=(), on_tokens=lambda *_: time.sleep(0.01))
                )
            going.set()
            gone.wait(30)
            if not late:
                rests.append(
                    engine.submit("b", max_new_tokens=300, end_tokens=(), on_tokens=lambda *_: time.sleep(0.01))
                )
            return Rest(rests[0], 0)

        choice = Choice(first, engine.model.tokenizer, (), parser=AnswerParser(None), go_on=go_on)

        async def hang_up() -> None:
            reading = asyncio.ensure_future(whole_choice(choice))
            while not going.is_set():
                await asyncio.sleep(0.01)
            reading.cancel()
            choice.cancel()
            gone.set()

        asyncio.run(hang_up())
        with contextlib.suppress(CancelledError):
            rests[0].result(60)
        assert rests[0].finish_reason == "cancelled"


def test_both_parts_of_a_budgeted_answer_have_one_time() -> None:
    """`max_time` is that of the answer: the second part has what the first has left."""
    engine, times = chatting(), list[float]()
    with TestClient(create_app(engine, "tiny"), raise_server_exceptions=False) as made:
        submit = engine.submit

        def noted(*arguments: Any, **options: Any) -> Any:
            times.append(options["params"].max_time)
            return submit(*arguments, **options)

        engine.submit = noted
        chat = {"model": "tiny", "messages": ASKED, "max_tokens": 30, "thinking_token_budget": 4, "ignore_eos": True}
        assert made.post(CHAT, json=chat | {"max_time": 50}).status_code == 200
    first, second = times
    assert first == 50 and 0 < second < 50


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
        (RESPONSES, {"input": [{"role": "user", "content": "x"}, {"type": "function_call", "call_id": "a", "name": "b", "arguments": "[1]"}], "instructions": "y"}, "input.1.arguments"),
        (RESPONSES, {"input": [{"role": "user", "content": "x"}, {"type": "function_call", "call_id": "a", "name": "b", "arguments": "{\"n\": NaN}"}]}, "input.1.arguments"),
        (RESPONSES, {"input": [{"role": "user", "content": "x"}, {"type": "function_call", "call_id": "a", "name": "b", "arguments": "{}"}], "instructions": "y"}, "input"),
        (MESSAGES, {"system": "y", "messages": [*ASKED, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}]}, "messages"),
        *[(RESPONSES, {"input": [{"type": "reasoning", "summary": [], "content": wrong}]}, "input.0.content") for wrong in (0, False, {})],
        (RESPONSES, {"input": [{"type": "reasoning", "summary": 0}]}, "input.0.summary"),
        (CHAT, {"messages": [*ASKED, {"role": "tool", "tool_call_id": 5, "content": "x"}]}, "messages.1.tool_call_id"),
        (CHAT, {"messages": [*ASKED, {"role": "assistant", "content": "x", "reasoning_content": ["x"]}]}, "messages.1.reasoning_content"),
        (CHAT, {"messages": [*ASKED, {"role": "assistant", "content": "x", "reasoning": 0}]}, "messages.1.reasoning"),
        (CHAT, {"messages": [{"role": "user", "name": {}, "content": "x"}]}, "messages.0.name"),
        (CHAT, {"messages": [*ASKED, {"role": "assistant", "content": "x", "tool_calls": 0}]}, "messages.1.tool_calls"),
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


@pytest.mark.parametrize("number", ["1" + "0" * 310 + ".0", "9" * 220 + "e99", "1" + "0" * 300 + "e9", "NaN"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
def test_numbers_are_refused_in_whatever_form_they_come(client: Any, number: str, encoding: str) -> None:
    """The application reads all of these encodings."""
    tool = f'{{"type": "function", "name": "get", "parameters": {{"maximum": {number}}}}}'
    for tools, status in ((tool, 400), (tool.replace(number, "1e99"), 200)):
        body = f'{{"model": "tiny", "input": "Hi", "max_output_tokens": 2, "tool_choice": "none", "tools": [{tools}]}}'
        answer = client.post(RESPONSES, content=body.encode(encoding), headers={"Content-Type": "application/json"})
        assert answer.status_code == status, answer.text
        assert status == 200 or "is no number there" in answer.json()["error"]["message"]


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


def test_an_error_with_half_of_a_character_is_an_error_of_its_field(client: Any) -> None:
    """The place in a schema that it names has the client's own keys."""
    function = {"name": "a", "parameters": {"type": "object", "properties": {"\ud800": {"enum": 5}}}}
    tools = [{"type": "function", "function": function}]
    body = {"model": "tiny", "messages": ASKED, "tools": tools, "tool_choice": "required"}
    answer = sent(client, CHAT, json.dumps(body))
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "tools" and "codec" not in error["message"], error
    assert "\ud800" in error["message"] or "\\ud800" in error["message"]


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


@pytest.mark.parametrize("form", [DEEPSEEK_V3, DEEPSEEK_V31, KIMI, HARMONY_CALLS])
@pytest.mark.parametrize("cut", [1, 3, 1000])
def test_json_between_tags_has_numbers_that_all_read(form: Any, cut: int) -> None:
    given = '{"a": NaN, "b": [-Infinity, 1e999, 1e9], "c": "NaN\n"}'
    head = {DEEPSEEK_V3: "function", DEEPSEEK_V31: "get", KIMI: "functions.get:0", HARMONY_CALLS: "get"}[form]
    json_end = "\n```" if form.framed else ""
    fence = "get\n```json\n" if form.framed else ""
    text = f"{form.openings[0]}{form.begin}{head}{form.name_end}{fence}{given}{json_end}{form.end}{form.closing}"
    parser, news = AnswerParser(form, {"get": {}}), list[Any]()
    for at in range(0, len(text), cut):
        news += parser.feed(text[at : at + cut])
    news += parser.flush()
    written = "".join(new.arguments for new in news if not isinstance(new, str))
    assert json.loads(written) == {"a": "NaN", "b": ["-Infinity", "1e999", 1e9], "c": "NaN\n"}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("said", "given"),
    [('{"a": 1e999, "b": NaN}', '{"a": "1e999", "b": "NaN"}'), ('{"a": 1,}', '{"a": 1,}'), ("{}", "{}")],
)
def test_what_a_model_calls_comes_alike_by_all_routes_and_goes_back(stream: bool, said: str, given: str) -> None:
    """As it is streamed. What is no JSON at all is a text; Anthropic's answer has it in an object."""
    call = f'<tool_call>\n{{"name": "get", "arguments": {said}}}\n</tool_call>'
    model = speaking(call, "Yes.", template=f"tools {QWEN3.replace('{#', '').replace('#}', '')}")
    engine = pd.Engine(model, max_new_tokens=300, max_prompt_tokens=399)
    flat = {"type": "function", **FUNCTION}
    asked: dict[str, Any] = {"model": "tiny", "temperature": 0, "stream": stream}
    with TestClient(create_app(engine, "tiny"), raise_server_exceptions=False) as made:

        def ask(route: str, **body: Any) -> Any:
            answer = made.post(route, json=asked | body)
            assert answer.status_code == 200, answer.text
            if not stream:
                return answer.json()
            lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
            return list(map(json.loads, lines))

        tools = [{"type": "function", "function": FUNCTION}]
        chat = ask(CHAT, messages=ASKED, tools=tools)
        response = ask(RESPONSES, input="Hi", tools=[flat])
        tool = {"name": "get", "input_schema": {"type": "object"}}
        message = ask(MESSAGES, messages=ASKED, max_tokens=200, tools=[tool])
        whole = handed_on(given)
        if stream:
            deltas = [each["choices"][0]["delta"] for each in chat]
            pieces = [one["function"]["arguments"] for delta in deltas for one in delta.get("tool_calls", [])]
            assert "".join(pieces) == given
            response = response[-1]["response"]
            pieces = [each["delta"]["partial_json"] for each in message if "partial_json" in each.get("delta", {})]
            assert "".join(pieces) == given
        else:
            assert chat["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == given
            assert message["content"][0]["input"] == whole
        assert response["output"][0]["arguments"] == given
        # A kept response goes on whatever the model wrote; so does an answer of Anthropic's form.
        more = [{"type": "function_call_output", "call_id": response["output"][0]["call_id"], "output": "x"}]
        ask(RESPONSES, input=more, tools=[flat], previous_response_id=response["id"])
        used = {"type": "tool_use", "id": "a", "name": "get", "input": whole}
        result = {"type": "tool_result", "tool_use_id": "a", "content": "x"}
        turns = [{"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
        ask(MESSAGES, messages=[*ASKED, *turns], max_tokens=20, tools=[tool])


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


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        *[({"properties": wrong}, "properties must be an object") for wrong in ([1], [], 0, "", None)],
        *[({"properties": {"a": {}}, "required": wrong}, "required must be a list of texts") for wrong in (5, None, "abc", [1])],
        *[({"properties": {"a": {"type": "string", "enum": wrong}}}, "enum of texts must be a list") for wrong in (5, "abc", [], ["a", 1])],
        ({"properties": {"a": {"type": "string", "const": 5}}}, "const of texts must be one"),
    ],
)  # fmt: skip
def test_a_schema_of_wrong_types_is_refused_by_its_tool(schema: dict[str, Any], words: str) -> None:
    body = ChatRequest(
        model="m", messages=ASKED, tool_choice="required",
        tools=[{"type": "function", "function": {**FUNCTION, "parameters": {"type": "object", **schema}}}],  # type: ignore[list-item]
    )  # fmt: skip
    source = "tools <tool_call><function="
    asked = asked_grammar(body, Reading(asked_calls(body, source, ByteTokenizer())))
    assert asked is not None
    with pytest.raises(Refused, match=f"the parameters of tool 'get': {words}"):
        asked.grammar()


@pytest.mark.parametrize(("call_id", "status"), [(5, 400), (["a"], 400), ("a", 200), (None, 200)])
def test_the_id_of_a_call_is_a_text(call_id: Any, status: int) -> None:
    engine = pd.Engine(speaking("", template="tools tool_calls"), max_new_tokens=20, max_prompt_tokens=100)
    call = {"id": call_id, "type": "function", "function": {"name": "get", "arguments": "{}"}}
    with TestClient(create_app(engine, "tiny"), raise_server_exceptions=False) as made:
        chat = [*ASKED, {"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "x"}]
        answer = made.post(CHAT, json={"model": "tiny", "messages": chat, "max_tokens": 2})
        assert answer.status_code == status, answer.text
        assert status == 200 or answer.json()["error"]["param"] == "messages.1.tool_calls.0.id"


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
