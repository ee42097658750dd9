"""KV cache operations as plain loops, which the kernels must match byte for byte.

Caches are stacked tensors ``(layers, batch, capacity, heads, dim)``, single layers without the first dimension, or lists of
those. With a block table, dimension ``batch`` counts pages and ``capacity`` slots of a page.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def _layers(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Every layer as a 4-D view."""
    tensors = [tensors] if isinstance(tensors, Tensor) else tensors
    return [layer for t in tensors for layer in (t.unbind(0) if t.dim() == 5 else (t,))]


def _fail(op: str, argument: str, expectation: str, actual: int, sequence: int) -> None:
    raise ValueError(f"pdkernels.{op}: {argument} must {expectation}, got {actual} for sequence {sequence}.")


class _Slots:
    """The storage of the logical positions of each sequence."""

    def __init__(self, op: str, cache: Tensor, block_table: Tensor | None) -> None:
        self.op = op
        self.pages, self.page_size = cache.shape[:2]
        self.table = None if block_table is None else block_table.tolist()
        self.capacity = self.page_size * (1 if block_table is None else block_table.shape[1])

    def __call__(self, sequence: int, position: int) -> tuple[int, int]:
        if self.table is None:
            return sequence, position
        page = self.table[sequence][position // self.page_size]
        if not 0 <= page < self.pages:
            _fail(self.op, "block_table", f"hold pages in [0, {self.pages - 1}]", page, sequence)
        return page, position % self.page_size

    def check(self, sequence: int, length: int, count: int, max_count: int) -> None:
        if not 0 <= length <= self.capacity:
            _fail(self.op, "lengths", f"be in [0, {self.capacity}]", length, sequence)
        if not 0 <= count <= max_count:
            _fail(self.op, "counts", f"be in [0, {max_count}]", count, sequence)
        if length + count > self.capacity:
            _fail(self.op, "lengths + counts", f"be at most the capacity {self.capacity}", length + count, sequence)


def kv_quantize(x: Tensor) -> Tensor:
    """Rows of an 8-bit cache: ``(..., head_dim)`` numbers become ``head_dim`` codes and the 4 bytes of their scale, int8.

    In float32: the scale is ``max |x| / 127`` of the row, 0 where that is subnormal; a code is ``x / scale``, rounded to nearest
    even. A row with a NaN or an infinity has the scale NaN. Codes are 0 where the scale is not positive.

    >>> rows = kv_quantize(torch.tensor([[254.0, -2.0, 5.0, 0.9]]))
    >>> rows[:, :4], rows[:, 4:].view(torch.float32)
    (tensor([[127,  -1,   2,   0]], dtype=torch.int8), tensor([[2.]]))
    """
    numbers = x.to(torch.float32)
    amax = numbers.abs().amax(-1, keepdim=True)
    scale = amax / torch.full_like(amax, 127)
    scale = torch.where(scale < torch.finfo(torch.float32).smallest_normal, 0.0, scale)
    scale = torch.where(amax.isfinite(), scale, torch.nan)
    codes = torch.where(scale > 0, (numbers / scale).round(), 0.0)
    return torch.cat([codes.to(torch.int8), scale.contiguous().view(torch.int8)], -1)


def kv_dequantize(rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """What rows of an 8-bit cache stand for: each code times the scale of its row.

    >>> kv_dequantize(kv_quantize(torch.tensor([[254.0, -2.0, 5.0, 0.9]])))
    tensor([[254.,  -2.,   4.,   0.]])
    """
    codes, scale = rows[..., :-4], rows[..., -4:].contiguous().view(torch.float32)
    return codes.to(dtype) * scale.to(dtype)


def kv_append_(
    k_cache: Tensor | Sequence[Tensor],
    v_cache: Tensor | Sequence[Tensor],
    k_new: Tensor | Sequence[Tensor],
    v_new: Tensor | Sequence[Tensor],
    lengths: Tensor,
    counts: Tensor | None = None,
    block_table: Tensor | None = None,
) -> None:
    """Row i of sequence b goes to position ``lengths[b] + i``, for ``i < counts[b]``."""
    caches, news = _layers(k_cache) + _layers(v_cache), _layers(k_new) + _layers(v_new)
    slots = _Slots("kv_append_", caches[0], block_table)
    rows = news[0].shape[1]
    targets = {}
    for b, length in enumerate(lengths.tolist()):
        count = rows if counts is None else int(counts[b])
        slots.check(b, length, count, rows)
        for i in range(count):
            targets[b, i] = slots(b, length + i)
    for cache, new in zip(caches, news):
        for (b, i), slot in targets.items():
            cache[slot] = new[b, i]


def kv_commit_(
    k_cache: Tensor | Sequence[Tensor],
    v_cache: Tensor | Sequence[Tensor],
    lengths: Tensor,
    counts: Tensor,
    source_index: Tensor | None = None,
    block_table: Tensor | None = None,
) -> None:
    """The row at ``lengths[b] + source_index[b, i]`` moves to ``lengths[b] + i``; then ``lengths[b] += counts[b]``.

    All rows are read before the first is written.
    """
    caches = _layers(k_cache) + _layers(v_cache)
    slots = _Slots("kv_commit_", caches[0], block_table)
    moves = []
    for b, (length, count) in enumerate(zip(lengths.tolist(), counts.tolist())):
        slots.check(b, length, count, slots.capacity if source_index is None else source_index.shape[1])
        for i in range(count):
            if source_index is None:
                break
            source = int(source_index[b, i])
            if not 0 <= source < slots.capacity - length:
                _fail("kv_commit_", "source_index", f"be in [0, {slots.capacity - length - 1}]", source, b)
            moves.append((slots(b, length + source), slots(b, length + i)))
    for cache in caches:
        rows = [cache[source].clone() for source, _ in moves]
        for row, (_, target) in zip(rows, moves):
            cache[target] = row
    lengths += counts.to(lengths.dtype)


def kv_trim_(lengths: Tensor, new_lengths: Tensor) -> None:
    """``lengths[b] = new_lengths[b]``, which must not be longer than before."""
    for b, (length, wanted) in enumerate(zip(lengths.tolist(), new_lengths.tolist())):
        if not 0 <= wanted <= length:
            _fail("kv_trim_", "new_lengths", f"be in [0, {length}]", wanted, b)
    lengths.copy_(new_lengths.to(torch.int64))
