"""The change of the next token's distribution between two recurrences, in plain PyTorch.

Source: the exit criteria of Geiping et al., "Scaling up Test-Time Compute with Latent Reasoning: A Recurrent Depth Approach",
section 6.1, with the constants of the published sampler.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def logit_divergence(
    logits: Tensor, previous: Tensor | None = None, min_p: float = 0.1
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(argmax, entropy, kl, minp_kl)`` of each row; shapes as in ``pdkernels.logit_divergence``.

    >>> _, entropy, kl, _ = logit_divergence(torch.tensor([0.0, 0.0]))
    >>> round(entropy.item(), 4), kl.item()
    (0.6931, 0.0)
    """
    now = _log_distribution(logits)
    then = torch.full_like(now, -math.log(logits.shape[-1])) if previous is None else _log_distribution(previous)
    distribution = now.exp()
    entropy = -(distribution * (distribution + 1e-10).log()).sum(-1)
    return (
        logits.argmax(-1),
        entropy,
        _divergence(then, now),
        _divergence(_levelled(then, min_p), _levelled(now, min_p)),
    )


def _log_distribution(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def _levelled(log_distribution: Tensor, min_p: float) -> Tensor:
    """Every probability below `min_p` times the largest becomes 1 / V; then all are renormalised to sum to 1."""
    distribution = log_distribution.exp()
    low = distribution < min_p * distribution.amax(-1, keepdim=True)
    return torch.where(low, -math.log(distribution.shape[-1]), log_distribution).log_softmax(-1)


def _divergence(then: Tensor, now: Tensor) -> Tensor:
    """Sum of ``p_then (log p_then - log p_now)``, where a ``p_then`` of 0 adds nothing; otherwise a ``p_now`` of 0 gives
    infinity."""
    terms = torch.where(now == -torch.inf, torch.inf, then.exp() * (then - now))
    return torch.where(then == -torch.inf, 0.0, terms).sum(-1)
