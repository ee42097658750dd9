"""The attention function of ``attn_implementation="pdkernels"``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdkernels._attention import autocasted, takes_head_dim
from pdkernels._validation import KERNEL_DTYPES, check_type, fail, message
from pdkernels.integrations.transformers._plans import PlanMask, causal_plan, full_plan, note_rule, plan_after
from pdkernels.integrations.transformers._rows import PagedRows, Pages, widened
from pdkernels.masks import TilePlan
from pdkernels.models.architectures.recompute import nothing_new
from pdkernels.ops.block_sparse_attention import block_sparse_attention
from pdkernels.ops.speculative_attention import speculative_attention

OP = 'attn_implementation="pdkernels"'
WIDEST = 512  # heads supported by the kernels
# What other implementations compute and these kernels do not, by argument name.
REFUSED = {
    "softcap": "a soft cap",
    "position_bias": "a bias of positions",
    "head_mask": "a mask of heads",
    "attention_bias": "a bias",
    "block_indices": "a choice of key blocks",
    "indices": "a choice of keys",
    "sinks": "sinks of every token",
}


class NotOurs(NotImplementedError):
    """Attention that these kernels do not compute; `what` says in a few words why."""

    def __init__(self, text: str, kind: str) -> None:
        super().__init__(text)
        self.what = kind


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    tile_plan: TilePlan | None = None,
    s_aux: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attention of query ``(batch, heads, rows, head_dim)`` over key and value ``(batch, kv_heads, keys, head_dim)``.

    `s_aux` ``(heads,)`` or None: sinks, as transformers calls them.
    """
    query, key, value = _in_one_dtype(query, key, value, getattr(attention_mask, "step", None))
    size, width = query.shape[3], value.shape[3]
    if size != width:  # DeepSeek's MLA; zeros change neither scores nor sums
        scaling = size**-0.5 if scaling is None else scaling
        query, key, value = (widened(rows, max(size, width)) for rows in (query, key, value))
    _check(module, query, dropout, scaling, rest)
    mixed = _attend(module, query, key, value, attention_mask, scaling, is_causal, tile_plan, s_aux)
    return mixed[..., :width], None


def _in_one_dtype(query: Tensor, key: Tensor, value: Tensor, step: Any) -> tuple[Tensor, ...]:
    """Under autocast queries and keys may be wider than values. Rows that a cache holds say what all become."""
    if isinstance(key, PagedRows):
        return *autocasted(query, dtype=key.dtype), key, value
    return autocasted(query, key, value, dtype=getattr(getattr(step, "cache", None), "dtype", None))


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    is_causal: bool | None,
    tile_plan: TilePlan | None,
    s_aux: Tensor | None,
) -> Tensor:
    """`attention` for values as wide as keys."""
    s_aux = None if s_aux is None else s_aux.float()
    step = getattr(attention_mask, "step", None)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if query.shape[3] > WIDEST and step is None:
        return _wide(query, key, value, attention_mask, tile_plan, causal, scaling, s_aux)
    if isinstance(key, PagedRows) and isinstance(value, PagedRows) and causal and tile_plan is None:
        return _paged(query.transpose(1, 2), key.pages, attention_mask, scaling, s_aux)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if step is not None:
        mixed: Tensor = step.attend(q, k, v, getattr(module, "layer_idx", None), scaling, s_aux)
        return mixed
    if tile_plan is not None:
        check_type(
            isinstance(tile_plan, TilePlan),
            OP,
            "tile_plan",
            "be a TilePlan",
            type(tile_plan).__name__,
            "Call mask.plan().",
        )
        return block_sparse_attention(q, k, v, tile_plan, scale=scaling, sinks=s_aux)
    if attention_mask is None:
        if type(module).__name__ == "BigBirdPegasusDecoderAttention":  # which is causal, and says that it is not
            fault = message(
                OP, "is_causal", "be True in causal layers", False, 'Use attn_implementation="eager" for this model.'
            )
            raise NotOurs(fault, "causal layers that say they are not")
        if not causal and q.shape[1] < k.shape[1] and not _records(q, k, v):
            return _full_tail(q, k, v, scaling, s_aux)
        plan_for = causal_plan if causal else full_plan
        plan = plan_for(q.shape[1], k.shape[1], q.device)
        return block_sparse_attention(q, k, v, plan, scale=scaling, sinks=s_aux)
    if not isinstance(attention_mask, PlanMask):
        return _dense(query, key, value, attention_mask, scaling, s_aux)
    if attention_mask.rule is not None:
        note_rule(getattr(module, "layer_idx", None), attention_mask)
    if attention_mask.plan is not None:
        return block_sparse_attention(q, k, v, attention_mask.plan, scale=scaling, sinks=s_aux)
    return _after_prefix(q, k, v, attention_mask.offset, attention_mask.starts, scaling, s_aux)


def _check(module: nn.Module, query: Tensor, dropout: float, scaling: float | None, options: dict[str, Any]) -> None:
    remedy = 'Use attn_implementation="eager" for this model.'
    # The eager functions of 4.57 read these from the layer.
    if "relative_key" in str(getattr(module, "position_embedding_type", None)):
        raise NotOurs(message(OP, "position_embedding_type", "be absolute or rotary", "a relative one", remedy), "relative positions")  # fmt: skip
    scaled = getattr(module, "scale_attn_weights", True) and not getattr(
        module, "scale_attn_by_inverse_layer_idx", False
    )
    if scaling is None and not scaled:
        fault = message(
            OP, "scale_attn_weights", "be True without scale_attn_by_inverse_layer_idx", "another scale", remedy
        )
        raise NotOurs(fault, "a scale of every layer")
    for name, kind in REFUSED.items():
        if options.get(name) is not None:
            raise NotOurs(message(OP, name, "be absent", "one", remedy), kind)
    if options.get("output_attentions"):
        raise NotImplementedError(message(OP, "output_attentions", "be False", True, remedy))
    if dropout:
        raise NotImplementedError(
            message(OP, "dropout", "be 0", dropout, "Set attention_dropout=0 in the configuration.")
        )
    supported = query.dtype in KERNEL_DTYPES and (takes_head_dim(query.shape[3]) or query.shape[3] > WIDEST)
    if not supported:
        actual = f"{query.dtype} with heads of {query.shape[3]}"
        fault = "be float32, float16 or bfloat16 with heads of a multiple of 8 in [16, 512]"
        raise NotOurs(message(OP, "query", fault, actual, 'Use attn_implementation="sdpa".'), actual)


def _after_prefix(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offset: Tensor | int,
    starts: Tensor | None,
    scale: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Rows that see all cached tokens, or those from `starts` on, and each other causally; no plan is made for a step.

    `k` and `v` hold the cached tokens, the new ones at `offset`, and optionally room for more.
    """
    batch, rows = q.shape[:2]
    if _records(q, k, v):
        keys = int(offset) + rows
        plan = causal_plan(rows, keys, q.device) if starts is None else plan_after(starts, int(offset), keys)
        return block_sparse_attention(q, k[:, :keys], v[:, :keys], plan, scale=scale, sinks=sinks)
    if rows == 1 and isinstance(offset, Tensor):
        # The new token is already in the cache; only the device knows where, and the host does not need to.
        lengths = (offset.to(torch.int64) + 1).expand(batch).contiguous()
        plan = nothing_new(1, q.device)
        return speculative_attention(q, k[:, :1], v[:, :1], k, v, lengths, plan, scale=scale, sinks=sinks)
    first = int(offset)
    lengths = torch.full((batch,), first, dtype=torch.int64, device=q.device)
    new = slice(first, first + rows)
    plan = causal_plan(rows, rows, q.device)
    return speculative_attention(q, k[:, new], v[:, new], k, v, lengths, plan, starts=starts, scale=scale, sinks=sinks)


def _records(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _full_tail(q: Tensor, k: Tensor, v: Tensor, scale: float | None, sinks: Tensor | None) -> Tensor:
    """The last rows of the keys are the queries' own, and all see everything: a canvas after its prefix, of any
    length."""
    rows, keys = q.shape[1], k.shape[1]
    lengths = torch.full((q.shape[0],), keys - rows, dtype=torch.int64, device=q.device)
    plan = full_plan(rows, rows, q.device)
    new = slice(keys - rows, keys)
    return speculative_attention(q, k[:, new], v[:, new], k, v, lengths, plan, scale=scale, sinks=sinks)


def _wide(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    plan: TilePlan | None,
    causal: bool,
    scale: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """For heads wider than the kernels support: PyTorch's attention, under the dense mask of a plan."""
    rows, keys = query.shape[2], key.shape[2]
    if isinstance(mask, PlanMask):
        plan = mask.plan if plan is None else plan
        if plan is None and mask.starts is not None:
            plan = plan_after(mask.starts, int(mask.offset), keys)
        offset, mask = mask.offset, None
    else:
        offset = keys - rows
    if plan is not None:
        mask = plan.dense()
        mask = mask[:, None] if mask.dim() == 3 else mask
    elif mask is None and causal:
        positions = torch.arange(rows, device=query.device) + offset
        mask = torch.arange(keys, device=query.device) <= positions[:, None]
    if mask is None:
        mask = torch.ones(rows, keys, dtype=torch.bool, device=query.device)
    return _dense(query, key, value, mask, scale, sinks)


def _paged(q: Tensor, pages: Pages, mask: Tensor | None, scale: float | None, sinks: Tensor | None) -> Tensor:
    """Causal attention over a paged `PdCache`, in its pages."""
    k, v = pages.new_k, pages.new_v
    if mask is not None and (not isinstance(mask, PlanMask) or mask.plan is not None):
        plan = getattr(mask, "plan", None)
        if pages.first == 0 and plan is not None:
            return block_sparse_attention(q, k, v, plan, scale=scale, sinks=sinks)
        fail(
            OP, "attention_mask", "be causal without padding for a paged cache", "another", "Use a contiguous PdCache."
        )
    lengths = torch.full((q.shape[0],), pages.first, dtype=torch.int64, device=q.device)
    plan, starts = causal_plan(q.shape[1], q.shape[1], q.device), getattr(mask, "starts", None)
    caches, table = (pages.k, pages.v), pages.block_table
    return speculative_attention(
        q, k, v, *caches, lengths, plan, starts=starts, block_table=table, scale=scale, sinks=sinks
    )


def _dense(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None, sinks: Tensor | None
) -> Tensor:
    """For a caller's own 4-D mask: PyTorch's attention, since a plan for it would cost more than it saves."""
    mask = mask[..., : key.shape[2]]
    if sinks is not None:
        # A key of zeros, whose score is the sink.
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
        mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], -1)
        score = sinks.to(query.dtype).view(1, -1, 1, 1).expand(*mask.shape[:3], 1)
        mask = torch.cat([mask.to(query.dtype), score], -1)
        key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2)
