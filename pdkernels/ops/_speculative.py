"""What a call of speculative attention is checked for, and who computes it."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature

import torch
from torch import Tensor

from pdkernels._attention import (
    SCALE_BYTES,
    SpeculativeArguments,
    check_heads,
    check_input,
    check_plan,
    check_quantized,
    refuse_float64,
)
from pdkernels._validation import check_index, check_type, fail, integer, message
from pdkernels.masks.tile_plan import TilePlan, dense_plan
from pdkernels.ops._gluon import speculative_for
from pdkernels.ops.library import DEBUG_CHECKS
from pdkernels.reference import speculative_attention as reference

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
    for name, x in zip(("q", "k_new", "v_new", "k_cache", "v_cache"), given[:5]):
        cached = name.endswith("cache")
        if x.dim() != (4 if cached or not given.packed else 3):
            layout = f"({rows}, heads, head_dim)"
            if cached:
                layout = f"({'batch, slots' if given.block_table is None else 'num_pages, page_size'}, heads, head_dim)"
            remedy = "Pass one layer of a stacked cache." if x.dim() == 5 else ""
            fail(op, name, f"have shape {layout}", tuple(x.shape), remedy)
        check_row = check_quantized if given.quantized and name != "q" else check_input
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
    specialised = speculative_for(given)
    if specialised is not None:
        return specialised(given, append=op == APPEND)
    from pdkernels.triton.speculative_attention import forward

    return forward(given, append=op == APPEND)
