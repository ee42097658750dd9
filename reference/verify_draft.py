"""Greedy draft verification as a plain loop."""

from __future__ import annotations

import torch
from torch import Tensor


def verify_draft(
    draft: Tensor,
    predictions: Tensor,
    draft_lengths: Tensor | None = None,
    end_tokens: Tensor | None = None,
    refill: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``(accepted, next_token, ended, new_draft, candidate)``; shapes as in ``pdkernels.verify_draft``."""
    drafts = draft.tolist() if draft.dim() == 3 else draft.unsqueeze(1).tolist()
    models = predictions.tolist() if draft.dim() == 3 else predictions.unsqueeze(1).tolist()
    ends = set() if end_tokens is None else set(end_tokens.tolist())
    width = draft.shape[-1]
    verdicts = []
    for b, (rows, answers) in enumerate(zip(drafts, models)):
        length = width if draft_lengths is None else int(draft_lengths[b])
        if not 0 <= length <= width:
            raise ValueError(
                f"pdkernels.verify_draft: draft_lengths must be in [0, {width}], got {length} for sequence {b}."
            )
        filler = [0] * width if refill is None else refill[b].tolist()
        if length == 0:
            verdicts.append((0, -1, False, filler, 0))
            continue
        accepted, candidate = 0, 0
        for c, (tokens, answer) in enumerate(zip(rows, answers)):
            matched = 1
            while matched < length and tokens[matched] == answer[matched - 1]:
                matched += 1
            if matched > accepted:
                accepted, candidate = matched, c
        next_token = answers[candidate][accepted - 1]
        for i, token in enumerate(rows[candidate][:accepted]):
            if token in ends:
                accepted, next_token = i + 1, token
                break
        tail = answers[candidate][accepted - 1 : length]
        verdicts.append((accepted, next_token, next_token in ends, tail + filler[len(tail) :], candidate))
    columns = list(zip(*verdicts)) or [(), (), (), (), ()]
    dtypes = (torch.int64, torch.int64, torch.bool, torch.int64, torch.int64)
    results = [torch.tensor(column, dtype=dtype, device=draft.device) for column, dtype in zip(columns, dtypes)]
    return results[0], results[1], results[2], results[3].reshape(len(verdicts), width), results[4]
