"""Calls inside thoughts do not count; answers that end inside a call say so."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.models.text.chat import ChatTemplate
from pdkernels.models.text.tokenizers import JsonTokenizer
from pdkernels.serve.calls import HERMES, LLAMA, MISTRAL, JsonForm, joined
from pdkernels.serve.forms import _calls
from pdkernels.serve.messages import plain
from pdkernels.serve.parser import AnswerParser, Thought
from pdkernels.serve.tagged import CallDelta
from pdkernels.serve.thoughts import _FORMS, THINK, ThoughtForm, opened, thoughts_of
from tests.serve.clients import client_of
from tests.serve.test_calls import ASKED, CLOCK, WEATHER, served, shorter
from tests.support.chat_templates import JOINED, QWEN3

CALL = '<tool_call>\n{"name": "set", "arguments": {"a": "<think>"}}\n</tool_call>'
HALF = '<tool_call>\n{"name": "set", "arguments": {"a": 1'
OPEN = shorter(QWEN3) + "<think>"
pytest.importorskip("openai")


def read(
    form: JsonForm, text: str, thought: ThoughtForm | None, chance: random.Random | None = None
) -> tuple[str, list[tuple[str, str]], AnswerParser]:
    parser, news, at = AnswerParser(form, {"get": {}, "set": {}}, None, _FORMS, thought, split=False), list[Any](), 0
    while at < len(text):
        size = len(text) if chance is None else chance.randint(1, 5)
        news, at = news + parser.feed(text[at : at + size]), at + size
    news += parser.flush()
    calls = joined([one for one in news if isinstance(one, CallDelta)])
    found = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return "".join(one for one in news if isinstance(one, str)), found, parser


@pytest.mark.parametrize("thought", _FORMS, ids=lambda form: form.opening)
@pytest.mark.parametrize("inside", [False, True], ids=["the model opens it", "the prompt has opened it"])
def test_calls_count_after_a_thought(thought: ThoughtForm, inside: bool) -> None:
    """In all forms, whatever the pieces of the text; a tag in the arguments of a call is no thought."""
    before = f"{'' if inside else thought.opening}\nI could {CALL} but {thought.closing}"
    for text, content, calls in [
        (f"{before}\n\nNo.", f"{before}\n\nNo.", 0),
        (f"{before}\n\n{CALL}", before, 1),
        (f"{before} Both: {CALL}\n{CALL}", f"{before} Both:", 2),
        (before.removesuffix(thought.closing), before.removesuffix(thought.closing), 0),
        (f"{before}{thought.opening}{CALL}{thought.closing}{CALL}", f"{before}{thought.opening}{CALL}{thought.closing}", 1),
    ]:  # fmt: skip
        for chance in (None, *map(random.Random, range(5))):
            found = read(HERMES, text, thought if inside else None, chance)
            assert found[:2] == (content, [("set", '{"a": "<think>"}')] * calls)
    for form, call in [(MISTRAL, '[{"name": "set", "arguments": {}}]'), (LLAMA, '{"name": "set", "parameters": {}}')]:
        text = f"{'' if inside else thought.opening}{call}{thought.closing}"
        for chance in (None, *map(random.Random, range(5))):
            assert read(form, text, thought if inside else None, chance)[:2] == (text, [])
            answer = read(form, f"{text}\n\n{call}", thought if inside else None, chance)
            assert (answer[0].strip(), answer[1]) == (text, [("set", "{}")])


def test_which_thoughts_a_template_and_a_prompt_have() -> None:
    assert thoughts_of(QWEN3) == (THINK,) and thoughts_of("[INST]..[THINK]")[0].closing == "[/THINK]"
    assert opened((THINK,), "<|im_start|>assistant\n<think>\n\n</think>\n\n") is None
    assert opened((THINK,), "What is <think>?<|im_start|>assistant\n") is None
    assert opened((THINK,), "", "<think>a</think> b") is None


MORE: list[tuple[JsonForm, str, str, list[Any], bool]] = [
    (HERMES, '<tool_call>{"name": "get", "arguments": {}}\n{"name": "set", "arguments": {"k": 1}}\n</tool_call> x', " x", [("get", "{}"), ("set", '{"k": 1}')], False),
    (HERMES, '<tool_call>{"name": "get"}{"name": "get"}</tool_call>', "", [("get", "{}")] * 2, False),
    (HERMES, '<tool_call>{"name": "get", "arguments": {}}{"a": 1}</tool_call>', '{"a": 1}</tool_call>', [("get", "{}")], False),
    (HERMES, '<tool_call>{"name": "get", "arguments": null}</tool_call>', "", [("get", "{}")], False),
    (HERMES, '<tool_call>{"name": "get", "arguments": ""}</tool_call>', "", [("get", "{}")], False),
    (HERMES, '<tool_call>{"name": "get", "arguments": "Rome"}</tool_call>', "", [("get", '"Rome"')], False),
    (HERMES, '<tool_call>{"name": "get", "arguments": [1]}</tool_call>', "", [("get", "[1]")], False),
    (LLAMA, '{"name": "get", "parameters": null}', "", [("get", "{}")], False),
    (LLAMA, '{"name": "get", "parameters": null, "arguments": {"k": 1}}', "", [("get", '{"k": 1}')], False),
    (HERMES, f"{CALL}{HALF}", "", [("set", '{"a": "<think>"}'), ("set", '{"a": 1')], True),
    (HERMES, HALF + "}", "", [("set", '{"a": 1}')], True),
    (HERMES, 'so <tool_call>{"name": "get", "argu', 'so <tool_call>{"name": "get", "argu', [], True),
    (HERMES, CALL.removesuffix("</tool_call>"), "", [("set", '{"a": "<think>"}')], False),
    (LLAMA, '{"name": "get", "par', '{"name": "get", "par', [], False),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "content", "calls", "half"), MORE)
def test_calls_as_models_write_them(form: JsonForm, text: str, content: str, calls: Any, half: bool) -> None:
    for chance in (None, *map(random.Random, range(10))):
        found = read(form, text, None, chance)
        assert (*found[:2], found[2].unfinished) == (content, calls, half)


def ask(client: Any, stream: bool = False, **more: Any) -> tuple[Any, list[Any], str]:
    """The content, after the thought in double brackets if there is one; the calls, and the finish reason."""
    options: Any = {"model": "tiny", "messages": ASKED, "max_tokens": 180, "temperature": 0, "tools": [WEATHER, CLOCK]}
    answer = client.chat.completions.create(**options | more, stream=stream)
    if not stream:
        choice = answer.choices[0]
        calls = [(one.function.name, one.function.arguments) for one in choice.message.tool_calls or []]
        return shown(thought_in(choice.message), choice.message.content), calls, choice.finish_reason
    choices = [piece.choices[0] for piece in answer]
    pieces = [one for choice in choices for one in choice.delta.tool_calls or []]
    names = [one.function.name for one in pieces if one.id]
    texts = ["".join(one.function.arguments for one in pieces if one.index == number) for number in range(len(names))]
    content = "".join(choice.delta.content or "" for choice in choices)
    thought = "".join(thought_in(choice.delta) for choice in choices)
    return shown(thought, content or None), list(zip(names, texts, strict=True)), choices[-1].finish_reason


def thought_in(message: Any) -> str:
    """By both names."""
    thought = getattr(message, "reasoning_content", "")
    assert getattr(message, "reasoning", "") == thought
    return str(thought)


def shown(thought: str, content: str | None) -> str | None:
    return f"[[{thought}]]{content or ''}" if thought else content


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_call_drafted_in_a_thought_is_no_call(serve: Any, stream: bool) -> None:
    said = f"I could {CALL} but no.\n</think>\n\nSure?"
    client, _ = served(serve, OPEN, "x" * 7 + said)
    thought = f"I could {CALL} but no."
    assert ask(client, stream) == (f"[[{thought}]]Sure?", [], "stop")
    kept: Any = {"separate_reasoning": False}
    assert ask(client, stream, extra_body=kept) == (said, [], "stop")
    assert ask(client, stream, extra_body={"include_reasoning": False}) == ("Sure?", [], "stop")
    loose = ask(client, stream, extra_body={"calls_in_thoughts": True})
    assert loose[1:] == ([("set", '{"a": "<think>"}')], "tool_calls")
    assert "<tool_call>" in ask(client, stream, max_tokens=90)[0]  # a thought that never ends
    client, _ = served(serve, OPEN, f"{'x' * 7}Yes.</think>\n{CALL}")
    assert ask(client, stream) == ("[[Yes.]]", [("set", '{"a": "<think>"}')], "tool_calls")
    # A call that must come does so after the thought that the prompt has opened.
    content, calls, reason = ask(client, stream, tool_choice="required", parallel_tool_calls=False)
    assert content == "[[Yes.]]" and len(calls) == 1 and reason == "tool_calls"
    # Where the request continues a thought, too.
    client, _ = served(serve, shorter(QWEN3), "x" * 13 + f"but {CALL}")
    asked = [*ASKED, {"role": "assistant", "content": "<think>Maybe "}]
    more: Any = {"chat_template_kwargs": {"continue_final_message": True}}
    assert ask(client, stream, messages=asked, extra_body=more) == (f"[[but {CALL}]]", [], "stop")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_answer_that_ends_inside_a_call_says_so(serve: Any, stream: bool) -> None:
    client, _ = served(serve, shorter(QWEN3), f"{CALL}{HALF}")  # and the model ends the answer
    assert ask(client, stream)[1:] == ([("set", '{"a": "<think>"}'), ("set", '{"a": 1')], "length")
    assert ask(client, stream, stop=["<think>"])[1:] == ([("set", '{"a": "')], "length")


def test_a_strict_call_comes_after_the_thought(serve: Any) -> None:
    """The grammar lets a thought hold any text, and has it end."""
    strict: Any = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    call = '<tool_call>\n{"name": "get", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>'
    for template, tag in ((OPEN, ""), (shorter(QWEN3), "<think>")):
        client, _ = served(serve, template, f"{'' if tag else 'x' * 7}{tag}{CALL}</think>\n\n{call}")
        content, calls, reason = ask(client, tools=[strict])
        assert content == f"[[{CALL}]]" and reason == "tool_calls"
        assert [json.loads(arguments) for _, arguments in calls] == [{"city": "Rome", "days": 3}]


def test_tags_that_are_special_tokens(serve: Any) -> None:
    """Texts leave them out."""
    pytest.importorskip("tokenizers")
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(tag, special=True) for tag in ("[THINK]", "[/THINK]", "<end>")])
    tokenizer = JsonTokenizer.of(inner, "words", end_tokens=(258,))
    tokenizer.chat_template = ChatTemplate(shorter(QWEN3) + "{# [THINK] #}")
    ids = [*inner.encode(f"[THINK]{CALL}[/THINK]{CALL} ü").ids, *[258] * 300]
    table = 9 * torch.nn.functional.one_hot(torch.tensor(ids), 259).float()
    model = pd.models.from_callable(
        lambda tokens: table[: tokens.shape[1]].expand(len(tokens), -1, -1),
        vocab_size=259, end_tokens=[258], tokenizer=tokenizer, max_positions=400,
    )  # fmt: skip
    address, _ = serve(model=model, engine={"max_new_tokens": 200, "max_prompt_tokens": 199})
    for stream in (False, True):
        content, calls, reason = ask(client_of(address), stream)
        assert (content, calls, reason) == (f"[[{CALL}]]ü", [("set", '{"a": "<think>"}')], "tool_calls")


@pytest.mark.parametrize("name", JOINED)
@pytest.mark.parametrize("content", [{}, {"content": None}], ids=["without content", "content is null"])
def test_a_chat_goes_on_after_a_call_where_templates_join_arguments_as_text(name: str, content: Any) -> None:
    """What a client sends is what the template shows, though a call's arguments are text there and an object here."""
    text = '{"city": "Rome"}'
    call = {"id": "c", "type": "function", "function": {"name": "get", "arguments": text}}
    empty = {"id": "d", "type": "function", "function": {"name": "set", "arguments": None}}
    chat: Any = [*ASKED, {"role": "assistant", **content, "tool_calls": [call, empty]}]
    chat += [{"role": "tool", "tool_call_id": one, "content": "rain"} for one in "cd"]
    template = ChatTemplate(JOINED[name], {"bos_token": "<s>", "eos_token": "</s>"})
    shown = template.render(plain(chat, JOINED[name]))
    assert shown.count(text) == 1 and "{}" in shown and "None" not in shown and shown.index("get") < shown.index("set")


@pytest.mark.parametrize("form", [HERMES, MISTRAL, LLAMA], ids=["hermes", "mistral", "llama"])
def test_the_grammar_of_strict_calls_is_that_of_what_is_read(form: JsonForm) -> None:
    parameters = {"type": "object", "properties": {"n": {"const": 7}}, "required": ["n"]}
    tools = (("set", json.dumps(parameters)),)

    def call(number: int) -> str:
        made = f'{{"name": "set", "{form.arguments}": {{"n": {number}}}}}'
        return f"[{made}]" if form.listed else f"{form.opening}{made}{form.closing}" if form.marked else made

    good, bad = call(7), call(8)
    outside, inside = (_calls(form, tools, not form.several, False, None, (THINK,), one) for one in (None, THINK))
    for text, calls in [
        (f"<think>a {bad} b</think>\n\n{good}", 1),
        (f"<think></think>{good}", 1),
        (good, 1),
        ("So.", 0),
        ("<think>a</think>So.", 0),
        (f"<think>{bad}</think>", 0),
    ]:
        assert outside.matches(text) and len(read(form, text, None)[1]) == calls
        text = text.removeprefix("<think>")
        assert inside.matches(text) == ("</think>" in text)
        if inside.matches(text):
            assert len(read(form, text, THINK)[1]) == calls
    for text in (
        bad,
        f"\n {bad}",
        f"<think>a</think>{bad}",
        f"<think>a</think>\n\n{bad}",
        "<think>a",
        f"<think>a{good}",
    ):
        assert not outside.matches(text) and not inside.matches(text.removeprefix("<think>"))


@pytest.mark.parametrize(
    "before", ["", "Well. ", CALL, CALL.removesuffix("</tool_call>"), "<tool_call>", '<tool_call>\n{"na']
)
def test_a_thought_of_special_tokens_begins_wherever_it_stands(before: str) -> None:
    """Also behind a call without its closing tag, and behind what has begun as one."""
    parser = AnswerParser(HERMES, {"set": {}}, None, [THINK], special=["<think>"])
    calls = int(before.startswith('<tool_call>\n{"name'))
    news = [*parser.feed(before), *parser.feed("<think>"), *parser.feed(f"Or {CALL}?</think>")]
    assert parser.count == calls and not parser.unfinished
    news += [*parser.feed(f"So {CALL}"), *parser.flush()]
    assert parser.count == calls + 1
    assert "".join(one for one in news if isinstance(one, Thought)) == f"Or {CALL}?"
    text = "".join(one for one in news if isinstance(one, str) and not isinstance(one, Thought))
    assert text.replace("\n", "") == f"{'' if calls else before}So".replace("\n", "")
