"""Models for the samplers of masked diffusion whose logits a script decides: which place gets which token, how surely, when."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pdkernels.reference.philox import philox4x32

VOCABULARY = 12
MASK = VOCABULARY  # the id behind those that scripts write

# rule(tokens, place) -> (token, its probability by the plain logits), for any place of the canvas `tokens`
Rule = Callable[[list[int], int], tuple[int, float]]


def word(place: int) -> int:
    """The token that the scripts below put at a place."""
    return (5 * place + 2) % VOCABULARY


def fixed(confidence: Sequence[float], start: int = 1) -> Rule:
    """`word` everywhere, ``confidence[i]`` at place ``start + i`` (the list starts over behind its end)."""
    return lambda tokens, place: (word(place), confidence[(place - start) % len(confidence)])


def spreading(tokens: list[int], place: int) -> tuple[int, float]:
    """Sure next to what is written, less and less away from it; the token depends on how much is written around it."""
    written = [p for p, token in enumerate(tokens) if token != MASK]
    distance = min(abs(place - p) for p in written)
    near = sum(tokens[p] for p in written if abs(place - p) <= 2)
    return (word(place) + near) % VOCABULARY, max(0.97 - 0.13 * distance + 0.004 * (place % 5), 0.12)


def moody(tokens: list[int], place: int) -> tuple[int, float]:
    """Token and confidence change with every commit, without a pattern, but always alike for the same canvas."""
    state = 17
    for token in tokens:
        state = (31 * state + token + 1) % 10007
    state = (state * 37 + place * 101) % 10007
    return state % VOCABULARY, 0.12 + 0.87 * ((state // VOCABULARY) % 97) / 97


def chance(seed: int, step: int, places: Sequence[int]) -> dict[int, float]:
    """The uniform number that belongs to a place in a forward where chance orders commits."""
    key = torch.tensor([seed, 0])
    words = [philox4x32(torch.tensor([0, place, step, 2]), key)[0].item() for place in places]
    return {place: (word + 0.5) / 2**32 for place, word in zip(places, words)}


class ScriptedMasked:
    """A bidirectional model that follows a rule; keeps the canvases it was called with.

    Ids other than the rule's have equal shares of what is left, except the mask token, which has the logit `mask_logit`: it
    enters no confidence, however large it is. Rows that are about no mask are NaN.
    """

    def __init__(self, rule: Rule, predicts: str = "own", mask_logit: float = 50.0) -> None:
        self.rule, self.predicts, self.mask_logit = rule, predicts, mask_logit
        self.calls: list[list[int]] = []

    def __call__(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        length = tokens.shape[1]
        assert positions.tolist() == [list(range(length))] and mask.shape == (length, length) and bool(mask.all())
        canvas = tokens[0].tolist()
        self.calls.append(canvas)
        out = torch.full((1, length, VOCABULARY + 1), torch.nan, dtype=torch.float64)
        for place, token in enumerate(canvas):
            row = place - (self.predicts == "next")
            if token == MASK and row >= 0:
                out[0, row] = self.logits(*self.rule(canvas, place))
        return out

    def logits(self, token: int, confidence: float) -> Tensor:
        assert confidence > 1 / VOCABULARY, "too low for a guess"
        others = math.log((1 - confidence) / (VOCABULARY - 1)) if confidence < 1 else -torch.inf
        row = torch.full((VOCABULARY + 1,), others, dtype=torch.float64)
        row[token] = math.log(confidence)
        row[MASK] = self.mask_logit
        return row


class Tabled:
    """Random logits for every canvas and row, from a table that fills as it is asked: as arbitrary as a model can be."""

    def __init__(self, size: int, predicts: str = "own", seed: int = 0, spread: float = 2.0) -> None:
        self.size, self.predicts, self.seed, self.spread = size, predicts, seed, spread
        self.rows: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        key = tuple(tokens[0].tolist())
        if key not in self.rows:
            generator = torch.Generator().manual_seed(hash((self.seed, key)) % 2**63)
            self.rows[key] = torch.randn(len(key), self.size, generator=generator, dtype=torch.float64) * self.spread
        return self.rows[key][None]
