"""Tokenizer files that ask for all memory and time, and files with random faults: right, or one sentence, within bounds."""

from __future__ import annotations

import copy
import json
import random
import resource
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers", reason="needs the package tokenizers: pip install tokenizers")
import tokenizers

from pdkernels.models import JsonTokenizer
from pdkernels.models.text.tokenizer_bounds import check_pattern
from pdkernels.models.text.tokenizer_files import read_tokenizer_files
from tests.models.test_tokenizers import json_tokenizer

TEXT = "def read(self):\n    return 'aaaa' * 12 <|endoftext|> é日本"


@pytest.fixture(scope="module")
def good(tmp_path_factory: Any) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("good") / "tokenizer.json"
    json_tokenizer(path)
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def replace(pattern: Any, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


TEN = replace({"String": "a"}, "a" * 10)
SPECIAL = {"id": "<|endoftext|>", "type_id": 0}
TEMPLATE: dict[str, Any] = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
BOMBS: dict[str, tuple[dict[str, Any], str]] = {
    "replacements": ({"normalizer": {"type": "Sequence", "normalizers": [TEN] * 12}}, "normalizer must make at most 32 characters of one"),
    "one": ({"normalizer": replace({"String": "a"}, "b" * 40)}, "normalizer must make at most 32 characters"),
    "between": ({"normalizer": replace({"Regex": ""}, "b" * 40)}, "normalizer must make at most 32 characters"),
    "nested": ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [TEN] * 2}] * 2}}, "normalizer must make"),
    "long": ({"normalizer": replace({"String": "a" * 10**4}, "b")}, "pattern must have at most 4096 characters"),
    "prepend": ({"normalizer": {"type": "Prepend", "prepend": "b" * 10**5}}, "prepend must have at most 256 characters"),
    "many": ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 10**4}}, "normalizer must have at most 64 parts"),
    "decoders": ({"decoder": {"type": "Sequence", "decoders": [TEN] * 12}}, "decoder must make at most 32 characters of one"),
    "template": ({"post_processor": {**TEMPLATE, "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 10**5}}, "single must have at most 64 pieces"),
    "ids": (
        {"post_processor": {**TEMPLATE, "single": [], "special_tokens": {"x": {"id": "x", "ids": [0] * 10**5, "tokens": ["x"]}}}},
        "special_tokens must have at most 64 ids each",
    ),
    "exponential": ({"pre_tokenizer": split(r"(a+)+b")}, "pattern must have no repetitions of what varies"),
    "alternatives": ({"pre_tokenizer": split(r"(?:a|aa)*b")}, "pattern must have no repetitions of what varies"),
    "counts": ({"pre_tokenizer": split(r"(?:(?:a{100}){100}){100}")}, "pattern must have at most 1000 counted repetitions"),
    "polynomial": ({"pre_tokenizer": split(r"\s*\s*\s*\s*\s*\s*x")}, "pattern must have at most 4 unbounded repetitions in a row"),
    "calls": ({"normalizer": replace({"Regex": r"(?<n>a\g<n>?)"}, "")}, "pattern must have no"),
    "added": ({"added_tokens": [{"id": i, "content": f"<{i}>"} for i in range(140000)]}, "added_tokens must be at most 131072"),
    "vocabulary": ({"model": {"type": "WordLevel", "vocab": {"a" * 10**5: 0}, "unk_token": "a"}}, "vocab must have tokens of at most 4096 characters"),
    "prefix": ({"model": {"type": "BPE", "vocab": {}, "merges": [], "continuing_subword_prefix": "#" * 10**5}}, "continuing_subword_prefix must have at most 256"),
    "dropout": ({"model": {"type": "BPE", "vocab": {}, "merges": [], "dropout": 0.5}}, "dropout must be 0"),
    "charsmap": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA" * 400}}, "precompiled_charsmap must make at most 256 bytes of a character"),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(name: str, good: dict[str, Any], tmp_path: Path) -> None:
    changes, words = BOMBS[name]
    if name == "charsmap":
        changes = {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAA" + "QUFB" * 400 + "QQ=="}}
    (tmp_path / "tokenizer.json").write_text(json.dumps({**good, **changes}))
    started = time.process_time()
    with pytest.raises(
        (ValueError, NotImplementedError), match=rf"^pdkernels\.models\.load: tokenizer\.json: .*{words}"
    ):
        JsonTokenizer(tmp_path / "tokenizer.json")
    assert time.process_time() - started < 2


def test_padding_and_truncation_are_left_out(good: dict[str, Any], tmp_path: Path) -> None:
    padding = {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": 10**9, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}  # fmt: skip
    truncation = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps({**good, "padding": padding, "truncation": truncation}))
    (tmp_path / "plain.json").write_text(json.dumps(good))
    made = JsonTokenizer(tmp_path / "tokenizer.json")
    assert made.encode(TEXT) == JsonTokenizer(tmp_path / "plain.json").encode(TEXT) and len(made.encode(TEXT)) > 20


def test_a_field_named_twice(good: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"normalizer": null, ' + json.dumps(good)[1:])
    with pytest.raises(ValueError, match=r"tokenizer\.json must name each field once"):
        JsonTokenizer(tmp_path / "tokenizer.json")


PUBLISHED = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama 3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "o200k": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "deepseek": r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "kimi": r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}",
    "groups of three": r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))",
    "superbpe": r"\p{N}(?=(\p{N}{3})+(?!\p{N}))|[^\r\n]+",
    "bloom": r" ?[^(\s|[.,!?\u2026\u3002])]+",
    "falcon": r"[0-9][0-9][0-9]",
    "cjk": "[\u4e00-\u9fa5\u3040-\u309f]+",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_patterns_pass(name: str) -> None:
    check_pattern(PUBLISHED[name], name)
    tokenizers.Regex(PUBLISHED[name])


# ---------------------------------------------------------------------------------------------------------- fuzzing

VALUES: list[Any] = [None, True, 0, -1, 2**31, 2**70, 1.5, float("nan"), "", "a", "\ud800", "\0", "<|endoftext|>", [], {}, [None], {"a": 1}, "a" * 300, [TEN] * 9, TEN]  # fmt: skip


def mutate(draw: random.Random, value: Any) -> Any:
    """The value with one random fault somewhere inside."""
    if draw.random() < 0.25 or not isinstance(value, (dict, list)) or not value:
        return copy.deepcopy(draw.choice(VALUES))
    if isinstance(value, dict):
        name = draw.choice(list(value))
        if draw.random() < 0.1:
            return {key: item for key, item in value.items() if key != name}
        if draw.random() < 0.1:
            return {**value, draw.choice(["x", "type", "content", "normalizers"]): copy.deepcopy(draw.choice(VALUES))}
        return {**value, name: mutate(draw, value[name])}
    at = draw.randrange(len(value))
    return [*value[:at], mutate(draw, value[at]), *value[at + draw.randrange(2) :]]


CONFIG: dict[str, Any] = {
    "tokenizer_class": "LlamaTokenizerFast",
    "bos_token": "<s>",
    "eos_token": {"content": "<|endoftext|>", "special": True, "lstrip": False},
    "additional_special_tokens": ["<a>", {"content": "<b>"}],
    "extra_special_tokens": {"image_token": "<img>"},
    "added_tokens_decoder": {"0": {"content": "<|endoftext|>", "special": True}, "280": {"content": "<c>"}},
    "clean_up_tokenization_spaces": False,
    "split_special_tokens": False,
    "model_max_length": 10,
    "fast_tokenizer_files": ["tokenizer.json"],
    "chat_template": [{"name": "default", "template": "{{ messages }}"}, {"name": "tool_use", "template": "x"}],
}
MAP = {"bos_token": "<s>", "pad_token": {"content": "<p>", "normalized": True}, "extra_special_tokens": ["<q>"]}


def attempts(count: int, seed: int, good: dict[str, Any], folder: Path) -> int:
    """How many of the mutated files were read; every other one must be refused by us, and all within bounds."""
    draw, read = random.Random(seed), 0
    parts = {
        **good,
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, replace({"String": "x"}, "yy")]},
    }
    parts["post_processor"] = {**TEMPLATE, "single": [{"Sequence": {"id": "A", "type_id": 0}}]}
    (folder / "added_tokens.json").write_text("{}")
    for _ in range(count):
        which = draw.randrange(5)
        skeleton = {
            **parts,
            "model": {**parts["model"], "vocab": dict(list(parts["model"]["vocab"].items())[:60]), "merges": []},
        }
        files = {"tokenizer.json": skeleton, "tokenizer_config.json": CONFIG, "special_tokens_map.json": MAP, "added_tokens.json": {"<z>": 290}}  # fmt: skip
        names = list(files)
        for _ in range(draw.randrange(1, 3)):
            name = names[min(which, 3)]
            files[name] = mutate(draw, files[name])
        if draw.random() < 0.5:
            files["tokenizer_config.json"] = mutate(
                draw, {k: v for k, v in CONFIG.items() if k != "added_tokens_decoder"}
            )
        for name, content in files.items():
            text = json.dumps(content)
            if draw.random() < 0.05:
                at = draw.randrange(len(text) + 1)
                text = text[:at] + draw.choice(["", "\\", "}", '"', "[" * 2000, "\x01"]) + text[at + 1 :]
            (folder / name).write_text(text)
        started, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            made = JsonTokenizer(folder / "tokenizer.json")
            made.follow_(read_tokenizer_files(folder, "llama", made.byte_level, made.pad_token))
            ids = made.encode(TEXT)
            assert len(made.decode_all(ids)) < 10**5
            if made.chat_template is not None:
                made.chat_template.chosen(tools=[])
            read += 1
        except (ValueError, TypeError, NotImplementedError) as error:
            assert str(error).startswith("pdkernels."), repr(error)
            assert len(str(error)) < 1500
        assert time.process_time() - started < 2
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
    return read


def test_random_faults(good: dict[str, Any], tmp_path: Path) -> None:
    assert 20 < attempts(150, 0, good, tmp_path) < 140


@pytest.mark.slow
def test_many_random_faults(good: dict[str, Any], tmp_path: Path) -> None:
    assert 2000 < attempts(20000, 1, good, tmp_path) < 19000
