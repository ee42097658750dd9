"""Texts of byte tokens that stop inside a character, against Python's own UTF-8 and the decoder on whole texts."""

from __future__ import annotations

import random
from typing import Any

import pytest

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
from tokenizers import decoders, models  # noqa: E402

from pdkernels.models.text.tokenizers import JsonTokenizer  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer() -> JsonTokenizer:
    vocabulary = {"<s>": 0, "▁": 1, "a": 2, "▁b": 3} | {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    made.add_special_tokens(["<s>"])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    return JsonTokenizer.of(made, "tokenizer.json")


def of_bytes(data: bytes) -> list[int]:
    return [4 + byte for byte in data]


def test_a_cut_character_spares_those_before_it(tokenizer: JsonTokenizer) -> None:
    ids = of_bytes("古€".encode())
    assert [tokenizer.decode(ids[:n]) for n in (3, 4, 5, 6)] == ["古", "古\ufffd", "古\ufffd\ufffd", "古€"]
    assert tokenizer.decode([0, 1, 2, *ids[:4], 3]) == "a古\ufffd b"
    assert tokenizer.decode_all([0, *ids[:4]]) == "<s>古\ufffd"


def test_a_stream_is_the_text(tokenizer: JsonTokenizer) -> None:
    """One replacement for each byte that is no part of a character, as sentencepiece has it; nothing that was said changes."""
    choose = random.Random(0)
    for _ in range(300):
        parts = [choose.choice(["古", "é", "😀", "a"]).encode() for _ in range(6)]
        parts[choose.randrange(6)] = choose.choice([b"\xe2\x82", b"\xf0", b"\x80", b"\xff"])
        expected = "".join(
            part.decode() if part.isascii() or part[0] in b"\xc3\xe5" or len(part) == 4 else "\ufffd" * len(part)
            for part in parts
        )
        ids = of_bytes(b"".join(parts))
        stream = tokenizer.incremental()
        pieces = [stream.feed([token]) for token in ids]
        assert tokenizer.decode(ids) == expected
        assert "".join(pieces) + stream.flush() == expected


def test_a_long_text_is_encoded_while_others_run(tokenizer: JsonTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's `encode` holds Python's lock, for seconds with a megabyte; its call for several texts does not."""
    library, called = tokenizer._tokenizer, list[str]()

    class Noting:
        def __getattr__(self, name: str) -> Any:
            called.append(name)
            return getattr(library, name)

    monkeypatch.setattr(tokenizer, "_tokenizer", Noting())
    for text in ("ab", "ab" * 50_000):
        for special in (True, False):
            called.clear()
            ids = tokenizer.encode(text, add_special_tokens=special)
            assert ids == library.encode(text, add_special_tokens=special).ids
            assert called == ["encode_batch" if len(text) > 2 else "encode"]
