"""Steps of layers with a state, in Triton, and edits of their lengths.

Two launches make a step. In the first, a program holds a tile of a head's state in registers, some columns with all keys: it replays the
accepted rows, stores the state, and goes on through the new rows without storing it again. Columns do not depend on each other. The
second makes the new rows the pending ones, once no program reads those of before. Every program of the first checks the values of its
sequence; what one of them found is passed on to the second, which must not read lengths that it writes.

No product is contracted with a sum, and a row is computed by the same code wherever it is: its bits do not depend on the steps.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdkernels._recurrent_state import ConvArguments, DeltaArguments, SelectiveArguments, StepArguments

LONGEST = tl.constexpr(2**31 - 1)
_CHECKED = tl.constexpr(32)
"""Values checked at a time."""
COLUMNS = 32
"""Of a tile of a state, at most."""
CHANNELS = 256
COPIED = 1024
ROUNDED = {"enable_fp_fusion": False}


@triton.jit
def _sequence(b, rows, most, keep, size, state_lengths, held_stride, lengths, counts, cache_rows, index, parents):
    """(cache row, new rows, accepted rows, settled rows, whether the state is new) of a sequence; no new rows if a value is bad."""
    row = b.to(tl.int64)
    if cache_rows is not None:
        row = tl.load(cache_rows + b).to(tl.int64)
    fits = (row >= 0) & (row < size)
    row = tl.where(fits, row, 0)
    count = rows.to(tl.int64)
    if counts is not None:
        count = tl.load(counts + b).to(tl.int64)
    held = tl.load(state_lengths + row * held_stride).to(tl.int64)
    length = tl.load(lengths + row).to(tl.int64)
    fits = fits & (count >= 0) & (count <= rows) & ((keep >= 0) | (count <= most))
    fits = fits & (held >= 0) & (held <= LONGEST) & (length >= held) & (length <= held + most)
    fits = fits & (length + count <= LONGEST)
    count = tl.where(fits, count, 0)
    accepted = tl.where(count > 0, length - held, 0)
    wrong = 0
    if index is not None:
        for first in range(0, accepted, _CHECKED):
            at = first + tl.arange(0, _CHECKED)
            source = tl.load(index + row * most + at, mask=at < accepted, other=0).to(tl.int64)
            wrong += tl.sum(((source < 0) | (source >= most)).to(tl.int32))
    settled = tl.where((keep >= 0) & (count > keep), count - keep, 0)
    if parents is not None:  # settled rows are a path, and the others follow it
        for first in range(0, count, _CHECKED):
            at = first + tl.arange(0, _CHECKED)
            parent = tl.load(parents + b.to(tl.int64) * rows + at, mask=at < count, other=-1).to(tl.int64)
            wrong += tl.sum(((at < count) & ((parent < tl.minimum(at, settled) - 1) | (parent >= at))).to(tl.int32))
    count = tl.where(wrong == 0, count, 0)
    accepted = tl.where(wrong == 0, accepted, 0)
    return row, count, accepted, settled, held == 0


@triton.jit
def _softplus(x):
    """As on the CPU: the logarithm is an odd series of t / (2 + t)."""
    t = tl.exp(-tl.abs(x))
    z = t / (2.0 + t)
    w = z * z
    p = 1.0 / 17
    for half in tl.static_range(8):
        p = p * w + 1.0 / (15 - 2 * half)
    soft = tl.maximum(x, 0.0) + (z + z) * p
    return tl.where((x > 20.0) | (x != x), x, soft)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _unit(x, eps):
    return x * (1.0 / tl.sqrt_rn(tl.sum(x * x) + eps))


@triton.jit
def _row(at_k, at_v, at_gate, at_beta, key, keys, column, values, eps, decay_factor, dt_bias, dt_min, dt_max,
         DELTA: tl.constexpr, NORMALISED: tl.constexpr, SIGMOID: tl.constexpr, SOFTPLUS: tl.constexpr):  # fmt: skip
    """(k, v, decay, beta) of a row; the pointers are those of its head. A row whose update is known, as its v, has no beta."""
    k = tl.load(at_k + key, mask=key < keys, other=0.0).to(tl.float32)
    v = tl.load(at_v + column, mask=column < values, other=0.0).to(tl.float32)
    beta = 1.0
    if DELTA:
        if NORMALISED:
            k = _unit(k, eps)
        exponent = tl.load(at_gate).to(tl.float32)
        if SOFTPLUS:
            exponent = decay_factor * _softplus(exponent + dt_bias)
        if at_beta is not None:
            beta = tl.load(at_beta).to(tl.float32)
            if SIGMOID:
                beta = _sigmoid(beta)
    else:
        exponent = decay_factor
        if at_gate is not None:
            dt = tl.load(at_gate).to(tl.float32) + dt_bias
            if SOFTPLUS:
                dt = _softplus(dt)
            dt = tl.where(dt < dt_min, dt_min, dt)
            dt = tl.where(dt > dt_max, dt_max, dt)
            exponent = dt * decay_factor
            k = dt * k
    return k, v, tl.exp(exponent), beta


@triton.jit
def _after(state, k, v, decay, beta, UNKNOWN: tl.constexpr):
    """The state after a row, the decayed one before, and its update. UNKNOWN: that depends on the state."""
    decayed = state * decay
    if UNKNOWN:
        v = (v - tl.sum(k[:, None] * decayed, 0)) * beta
    return decayed + k[:, None] * v[None, :], decayed, v


@triton.jit(do_not_specialize=["rows", "kept", "most", "keep", "size"])
def _scan(
    state, state_row, state_head, state_key, state_lengths, held_stride, lengths, counts, cache_rows, index, parents, done,
    old_k, ok_b, ok_r, ok_h, old_v, ov_b, ov_r, ov_h, old_gate, og_b, og_r, og_h,
    new_k, k_b, k_r, k_h, new_v, v_b, v_r, v_h, new_gate, g_b, g_r, g_h, new_beta, b_b, b_r, b_h, q, q_b, q_r, q_h, out, updates,
    A, dt_biases, D, rows, kept, most, keep, size, heads, group, keys, values, scale, eps, dt_min, dt_max,
    KEYS: tl.constexpr, COLUMNS: tl.constexpr, DELTA: tl.constexpr, NORMALISED: tl.constexpr, SIGMOID: tl.constexpr,
    SOFTPLUS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(values, COLUMNS)
    part = tl.program_id(0) % (heads * blocks)
    b, h = tl.program_id(0) // (heads * blocks), part // blocks
    row, count, accepted, settled, is_new = _sequence(
        b, rows, most, keep, size, state_lengths, held_stride, lengths, counts, cache_rows, index, parents
    )
    if part == 0:
        tl.store(done + b, tl.where(count > 0, settled, -1))
    b, h = b.to(tl.int64), h.to(tl.int64)
    kh = h // group
    key, column = tl.arange(0, KEYS), part % blocks * COLUMNS + tl.arange(0, COLUMNS)
    real = column < values
    to = out + (b * rows * heads + h) * values + column
    for i in range(count, rows):
        tl.store(to + i * heads * values, tl.zeros((COLUMNS,), out.dtype.element_ty), mask=real)
    if count > 0:
        old_k += row * ok_b + kh * ok_h
        old_v += row * ov_b + h * ov_h
        new_k += b * k_b + kh * k_h
        new_v += b * v_b + h * v_h
        q += b * q_b + kh * q_h
        if new_gate is not None:
            old_gate += row * og_b + h * og_h
            new_gate += b * g_b + h * g_h
        if new_beta is not None:
            new_beta += b * b_b + h * b_h
        if updates is not None:
            updates += (b * kept * heads + h) * values
        factor, dt_bias, skip = 0.0, 0.0, 0.0
        if A is not None:
            factor = tl.load(A + h).to(tl.float32)
        if dt_biases is not None:
            dt_bias = tl.load(dt_biases + h).to(tl.float32)
        if D is not None:
            skip = tl.load(D + h).to(tl.float32)
        at_state = state + row * state_row + h * state_head + key.to(tl.int64)[:, None] * state_key + column[None, :]
        inside = (key < keys)[:, None] & real[None, :]
        current = tl.load(at_state, mask=inside & (is_new == 0), other=0.0)
        for i in range(0, accepted):
            at = row * 0 + i  # in 64 bits, interpreted too
            if index is not None:
                at = tl.load(index + row * most + i).to(tl.int64)
            gate_at = old_gate
            if old_gate is not None:
                gate_at = old_gate + at * og_r
            k, v, decay, beta = _row(old_k + at * ok_r, old_v + at * ov_r, gate_at, None, key, keys, column, values, eps, factor,
                                     dt_bias, dt_min, dt_max, DELTA, NORMALISED, SIGMOID, SOFTPLUS)  # fmt: skip
            current, _, _ = _after(current, k, v, decay, beta, False)
        base = current
        for i in range(0, count):
            if i == settled:
                if accepted + settled > 0:
                    tl.store(at_state, current, mask=inside)
                base = current
            if parents is not None:
                parent = tl.load(parents + b * rows + i).to(tl.int64)
                if (
                    parent != i - 1
                ):  # its ancestors from the state on, found upwards: each time, the last that is not in `current`
                    current = base
                    taken = parent * 0 + settled - 1
                    while taken != parent:
                        following = parent
                        up = parent
                        while up != taken:
                            following = up
                            up = tl.load(parents + b * rows + up).to(tl.int64)
                        gate_at = new_gate
                        beta_at = new_beta
                        if new_gate is not None:
                            gate_at = new_gate + following * g_r
                        if new_beta is not None:
                            beta_at = new_beta + following * b_r
                        k, v, decay, beta = _row(new_k + following * k_r, new_v + following * v_r, gate_at, beta_at, key, keys, column,
                                                 values, eps, factor, dt_bias, dt_min, dt_max, DELTA, NORMALISED, SIGMOID, SOFTPLUS)  # fmt: skip
                        current, _, _ = _after(current, k, v, decay, beta, DELTA)
                        taken = following
            gate_at = new_gate
            beta_at = new_beta
            if new_gate is not None:
                gate_at = new_gate + i * g_r
            if new_beta is not None:
                beta_at = new_beta + i * b_r
            k, v, decay, beta = _row(new_k + i * k_r, new_v + i * v_r, gate_at, beta_at, key, keys, column, values, eps, factor,
                                     dt_bias, dt_min, dt_max, DELTA, NORMALISED, SIGMOID, SOFTPLUS)  # fmt: skip
            current, decayed, update = _after(current, k, v, decay, beta, DELTA)
            query = tl.load(q + i * q_r + key, mask=key < keys, other=0.0).to(tl.float32)
            if NORMALISED:
                query = _unit(query, eps)
            if DELTA:  # as on the CPU, which has read the decayed state then
                if i >= settled:
                    tl.store(updates + (i - settled) * heads * values + column, update, mask=real)
                query = query * scale
                y = tl.sum(query[:, None] * decayed, 0) + tl.sum(query * k) * update
            else:
                y = tl.sum(query[:, None] * current, 0)
            if D is not None:
                y += skip * v
            tl.store(to + i * heads * values, y.to(out.dtype.element_ty), mask=real)
        if (settled == count) & (accepted + settled > 0):
            tl.store(at_state, current, mask=inside)


@triton.jit
def _copy(at, to, slot, source, b, row, i, o_b, o_r, o_h, n_b, n_r, n_h, heads, width, BLOCK: tl.constexpr):
    """A row of an input, all heads."""
    for first in range(0, heads * width, BLOCK):
        element = first + tl.arange(0, BLOCK)
        real = element < heads * width
        head, column = (element // width).to(tl.int64), element % width
        x = tl.load(source + b * n_b + i * n_r + head * n_h + column, mask=real)
        tl.store(to + row * o_b + slot * o_r + head * o_h + column, x, mask=real)


@triton.jit(do_not_specialize=["kept", "rows"])
def _store(
    state_lengths, held_stride, lengths, counts, cache_rows, done, rows, kept,
    old0, o0_b, o0_r, o0_h, new0, n0_b, n0_r, n0_h, heads0, width0, old1, o1_b, o1_r, o1_h, new1, n1_b, n1_r, n1_h, heads1, width1,
    old2, o2_b, o2_r, o2_h, new2, n2_b, n2_r, n2_h, heads2, UPDATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One of `kept` rows of each sequence; the first also sets the length. UPDATES: the second input has those rows alone."""
    b, slot = (tl.program_id(0) // kept).to(tl.int64), tl.program_id(0) % kept
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
            _copy(
                new1,
                old1,
                slot,
                new1,
                b,
                row,
                slot if UPDATES else i,
                o1_b,
                o1_r,
                o1_h,
                n1_b,
                n1_r,
                n1_h,
                heads1,
                width1,
                BLOCK,
            )
        if new2 is not None:
            _copy(new2, old2, slot, new2, b, row, i, o2_b, o2_r, o2_h, n2_b, n2_r, n2_h, heads2, 1, BLOCK)
    if (settled >= 0) & (slot == 0):
        length = tl.load(lengths + row).to(tl.int64) + settled
        tl.store(state_lengths + row * held_stride, length.to(state_lengths.dtype.element_ty))


@triton.jit
def _tap(
    x,
    x_b,
    x_r,
    old,
    o_b,
    o_r,
    state,
    s_b,
    s_r,
    index,
    b,
    row,
    most,
    at,
    before,
    is_new,
    channel,
    real,
    WIDTH: tl.constexpr,
):
    """An input: new row `at`, or if that is negative the one before the new rows with number `before`."""
    in_state = (at < 0) & (before < WIDTH - 1)
    in_pending = (at < 0) & (before >= WIDTH - 1)
    source = tl.where(in_pending, before - (WIDTH - 1), 0).to(tl.int64)
    if index is not None:
        source = tl.load(index + row * most + source, mask=in_pending, other=0).to(tl.int64)
    found = tl.load(x + b * x_b + tl.where(at < 0, 0, at) * x_r + channel, mask=real & (at >= 0), other=0.0).to(
        tl.float32
    )
    found += tl.load(old + row * o_b + source * o_r + channel, mask=real & in_pending, other=0.0).to(tl.float32)
    slot = tl.where(in_state, before, 0)
    held = tl.load(state + row * s_b + slot * s_r + channel, mask=real & in_state & (is_new == 0), other=0.0)
    return found + held.to(tl.float32)


@triton.jit(do_not_specialize=["rows", "most", "keep", "size"])
def _conv(
    state, s_b, s_r, state_lengths, held_stride, lengths, counts, cache_rows, index, parents, done, old, o_b, o_r, x, x_b, x_r,
    weight, weight_stride, bias, out, rows, most, keep, size, channels, WIDTH: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(channels, BLOCK)
    b, part = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    row, count, accepted, settled, is_new = _sequence(
        b, rows, most, keep, size, state_lengths, held_stride, lengths, counts, cache_rows, index, parents
    )
    if part == 0:
        tl.store(done + b, tl.where(count > 0, settled, -1))
    b = b.to(tl.int64)
    channel = part * BLOCK + tl.arange(0, BLOCK)
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
                    x,
                    x_b,
                    x_r,
                    old,
                    o_b,
                    o_r,
                    state,
                    s_b,
                    s_r,
                    index,
                    b,
                    row,
                    most,
                    at,
                    before,
                    is_new,
                    channel,
                    real,
                    WIDTH,
                )
                y += tl.load(weight + channel * weight_stride + tap, mask=real, other=0.0).to(tl.float32) * value
            if bias is not None:
                y += tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)
            if SILU:
                y = y * _sigmoid(y)
        tl.store(out + (b * rows + i) * channels + channel, y.to(out.dtype.element_ty), mask=real)
    folded = accepted + settled
    if folded > 0:
        # Ascending, so that no input is overwritten before it has been read.
        for kept in tl.static_range(WIDTH - 1):
            before = folded + kept
            at = before - (WIDTH - 1) - accepted
            value = _tap(
                x,
                x_b,
                x_r,
                old,
                o_b,
                o_r,
                state,
                s_b,
                s_r,
                index,
                b,
                row,
                most,
                at,
                before,
                is_new,
                channel,
                real,
                WIDTH,
            )
            tl.store(state + row * s_b + kept * s_r + channel, value.to(state.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["most", "columns", "layers"])
def _commit(lengths, length_stride, index, index_r, index_c, held, held_l, held_r, counts, source, source_r, source_c, most, columns,
            layers, ADVANCE: tl.constexpr):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + r).to(tl.int64)
    length = tl.load(lengths + r * length_stride).to(tl.int64)
    state = tl.load(held + r * held_r).to(tl.int64)
    fits = (
        (count > 0) & (count <= LONGEST) & (state >= 0) & (state <= LONGEST) & (length >= 0) & (length <= state + most)
    )
    if source is not None:
        fits = fits & (count <= columns)
    fits = fits & (length + count >= state) & (length + count <= state + most)
    count = tl.where(fits, count, 0)
    wrong = 0
    for first in range(0, layers, _CHECKED):
        layer = first + tl.arange(0, _CHECKED)
        other = tl.load(held + layer.to(tl.int64) * held_l + r * held_r, mask=layer < layers, other=state).to(tl.int64)
        wrong += tl.sum((other != state).to(tl.int32))
    ahead = length - state  # negative: so many of the new rows are in the state already
    if source is not None:
        for first in range(0, count, _CHECKED):
            i = first + tl.arange(0, _CHECKED)
            at = tl.load(source + r * source_r + i * source_c, mask=i < count, other=0).to(tl.int64)
            low = tl.where(ahead + i < 0, i, tl.maximum(-ahead, 0))
            high = tl.where(ahead + i < 0, i, most - 1 - ahead)
            wrong += tl.sum(((i < count) & ((at < low) | (at > high))).to(tl.int32))
    count = tl.where(wrong == 0, count, 0)
    for first in range(0, count, _CHECKED):
        i = first + tl.arange(0, _CHECKED)
        stored = (i < count) & (ahead + i >= 0)
        at = i.to(tl.int64)
        if source is not None:
            at = tl.load(source + r * source_r + i * source_c, mask=stored, other=0).to(tl.int64)
        tl.store(index + r * index_r + (ahead + i) * index_c, (ahead + at).to(index.dtype.element_ty), mask=stored)
    if ADVANCE:
        if count > 0:
            tl.store(lengths + r * length_stride, (length + count).to(lengths.dtype.element_ty))


@triton.jit(do_not_specialize=["layers"])
def _trim(lengths, length_stride, new_lengths, held, held_l, held_r, layers):
    r = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + r * length_stride).to(tl.int64)
    wanted = tl.load(new_lengths + r).to(tl.int64)
    wrong = ((wanted < 0) | (wanted > length)).to(tl.int32)
    if wanted != length:
        for first in range(0, layers, _CHECKED):
            layer = first + tl.arange(0, _CHECKED)
            least = tl.load(held + layer.to(tl.int64) * held_l + r * held_r, mask=layer < layers, other=0).to(tl.int64)
            wrong += tl.sum(((layer < layers) & (wanted < least)).to(tl.int32))
    if wrong == 0:
        tl.store(lengths + r * length_stride, wanted.to(lengths.dtype.element_ty))


def _packed(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]


def _view(x: Tensor | None) -> tuple[Any, ...]:
    """A tensor `(batch, rows, heads, ...)` or `(batch, rows, width)` as kernels take it: pointer and strides."""
    return (None, 0, 0, 0) if x is None else (x, *x.stride()[:3])


def _keep_rows(
    step: StepArguments, done: Tensor, rows: int, inputs: list[tuple[Tensor, Tensor] | None], updates: bool = False
) -> None:
    """The second launch. `inputs`: pending and new rows; the first two have a width. `updates`: the second has kept rows alone."""
    kept = max(step.kept(rows), 1)
    arguments: list[Any] = []
    for at, pair in enumerate([*inputs, *[None] * (3 - len(inputs))]):
        if pair is None:
            arguments += [None, 0, 0, 0, None, 0, 0, 0, *([0, 1] if at < 2 else [0])]
            continue
        old, new = pair
        if new.dim() == 3 and at < 2:  # one head
            old, new = old[:, :, None], new[:, :, None]
        arguments += [*_view(old), *_view(new), new.shape[2], *(new.shape[3:] if at < 2 else ())]
    held = step.state_lengths
    _store[(len(done) * kept,)](
        held, held.stride(0), step.lengths, step.counts, step.cache_rows, done, rows, kept, *arguments, UPDATES=updates, BLOCK=COPIED
    )  # fmt: skip


def _dense(step: StepArguments) -> StepArguments:
    """With what kernels read by number contiguous."""
    lengths, counts, cache_rows, index, parents = _packed(*step[1:6])
    assert lengths is not None
    return step._replace(lengths=lengths, counts=counts, cache_rows=cache_rows, pending_index=index, parents=parents)


def _scan_step(
    delta: bool,
    state: Tensor,
    pending: tuple[Tensor | None, ...],
    new: tuple[Tensor | None, ...],
    q: Tensor,
    step: StepArguments,
    heads: tuple[Tensor | None, ...],
    numbers: tuple[float, ...],
    **options: bool,
) -> Tensor:
    """`pending`: k, v or update, and gate. `new`: k, v, gate and beta. `heads`: A, dt_bias and D. `numbers`: scale, eps, dt_min, dt_max."""
    k, v = new[:2]
    assert k is not None and v is not None and pending[0] is not None
    (batch, rows, count, values), (key_heads, keys) = v.shape, k.shape[2:]
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if batch == 0 or rows == 0:
        return out
    step, kept = _dense(step), step.kept(rows)
    done = torch.empty(batch, dtype=torch.int64, device=v.device)
    updates = torch.empty(batch, kept, count, values, device=v.device) if delta else None
    columns = min(COLUMNS, triton.next_power_of_2(values))
    _scan[(batch * count * triton.cdiv(values, columns),)](
        *_view(state), step.state_lengths, step.state_lengths.stride(0), step.lengths, step.counts, step.cache_rows, step.pending_index,
        step.parents, done, *(part for x in (*pending, *new, q) for part in _view(x)), out, updates, *_packed(*heads),
        rows, kept, pending[0].shape[1], -1 if step.keep is None else step.keep, len(state), count, count // key_heads, keys, values, *numbers,
        KEYS=max(triton.next_power_of_2(keys), 2), COLUMNS=columns, DELTA=delta, **options, num_warps=4, **ROUNDED,
    )  # fmt: skip
    kept_rows = (k, v if updates is None else updates, new[2])
    inputs = [None if x is None or old is None else (old, x) for old, x in zip(pending, kept_rows)]
    _keep_rows(step, done, rows, inputs, updates=delta)
    return out


def gated_delta_(given: DeltaArguments) -> Tensor:
    scale = given.k.shape[3] ** -0.5 if given.scale is None else float(given.scale)
    return _scan_step(
        True, given.state, (given.pending_k, given.pending_update, given.pending_g), (given.k, given.v, given.g, given.beta), given.q,
        given.step, (given.A, given.dt_bias, None), (scale, float(given.l2norm_eps or 0.0), 0.0, 0.0),
        NORMALISED=given.l2norm_eps is not None, SIGMOID=given.sigmoid_beta, SOFTPLUS=given.A is not None,
    )  # fmt: skip


def selective_state_(given: SelectiveArguments) -> Tensor:
    most = float("inf") if given.dt_max is None else float(given.dt_max)
    return _scan_step(
        False, given.state, (given.pending_B, given.pending_x, given.pending_dt), (given.B, given.x, given.dt, None), given.C,
        given.step, (given.A, given.dt_bias, given.D), (1.0, 0.0, float(given.dt_min), most),
        NORMALISED=False, SIGMOID=False, SOFTPLUS=given.dt_softplus,
    )  # fmt: skip


def short_conv_(given: ConvArguments) -> Tensor:
    x, weight, state, pending = given.x, given.weight, given.state, given.pending
    batch, rows, channels = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if batch == 0 or rows == 0:
        return out
    step, (bias,) = _dense(given.step), _packed(given.bias)
    done = torch.empty(batch, dtype=torch.int64, device=x.device)
    _conv[(batch * triton.cdiv(channels, CHANNELS),)](
        state, *state.stride()[:2], step.state_lengths, step.state_lengths.stride(0), step.lengths, step.counts, step.cache_rows,
        step.pending_index, step.parents, done, pending, *pending.stride()[:2], x, *x.stride()[:2], weight, weight.stride(0), bias, out,
        rows, pending.shape[1], -1 if step.keep is None else step.keep, len(step.lengths), channels,
        WIDTH=weight.shape[1], SILU=given.activation == "silu", BLOCK=CHANNELS, **ROUNDED,
    )  # fmt: skip
    _keep_rows(step, done, rows, [(pending, x)])
    return out


def _stacked(state_lengths: list[Tensor]) -> Tensor:
    layers = [x if x.dim() == 2 else x[None] for x in state_lengths]
    return layers[0] if len(layers) == 1 else torch.cat([x.to(torch.int64) for x in layers])


def state_commit_(
    lengths: Tensor, pending_index: Tensor, state_lengths: list[Tensor], counts: Tensor, source_index: Tensor | None = None,
    advance: bool = True,
) -> None:  # fmt: skip
    if len(lengths) == 0:
        return
    held = _stacked(state_lengths)
    source = (None, 0, 0) if source_index is None else (source_index, *source_index.stride())
    _commit[(len(lengths),)](
        lengths, lengths.stride(0), pending_index, *pending_index.stride(), held, *held.stride(), counts.contiguous(), *source,
        pending_index.shape[1], 0 if source_index is None else source_index.shape[1], len(held), ADVANCE=advance, num_warps=1,
    )  # fmt: skip


def state_trim_(lengths: Tensor, new_lengths: Tensor, state_lengths: list[Tensor]) -> None:
    if len(lengths) == 0:
        return
    held = _stacked(state_lengths)
    _trim[(len(lengths),)](
        lengths, lengths.stride(0), new_lengths.contiguous(), held, *held.stride(), len(held), num_warps=1
    )
