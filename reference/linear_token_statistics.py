"""Statistics of the logits of a language-model head, as plain PyTorch: the logits first, then their statistics.

Sources: those of token_statistics.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.functional import linear

from .token_statistics import token_statistics


def linear_token_statistics(
    hidden: Tensor,
    weight: Tensor,
    temperature: float = 0.0,
    seed: int | Tensor = 0,
    step: int | Tensor = 0,
    positions: Tensor | None = None,
    row_index: Tensor | None = None,
    suppress: Sequence[int] = (),
    top_k: int = 5,
    top_p: float = 1.0,
    min_p: float = 0.0,
    distribution: str = "model",
    keep_top_k: int = 0,
    typical_p: float = 1.0,
    *filters: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``(ids, probs, top_ids, top_probs, margin, entropy, logsumexp)`` of the logits ``hidden @ weight^T``, rounded to their dtype.
    `filters` are those of `token_statistics`.

    >>> import torch
    >>> ids, *_ = linear_token_statistics(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), top_k=1)
    >>> ids.item()
    2
    """
    options = (temperature, seed, step, positions, row_index, suppress, top_k, top_p, min_p, distribution)
    return token_statistics(linear(hidden, weight), *options, keep_top_k, typical_p, *filters)
