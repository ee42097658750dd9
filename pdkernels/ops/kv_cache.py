"""KV-cache edits in place: append new rows, commit the accepted ones, trim; and rows of 8 bits.

One launch moves K and V of all layers and all sequences. The ops move bytes: any element type, any strides with a
contiguous last dimension, contiguous or paged. Lengths and counts are tensors on the cache's device, so a decode step
needs no host sync and can be captured in a CUDA graph.

A *draft* is the rows past ``lengths``: `kv_append_` writes it, `kv_commit_` keeps its accepted rows. On the CPU
bad values raise and nothing is written. On CUDA a sequence with bad values is left exactly as it was; set
``PDKERNELS_DEBUG_CHECKS=1`` to get the error there as well, at the cost of a sync.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pdkernels._attention import SCALE_BYTES, check_head_dim
from pdkernels._validation import (
    check_cuda_batch,
    check_floats,
    check_index,
    check_indices,
    check_last_contiguous,
    check_type,
    fail,
    message,
)
from pdkernels.backends import Backend
from pdkernels.ops.library import Draw, call, define
from pdkernels.reference import kv_cache as reference

__all__ = ["kv_append_", "kv_commit_", "kv_quantize", "kv_trim_"]

CacheTensors = Tensor | Sequence[Tensor]

# Maximum number of rows that a commit can move on CUDA: one byte of each must fit into 48 KiB of shared memory.
MAX_CUDA_COMMIT_ROWS = 48 * 1024


def kv_append_(
    k_cache: CacheTensors,
    v_cache: CacheTensors,
    k_new: CacheTensors,
    v_new: CacheTensors,
    lengths: Tensor,
    *,
    counts: Tensor | None = None,
    block_table: Tensor | None = None,
    backend: Backend = "auto",
) -> None:
    """Writes new K/V rows after each sequence's committed ones: row ``i`` to position ``lengths[b] + i``.

    The lengths do not change: the new rows are a draft until `kv_commit_`.

    Args:
        k_cache, v_cache: ``(layers, batch, capacity, kv_heads, head_dim)``, or one layer without the first dimension,
            or a list of those (layers held apart). With `block_table`:
            ``(layers, num_pages, page_size, kv_heads, head_dim)``. K and V may differ in heads and head_dim. Written:
            not expanded, and no memory shared with any other argument.
        k_new, v_new: new rows in the same form, ``(layers, batch, rows, kv_heads, head_dim)``; dtype of the cache.
        lengths: ``(batch,)`` int32 or int64, committed rows of each sequence.
        counts: ``(batch,)`` int32 or int64, rows to write; None writes all of them. Further rows are not read.
        block_table: ``(batch, max_pages)`` int32 or int64; position ``p`` lives in page
            ``block_table[b, p // page_size]``.
        backend: see `pdkernels.show_config`.

    Raises:
        ValueError: shapes that do not fit; memory that overlaps; lengths, counts or pages out of range (nothing is
            written then).
        TypeError: dtypes that do not fit.
        NotImplementedError: an input that requires a gradient while gradients are recorded.

    Example:
        >>> import torch, pdkernels as pd
        >>> k = torch.zeros(1, 4, 1, 2); v = torch.zeros(1, 4, 1, 2)   # one layer, batch 1, capacity 4
        >>> pd.kv_append_(k, v, torch.ones(1, 2, 1, 2), torch.ones(1, 2, 1, 2), torch.tensor([1]))
        >>> k[0, :, 0, 0]
        tensor([0., 1., 1., 0.])
    """
    tensors = _as_lists("kv_append_", k_cache=k_cache, v_cache=v_cache, k_new=k_new, v_new=v_new)
    arguments = (*tensors, lengths, counts, block_table)
    call(kv_append_op, arguments, lengths, backend)


def kv_commit_(
    k_cache: CacheTensors,
    v_cache: CacheTensors,
    lengths: Tensor,
    counts: Tensor,
    source_index: Tensor | None = None,
    *,
    block_table: Tensor | None = None,
    backend: Backend = "auto",
) -> None:
    """Keeps the accepted rows of a draft: moves them into position, in place, and lengthens the sequences.

    The row at ``lengths[b] + source_index[b, i]`` moves to ``lengths[b] + i`` for ``i < counts[b]``, as if all rows
    were read before the first is written: any pattern is allowed (a prefix, every (L+1)-th row, a branch of a tree,
    repeats), though rows move inside the memory that is written; K, V, layers and lengths may still not overlap each
    other. Then ``lengths[b] += counts[b]``. Nothing else is touched; rows already in place cost nothing.

    Picture, every third row of a draft of nine (``source_index = [0, 3, 6]``, ``counts = [3]``)::

        before   c c c c | 0 . . 3 . . 6 . .        c committed, | lengths
        after    c c c c   0 3 6 | 3 . . 6 . .      rows past the new length are free

    Args:
        k_cache, v_cache: as in `kv_append_`.
        lengths: ``(batch,)`` int32 or int64; updated in place, so not expanded.
        counts: ``(batch,)`` int32 or int64, accepted rows of each sequence, 0 or more.
        source_index: ``(batch, rows)`` int32 or int64, counted from the sequence's length; entries from ``counts[b]``
            on are not read. None: the accepted rows are a prefix, so only the lengths change.
        block_table, backend: as in `kv_append_`.

    Raises:
        ValueError: shapes that do not fit; lengths, counts, sources or pages out of range (nothing is written then).
        TypeError: index tensors that are not int32 or int64.
        NotImplementedError: more than 49152 columns in `source_index` on CUDA; a cache that requires a gradient while
            gradients are recorded.

    Source: commit after verification in Nemotron-Labs-Diffusion (quadratic self-speculation, every (L+1)-th row) and
    Jacobi Forcing (rejection recycling, the winning branch).

    Example:
        >>> import torch, pdkernels as pd
        >>> k = torch.arange(6.).view(1, 6, 1, 1); v = k.clone(); lengths = torch.tensor([1])
        >>> pd.kv_commit_(k, v, lengths, torch.tensor([2]), torch.tensor([[0, 3]]))
        >>> k.flatten(), lengths
        (tensor([0., 1., 4., 3., 4., 5.]), tensor([3]))
    """
    tensors = _as_lists("kv_commit_", k_cache=k_cache, v_cache=v_cache)
    arguments = (*tensors, lengths, counts, source_index, block_table)
    call(kv_commit_op, arguments, lengths, backend)


def kv_trim_(lengths: Tensor, new_lengths: Tensor, *, backend: Backend = "auto") -> None:
    """Shortens sequences: ``lengths[b] = new_lengths[b]``. No row is touched; rows past a length are free.

    Pages of a paged cache are released by `pdkernels.cache.PagedKVCache.trim_`, which calls this.

    Args:
        lengths: ``(batch,)`` int32 or int64; updated in place, so not expanded.
        new_lengths: ``(batch,)`` int32 or int64, each in ``[0, lengths[b]]``.
        backend: see `pdkernels.show_config`.

    Raises:
        ValueError: a new length that is negative or longer than the old one (no length is changed then).
        TypeError: tensors that are not int32 or int64.

    Example:
        >>> import torch, pdkernels as pd
        >>> lengths = torch.tensor([5, 7]); pd.kv_trim_(lengths, torch.tensor([5, 3])); lengths
        tensor([5, 3])
    """
    call(kv_trim_op, (lengths, new_lengths), lengths, backend)


def kv_quantize(x: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Rows of K or V as rows of an 8-bit cache: for each head of each row, codes of 8 bits and their scale.

    A cache of such rows takes ``head_dim + 4`` bytes for a head. All cache ops take it as they take any other, and
    `pdkernels.speculative_attention` reads it. The codes of a row depend on that row alone.

    Args:
        x: ``(batch, rows, heads, head_dim)`` or ``(rows, heads, head_dim)``, float32, float16 or bfloat16, of any
            strides with a contiguous last dimension; head_dim a multiple of 8 in ``[16, 512]``.
        backend: see `pdkernels.show_config`.

    Returns:
        ``(..., heads, head_dim + 4)`` int8, contiguous: the codes, in ``[-127, 127]``, and then the four bytes of the
        scale, a float32. The scale is ``max |x| / 127`` of a head, 0 where that is subnormal, and a code is
        ``x / scale`` rounded to nearest even; both are computed in float32 and the same bit for bit on every device. A
        head with a NaN or an infinity has the scale NaN: it stands for nothing but NaN.

    Raises:
        ValueError: a shape or strides that do not fit.
        TypeError: another dtype.
        NotImplementedError: an input that requires a gradient while gradients are recorded.

    Source: absmax quantisation of each token and head, as in KIVI's per-token form (Liu et al., 2024) with groups of
    one head.

    Example:
        >>> import torch, pdkernels as pd
        >>> rows = pd.kv_quantize(torch.linspace(-1, 1, 16).view(1, 1, 1, 16))
        >>> rows.shape, rows[0, 0, 0, :3].tolist()
        (torch.Size([1, 1, 1, 20]), [-127, -110, -93])
        >>> rows[..., 16:].view(torch.float32) == 1 / 127
        tensor([[[[True]]]])
    """
    result: Tensor = call(kv_quantize_op, (x,), x, backend)
    return result


def _as_lists(op: str, **caches: CacheTensors) -> list[list[Tensor]]:
    for name, tensors in caches.items():
        check_type(isinstance(tensors, Iterable), op, name, "be a tensor or a list of them", type(tensors).__name__)
    return [[tensors] if isinstance(tensors, Tensor) else list(tensors) for tensors in caches.values()]


def _fake_append(
    k_cache: list[Tensor],
    v_cache: list[Tensor],
    k_new: list[Tensor],
    v_new: list[Tensor],
    lengths: Tensor,
    counts: Tensor | None = None,
    block_table: Tensor | None = None,
) -> None:
    op = "kv_append_"
    _check_caches(op, k_cache, v_cache, lengths, block_table)
    _check_new(op, "k_new", k_new, k_cache, lengths)
    _check_new(op, "v_new", v_new, v_cache, lengths)
    if k_new[0].shape[-3] != v_new[0].shape[-3]:
        fail(op, "v_new", f"have {k_new[0].shape[-3]} rows like k_new", v_new[0].shape[-3])
    check_indices(op, (lengths.shape[0],), lengths.device, counts=counts)


def _fake_commit(
    k_cache: list[Tensor],
    v_cache: list[Tensor],
    lengths: Tensor,
    counts: Tensor,
    source_index: Tensor | None = None,
    block_table: Tensor | None = None,
) -> None:
    op = "kv_commit_"
    _check_caches(op, k_cache, v_cache, lengths, block_table)
    check_index(op, "counts", counts, (lengths.shape[0],), lengths.device)
    if source_index is not None:
        check_index(op, "source_index", source_index, (lengths.shape[0], None), lengths.device)
        if lengths.is_cuda and source_index.shape[1] > MAX_CUDA_COMMIT_ROWS:
            expectation = f"have at most {MAX_CUDA_COMMIT_ROWS} columns on CUDA"
            raise NotImplementedError(
                message(op, "source_index", expectation, source_index.shape[1], "Commit in several calls.")
            )


def _fake_trim(lengths: Tensor, new_lengths: Tensor) -> None:
    op = "kv_trim_"
    check_index(op, "lengths", lengths, (None,), None)
    check_index(op, "new_lengths", new_lengths, (lengths.shape[0],), lengths.device)


def _fake_quantize(x: Tensor) -> Tensor:
    op = "kv_quantize"
    check_floats(op, "x", x)
    if x.dim() not in (3, 4):
        fail(op, "x", "have shape (batch, rows, heads, head_dim) or (rows, heads, head_dim)", tuple(x.shape))
    check_head_dim(op, x.shape[-1])
    check_last_contiguous(op, "Call .contiguous() on it.", x=x)
    return x.new_empty((*x.shape[:-1], x.shape[-1] + SCALE_BYTES), dtype=torch.int8)


def _triton_quantize(x: Tensor) -> Tensor:
    from pdkernels.triton.kv_cache import quantize

    return quantize(x if x.dim() == 4 else x.unsqueeze(0)).view(*x.shape[:-1], x.shape[-1] + SCALE_BYTES)


def _check_layers(op: str, argument: str, tensors: list[Tensor]) -> None:
    if not tensors:
        fail(op, argument, "hold at least one layer", "an empty list")
    first, layers = tensors[0], 0
    for i, t in enumerate(tensors):
        name = argument if len(tensors) == 1 else f"{argument}[{i}]"
        check_type(isinstance(t, Tensor), op, name, "be a tensor", type(t).__name__)
        if t.dim() not in (4, 5):
            fail(op, name, "have 4 dimensions, or 5 with the layers first", tuple(t.shape))
        # A copy of a cache would receive the rows and be discarded.
        remedy = "Allocate it so." if argument.endswith("cache") else "Call .contiguous() on it."
        check_last_contiguous(op, remedy, **{name: t})
        if t.shape[-4:] != first.shape[-4:] or t.stride()[-4:] != first.stride()[-4:] or t.dtype != first.dtype:
            actual = f"{tuple(t.shape)} with strides {t.stride()} and {t.dtype}"
            fail(op, name, "have the shape, strides and dtype of the first layer", actual)
        layers += t.shape[0] if t.dim() == 5 else 1
    if layers == 0:
        fail(op, argument, "hold at least one layer", tuple(first.shape))


def _num_layers(tensors: list[Tensor]) -> int:
    return sum(t.shape[0] if t.dim() == 5 else 1 for t in tensors)


def _check_caches(op: str, k: list[Tensor], v: list[Tensor], lengths: Tensor, block_table: Tensor | None) -> None:
    _check_layers(op, "k_cache", k)
    _check_layers(op, "v_cache", v)
    device = k[0].device
    for t in k + v:
        if t.device != device:
            fail(op, "v_cache", f"be on {device} like k_cache", t.device)
    if _num_layers(k) != _num_layers(v) or k[0].shape[-4:-2] != v[0].shape[-4:-2]:
        actual = f"{_num_layers(v)} layers of {tuple(v[0].shape[-4:])}"
        expectation = f"match k_cache, {_num_layers(k)} layers of {tuple(k[0].shape[-4:])}, up to the heads"
        fail(op, "v_cache", expectation, actual)
    pages = k[0].shape[-4]
    check_index(op, "lengths", lengths, (pages if block_table is None else None,), device)
    check_cuda_batch(op, "lengths", lengths)
    if block_table is not None:
        check_index(op, "block_table", block_table, (lengths.shape[0], None), device)
        if k[0].shape[-3] == 0:
            fail(op, "k_cache", "have a page size of at least 1", 0)


def _check_new(op: str, argument: str, new: list[Tensor], cache: list[Tensor], lengths: Tensor) -> None:
    _check_layers(op, argument, new)
    first, target = new[0], cache[0]
    if first.shape[-4] != lengths.shape[0] or first.shape[-2:] != target.shape[-2:]:
        layers = "layers, " if first.dim() == 5 else ""
        expectation = f"({layers}{lengths.shape[0]}, rows, {target.shape[-2]}, {target.shape[-1]})"
        fail(op, argument, f"have shape {expectation} like lengths and the cache", tuple(first.shape))
    if _num_layers(new) != _num_layers(cache):
        fail(op, argument, f"have the cache's {_num_layers(cache)} layers", _num_layers(new))
    remedy = "Convert it with .to()."
    check_type(first.dtype == target.dtype, op, argument, f"be {target.dtype} like the cache", first.dtype, remedy)
    for t in new:
        if t.device != target.device:
            fail(op, argument, f"be on {target.device} like the cache", t.device)


def _example_append(draw: Draw) -> dict[str, Any]:
    k, v = draw.floats(3, 2, 64, 2, 16), draw.floats(3, 2, 64, 2, 16)
    k_new, v_new = draw.floats(3, 2, 5, 2, 16), draw.floats(3, 2, 5, 2, 16)
    lengths, counts = draw.ints(0, 49, 2), draw.ints(0, 5, 2)
    return {"k_cache": k, "v_cache": v, "k_new": k_new, "v_new": v_new, "lengths": lengths, "counts": counts}


def _example_commit(draw: Draw) -> dict[str, Any]:
    k, v, lengths = draw.floats(3, 2, 64, 2, 16), draw.floats(3, 2, 64, 2, 16), draw.ints(0, 49, 2)
    counts, source_index = draw.ints(0, 4, 2), draw.rows(2, 4, of=12)
    return {"k_cache": k, "v_cache": v, "lengths": lengths, "counts": counts, "source_index": source_index}


def _example_quantize(draw: Draw) -> dict[str, Any]:
    return {"x": draw.floats(2, 5, 3, 40)}


def _example_trim(draw: Draw) -> dict[str, Any]:
    return {"lengths": draw.ints(9, 19, 3), "new_lengths": draw.ints(0, 8, 3)}


kv_append_op = define(
    "kv_append_(Tensor(a!)[] k_cache, Tensor(b!)[] v_cache, Tensor[] k_new, Tensor[] v_new, Tensor lengths, "
    "Tensor? counts=None, Tensor? block_table=None) -> ()",
    fake=_fake_append,
    reference=reference.kv_append_,
    example=_example_append,
    float64=True,
)
kv_commit_op = define(
    "kv_commit_(Tensor(a!)[] k_cache, Tensor(b!)[] v_cache, Tensor(c!) lengths, Tensor counts, "
    "Tensor? source_index=None, Tensor? block_table=None) -> ()",
    fake=_fake_commit,
    reference=reference.kv_commit_,
    example=_example_commit,
    float64=True,
)
kv_quantize_op = define(
    "kv_quantize(Tensor x) -> (Tensor rows)",
    fake=_fake_quantize,
    reference=reference.kv_quantize,
    triton=_triton_quantize,
    example=_example_quantize,
    gradients="none",
)
kv_trim_op = define(
    "kv_trim_(Tensor(a!) lengths, Tensor new_lengths) -> ()",
    fake=_fake_trim,
    reference=reference.kv_trim_,
    example=_example_trim,
    gradients="own",
)
