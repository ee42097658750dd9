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

from .filter_logits import filter_logits
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
    keep_top_k: int = 0,
    typical_p: float = 1.0,
    bias: Tensor | None = None,
    counts: Tensor | None = None,
    recent: Tensor | None = None,
    banned: Tensor | None = None,
    allowed: Tensor | None = None,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
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
    penalties = repetition_penalty, presence_penalty, frequency_penalty
    scores = filter_logits(scores, bias, counts, recent, banned, allowed, *penalties)
    scores[number < 0] = -torch.inf
    scores[:, list(suppress)] = -torch.inf
    undefined = (scores.isnan() | (scores == torch.inf)).any(-1)
    missing = (scores == -torch.inf).all(-1)

    softmax_temperature = temperature if temperature > 0 else 1.0
    possible = scores
    if temperature > 0 or distribution == "sampling":
        stays = kept(scores, softmax_temperature, top_p, min_p, keep_top_k, typical_p)
        possible = torch.where(stays, scores, -torch.inf)
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


def kept(
    scores: Tensor, temperature: float, top_p: float, min_p: float, top_k: int = 0, typical_p: float = 1.0
) -> Tensor:
    """Which tokens the filters keep, bool of the shape of `scores`, in the order of transformers: of P = ``softmax(scores / temperature)``
    the `top_k` largest (0: all); of the distribution of these, the tokens for which the mass of all more probable ones is below `top_p`,
    and whose own is at least `min_p` times the largest; of the distribution of what is left, the tokens for which the mass of all those
    whose surprise is closer to the entropy is below `typical_p`.

    Equals stay or go together, and up to `typical_p` the most probable token always stays.

    >>> kept(torch.tensor([[3.0, 1.0, 1.0, 0.0]]), 1.0, top_p=0.9, min_p=0.0).tolist()
    [[True, True, True, False]]
    >>> kept(torch.tensor([[0.5, 0.3, 0.2]]).log(), 1.0, 1.0, 0.0, typical_p=0.4).tolist()  # an entropy of 1.03, surprises of 0.69, 1.2, 1.61
    [[True, True, False]]
    """
    scores = scores.double()
    keep = torch.ones_like(scores, dtype=torch.bool)
    below = scores - scores.amax(-1, keepdim=True)
    if 0 < top_k < scores.shape[-1]:
        keep &= scores >= scores.sort(dim=-1, descending=True).values[..., top_k - 1 : top_k]
    if top_p < 1:
        mass = (below / temperature).masked_fill(~keep, -torch.inf).softmax(-1)
        keep &= _first_of_mass(-below, mass, top_p)
    if min_p > 0:
        keep &= below >= temperature * math.log(min_p)
    keep |= below == 0
    if typical_p < 1:
        likely = (below / temperature).masked_fill(~keep, -torch.inf).log_softmax(-1)
        entropy = -(likely * likely.exp()).nansum(-1, keepdim=True)
        keep &= _first_of_mass((-likely - entropy).abs(), likely.exp(), typical_p)
    return keep


def _first_of_mass(order: Tensor, mass: Tensor, share: float) -> Tensor:
    """The tokens for which the `mass` of all that come before them in the `order` is below `share`; among equals, all or none."""
    ordered, index = order.sort(dim=-1, stable=True)
    mass = mass.gather(-1, index)
    before = mass.cumsum(-1) - mass
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[..., 1:] = ordered[..., 1:] > ordered[..., :-1]
    before = torch.where(first, before, 0.0).cummax(-1).values
    return torch.empty_like(first).scatter_(-1, index, (before < share) | (ordered == ordered[..., :1]))


def _marked(values: Tensor, undefined: Tensor, missing: Tensor) -> Tensor:
    """NaN for rows without a distribution, 0 for missing rows."""
    extra = (1,) * (values.dim() - 1)
    return torch.where(missing.view(-1, *extra), 0.0, torch.where(undefined.view(-1, *extra), torch.nan, values))
