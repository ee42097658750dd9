"""The bytes that each token of a tokenizer.json writes, for tokenizers whose texts are these bytes one after the
other."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from pdkernels._validation import message

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@cache
def _byte_level() -> dict[str, int]:
    """The characters that stand for bytes in GPT-2's vocabulary: printable ones for themselves, others from U+0100
    on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(unprintable)}


def _decoders(tokenizer: Any) -> list[dict[str, Any]]:
    """The steps of its decoder."""
    if tokenizer.decoder is None:
        return []
    state = json.loads(tokenizer.decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    return steps


def skips_first_space(tokenizer: Any) -> bool:
    """Whether decoding leaves out a space at the beginning of a text."""
    for step in _decoders(tokenizer):
        if step["type"] == "Strip" and step.get("content") == " " and step.get("start") == 1:
            return True
        if step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            return True
    return False


def token_bytes(tokenizer: Any, name: str) -> list[bytes]:
    """What each id writes; nothing for special tokens. Errors name `name`."""
    steps = _decoders(tokenizer)
    kinds = [step["type"] for step in steps]
    added = tokenizer.get_added_tokens_decoder()
    tokens = [b""] * tokenizer.get_vocab_size()
    level = "ByteLevel" in kinds
    supported = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    spaces = [step for step in steps if step["type"] in ("Replace", "Metaspace")]
    simple = all(
        step["type"] == "Metaspace" or (step.get("pattern") == {"String": "\u2581"} and step.get("content") == " ")
        for step in spaces
    )
    ends = any(step["type"] == "Strip" and step.get("stop", 0) != 0 for step in steps)
    if not level and not (set(kinds) <= supported and spaces and simple and not ends):
        actual = " and ".join(kinds) or "no decoder"
        raise NotImplementedError(
            message("models.load", f"{name}: decoder", "be ByteLevel or that of SentencePiece", actual)
        )
    fallback, table = "ByteFallback" in kinds, _byte_level()
    for text, token in tokenizer.get_vocab(with_added_tokens=False).items():
        if token >= len(tokens):
            tokens += [b""] * (token + 1 - len(tokens))
        if level:
            if all(character in table for character in text):
                tokens[token] = bytes(table[character] for character in text)
        elif fallback and (match := _BYTE.fullmatch(text)):
            tokens[token] = bytes([int(match[1], 16)])
        else:
            tokens[token] = text.replace("\u2581", " ").encode()
    for token, entry in added.items():
        if token < len(tokens):
            tokens[token] = b"" if entry.special else entry.content.encode()
    return tokens


def split_runs(tokens: list[str]) -> list[str]:
    """Tokens with an empty one around each byte token that is no part of a UTF-8 character, so that a decoder which
    takes a run of them as a whole spares the characters beside it.

    >>> split_runs(["<0xC3>", "<0xA9>", "<0xC3>", "a"])
    ['<0xC3>', '<0xA9>', '', '<0xC3>', '', 'a']
    """
    found, at = list[str](), 0
    values = [int(match[1], 16) if (match := _BYTE.fullmatch(token)) else None for token in tokens]
    while at < len(tokens):
        length = _character_length(values[at : at + 4])
        if values[at] is None or length:
            found += tokens[at : at + max(length, 1)]
        else:
            found += ["", tokens[at], ""]
        at += max(length, 1)
    return found


def _character_length(values: list[int | None]) -> int:
    """Bytes of the UTF-8 character with which `values` begin; 0: they begin with none."""
    first = values[0]
    ends = (0x80, 1), (0xC2, 0), (0xE0, 2), (0xF0, 3), (0xF5, 4), (0x100, 0)
    length = 0 if first is None else next(length for end, length in ends if first < end)
    character = [value for value in values[:length] if value is not None]
    try:
        return length if len(character) == length and bytes(character).decode() else 0
    except UnicodeDecodeError:
        return 0
