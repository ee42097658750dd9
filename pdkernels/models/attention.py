"""What each new token sees, and the attention over it."""

from __future__ import annotations

import operator
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from pdkernels.masks import TilePlan
from pdkernels.ops.block_sparse_attention import block_sparse_attention

if TYPE_CHECKING:
    from pdkernels.models.transformer import Cache


class Visibility(NamedTuple):
    """The keys of one forward: how many to read per sequence, and which of them each row sees.

    `mask` is True where a row sees a key, and broadcasts to `(batch, heads, rows, keys)`, or is the plan of such a mask.
    None: every row sees every key, or, with `causal`, row i sees keys 0..i. With `tail` the `keys` are those of the cached
    prefix alone, and the columns of `mask` behind them are the new tokens.
    """

    keys: int
    mask: torch.Tensor | TilePlan | None
    causal: bool = False
    tail: bool = False


def uncached_visibility(length: int, mask: torch.Tensor | TilePlan | None) -> Visibility:
    """A full forward: causal, or an explicit `(length, length)` or `(batch, length, length)` mask, or a plan."""
    if mask is None:
        return Visibility(length, None, causal=True)
    if isinstance(mask, TilePlan):
        return Visibility(length, mask)
    return Visibility(length, mask[None, None] if mask.dim() == 2 else mask[:, None])


def cached_visibility(cache: Cache, lengths: list[int] | None, counts: list[int] | None, rows: int) -> Visibility:
    """`rows` new tokens per sequence on top of a cache: row i of sequence b sees the keys j <= lengths[b] + i.

    `lengths` and `counts` are the host's copies, where it has them. Without them (the cache is on a device that the
    host must not wait for) the whole capacity is read under a mask.
    """
    if lengths is None:
        keys = cache.capacity
    else:
        longest = max(lengths)
        if counts is None or min(counts) == rows:
            keys = longest + rows
            if rows == 1 and min(lengths) == longest:
                return Visibility(keys, None)
            if longest == 0:
                return Visibility(keys, None, causal=True)
        else:
            # At least one, so that padding rows see something finite.
            keys = max(1, max(map(operator.add, lengths, counts)))
    device = cache.lengths.device
    last_seen = cache.lengths[:, None] + torch.arange(rows, device=device)
    return Visibility(keys, torch.arange(keys, device=device) <= last_seen[:, None, :, None])


def planned_visibility(cache: Cache, lengths: list[int] | None, mask: torch.Tensor | TilePlan) -> Visibility:
    """New tokens that see the whole prefix of their sequence, and each other as `mask` says."""
    keys = cache.capacity if lengths is None else max(lengths)
    tail = _dense(mask) if isinstance(mask, TilePlan) else mask
    tail = tail.expand(cache.batch, *tail.shape[-2:])
    prefix = torch.arange(keys, device=tail.device) < cache.lengths[:, None]
    return Visibility(keys, torch.cat([prefix[:, None].expand(-1, tail.shape[1], -1), tail], -1)[:, None], tail=True)


@lru_cache(maxsize=32)
def _dense(plan: TilePlan) -> torch.Tensor:
    """A decoder gives the same few plans again and again."""
    return plan.dense()


def attend_cached(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visibility: Visibility,
    cache: Cache,
    layer: int,
    counts: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of new tokens over the cached prefix and each other; their K and V are stored behind it."""
    if visibility.tail:
        mixed = _attend_tail(q, k, v, visibility, cache, layer)
        cache.append_(layer, k, v, counts)
        return mixed
    cache.append_(layer, k, v, counts)
    return attend(q, *cache.layer(layer, visibility.keys), visibility)


def _attend_tail(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visibility: Visibility, cache: Cache, layer: int
) -> torch.Tensor:
    """The new tokens' K and V come from the forward, not from the cache, which need not keep (or have room for) them all."""
    keys, values = (torch.cat([old, new], 1) for old, new in zip(cache.layer(layer, visibility.keys), (k, v)))
    return attend(q, keys, values, visibility)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visibility: Visibility) -> torch.Tensor:
    """Grouped-query attention of q `(batch, rows, heads, head_dim)` over k, v `(batch, keys, kv_heads, head_dim)`."""
    if isinstance(visibility.mask, TilePlan):
        return block_sparse_attention(q, k, v, visibility.mask)
    if visibility.causal and q.requires_grad and q.device.type == "cpu":
        return _causal_by_matmul(q, k, v)
    return F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=visibility.mask,
        is_causal=visibility.causal,
        enable_gqa=q.shape[2] != k.shape[2],
    ).transpose(1, 2)


def _causal_by_matmul(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """For training on a CPU, where SDPA's backward takes twice as long as that of two batched products."""
    batch, length, heads, head_dim = q.shape
    kv_heads, group = k.shape[2], heads // k.shape[2]
    q = q.unflatten(2, (kv_heads, group)).permute(0, 2, 3, 1, 4).reshape(batch * kv_heads, group * length, head_dim)
    k = k.permute(0, 2, 3, 1).reshape(batch * kv_heads, head_dim, length)
    v = v.transpose(1, 2).reshape(batch * kv_heads, length, head_dim)
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    bias = torch.zeros(length, length, dtype=q.dtype, device=q.device).masked_fill(hidden, -torch.inf).repeat(group, 1)
    weights = torch.baddbmm(bias, q, k, alpha=head_dim**-0.5).softmax(-1).to(v.dtype)
    return (weights @ v).view(batch, kv_heads, group, length, head_dim).permute(0, 3, 1, 2, 4).flatten(2, 3)
