"""Chats and tokenizers of folders against `AutoTokenizer.from_pretrained`: the same text and ids, or an error in both."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("jinja2")
pytest.importorskip("transformers", reason="compares with the tokenizers of transformers 5", minversion="5.20")
pytest.importorskip("tokenizers")
import tokenizers
from transformers import AutoTokenizer

from pdkernels.models import JsonTokenizer
from pdkernels.models.text.tokenizer_files import read_tokenizer_files
from tests.support import chat_templates

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>"]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds ü & <b>", "parameters": {"type": "object", "properties": {}}},
    }
]


def write(folder: Path, config: Any = None, **files: Any) -> Path:
    """A byte-level tokenizer.json and the files beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL[:4],
        show_progress=False,
    )
    made.train_from_iterator(["system user assistant <|im_start|> content\n"] * 4, trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 0)])
    made.enable_padding(length=40, pad_token="</s>", pad_id=1)
    made.enable_truncation(5)
    made.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config})
        )
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def both(folder: Path) -> tuple[JsonTokenizer, Any]:
    ours = JsonTokenizer(folder / "tokenizer.json")
    ours.follow_(read_tokenizer_files(folder, "llama", ours.byte_level, ours.pad_token))
    return ours, AutoTokenizer.from_pretrained(folder)


def same(ours: JsonTokenizer, theirs: Any, chat: Any, **options: Any) -> bool:
    """Asserts equal texts and ids, or two errors; returns whether there was a text."""
    try:
        text = theirs.apply_chat_template(chat, tokenize=False, **options)
    except Exception:
        with pytest.raises((ValueError, TypeError), match="^pdkernels"):
            ours.encode_chat(chat, **options)
        return False
    assert ours.chat_template is not None and ours.chat_template.render(chat, **options) == text
    ids = theirs.apply_chat_template(chat, tokenize=True, return_dict=False, **options)
    assert ours.encode_chat(chat, **options) == ids
    assert ours.encode(text) == theirs.encode(text)
    assert ours.encode(text, add_special_tokens=False) == ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode_all(ids) == theirs.decode(ids)
    return True


TEXT = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.sampled_from(["", " x ", "\n", "<think>\nwhy\n</think>\n\nso", "<|im_end|>", "<s>", "{{ 1 }}", "</s> <b>"]),
)
CALL = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": TEXT, "arguments": st.dictionaries(TEXT, st.integers(), max_size=2)})}
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "user", "assistant", "tool"]), "content": TEXT},
    optional={
        "tool_calls": st.lists(CALL, min_size=1, max_size=2),
        "reasoning_content": TEXT,
        "thinking": st.one_of(st.none(), TEXT),
        "name": st.none(),
    },
)
ALTERNATING = st.lists(TEXT, min_size=1, max_size=5).map(
    lambda texts: [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
)
CHAT = st.tuples(
    st.lists(st.fixed_dictionaries({"role": st.just("system"), "content": TEXT}), max_size=1),
    st.one_of(ALTERNATING, st.lists(MESSAGE, min_size=1, max_size=5)),
).map(lambda parts: parts[0] + parts[1])
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "tools": st.sampled_from([None, [], TOOLS]),
        "documents": st.sampled_from([None, [{"title": "a b", "text": "long text " * 4}]]),
        "enable_thinking": st.booleans(),
        "custom_tools": st.just(TOOLS),
        "bos_token": st.just("<other>"),
    },
)
ENDING = st.sampled_from(
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
    ]
)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: Any) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("chats")
    named = [{"name": name, "template": source} for name, source in chat_templates.NAMED.items()]
    sources: dict[str, Any] = {**chat_templates.ALL, "named": named}
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True, "__type": "AddedToken"}}
    more = {"additional_special_tokens": SPECIAL[4:]}
    return {
        name: both(write(root / f"m{i}", {"chat_template": source, **tokens, **more}))
        for i, (name, source) in enumerate(sources.items())
    }


SETTINGS = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@settings(SETTINGS, max_examples=20)
@given(chat=CHAT, options=OPTIONS, ending=ENDING, data=st.data())
def test_random_chats(pairs: dict[str, Any], chat: Any, options: Any, ending: Any, data: Any) -> None:
    for pair in pairs.values():
        same(*pair, chat, **options, **ending)


@pytest.mark.slow
@settings(SETTINGS, max_examples=1500)
@given(chat=CHAT, options=OPTIONS, ending=ENDING)
def test_many_random_chats(pairs: dict[str, Any], chat: Any, options: Any, ending: Any) -> None:
    for pair in pairs.values():
        same(*pair, chat, **options, **ending)


CONVERSATION = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": " Well "},
    {"role": "user", "content": "So?"},
]


def test_named_templates(pairs: dict[str, Any]) -> None:
    ours, theirs = pairs["named"]
    texts = []
    for options in (
        {},
        {"tools": TOOLS},
        {"tools": []},
        {"documents": []},
        {"chat_template": "rag", "documents": [{"title": "t", "text": "u"}]},
    ):
        assert same(ours, theirs, CONVERSATION, add_generation_prompt=True, **options)
        texts.append(ours.chat_template.render(CONVERSATION, **options))
    assert "<tools>" not in texts[0] and "<tools>{" in texts[1] and "<tools></tools>" in texts[2]
    assert texts[4].startswith("T: u\n")
    with pytest.raises(ValueError, match=r"chat_template must be one of default, rag, tool_use, got 'other'\."):
        ours.encode_chat(CONVERSATION, chat_template="other")


T = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}|{{ image_token }}|{{ cls_token }}"
FOLDERS: dict[str, dict[str, Any]] = {
    "no config": {"chat_template_DOT_jinja": T},
    "config": {"config": {"chat_template": T, "bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"}, "image_token": "<img>"}},
    "map alone": {"config": {"chat_template": T}, "special_tokens_map_DOT_json": {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": "</s>"}},
    "map wins": {"config": {"chat_template": T, "bos_token": "<x>"}, "special_tokens_map_DOT_json": {"bos_token": "<s>", "additional_special_tokens": ["content"]}},
    "map left alone": {"config": {"chat_template": T, "added_tokens_decoder": {"0": {"content": "<s>", "special": True}}}, "special_tokens_map_DOT_json": {"bos_token": "<s>"}},
    "decoder": {"config": {"chat_template": T, "added_tokens_decoder": {"7": {"content": "system", "lstrip": True, "rstrip": False, "normalized": False, "single_word": False, "special": False}, "300": {"content": "<new>", "special": True}}, "unk_token": "user"}},
    "added": {"config": {"chat_template": T, "unk_token": "<u>"}, "added_tokens_DOT_json": {"<u>": 301, "tent": 302}},
    "extra names": {"config": {"chat_template": T, "extra_special_tokens": {"image_token": "<img>", "cls_token": "<c>"}}},
    "extra list": {"config": {"chat_template": T, "extra_special_tokens": ["user", "<q>"], "additional_special_tokens": ["sys"]}},
    "split": {"config": {"chat_template": T, "split_special_tokens": True, "bos_token": "<s>"}},
    "ignored flags": {"config": {"chat_template": T, "add_bos_token": False, "add_eos_token": True, "add_prefix_space": True, "legacy": False, "clean_up_tokenization_spaces": True, "model_max_length": 4, "padding_side": "left"}},
    "llama class": {"config": {"chat_template": T, "tokenizer_class": "LlamaTokenizerFast"}},
    "gpt2 class": {"config": {"chat_template": T, "tokenizer_class": "GPT2Tokenizer"}},
    "file wins": {"config": {"chat_template": "other"}, "chat_template_DOT_jinja": T},
    "more files": {"config": {"chat_template": "other"}, "chat_template_DOT_jinja": T, "additional_chat_templates__tool_use_DOT_jinja": "tools" + T},
    "more files alone": {"config": {"chat_template": "other"}, "additional_chat_templates__tool_use_DOT_jinja": "tools" + T},
    "named without default": {"config": {"chat_template": [{"name": "tool_use", "template": "tools" + T}]}},
    "empty template": {"config": {"chat_template": ""}},
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_folders(name: str, tmp_path: Path) -> None:
    ours, theirs = both(write(tmp_path, **FOLDERS[name]))
    for options in ({}, {"tools": TOOLS}):
        rendered = same(ours, theirs, CONVERSATION, **options)
        assert rendered or "alone" in name or "without" in name
    for text in ("<s>system user</s> tent<img> <q>sys", "  a , b . can 't <new>\n<|im_start|>user", "é日本 content"):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids and ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode_all(ids) == theirs.decode(ids)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)


def test_a_template_of_a_processor_and_what_is_refused(tmp_path: Path) -> None:
    def read(**files: Any) -> JsonTokenizer:
        folder = write(tmp_path / str(len(list(tmp_path.iterdir()))), **files)
        made = JsonTokenizer(folder / "tokenizer.json")
        made.follow_(read_tokenizer_files(folder, "llama", made.byte_level))
        return made

    template = read(chat_template_DOT_json={"chat_template": "x{{ messages[0].content }}"}).chat_template
    assert template is not None and template.render(CONVERSATION) == "xHi"
    for config, words in (
        ({"fast_tokenizer_files": ["tokenizer.4.0.0.json"]}, "fast_tokenizer_files must name tokenizer.json alone"),
        ({"chat_template": [{"name": 3}]}, "chat_template must be a list of templates with names"),
        ({"chat_template": {"a": 5}}, "chat_template must be text, got 5"),
        ({"bos_token": 5}, "bos_token must be a token, got 5"),
        ({"extra_special_tokens": "x"}, "extra_special_tokens must be a list of tokens"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, "be named by an id"),
        ({"added_tokens_decoder": {"1": {"content": 3}}}, "be an object with a content"),
        ({"split_special_tokens": "yes"}, "split_special_tokens must be true or false"),
        (
            {"clean_up_tokenization_spaces": True, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True},
            "clean_up_tokenization_spaces must be false for BPE",
        ),
    ):  # fmt: skip
        with pytest.raises((ValueError, NotImplementedError), match=f"^pdkernels.models.load: .*{words}"):
            read(config=config)


def test_today(pairs: dict[str, Any]) -> None:
    ours, _ = pairs["llama 3.1"]
    assert datetime.now().strftime("%b %Y") in ours.chat_template.render(CONVERSATION)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tools": [print]}, "tools must be a list of JSON objects"),
        ({"documents": ["a"]}, "documents must be a list of JSON objects"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt must be False"),
        ({"continue_final_message": "other"}, "continue_final_message must name a field of the last message"),
        ({"chat_template": "x"}, "chat_template must be None where a checkpoint has one template"),
    ],
)
def test_arguments_that_are_refused(options: Any, words: str, pairs: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^pdkernels.ChatTemplate.render: {words}"):
        pairs["smollm2"][0].encode_chat(CONVERSATION, **options)
