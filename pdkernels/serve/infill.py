"""Prompts whose text goes on after the answer: `suffix`, for models that were trained to fill in the middle.

Sources: "Efficient Training of Language Models to Fill in the Middle" (arXiv 2207.14255); the model cards and
tokenizers of Qwen2.5-Coder, StarCoder, DeepSeek-Coder, Code Llama (arXiv 2308.12950, section 2.3) and Codestral.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pdkernels.serve.errors import Refused


class Form(NamedTuple):
    """The special tokens around the two texts."""

    before: str
    """What begins the prompt."""
    hole: str
    """Between the texts."""
    after: str
    """What ends the prompt; empty: nothing does."""
    end: str = ""
    """What ends an answer beside the model's end tokens."""
    suffix_first: bool = False


FORMS = (
    Form("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    Form("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, StarCoder2, Granite
    Form("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    Form("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),  # DeepSeek-Coder
    Form("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"),  # Code Llama
    Form("[SUFFIX]", "[PREFIX]", "", suffix_first=True),  # Codestral
)


def infilled(tokenizer: Any, prompt: str | list[int], suffix: str) -> tuple[list[int], list[int]]:
    """The tokens of a prompt to be filled in before `suffix`, and those that end the answer beside the model's own.

    Raises:
        Refused: the tokenizer has no tokens for it.
    """
    id_of: Callable[[str], Any] = getattr(tokenizer, "id_of", lambda _: None)
    for form in FORMS:
        ids = [id_of(token) for token in (form.before, form.hole, form.after, form.end) if token]
        if None not in ids:
            break
    else:
        raise Refused("this model has no tokens to fill in the middle of a text", 400, "suffix")
    # SentencePiece puts a space before a text, but not before one that goes on.
    joined = "☺" if form.before.startswith("▁") else ""
    after = _plain(tokenizer, joined + suffix)[len(_plain(tokenizer, joined)) if joined else 0 :]
    before = _plain(tokenizer, prompt) if isinstance(prompt, str) else prompt
    first, second = (after, before) if form.suffix_first else (before, after)
    begin = tokenizer.encode("")[:1]
    begin = begin if begin == [getattr(tokenizer, "bos_token_id", None)] else []
    last = [id_of(form.after)] if form.after else []
    return [*begin, ids[0], *first, ids[1], *second, *last], [id_of(form.end)] if form.end else []


def _plain(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids
