"""Chunks that belong to a grammar: each one alone is a text of it, and what it does not need is padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pdkernels._validation import refuse
from pdkernels.decoding.planned._text import PlannedText
from pdkernels.generation.filters import unpacked
from pdkernels.generation.grammar_rows import GrammarRows
from pdkernels.generation.session import Session

Draw = Callable[[int, int, Tensor], int]
"""From the number of a text in the step, a row of its logits and the words of the tokens left to one of them."""


class ChunkGrammar:
    """The chunks of a step."""

    def __init__(
        self, session: Session, texts: Sequence[PlannedText], live: Sequence[list[int]], mask_token: int, pad: int
    ) -> None:
        self._texts, self._live, self._mask, self._pad = texts, live, mask_token, pad
        assert session.grammar is not None
        self._grammar = session.grammar
        for text, chunks in zip(texts, live, strict=True):
            for chunk in chunks:
                check_room(self._grammar, text, chunk)

    def words(self, width: int) -> Tensor:
        """As `Filters.allowed`: for the masks of each text, one chunk after another, `width` rows."""
        masks = []
        for text, chunks in zip(self._texts, self._live, strict=True):
            rows = [self._grammar.chunk(text.sequence, text.chunks[chunk]) for chunk in chunks]
            text_masks = torch.cat(rows)
            masks.append(
                torch.cat([text_masks, text_masks.new_full((width - len(text_masks), text_masks.shape[1]), -1)])
            )
        return torch.stack(masks)

    def settle_(self, canvas: Tensor, positions: Tensor, scores: Tensor, draw: Draw) -> None:
        """Replaces tokens of a step that exclude each other, and pads what comes after the end of a chunk, in place."""
        confidence, places = scores.tolist(), positions.tolist()
        for number, (text, chunks) in enumerate(zip(self._texts, self._live, strict=True)):
            first = 1
            row_of = {place: row for row, place in enumerate(places[number]) if place >= 0}
            for chunk in chunks:
                before = text.chunks[chunk]
                last = first + len(before)
                after = canvas[number, first:last].tolist()
                ranks = [confidence[number][row_of[at]] if at in row_of else 0.0 for at in range(first, last)]

                def redraw(_: int, at: int, allowed: Tensor, number: int = number, first: int = first) -> int:
                    return draw(number, row_of[first + at], allowed)  # noqa: B023, it is called in this round

                settled = self._grammar.settled_chunk(text.sequence, before, after, ranks, redraw)
                if self._pad in settled:
                    end = settled.index(self._pad)
                    settled = settled[:end] + [self._pad] * (len(settled) - end)
                if settled != after:
                    canvas[number, first:last] = torch.tensor(settled, device=canvas.device)
                first = last + 2


def check_room(grammar: GrammarRows, text: PlannedText, chunk: int) -> None:
    """Refuses a chunk that is shorter than every text of the grammar."""
    (least, source), length = grammar.least(text.sequence), len(text.chunks[chunk])
    fault = f"the plan asks for a chunk of {length} tokens, and {source} takes {least} at least"
    refuse(least > length, "decoding.planned", fault)


def without(logits: Tensor, allowed: Tensor) -> Tensor:
    """`logits` ``(.., V)`` without the tokens that are not allowed."""
    return logits.masked_fill(~unpacked(allowed.to(logits.device), logits.shape[-1]), -torch.inf)
