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
from inspect import signature
from typing import Any, Literal, overload

import torch
from torch import Tensor

from pdkernels import masks
from pdkernels._attention import (
    APPEND_ONLY,
    SCALE_BYTES,
    SpeculativeArguments,
    check_halves,
    check_heads,
    check_input,
    check_plan,
    check_quantized,
    checked_scale,
    checked_sinks,
    checked_softcap,
    refuse_float64,
    refuse_softcap,
)
from pdkernels._validation import check_flag, check_index, check_type, fail, integer, message, refuse_tangents
from pdkernels.backends import Backend
from pdkernels.masks.tile_plan import TilePlan, dense_plan
from pdkernels.ops._gluon import speculative_for
from pdkernels.ops.library import DEBUG_CHECKS, LIBRARY, Draw, call, define, schema_of
from pdkernels.reference import speculative_attention as reference

__all__ = ["speculative_attention", "speculative_attention_append_"]

OP = "speculative_attention"
APPEND = "speculative_attention_append_"

# A block's offsets from its first token must fit into 32 bits on CUDA. Inputs with wider strides are copied, caches
# never.
MAX_CUDA_TOKEN_STRIDE = 2**23
# What the reference takes after the tensors and the mask, under the names of the op.
OF_REFERENCE = {
    op: [name for name in signature(getattr(reference, op)).parameters if name in SpeculativeArguments._fields[6:]]
    for op in (OP, APPEND)
}
NOT_COPIED = "A cache is not copied: allocate it so."


def check_tensors(op: str, tensors: Sequence[Tensor], plan: TilePlan, cu_seqlens: Tensor | None) -> None:
    """What the arguments of the public function must be for the op to take them."""
    for name, tensor in zip(("q", "k_new", "v_new", "k_cache", "v_cache"), tensors):
        check_type(isinstance(tensor, Tensor), op, name, "be a tensor", type(tensor).__name__)
    if not isinstance(plan, TilePlan):
        remedy = "Call mask.plan(block_q, block_k, q.device)." if hasattr(plan, "plan") else ""
        raise TypeError(message(op, "plan", "be a TilePlan", type(plan).__name__, remedy))
    q = tensors[0]
    new = q.shape[1] if q.dim() == 4 and cu_seqlens is None else plan.q_len
    if plan.q_len != new or plan.kv_len != new:
        remedy = "Build the mask for the new tokens alone: all of them see the whole prefix."
        wanted = f"have {new} rows and {new} columns, one for each new token"
        fail(op, "plan", wanted, f"{plan.q_len} and {plan.kv_len}", remedy)


def first_positions(
    op: str, q: Tensor, lengths: Tensor, starts: Tensor | None, window: int | None, cu_seqlens: Tensor | None
) -> Tensor | None:
    """`starts` and `window` as the op takes both: ``(batch, 1)``, ``(batch, new)``, or ``(1, rows)`` of packed
    sequences."""
    if starts is not None:
        check_type(isinstance(starts, Tensor), op, "starts", "be a tensor", type(starts).__name__)
        if starts.dim() == 1:
            starts = starts[:, None]
    if window is None:
        return starts
    window = min(integer(op, "window", window, 1), 2**62)
    check_index(op, "lengths", lengths, (None,), q.device)
    if starts is not None:
        new = q.shape[1] if q.dim() > 1 and cu_seqlens is None and starts.shape[1:] != (1,) else 1
        check_index(op, "starts", starts, (lengths.shape[0], new), q.device)
    if cu_seqlens is None:
        rows = torch.arange(q.shape[1] if q.dim() > 1 else 0, device=q.device, dtype=lengths.dtype)
        first = (lengths[:, None] + rows + (1 - window)).clamp(min=0)
        return first if starts is None else torch.maximum(first, starts.to(first.dtype))
    check_index(op, "cu_seqlens", cu_seqlens, (lengths.shape[0] + 1,), q.device)
    rows = torch.arange(q.shape[0], device=q.device, dtype=cu_seqlens.dtype)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), rows, right=True).clamp(max=max(len(lengths) - 1, 0))
    first = (lengths[sequence] + (rows - cu_seqlens[sequence]) + (1 - window)).clamp(min=0)[None]
    return first if starts is None else torch.maximum(first, starts[sequence, 0].to(first.dtype)[None])


def check_call(op: str, given: SpeculativeArguments, *, values: bool = False) -> None:
    """Checks everything but float64, and values only on request."""
    q, k_new, k_cache = given.q, given.k_new, given.k_cache
    rows = "rows" if given.packed else "batch, new"
    of_rows = check_quantized if given.quantized else check_halves if given.halved else check_input
    for name, x in zip(("q", "k_new", "v_new", "k_cache", "v_cache"), given[:5]):
        cached = name.endswith("cache")
        if x.dim() != (4 if cached or not given.packed else 3):
            layout = f"({rows}, heads, head_dim)"
            if cached:
                layout = f"({'batch, slots' if given.block_table is None else 'num_pages, page_size'}, heads, head_dim)"
            remedy = "Pass one layer of a stacked cache." if x.dim() == 5 else ""
            fail(op, name, f"have shape {layout}", tuple(x.shape), remedy)
        check_row = check_input if name == "q" else of_rows
        check_row(op, name, x, q, *[NOT_COPIED] * cached)
        if cached and x.device.type == "cuda" and x.stride(1) >= MAX_CUDA_TOKEN_STRIDE:
            wanted = f"have less than {MAX_CUDA_TOKEN_STRIDE} elements from token to token on CUDA"
            fail(op, name, wanted, f"strides {x.stride()}", NOT_COPIED)
    head_dim, width = q.shape[-1], q.shape[-1] + SCALE_BYTES * given.quantized
    if k_new.shape[:-2] != q.shape[:-2] or k_new.shape[-1] != width:
        whole = f"the {q.shape[0]} rows" if given.packed else f"the batch {q.shape[0]}, the {q.shape[1]} tokens"
        wanted = f"have {whole} and the head_dim {head_dim} of q"
        if given.quantized:
            wanted = f"have {whole} of q, and {width} bytes a head: {head_dim} codes and their scale"
        fail(op, "k_new", wanted, tuple(k_new.shape))
    if given.v_new.shape != k_new.shape:
        fail(op, "v_new", f"have shape {tuple(k_new.shape)} like k_new", tuple(given.v_new.shape))
    check_heads(op, given, "k_new")
    if k_cache.shape[2:] != k_new.shape[-2:]:
        fail(op, "k_cache", f"have {k_new.shape[-2]} heads of {width} like k_new", tuple(k_cache.shape))
    if given.v_cache.shape != k_cache.shape:
        fail(op, "v_cache", f"have shape {tuple(k_cache.shape)} like k_cache", tuple(given.v_cache.shape))
    _check_indices(op, given)
    check_plan(op, q.device, (given.batch, given.new), given.new, given.plan)
    if values:
        _check_values(op, given)


def _check_indices(op: str, given: SpeculativeArguments) -> None:
    """Shapes, dtypes and devices of index tensors."""
    device, batch, starts = given.q.device, given.batch, given.starts
    check_index(op, "lengths", given.lengths, (batch,), device)
    if given.block_table is not None:
        check_index(op, "block_table", given.block_table, (batch, None), device)
        if given.k_cache.shape[1] == 0:
            fail(op, "k_cache", "have a page size of at least 1", 0)
    elif given.k_cache.shape[0] != batch:
        remedy = "Pass the block_table of a paged cache."
        fail(op, "k_cache", f"have the batch {batch} of q", tuple(given.k_cache.shape), remedy)
    if given.cu_seqlens is not None:
        check_index(op, "cu_seqlens", given.cu_seqlens, (batch + 1,), device)
    if starts is not None:
        one = starts.dim() == 2 and starts.shape[1] == 1
        shape = starts.shape if given.starts_by_row else (batch, 1 if one else given.new)
        check_index(op, "starts", starts, shape, device)
        if given.packed and not (given.starts_by_row or one):
            fail(op, "starts", f"have shape ({batch},) where sequences are packed", tuple(starts.shape))
    if given.counts is not None:
        check_index(op, "counts", given.counts, (batch,), device)
    if given.source_index is not None:
        check_index(op, "source_index", given.source_index, (batch, None), device)


def _check_values(op: str, given: SpeculativeArguments) -> None:
    """What the CPU kernel checks itself. On a GPU this synchronizes."""
    pages, page_size = given.k_cache.shape[:2]
    new, rows, capacity, source_index = given.new, given.q.shape[0], given.capacity, given.source_index
    table = [] if given.block_table is None else given.block_table.tolist()
    tokens = [new] * len(given.lengths)
    if given.cu_seqlens is not None:
        begins = given.cu_seqlens.tolist()
        remedy = "It counts the rows before each sequence, and all rows at its end."
        for b, (before, here) in enumerate(zip([0, *begins], begins)):
            low, high = (0, 0) if b == 0 else (before, before + new)
            if not low <= here <= high or (b == len(given.lengths) and here != rows):
                wanted = f"be in [{low}, {high}]" if b < len(given.lengths) else f"be {rows}"
                fail(op, f"cu_seqlens[{b}]", wanted, f"{here} for sequence {b}", remedy)
        tokens = [end - begin for begin, end in zip(begins, begins[1:])]
    for b, length in enumerate(given.lengths.tolist()):
        max_count = 0 if op == OP else tokens[b] if source_index is None else source_index.shape[1]
        count = max_count if given.counts is None else int(given.counts[b])
        if not 0 <= length <= capacity:
            remedy = f"The cache holds {capacity} rows per sequence."
            fail(op, "lengths", f"be in [0, {capacity}]", f"{length} for sequence {b}", remedy)
        if not 0 <= count <= max_count:
            remedy = "Only the rows given can be written."
            fail(op, "counts", f"be in [0, {max_count}]", f"{count} for sequence {b}", remedy)
        if length + count > capacity:
            remedy = "Make the cache larger, reserve more pages, or write fewer rows."
            wanted = f"be at most the capacity {capacity}"
            fail(op, "lengths + counts", wanted, f"{length + count} for sequence {b}", remedy)
        for i, page in enumerate(table[b][: -(-(length + count) // page_size)] if table else []):
            if not 0 <= page < pages:
                remedy = "Every page of the prefix must exist."
                if i * page_size >= length:
                    remedy = "Reserve pages for the rows before writing them."
                fail(op, f"block_table[{b}, {i}]", f"be in [0, {pages - 1}]", f"{page} for sequence {b}", remedy)
        for i, source in enumerate([] if source_index is None else source_index[b, :count].tolist()):
            if not 0 <= source < tokens[b]:
                remedy = "It names one of the new tokens."
                fail(op, f"source_index[{b}, {i}]", f"be in [0, {tokens[b] - 1}]", f"{source} for sequence {b}", remedy)
    if given.starts is not None and any(tokens) and bool((given.starts < 0).any()):
        fail(op, "starts", "be at least 0", int(given.starts.min()), "It is a position of the sequence.")


def results(op: str, given: SpeculativeArguments) -> tuple[Tensor, Tensor]:
    check_call(op, given)
    refuse_float64(op, given.q)
    return given.q.new_empty(given.q.shape), given.q.new_empty(given.lse_shape, dtype=torch.float32)


def by_reference(op: str, given: SpeculativeArguments) -> tuple[Tensor, Tensor]:
    mask = dense_plan(given.plan, given.new, given.new)
    options = {name: getattr(given, name) for name in OF_REFERENCE[op]}
    found: tuple[Tensor, Tensor] = getattr(reference, op)(*given[:6], mask, **options)
    return found


def by_triton(op: str, given: SpeculativeArguments) -> tuple[Tensor, Tensor]:
    if DEBUG_CHECKS:
        check_call(op, given, values=True)
    refuse_softcap(op, given.softcap)
    specialised = speculative_for(given)
    if specialised is not None:
        return specialised(given, append=op == APPEND)
    from pdkernels.triton.speculative_attention import forward

    return forward(given, append=op == APPEND)


@overload
def speculative_attention(
    q: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, plan: TilePlan, *,
    starts: Tensor | None = ..., window: int | None = ..., cu_seqlens: Tensor | None = ...,
    block_table: Tensor | None = ...,
    scale: float | None = ..., sinks: Tensor | None = ..., softcap: float | None = ...,
    return_lse: Literal[False] = ..., backend: Backend = ...
) -> Tensor: ...  # fmt: skip


@overload
def speculative_attention(
    q: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, plan: TilePlan, *,
    starts: Tensor | None = ..., window: int | None = ..., cu_seqlens: Tensor | None = ...,
    block_table: Tensor | None = ...,
    scale: float | None = ..., sinks: Tensor | None = ..., softcap: float | None = ...,
    return_lse: Literal[True], backend: Backend = ...
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
    softcap: float | None = None,
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
            ``head_dim + 4`` wide, at multiples of 4 bytes. Beside a q in float32 all four may be float16, on a CPU.
            They are read as the numbers that they stand for, and the arithmetic is in float32.
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
        softcap: of scores, on the CPU, as there.
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
        NotImplementedError: a backend that does not serve the device; an input that requires a gradient, a tangent, or
            a soft cap on a GPU (the reference has them).

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
        checked_softcap(OP, softcap),
    )  # fmt: skip
    out, lse = call(attention_op, arguments[: -len(APPEND_ONLY)], q, backend)
    return (out, lse) if return_lse else out


@overload
def speculative_attention_append_(
    q: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, plan: TilePlan, *,
    counts: Tensor | None = ..., source_index: Tensor | None = ..., starts: Tensor | None = ...,
    window: int | None = ..., cu_seqlens: Tensor | None = ..., block_table: Tensor | None = ...,
    scale: float | None = ..., sinks: Tensor | None = ..., softcap: float | None = ...,
    return_lse: Literal[False] = ..., backend: Backend = ...
) -> Tensor: ...  # fmt: skip


@overload
def speculative_attention_append_(
    q: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, plan: TilePlan, *,
    counts: Tensor | None = ..., source_index: Tensor | None = ..., starts: Tensor | None = ...,
    window: int | None = ..., cu_seqlens: Tensor | None = ..., block_table: Tensor | None = ...,
    scale: float | None = ..., sinks: Tensor | None = ..., softcap: float | None = ...,
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
    softcap: float | None = None,
    return_lse: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`speculative_attention` that stores K and V of selected new tokens after the prefix, in the same pass.

    New token ``source_index[b, i]`` goes to position ``lengths[b] + i``, for ``i < counts[b]``. Lengths do not change:
    what was written is a draft until `kv_commit_`. If only tokens that a step may keep are stored, say without the
    masks of a quadratic draft, the kept ones are a prefix of them and the commit moves nothing. The result does not
    depend on what is stored.

    Args:
        q, k_new, v_new, plan, starts, window, cu_seqlens, block_table, scale, sinks, softcap, return_lse, backend: as in
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
        starts, cu_seqlens, 0 if cu_seqlens is None else plan.q_len, checked_sinks(APPEND, sinks, q),
        checked_softcap(APPEND, softcap), counts=counts, source_index=source_index,
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
