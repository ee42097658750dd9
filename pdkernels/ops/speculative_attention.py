"""Attention of drafted tokens over a cached prefix and a planned tail: one decode step of a parallel decoder.

All new tokens see the prefix, which needs no mask; among themselves they see what a `TilePlan` shows. The plan does not
depend on the prefix, so one plan serves every step, and lengths are a tensor that kernels read on the device: a step
neither synchronizes nor builds a mask.

`speculative_attention` reads the cache; `speculative_attention_append_` is the same kernel, which also stores rows
after the prefix. They are two ops because a schema fixes what is written: a graph would otherwise assume that every
forward changes its cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor

from pdkernels import masks
from pdkernels._attention import APPEND_ONLY, SpeculativeArguments, checked_scale, checked_sinks
from pdkernels._validation import check_flag, message, refuse_tangents
from pdkernels.backends import Backend
from pdkernels.masks import TilePlan
from pdkernels.ops._speculative import (
    APPEND,
    OP,
    by_reference,
    by_triton,
    check_call,
    check_tensors,
    first_positions,
    results,
)
from pdkernels.ops.library import LIBRARY, Draw, call, define, schema_of

__all__ = ["speculative_attention", "speculative_attention_append_"]


@overload
def speculative_attention(
    q: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, plan: TilePlan, *,
    starts: Tensor | None = ..., window: int | None = ..., cu_seqlens: Tensor | None = ...,
    block_table: Tensor | None = ...,
    scale: float | None = ..., sinks: Tensor | None = ..., return_lse: Literal[False] = ..., backend: Backend = ...
) -> Tensor: ...  # fmt: skip


@overload
def speculative_attention(
    q: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, plan: TilePlan, *,
    starts: Tensor | None = ..., window: int | None = ..., cu_seqlens: Tensor | None = ...,
    block_table: Tensor | None = ...,
    scale: float | None = ..., sinks: Tensor | None = ..., return_lse: Literal[True], backend: Backend = ...
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
    starts: Tensor | None = None,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of new tokens: each sees its sequence's cached prefix and the new tokens that its plan shows.

    `starts` and `window` hide what is first: cached tokens have positions 0 to ``lengths[b] - 1``, new token ``i`` has
    ``lengths[b] + i``. Three new tokens under a causal plan after five cached ones, of which two are padding::

        position          0 1 2 3 4 | 5 6 7
        new token 0       . . # # # | # . .      starts = [2], window = 4
        new token 1       . . . # # | # # .
        new token 2       . . . . # | # # #

    For inference: it has no gradient. The cache is only read; `pdkernels.speculative_attention_append_` stores new
    rows in the same pass, `pdkernels.kv_commit_` keeps the accepted ones.

    Args:
        q: ``(batch, new, q_heads, head_dim)``, float32, float16 or bfloat16 (float64 with ``backend="reference"``);
            head_dim a multiple of 8 in ``[16, 512]``.
        k_new, v_new: ``(batch, new, kv_heads, head_dim)``, K and V of the new tokens, dtype of q; kv_heads divides
            q_heads, and query head ``h`` reads KV head ``h // (q_heads // kv_heads)``.
        k_cache, v_cache: ``(batch, slots, kv_heads, head_dim)``, one layer of a cache, dtype of q. With `block_table`:
            ``(num_pages, page_size, kv_heads, head_dim)``. All five may have any strides with a contiguous last
            dimension. Of an 8-bit cache all four, new rows too, are rows of `pdkernels.kv_quantize`: int8,
            ``head_dim + 4`` wide, at multiples of 4 bytes. They are read as the numbers that they stand for, and the
            arithmetic is in float32.
        lengths: ``(batch,)`` int32 or int64, cached tokens of each sequence. What lies past them is not read, in the
            cache or in the table.
        plan: of a mask of ``new`` rows and columns, on the device of q: ``mask.plan(block_q, block_k, q.device)``. All
            sequences and heads share it; a stacked plan (`TilePlan.stack`) has one for each sequence.
        starts: ``(batch,)`` or ``(batch, new)`` int32 or int64: the first position that a sequence or a new token sees,
            as with padding on the left. None: 0.
        window: how many positions a new token sees at most, its own included; None: all. It holds for the tail too, by
            the order of the new tokens; where their positions differ from it, as in a tree, pass `starts` of shape
            ``(batch, new)``.
        cu_seqlens: ``(batch + 1,)`` int32 or int64: sequences have different numbers of new tokens, and their rows lie
            one after the other. q, k_new and v_new are then ``(rows, heads, head_dim)``, sequence b has rows
            ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]``, and the plan is that of the longest: a sequence takes its first
            rows and columns.
        block_table: ``(batch, pages_per_sequence)`` int32 or int64; position ``p`` is slot ``p % page_size`` of page
            ``block_table[b, p // page_size]``. None: the cache is contiguous.
        scale: of the scores, finite in float32; None means ``head_dim ** -0.5``.
        sinks: ``(q_heads,)``: one more score for each row of a head, as in `block_sparse_attention`.
        return_lse: also return the log-sum-exp of each row's scores.
        backend: see `pdkernels.show_config`.

    Returns:
        ``out``, shape and dtype of q, contiguous. With `return_lse` ``(out, lse)``: the natural log-sum-exp of the
        visible scores, ``(batch, q_heads, new)`` float32, or ``(q_heads, rows)`` with `cu_seqlens`. Rows that see
        nothing (only with an empty prefix or a start past it) are zero, with a log-sum-exp of -inf, or that of their
        sink.

    Raises:
        ValueError: shapes or strides that do not fit, a plan for another number of tokens, another batch or another
            device. On the CPU also lengths out of ``[0, capacity]``, invalid pages within a length, starts below 0 and
            `cu_seqlens` that do not ascend from 0 to the number of rows. On CUDA lengths are clamped and the others
            must be valid; ``PDKERNELS_DEBUG_CHECKS=1`` raises there as well, at the cost of a sync.
        TypeError: dtypes that do not fit, a mask instead of a plan.
        NotImplementedError: a backend that does not serve the device; an input that requires a gradient, or a tangent
            (the reference has both).

    Softmax and sums run in float32. Results repeat bit for bit and do not depend on the number of threads or on the
    rest of the batch; a paged cache gives the bits of a contiguous one of the same capacity. On the CPU a row has the
    same bits whether the keys it sees are cached or new, whatever other new tokens lie between those, however many
    there are, and packed or not: a row of a tree has those of its chain. ``torch.compile`` sees one op, and neither it
    nor a CUDA graph depends on the length of prefixes.

    Source: one forward over prefix and draft as in quadratic self-speculation (Nemotron-Labs-Diffusion, appendix C);
    splits of a prefix merged by their log-sum-exps after Flash-Decoding (Dao et al., 2023).

    Example:
        >>> import torch, pdkernels as pd
        >>> mask = pd.masks.quadratic(4)                                         # 4 draft tokens, 4 masks after each
        >>> q, k_new, v_new = (torch.randn(2, 20, heads, 64) for heads in (8, 2, 2))
        >>> k_cache, v_cache = (torch.randn(2, 512, 2, 64) for _ in range(2))
        >>> lengths = torch.tensor([300, 41])
        >>> pd.speculative_attention(q, k_new, v_new, k_cache, v_cache, lengths, mask.plan(32, 32)).shape
        torch.Size([2, 20, 8, 64])
    """
    check_flag(OP, "return_lse", return_lse)
    check_tensors(OP, (q, k_new, v_new, k_cache, v_cache), plan, cu_seqlens)
    if starts is not None or window is not None:
        starts = first_positions(OP, q, lengths, starts, window, cu_seqlens)
    arguments = SpeculativeArguments(
        q, k_new, v_new, k_cache, v_cache, lengths, *plan.arguments, checked_scale(OP, scale, q),
        block_table, starts, cu_seqlens, 0 if cu_seqlens is None else plan.q_len, checked_sinks(OP, sinks, q),
    )  # fmt: skip
    out, lse = call(attention_op, arguments[: -len(APPEND_ONLY)], q, backend)
    return (out, lse) if return_lse else out


@overload
def speculative_attention_append_(
    q: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, plan: TilePlan, *,
    counts: Tensor | None = ..., source_index: Tensor | None = ..., starts: Tensor | None = ...,
    window: int | None = ..., cu_seqlens: Tensor | None = ..., block_table: Tensor | None = ...,
    scale: float | None = ..., sinks: Tensor | None = ...,
    return_lse: Literal[False] = ..., backend: Backend = ...
) -> Tensor: ...  # fmt: skip


@overload
def speculative_attention_append_(
    q: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, plan: TilePlan, *,
    counts: Tensor | None = ..., source_index: Tensor | None = ..., starts: Tensor | None = ...,
    window: int | None = ..., cu_seqlens: Tensor | None = ..., block_table: Tensor | None = ...,
    scale: float | None = ..., sinks: Tensor | None = ...,
    return_lse: Literal[True], backend: Backend = ...
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
    starts: Tensor | None = None,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`speculative_attention` that stores K and V of selected new tokens after the prefix, in the same pass.

    New token ``source_index[b, i]`` goes to position ``lengths[b] + i``, for ``i < counts[b]``. Lengths do not change:
    what was written is a draft until `kv_commit_`. If only tokens that a step may keep are stored, say without the
    masks of a quadratic draft, the kept ones are a prefix of them and the commit moves nothing. The result does not
    depend on what is stored.

    Args:
        q, k_new, v_new, plan, starts, window, cu_seqlens, block_table, scale, sinks, return_lse, backend: as in
            `speculative_attention`.
        k_cache, v_cache: as there; written. They share no memory with `q`, `k_new` and `v_new`, and no slot past the
            prefix of one sequence is a slot of another.
        lengths: as there. The rows must fit after them.
        counts: ``(batch,)`` int32 or int64, rows to store; None: all that `source_index` names, or all new tokens of a
            packed sequence. 0 stores nothing.
        source_index: ``(batch, rows)`` int32 or int64, which of the new tokens, each of ``0 .. new - 1``; entries from
            ``counts[b]`` on are not read. None: the new tokens in their order.

    Returns:
        As `speculative_attention`, bit for bit.

    Raises:
        ValueError: as there, and counts, sources or pages past the prefix out of range, or rows that do not fit;
            nothing is written then. On CUDA nothing is stored for such a sequence; ``PDKERNELS_DEBUG_CHECKS=1`` raises.
        TypeError, NotImplementedError: as there.

    Deterministic; a sequence does not depend on its batch.

    Example:
        >>> import torch, pdkernels as pd
        >>> mask = pd.masks.quadratic(4)                                         # 4 draft tokens, 4 masks after each
        >>> q, k_new, v_new = (torch.randn(1, 20, heads, 64) for heads in (8, 2, 2))
        >>> k_cache, v_cache = (torch.zeros(1, 512, 2, 64) for _ in range(2))
        >>> lengths, drafts = torch.tensor([300]), torch.tensor([4])
        >>> plan = mask.plan(32, 32)
        >>> out = pd.speculative_attention_append_(q, k_new, v_new, k_cache, v_cache, lengths, plan, counts=drafts)
        >>> torch.equal(k_cache[:, 300:304], k_new[:, :4]), bool(k_cache[:, 304:].any())
        (True, False)
    """
    check_flag(APPEND, "return_lse", return_lse)
    check_tensors(APPEND, (q, k_new, v_new, k_cache, v_cache), plan, cu_seqlens)
    if starts is not None or window is not None:
        starts = first_positions(APPEND, q, lengths, starts, window, cu_seqlens)
    arguments = SpeculativeArguments(
        q, k_new, v_new, k_cache, v_cache, lengths, *plan.arguments, checked_scale(APPEND, scale, q), block_table,
        starts, cu_seqlens, 0 if cu_seqlens is None else plan.q_len, checked_sinks(APPEND, sinks, q), counts=counts,
        source_index=source_index,
    )  # fmt: skip
    out, lse = call(append_op, arguments, q, backend)
    return (out, lse) if return_lse else out


def _refuse_gradients(op: torch._ops.OpOverload, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Results without a history would look like constants in training."""
    refuse_tangents(op._opname, arguments)
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments):
        remedy = "Train with block_sparse_attention, or call it under torch.no_grad()."
        raise NotImplementedError(message(op._opname, "its inputs", "not require gradients", "one that does", remedy))
    with torch._C._AutoDispatchBelowAutograd():
        results: tuple[Tensor, Tensor] = op(*arguments)
    return results


def _example(draw: Draw) -> dict[str, Any]:
    mask = masks.quadratic(3)
    q, k_new, v_new = (draw.floats(2, mask.q_len, heads, 32) for heads in (4, 2, 2))
    k, v, lengths = draw.floats(2, 64, 2, 32), draw.floats(2, 64, 2, 32), draw.ints(0, 64 - mask.q_len, 2)
    caches = {"k_cache": k, "v_cache": v, "lengths": lengths}
    return {"q": q, "k_new": k_new, "v_new": v_new, **caches, "plan": mask.plan(16, 16), "sinks": draw.floats(4)}


def _define(op: str, **schema: Sequence[str]) -> torch._ops.OpOverload:
    defined = define(
        f"{op}({schema_of(SpeculativeArguments, **schema)}) -> (Tensor out, Tensor lse)",
        structure=SpeculativeArguments,
        fake=partial(results, op),
        reference=partial(by_reference, op),
        triton=partial(by_triton, op),
        reference_check=partial(check_call, op, values=True),
        example=_example,
        gradients="own",
    )
    LIBRARY.impl(op, partial(_refuse_gradients, defined), "Autograd")
    return defined


attention_op = _define(OP, without=APPEND_ONLY)
append_op = _define(APPEND, mutated=("k_cache", "v_cache"))
