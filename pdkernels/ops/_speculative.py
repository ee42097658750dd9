"""What a call of speculative attention is checked for, and who computes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pdkernels._validation import KERNEL_DTYPES, check_index, check_type, fail, integer, message
from pdkernels.masks.tile_plan import PlanArguments
from pdkernels.ops._attention import check_plan, dense_plan, takes_head_dim
from pdkernels.ops._library import DEBUG_CHECKS
from pdkernels.reference import speculative_attention as reference

OP = "speculative_attention"
APPEND = "speculative_attention_append_"

# A block's offsets from its first token must fit into 32 bits on CUDA. Inputs with wider strides are copied, caches never.
MAX_CUDA_TOKEN_STRIDE = 2**23


def first_positions(
    op: str, q: Tensor, lengths: Tensor, starts: Tensor | None, window: int | None, cu_seqlens: Tensor | None
) -> Tensor | None:
    """`starts` and `window` as the op takes both: ``(batch, 1)``, ``(batch, new)``, or ``(1, rows)`` of packed sequences."""
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


def check_call(
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
    starts: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_new: int = 0,
    counts: Tensor | None = None,
    source_index: Tensor | None = None,
    *,
    values: bool = False,
) -> None:
    """Checks everything but float64, and values only on request."""
    rows = "batch, new" if cu_seqlens is None else "rows"
    for name, x in (("q", q), ("k_new", k_new), ("v_new", v_new), ("k_cache", k_cache), ("v_cache", v_cache)):
        cached = name.endswith("cache")
        if x.dim() != (4 if cached or cu_seqlens is None else 3):
            layout = f"({rows}, heads, head_dim)"
            if cached:
                layout = f"({'batch, slots' if block_table is None else 'num_pages, page_size'}, heads, head_dim)"
            remedy = "Pass one layer of a stacked cache." if x.dim() == 5 else ""
            fail(op, name, f"have shape {layout}", tuple(x.shape), remedy)
        if x.dtype not in (*KERNEL_DTYPES, torch.float64):
            raise TypeError(message(op, name, "be float32, float16 or bfloat16", x.dtype, "Convert it with .to()."))
        if x.dtype != q.dtype:
            raise TypeError(message(op, name, f"be {q.dtype} like q", x.dtype, "Convert it with .to()."))
        if x.device != q.device:
            fail(op, name, f"be on {q.device} like q", x.device, f"Move it with .to({str(q.device)!r}).")
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            remedy = "A cache is not copied: allocate it so." if cached else "Call .contiguous() on it."
            fail(op, name, "have a contiguous last dimension", f"strides {x.stride()}", remedy)
        if cached and x.device.type == "cuda" and x.stride(1) >= MAX_CUDA_TOKEN_STRIDE:
            wanted = f"have less than {MAX_CUDA_TOKEN_STRIDE} elements from token to token on CUDA"
            fail(op, name, wanted, f"strides {x.stride()}", "A cache is not copied: allocate it so.")
    heads, head_dim = q.shape[-2:]
    if k_new.shape[:-2] != q.shape[:-2] or k_new.shape[-1] != head_dim:
        wanted = f"have the {q.shape[0]} rows and the head_dim {head_dim} of q"
        if cu_seqlens is None:
            wanted = f"have the batch {q.shape[0]}, the {q.shape[1]} tokens and the head_dim {head_dim} of q"
        fail(op, "k_new", wanted, tuple(k_new.shape))
    if v_new.shape != k_new.shape:
        fail(op, "v_new", f"have shape {tuple(k_new.shape)} like k_new", tuple(v_new.shape))
    if k_new.shape[-2] == 0 or heads == 0 or heads % k_new.shape[-2] != 0:
        fail(op, "k_new", f"have a number of heads that divides the {heads} of q", k_new.shape[-2])
    if not takes_head_dim(head_dim):
        remedy = "Pad all heads with zeros and pass the scale."
        fail(op, "head_dim", "be a multiple of 8 in [16, 256]", head_dim, remedy)
    if k_cache.shape[2:] != k_new.shape[-2:]:
        fail(op, "k_cache", f"have {k_new.shape[-2]} heads of {head_dim} like k_new", tuple(k_cache.shape))
    if v_cache.shape != k_cache.shape:
        fail(op, "v_cache", f"have shape {tuple(k_cache.shape)} like k_cache", tuple(v_cache.shape))
    batch, new = q.shape[:2] if cu_seqlens is None else (lengths.shape[0] if lengths.dim() else 0, max_new)
    check_index(op, "lengths", lengths, (batch,), q.device)
    if block_table is not None:
        check_index(op, "block_table", block_table, (batch, None), q.device)
        if k_cache.shape[1] == 0:
            fail(op, "k_cache", "have a page size of at least 1", 0)
    elif k_cache.shape[0] != batch:
        remedy = "Pass the block_table of a paged cache."
        fail(op, "k_cache", f"have the batch {batch} of q", tuple(k_cache.shape), remedy)
    if cu_seqlens is not None:
        check_index(op, "cu_seqlens", cu_seqlens, (batch + 1,), q.device)
    if starts is not None:
        by_row = cu_seqlens is not None and tuple(starts.shape) == (1, q.shape[0])
        one = starts.dim() == 2 and starts.shape[1] == 1
        check_index(op, "starts", starts, starts.shape if by_row else (batch, 1 if one else new), q.device)
        if cu_seqlens is not None and not (by_row or one):
            fail(op, "starts", f"have shape ({batch},) where sequences are packed", tuple(starts.shape))
    if counts is not None:
        check_index(op, "counts", counts, (batch,), q.device)
    if source_index is not None:
        check_index(op, "source_index", source_index, (batch, None), q.device)
    check_plan(op, q.device, (batch, new), new, PlanArguments(plan_rows, plan_lists, bitmaps, block_q, block_k))
    if values:
        _check_values(op, new, q.shape[0], k_cache, lengths, block_table, starts, cu_seqlens, counts, source_index)


def _check_values(
    op: str,
    new: int,
    rows: int,
    k_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    starts: Tensor | None,
    cu_seqlens: Tensor | None,
    counts: Tensor | None,
    source_index: Tensor | None,
) -> None:
    """What the CPU kernel checks itself. On a GPU this synchronizes."""
    pages, page_size = k_cache.shape[:2]
    capacity = page_size if block_table is None else page_size * block_table.shape[1]
    table = [] if block_table is None else block_table.tolist()
    tokens = [new] * len(lengths)
    if cu_seqlens is not None:
        begins = cu_seqlens.tolist()
        remedy = "It counts the rows before each sequence, and all rows at its end."
        for b, (before, here) in enumerate(zip([0, *begins], begins)):
            low, high = (0, 0) if b == 0 else (before, before + new)
            if not low <= here <= high or (b == len(lengths) and here != rows):
                wanted = f"be in [{low}, {high}]" if b < len(lengths) else f"be {rows}"
                fail(op, f"cu_seqlens[{b}]", wanted, f"{here} for sequence {b}", remedy)
        tokens = [end - begin for begin, end in zip(begins, begins[1:])]
    for b, length in enumerate(lengths.tolist()):
        max_count = 0 if op == OP else tokens[b] if source_index is None else source_index.shape[1]
        count = max_count if counts is None else int(counts[b])
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
    if starts is not None and any(tokens) and bool((starts < 0).any()):
        fail(op, "starts", "be at least 0", int(starts.min()), "It is a position of the sequence.")


def results(op: str, q: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
    check_call(op, q, *rest, **options)
    if q.dtype == torch.float64:
        remedy = "Pass backend='reference', which computes in float64."
        raise TypeError(message(op, "q", "be float32, float16 or bfloat16 for the kernels", q.dtype, remedy))
    return q.new_empty(q.shape), q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)


def by_reference(
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
    starts: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_new: int = 0,
    *stored: Tensor | None,
) -> tuple[Tensor, Tensor]:
    new = q.shape[1] if cu_seqlens is None else max_new
    mask = dense_plan(PlanArguments(plan_rows, plan_lists, bitmaps, block_q, block_k), new, new)
    tensors = (q, k_new, v_new, k_cache, v_cache, lengths, mask, *stored)
    given = {"block_table": block_table, "starts": starts, "cu_seqlens": cu_seqlens}
    found: tuple[Tensor, Tensor] = getattr(reference, op)(*tensors, scale=scale, **given)
    return found


def by_triton(op: str, *arguments: Any) -> tuple[Tensor, Tensor]:
    from pdkernels.triton.speculative_attention import forward

    if DEBUG_CHECKS:
        check_call(op, *arguments, values=True)
    return forward(*arguments, append=op == APPEND)
