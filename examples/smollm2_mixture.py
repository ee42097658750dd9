"""What a drafter for SmolLM2 learns from: the model's own answers, two thirds of them greedy and the others sampled.

The questions are those of smollm2_texts.py, asked in several ways, so a function may be explained in one text and completed in
another. The order is that of rounds over all functions: the first texts are a training set of their own, and a longer run extends
it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from smollm2_texts import BATCH, Kept, Text, prompts

from pdkernels.decoding import generate
from pdkernels.models import Transformer

TEMPERATURE = 0.8
"""Of every third batch."""
ROUNDS = 3
"""The three kinds of questions, drawn anew for each function."""


def chats(model: Transformer, wanted: int, longest: int, seed: int) -> list[list[int]]:
    """`wanted` different questions of at most `longest` tokens, or all there are in `ROUNDS` rounds."""
    found: dict[tuple[int, ...], None] = {}
    for number in range(ROUNDS):
        if len(found) < wanted:  # a round is drawn whole, so that the first questions are the same whatever is wanted
            found |= dict.fromkeys(map(tuple, prompts(model, 1 << 20, longest, seed + number)))
    return [list(chat) for chat in list(found)[:wanted]]


def mixture(
    model: Transformer,
    start: str,
    asked: list[list[int]],
    longest: int,
    file: Path,
    advance: Callable[[int], None] = lambda count: None,
) -> list[Text]:
    """The questions with answers of up to `longest` tokens. `file` keeps them: nothing is answered twice."""
    kept = Kept(file, asked, start=start, longest=longest, temperature=TEMPERATURE)
    advance(len(kept.items))
    for batch in kept.missing(BATCH):
        number = len(kept.items) // BATCH
        drawn = {"temperature": TEMPERATURE, "seed": number} if number % 3 == 2 else {}
        answers = generate(model, batch, max_new_tokens=longest, **drawn).tokens
        kept.add((torch.cat([torch.tensor(chat), answer]), len(chat)) for chat, answer in zip(batch, answers))
        advance(len(batch))
    return [Text(*item) for item in kept.items]
