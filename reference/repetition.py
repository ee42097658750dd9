"""A repetition penalty, as a property of a model: every decoder with it is that decoder on a model whose logits are penalised.

Source: Keskar et al., "CTRL: a conditional transformer language model for controllable generation", section 4.1; positive logits are
divided by the penalty and negative ones multiplied by it, as in transformers.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor


def penalised(logits: Tensor, seen: Collection[int], penalty: float) -> Tensor:
    """A row of logits ``(V,)`` in which the tokens of `seen` are less likely by `penalty`, or likelier where it is below 1.

    >>> penalised(torch.tensor([2.0, -2.0, 1.0]), {0, 1}, 2.0)
    tensor([ 1., -4.,  1.])
    """
    ids = torch.tensor(sorted(seen), dtype=torch.int64)
    picked = logits[ids]
    return logits.index_put((ids,), torch.where(picked > 0, picked / penalty, picked * penalty))


class PenalisedModel:
    """A model whose row is penalised for every token that it sees, itself included; masks are no tokens.

    >>> flat = lambda tokens, positions, mask: torch.ones(1, 2, 3)
    >>> model = PenalisedModel(flat, 2.0)
    >>> model(torch.tensor([[2, 0]]), torch.arange(2)[None], torch.ones(2, 2).tril().bool())
    tensor([[[1.0000, 1.0000, 0.5000],
             [0.5000, 1.0000, 0.5000]]])
    """

    def __init__(self, model: Any, penalty: float, mask_token: int | None = None) -> None:
        self.model, self.penalty, self.mask_token = model, penalty, mask_token
        self.predicts = getattr(model, "predicts", "own")

    def __call__(self, tokens: Tensor, positions: Tensor, mask: Tensor, *more: Any) -> Tensor:
        logits = self.model(tokens, positions, mask, *more)
        text = tokens[0].tolist()
        rows = [
            penalised(row, {token for token, sees in zip(text, visible) if sees} - {self.mask_token}, self.penalty)
            for row, visible in zip(logits[0], mask.tolist())
        ]
        return torch.stack(rows)[None]
