"""What may stand in a canvas, whichever kind of automaton a grammar has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdkernels import _host

MASK = -1
"""A mask, in a canvas of the host."""


class Filled:
    """A canvas and what may stand in it; false if nothing completes it."""

    def __init__(self, automaton: Any, canvas: Sequence[int], completions: Any) -> None:
        self._automaton, self._canvas, self._completions = automaton, canvas, completions

    def __bool__(self) -> bool:
        return bool(self._completions)

    def allowed(self, position: int, bits: Any) -> None:
        """Writes the bits of the tokens that may stand at a mask."""
        if isinstance(self._completions, _host.PushdownCanvas):
            if self._canvas[position] == MASK:
                self._completions.allowed(position, bits)
        else:
            self._automaton.allowed(self._completions[position], self._completions[position + 1], bits)


def filled(automaton: Any, canvas: Sequence[int], state: int, budget: int, *, with_tokens: bool = True) -> Filled:
    """A canvas after a state, with at most `budget` tokens after it.

    `with_tokens`: whether tokens will be asked for.
    """
    tokens = list(canvas)
    if isinstance(automaton, _host.PushdownText):
        return Filled(automaton, tokens, automaton.fill(tokens, state, budget, with_tokens))
    return Filled(automaton, tokens, automaton.places(tokens, [state], budget))


def completed(automaton: Any, canvas: Sequence[int], state: int, budget: int, scores: Any) -> list[int]:
    """The tokens of the most probable completion of a canvas, given a row of log-probabilities for each of its masks;
    empty if there is none."""
    start: Any = state if isinstance(automaton, _host.PushdownText) else [state]
    tokens: list[int] = automaton.best(list(canvas), start, budget, scores)
    return tokens
