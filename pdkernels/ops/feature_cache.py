"""Steps that recompute only the rows that changed: select by change, gather, scatter the results.

Training uses plain PyTorch; these ops have no gradient and refuse inputs that require one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pdkernels._validation import (
    check_choice,
    check_cuda_batch,
    check_floats,
    check_index,
    check_indices,
    check_int,
    check_last_contiguous,
    check_shape,
    check_type,
    fail,
)
from pdkernels.backends import Backend
from pdkernels.ops.library import Draw, call, define
from pdkernels.reference import feature_cache as reference

__all__ = ["add_cached_rows_", "gather_rows", "select_stale_rows_"]

SELECT, GATHER, ADD = "select_stale_rows_", "gather_rows", "add_cached_rows_"
MAX_SELECTED = 2**20


def select_stale_rows_(
    v: Tensor,
    v_cache: Tensor,
    starts: Tensor,
    *,
    max_selected: int,
    quota: Tensor | None = None,
    counts: Tensor | None = None,
    update: str = "all",
    block_table: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Selects the rows whose values are least similar to those in the cache, and updates the cached values.

    Row i of sequence b is compared with slot ``starts[b] + i`` of the cache by the cosine over all heads,
    ``dot / max(|v| |cached|, 1e-8)``, in float32 for every dtype. The rows of lowest similarity are selected, the lower
    row on ties. A similarity that is NaN is the lowest of all: there are NaN or infinity among the values, or their
    squares overflow float32. Rows equal to the cached ones have a cosine of exactly 1, regardless of rounding: any row
    that changed is selected before them. All devices and the reference sum in the same order, so they select the same
    rows.

    Args:
        v: ``(B, G, kv_heads, D)`` float32, float16 or bfloat16, fresh values. Last dimension contiguous.
        v_cache: one layer, ``(B, capacity, kv_heads, D)``, or with `block_table`
            ``(num_pages, page_size, kv_heads, D)``; dtype of `v`. Written, so it shares no memory with other arguments.
        starts: ``(B,)`` int32 or int64, the slot of row 0.
        max_selected: the maximum number of rows to select from a sequence, and the width of the result. At most 2**20,
            or G if that is larger.
        quota: ``(B,)`` int32 or int64, rows to select from each sequence, capped at `max_selected`; None:
            `max_selected`.
        counts: ``(B,)`` int32 or int64, valid rows of each sequence; None: all rows. The others are padding, neither
            selected nor stored.
        update: which cached values are replaced by those of `v`: ``"all"`` of the valid rows, the ``"selected"`` ones,
            or ``"none"``. So the next call compares with the step before (published), or with each row's last
            recomputation.
        block_table: ``(B, max_pages)`` int32 or int64; slot ``p`` lives in page ``block_table[b, p // page_size]``.
        backend: see `pdkernels.show_config`. The reference takes float64 too.

    Returns:
        ``(B, max_selected)`` int64: row indices in ascending order, padded with -1.

    Raises:
        ValueError: shapes that do not fit; starts, counts, quotas or pages out of range (nothing is written then). On
            CUDA such a sequence gets -1 and its cache is left as it was, unless ``PDKERNELS_DEBUG_CHECKS=1``.
        TypeError: dtypes that do not fit.
        NotImplementedError: an input that requires a gradient while gradients are recorded.

    Deterministic; a sequence's result does not depend on other sequences.

    Source: the V-verify step of Liu et al., "dLLM-Cache: Accelerating Diffusion Large Language Models with Adaptive
    Caching", with similarities in float32 and a rule for ties.

    Example:
        >>> import torch, pdkernels as pd
        >>> cached = torch.tensor([1.0, 0.0]).expand(1, 3, 1, 2).clone()
        >>> v = torch.tensor([[[[2.0, 0.0]], [[0.0, 1.0]], [[1.0, 1.0]]]])  # before: turned by 90 and by 45 degrees
        >>> pd.select_stale_rows_(v, cached, torch.tensor([0]), max_selected=2)
        tensor([[1, 2]])
        >>> torch.equal(cached, v)
        True
    """
    out: Tensor = call(
        select_stale_rows_op, (v, v_cache, starts, max_selected, quota, counts, update, block_table), v, backend
    )
    return out


def gather_rows(x: Tensor, index: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Gathers rows of each sequence: ``out[b, j] = x[b, index[b, j]]``, zeros where the index is -1.

    Args:
        x: ``(B, G, ...)``, any dtype. Rows may be strided; one that is not contiguous itself is copied first.
        index: ``(B, r)`` int32 or int64, in ``[-1, G)``, any order.
        backend: see `pdkernels.show_config`. Gradients flow through the reference.

    Returns:
        ``(B, r, ...)``, contiguous, dtype of `x`.

    Raises:
        ValueError: shapes that do not fit; a number out of range. On CUDA it gives zeros, unless
            ``PDKERNELS_DEBUG_CHECKS=1``.
        TypeError: `index` of another dtype.
        NotImplementedError: an input that requires a gradient while gradients are recorded.

    Example:
        >>> import torch, pdkernels as pd
        >>> pd.gather_rows(torch.tensor([[[1, 2], [3, 4]]]), torch.tensor([[1, -1]]))
        tensor([[[3, 4],
                 [0, 0]]])
    """
    out: Tensor = call(gather_rows_op, (x, index), x, backend)
    return out


def add_cached_rows_(
    x: Tensor, cached: Tensor, rows: Tensor | None = None, index: Tensor | None = None, *, backend: Backend = "auto"
) -> Tensor:
    """``x + cached``, after ``cached[b, index[b, j]] = rows[b, j]`` in place: a residual add fused with a scatter.

    Args:
        x: ``(B, G, E)`` float32, float16 or bfloat16. Rows may be strided; any other layout is copied first.
        cached: like `x`, the last output of a sublayer for each row; last dimension contiguous, not overlapping `x`.
        rows: ``(B, r, E)``, dtype of `x`, the new output for some rows; None: nothing is replaced.
        index: ``(B, r)`` int32 or int64, the indices of these rows: ascending, padded with -1, as `select_stale_rows_`
            returns them.
        backend: see `pdkernels.show_config`. The reference takes float64 too.

    Returns:
        ``(B, G, E)``, contiguous, dtype of `x`; sums are rounded once.

    Raises:
        ValueError: shapes that do not fit; indices out of range or not ascending (nothing is written then). On CUDA the
            cached rows of such a sequence stay as they were and are added, unless ``PDKERNELS_DEBUG_CHECKS=1``.
        TypeError: dtypes that do not fit.
        NotImplementedError: an input that requires a gradient while gradients are recorded.

    Deterministic; equal bit for bit to PyTorch's scatter and sum.

    Example:
        >>> import torch, pdkernels as pd
        >>> cached = torch.tensor([[[1.0], [2.0]]])
        >>> pd.add_cached_rows_(torch.tensor([[[10.0], [20.0]]]), cached, torch.tensor([[[5.0]]]), torch.tensor([[1]]))
        tensor([[[11.],
                 [25.]]])
        >>> cached[0, :, 0]
        tensor([1., 5.])
    """
    out: Tensor = call(add_cached_rows_op, (x, cached, rows, index), x, backend)
    return out


def _fake_select(
    v: Tensor,
    v_cache: Tensor,
    starts: Tensor,
    max_selected: int,
    quota: Tensor | None = None,
    counts: Tensor | None = None,
    update: str = "all",
    block_table: Tensor | None = None,
) -> Tensor:
    check_floats(SELECT, "v", v)
    if v.dim() != 4:
        fail(SELECT, "v", "have shape (B, G, kv_heads, D)", tuple(v.shape))
    check_floats(SELECT, "v_cache", v_cache, like=v)
    if v_cache.dim() != 4 or v_cache.shape[2:] != v.shape[2:]:
        fail(SELECT, "v_cache", f"have shape (B or pages, slots, {v.shape[2]}, {v.shape[3]})", tuple(v_cache.shape))
    check_last_contiguous(SELECT, v=v, v_cache=v_cache)
    batch = v.shape[0]
    if block_table is None and v_cache.shape[0] != batch:
        fail(SELECT, "v_cache", f"have a batch of {batch} like v", v_cache.shape[0])
    if block_table is not None and v_cache.shape[1] < 1:
        fail(SELECT, "v_cache", "have a page size of at least 1", 0)
    check_int(SELECT, "max_selected", max_selected, 0)
    if max_selected > MAX_SELECTED and max_selected > v.shape[1]:
        remedy = "Rows of the result past those of v are -1."
        fail(SELECT, "max_selected", f"be at most the {v.shape[1]} rows of v, or {MAX_SELECTED}", max_selected, remedy)
    check_cuda_batch(SELECT, "v", v)
    check_choice(SELECT, "update", update, reference.UPDATES)
    check_index(SELECT, "starts", starts, (batch,), v.device)
    check_indices(SELECT, (batch,), v.device, quota=quota, counts=counts)
    check_indices(SELECT, (batch, None), v.device, block_table=block_table)
    return v.new_empty((batch, max_selected), dtype=torch.int64)


def _fake_gather(x: Tensor, index: Tensor) -> Tensor:
    check_type(isinstance(x, Tensor), GATHER, "x", "be a tensor", type(x).__name__)
    if x.dim() < 2:
        fail(GATHER, "x", "have shape (B, G, ...)", tuple(x.shape))
    check_cuda_batch(GATHER, "x", x)
    check_index(GATHER, "index", index, (x.shape[0], None), x.device)
    return x.new_empty((x.shape[0], index.shape[1], *x.shape[2:]))


def _fake_add(x: Tensor, cached: Tensor, rows: Tensor | None = None, index: Tensor | None = None) -> Tensor:
    check_floats(ADD, "x", x)
    if x.dim() != 3:
        fail(ADD, "x", "have shape (B, G, E)", tuple(x.shape))
    check_cuda_batch(ADD, "x", x)
    check_floats(ADD, "cached", cached, x.shape, like=x, whose=" like x")
    check_last_contiguous(ADD, cached=cached)
    if (rows is None) != (index is None):
        fail(ADD, "rows and index", "be given together", "only " + ("index" if rows is None else "rows"))
    if rows is not None and index is not None:
        check_floats(ADD, "rows", rows, like=x)
        check_index(ADD, "index", index, (x.shape[0], None), x.device)
        check_shape(ADD, "rows", rows, (*index.shape, x.shape[2]), ", a row for each index")
    return x.new_empty(x.shape)


def _example_select(draw: Draw) -> dict[str, Any]:
    cache = draw.floats(2, 20, 2, 8)
    return {"v": draw.floats(2, 12, 2, 8), "v_cache": cache, "starts": draw.ints(0, 7, 2), "max_selected": 4}


def _example_gather(draw: Draw) -> dict[str, Any]:
    return {"x": draw.floats(2, 12, 16), "index": draw.rows(2, 4, of=12)}


def _example_add(draw: Draw) -> dict[str, Any]:
    x, cached, rows = draw.floats(2, 12, 16), draw.floats(2, 12, 16), draw.floats(2, 4, 16)
    return {"x": x, "cached": cached, "rows": rows, "index": draw.rows(2, 4, of=12)}


select_stale_rows_op = define(
    "select_stale_rows_(Tensor v, Tensor(a!) v_cache, Tensor starts, SymInt max_selected, Tensor? quota=None, Tensor? counts=None, "
    'str update="all", Tensor? block_table=None) -> (Tensor selected)',
    fake=_fake_select,
    reference=reference.select_stale_rows_,
    example=_example_select,
)
gather_rows_op = define(
    "gather_rows(Tensor x, Tensor index) -> (Tensor rows)",
    fake=_fake_gather,
    reference=reference.gather_rows,
    example=_example_gather,
    float64=True,
)
add_cached_rows_op = define(
    "add_cached_rows_(Tensor x, Tensor(a!) cached, Tensor? rows=None, Tensor? index=None) -> (Tensor sum)",
    fake=_fake_add,
    reference=reference.add_cached_rows_,
    example=_example_add,
)
