"""Calls between tags: read in pieces, typed by their schemas, written again by templates of the same shape, forced."""

from __future__ import annotations

import json
import logging
import random
from typing import Any

import pytest

from pdkernels.models.text.chat import ChatTemplate
from pdkernels.serve.calls import CallForm, form_of, joined
from pdkernels.serve.forms import _calls
from pdkernels.serve.messages import plain
from pdkernels.serve.parser import AnswerParser, Thought
from pdkernels.serve.tagged import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GEMMA4,
    GLM,
    HARMONY_CALLS,
    KIMI,
    QWEN_CODER,
    CallDelta,
    TaggedForm,
)
from pdkernels.serve.thoughts import thoughts_of
from pdkernels.serve.tools import writable
from tests.serve.clients import client_of
from tests.serve.speaking import serve_speaking

pytest.importorskip("openai")
EACH = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}{{ m.content or '' }}"
END = "{% endif %}{% endfor %}{# tools #}"
CALLS = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
FIELDS = "{% for k, v in f.arguments.items() %}"
TEXT = "{{ v if v is string else v | tojson }}"
OPEN, CLOSE = DEEPSEEK_V3.openings[0], DEEPSEEK_V3.closing
DEEP = f"{EACH}{{% if m.tool_calls %}}{OPEN}{CALLS}{DEEPSEEK_V3.begin}@{DEEPSEEK_V3.end}&{{% endfor %}}{CLOSE}{{% endif %}}{END}"
GEMMA_VALUE = (
    '{%- macro shown(v) -%}{%- if v is string -%}<|"|>{{ v }}<|"|>{%- elif v is mapping -%}{ {%- for k, w in v.items() -%}'
    "{{ k }}:{{ shown(w) }}{{ ',' if not loop.last }}{%- endfor -%} }{%- elif v is sequence -%}[{%- for w in v -%}{{ shown(w) }}"
    "{{ ',' if not loop.last }}{%- endfor -%}]{%- else -%}{{ v | tojson }}{%- endif -%}{%- endmacro -%}"
)
TEMPLATES: dict[str, tuple[TaggedForm, str]] = {
    "qwen coder": (QWEN_CODER, f"{EACH}{CALLS}{{{{ '\n' }}}}<tool_call>\n<function={{{{ f.name }}}}>\n{FIELDS}<parameter={{{{ k }}}}>\n{TEXT}\n</parameter>\n{{% endfor %}}</function>\n</tool_call>{{% endfor %}}{END}"),
    "glm": (GLM, f"{EACH}{CALLS}{{{{ '\n' }}}}<tool_call>{{{{ f.name }}}}\n{FIELDS}<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{TEXT}</arg_value>\n{{% endfor %}}</tool_call>{{% endfor %}}{END}"),
    "deepseek v3": (DEEPSEEK_V3, DEEP.replace("@", f"function{DEEPSEEK_V3.name_end}{{{{ f.name }}}}\n```json\n{{{{ f.arguments | tojson }}}}\n```").replace("&", "{{ '\n' if not loop.last }}")),
    "deepseek v3.1": (DEEPSEEK_V31, DEEP.replace("@", f"{{{{ f.name }}}}{DEEPSEEK_V3.name_end}{{{{ f.arguments | tojson }}}}").replace("&", "")),
    "kimi": (KIMI, f"{EACH}{{% if m.tool_calls %}}{KIMI.openings[0]}{CALLS}{KIMI.begin}{{{{ c.id }}}}{KIMI.name_end}{{{{ f.arguments | tojson }}}}{KIMI.end}{{% endfor %}}{KIMI.closing}{{% endif %}}{END}"),
    "gpt-oss": (HARMONY_CALLS, f"{{# <|channel|>analysis #}}{EACH}{CALLS}<|start|>assistant<|channel|>commentary to=functions.{{{{ f.name }}}} <|constrain|>json<|message|>{{{{ f.arguments | tojson }}}}<|call|>{{% endfor %}}{END}"),
    "gemma 4": (GEMMA4, f"{GEMMA_VALUE}{EACH}{CALLS}<|tool_call>call:{{{{ f.name }}}}{{{{ '{{' }}}}{FIELDS}{{{{ k }}}}:{{{{ shown(v) }}}}{{{{ ',' if not loop.last }}}}{{% endfor %}}}}<tool_call|>{{% endfor %}}{END}"),
}  # fmt: skip
SCHEMAS: dict[str, Any] = {
    "get": {
        "type": "object",
        "$defs": {"Unit": {"enum": ["C", "F"]}},
        "properties": {
            "city": {"type": "string"},
            "unit": {"$ref": "#/$defs/Unit"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "list": {"type": "array", "items": {"type": "string"}},
            "deep": {"type": "object"},
        },
        "required": ["city", "days"],
    }
}
SCHEMAS["set"] = SCHEMAS["get"]
VALUES: list[dict[str, Any]] = [
    {},
    {"city": "12", "days": 3},
    {"city": ' "a" \\ b\n\n< c }] ü 漢 </param', "unit": "C", "days": -1, "exact": True, "either": None},
    {"city": "", "days": 0, "list": ["a, b", "c}"], "deep": {"k": [1, {"z": "x"}], "e": {}}, "either": "word"},
]


def read(form: CallForm | None, text: str, chance: random.Random | None = None) -> Any:
    """The thought, the text, the calls, and whether one was cut."""
    thoughts = thoughts_of(
        "<|channel|>analysis" if form is HARMONY_CALLS else "<|channel>thought" if form is GEMMA4 else ""
    )
    parser, news, at = AnswerParser(form, SCHEMAS, thoughts=thoughts), list[Any](), 0
    while at < len(text):
        size = len(text) if chance is None else chance.randint(1, 6)
        news, at = news + parser.feed(text[at : at + size]), at + size
    news += parser.flush()
    calls = joined([one for one in news if isinstance(one, CallDelta)])
    thought = "".join(one for one in news if isinstance(one, Thought))
    said = "".join(one for one in news if isinstance(one, str) and not isinstance(one, Thought))
    return thought, said, [(one["function"]["name"], one["function"]["arguments"]) for one in calls], parser.unfinished


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_writes_is_read_again(name: str) -> None:
    form, source = TEMPLATES[name]
    assert form_of(source) == form
    template, chance = ChatTemplate(source), random.Random(0)
    for _ in range(12):
        calls = [
            (chance.choice(["get", "set"]), chance.choice(VALUES)) for _ in range(1 if form is HARMONY_CALLS else 2)
        ]
        entries = [
            {"id": f"functions.{one}:{at}", "function": {"name": one, "arguments": json.dumps(given)}}
            for at, (one, given) in enumerate(calls)
        ]
        said = chance.choice(["", "Let me see."])
        chat: Any = [{"role": "user", "content": ""}, {"role": "assistant", "content": said, "tool_calls": entries}]
        text = template.render(plain(chat, source), add_generation_prompt=False)
        for splits in (None, chance, chance):
            _, content, found, cut = read(form, text, splits)
            assert content == said and not cut
            assert [(one, json.loads(arguments)) for one, arguments in found] == calls


TEXTS: list[tuple[CallForm | None, str, Any]] = [
    (QWEN_CODER, "so <tool_call>nothing</tool_call> x", ("", "so <tool_call>nothing</tool_call> x", [], False)),
    (QWEN_CODER, "so <tool_call>\n<function=get>\n<parameter=city>\nRo", ("", "so", [("get", '{"city": "Ro')], True)),
    (QWEN_CODER, "<tool_call><function=get><parameter=exact>False</parameter><parameter=o>[1]</parameter></function></tool_call>",
     ("", "", [("get", '{"exact": false, "o": [1]}')], False)),
    (QWEN_CODER, "<think>\nI <tool_call>\n</think>\n\nNo.", ("I <tool_call>", "No.", [], False)),
    (GLM, "a <tool_call>not a call</tool_call> b", ("", "a <tool_call>not a call</tool_call> b", [], False)),
    (GLM, "<tool_call>get<arg_key>city</arg_key><arg_value>1</arg_value></tool_call> ok", ("", " ok", [("get", '{"city": "1"}')], False)),
    (DEEPSEEK_V3, f"x{OPEN}oh", ("", f"x{OPEN}oh", [], False)),
    (DEEPSEEK_V3, f"{OPEN}{DEEPSEEK_V3.begin}get{DEEPSEEK_V3.name_end}{{}}", ("", "", [("get", "{}")], False)),
    (KIMI, f"{KIMI.openings[0]}{KIMI.begin}functions.get:0{KIMI.name_end}{{\"a\"", ("", "", [("get", '{"a"')], True)),
    (HARMONY_CALLS, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>", ("Hm.", "Yes.", [], False)),
    (HARMONY_CALLS, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
     "<|start|>assistant to=functions.get<|channel|>commentary json<|message|>{}<|call|>", ("Hm.", "Wait.", [("get", "{}")], False)),
    (None, "<|channel|>final<|message|>Yes.", ("", "<|channel|>final<|message|>Yes.", [], False)),
    (GEMMA4, "<|channel>thought\nHm.\n<channel|>So.", ("Hm.", "So.", [], False)),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "expected"), TEXTS)
def test_texts_that_are_calls_in_part(form: CallForm | None, text: str, expected: Any) -> None:
    for chance in (None, *map(random.Random, range(20))):
        assert read(form, text, chance) == expected


@pytest.mark.parametrize("name", [name for name, (form, _) in TEMPLATES.items() if form not in (GEMMA4, HARMONY_CALLS)])
def test_the_grammar_of_a_form(name: str) -> None:
    """It has what the template writes, and nothing outside the schemas."""
    form, source = TEMPLATES[name]
    tools = (("get", json.dumps(SCHEMAS["get"])),)
    grammar, template = _calls(form, tools, False, True, None), ChatTemplate(source)

    def written(*given: dict[str, Any]) -> str:
        entries = [
            {"id": f"functions.get:{at}", "function": {"name": "get", "arguments": one}} for at, one in enumerate(given)
        ]
        chat = [{"role": "assistant", "content": "", "tool_calls": entries}]
        return template.render(chat, add_generation_prompt=False).strip("\n")

    assert grammar.matches(written(VALUES[1])) and grammar.matches(written(VALUES[1], VALUES[2]))
    wrong: list[dict[str, Any]] = [{}, {"city": "a"}, {"city": "a", "days": "b"}, {"city": "a", "unit": "K", "days": 3}]
    for given in wrong:
        assert not grammar.matches(written(given)) and not grammar.matches(written(VALUES[1], given))
    assert not grammar.matches("text") and not grammar.matches("")
    free = _calls(form, tools, True, False, None)
    assert free.matches("text") and free.matches("text " + written(VALUES[1])) and not free.matches(written({}))


GET: Any = {"type": "function", "function": {"name": "get", "parameters": SCHEMAS["get"]}}


@pytest.mark.parametrize("name", TEMPLATES)
def test_forms_of_a_server(serve: Any, name: str) -> None:
    """What the model writes, and a call that must come: in the model's form where a grammar can write it."""
    form, source = TEMPLATES[name]
    entries = [{"id": "functions.get:0", "function": {"name": "get", "arguments": VALUES[1]}}]
    chat = [{"role": "assistant", "content": "", "tool_calls": entries}]
    said = "So. " + ChatTemplate(source).render(chat, add_generation_prompt=False)
    shape = " ".join(form.tags) + (" ```json" if form.framed else "") + " functions. analysis"
    address, _ = serve_speaking(serve, said, template=f"tools {shape}")
    client = client_of(address)

    def calls(stream: bool, **more: Any) -> Any:
        asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "?"}], "tools": [GET], "temperature": 0}
        answer = client.chat.completions.create(**asked | more, stream=stream)
        if not stream:
            (choice,) = answer.choices
            return choice.message.content, [one.function for one in choice.message.tool_calls], choice.finish_reason
        choices = [piece.choices[0] for piece in answer]
        content = "".join(choice.delta.content or "" for choice in choices)
        pieces = [one.function for choice in choices for one in choice.delta.tool_calls or []]
        pieces[0].arguments += "".join(one.arguments for one in pieces[1:])
        return content, pieces[:1], choices[-1].finish_reason

    named: Any = {"type": "function", "function": {"name": "get"}}
    for stream in (False, True):
        content, found, reason = calls(stream)
        assert (content, [one.name for one in found], reason) == ("So.", ["get"], "tool_calls")
        assert json.loads(found[0].arguments) == VALUES[1]
        _, found, _ = calls(stream, tool_choice=named, max_tokens=290)
        made = json.loads(found[0].arguments)
        assert made.keys() >= {"city", "days"} and isinstance(made["city"], str) and isinstance(made["days"], int)


def test_a_form_that_is_not_known_is_told_once(serve: Any, caplog: Any) -> None:
    address, _ = serve_speaking(serve, "So.", template="tools of another kind")
    asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "?"}], "tools": [GET], "temperature": 0}
    with caplog.at_level(logging.WARNING, "pdkernels.serve"):
        for _ in range(2):
            assert client_of(address).chat.completions.create(**asked).choices[0].message.content == "So."
    assert [record.message for record in caplog.records if record.name == "pdkernels.serve"] == [
        "the form in which the chat template writes calls of tools is not known here: they stay in the text"
    ]


def test_tags_that_are_special_tokens(serve: Any) -> None:
    """Texts leave them out, so no grammar writes them; calls are read nevertheless."""
    tokenizers = pytest.importorskip("tokenizers")
    import torch

    import pdkernels as pd
    from pdkernels.models.text.tokenizers import JsonTokenizer

    tags = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>", "<|return|>"]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens([tokenizers.AddedToken(tag, special=True) for tag in tags])
    ends = (inner.token_to_id("<|call|>"), inner.token_to_id("<|return|>"))
    tokenizer = JsonTokenizer.of(inner, "words", end_tokens=ends)
    tokenizer.chat_template = ChatTemplate("?{# tools <|channel|>analysis functions. reasoning_effort #}")
    assert not writable(HARMONY_CALLS, tokenizer) and writable(QWEN_CODER, tokenizer)
    said = (
        "<|channel|>analysis<|message|>Hm, ü.<|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"city": "Rome"}<|call|>'
    )
    table = 9 * torch.nn.functional.one_hot(torch.tensor([*inner.encode(said).ids, *[ends[0]] * 300]), 263).float()
    model = pd.models.from_callable(
        lambda tokens: table[: tokens.shape[1]].expand(len(tokens), -1, -1),
        vocab_size=263, end_tokens=list(ends), tokenizer=tokenizer, max_positions=400,
    )  # fmt: skip
    address, _ = serve(model=model, engine={"max_new_tokens": 200, "max_prompt_tokens": 199})
    asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "?"}], "tools": [GET], "temperature": 0}
    for more in ({}, {"reasoning_effort": "low"}):
        (choice,) = client_of(address).chat.completions.create(**asked, **more).choices
        assert (choice.message.reasoning_content, choice.message.content) == ("Hm, ü.", "Wait.")
        (call,) = choice.message.tool_calls
        assert (call.function.arguments, choice.finish_reason) == ('{"city": "Rome"}', "tool_calls")
    likely = client_of(address).chat.completions.create(**asked, logprobs=True).choices[0].logprobs
    assert "".join(one.token for one in likely.content).startswith("<|channel|>analysis<|message|>Hm, ")
