"""Chat templates: their output, where they are found, what they may not do, and `generate` on messages."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pdkernels import models
from pdkernels.decoding import generate
from pdkernels.models import ChatTemplate
from tests.models.test_tokenizers import json_tokenizer
from tests.models.test_zoo import write
from tests.support.chat_templates import JOINED
from tests.support.checkpoints import QWEN2, random_checkpoint

pytest.importorskip("jinja2", reason="needs the package jinja2: pip install jinja2")

CHATML = """{%- for message in messages %}
    {%- if loop.first and messages[0]['role'] != 'system' %}
        {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
CHAT = [
    {"role": "user", "content": " Hi "},
    {"role": "assistant", "content": "Hello — ü"},
    {"role": "user", "content": "<b>?"},
]
# Further constructs in templates of known models.
TEMPLATES = [
    CHATML,
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}\n  [{{ m.content }}]\n{% endfor %}{{ eos_token }}",
    "{%- set ns = namespace(n=0) %}{%- for m in messages[::-1] %}{%- set ns.n = ns.n + 1 %}{{ ns.n * 2 }}{{ m | tojson }}{% break %}{%- endfor %}",
    "{% if tools is none %}none{% endif %}{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}",
    "{% for m in messages %}{% generation %}{{ m.content.strip().split(' ')[-1] | upper }}{% endgeneration %}{% endfor %}",
    "{{ messages | tojson(indent=2) }}{{ '%' }}{{ 7 % 4 }}{{ '-' * 5 }}",
    "{{ messages | map(attribute='role') | join(', ') }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def test_what_a_template_writes() -> None:
    text = ChatTemplate(CHATML).render(CHAT)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello — ü<|im_end|>\n"
        "<|im_start|>user\n<b>?<|im_end|>\n<|im_start|>assistant\n"
    )
    without = ChatTemplate(CHATML).render(CHAT, add_generation_prompt=False)
    assert text == without + "<|im_start|>assistant\n"
    written = [ChatTemplate(source, TOKENS).render(CHAT, enable_thinking=False) for source in TEMPLATES]
    assert written[1] == "<s>  [ Hi ]\n  [Hello — ü]\n  [<b>?]\n</s>"
    assert written[2] == '2{"role": "user", "content": "<b>?"}'
    assert written[3] == "none<think></think>"
    assert written[4] == "HIÜ<B>?"
    assert written[5].startswith("[\n  {") and written[5].endswith("]%3-----")
    assert written[6] == "user, assistant, user2"
    copied = pickle.loads(pickle.dumps(ChatTemplate(CHATML)))
    assert copied.render(CHAT) == text


@pytest.mark.parametrize("source", TEMPLATES)
def test_transformers_writes_the_same(source: str) -> None:
    chat = pytest.importorskip(
        "transformers.utils.chat_template_utils", reason="compares with transformers where it is installed"
    )
    for prompt in (True, False):
        (theirs,), _ = chat.render_jinja_template(
            [CHAT], chat_template=source, add_generation_prompt=prompt, enable_thinking=False, **TOKENS
        )
        assert ChatTemplate(source, TOKENS).render(CHAT, add_generation_prompt=prompt, enable_thinking=False) == theirs


def called(arguments: Any, **content: Any) -> list[dict[str, Any]]:
    calls = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name in ("a", "b")]
    answered = [{"role": "tool", "content": "rain"}, {"role": "tool", "content": "sun"}]
    return [{"role": "user", "content": "?"}, {"role": "assistant", **content, "tool_calls": calls}, *answered]


@pytest.mark.parametrize("name", JOINED)
@pytest.mark.parametrize("content", [None, "", "Let me see."], ids=repr)
def test_arguments_in_the_form_that_a_template_takes(name: str, content: Any) -> None:
    """Templates that join them as text get JSON text, and see a content that is none, as they were written for."""
    theirs = pytest.importorskip("transformers.utils.chat_template_utils", reason="compares with transformers")
    text, made = '{"city": "Zürich", "n": [1]}', {"city": "Zürich", "n": [1]}
    (expected,), _ = theirs.render_jinja_template(
        [called(text, content=content)], chat_template=JOINED[name], add_generation_prompt=True, **TOKENS
    )
    template = ChatTemplate(JOINED[name], TOKENS)
    assert template.render(called(made, content=content)) == expected
    assert template.render(called(text, content=content)) == expected
    assert expected.count(text) == 2 or (name == "v3" and content is not None)


def test_arguments_as_objects_where_text_does_not_render() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% for c in m.tool_calls %}{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}{% endfor %}{% endfor %}"
    )
    assert template.render(called('{"city": "Rome"}', content="")) == "city=Rome;" * 2
    for arguments in ("no JSON", "[1]", '{"n": 1e400}', '{"n": NaN}'):  # the error is that of the first form
        with pytest.raises(ValueError, match="has no attribute 'items'"):
            template.render(called(arguments, content=""))


@pytest.mark.parametrize(
    "source",
    [
        "{% if m.content is none %}none{% endif %}",
        "{% if m['content'] is not none %}some{% endif %}",
        "{{ m.content }}|",
    ],
)
def test_a_content_that_is_none_without_calls(source: str) -> None:
    """As a field that is not there: since transformers 5.23."""
    source = "{% for m in messages %}" + source + "{% endfor %}"
    without: Any = [{"role": "user"}]
    assert ChatTemplate(source).render([{"role": "user", "content": None}]) == ChatTemplate(source).render(without)


FAULTY = [
    ("{% for %}", "TemplateSyntaxError"),
    ("{{ raise_exception('Roles must alternate!') }}", "TemplateError (Roles must alternate!)"),
    ("{{ messages.nothing.at.all }}", "UndefinedError"),
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    ("{{ messages.append({}) }}", "SecurityError"),
    ("{{ messages[0].update(role='x') }}", "SecurityError"),
    ("{{ cycler.__init__.__globals__.os.system('true') }}", "SecurityError"),
    ("{{ '%99999999999999d' % 1 }}", "MemoryError"),
    ("{% include '/etc/passwd' %}", "TypeError"),
    ("{% for i in range(99999999) %}{% endfor %}", "OverflowError"),
    ("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "write at most 4194304 characters"),
]


@pytest.mark.parametrize(("source", "words"), FAULTY)
def test_faulty_and_hostile_templates(source: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        ChatTemplate(source, where="m.gguf").render(CHAT)
    assert str(caught.value).startswith("pdkernels.models.load: m.gguf must ") and words in str(caught.value)
    assert CHAT[0] == {"role": "user", "content": " Hi "}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fields = {**QWEN2, "vocab_size": 280, "max_position_embeddings": 256}
    write(tmp_path, fields, random_checkpoint(fields, dtype=torch.float32))
    json_tokenizer(tmp_path / "tokenizer.json")
    return tmp_path


def test_where_a_folder_keeps_its_template(folder: Path) -> None:
    def found() -> Any:
        return models.load(folder).tokenizer.chat_template

    assert found() is None
    config: dict[str, Any] = {"eos_token": {"content": "!"}, "bos_token": "?", "unk_token": None}
    config["chat_template"] = "1{{ eos_token }}{{ bos_token }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert found().render(CHAT) == "1!?"
    config["chat_template"] = [{"name": "tool_use", "template": "2"}, {"name": "default", "template": "3"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert found().render(CHAT) == "3"
    (folder / "chat_template.jinja").write_text("4{{ eos_token }}")
    assert found().render(CHAT) == "4!"
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": 5}))
    with pytest.raises(ValueError, match=r"tokenizer_config.json: chat_template must be text, got 5\."):
        found()


def test_generate_takes_messages(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("<|endoftext|>" + CHATML)
    model = models.load(folder)
    text = model.tokenizer.chat_template.render(CHAT)
    ids = model.tokenizer.encode_chat(CHAT)
    assert model.tokenizer.decode(ids) == text.removeprefix("<|endoftext|>") and ids[0] == 0  # found whole, not doubled
    one = generate(model, CHAT, max_new_tokens=5)
    assert torch.equal(one.tokens, generate(model, ids, max_new_tokens=5).tokens)
    both = generate(model, [CHAT, CHAT[:1]], max_new_tokens=5)
    assert len(both.tokens) == 2 and torch.equal(both.tokens[0], one.tokens)
    assert torch.equal(both.tokens[1], generate(model, CHAT[:1], max_new_tokens=5).tokens)


@pytest.mark.parametrize(
    ("messages", "kind", "words"),
    [
        (
            [{"content": "Hi"}],
            ValueError,
            "messages must hold a 'role' and a 'content', got a message with ['content'].",
        ),
        ([{"role": 1}], ValueError, "messages must hold a 'role' and a 'content'"),
        ([], ValueError, "prompt must hold at least one token"),
        (
            [{"role": "user"}, "Hi"],
            TypeError,
            "prompt must be text, a 1-D tensor, a list of ints or messages, got dict.",
        ),
    ],
)
def test_invalid_messages(messages: Any, kind: type[Exception], words: str, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(CHATML)
    with pytest.raises(kind) as caught:
        generate(models.load(folder), messages)
    assert words in str(caught.value)


def test_models_without_a_template(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="prompt must be no messages .the model has no chat template., got a chat"):
        generate(models.load("tiny-code"), CHAT)
    with pytest.raises(ValueError, match=r"encode_chat: messages need a chat template"):
        generate(models.load(folder), CHAT)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"m.gguf needs the optional library `jinja2`. Install it with"):
        ChatTemplate(CHATML, where="m.gguf").render(CHAT)


@pytest.mark.parametrize(
    ("prompt", "kind", "words"),
    [
        ("caf\udce9", ValueError, "text must hold only Unicode characters, got the surrogate"),
        (["ok", "\ud800"], ValueError, "text must hold only Unicode characters, got the surrogate"),
        ([{"role": "user", "content": "\udcff"}], ValueError, "text must hold only Unicode characters"),
        (b"raw", TypeError, "prompt must be text, token ids, messages or a list of these, got bytes"),
        (bytearray(b"raw"), TypeError, "prompt must be text, token ids, messages or a list of these, got bytearray"),
        ("x" * 10**6, ValueError, "prompt must leave room for max_new_tokens"),
        ("", ValueError, "prompt must hold at least one token"),
    ],
)
def test_text_that_no_model_takes(prompt: Any, kind: type[Exception], words: str, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(CHATML)
    model = models.load(folder)
    with pytest.raises(kind, match=f"^pdkernels.*{words}"):
        generate(model, prompt, max_new_tokens=2)
    assert generate(model, "a\0b\ufffd", max_new_tokens=2).text is not None
