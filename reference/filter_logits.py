"""Filters of logits as plain PyTorch: a bias, penalties by token counts, impossible tokens.

Sources: the repetition penalty of Keskar et al., "CTRL", section 4.1, as transformers has it; presence and frequency penalties as
OpenAI's API defines them, after the repetition penalty as in vLLM.
"""

from __future__ import annotations

import torch
from torch import Tensor


def filter_logits(
    logits: Tensor,
    bias: Tensor | None = None,
    counts: Tensor | None = None,
    recent: Tensor | None = None,
    banned: Tensor | None = None,
    allowed: Tensor | None = None,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
) -> Tensor:
    """`logits` ``(..., V)`` filtered as in `pdkernels.filter_logits`; of the m rows of a tensor ``(m, n)``, each is for an equal share of
    the rows of logits.

    >>> filter_logits(torch.tensor([[1.0, 4.0, -1.0]]), counts=torch.tensor([[0, 2, -1]]), repetition_penalty=2.0)
    tensor([[ 1.,  2., -2.]])
    >>> filter_logits(torch.zeros(1, 3), banned=torch.tensor([[1, -1]]), allowed=torch.tensor([[3]]))
    tensor([[0., -inf, -inf]])
    """
    values = logits.reshape(-1, logits.shape[-1])
    values = values.to(torch.promote_types(values.dtype, torch.float32), copy=True)
    rows, width = values.shape

    def of_rows(given: Tensor) -> Tensor:
        return given.repeat_interleave(rows // max(len(given), 1), 0)

    if bias is not None:
        values = values + of_rows(bias)
    if counts is not None or recent is not None:
        seen = torch.zeros(rows, width + 1, dtype=torch.int64, device=values.device)
        if counts is not None:
            seen[:, :width] = of_rows(counts)
        generated = seen.clamp(min=0)
        if recent is not None:
            entries = of_rows(recent).long()
            ids = torch.where(entries < -1, -2 - entries, torch.where(entries < 0, width, entries))
            generated.scatter_add_(1, ids, (entries >= 0).long())
            seen.scatter_(1, ids, 1)
        seen, generated = seen[:, :width] != 0, generated[:, :width]
        changed = torch.where(values < 0, values * repetition_penalty, values / repetition_penalty)
        values = torch.where(seen, changed, values)
        values = values - presence_penalty * (generated > 0).to(values.dtype)
        values = values - frequency_penalty * generated.to(values.dtype)
    if banned is not None:
        ids = of_rows(banned).long()
        none = torch.zeros(rows, width + 1, dtype=torch.bool, device=values.device)
        values = values.masked_fill(none.scatter(1, torch.where(ids < 0, width, ids), True)[:, :width], -torch.inf)
    if allowed is not None:
        bits = (of_rows(allowed).long()[..., None] >> torch.arange(32, device=values.device)) & 1
        values = values.masked_fill(bits.flatten(1)[:, :width] == 0, -torch.inf)
    return values.reshape(logits.shape)
