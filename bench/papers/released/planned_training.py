"""The training batch of planned diffusion as released.

Source: the training code released with "Planned Diffusion". `plain_planned_training` is the plain form.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pdkernels.models import PlanTokens
from pdkernels.training.planned import NoisyPlan, PlannedBatch, pack_planned


def pack_released(
    samples: Sequence[NoisyPlan],
    plan_tokens: PlanTokens,
    mask_token: int,
    length: int | None = None,
    *,
    sparse: bool = False,
    pad_token: int = 0,
) -> PlannedBatch:
    """`pack_planned` with the labels and weights of the released code, for masks drawn per text.

    Labels are shifted, the selection of rows is not: rows that are masked themselves predict the token after them in their chunk,
    masked or not, so half of the terms at t = 1/2 ask for a token that the model sees. Every term is divided by p_mask and by the
    sample's response tokens; the end token predicts itself. Tags of chunks may be masked.
    """
    inside = [sample._replace(masked=sample.masked & sample.layout.content) for sample in samples]
    batch = pack_planned(inside, plan_tokens, mask_token, length, sparse=sparse, pad_token=pad_token)
    tokens, first = batch.tokens.clone(), 0
    empty = torch.empty(0, dtype=torch.int64)
    plans, chunks = [(empty, empty, empty.float())], [(empty, empty, empty.float())]
    for layout, masked, p_mask in samples:
        ids, own = layout.tokens, len(layout.tokens)
        tokens[first : first + own][masked] = mask_token
        scale = own - layout.prompt_len + (layout.prompt_len > 0)  # counted from the last row of the prompt
        plan = (layout.rounds < 0).nonzero()[:, 0][max(layout.prompt_len - 1, 0) :]
        plans.append((plan + first, torch.cat([ids[plan[1:]], ids[-1:]]), 1 / (p_mask[plan] * scale)))
        hidden = masked.nonzero()[:, 0]
        target = hidden[layout.content[hidden + 1]] + 1  # the row is masked, its target may be
        chunks.append((target - 1 + first, ids[target], 1 / (p_mask[target] * scale)))
        first += own
    ar, guessed = ([torch.cat(column) for column in zip(*part, strict=True)] for part in (plans, chunks))
    count = torch.tensor(float(max(len(samples), 1)))
    return PlannedBatch(
        tokens, batch.positions, batch.mask, ar[0], ar[1], ar[2], guessed[0], guessed[1], guessed[2], count
    )
