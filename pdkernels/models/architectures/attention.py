"""The visibility of new tokens, and their attention.

A forward on a cache calls `speculative_attention_append_`: the prefix is read in place, paged or not, the new K and V
are stored after it, and the plan of the new tokens does not depend on its length. Any number of rows takes this path,
because on the CPU a causal row gets the same bits in all forwards. Inputs that the kernels do not support (fp64, head
dimensions that are not a multiple of 8 in 16 .. 512) and bool masks take another path, meant for tests and small
experiments: PyTorch's attention over a copy of the prefix and the new tokens, under a dense mask.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F

from pdkernels._attention import LARGEST, takes_head_dim
from pdkernels._validation import INDEX_DTYPES, KERNEL_DTYPES, check, check_type, fail, sentence
from pdkernels.cache import Cache
from pdkernels.cache.stored import stored
from pdkernels.masks import TilePlan
from pdkernels.masks import causal as causal_mask
from pdkernels.models.architectures.caches import expect_
from pdkernels.models.architectures.config import ExpertsConfig
from pdkernels.models.architectures.experts import Pools
from pdkernels.models.architectures.lora import AdaptedRows
from pdkernels.models.architectures.rope import RopeStyle, Rotation, apply_rope
from pdkernels.models.architectures.windows import Window, Windows, first_seen, hide, windowed_plan
from pdkernels.ops.block_sparse_attention import block_sparse_attention
from pdkernels.ops.speculative_attention import speculative_attention, speculative_attention_append_
from pdkernels.ops.transformer_ops import apply_rope_


class Visibility(NamedTuple):
    """The keys that each row of a forward attends to.

    `mask` is the plan of the new tokens, or a bool tensor that broadcasts to `(batch, heads, rows, keys)`. None: every
    row attends to every key, or, with `causal`, row i to keys 0..i. On a cache without a plan, the first `prefix` keys
    are cached, and the others belong to the new tokens.
    """

    mask: torch.Tensor | TilePlan | None
    causal: bool = False
    prefix: int = 0


def check_tokens(op: str, tokens: torch.Tensor, device: torch.device) -> None:
    """Checks the tokens for a model on `device`. The embedding checks the range of ids."""
    check_type(isinstance(tokens, torch.Tensor), op, "tokens", "be a tensor", type(tokens).__name__)
    check(tokens.dim() == 2, op, "tokens", "have shape (batch, length)", tuple(tokens.shape))
    check_type(tokens.dtype in INDEX_DTYPES, op, "tokens", "be int64 or int32", tokens.dtype)
    check(tokens.device == device, op, "tokens", f"be on the model's device ({device})", tokens.device)


def check_mask(op: str, mask: torch.Tensor | TilePlan | None, batch: int, length: int, device: torch.device) -> None:
    """Raises ValueError or TypeError if a forward of `op` over `length` tokens cannot use this mask."""
    if isinstance(mask, TilePlan):
        if (mask.q_len, mask.kv_len) != (length, length):
            fail(op, "mask", f"be a plan of {length} x {length} tokens", f"{mask.q_len} x {mask.kv_len}")
        if mask.batch not in (None, batch):
            fail(op, "mask", f"be one plan, or {batch} stacked ones", f"{mask.batch} stacked ones")
        if mask.device != device:
            fail(op, "mask", f"be on the model's device ({device})", mask.device)
    elif mask is not None:
        check_type(
            isinstance(mask, torch.Tensor),
            op,
            "mask",
            "be a bool tensor or a TilePlan",
            type(mask).__name__,
            "A segment mask has both: mask.dense() and mask.plan().",
        )
        if mask.shape not in ((length, length), (batch, length, length)):
            fail(op, "mask", f"have shape ({length}, {length}) or ({batch}, {length}, {length})", tuple(mask.shape))
        check_type(mask.dtype == torch.bool, op, "mask", "be bool (True = visible)", mask.dtype)


def check_positions(op: str, positions: torch.Tensor, offsets: torch.Tensor, limit: int) -> None:
    """Raises ValueError if `offsets`, which are at `positions` of a cache's sequences, lie outside of tables of `limit`
    positions. Reads them."""
    if positions.numel():
        low, high = (int(end) for end in positions.aminmax())
        actual = f"{int(offsets.min())}..{int(offsets.max())}"
        remedy = "There they count from the cached length."
        expectation = f"lie in [-length, {limit} - length) with a cache"
        check(low >= 0 and high < limit, op, "positions", expectation, actual, remedy)


def uncached_visibility(mask: torch.Tensor | TilePlan | None, *, causal: bool = True) -> Visibility:
    """Visibility of a full forward: a `(length, length)` or `(batch, length, length)` mask, or a plan; None: causal or
    full."""
    if mask is None:
        return Visibility(None, causal=causal)
    if isinstance(mask, TilePlan):
        return Visibility(mask)
    return Visibility(mask[None, None] if mask.dim() == 2 else mask[:, None])


def plan_of(cache: Cache, rows: int, mask: torch.Tensor | TilePlan | None) -> TilePlan | None:
    """The plan of `rows` new tokens after those of a cache, by `mask` (None: causal), for the kernels; None: they do
    not take them."""
    kernels = cache.dtype in (*KERNEL_DTYPES, torch.int8) and takes_head_dim(cache.head_dim)
    if not kernels or isinstance(mask, torch.Tensor):
        return None
    return _causal_plan(rows, cache.device) if mask is None else mask


def _is_autocast(cache: Cache) -> bool:
    kind = cache.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return False
    return cache.dtype not in (torch.float64, torch.get_autocast_dtype(kind))


def cached_visibility(
    cache: Cache,
    lengths: list[int] | None,
    counts: torch.Tensor | None,
    rows: int,
    mask: torch.Tensor | TilePlan | None,
) -> Visibility:
    """Visibility of `rows` new tokens, which attend to their whole prefix, and to each other by `mask`; None: causally.

    `lengths` is the host's copy of the cache's lengths, which exists on a CPU.
    """
    if _is_autocast(cache) and not torch.compiler.is_compiling():
        fault = "a forward on a cache has the dtype of the model, and autocast changes it"
        remedy = "Call it under torch.autocast(.., enabled=False), and convert the model with .to() for another dtype."
        raise TypeError(sentence("models", fault, remedy))
    expect_(cache, rows, counts)
    if cache.dtype == torch.int8 and isinstance(mask, torch.Tensor):
        fail("Transformer", "mask", "be a TilePlan on an 8-bit cache", "a bool tensor", "Call mask.plan().")
    plan = plan_of(cache, rows, mask)
    if plan is not None:
        return Visibility(plan)
    if mask is None:
        mask = torch.ones(rows, rows, dtype=torch.bool, device=cache.device).tril()
    elif isinstance(mask, TilePlan):
        mask = mask.dense()
    keys = cache.capacity if lengths is None else max(lengths)
    prefix = torch.arange(keys, device=cache.device) < cache.lengths[:, None, None]
    visible = torch.cat([prefix.expand(-1, rows, -1), mask.expand(cache.batch, rows, rows)], -1)
    return Visibility(visible[:, None], prefix=keys)


class Seen(NamedTuple):
    """What the rows of a forward see in a layer: `visibility`, from `starts` on (`first_seen`; None: from 0)."""

    visibility: Visibility
    starts: torch.Tensor | None = None
    rotation: Rotation | None = None
    """Of its rows; None: that of all layers."""


def seen_by_layer(
    windows: Windows,
    visibility: Visibility,
    rows: int,
    device: torch.device,
    lengths: torch.Tensor | None,
    offsets: torch.Tensor | None,
) -> tuple[Seen, ...]:
    """What each layer's rows see; empty: all layers see what `visibility` says.

    `lengths` ``(batch,)`` are those of the cache, after which the rows have `offsets` (None: 0, 1, ..); None: there is
    no cache.
    """
    different = {window for window in windows if window is not None}
    if not different:
        return ()
    by_window: dict[Window | None, Seen] = {None: Seen(visibility)}
    mask = visibility.mask
    if lengths is not None and isinstance(mask, TilePlan):
        starts = first_seen(different, lengths, rows, offsets, mask)
        by_window |= {window: Seen(visibility, starts[window]) for window in different}
    elif isinstance(mask, torch.Tensor):
        where = torch.arange(rows, device=device) if offsets is None else offsets
        keys = where
        if lengths is not None:
            where = lengths[:, None] + where
            cached = torch.arange(visibility.prefix, device=device).expand(len(lengths), -1)
            keys = torch.cat([cached, where], 1)
        for window in different:
            hidden = hide(mask, window, where[..., None, :], keys[..., None, :])
            by_window[window] = Seen(visibility._replace(mask=hidden))
    else:
        plan_of = partial(windowed_plan, rows=rows, device=device, mask=mask, positions=offsets)
        for window in different:
            plan = plan_of(window)
            by_window[window] = Seen(Visibility(plan))
    return tuple(by_window[window] for window in windows)


class NewRows(NamedTuple):
    """The rows of a forward: their rotation, their visibility, and where their K and V are stored."""

    rotation: Rotation
    style: RopeStyle
    kv_heads: int
    visibility: Visibility
    cache: Cache | None = None
    counts: torch.Tensor | None = None
    seen: tuple[Seen, ...] = ()
    """In each layer, if they differ."""
    query_factor: float | None = None
    """Of queries, beside the one of attention."""
    cu_seqlens: torch.Tensor | None = None
    """Where the rows of each sequence begin, if those of all are the rows of one entry."""
    lora: AdaptedRows | None = None
    """Those with adapters of their own."""
    softcap: float | None = None
    """Of scores."""
    pools: Pools | None = None
    """Of experts, for blocks of rows that share them."""

    def pooled(
        self,
        experts: ExpertsConfig | None,
        tokens: torch.Tensor,
        lengths: torch.Tensor | None,
        offsets: torch.Tensor | None,
        counts: torch.Tensor | None = None,
    ) -> NewRows:
        """With pools of experts, if blocks of `tokens` share them. Their positions are `offsets` (None: 0, 1, ..) after
        `lengths`; rows from `counts` on are padding."""
        if experts is None or not experts.pool:
            return self
        order = torch.arange(tokens.shape[1], device=tokens.device)
        where = (order if offsets is None else offsets).expand_as(tokens)
        where = where if lengths is None else lengths[:, None] + where
        valid = None if counts is None else order < counts[:, None]
        return self._replace(pools=Pools.of(where, valid, experts.pool_rows))

    def attend_(self, qkv: torch.Tensor, layer: int, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Attention of `qkv` `(batch, rows, heads + 2 * kv_heads, head_dim)`, not yet rotated: q's shape. `sinks`
        ``(heads,)``: a further score of each."""
        # `split` of a tensor is a function in Python that calls this one.
        qk, v = qkv.split_with_sizes((qkv.shape[2] - self.kv_heads, self.kv_heads), -2)
        visibility, starts, rotation = self.seen[layer] if self.seen else (self.visibility, None, None)
        qk = rotated(qk, self.rotation if rotation is None else rotation, self.style)
        q, k = qk.split_with_sizes((qk.shape[2] - self.kv_heads, self.kv_heads), -2)
        if self.query_factor is not None:
            q = q * self.query_factor
        if self.rotation.query_scale is not None:
            q = q * self.rotation.query_scale.to(q.dtype)
        if self.cache is None:
            return attend(q, k, v, visibility, sinks, self.softcap)
        if self.cu_seqlens is not None:
            return self._attend_packed(q[0], k[0], v[0], self.cu_seqlens, layer, sinks)
        return attend_cached(q, k, v, visibility, self.cache, layer, self.counts, starts, sinks, self.softcap)

    def _attend_packed(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor,
        layer: int,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        cache, plan = self.cache, self.visibility.mask
        assert cache is not None and isinstance(plan, TilePlan)
        k, v = stored(cache.dtype, k, v)
        mixed: torch.Tensor = speculative_attention_append_(
            q,
            k,
            v,
            cache.k[layer],
            cache.v[layer],
            cache.lengths,
            plan,
            cu_seqlens=cu_seqlens,
            block_table=cache.block_table,
            sinks=sinks,
        )
        return mixed[None]


def rotated(qk: torch.Tensor, rotation: Rotation, style: RopeStyle) -> torch.Tensor:
    """Queries and keys of new rows at their positions, in place where a kernel does it."""
    if rotation.positions is None:
        return apply_rope(qk, rotation, style)
    apply_rope_(qk, rotation.cos, rotation.sin, rotation.positions, style=style)
    return qk


def _causal_plan(rows: int, device: torch.device) -> TilePlan:
    """A cached plan, because a decoder uses few widths. Short plans are never freed: a graph may have captured them."""
    return (_kept_plan if rows <= 256 else _recent_plan)(rows, device)


def _new_causal_plan(rows: int, device: torch.device) -> TilePlan:
    return causal_mask(rows).plan(64, 64, device)


_kept_plan, _recent_plan = lru_cache(None)(_new_causal_plan), lru_cache(16)(_new_causal_plan)


def attend_cached(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visibility: Visibility,
    cache: Cache,
    layer: int,
    counts: torch.Tensor | None,
    starts: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention of new tokens over the cached prefix and each other; their K and V are stored after it."""
    if isinstance(visibility.mask, TilePlan):  # as on any 8-bit cache, see `cached_visibility`
        k, v = stored(cache.dtype, k, v)
        return speculative_attention_append_(
            q,
            k,
            v,
            cache.k[layer],
            cache.v[layer],
            cache.lengths,
            visibility.mask,
            counts=counts,
            starts=starts,
            block_table=cache.table(layer),
            sinks=sinks,
            softcap=softcap,
        )
    k, v = stored(cache.dtype, k, v)
    cache.append_(layer, k, v, counts)
    return attend_stored(q, k, v, visibility, cache, layer, sinks=sinks, softcap=softcap)


def attend_stored(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visibility: Visibility,
    cache: Cache,
    layer: int,
    starts: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention of new tokens whose K and V, in the form of the cache, are already stored after the prefix."""
    if isinstance(visibility.mask, TilePlan):
        plan, table = visibility.mask, cache.table(layer)
        k_cache, v_cache = cache.k[layer], cache.v[layer]
        options: dict[str, Any] = {"starts": starts, "block_table": table, "sinks": sinks, "softcap": softcap}
        mixed: torch.Tensor = speculative_attention(q, k, v, k_cache, v_cache, cache.lengths, plan, **options)
        return mixed
    # The new K and V come from the forward: the cache may not store all of them.
    prefix = cache.layer(layer, visibility.prefix)
    keys, values = (torch.cat([old, new], 1).to(q.dtype) for old, new in zip(prefix, (k, v)))
    return attend(q, keys, values, visibility, sinks, softcap)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visibility: Visibility,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Grouped-query attention of q `(batch, rows, heads, head_dim)` over k, v `(batch, keys, kv_heads, head_dim)`."""
    if isinstance(visibility.mask, TilePlan):
        if q.dtype not in KERNEL_DTYPES or not takes_head_dim(q.shape[3]):
            expectation = f"be a bool tensor for a model in {q.dtype} with heads of {q.shape[3]}, which no kernel takes"
            fail("Transformer", "mask", expectation, "a TilePlan", "Pass mask.dense().")
        return block_sparse_attention(q, k, v, visibility.mask, sinks=sinks, softcap=softcap)
    usual = sinks is None and softcap is None
    if visibility.mask is None and q.requires_grad and q.device.type == "cpu" and usual:
        return _by_matmul(q, k, v, visibility.causal)
    if q.device.type == "cpu" and not _is_ordinary(q, k, v):
        return _by_formula(q, k, v, visibility, sinks, softcap)
    mask: torch.Tensor | None = visibility.mask
    if not usual:
        k, v, mask = _with_sinks(q, k, v, visibility, sinks)
    if softcap is not None:
        return _capped(q, k, v, cast(torch.Tensor, mask), softcap)
    return F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=visibility.causal and usual,
        enable_gqa=q.shape[2] != k.shape[2],
    ).transpose(1, 2)


def _capped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, softcap: float) -> torch.Tensor:
    """Attention whose scores are capped before the mask is added, which PyTorch's does not do."""
    group = q.shape[2] // k.shape[2]
    keys, values = (x.transpose(1, 2).repeat_interleave(group, 1) for x in (k, v))
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.transpose(1, 2) @ keys.mT).to(wide) * (q.shape[3] ** -0.5 / softcap)
    weights = (torch.tanh(scores) * softcap + mask).softmax(-1)
    return (weights.masked_fill(mask.isneginf(), 0).to(v.dtype) @ values).transpose(1, 2)


def _is_ordinary(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether all inputs and scores are finite. Otherwise PyTorch's CPU kernels return 0 for a row whose scores are all
    NaN, and spread a NaN or infinity to rows that do not attend to it."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or type(q) is not torch.Tensor:
        return True  # a branch on values would synchronise
    if q.numel() == 0 or k.numel() == 0:
        return True
    largest = [max(abs(float(end)) for end in torch.aminmax(x.detach())) for x in (q, k, v)]
    return largest[0] * largest[1] * q.shape[3] < LARGEST and largest[2] < math.inf


def _dense(visibility: Visibility, rows: int, keys: int, device: torch.device) -> torch.Tensor:
    """What rows see, without a plan."""
    if visibility.mask is None:
        seen = torch.ones(rows, keys, dtype=torch.bool, device=device)
        return seen.tril() if visibility.causal else seen
    assert isinstance(visibility.mask, torch.Tensor)
    return visibility.mask


def _with_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visibility: Visibility, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K, V and a mask of scores with one more key, of zeros, whose score is the sink of a head; none without sinks."""
    seen = _dense(visibility, q.shape[1], k.shape[1], q.device).expand(len(q), q.shape[2], q.shape[1], -1)
    scores = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, -torch.inf)
    if sinks is None:
        return k, v, scores
    scores = torch.cat([scores, sinks.to(q.dtype)[:, None, None].expand_as(scores[..., :1])], -1)
    k, v = (F.pad(x, (0, 0, 0, 0, 0, 1)) for x in (k, v))
    return k, v, scores


def _by_formula(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visibility: Visibility,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention that skips masked pairs instead of multiplying by 0, because 0 times NaN is NaN."""
    rows, keys, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    seen = _dense(visibility, rows, keys, q.device)
    wide = torch.promote_types(q.dtype, torch.float32)
    queries = q.transpose(1, 2).to(wide)
    pairs = seen[..., None]
    heads = []
    for head in range(q.shape[2]):  # one at a time, to save memory
        key, value = (x[:, :, head // group].to(wide)[:, None, None] for x in (k, v))
        scores = (torch.where(pairs, queries[:, head, None, :, None], 0) * torch.where(pairs, key, 0)).sum(-1)
        scores = scores * q.shape[3] ** -0.5
        scores = (scores if softcap is None else torch.tanh(scores / softcap) * softcap).masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[head].to(wide).expand_as(scores[..., :1])], -1)
        nothing = scores.isneginf().all(-1, keepdim=True)
        weights = scores.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)[..., :keys].masked_fill(~seen, 0)
        heads.append((weights[..., None] * torch.where(pairs, value, 0)).sum(-2))
    return torch.cat(heads, 1).transpose(1, 2).to(v.dtype)


def _by_matmul(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Attention by two batched products, for training on a CPU, where the backward of SDPA takes twice as long."""
    batch, length, heads, head_dim = q.shape
    kv_heads, group = k.shape[2], heads // k.shape[2]
    q = q.unflatten(2, (kv_heads, group)).permute(0, 2, 3, 1, 4).reshape(batch * kv_heads, group * length, head_dim)
    k = k.permute(0, 2, 3, 1).reshape(batch * kv_heads, head_dim, length)
    v = v.transpose(1, 2).reshape(batch * kv_heads, length, head_dim)
    bias = torch.zeros(length, length, dtype=q.dtype, device=q.device)
    if causal:
        hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        bias = bias.masked_fill(hidden, -torch.inf)
    weights = torch.baddbmm(bias.repeat(group, 1), q, k, alpha=head_dim**-0.5).softmax(-1).to(v.dtype)
    return (weights @ v).view(batch, kv_heads, group, length, head_dim).permute(0, 3, 1, 2, 4).flatten(2, 3)
