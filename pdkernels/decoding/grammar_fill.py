"""Masked positions filled under a grammar: each alone, by what the grammar allows there, or several by their most
probable completion.

Tokens that are drawn position by position may exclude each other. Then the most confident ones stay, and the others are
drawn again from what is still allowed, so that a step fills the positions that it would fill without a grammar.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pdkernels.generation.filters import unpacked
from pdkernels.generation.grammar_rows import GrammarRows

Draw = Callable[[int, int, Tensor], Tensor]
"""From the number of a sequence, a row of its logits and these logits ``(1, 1, V)`` to a token ``(1, 1)``."""


class Guessed(NamedTuple):
    """The masked positions that a forward guesses."""

    logits: Tensor
    """``(batch, R, V)``, without the tokens that are impossible."""
    places: Tensor
    """``(batch, R)``: their places in the canvases; negative: none."""
    filled: Sequence[list[int]]
    """Of each sequence, its new tokens before the canvas."""
    draw: Draw


def joint_guesses(
    grammar: GrammarRows, canvases: Sequence[list[int]], guessed: Guessed, ids: Tensor, probs: Tensor
) -> tuple[Tensor, Tensor]:
    """`ids` and `probs` ``(batch, R)`` with the most probable completions, for the grammars that ask for them, and
    their probabilities."""
    ids, probs = ids.clone(), probs.clone()
    for sequence, canvas in enumerate(canvases):
        if not grammar.is_joint(sequence):
            continue
        prefix = guessed.filled[sequence]
        masks = grammar.masks(sequence, prefix, canvas)
        row_of = {place: row for row, place in enumerate(guessed.places[sequence].tolist()) if place >= 0}
        logs = guessed.logits[sequence].double().log_softmax(-1)
        # Where nothing is guessed every token is as good.
        scores = torch.zeros(len(masks), logs.shape[-1], dtype=logs.dtype, device=logs.device)
        there = [(n, row_of[place]) for n, place in enumerate(masks) if place in row_of]
        if not there:
            continue
        at, rows = (list(column) for column in zip(*there, strict=True))
        scores[at] = logs[rows]
        best = grammar.joint(sequence, prefix, canvas, scores)
        if best:
            chosen = torch.tensor([best[masks[n]] for n in at], device=ids.device)
            ids[sequence, rows] = chosen
            probs[sequence, rows] = logs[rows, chosen].exp().to(probs.dtype)
    return ids, probs


def settle_(
    grammar: GrammarRows, canvases: Sequence[Tensor], before: Sequence[list[int]], guessed: Guessed, confidence: Tensor
) -> None:
    """Replaces tokens of `canvases`, one for each sequence, that exclude each other, in place; `before`: the canvases
    before they were filled."""
    places, row_confidence = guessed.places.tolist(), confidence.tolist()
    for sequence, canvas in enumerate(canvases):
        row_of = {place: row for row, place in enumerate(places[sequence]) if place >= 0}
        ranks = [0.0] * len(before[sequence])
        for place, row in row_of.items():
            if place < len(ranks):
                ranks[place] = row_confidence[sequence][row]

        def redraw(number: int, place: int, allowed_bits: Tensor, row_of: dict[int, int] = row_of) -> int:
            row = row_of[place]
            logits = guessed.logits[number : number + 1, row : row + 1]
            allowed = unpacked(allowed_bits.to(logits.device), logits.shape[-1])
            return int(guessed.draw(number, row, logits.masked_fill(~allowed, -torch.inf)).item())

        after = canvas.tolist()
        settled = grammar.settled(sequence, guessed.filled[sequence], before[sequence], after, ranks, redraw)
        if settled != after:
            canvas.copy_(torch.tensor(settled, device=canvas.device))
