"""Log-probabilities of an answer's tokens, as OpenAI writes them."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from pdkernels.decoding import LogProbs

_LEAST = -9999.0


def written(tokenizer: Any) -> Callable[[int], bytes]:
    """What a token writes. One in the middle of a character has bytes that are no text."""
    try:
        table = tokenizer.token_bytes()
    except (AttributeError, NotImplementedError):
        return lambda token: str(tokenizer.decode([token])).encode()
    return lambda token: table[token] if token < len(table) else b""


def shown(token: bytes, prefix: str = "") -> str:
    r"""A token as text; one that is no text has `prefix` and its bytes in hexadecimal.

    >>> shown("né".encode()), shown(b"\xf0\x9f", "bytes:")
    ('né', 'bytes:\\xf0\\x9f')
    """
    try:
        return token.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in token)


def offsets_of(tokens: Sequence[bytes]) -> list[int]:
    r"""The place in the text of the character in which each token begins. Bytes that are no character are one, as decoders
    have it.

    >>> offsets_of(["a\u20ac".encode(), b"\xe2", b"\x82", b"END", b""])
    [0, 2, 2, 3, 6]
    """
    decoder, length, offsets = codecs.getincrementaldecoder("utf-8")("replace"), 0, list[int]()
    for token in tokens:
        offsets.append(length)
        for number in range(len(token)):
            begun = bool(decoder.getstate()[0])
            new = decoder.decode(token[number : number + 1])
            broken = begun and new[:1] == "\ufffd" and (len(new) > 1 or bool(decoder.getstate()[0]))
            if broken and number == 0:  # what had begun ended before this token
                offsets[-1] += 1
            length += len(new)
    return offsets


def _finite(value: float) -> float:
    """A log-probability that JSON has: OpenAI writes -9999 for what is impossible.

    >>> _finite(-1.5), _finite(float("-inf"))
    (-1.5, -9999.0)
    """
    return value if value > _LEAST else _LEAST


def _by_name(values: Sequence[tuple[str, float]]) -> dict[str, float]:
    """The log-probabilities of a place by the names of its tokens, of one name the first.

    >>> _by_name([("a", -0.1), ("", -3.0), ("", -4.0), ("b", -9.0)])
    {'a': -0.1, '': -3.0, 'b': -9.0}
    """
    values_by_name = dict[str, float]()
    for name, value in values:
        values_by_name.setdefault(name, value)
    return values_by_name


def entries(
    chat: bool, tokenizer: Any, ids: list[int], text: str, found: LogProbs, marks: Mapping[int, str] = {}
) -> dict[str, Any]:
    """The field `logprobs` of a choice: of the tokens of its text, without an end token and what a stop string has cut
    off.

    Args:
        chat: whether in the form of chats, else in that of completions.
        tokenizer: says what tokens write.
        ids: all tokens of the answer, which `found` is about.
        text: of the answer, without a prompt.
        marks: what special tokens are in the text.
    """
    bytes_of = written(tokenizer)

    def special_name(token: int) -> str:
        return marks.get(token) or str(getattr(tokenizer, "decode_all", lambda _: "")([token]))

    tokens = [marks[token].encode() if token in marks else bytes_of(token) for token in ids]
    strips = bool(tokens) and getattr(tokenizer, "skips_first_space", False) and not text.startswith(" ")
    if strips:
        tokens[0] = tokens[0].removeprefix(b" ")
    offsets = [at for at in offsets_of(tokens) if at < len(text)]
    while offsets and not tokens[len(offsets) - 1]:
        offsets.pop()
    tokens, prefix = tokens[: len(offsets)], "" if chat else "bytes:"
    names = [
        shown(written_bytes, prefix) or special_name(token) for token, written_bytes in zip(ids, tokens, strict=False)
    ]

    @cache
    def named(token: int, first: bool) -> tuple[str, list[int]]:
        written_bytes = bytes_of(token).removeprefix(b" " if first else b"")
        return shown(written_bytes, prefix) or special_name(token), list(written_bytes)

    values = [*map(_finite, found.tokens.tolist())]
    tops = [
        [(*named(token, strips and place == 0), _finite(value)) for token, value in zip(ids, values, strict=True)]
        for place, (ids, values) in enumerate(
            zip(found.top_ids[: len(tokens)].tolist(), found.top[: len(tokens)].tolist(), strict=True)
        )
    ]
    if chat:

        def entry(text: str, written_bytes: list[int], value: float) -> dict[str, Any]:
            return {"token": text, "logprob": value, "bytes": written_bytes}

        rows = zip(names, tokens, values, tops, strict=False)
        content = [
            {**entry(name, list(token), value), "top_logprobs": [entry(*one) for one in top]}
            for name, token, value, top in rows
        ]
        return {"content": content, "refusal": None}

    return {
        "tokens": names,
        "token_logprobs": values[: len(tokens)],
        "top_logprobs": [
            _by_name([*((top_name, top_value) for top_name, _, top_value in top), (name, value)])
            for name, value, top in zip(names, values, tops, strict=False)
        ],
        "text_offset": offsets,
    }
