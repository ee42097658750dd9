"""Attention of drafted tokens over a cached prefix and a planned tail: one decode step of a parallel decoder.

The prefix is seen by all new tokens and needs no mask; among themselves they see what a `TilePlan` shows. The plan knows
nothing of the prefix, so one plan serves every step, and lengths are a tensor that kernels read where it lies: a step neither
waits for the device nor builds a mask.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pdkernels._validation import check, check_index, check_type, fail, message
from pdkernels.backends import Backend
from pdkernels.masks import TilePlan
from pdkernels.ops._attention import check_plan, takes_head_dim
from pdkernels.ops._floats import KERNEL_DTYPES
from pdkernels.ops._library import DEBUG_CHECKS, LIBRARY, call, define
from pdkernels.reference import speculative_attention as reference

OP = "speculative_attention"

# A block's offsets from its first token have to fit into 32 bits on CUDA. Inputs of wider strides are copied, caches never.
MAX_CUDA_TOKEN_STRIDE = 2**23


def speculative_attention(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_lengths: Tensor,
    plan: TilePlan,
    *,
    block_table: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of new tokens: each sees all of its sequence's cached prefix, then the new tokens its plan shows it.

    For inference: it has no gradient. The cache is read and never written; `pdkernels.kv_append_` or
    `pdkernels.kv_commit_` keep the rows that were accepted.

    Args:
        q: ``(batch, new, q_heads, head_dim)``, float32, float16 or bfloat16 (float64 with ``backend="reference"``); head_dim a
            multiple of 8 in ``[16, 256]``.
        k_new, v_new: ``(batch, new, kv_heads, head_dim)``, K and V of the new tokens, dtype of q; kv_heads divides q_heads, and
            query head ``h`` reads KV head ``h // (q_heads // kv_heads)``.
        k_cache, v_cache: ``(batch, slots, kv_heads, head_dim)``, one layer of a cache, dtype of q. With `block_table`:
            ``(num_pages, page_size, kv_heads, head_dim)``. All five may have any strides with a contiguous last dimension.
        cache_lengths: ``(batch,)`` int32 or int64, cached tokens of each sequence. What stands behind them is not read, in the
            cache as in the table.
        plan: of a mask of ``new`` rows and columns, on the device of q: ``mask.plan(block_q, block_k, q.device)``. All
            sequences and heads share it; a stacked plan (`TilePlan.stack`) has one for each sequence.
        block_table: ``(batch, pages_per_sequence)`` int32 or int64; position ``p`` is slot ``p % page_size`` of page
            ``block_table[b, p // page_size]``. None: the cache is contiguous.
        scale: of the scores, finite; None means ``head_dim ** -0.5``.
        return_lse: also return the log-sum-exp of each row's scores.
        backend: see `pdkernels.show_config`.

    Returns:
        ``out``, shape and dtype of q, contiguous. With `return_lse` ``(out, lse)``: the natural log-sum-exp of the visible scores,
        ``(batch, q_heads, new)`` float32. Rows that see nothing, which takes an empty prefix, are zero, with a log-sum-exp of
        -inf.

    Raises:
        ValueError: shapes or strides that do not fit, a plan for another number of tokens, another batch or another device. On
            the CPU also lengths out of ``[0, capacity]`` and pages inside a length that do not exist. On CUDA lengths are clamped
            and pages have to be right; ``PDKERNELS_DEBUG_CHECKS=1`` raises there as well, at the price of a sync.
        TypeError: dtypes that do not fit, a mask instead of a plan.
        NotImplementedError: a backend that does not serve the device; an input that wants a gradient.

    Softmax and sums run in float32. Results repeat bit for bit and do not depend on the number of threads or on the rest of the
    batch; pages give the bits of a contiguous cache of their capacity. ``torch.compile`` sees one op, and neither it nor a CUDA
    graph notices that prefixes grow.

    Source: one forward over prefix and draft as in quadratic self-speculation (Nemotron-Labs-Diffusion, appendix C); shares of a
    prefix merged by their log-sum-exps after Flash-Decoding (Dao et al., 2023).

    Example:
        >>> import torch, pdkernels as pd
        >>> mask = pd.masks.quadratic(4)                                         # 4 draft tokens, 4 masks behind each
        >>> q, k_new, v_new = (torch.randn(2, 20, heads, 64) for heads in (8, 2, 2))
        >>> k_cache, v_cache = (torch.randn(2, 512, 2, 64) for _ in range(2))
        >>> lengths = torch.tensor([300, 41])
        >>> pd.speculative_attention(q, k_new, v_new, k_cache, v_cache, lengths, mask.plan(32, 32)).shape
        torch.Size([2, 20, 8, 64])
    """
    for name, tensor in (("q", q), ("k_new", k_new), ("v_new", v_new), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_type(isinstance(tensor, Tensor), OP, name, "be a tensor", type(tensor).__name__)
    if not isinstance(plan, TilePlan):
        remedy = "Call mask.plan(block_q, block_k, q.device)." if hasattr(plan, "plan") else ""
        raise TypeError(message(OP, "plan", "be a TilePlan", type(plan).__name__, remedy))
    if q.dim() == 4 and (plan.q_len != q.shape[1] or plan.kv_len != q.shape[1]):
        remedy = "Build the mask for the new tokens alone; the prefix is seen by all."
        fail(OP, "plan", f"be of {q.shape[1]} rows and columns, the new tokens", f"{plan.q_len} and {plan.kv_len}", remedy)
    if scale is None:
        scale = q.shape[-1] ** -0.5 if q.dim() > 0 else 1.0
    else:
        check_type(isinstance(scale, (int, float)), OP, "scale", "be a number", type(scale).__name__)
        check(-math.inf < scale < math.inf, OP, "scale", "be finite", scale)
    tail = (plan.kv_offsets, plan.kv_tiles, plan.kv_bitmaps, plan.bitmaps, plan.block_q, plan.block_k)
    out, lse = call(attention_op, (q, k_new, v_new, k_cache, v_cache, cache_lengths, *tail, scale, block_table), q, backend)
    return (out, lse) if return_lse else out


def _check(
    q: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, cache_lengths: Tensor,
    kv_offsets: Tensor, kv_tiles: Tensor, kv_bitmaps: Tensor, bitmaps: Tensor, block_q: int, block_k: int, scale: float,
    block_table: Tensor | None = None,
) -> None:  # fmt: skip
    """All but values, and dtypes of float64."""
    for name, x in (("q", q), ("k_new", k_new), ("v_new", v_new), ("k_cache", k_cache), ("v_cache", v_cache)):
        if x.dim() != 4:
            layout = "(batch, new, heads, head_dim)"
            if name.endswith("cache"):
                layout = "(batch, slots, heads, head_dim)" if block_table is None else "(num_pages, page_size, heads, head_dim)"
            fail(OP, name, f"have shape {layout}", tuple(x.shape), "Pass one layer of a stacked cache." if x.dim() == 5 else "")
        if x.dtype not in (*KERNEL_DTYPES, torch.float64):
            raise TypeError(message(OP, name, "be float32, float16 or bfloat16", x.dtype, "Convert it with .to()."))
        if x.dtype != q.dtype:
            raise TypeError(message(OP, name, f"be {q.dtype} like q", x.dtype, "Convert it with .to()."))
        if x.device != q.device:
            fail(OP, name, f"be on {q.device} like q", x.device, f"Move it with .to({str(q.device)!r}).")
        if x.shape[3] > 1 and x.stride(3) != 1:
            remedy = "A cache is not copied: allocate it so." if name.endswith("cache") else "Call .contiguous() on it."
            fail(OP, name, "have a contiguous last dimension", f"strides {x.stride()}", remedy)
        if name.endswith("cache") and x.device.type == "cuda" and x.stride(1) >= MAX_CUDA_TOKEN_STRIDE:
            wanted = f"have less than {MAX_CUDA_TOKEN_STRIDE} elements from token to token on CUDA"
            fail(OP, name, wanted, f"strides {x.stride()}", "A cache is not copied: allocate it so.")
    if k_new.shape[:2] != q.shape[:2] or k_new.shape[3] != q.shape[3]:
        wanted = f"have the batch {q.shape[0]}, the {q.shape[1]} tokens and the head_dim {q.shape[3]} of q"
        fail(OP, "k_new", wanted, tuple(k_new.shape))
    if v_new.shape != k_new.shape:
        fail(OP, "v_new", f"have shape {tuple(k_new.shape)} like k_new", tuple(v_new.shape))
    if k_new.shape[2] == 0 or q.shape[2] == 0 or q.shape[2] % k_new.shape[2] != 0:
        fail(OP, "k_new", f"have a number of heads that divides the {q.shape[2]} of q", k_new.shape[2])
    if not takes_head_dim(q.shape[3]):
        remedy = "Pad all heads with zeros and pass the scale."
        fail(OP, "head_dim", "be a multiple of 8 in [16, 256]", q.shape[3], remedy)
    if k_cache.shape[2:] != k_new.shape[2:]:
        fail(OP, "k_cache", f"have {k_new.shape[2]} heads of {k_new.shape[3]} like k_new", tuple(k_cache.shape))
    if v_cache.shape != k_cache.shape:
        fail(OP, "v_cache", f"have shape {tuple(k_cache.shape)} like k_cache", tuple(v_cache.shape))
    check_index(OP, "cache_lengths", cache_lengths, (q.shape[0],), q.device)
    if block_table is not None:
        check_index(OP, "block_table", block_table, (q.shape[0], None), q.device)
        if k_cache.shape[1] == 0:
            fail(OP, "k_cache", "have a page size of at least 1", 0)
    elif k_cache.shape[0] != q.shape[0]:
        remedy = "Pass the block_table of a paged cache."
        fail(OP, "k_cache", f"have the batch {q.shape[0]} of q", tuple(k_cache.shape), remedy)
    check_plan(OP, q, q.shape[1], (kv_offsets, kv_tiles, kv_bitmaps), (), bitmaps, block_q, block_k)


def _check_values(k_cache: Tensor, cache_lengths: Tensor, block_table: Tensor | None) -> None:
    """What the CPU kernel checks by itself. On a GPU this waits for it."""
    pages, page_size = k_cache.shape[:2]
    capacity = page_size if block_table is None else page_size * block_table.shape[1]
    table = [] if block_table is None else block_table.tolist()
    for b, length in enumerate(cache_lengths.tolist()):
        if not 0 <= length <= capacity:
            remedy = f"The cache holds {capacity} rows a sequence."
            fail(OP, "cache_lengths", f"be in [0, {capacity}]", f"{length} for sequence {b}", remedy)
        for i, page in enumerate(table[b][: -(-length // page_size)] if table else []):
            if not 0 <= page < pages:
                remedy = "Every page of the prefix must exist."
                fail(OP, f"block_table[{b}, {i}]", f"be in [0, {pages - 1}]", f"{page} for sequence {b}", remedy)


def _check_all(*arguments: Any) -> None:
    _check(*arguments)
    _check_values(arguments[3], arguments[5], arguments[13] if len(arguments) > 13 else None)


def _fake(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    _check(q, *rest)
    if q.dtype == torch.float64:
        remedy = "Pass backend='reference', which computes in float64."
        raise TypeError(message(OP, "q", "be float32, float16 or bfloat16 for the kernels", q.dtype, remedy))
    return q.new_empty(q.shape), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


def _reference(
    q: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, cache_lengths: Tensor,
    kv_offsets: Tensor, kv_tiles: Tensor, kv_bitmaps: Tensor, bitmaps: Tensor, block_q: int, block_k: int, scale: float,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    new = q.shape[1]
    # Of what a whole plan has besides, unpacking it looks at the numbers of tiles alone.
    rows, columns = (kv_offsets.new_empty(-(-new // block)) for block in (block_q, block_k))
    lists = (kv_offsets, kv_tiles, kv_bitmaps)
    plan = TilePlan(*lists, *lists, rows, columns, bitmaps, new, new, block_q, block_k, visible_pairs=0)
    options = {"block_table": block_table, "scale": scale}
    return reference.speculative_attention(q, k_new, v_new, k_cache, v_cache, cache_lengths, plan.dense(), **options)


def _triton(*arguments: Any) -> tuple[Tensor, Tensor]:
    from pdkernels.triton.speculative_attention import forward

    if DEBUG_CHECKS:
        _check_all(*arguments)
    return forward(*arguments)


attention_op = define(
    f"{OP}(Tensor q, Tensor k_new, Tensor v_new, Tensor k_cache, Tensor v_cache, Tensor cache_lengths, "
    "Tensor kv_offsets, Tensor kv_tiles, Tensor kv_bitmaps, Tensor bitmaps, int block_q, int block_k, float scale, "
    "Tensor? block_table=None) -> (Tensor, Tensor)",
    fake=_fake,
    reference=_reference,
    triton=_triton,
    reference_check=_check_all,
)


def _refuse_gradients(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Results without a history would look like constants to whoever trains through them."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in arguments[:5]):
        remedy = "Train with block_sparse_attention, or call it under torch.no_grad()."
        raise NotImplementedError(message(OP, "its inputs", "not require gradients", "one that does", remedy))
    with torch._C._AutoDispatchBelowAutograd():
        return attention_op(*arguments)


LIBRARY.impl(OP, _refuse_gradients, "Autograd")
