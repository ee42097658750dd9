"""Filters of logits for tests: random ones, and the same filters by transformers' processors or written out token by token."""

from __future__ import annotations

import torch
from torch import Tensor

import pdkernels as pd


def words_of(possible: Tensor) -> Tensor:
    """Bools ``(..., V)`` as words: bit ``i % 32`` of word ``i // 32``."""
    padded = torch.nn.functional.pad(possible, (0, -possible.shape[-1] % 32)).unflatten(-1, (-1, 32)).long()
    words = (padded << torch.arange(32)).sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).int()


def random_filters(rows: int, width: int, seed: int = 0, groups: int | None = None) -> pd.LogitFilters:
    """All filters at once; `groups` rows of each tensor, or as many as rows of logits."""
    generator = torch.Generator().manual_seed(seed)
    groups = groups or rows

    def ints(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high + 1, size, generator=generator)

    counts = ints(-1, 3, groups, width).int() * (torch.rand(groups, width, generator=generator) < 0.2)
    return pd.LogitFilters(
        bias=torch.randn(groups, width, generator=generator).round(decimals=1),
        counts=counts.int(),
        recent=ints(-1 - width, width - 1, groups, 5),
        banned=ints(-1, width - 1, groups, 2),
        allowed=words_of(torch.rand(groups, width, generator=generator) < 0.9),
        repetition_penalty=1.3,
        presence_penalty=0.7,
        frequency_penalty=-0.2,
    )


def filtered(logits: Tensor, filters: pd.LogitFilters) -> Tensor:
    """`filter_logits` of logits ``(rows, V)`` token by token, in float64."""
    rows, width = logits.shape
    values = logits.double().tolist()
    for r, row in enumerate(values):
        one = {name: None if (t := getattr(filters, name)) is None else t[r * len(t) // rows].tolist()
               for name in ("bias", "counts", "recent", "banned", "allowed")}  # fmt: skip
        generated, prompt = [], []
        for token, count in enumerate(one["counts"] or []):
            generated += [token] * max(count, 0)
            prompt += [token] * (count < 0)
        for entry in one["recent"] or []:
            generated += [entry] * (entry >= 0)
            prompt += [-2 - entry] * (entry < -1)
        for token in range(width):
            x = row[token] + (one["bias"][token] if one["bias"] else 0)
            if token in generated or token in prompt:
                x = x * filters.repetition_penalty if x < 0 else x / filters.repetition_penalty
            count = generated.count(token)
            x -= filters.presence_penalty * (count > 0) + filters.frequency_penalty * count
            possible = one["allowed"] is None or one["allowed"][token // 32] >> token % 32 & 1
            row[token] = x if possible and token not in (one["banned"] or []) else -torch.inf
    return torch.tensor(values, dtype=torch.float64)
