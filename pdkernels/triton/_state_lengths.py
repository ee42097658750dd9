"""Edits of the lengths of sequences whose layers have a state: commits and trims."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdkernels.triton._state_steps import CHECKED, LONGEST
from pdkernels.triton.blocking import ROUNDED


@triton.jit(do_not_specialize=["most", "columns", "layers"])
def _commit(
    lengths, length_stride, index, index_r, index_c, state_lengths, layer_stride, row_stride, counts, source,
    source_r, source_c, most, columns, layers, ADVANCE: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + r).to(tl.int64)
    length = tl.load(lengths + r * length_stride).to(tl.int64)
    in_state = tl.load(state_lengths + r * row_stride).to(tl.int64)
    valid = (
        (count > 0)
        & (count <= LONGEST)
        & (in_state >= 0)
        & (in_state <= LONGEST)
        & (length >= 0)
        & (length <= in_state + most)
    )
    if source is not None:
        valid = valid & (count <= columns)
    valid = valid & (length + count >= in_state) & (length + count <= in_state + most)
    count = tl.where(valid, count, 0)
    wrong = 0
    for first in range(0, layers, CHECKED):
        layer = first + tl.arange(0, CHECKED)
        other = tl.load(
            state_lengths + layer.to(tl.int64) * layer_stride + r * row_stride, mask=layer < layers, other=in_state
        ).to(tl.int64)
        wrong += tl.sum((other != in_state).to(tl.int32))
    ahead = length - in_state  # negative: so many of the new rows are in the state already
    if source is not None:
        for first in range(0, count, CHECKED):
            i = first + tl.arange(0, CHECKED)
            at = tl.load(source + r * source_r + i * source_c, mask=i < count, other=0).to(tl.int64)
            low = tl.where(ahead + i < 0, i, tl.maximum(-ahead, 0))
            high = tl.where(ahead + i < 0, i, most - 1 - ahead)
            wrong += tl.sum(((i < count) & ((at < low) | (at > high))).to(tl.int32))
    count = tl.where(wrong == 0, count, 0)
    for first in range(0, count, CHECKED):
        i = first + tl.arange(0, CHECKED)
        stored = (i < count) & (ahead + i >= 0)
        at = i.to(tl.int64)
        if source is not None:
            at = tl.load(source + r * source_r + i * source_c, mask=stored, other=0).to(tl.int64)
        tl.store(index + r * index_r + (ahead + i) * index_c, (ahead + at).to(index.dtype.element_ty), mask=stored)
    if ADVANCE:
        if count > 0:
            tl.store(lengths + r * length_stride, (length + count).to(lengths.dtype.element_ty))


@triton.jit(do_not_specialize=["layers"])
def _trim(lengths, length_stride, new_lengths, state_lengths, layer_stride, row_stride, layers):
    r = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + r * length_stride).to(tl.int64)
    new_length = tl.load(new_lengths + r).to(tl.int64)
    wrong = ((new_length < 0) | (new_length > length)).to(tl.int32)
    if new_length != length:
        for first in range(0, layers, CHECKED):
            layer = first + tl.arange(0, CHECKED)
            least = tl.load(
                state_lengths + layer.to(tl.int64) * layer_stride + r * row_stride, mask=layer < layers, other=0
            ).to(tl.int64)
            wrong += tl.sum(((layer < layers) & (new_length < least)).to(tl.int32))
    if wrong == 0:
        tl.store(lengths + r * length_stride, new_length.to(lengths.dtype.element_ty))


def _stacked(state_lengths: list[Tensor]) -> Tensor:
    layers = [x if x.dim() == 2 else x[None] for x in state_lengths]
    return layers[0] if len(layers) == 1 else torch.cat([x.to(torch.int64) for x in layers])


def state_commit_(
    lengths: Tensor, pending_index: Tensor, state_lengths: list[Tensor], counts: Tensor,
    source_index: Tensor | None = None, advance: bool = True,
) -> None:  # fmt: skip
    if len(lengths) == 0:
        return
    states = _stacked(state_lengths)
    source = (None, 0, 0) if source_index is None else (source_index, *source_index.stride())
    _commit[(len(lengths),)](
        lengths, lengths.stride(0), pending_index, *pending_index.stride(), states, *states.stride(),
        counts.contiguous(), *source, pending_index.shape[1], 0 if source_index is None else source_index.shape[1],
        len(states), ADVANCE=advance, num_warps=1, **ROUNDED,
    )  # fmt: skip


def state_trim_(lengths: Tensor, new_lengths: Tensor, state_lengths: list[Tensor]) -> None:
    if len(lengths) == 0:
        return
    states = _stacked(state_lengths)
    _trim[(len(lengths),)](
        lengths, lengths.stride(0), new_lengths.contiguous(), states, *states.stride(), len(states), num_warps=1,
        **ROUNDED,
    )  # fmt: skip
