"""`logit_divergence` of logits whose vocabulary is sharded over ranks: ten numbers per row are exchanged.

The first exchange finds each distribution's normaliser and largest logit, from which every rank computes its share of
the sums over the vocabulary; the second adds these up. With ``a`` and ``b`` the levelled log-probabilities before they
are rescaled to sum to 1, their divergence is ``sum e^a (a - b) / sum e^a + log sum e^b - log sum e^a``, so that
rescaling needs no exchange of its own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pdkernels.ops import LogitDivergence
from pdkernels.ops.collectives import gathered
from pdkernels.ops.vocabulary import VocabularyShard


def divergence(now: Tensor, then: Tensor | None, size: int, shard: VocabularyShard, min_p: float) -> LogitDivergence:
    """Computes `logit_divergence` from the rank's slices ``(..., width)`` of a vocabulary of `size` tokens; the same
    bits on all ranks."""
    wide = now.double()
    uniform = torch.full_like(wide, -math.log(size))
    before = uniform if then is None else then.double()
    best = wide.argmax(-1, keepdim=True)
    row_stats = [wide.gather(-1, best)[..., 0], (best[..., 0] + shard.first_id).double(), wide.logsumexp(-1)]
    row_stats += [before.amax(-1), before.logsumexp(-1)]
    largest, ids, total, largest_before, total_before = gathered(torch.stack(row_stats, -1), shard.group).unbind(-1)
    argmax = ids.gather(0, largest.argmax(0, keepdim=True))[0].long()
    log_now, top = _normalised(wide, largest, total)
    log_then, top_then = _normalised(before, largest_before, total_before)
    probability = log_now.exp()
    low_now = torch.where(probability < min_p * top, uniform, log_now)
    low_then = torch.where(log_then.exp() < min_p * top_then, uniform, log_then)
    sums = [
        -(probability * (probability + 1e-10).log()).sum(-1),
        _divergence(log_then, log_now),
        _divergence(low_then, low_now),
        low_then.exp().sum(-1),
        low_now.exp().sum(-1),
    ]
    entropy, kl, raw, mass_then, mass_now = gathered(torch.stack(sums, -1), shard.group).sum(0).unbind(-1)
    minp_kl = raw / mass_then + mass_now.log() - mass_then.log()
    dtype = torch.promote_types(now.dtype, torch.float32)
    return LogitDivergence(argmax, entropy.to(dtype), kl.to(dtype), minp_kl.to(dtype))


def _normalised(logits: Tensor, largest: Tensor, totals: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of a slice, and the largest probability of all ``(..., 1)``; `largest`, `totals`: of all
    ranks."""
    total = totals.logsumexp(0)[..., None]
    return logits - total, (largest.amax(0)[..., None] - total).exp()


def _divergence(then: Tensor, now: Tensor) -> Any:
    """The KL divergence of a slice, added up as in the reference."""
    terms = torch.where(now == -torch.inf, torch.inf, then.exp() * (then - now))
    return torch.where(then == -torch.inf, 0.0, terms).sum(-1)
