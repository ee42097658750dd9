"""Models for the samplers of recurrent depth: a tiny random one, and one whose tokens and states a script decides."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pdkernels.reference.recurrent_depth import RecurrentDepthReference, RecurrentPast, random_weights
from pdkernels.reference.recurrent_sampling import position_states
from tests.decoding.fake_models import VOCABULARY, Script

HIDDEN = 12
init = position_states(HIDDEN, seed=3)


def tiny(seed: int = 0, state_scale: float = 1.0, **sizes: Any) -> RecurrentDepthReference:
    """Two heads of six components, 1 + 2 + 1 layers, 13 ids. A small `state_scale` makes the core a contraction."""
    options = {"vocab_size": 13, "hidden_size": HIDDEN, "heads": 2, "intermediate_size": 10, **sizes}
    return RecurrentDepthReference(random_weights(**options, state_scale=state_scale, seed=seed))


def zeros(step: int, positions: Tensor) -> Tensor:
    """Initial states of a :class:`Scripted` model."""
    return torch.zeros(len(positions), 3, dtype=torch.float64)


def direction(position: int, turn: float = 0.0) -> Tensor:
    """Where the state of a position settles: unit length, and no two near positions are alike."""
    angle = 2.4 * position + turn
    return torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)


class Scripted:
    """The token behind a row is what the script says of all tokens up to the row, whatever the state.

    The state of position p turns by one radian with every recurrence until recurrence ``settle(p)``, then stays as it is. Its
    third component counts the recurrences in units too small for any threshold. The history is read back from the past, whose K
    are token ids and V positions, so that a wrong freeze gives wrong tokens.
    """

    def __init__(self, script: Script, settle: Callable[[int], int] = lambda position: 0) -> None:
        self.script, self.settle = script, settle
        self.past: RecurrentPast | None = None  # the first one handed out
        self.widths: list[int] = []  # of the forwards with something frozen before them

    def new_past(self) -> RecurrentPast:
        past = RecurrentPast(1)
        self.past = self.past or past
        return past

    def prelude(self, tokens: Tensor, start: int, past: RecurrentPast) -> Tensor:
        assert start == past.length and (start == 0 or len(past.frozen[0][0]) == start)  # type: ignore[index]
        past.seen(0, tokens[:, None, None].double(), torch.arange(start, start + len(tokens))[:, None, None].double())
        if start:
            self.widths.append(len(tokens))
        return torch.zeros(len(tokens), 3, dtype=torch.float64)

    def core(self, state: Tensor, e: Tensor, start: int, past: RecurrentPast) -> Tensor:
        out = []
        for i, row in enumerate(state):
            count = round(row[2].item() * 1e9) + 1
            turned = direction(start + i, 0.0 if count >= self.settle(start + i) else float(count))
            out.append(torch.cat([turned, torch.tensor([count * 1e-9], dtype=torch.float64)]))
        return torch.stack(out)

    def coda(self, state: Tensor, start: int, past: RecurrentPast) -> Tensor:
        tokens, positions = past.seen(0, *past.fresh[0])  # type: ignore[misc]
        history = tokens.flatten().long().tolist()
        assert positions.flatten().long().tolist() == list(range(start + len(state)))
        said = [self.script(history[: start + i + 1]) for i in range(len(state))]
        return torch.nn.functional.one_hot(torch.tensor(said), VOCABULARY).double()

    @property
    def stored(self) -> list[int]:
        """The tokens whose K and V are frozen."""
        return self.past.frozen[0][0].flatten().long().tolist()  # type: ignore[index, union-attr]
