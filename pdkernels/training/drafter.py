"""The adapter with which a tri-mode model drafts: initial low-rank pairs, and the loss that raises acceptance."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pdkernels._validation import INDEX_DTYPES, check, check_type, fail, message
from pdkernels.models import Transformer


class DrafterLoss(NamedTuple):
    """Result of `drafter_loss`: 0-dim tensors, ``total = matching + ce_weight * cross_entropy``."""

    total: Tensor
    matching: Tensor
    """The distance of the drafter's distribution to the verifier's: the LK hybrid of KL and total variation."""
    cross_entropy: Tensor
    """Cross-entropy of the verifier's best token under the drafter."""


def drafter_loss(
    draft_logits: Tensor,
    verifier_logits: Tensor,
    accepted: Tensor,
    *,
    temperature: float = 3.0,
    top_k: int = 200,
    eta: float = 0.5,
    ce_weight: float = 1.0,
) -> DrafterLoss:
    """The loss that makes drafts agree with the verifier, on the accepted tokens and the first rejected one.

    Args:
        draft_logits: ``(blocks, k, vocab)``; row j of a block predicts draft token j. Only these get a gradient.
        verifier_logits: ``(blocks, k, vocab)``; row j predicts the same token: it is the causal row of the previous
            token.
        accepted: ``(blocks,)`` int32 or int64, the number of draft tokens that equal the verifier's, 0 .. k, without
            the known first token of the draft, such as `count_accepted` of `draw_drafts`. The loss reads rows
            0 .. min(accepted, k - 1). -1 leaves out a block.
        temperature: of both distributions in `matching`.
        top_k: a row's support is the union of the `top_k` best tokens of either distribution.
        eta: of ``lam = exp(-eta * acceptance)``, the weight of the KL divergence.
        ce_weight: of the cross-entropy.

    Returns:
        In row j, U is the support, p and q are ``softmax(logits / temperature)`` of verifier and drafter on U, and y is
        the verifier's argmax::

            acceptance = sum of min(p, q), without a gradient
            lam = exp(-eta * acceptance)
            matching_j = lam * KL(p || q) + (1 - lam) * sum of |p - q| / 2                        (6)
            cross_entropy_j = -log softmax(draft_logits on U)[y], or 0 if y is not in U           (7)
            matching = sum of matching_j / rows read
            cross_entropy = sum of cross_entropy_j / rows read whose y is in U                    (8)
            total = matching + ce_weight * cross_entropy                                          (9)

        Both means are averaged over the blocks with rows; 0 where there are none. Tokens that either side rules out
        with -inf are in no support. Logits of rows that are not read may hold anything. Computed in at least float32.

    Raises:
        ValueError: shapes that do not fit each other, an option out of range.
        TypeError: logits that are not floating, counts that are not int32 or int64, a `top_k` that is not an int.

    Nothing waits for the device, and once the support is chosen only its flags are as wide as the vocabulary.

    Source: Nemotron-Labs-Diffusion, section 3.3, equations 6 to 9, with its tau of 3, K of 200, eta of 0.5 and weights
    of 1 for both terms. `draw_drafts` has its shares of sampled and greedy drafts.

    Example:
        >>> import torch
        >>> from pdkernels.training import count_accepted, drafter_loss
        >>> verifier = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0))
        >>> draft = verifier.clone().requires_grad_()
        >>> guesses = draft.argmax(-1)
        >>> guesses[0, 1] = 49
        >>> accepted = count_accepted(guesses, verifier)
        >>> accepted.tolist()
        [1, 3]
        >>> loss = drafter_loss(draft, verifier, accepted, top_k=8)
        >>> abs(loss.matching.item()) < 1e-6, loss.cross_entropy.item() > 0
        (True, True)
        >>> loss.total.backward()
        >>> draft.grad.any(-1).tolist()
        [[True, True, False], [True, True, True]]
    """
    op = "training.drafter_loss"
    _check_arguments(op, draft_logits, verifier_logits, accepted)
    check(temperature > 0, op, "temperature", "be positive", temperature)
    check_type(type(top_k) is int, op, "top_k", "be an int", type(top_k).__name__)
    check(top_k >= 1, op, "top_k", "be at least 1", top_k)
    verifier_logits = verifier_logits.detach()
    _, width, vocab = draft_logits.shape
    active = torch.arange(width, device=accepted.device) <= accepted[:, None]

    # The support as 2 * top_k columns. A token that both sides choose counts only in the first half.
    best = min(top_k, vocab)
    verifier_ids = verifier_logits.topk(best, -1).indices
    guessed = draft_logits.detach().topk(best, -1).indices
    chosen = torch.zeros_like(verifier_logits, dtype=torch.bool).scatter_(-1, verifier_ids, True)
    support = torch.cat([verifier_ids, guessed], -1)
    z, target = draft_logits.gather(-1, support), verifier_logits.gather(-1, support)
    in_support = torch.cat([torch.ones_like(verifier_ids, dtype=torch.bool), ~chosen.gather(-1, guessed)], -1)
    in_support &= active[..., None] & (z.detach() != -torch.inf) & (target != -torch.inf)

    # A finite stand-in for -inf: its weight is exactly 0, and 0 times a difference of logarithms is 0. Where nothing is
    # inside, as in rows that are not read, both distributions are uniform and every term is 0.
    dtype = torch.promote_types(z.dtype, torch.float32)
    nothing = torch.finfo(dtype).min / 4
    z, target = z.to(dtype), target.to(dtype)
    log_q = (z / temperature).masked_fill(~in_support, nothing).log_softmax(-1)
    log_p = (target / temperature).masked_fill(~in_support, nothing).log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    divergence = (p * (log_p - log_q)).sum(-1)
    variation = (p - q).abs().sum(-1) / 2
    share = torch.exp(-eta * torch.minimum(p, q.detach()).sum(-1))
    matching = share * divergence + (1 - share) * variation

    hit = in_support & (support == verifier_logits.argmax(-1, keepdim=True))
    has_hit = hit.any(-1)
    cross_entropy = -z.masked_fill(~in_support, nothing).log_softmax(-1).where(hit, 0).sum(-1)

    blocks = active.any(-1).sum().clamp(min=1)
    matching = (matching.sum(-1) / active.sum(-1).clamp(min=1)).sum() / blocks
    cross_entropy = (cross_entropy.sum(-1) / has_hit.sum(-1).clamp(min=1)).sum() / blocks
    return DrafterLoss(matching + ce_weight * cross_entropy, matching, cross_entropy)


def attach_drafter_(
    model: Transformer, rank: int, *, scale: float = 1.0, generator: torch.Generator | None = None
) -> list[nn.Parameter]:
    """Gives a model a new adapter (unless it has one) and freezes everything else.

    Args:
        model: changed in place: it gets an adapter, and only that keeps ``requires_grad``.
        rank: of the pairs.
        scale: LoRA's alpha / rank, inside the first matrix. `Transformer.attach_adapter_` puts it into the second one,
            which is zero here.
        generator: for the random weights, on the CPU; None: torch's default.

    Returns:
        The adapter's parameters. A new one changes nothing yet: in each layer's pair ``b @ a`` a
        ``(rank, heads * head_dim)`` is normal, of variance scale ** 2 / (heads * head_dim), and b
        ``(hidden_size, rank)`` is zero.

    Raises:
        ValueError: a rank below 1, or one that differs from the model's adapter.

    Source: LoRA, section 4.1; Nemotron-Labs-Diffusion, section 3.3 (rank 128, scale 4).

    Example:
        >>> from pdkernels.models import Transformer, TransformerConfig
        >>> from pdkernels.training import attach_drafter_
        >>> model = Transformer(TransformerConfig(vocab_size=11, hidden_size=16, layers=2, heads=4, kv_heads=2,
        ...                                       head_dim=8, intermediate_size=24))
        >>> [tuple(parameter.shape) for parameter in attach_drafter_(model, 3)]
        [(3, 32), (16, 3), (3, 32), (16, 3)]
        >>> sum(parameter.requires_grad for parameter in model.parameters())
        4
    """
    op = "training.attach_drafter_"
    check_type(type(rank) is int, op, "rank", "be an int", type(rank).__name__)
    check(rank >= 1, op, "rank", "be at least 1", rank)
    if not model.has_adapter:
        widths, hidden = [layer.output.shape[1] for layer in model.layers], model.config.hidden_size
        first = [torch.randn(rank, width, dtype=torch.float32, generator=generator, device="cpu") for width in widths]
        pairs = [
            (a * (scale / math.sqrt(a.shape[1])), torch.zeros(hidden, rank, dtype=torch.float32, device="cpu"))
            for a in first
        ]
        model.attach_adapter_(pairs)
    parameters = [
        parameter
        for layer in model.layers
        for parameter in (layer.adapter_in, layer.adapter_out)
        if parameter is not None
    ]
    have = len(parameters[0])
    check(have == rank, op, "rank", f"be {have}, that of the adapter the model has", rank)
    model.requires_grad_(False)
    for parameter in parameters:
        parameter.requires_grad_()
    return parameters


def _check_arguments(op: str, draft_logits: Tensor, verifier_logits: Tensor, accepted: Tensor) -> None:
    for name, logits in (("draft_logits", draft_logits), ("verifier_logits", verifier_logits)):
        if not logits.is_floating_point():
            raise TypeError(message(op, name, "be floating", logits.dtype))
    if draft_logits.dim() != 3 or draft_logits.shape[2] == 0:
        fail(op, "draft_logits", "have shape (blocks, k, vocab)", tuple(draft_logits.shape))
    if verifier_logits.shape != draft_logits.shape:
        fail(op, "verifier_logits", f"have shape {tuple(draft_logits.shape)}", tuple(verifier_logits.shape))
    if accepted.dtype not in INDEX_DTYPES:
        raise TypeError(message(op, "accepted", "be int32 or int64", accepted.dtype))
    if accepted.shape != draft_logits.shape[:1]:
        fail(op, "accepted", f"have shape ({draft_logits.shape[0]},)", tuple(accepted.shape))
