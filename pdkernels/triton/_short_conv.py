"""Steps of short convolutions: the first of the two launches that `recurrent_state.py` describes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdkernels._recurrent_state import ConvArguments
from pdkernels.triton._state_steps import dense, keep_rows, packed, sequence_of, sigmoid
from pdkernels.triton.blocking import ROUNDED

CHANNELS = 256


@triton.jit
def _tap(
    x, x_b, x_r, old, o_b, o_r, state, s_b, s_r, index, b, row, most, at, before, is_new, channel, real,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """An input: new row `at`, or if that is negative the one before the new rows with number `before`."""
    in_state = (at < 0) & (before < WIDTH - 1)
    in_pending = (at < 0) & (before >= WIDTH - 1)
    source = tl.where(in_pending, before - (WIDTH - 1), 0).to(tl.int64)
    if index is not None:
        source = tl.load(index + row * most + source, mask=in_pending, other=0).to(tl.int64)
    value = tl.load(x + b * x_b + tl.where(at < 0, 0, at) * x_r + channel, mask=real & (at >= 0), other=0.0).to(
        tl.float32
    )
    value += tl.load(old + row * o_b + source * o_r + channel, mask=real & in_pending, other=0.0).to(tl.float32)
    slot = tl.where(in_state, before, 0)
    from_state = tl.load(state + row * s_b + slot * s_r + channel, mask=real & in_state & (is_new == 0), other=0.0)
    return value + from_state.to(tl.float32)


@triton.jit(do_not_specialize=["rows", "most", "keep", "size"])
def _conv(
    state, s_b, s_r, state_lengths, sl_stride, lengths, counts, cache_rows, index, parents, done, old, o_b, o_r, x,
    x_b, x_r, weight, weight_stride, bias, out, rows, most, keep, size, channels, WIDTH: tl.constexpr,
    SILU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(channels, BLOCK)
    b, channel_block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    row, count, accepted, settled, is_new = sequence_of(
        b, rows, most, keep, size, state_lengths, sl_stride, lengths, counts, cache_rows, index, parents
    )
    if channel_block == 0:
        tl.store(done + b, tl.where(count > 0, settled, -1))
    b = b.to(tl.int64)
    channel = channel_block * BLOCK + tl.arange(0, BLOCK)
    real = channel < channels
    for i in range(0, rows):
        y = tl.zeros((BLOCK,), tl.float32)
        if i < count:
            for tap in tl.static_range(WIDTH):
                at = b * 0 + i
                before = WIDTH - 1 + accepted
                for _ in tl.static_range(WIDTH - 1 - tap):
                    if at >= 0:
                        if parents is not None:
                            at = tl.load(parents + b * rows + at).to(tl.int64)
                        else:
                            at -= 1
                        if at < 0:
                            before -= 1
                    else:
                        before -= 1
                value = _tap(
                    x, x_b, x_r, old, o_b, o_r, state, s_b, s_r, index, b, row, most, at, before, is_new, channel,
                    real, WIDTH,
                )  # fmt: skip
                y += tl.load(weight + channel * weight_stride + tap, mask=real, other=0.0).to(tl.float32) * value
            if bias is not None:
                y += tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)
            if SILU:
                y = y * sigmoid(y)
        tl.store(out + (b * rows + i) * channels + channel, y.to(out.dtype.element_ty), mask=real)
    folded = accepted + settled
    if folded > 0:
        # Ascending, so that no input is overwritten before it has been read.
        for slot in tl.static_range(WIDTH - 1):
            before = folded + slot
            at = before - (WIDTH - 1) - accepted
            value = _tap(
                x, x_b, x_r, old, o_b, o_r, state, s_b, s_r, index, b, row, most, at, before, is_new, channel, real,
                WIDTH,
            )  # fmt: skip
            tl.store(state + row * s_b + slot * s_r + channel, value.to(state.dtype.element_ty), mask=real)


def short_conv_(args: ConvArguments) -> Tensor:
    x, weight, state, pending = args.x, args.weight, args.state, args.pending
    batch, rows, channels = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if batch == 0 or rows == 0:
        return out
    step, (bias,) = dense(args.step), packed(args.bias)
    done = torch.empty(batch, dtype=torch.int64, device=x.device)
    _conv[(batch * triton.cdiv(channels, CHANNELS),)](
        state, *state.stride()[:2], step.state_lengths, step.state_lengths.stride(0), step.lengths, step.counts,
        step.cache_rows, step.pending_index, step.parents, done, pending, *pending.stride()[:2], x, *x.stride()[:2],
        weight, weight.stride(0), bias, out, rows, pending.shape[1], -1 if step.keep is None else step.keep,
        len(step.lengths), channels, WIDTH=weight.shape[1], SILU=args.activation == "silu", BLOCK=CHANNELS, **ROUNDED,
    )  # fmt: skip
    keep_rows(step, done, rows, [(pending, x)])
    return out
