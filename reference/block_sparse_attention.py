"""Masked attention with the whole score matrix and a dense boolean mask."""

from __future__ import annotations

import torch
from torch import Tensor


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of ``softmax(scale q k^T + mask) v``; autograd differentiates both.

    Args:
        q: ``(batch, q_len, q_heads, head_dim)``.
        k, v: ``(batch, kv_len, kv_heads, head_dim)``; query head ``h`` reads KV head ``h // (q_heads // kv_heads)``.
        mask: bool ``(q_len, kv_len)`` or ``(batch, q_len, kv_len)``, True where a query attends to a key.
        scale: None means ``head_dim ** -0.5``.
        sinks: ``(q_heads,)``: another score of every row of a head, not scaled, whose value is zero; it is in the softmax and in
            the log-sum-exp. None: no head has one.
        softcap: scaled scores s become ``softcap * tanh(s / softcap)``; 0: they stay.

    Returns:
        ``out`` like q, and the natural log-sum-exp of the visible scores ``(batch, q_heads, q_len)``, in float32 for
        half precision. Without a sink, fully masked rows return zeros, a log-sum-exp of -inf and zero gradients.

    Non-finite numbers affect only the rows that see them.

    The softmax runs in float32 for half precision, everything else in the dtype of q.
    """
    group = q.shape[2] // k.shape[2]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    queries = q.transpose(1, 2)
    keys, values = (x.transpose(1, 2).repeat_interleave(group, dim=1) for x in (k, v))
    hidden = ~(mask if mask.dim() == 2 else mask.unsqueeze(1))
    # A traced graph cannot branch on values.
    finite = torch.compiler.is_compiling() or all(bool(x.isfinite().all()) for x in (q, k, v))
    scores = (queries @ keys.transpose(2, 3) if finite else _visible_scores(queries, keys, hidden)) * scale
    if finite and q.dtype == torch.float16 and not torch.compiler.is_compiling() and not bool(scores.isfinite().all()):
        scores = queries.float() @ keys.float().transpose(2, 3) * scale  # beyond the range of float16
    scores = scores.to(torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:  # the last column
        column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat(
            [scores, column.masked_fill(column.isneginf(), -torch.inf)], -1
        )  # so that no gradient reaches these
    lse = scores.logsumexp(dim=-1)
    weights = (scores - lse.masked_fill(lse.isneginf(), 0).unsqueeze(-1)).exp()
    # The rounding of a large log-sum-exp can exceed log(sum), so weights are divided by their sum instead.
    total, near = weights.sum(-1, keepdim=True), (lse.abs() < 16384).unsqueeze(-1)
    weights = (weights / total.masked_fill(near | (total == 0), 1)).to(q.dtype)
    weights = weights[..., : k.shape[1]]
    out = weights @ values if finite else _visible_sums(weights, values, hidden)
    return out.transpose(1, 2).contiguous(), lse


# A weight of 0 times a non-finite value is NaN, so masked tokens are left out pair by pair.
def _visible_scores(queries: Tensor, keys: Tensor, hidden: Tensor) -> Tensor:
    seen = ~hidden.unsqueeze(-1)
    return (torch.where(seen, queries.unsqueeze(3), 0) * torch.where(seen, keys.unsqueeze(2), 0)).sum(-1)


def _visible_sums(weights: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
    return (weights.unsqueeze(-1) * torch.where(hidden.unsqueeze(-1), 0, values.unsqueeze(2))).sum(-2)
