"""Whether the ids of two tokenizers mean the same, without reading whole vocabularies."""

from __future__ import annotations

from typing import Any

_PROBE = "def total(x1, items): return 3.14 * x1  # The 2nd word's wording, naïve Größe, 東京, Привет; unbelievably\n\t{'a': [7, 89]}"


def same_tokens(first: Any, second: Any) -> bool:
    """Whether the ids of a short text of many kinds of words, by the `first` tokenizer, are read alike by both.

    Spaces do not count, since some drop the one before a text. Tokenizers that do not encode and decode are not
    compared.

    >>> from pdkernels.models import ByteTokenizer
    >>> same_tokens(ByteTokenizer(), ByteTokenizer(special=3))
    True
    """
    if first is second or not all(
        hasattr(tokenizer, name) for tokenizer in (first, second) for name in ("encode", "decode")
    ):
        return True
    ids = list(first.encode(_PROBE))[1:]  # the first may be one that begins a text, which is named differently
    try:
        return _letters(first.decode(ids)) == _letters(second.decode(ids))
    except (ValueError, IndexError, KeyError, OverflowError):  # an id that the second does not have
        return False


def _letters(text: str) -> str:
    return "".join(text.split())
