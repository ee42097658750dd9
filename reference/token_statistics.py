"""Statistics of rows of logits, as plain PyTorch: a token, its probability, the runners-up, margin, entropy, log-sum-exp.

Sources: LLaDA's sampler (Nie et al., "Large Language Diffusion Models", section 2.4) takes its confidence from the model's own
distribution; Dream's (Ye et al., "Dream 7B") from the tempered and filtered distribution that it draws from. The token is drawn
as in sampling.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .sampling import uniforms


def token_statistics(
    logits: Tensor,
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
    first_id: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``(ids, probs, top_ids, top_probs, margin, entropy, logsumexp)`` as in `pdkernels.token_statistics`.

    The random numbers are those of the tokens `first_id` and after; ids still count from 0.

    >>> ids, probs, top_ids, *_ = token_statistics(torch.tensor([[0.0, 2.0, 1.0]]), top_k=2)
    >>> ids.item(), round(probs.item(), 4), top_ids.tolist()
    (1, 0.6652, [[1, 2]])
    """
    rows = logits.reshape(-1, logits.shape[-1])
    shape = logits.shape[:-1] if row_index is None else row_index.shape
    number = torch.arange(len(rows), device=logits.device) if row_index is None else row_index.reshape(-1).long()
    scores = torch.full((len(number), rows.shape[-1]), -torch.inf, dtype=rows.dtype, device=rows.device)
    scores[number >= 0] = rows[number[number >= 0]]
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores[:, list(suppress)] = -torch.inf
    undefined = (scores.isnan() | (scores == torch.inf)).any(-1)
    missing = (scores == -torch.inf).all(-1)

    softmax_temperature = temperature if temperature > 0 else 1.0
    possible = torch.where(kept(scores, softmax_temperature, top_p, min_p), scores, -torch.inf)
    drawn = possible
    if temperature > 0:
        rows_at = (number if positions is None else positions.reshape(-1).long())[:, None].clamp(min=0)
        steps = torch.as_tensor(step, device=rows.device).expand(shape).reshape(-1, 1).long()
        columns = first_id + torch.arange(rows.shape[-1], device=rows.device)
        if isinstance(seed, Tensor):
            seed = seed.expand(shape).reshape(-1, 1)
        noise = torch.log(-torch.log(uniforms(seed, steps, rows_at, columns)))
        drawn = possible.double() - temperature * noise
    ids = torch.where(undefined, scores.argmax(-1), drawn.argmax(-1))

    ranked = torch.where(undefined[:, None] | (distribution == "model"), scores, possible)
    largest = ranked.amax(-1, keepdim=True)
    below = ranked - largest
    if distribution == "sampling":
        below, largest = below / softmax_temperature, largest / softmax_temperature
    total = below.exp().sum(-1, keepdim=True).log()
    log_distribution = below - total
    probs = below.softmax(-1)
    order = ranked.sort(dim=-1, descending=True, stable=True).indices
    top = probs.gather(-1, order)
    entropy = 0 - torch.where(probs == 0, 0.0, probs * log_distribution).sum(-1)
    results = (
        probs.gather(-1, ids[:, None])[:, 0],
        top[:, :top_k],
        top[:, 0] - top[:, 1] if top.shape[-1] > 1 else top[:, 0],
        entropy,
        (largest + total)[:, 0],
    )
    probs, top_probs, margin, entropy, logsumexp = (_marked(t, undefined, missing) for t in results)
    return (
        torch.where(missing, -1, ids).reshape(shape),
        probs.reshape(shape),
        torch.where(missing[:, None], -1, order[:, :top_k]).reshape(*shape, top_k),
        top_probs.reshape(*shape, top_k),
        margin.reshape(shape),
        entropy.reshape(shape),
        torch.where(missing, -torch.inf, logsumexp).reshape(shape),
    )


def kept(scores: Tensor, temperature: float, top_p: float, min_p: float) -> Tensor:
    """Which tokens of ``P = softmax(scores / temperature)`` the filters keep, bool of the shape of `scores`.

    A token stays if the mass of all more probable ones is below `top_p` and its own at least `min_p` times the largest. The
    most probable one always stays, and equals stay or go together.

    >>> kept(torch.tensor([[3.0, 1.0, 1.0, 0.0]]), 1.0, top_p=0.9, min_p=0.0).tolist()
    [[True, True, True, False]]
    """
    scores = scores.double()
    keep = torch.ones_like(scores, dtype=torch.bool)
    below = scores - scores.amax(-1, keepdim=True)
    if min_p > 0:
        keep &= below >= temperature * math.log(min_p)
    if top_p < 1:
        ordered, order = below.sort(dim=-1, descending=True, stable=True)
        mass = (ordered / temperature).softmax(-1)
        before = mass.cumsum(-1) - mass
        first = torch.ones_like(keep)
        first[..., 1:] = ordered[..., 1:] < ordered[..., :-1]
        before = torch.where(first, before, 0.0).cummax(-1).values  # among equals, the mass before the first
        keep &= torch.empty_like(keep).scatter_(-1, order, before < top_p)
    return keep | (below == 0)


def _marked(values: Tensor, undefined: Tensor, missing: Tensor) -> Tensor:
    """NaN for rows without a distribution, 0 for missing rows."""
    extra = (1,) * (values.dim() - 1)
    return torch.where(missing.view(-1, *extra), 0.0, torch.where(undefined.view(-1, *extra), torch.nan, values))
