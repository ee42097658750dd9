"""Attention of drafted tokens over a cached prefix and a planned tail: one decode step of a parallel decoder.

All new tokens see the prefix, which needs no mask; among themselves they see what a `TilePlan` shows. The plan does not
depend on the prefix, so one plan serves every step, and lengths are a tensor that kernels read on the device: a step neither
synchronizes nor builds a mask.

`speculative_attention` reads the cache; `speculative_attention_append_` is the same kernel, which also stores rows after the
prefix. They are two ops because a schema fixes what is written: a graph would otherwise assume that every forward changes
its cache.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor

from pdkernels import masks
from pdkernels._validation import KERNEL_DTYPES, check_index, check_type, fail, message, refuse_tangents
from pdkernels.backends import Backend
from pdkernels.masks import TilePlan
from pdkernels.masks.tile_plan import PlanArguments
from pdkernels.ops._attention import PLAN_SCHEMA, check_plan, dense_plan, given_scale, takes_head_dim
from pdkernels.ops._library import DEBUG_CHECKS, LIBRARY, Draw, call, define
from pdkernels.reference import speculative_attention as reference

__all__ = ["speculative_attention", "speculative_attention_append_"]

OP = "speculative_attention"
APPEND = "speculative_attention_append_"

# A block's offsets from its first token must fit into 32 bits on CUDA. Inputs with wider strides are copied, caches never.
MAX_CUDA_TOKEN_STRIDE = 2**23


@overload
def speculative_attention(
    q: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, plan: TilePlan, *,
    block_table: Tensor | None = ..., scale: float | None = ..., return_lse: Literal[False] = ..., backend: Backend = ...
) -> Tensor: ...  # fmt: skip


@overload
def speculative_attention(
    q: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, plan: TilePlan, *,
    block_table: Tensor | None = ..., scale: float | None = ..., return_lse: Literal[True], backend: Backend = ...
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def speculative_attention(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    plan: TilePlan,
    *,
    block_table: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of new tokens: each sees all of its sequence's cached prefix, then the new tokens its plan shows it.

    For inference: it has no gradient. The cache is only read; `pdkernels.speculative_attention_append_` stores new
    rows in the same pass, `pdkernels.kv_commit_` keeps the accepted ones.

    Args:
        q: ``(batch, new, q_heads, head_dim)``, float32, float16 or bfloat16 (float64 with ``backend="reference"``); head_dim a
            multiple of 8 in ``[16, 256]``.
        k_new, v_new: ``(batch, new, kv_heads, head_dim)``, K and V of the new tokens, dtype of q; kv_heads divides q_heads, and
            query head ``h`` reads KV head ``h // (q_heads // kv_heads)``.
        k_cache, v_cache: ``(batch, slots, kv_heads, head_dim)``, one layer of a cache, dtype of q. With `block_table`:
            ``(num_pages, page_size, kv_heads, head_dim)``. All five may have any strides with a contiguous last dimension.
        lengths: ``(batch,)`` int32 or int64, cached tokens of each sequence. What lies past them is not read, in the
            cache or in the table.
        plan: of a mask of ``new`` rows and columns, on the device of q: ``mask.plan(block_q, block_k, q.device)``. All
            sequences and heads share it; a stacked plan (`TilePlan.stack`) has one for each sequence.
        block_table: ``(batch, pages_per_sequence)`` int32 or int64; position ``p`` is slot ``p % page_size`` of page
            ``block_table[b, p // page_size]``. None: the cache is contiguous.
        scale: of the scores, finite in float32; None means ``head_dim ** -0.5``.
        return_lse: also return the log-sum-exp of each row's scores.
        backend: see `pdkernels.show_config`.

    Returns:
        ``out``, shape and dtype of q, contiguous. With `return_lse` ``(out, lse)``: the natural log-sum-exp of the visible scores,
        ``(batch, q_heads, new)`` float32. Rows that see nothing (only with an empty prefix) are zero, with a log-sum-exp of
        -inf.

    Raises:
        ValueError: shapes or strides that do not fit, a plan for another number of tokens, another batch or another device. On
            the CPU also lengths out of ``[0, capacity]`` and invalid pages within a length. On CUDA lengths are clamped
            and pages must be valid; ``PDKERNELS_DEBUG_CHECKS=1`` raises there as well, at the cost of a sync.
        TypeError: dtypes that do not fit, a mask instead of a plan.
        NotImplementedError: a backend that does not serve the device; an input that requires a gradient, or a tangent (the
            reference has both).

    Softmax and sums run in float32. Results repeat bit for bit and do not depend on the number of threads or on the rest of the
    batch; a paged cache gives the bits of a contiguous one of the same capacity. On the CPU a row that sees all keys up to its
    own has the same bits whether these are cached or new, and however many new tokens there are. ``torch.compile`` sees one op,
    and neither it nor a CUDA graph depends on the length of prefixes.

    Source: one forward over prefix and draft as in quadratic self-speculation (Nemotron-Labs-Diffusion, appendix C); splits of a
    prefix merged by their log-sum-exps after Flash-Decoding (Dao et al., 2023).

    Example:
        >>> import torch, pdkernels as pd
        >>> mask = pd.masks.quadratic(4)                                         # 4 draft tokens, 4 masks after each
        >>> q, k_new, v_new = (torch.randn(2, 20, heads, 64) for heads in (8, 2, 2))
        >>> k_cache, v_cache = (torch.randn(2, 512, 2, 64) for _ in range(2))
        >>> lengths = torch.tensor([300, 41])
        >>> pd.speculative_attention(q, k_new, v_new, k_cache, v_cache, lengths, mask.plan(32, 32)).shape
        torch.Size([2, 20, 8, 64])
    """
    arguments = _arguments(OP, q, k_new, v_new, k_cache, v_cache, lengths, plan, scale)
    out, lse = call(attention_op, (*arguments, block_table), q, backend)
    return (out, lse) if return_lse else out


@overload
def speculative_attention_append_(
    q: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, plan: TilePlan, *,
    counts: Tensor | None = ..., source_index: Tensor | None = ..., block_table: Tensor | None = ..., scale: float | None = ..., return_lse: Literal[False] = ..., backend: Backend = ...
) -> Tensor: ...  # fmt: skip


@overload
def speculative_attention_append_(
    q: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, plan: TilePlan, *,
    counts: Tensor | None = ..., source_index: Tensor | None = ..., block_table: Tensor | None = ..., scale: float | None = ..., return_lse: Literal[True], backend: Backend = ...
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def speculative_attention_append_(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    plan: TilePlan,
    *,
    counts: Tensor | None = None,
    source_index: Tensor | None = None,
    block_table: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`speculative_attention` that stores K and V of selected new tokens after each sequence's prefix, in the same pass.

    New token ``source_index[b, i]`` goes to position ``lengths[b] + i``, for ``i < counts[b]``. Lengths do not change:
    what was written is a draft until `kv_commit_`. If only tokens that a step may keep are stored, say without the masks of a
    quadratic draft, the kept ones are a prefix of them and the commit moves nothing. The result does not depend on what is stored.

    Args:
        q, k_new, v_new, plan, block_table, scale, return_lse, backend: as in `speculative_attention`.
        k_cache, v_cache: as there; written. They share no memory with `q`, `k_new` and `v_new`, and no slot past the prefix of
            one sequence is a slot of another.
        lengths: as there. The rows must fit after them.
        counts: ``(batch,)`` int32 or int64, rows to store; None: all that `source_index` names. 0 stores nothing.
        source_index: ``(batch, rows)`` int32 or int64, which of the new tokens, each of ``0 .. new - 1``; entries from
            ``counts[b]`` on are not read. None: the new tokens in their order.

    Returns:
        As `speculative_attention`, bit for bit.

    Raises:
        ValueError: as there, and counts, sources or pages past the prefix out of range, or rows that do not fit; nothing is
            written then. On CUDA nothing is stored for such a sequence; ``PDKERNELS_DEBUG_CHECKS=1`` raises.
        TypeError, NotImplementedError: as there.

    Deterministic; a sequence does not depend on its batch.

    Example:
        >>> import torch, pdkernels as pd
        >>> mask = pd.masks.quadratic(4)                                         # 4 draft tokens, 4 masks after each
        >>> q, k_new, v_new = (torch.randn(1, 20, heads, 64) for heads in (8, 2, 2))
        >>> k_cache, v_cache = (torch.zeros(1, 512, 2, 64) for _ in range(2))
        >>> lengths, drafts = torch.tensor([300]), torch.tensor([4])
        >>> out = pd.speculative_attention_append_(q, k_new, v_new, k_cache, v_cache, lengths, mask.plan(32, 32), counts=drafts)
        >>> torch.equal(k_cache[:, 300:304], k_new[:, :4]), bool(k_cache[:, 304:].any())
        (True, False)
    """
    arguments = _arguments(APPEND, q, k_new, v_new, k_cache, v_cache, lengths, plan, scale)
    out, lse = call(append_op, (*arguments, block_table, counts, source_index), q, backend)
    return (out, lse) if return_lse else out


def _arguments(
    op: str,
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    plan: TilePlan,
    scale: float | None,
) -> tuple[Any, ...]:
    """The arguments of the raw op, up to the scale."""
    for name, tensor in (("q", q), ("k_new", k_new), ("v_new", v_new), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_type(isinstance(tensor, Tensor), op, name, "be a tensor", type(tensor).__name__)
    if not isinstance(plan, TilePlan):
        remedy = "Call mask.plan(block_q, block_k, q.device)." if hasattr(plan, "plan") else ""
        raise TypeError(message(op, "plan", "be a TilePlan", type(plan).__name__, remedy))
    if q.dim() == 4 and (plan.q_len != q.shape[1] or plan.kv_len != q.shape[1]):
        remedy = "Build the mask for the new tokens alone; the prefix is seen by all."
        fail(
            op,
            "plan",
            f"be of {q.shape[1]} rows and columns, the new tokens",
            f"{plan.q_len} and {plan.kv_len}",
            remedy,
        )
    return (q, k_new, v_new, k_cache, v_cache, lengths, *plan.arguments, given_scale(op, scale, q))


def _check(
    op: str,
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    plan_rows: Tensor,
    plan_lists: Tensor,
    bitmaps: Tensor,
    block_q: int,
    block_k: int,
    scale: float,
    block_table: Tensor | None = None,
    counts: Tensor | None = None,
    source_index: Tensor | None = None,
    *,
    values: bool = False,
) -> None:
    """Checks everything but float64, and values only on request."""
    for name, x in (("q", q), ("k_new", k_new), ("v_new", v_new), ("k_cache", k_cache), ("v_cache", v_cache)):
        if x.dim() != 4:
            layout = "(batch, new, heads, head_dim)"
            if name.endswith("cache"):
                layout = (
                    "(batch, slots, heads, head_dim)"
                    if block_table is None
                    else "(num_pages, page_size, heads, head_dim)"
                )
            fail(
                op,
                name,
                f"have shape {layout}",
                tuple(x.shape),
                "Pass one layer of a stacked cache." if x.dim() == 5 else "",
            )
        if x.dtype not in (*KERNEL_DTYPES, torch.float64):
            raise TypeError(message(op, name, "be float32, float16 or bfloat16", x.dtype, "Convert it with .to()."))
        if x.dtype != q.dtype:
            raise TypeError(message(op, name, f"be {q.dtype} like q", x.dtype, "Convert it with .to()."))
        if x.device != q.device:
            fail(op, name, f"be on {q.device} like q", x.device, f"Move it with .to({str(q.device)!r}).")
        if x.shape[3] > 1 and x.stride(3) != 1:
            remedy = "A cache is not copied: allocate it so." if name.endswith("cache") else "Call .contiguous() on it."
            fail(op, name, "have a contiguous last dimension", f"strides {x.stride()}", remedy)
        if name.endswith("cache") and x.device.type == "cuda" and x.stride(1) >= MAX_CUDA_TOKEN_STRIDE:
            wanted = f"have less than {MAX_CUDA_TOKEN_STRIDE} elements from token to token on CUDA"
            fail(op, name, wanted, f"strides {x.stride()}", "A cache is not copied: allocate it so.")
    if k_new.shape[:2] != q.shape[:2] or k_new.shape[3] != q.shape[3]:
        wanted = f"have the batch {q.shape[0]}, the {q.shape[1]} tokens and the head_dim {q.shape[3]} of q"
        fail(op, "k_new", wanted, tuple(k_new.shape))
    if v_new.shape != k_new.shape:
        fail(op, "v_new", f"have shape {tuple(k_new.shape)} like k_new", tuple(v_new.shape))
    if k_new.shape[2] == 0 or q.shape[2] == 0 or q.shape[2] % k_new.shape[2] != 0:
        fail(op, "k_new", f"have a number of heads that divides the {q.shape[2]} of q", k_new.shape[2])
    if not takes_head_dim(q.shape[3]):
        remedy = "Pad all heads with zeros and pass the scale."
        fail(op, "head_dim", "be a multiple of 8 in [16, 256]", q.shape[3], remedy)
    if k_cache.shape[2:] != k_new.shape[2:]:
        fail(op, "k_cache", f"have {k_new.shape[2]} heads of {k_new.shape[3]} like k_new", tuple(k_cache.shape))
    if v_cache.shape != k_cache.shape:
        fail(op, "v_cache", f"have shape {tuple(k_cache.shape)} like k_cache", tuple(v_cache.shape))
    check_index(op, "lengths", lengths, (q.shape[0],), q.device)
    if block_table is not None:
        check_index(op, "block_table", block_table, (q.shape[0], None), q.device)
        if k_cache.shape[1] == 0:
            fail(op, "k_cache", "have a page size of at least 1", 0)
    elif k_cache.shape[0] != q.shape[0]:
        remedy = "Pass the block_table of a paged cache."
        fail(op, "k_cache", f"have the batch {q.shape[0]} of q", tuple(k_cache.shape), remedy)
    if counts is not None:
        check_index(op, "counts", counts, (q.shape[0],), q.device)
    if source_index is not None:
        check_index(op, "source_index", source_index, (q.shape[0], None), q.device)
    check_plan(op, q, q.shape[1], PlanArguments(plan_rows, plan_lists, bitmaps, block_q, block_k))
    if values:
        _check_values(op, q.shape[1], k_cache, lengths, block_table, counts, source_index)


def _check_values(
    op: str,
    new: int,
    k_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    counts: Tensor | None = None,
    source_index: Tensor | None = None,
) -> None:
    """What the CPU kernel checks itself. On a GPU this synchronizes."""
    pages, page_size = k_cache.shape[:2]
    capacity = page_size if block_table is None else page_size * block_table.shape[1]
    table = [] if block_table is None else block_table.tolist()
    most = 0 if op == OP else new if source_index is None else source_index.shape[1]
    for b, length in enumerate(lengths.tolist()):
        count = most if counts is None else int(counts[b])
        if not 0 <= length <= capacity:
            remedy = f"The cache holds {capacity} rows a sequence."
            fail(op, "lengths", f"be in [0, {capacity}]", f"{length} for sequence {b}", remedy)
        if not 0 <= count <= most:
            fail(op, "counts", f"be in [0, {most}]", f"{count} for sequence {b}", "Only the rows given can be written.")
        if length + count > capacity:
            remedy = "Make the cache larger, reserve more pages, or write fewer rows."
            fail(
                op,
                "lengths + counts",
                f"be at most the capacity {capacity}",
                f"{length + count} for sequence {b}",
                remedy,
            )
        for i, page in enumerate(table[b][: -(-(length + count) // page_size)] if table else []):
            if not 0 <= page < pages:
                past_prefix = i * page_size >= length
                remedy = (
                    "Reserve pages for the rows before writing them."
                    if past_prefix
                    else "Every page of the prefix must exist."
                )
                fail(op, f"block_table[{b}, {i}]", f"be in [0, {pages - 1}]", f"{page} for sequence {b}", remedy)
        for i, source in enumerate([] if source_index is None else source_index[b, :count].tolist()):
            if not 0 <= source < new:
                remedy = "It names one of the new tokens."
                fail(op, f"source_index[{b}, {i}]", f"be in [0, {new - 1}]", f"{source} for sequence {b}", remedy)


def _results(op: str, q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    _check(op, q, *rest)
    if q.dtype == torch.float64:
        remedy = "Pass backend='reference', which computes in float64."
        raise TypeError(message(op, "q", "be float32, float16 or bfloat16 for the kernels", q.dtype, remedy))
    return q.new_empty(q.shape), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


def _by_reference(
    op: str,
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    plan_rows: Tensor,
    plan_lists: Tensor,
    bitmaps: Tensor,
    block_q: int,
    block_k: int,
    scale: float,
    block_table: Tensor | None = None,
    *rows: Tensor | None,
) -> tuple[Tensor, Tensor]:
    mask = dense_plan(PlanArguments(plan_rows, plan_lists, bitmaps, block_q, block_k), q.shape[1], q.shape[1])
    tensors = (q, k_new, v_new, k_cache, v_cache, lengths, mask, *rows)
    results: tuple[Tensor, Tensor] = getattr(reference, op)(*tensors, block_table=block_table, scale=scale)
    return results


def _by_triton(op: str, *arguments: Any) -> tuple[Tensor, Tensor]:
    from pdkernels.triton.speculative_attention import forward

    if DEBUG_CHECKS:
        _check(op, *arguments, values=True)
    return forward(*arguments, append=op == APPEND)


def _refuse_gradients(
    op: torch._ops.OpOverload, q: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    """Results without a history would look like constants in training."""
    inputs = (q, k_new, v_new, k_cache, v_cache)
    refuse_tangents(op._opname, inputs)
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        remedy = "Train with block_sparse_attention, or call it under torch.no_grad()."
        raise NotImplementedError(message(op._opname, "its inputs", "not require gradients", "one that does", remedy))
    with torch._C._AutoDispatchBelowAutograd():
        results: tuple[Tensor, Tensor] = op(*inputs, *rest)
    return results


def _example(draw: Draw) -> dict[str, Any]:
    mask = masks.quadratic(3)
    q, k_new, v_new = (draw.floats(2, mask.q_len, heads, 32) for heads in (4, 2, 2))
    k, v, lengths = draw.floats(2, 64, 2, 32), draw.floats(2, 64, 2, 32), draw.ints(0, 64 - mask.q_len, 2)
    caches = {"k_cache": k, "v_cache": v, "lengths": lengths}
    return {"q": q, "k_new": k_new, "v_new": v_new, **caches, "plan": mask.plan(16, 16)}


def _define(op: str, cache: tuple[str, str], rows: str = "") -> torch._ops.OpOverload:
    defined = define(
        f"{op}(Tensor q, Tensor k_new, Tensor v_new, {cache[0]} k_cache, {cache[1]} v_cache, Tensor lengths, "
        f"{PLAN_SCHEMA}, float scale, Tensor? block_table=None{rows}) -> (Tensor, Tensor)",
        fake=partial(_results, op),
        reference=partial(_by_reference, op),
        triton=partial(_by_triton, op),
        reference_check=partial(_check, op, values=True),
        example=_example,
        gradients="own",
    )
    LIBRARY.impl(op, partial(_refuse_gradients, defined), "Autograd")
    return defined


attention_op = _define(OP, ("Tensor", "Tensor"))
append_op = _define(APPEND, ("Tensor(a!)", "Tensor(b!)"), ", Tensor? counts=None, Tensor? source_index=None")
