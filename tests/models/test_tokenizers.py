from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pdkernels as pd
from pdkernels.models import ByteTokenizer, JsonTokenizer

TOKENIZER = ByteTokenizer()


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_there_and_back(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert ids == list(text.encode())
    assert TOKENIZER.decode([*ids, TOKENIZER.end_token]) == text


@given(st.lists(st.integers(0, 256)), st.data())
def test_incremental_decoding_adds_up(ids: list[int], data: st.DataObject) -> None:
    stream, text, at = TOKENIZER.incremental(), "", 0
    while at < len(ids):
        size = data.draw(st.integers(1, 4))
        text += stream.feed(ids[at : at + size])
        at += size
    text += stream.flush()
    assert text == TOKENIZER.decode(ids)
    assert text == bytes(i for i in ids if i != 256).decode("utf-8", errors="replace")


def test_a_character_waits_for_its_last_byte() -> None:
    stream = TOKENIZER.incremental()
    assert [stream.feed([byte]) for byte in "→x".encode()] == ["", "", "→", "x"]
    assert stream.feed([0xE2]) == "" and stream.flush() == "\ufffd"


def test_sizes() -> None:
    assert (TOKENIZER.vocab_size, TOKENIZER.end_tokens) == (257, (256,))


def test_byte_errors() -> None:
    with pytest.raises(ValueError, match=r"pdkernels\.ByteTokenizer\.decode: ids must lie in \[0, 257\), got 257\."):
        TOKENIZER.decode([257])
    with pytest.raises(ValueError, match="got -1"):
        TOKENIZER.decode([-1])
    with pytest.raises(TypeError, match=r"pdkernels\.ByteTokenizer\.encode: text must be a str, got bytes\."):
        TOKENIZER.encode(b"x")
    with pytest.raises(
        ValueError, match=r"pdkernels\.ByteTokenizer\.encode: text must hold only Unicode characters, got the surrogate"
    ):
        TOKENIZER.encode("caf\udce9")  # how a shell passes a byte that is not UTF-8


def test_missing_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"needs the optional library `tokenizers`. Install it with"):
        JsonTokenizer(tmp_path / "tokenizer.json")


def json_tokenizer(path: Path) -> JsonTokenizer:
    """A byte-level tokenizer.json with a few merges, as those of Qwen2 are."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["def read(self):\n    return self\n"] * 4, trainer)
    made.save(str(path))
    return JsonTokenizer(path, end_tokens=(0,))


def test_json_tokenizer(tmp_path: Path) -> None:
    tokenizer = json_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.end_tokens == (0,) and tokenizer.vocab_size <= 280
    text = "def read(ü):\n    return '→' \n\nself"
    ids = tokenizer.encode(text)
    assert len(ids) < len(text.encode()) and tokenizer.decode(ids) == text
    stream = tokenizer.incremental()
    pieces = [stream.feed([i]) for i in ids]
    assert "".join(pieces) + stream.flush() == text
    assert not any("\ufffd" in piece for piece in pieces)
    with pytest.raises(TypeError, match="text must be a str, got int"):
        tokenizer.encode(3)
    with pytest.raises(ValueError, match=r"pdkernels\.JsonTokenizer\.encode: text must hold only Unicode characters"):
        tokenizer.encode("\ud83d")


def test_long_texts_are_decoded_while_others_run(tmp_path: Path) -> None:
    """By the library's call for several, which gives up Python's lock; and the table of all tokens is made once."""
    tokenizer, calls = json_tokenizer(tmp_path / "tokenizer.json"), list[str]()
    inner = tokenizer._tokenizer

    class Counted:
        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            return getattr(inner, name)

    ids = tokenizer.encode("self ü\n" * 3000)
    tokenizer._tokenizer = Counted()
    assert tokenizer.decode(ids) == "self ü\n" * 3000 and tokenizer.decode(ids[:5]) == inner.decode(ids[:5])
    assert calls == ["decode_batch", "decode"]
    assert tokenizer.token_bytes() is tokenizer.token_bytes()


def test_special_ids_after_the_bytes_write_nothing() -> None:
    """A model that plans may write its control tokens with any method."""
    assert ByteTokenizer(special=2).decode([110, 257, 258, 256, 120]) == "nx"
    with pytest.raises(ValueError, match=r"lie in \[0, 259\), got 259"):
        ByteTokenizer(special=2).decode([259])
    model = pd.models.load("tiny-planned")
    result = pd.decoding.generate(model, "*p;4x;3d;3q;pr;pw;", "autoregressive", max_new_tokens=60)
    assert int(result.tokens.max()) > 257 and "pw" in result.text
