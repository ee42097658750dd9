"""Code shared by the steps of layers with a state: a sequence's values, and the launch that makes new rows pending."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from pdkernels._recurrent_state import StepArguments
from pdkernels.triton.blocking import ROUNDED

LONGEST = tl.constexpr(2**31 - 1)
CHECKED = tl.constexpr(32)
"""Values checked at a time."""
COPIED = 1024


@triton.jit
def sequence_of(b, rows, most, keep, size, state_lengths, sl_stride, lengths, counts, cache_rows, index, parents):
    """(cache row, new rows, accepted rows, settled rows, whether the state is new); no new rows if a value is bad."""
    row = b.to(tl.int64)
    if cache_rows is not None:
        row = tl.load(cache_rows + b).to(tl.int64)
    valid = (row >= 0) & (row < size)
    row = tl.where(valid, row, 0)
    count = rows.to(tl.int64)
    if counts is not None:
        count = tl.load(counts + b).to(tl.int64)
    in_state = tl.load(state_lengths + row * sl_stride).to(tl.int64)
    length = tl.load(lengths + row).to(tl.int64)
    valid = valid & (count >= 0) & (count <= rows) & ((keep >= 0) | (count <= most))
    valid = valid & (in_state >= 0) & (in_state <= LONGEST) & (length >= in_state) & (length <= in_state + most)
    valid = valid & (length + count <= LONGEST)
    count = tl.where(valid, count, 0)
    accepted = tl.where(count > 0, length - in_state, 0)
    wrong = 0
    if index is not None:
        for first in range(0, accepted, CHECKED):
            at = first + tl.arange(0, CHECKED)
            source = tl.load(index + row * most + at, mask=at < accepted, other=0).to(tl.int64)
            wrong += tl.sum(((source < 0) | (source >= most)).to(tl.int32))
    settled = tl.where((keep >= 0) & (count > keep), count - keep, 0)
    if parents is not None:  # settled rows are a path, and the others follow it
        for first in range(0, count, CHECKED):
            at = first + tl.arange(0, CHECKED)
            parent = tl.load(parents + b.to(tl.int64) * rows + at, mask=at < count, other=-1).to(tl.int64)
            wrong += tl.sum(((at < count) & ((parent < tl.minimum(at, settled) - 1) | (parent >= at))).to(tl.int32))
    count = tl.where(wrong == 0, count, 0)
    accepted = tl.where(wrong == 0, accepted, 0)
    return row, count, accepted, settled, in_state == 0


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """Softplus as on the CPU: the logarithm is an odd series of t / (2 + t)."""
    t = tl.exp(-tl.abs(x))
    z = t / (2.0 + t)
    w = z * z
    p = 1.0 / 17
    for half in tl.static_range(8):
        p = tl.fma(p, w, 1.0 / (15 - 2 * half))
    soft = tl.maximum(x, 0.0) + (z + z) * p
    return tl.where((x > 20.0) | (x != x), x, soft)


@triton.jit
def _copy(at, to, slot, source, b, row, i, o_b, o_r, o_h, n_b, n_r, n_h, heads, width, BLOCK: tl.constexpr):
    """A row of an input, all heads."""
    for first in range(0, heads * width, BLOCK):
        element = first + tl.arange(0, BLOCK)
        real = element < heads * width
        head, column = (element // width).to(tl.int64), element % width
        x = tl.load(source + b * n_b + i * n_r + head * n_h + column, mask=real)
        tl.store(to + row * o_b + slot * o_r + head * o_h + column, x, mask=real)


@triton.jit(do_not_specialize=["pending_rows", "rows"])
def _store(
    state_lengths, sl_stride, lengths, counts, cache_rows, done, rows, pending_rows, old0, o0_b, o0_r, o0_h, new0,
    n0_b, n0_r, n0_h, heads0, width0, old1, o1_b, o1_r, o1_h, new1, n1_b, n1_r, n1_h, heads1, width1, old2, o2_b,
    o2_r, o2_h, new2, n2_b, n2_r, n2_h, heads2, UPDATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One of `pending_rows` rows of each sequence; the first also sets the length. UPDATES: the second input has only
    these."""
    b, slot = (tl.program_id(0) // pending_rows).to(tl.int64), tl.program_id(0) % pending_rows
    settled = tl.load(done + b).to(tl.int64)
    row = b
    if cache_rows is not None:
        row = tl.load(cache_rows + b).to(tl.int64)
    count = rows.to(tl.int64)
    if counts is not None:
        count = tl.load(counts + b).to(tl.int64)
    i = settled + slot
    if (settled >= 0) & (i < count):
        _copy(new0, old0, slot, new0, b, row, i, o0_b, o0_r, o0_h, n0_b, n0_r, n0_h, heads0, width0, BLOCK)
        if new1 is not None:
            new_row = slot if UPDATES else i
            _copy(new1, old1, slot, new1, b, row, new_row, o1_b, o1_r, o1_h, n1_b, n1_r, n1_h, heads1, width1, BLOCK)
        if new2 is not None:
            _copy(new2, old2, slot, new2, b, row, i, o2_b, o2_r, o2_h, n2_b, n2_r, n2_h, heads2, 1, BLOCK)
    if (settled >= 0) & (slot == 0):
        length = tl.load(lengths + row).to(tl.int64) + settled
        tl.store(state_lengths + row * sl_stride, length.to(state_lengths.dtype.element_ty))


def packed(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]


def view(x: Tensor | None) -> tuple[Any, ...]:
    """A tensor `(batch, rows, heads, ...)` or `(batch, rows, width)` as kernels take it: pointer and strides."""
    return (None, 0, 0, 0) if x is None else (x, *x.stride()[:3])


def keep_rows(
    step: StepArguments, done: Tensor, rows: int, inputs: list[tuple[Tensor, Tensor] | None], updates: bool = False
) -> None:
    """The second launch. `inputs`: pending and new rows; the first two have a width. `updates`: the second has only
    those."""
    pending_rows = max(step.kept(rows), 1)
    arguments: list[Any] = []
    for at, pair in enumerate([*inputs, *[None] * (3 - len(inputs))]):
        if pair is None:
            arguments += [None, 0, 0, 0, None, 0, 0, 0, *([0, 1] if at < 2 else [0])]
            continue
        old, new = pair
        if new.dim() == 3 and at < 2:  # one head
            old, new = old[:, :, None], new[:, :, None]
        arguments += [*view(old), *view(new), new.shape[2], *(new.shape[3:] if at < 2 else ())]
    states = step.state_lengths
    _store[(len(done) * pending_rows,)](
        states, states.stride(0), step.lengths, step.counts, step.cache_rows, done, rows, pending_rows, *arguments,
        UPDATES=updates, BLOCK=COPIED, **ROUNDED,
    )  # fmt: skip


def dense(step: StepArguments) -> StepArguments:
    """With what kernels read by number contiguous."""
    lengths, counts, cache_rows, index, parents = packed(*step[1:6])
    assert lengths is not None
    return step._replace(lengths=lengths, counts=counts, cache_rows=cache_rows, pending_index=index, parents=parents)
