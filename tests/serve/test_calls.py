"""Calls of tools: as templates write them, as clients of OpenAI's interface read them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.models import ByteTokenizer, from_callable
from pdkernels.models.text.chat import ChatTemplate
from pdkernels.serve.calls import HERMES, LLAMA, MISTRAL, PLAIN, JsonForm, form_of, joined
from pdkernels.serve.messages import plain
from pdkernels.serve.parser import AnswerParser
from pdkernels.serve.tagged import QWEN_CODER, CallDelta
from tests.serve.clients import Chatting, client_of
from tests.support.chat_templates import GEMMA, LLAMA31, QWEN3, SMOLLM2

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")

MISTRAL_V3 = (
    "{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for call in m.tool_calls %}"
    "{% if call.id is not defined or call.id|length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "{{ call.function | tojson }}{{ ', ' if not loop.last }}{% endfor %}]{{ eos_token }}"
    '{% elif m.role == \'tool\' %}[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
XML = "{% for t in tools %}{{ t }}{% endfor %}<tool_call><function=f><parameter=a>1</parameter></function></tool_call>{{ arguments }}"
FORMS = {"qwen3": (QWEN3, HERMES), "llama 3.1": (LLAMA31, LLAMA), "mistral": (MISTRAL_V3, MISTRAL)}
VALUES: list[Any] = [
    {},
    {"city": "Paris"},
    {"text": 'brackets }]{[ and "quotes" \\ and ü 漢 <tool_call> </tool_call>', "n": [1, {"a": []}, None, True]},
    {"deep": {"a": {"b": {"c": "\n\t"}}}},
]


def read(form: JsonForm, text: str, chance: random.Random | None = None, most: int | None = None) -> tuple[str, Any]:
    """The text without its calls, and the calls, read in one piece or in random ones."""
    parser, news, at = AnswerParser(form, {"get": {}, "set": {}}, most), list[Any](), 0
    while at < len(text):
        size = len(text) if chance is None else chance.randint(1, 5)
        news, at = news + parser.feed(text[at : at + size]), at + size
    news += parser.flush()
    calls = joined([one for one in news if isinstance(one, CallDelta)])
    found = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return "".join(one for one in news if isinstance(one, str)), found


def test_the_form_of_a_templates_calls() -> None:
    assert {name: form_of(source) for name, (source, _) in FORMS.items()} == {k: form for k, (_, form) in FORMS.items()}
    assert form_of(XML) is QWEN_CODER
    assert [form_of(source) for source in (SMOLLM2, GEMMA, "[TOOL_CALLS]name[ARGS]{}")] == [None] * 3


@pytest.mark.parametrize("name", FORMS)
def test_what_a_template_writes_is_read_again(name: str) -> None:
    """Calls written by the template, with a text before them where it has one."""
    source, form = FORMS[name]
    template, chance = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}), random.Random(0)
    for round_ in range(20):
        several = chance.randint(1, 3) if form.several else 1
        calls = [(chance.choice(["get", "set"]), chance.choice(VALUES)) for _ in range(several)]
        content = chance.choice(["", "Let me see.\n\n"]) if form is HERMES else ""
        entries = [{"id": "abcdefghi", "function": {"name": one, "arguments": value}} for one, value in calls]
        user = {"role": "user", "content": "?"}
        before = template.render([user], add_generation_prompt=False)
        after = template.render([user, {"role": "assistant", "content": content, "tool_calls": entries}, user])
        answer = after.removeprefix(before)
        assert answer != after
        for end in ("<|im_end|>", "<|eot_id|>", "</s>"):
            answer = answer.partition(end)[0]
        answer = answer.removeprefix("<|im_start|>assistant\n").removeprefix("<think>\n\n</think>\n\n")
        if round_ % 2 and form is not HERMES:  # special tokens are not in a text
            answer = answer.replace(form.opening, "")
        for splits in (None, chance):
            text, found = read(form, answer, splits)
            assert [(one, json.loads(arguments)) for one, arguments in found] == calls
            assert text == content.strip()


TEXTS = [
    (HERMES, 'a <tool_call>\n{"name": "x y", "arguments": {"k": 1}}\n</tool_call> b ', "a b ", [("x y", '{"k": 1}')]),
    (HERMES, '<tool_call>{"arguments": {"k": [1]}, "name": "get"}</tool_call>', "", [("get", '{"k": [1]}')]),
    (HERMES, '<tool_call>{"arguments": {"k": 1.10, "n": 12345678901234567890.5}, "name": "get"}</tool_call>', "", [("get", '{"k": 1.10, "n": 12345678901234567890.5}')]),
    (HERMES, '<tool_call>{ "name" : "x" , "name" : "get" , "parameters" : {"k" : "}"} }</tool_call>', "", [("get", '{"k" : "}"}')]),
    (HERMES, '<tool_call>{"name": "get", "arguments": "{\\"k\\": 2}"}</tool_call>', "", [("get", '{"k": 2}')]),
    (HERMES, '<tool_call>{"name": "get", "arguments": {"k": NaN, "n": [-Infinity, 1e999]}}</tool_call>', "", [("get", '{"k": "NaN", "n": ["-Infinity", "1e999"]}')]),
    (HERMES, '<tool_call>{"arguments": {"k": NaN}, "name": "get"}</tool_call>', "", [("get", '{"k": "NaN"}')]),
    (HERMES, '<tool_call>{"name": "get", "arguments": "{\\"k\\": NaN}"}</tool_call>', "", [("get", '{"k": "NaN"}')]),
    (HERMES, '<tool_call>{"name": "get", "arguments": {"k": 12', "", [("get", '{"k": 12')]),
    (MISTRAL, '[{"name": "get", "arguments": {"k": True, "t": "a\nb True NaN"}}]', "", [("get", '{"k": true, "t": "a\\nb True NaN"}')]),
    (LLAMA, '{"name": "get", "parameters": {"k": Infinity}}', "", [("get", '{"k": "Infinity"}')]),
    (HERMES, '<tool_call>{"name": "get"}<tool_call>{"name": "set"}', "", [("get", "{}"), ("set", "{}")]),
    (HERMES, '<tool_call>{"name": "get", "arguments": {"k": "cut', "", [("get", '{"k": "cut')]),
    (HERMES, 'so <tool_call>{"name": "get", "argu', 'so <tool_call>{"name": "get", "argu', []),
    (HERMES, "so  <tool_call>nothing</tool_call>", "so  <tool_call>nothing</tool_call>", []),
    (HERMES, "<tool_call>{1: 2}</tool_call> x", "<tool_call>{1: 2}</tool_call> x", []),
    (HERMES, '{"name": "get", "arguments": {}}', '{"name": "get", "arguments": {}}', []),
    (HERMES, "a < b <tool\n", "a < b <tool\n", []),
    (MISTRAL, '[{"name": "get", "arguments": {"k": "]"}, "id": "123456789"}] x', " x", [("get", '{"k": "]"}')]),
    (MISTRAL, 'x [TOOL_CALLS] [{"name": "y", "arguments": {}}]', 'x [TOOL_CALLS] [{"name": "y", "arguments": {}}]', []),
    (MISTRAL, "[1, 2]", "[1, 2]", []),
    (MISTRAL, '[{"name": "other", "arguments": {}}]', '[{"name": "other", "arguments": {}}]', []),
    (MISTRAL, " [TOOL", " [TOOL", []),
    (MISTRAL, 'So: [{"name": "get", "arguments": {}}]', 'So: [{"name": "get", "arguments": {}}]', []),
    (LLAMA, ' {"name": "get", "parameters": {"k": 1}}', "", [("get", '{"k": 1}')]),
    (LLAMA, '<|python_tag|>{"name": "get", "parameters": {}}; {"name": "set", "parameters": {}}', "", [("get", "{}"), ("set", "{}")]),
    (LLAMA, '{"name": "get", "arguments": {"k": 1}}', "", [("get", '{"k": 1}')]),
    (LLAMA, '{"name": "Ann", "parameters": {"k": 1}}', '{"name": "Ann", "parameters": {"k": 1}}', []),
    (LLAMA, '{"a": 1}', '{"a": 1}', []),
    (LLAMA, "  plain\n", "  plain\n", []),
    (PLAIN, '{"name": "get", "arguments": {"a": {}}}', "", [("get", '{"a": {}}')]),
    (PLAIN, "", "", []),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "content", "calls"), TEXTS)
def test_texts_that_are_calls_in_part(form: JsonForm, text: str, content: str, calls: Any) -> None:
    assert read(form, text) == (content, calls)
    for seed in range(10):
        assert read(form, text, random.Random(seed)) == (content, calls)


def test_after_as_many_calls_as_it_reads_nothing_comes() -> None:
    text = '<tool_call>{"name": "get", "arguments": {}}</tool_call>' * 2 + " more"
    assert read(HERMES, text, most=1) == ("", [("get", "{}")])


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
        },
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "set", "description": "Sets it."}}
ASKED: Any = [{"role": "user", "content": "?"}]


def served(serve: Any, template: str, said: str | None = None) -> Any:
    """A client of a server whose model says something, or prefers to end strings and objects; and the server's engine.

    A prompt is one character, "?", since `template` shows contents alone.
    """
    if said is None:
        table = torch.zeros(400, 257)
        table[:, list(b'"}')] = 3.0
    else:
        table = 9 * torch.nn.functional.one_hot(torch.tensor([*said.encode(), *[256] * 400]), 257).float()
    tokenizer = Chatting(ByteTokenizer(), template)
    model = from_callable(
        lambda tokens: table[: tokens.shape[1]].expand(len(tokens), -1, -1),
        vocab_size=257, end_tokens=[256], tokenizer=tokenizer, max_positions=400,
    )  # fmt: skip
    address, engine = serve(model=model, engine={"max_new_tokens": 200, "max_prompt_tokens": 199})
    return client_of(address), engine


def of_schema(call: Any) -> None:
    given = json.loads(call.function.arguments)
    if call.function.name == "get":
        assert given.keys() == {"city", "days"} and given["city"] in ("Rome", "Oslo") and 1 <= given["days"] <= 9
    else:
        assert call.function.name == "set"


def shorter(source: str) -> str:
    """The contents alone, beside what tells the form of calls."""
    return (
        "{% for m in messages %}{{ m.content }}{% endfor %}{# tools "
        + source.replace("#}", "").replace("{#", "")
        + " #}"
    )


@pytest.mark.parametrize("name", [*FORMS, "unknown", "none"])
def test_calls_that_are_asked_for(serve: Any, name: str) -> None:
    source, form = FORMS.get(name, ("", PLAIN))
    client, _ = served(
        serve,
        shorter(source) if form is not PLAIN else "{{ messages[0].content }}" + "{# tools #}" * (name == "unknown"),
    )
    create, options = (
        client.chat.completions.create,
        {"model": "tiny", "messages": ASKED, "temperature": 1, "max_tokens": 200},
    )
    named: Any = {"type": "function", "function": {"name": "get"}}
    for seed, choice in enumerate([named, "required"]):
        more: Any = {"tools": [WEATHER, CLOCK], "tool_choice": choice, "seed": seed}
        whole = create(**options, **more).choices[0]
        calls = whole.message.tool_calls
        assert whole.message.content is None and calls and (len(calls) == 1 or (choice == "required" and form.several))
        for call in calls:
            of_schema(call)
        if choice is named:
            assert calls[0].function.name == "get"
        assert whole.finish_reason == "tool_calls" or len(calls) > 1
        assert len({call.id for call in calls}) == len(calls) and all(
            (len(call.id) == 9) == (form is MISTRAL) for call in calls
        )
        deltas = [piece.choices[0].delta for piece in create(**options, **more, stream=True)]
        assert not any(delta.content for delta in deltas)
        pieces = [one for delta in deltas for one in delta.tool_calls or []]
        for number, call in enumerate(calls):
            of_it = [one for one in pieces if one.index == number]
            assert of_it[0].id and of_it[0].type == "function" and of_it[0].function.name == call.function.name
            assert all(one.id is None and one.function.name is None for one in of_it[1:])
            assert "".join(one.function.arguments for one in of_it) == call.function.arguments
            assert len(of_it) > 5 or call.function.name == "set"  # arguments come as they are written
    one = create(**options, tools=[WEATHER, CLOCK], tool_choice="required", parallel_tool_calls=False, seed=9)
    assert len(one.choices[0].message.tool_calls) == 1 and one.choices[0].finish_reason == "tool_calls"


def test_calls_that_the_model_chooses(serve: Any) -> None:
    call = '<tool_call>\n{"name": "get", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>'
    client, engine = served(serve, shorter(QWEN3), f"So\n{call}\n{call}")
    options: dict[str, Any] = {
        "model": "tiny",
        "messages": ASKED,
        "max_tokens": 200,
        "temperature": 0,
        "tools": [WEATHER],
    }

    def create(**more: Any) -> Any:
        return client.chat.completions.create(**options, **more)

    whole = create(logprobs=True).choices[0]
    assert (whole.message.content, whole.finish_reason) == ("So", "tool_calls")
    assert [json.loads(one.function.arguments) for one in whole.message.tool_calls] == [{"city": "Rome", "days": 3}] * 2
    assert "".join(one.token for one in whole.logprobs.content) == f"So\n{call}\n{call}"
    pieces = list(create(stream=True, n=2, seed=1))
    assert [one.choices[0].index for one in pieces][:2] == [0, 1], "openai refuses others"
    for index in range(2):
        deltas = [one.choices[0].delta for one in pieces if one.choices[0].index == index]
        assert "".join(delta.content or "" for delta in deltas) == "So"
        for number in range(2):
            calls = [one.function for delta in deltas for one in delta.tool_calls or [] if one.index == number]
            assert calls[0].name == "get" and "".join(one.arguments for one in calls) == '{"city": "Rome", "days": 3}'
    assert {one.choices[0].finish_reason for one in pieces} == {None, "tool_calls"}
    kept = create(tool_choice="none").choices[0]
    assert (kept.message.tool_calls, kept.message.content) == (
        None,
        f"So\n{call}\n{call}",
    ) and kept.finish_reason == "stop"
    alone = create(parallel_tool_calls=False).choices[0]
    assert len(alone.message.tool_calls) == 1 and alone.finish_reason == "tool_calls"
    cut = client.chat.completions.create(**options | {"max_tokens": 60}).choices[0]
    assert cut.message.tool_calls[0].function.arguments == '{"city": "Rome",' and cut.finish_reason == "length"
    # Strict: what the model would say otherwise is no call of this tool.
    strict: Any = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    strict["function"]["parameters"] = {"type": "object", "properties": {"n": {"const": 7}}, "required": ["n"]}
    other = client.chat.completions.create(**options | {"tools": [strict]}).choices[0].message
    assert all(json.loads(one.function.arguments) == {"n": 7} for one in other.tool_calls)
    metrics = engine.metrics()
    assert "error" not in metrics.finished


class get(pydantic.BaseModel):  # type: ignore[name-defined,misc]
    """A tool that is declared as users of OpenAI's client do."""

    city: str
    days: int


class Person(pydantic.BaseModel):  # type: ignore[name-defined,misc]
    age: int


def test_strict_tools_of_the_openai_client(serve: Any) -> None:
    """The client demands strict tools, for which no call is outside the schema, and parses what comes."""
    client, _ = served(serve, shorter(QWEN3))
    tool = openai.pydantic_function_tool(get)
    assert tool["function"]["strict"]
    options: Any = {"model": "tiny", "messages": ASKED, "max_tokens": 200, "temperature": 1, "tools": [tool]}
    parsed = client.chat.completions.parse(**options, tool_choice="required", parallel_tool_calls=False, seed=2)
    assert isinstance(parsed.choices[0].message.tool_calls[0].function.parsed_arguments, get)
    with client.chat.completions.stream(**options, tool_choice="required", parallel_tool_calls=False, seed=2) as stream:
        final = stream.get_final_completion()
    calls = [one.choices[0].message.tool_calls[0].function.parsed_arguments for one in (parsed, final)]
    assert calls[0] == calls[1]
    # A text of a form, or a call.
    either = client.chat.completions.parse(**options, response_format=Person, seed=4).choices[0].message
    assert isinstance(either.parsed, Person) or isinstance(either.tool_calls[0].function.parsed_arguments, get)


def test_calls_and_their_results_go_back_into_the_template(serve: Any) -> None:
    """With arguments as objects, which templates write as JSON, and with the tool's name."""
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for call in m.tool_calls %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
        "{{ m.name }};{% endfor %}{# tools <tool_call> arguments #}"
    )
    client, _ = served(serve, template, "x" * 399)
    call = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": '{"city": "Rome"}'}}
    messages: Any = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    options: Any = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    answer = client.chat.completions.create(messages=messages, tools=[WEATHER], **options)
    prompt = 'user:?;assistant:get{"city": "Rome"};tool:sunnyget;'
    assert answer.usage.prompt_tokens == len(prompt)
    assert ChatTemplate(template).render(plain(messages, template)) == prompt
    assert answer.choices[0].message.content == "x" * 8
    # The message of an answer is taken as the client gives it back.
    named: Any = {"type": "function", "function": {"name": "set"}}
    made = (
        client.chat.completions.create(
            messages=ASKED, tools=[CLOCK], tool_choice=named, **options | {"max_tokens": 120}
        )
        .choices[0]
        .message
    )
    again = [*ASKED, made, {"role": "tool", "tool_call_id": made.tool_calls[0].id, "content": "done"}]
    assert client.chat.completions.create(messages=again, tools=[CLOCK], **options).choices[0]
    for arguments in ("{", "[1]", 5):
        wrong = {"role": "assistant", "tool_calls": [{**call, "function": {"name": "get", "arguments": arguments}}]}
        with pytest.raises(openai.BadRequestError, match="must be a JSON object, written as text"):
            client.chat.completions.create(messages=[*ASKED, wrong], **options)


REFUSED = [
    (SMOLLM2, {"tools": [CLOCK]}, "the chat template of this model has no place for tools", "tools"),
    (QWEN3, {"tool_choice": "required"}, "tool_choice needs tools", "tool_choice"),
    (QWEN3, {"tools": [CLOCK, CLOCK]}, "tools must have different names", "tools"),
    (QWEN3, {"tools": [CLOCK], "tool_choice": "any"}, "tool_choice: must be", "tool_choice"),
    (QWEN3, {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "there is no tool 'x'", "tool_choice"),
    (QWEN3, {"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0", "tools.0"),
    (QWEN3, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "tools.0.function.name"),
    (QWEN3, {"tools": [CLOCK], "tool_choice": "required", "response_format": {"type": "json_object"}}, "exclude each other", "tool_choice"),
    ("{# tools #}", {"tools": [{"type": "function", "function": {"name": "a", "strict": True}}]}, "a form that a grammar cannot write here", "tools"),
    (QWEN3, {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"disallow": "string"}}}], "tool_choice": "required"}, "the parameters of tool 'a'", "tools"),
    (SMOLLM2, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "no place for calls of tools", "messages.0.tool_calls"),
    (QWEN3, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "must have a name and arguments", "messages.0.tool_calls.0.function"),
    (QWEN3, {"chat_template_kwargs": {"tools": [CLOCK]}}, "'tools' has a field of its own", "chat_template_kwargs"),
    (QWEN3, {"max_completion_tokens": 3}, "max_tokens and max_completion_tokens exclude each other", "max_tokens"),
    (QWEN3, {"functions": [{"name": "a"}]}, "functions is not supported here", "functions"),
]  # fmt: skip


@pytest.mark.parametrize(("template", "body", "words", "parameter"), REFUSED)
def test_what_cannot_be_followed_is_refused_by_name(
    chat_client: Any, template: str, body: Any, words: str, parameter: str
) -> None:
    client, model = chat_client
    model.tokenizer.chat_template = ChatTemplate(template)
    answer = client.post("/v1/chat/completions", json={"model": "tiny", "messages": ASKED, "max_tokens": 120} | body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and words in error["message"] and error["param"].startswith(parameter), error


@pytest.fixture(scope="module")
def chat_client() -> Any:
    from fastapi.testclient import TestClient

    from pdkernels.engine import Engine
    from pdkernels.serve import create_app

    model = pd.models.load("tiny-code")
    model.tokenizer = Chatting(model.tokenizer)
    with TestClient(create_app(Engine(model, max_new_tokens=120), "tiny"), raise_server_exceptions=False) as client:
        yield client, model
