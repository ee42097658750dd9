"""The control tokens of a planning checkpoint: the released format is Dream with six added tokens, known by their
names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdkernels._validation import fail
from pdkernels.models.files.fields import OP, read_from, shown
from pdkernels.models.files.folder import read_fields
from pdkernels.models.plan_tokens import PUBLISHED, PlanTokens
from pdkernels.models.text.tokenizers import JsonTokenizer, Tokenizer

NAMES = ("<async>", "</async>", "<promise>-<topic>", "</topic>", "<sync/>", "[PAD]")
"""In the order of `PlanTokens.control`."""

END_NAME = "<|im_end|>"
"""Ends a planned text; it may be missing from the end tokens of Dream's own configuration."""

_ADDED = "added_tokens.json"


def plan_tokens_of(
    folder: Path, tokenizer: Tokenizer | None, vocab_size: int
) -> tuple[PlanTokens, tuple[int, ...]] | None:
    """The control tokens of a folder whose vocabulary has all six, and the ids that end its texts; None if one is
    missing."""
    id_of = _names(folder, tokenizer, vocab_size)
    control = [token for token in map(id_of, NAMES) if token is not None]
    if len(control) < len(NAMES):
        return None
    digits = [token for token in (id_of(str(digit)) for digit in range(10)) if token is not None]
    if len(digits) < 10:  # added_tokens.json names no ordinary token
        digits = list(PUBLISHED.digits)
    opening, closing, topic, topic_end, sync, pad = control
    with read_from("tokenizer.json" if isinstance(tokenizer, JsonTokenizer) else _ADDED):
        tokens = PlanTokens(opening, closing, topic, topic_end, sync, pad, digits, predicts=PUBLISHED.predicts)
    end = id_of(END_NAME)
    return tokens, () if end is None else (end,)


def _names(folder: Path, tokenizer: Tokenizer | None, vocab_size: int) -> Callable[[str], int | None]:
    """Ids by name: the vocabulary of tokenizer.json, or tokens added to one in another format."""
    if isinstance(tokenizer, JsonTokenizer):
        return tokenizer.id_of
    fields = read_fields(folder, _ADDED)

    def added(name: str) -> int | None:
        token: Any = None if fields is None else fields.get(name)
        if token is not None and (type(token) is not int or not 0 <= token < vocab_size):
            fail(OP, f"{_ADDED}: {name}", f"be an id below vocab_size ({vocab_size})", shown(token))
        return None if token is None else int(token)

    return added
