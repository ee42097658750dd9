"""The bytes that each token of a model writes."""

from __future__ import annotations

from typing import Any, NamedTuple

from pdkernels._validation import sentence
from pdkernels.grammar.language import OP


class Vocabulary(NamedTuple):
    """The tokens of a model."""

    tokens: list[bytes]
    """Of each id; empty for one that writes no text, such as a special token."""
    skips_space: bool
    """Whether a space at the beginning of a text is not part of it."""


def vocabulary_of(model: Any) -> Vocabulary:
    """The vocabulary of a model, whose tokenizer must know the bytes of its tokens.

    Raises:
        NotImplementedError: a tokenizer whose texts are not the bytes of its tokens one after the other.
    """
    tokenizer = model.tokenizer
    if tokenizer is None or not hasattr(tokenizer, "token_bytes"):
        name = (
            "no tokenizer" if tokenizer is None else f"the tokenizer {type(tokenizer).__name__} without token_bytes()"
        )
        fault = f"a grammar needs the bytes of the tokens, and the model has {name}"
        raise NotImplementedError(sentence(OP, fault, "See docs/structured_output.md."))
    tokens, size = list(tokenizer.token_bytes()), model.config.vocab_size
    tokens = tokens[:size] + [b""] * (size - len(tokens))
    return Vocabulary(tokens, bool(getattr(tokenizer, "skips_first_space", False)))
