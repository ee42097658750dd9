"""Steps of layers with a state, in Triton. Convolutions: `_short_conv.py`, edits of lengths: `_state_lengths.py`.

Two launches make a step. In the first, a program, which is a warp, holds some columns of a head's state in registers,
with all keys: it replays the accepted rows, stores the state, and goes on through the new rows without storing it again.
Columns do not depend on each other, and a warp waits for no other one. The second makes the new rows the pending ones,
once no program reads those of before. Every program of the first checks the values of its sequence; what one of them
found is passed on to the second, which must not read lengths that it writes.

A state is a tuple of tiles of some keys each, so that sums over keys are chains of fused multiply-adds, with lanes that
share a column added up at last. What is fused is written here, nothing is contracted by the compiler, and a row is computed
by the same code wherever it is: its bits do not depend on the steps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdkernels._recurrent_state import DeltaArguments, SelectiveArguments, StepArguments
from pdkernels.triton._short_conv import short_conv_
from pdkernels.triton._state_lengths import state_commit_, state_trim_
from pdkernels.triton._state_steps import dense, keep_rows, packed, sequence_of, sigmoid, softplus, view
from pdkernels.triton.blocking import ROUNDED

__all__ = ["gated_delta_", "selective_state_", "short_conv_", "state_commit_", "state_trim_"]


FEW = 1024
"""Programs below which each instruction of a warp waits for the one before, so that more of them with less to do are faster."""


class Tile(NamedTuple):
    """What a program holds of a state, with all keys."""

    columns: int
    lanes: int
    """Lanes of a warp that share a column."""
    registers: int | None
    """The most of a thread; None: as many as the compiler wants."""


def choose_tile(keys: int, values: int, heads: int, aligned: bool = True) -> Tile:
    """For so many heads, those of all sequences together. Where a state is `aligned`, 8 lanes share a column of any tile; where it is not
    they may differ, and so the order of sums over keys: one width serves all batches then.

    At most 64 registers of a thread are state, and 128 in all let an SM hold 16 warps, which fill each other's waits.
    """
    width = triton.next_power_of_2(keys)
    columns = min(16, triton.next_power_of_2(values), max(2048 // width, 1))
    if columns == 16 and aligned and heads * triton.cdiv(values, columns) < FEW:
        columns = 8
    return Tile(columns, min(max(width // 16, 8), 32), 128 if width <= 128 else None)


@triton.jit
def _numbers(at, keys: tl.constexpr, LANES: tl.constexpr):
    """A row's number for each key, in as many tiles as it takes: tile p has keys `p * LANES ..`."""
    tiles = ()
    for p in tl.static_range((keys + LANES - 1) // LANES):
        key = p * LANES + tl.arange(0, LANES)
        if (p + 1) * LANES <= keys:
            x = tl.load(at + key)
        else:
            x = tl.load(at + key, mask=key < keys, other=0.0)
        tiles += (x.to(tl.float32),)  # type: ignore[assignment]
    return tiles


@triton.jit
def _load_state(at, stride, column, is_there, keys: tl.constexpr, values: tl.constexpr, LANES: tl.constexpr,
                COLUMNS: tl.constexpr):  # fmt: skip
    """Tiles as of `_numbers`, of some columns; zeros of a state that is new."""
    tiles = ()
    for p in tl.static_range((keys + LANES - 1) // LANES):
        key = p * LANES + tl.arange(0, LANES)
        mask = (key < keys)[:, None] & (column < values)[None, :] & is_there
        x = tl.load(at + key.to(tl.int64)[:, None] * stride + column[None, :], mask=mask, other=0.0)
        tiles += (x,)  # type: ignore[assignment]
    return tiles


@triton.jit
def _store_state(at, stride, column, tiles, keys: tl.constexpr, values: tl.constexpr, LANES: tl.constexpr):
    for p in tl.static_range((keys + LANES - 1) // LANES):
        key = p * LANES + tl.arange(0, LANES)
        mask = (key < keys)[:, None] & (column < values)[None, :]
        tl.store(at + key.to(tl.int64)[:, None] * stride + column[None, :], tiles[p], mask=mask)


@triton.jit
def _dot(at_a, at_b, keys: tl.constexpr):
    """The sum over keys of products of two rows; each lane of a warp reads keys of its own."""
    a, b = _numbers(at_a, keys, 32), _numbers(at_b, keys, 32)
    total = a[0] * b[0]
    for p in tl.static_range(1, len(a)):
        total = tl.fma(a[p], b[p], total)
    return tl.sum(total)


@triton.jit
def _recall(a, state):
    """The sum over keys of products of a row with each column."""
    total = a[0][:, None] * state[0]
    for p in tl.static_range(1, len(a)):
        total = tl.fma(a[p][:, None], state[p], total)
    return tl.sum(total, 0)


@triton.jit
def _row(at_k, at_gate, keys: tl.constexpr, eps, decay_factor, dt_bias, dt_min, dt_max, LANES: tl.constexpr,
         DELTA: tl.constexpr, NORMALISED: tl.constexpr, SOFTPLUS: tl.constexpr):  # fmt: skip
    """(k, what it is multiplied with, decay) of a row; the pointers are those of its head."""
    k = _numbers(at_k, keys, LANES)
    factor = 1.0
    if DELTA:
        if NORMALISED:
            factor = tl.rsqrt(_dot(at_k, at_k, keys) + eps)
        exponent = tl.load(at_gate).to(tl.float32)
        if SOFTPLUS:
            exponent = decay_factor * softplus(exponent + dt_bias)
    else:
        exponent = decay_factor
        if at_gate is not None:
            dt = tl.load(at_gate).to(tl.float32) + dt_bias
            if SOFTPLUS:
                dt = softplus(dt)
            dt = tl.where(dt < dt_min, dt_min, dt)
            dt = tl.where(dt > dt_max, dt_max, dt)
            exponent = dt * decay_factor
            factor = dt
    return k, factor, tl.exp(exponent)


@triton.jit
def _update(state, k, factor, decay, at_v, at_beta, column, values: tl.constexpr, DELTA: tl.constexpr,
            SIGMOID: tl.constexpr):  # fmt: skip
    """What a new row adds to a state, before the factor of its k."""
    v = tl.load(at_v + column, mask=column < values, other=0.0).to(tl.float32)
    if DELTA:
        beta = tl.load(at_beta).to(tl.float32)
        if SIGMOID:
            beta = sigmoid(beta)
        v = tl.fma(_recall(k, state), -decay * factor, v) * beta
    return v


@triton.jit
def _after(state, k, factor, decay, update):
    """The state after a row."""
    scaled = (factor * update)[None, :]
    tiles = ()
    for p in tl.static_range(len(k)):
        tiles += (tl.fma(k[p][:, None], scaled, state[p] * decay),)
    return tiles


@triton.jit(do_not_specialize=["rows", "pending_rows", "most", "keep", "size"])
def _scan(
    state, state_row, state_head, state_key, state_lengths, sl_stride, lengths, counts, cache_rows, index, parents,
    done, old_k, ok_b, ok_r, ok_h, old_v, ov_b, ov_r, ov_h, old_gate, og_b, og_r, og_h, new_k, k_b, k_r, k_h, new_v,
    v_b, v_r, v_h, new_gate, g_b, g_r, g_h, new_beta, b_b, b_r, b_h, q, q_b, q_r, q_h, out, updates, A, dt_biases, D,
    rows, pending_rows, most, keep, size, heads, group, scale, eps, dt_min, dt_max, keys: tl.constexpr,
    values: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr, DELTA: tl.constexpr, NORMALISED: tl.constexpr,
    SIGMOID: tl.constexpr, SOFTPLUS: tl.constexpr, SETTLES: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (values + COLUMNS - 1) // COLUMNS
    head_block = tl.program_id(0) % (heads * blocks)
    b, h = tl.program_id(0) // (heads * blocks), head_block // blocks
    row, count, accepted, settled, is_new = sequence_of(
        b, rows, most, keep, size, state_lengths, sl_stride, lengths, counts, cache_rows, index, parents
    )
    if head_block == 0:
        tl.store(done + b, tl.where(count > 0, settled, -1))
    b, h = b.to(tl.int64), h.to(tl.int64)
    kh = h // group
    column = head_block % blocks * COLUMNS + tl.arange(0, COLUMNS)
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
            updates += (b * pending_rows * heads + h) * values
        decay_factor, dt_bias, skip = 0.0, 0.0, 0.0
        if A is not None:
            decay_factor = tl.load(A + h).to(tl.float32)
        if dt_biases is not None:
            dt_bias = tl.load(dt_biases + h).to(tl.float32)
        if D is not None:
            skip = tl.load(D + h).to(tl.float32)
        at_state = state + row * state_row + h * state_head
        current = _load_state(at_state, state_key, column, is_new == 0, keys, values, LANES, COLUMNS)
        for i in range(0, accepted):
            at = row * 0 + i  # in 64 bits, interpreted too
            if index is not None:
                at = tl.load(index + row * most + i).to(tl.int64)
            gate_at = old_gate
            if old_gate is not None:
                gate_at = old_gate + at * og_r
            k, factor, decay = _row(
                old_k + at * ok_r, gate_at, keys, eps, decay_factor, dt_bias, dt_min, dt_max, LANES, DELTA, NORMALISED,
                SOFTPLUS,
            )  # fmt: skip
            update = tl.load(old_v + at * ov_r + column, mask=real, other=0.0).to(tl.float32)
            current = _after(current, k, factor, decay, update)
        if (settled == 0) & (accepted > 0):
            _store_state(at_state, state_key, column, current, keys, values, LANES)
            tl.debug_barrier()  # branches of a tree read it again, perhaps by other lanes
        for i in range(0, count):
            if SETTLES and (i == settled) and settled > 0:
                _store_state(at_state, state_key, column, current, keys, values, LANES)
                tl.debug_barrier()
            if parents is not None:
                parent = tl.load(parents + b * rows + i).to(tl.int64)
                # Its ancestors from the state on, found upwards: each time, the last that is not in `current`.
                if parent != i - 1:
                    has_state = (is_new == 0) | (accepted + settled > 0)
                    current = _load_state(at_state, state_key, column, has_state, keys, values, LANES, COLUMNS)
                    ancestor = parent * 0 + settled - 1
                    while ancestor != parent:
                        # Not from `parent` both: Triton would not carry `following`.
                        following, up = ancestor, parent
                        while up != ancestor:
                            following = up
                            up = tl.load(parents + b * rows + up).to(tl.int64)
                        gate_at = new_gate
                        beta_at = new_beta
                        if new_gate is not None:
                            gate_at = new_gate + following * g_r
                        if new_beta is not None:
                            beta_at = new_beta + following * b_r
                        k, factor, decay = _row(
                            new_k + following * k_r, gate_at, keys, eps, decay_factor, dt_bias, dt_min, dt_max, LANES,
                            DELTA, NORMALISED, SOFTPLUS,
                        )  # fmt: skip
                        update = _update(
                            current, k, factor, decay, new_v + following * v_r, beta_at, column, values, DELTA, SIGMOID
                        )
                        current = _after(current, k, factor, decay, update)
                        ancestor = following
            gate_at = new_gate
            beta_at = new_beta
            if new_gate is not None:
                gate_at = new_gate + i * g_r
            if new_beta is not None:
                beta_at = new_beta + i * b_r
            k, factor, decay = _row(
                new_k + i * k_r, gate_at, keys, eps, decay_factor, dt_bias, dt_min, dt_max, LANES, DELTA, NORMALISED,
                SOFTPLUS,
            )  # fmt: skip
            query = _numbers(q + i * q_r, keys, LANES)
            update = _update(current, k, factor, decay, new_v + i * v_r, beta_at, column, values, DELTA, SIGMOID)
            if DELTA:  # of the state before the row, as on the CPU
                if not SETTLES or i >= settled:
                    tl.store(updates + (i - settled) * heads * values + column, update, mask=real)
                of_query = scale
                if NORMALISED:
                    of_query = tl.rsqrt(_dot(q + i * q_r, q + i * q_r, keys) + eps) * scale
                of_update = _dot(q + i * q_r, new_k + i * k_r, keys) * factor * of_query
                y = tl.fma(_recall(query, current), decay * of_query, of_update * update)
                current = _after(current, k, factor, decay, update)
            else:
                current = _after(current, k, factor, decay, update)
                y = _recall(query, current)
            if D is not None:
                y += skip * update
            tl.store(to + i * heads * values, y.to(out.dtype.element_ty), mask=real)
        if SETTLES and settled == count:
            _store_state(at_state, state_key, column, current, keys, values, LANES)


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
    """`pending`: k, v or update, and gate. `new`: k, v, gate and beta. `heads`: A, dt_bias, D. `numbers`: scale, eps,
    dt_min, dt_max."""
    k, v = new[:2]
    assert k is not None and v is not None and pending[0] is not None
    (batch, rows, count, values), (key_heads, keys) = v.shape, k.shape[2:]
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if batch == 0 or rows == 0:
        return out
    step, pending_rows = dense(step), step.kept(rows)
    done = torch.empty(batch, dtype=torch.int64, device=v.device)
    updates = torch.empty(batch, pending_rows, count, values, dtype=torch.float32, device=v.device) if delta else None
    aligned = all(size % 16 == 0 for size in (state.data_ptr(), *state.stride()[:3], values))
    tile = choose_tile(keys, values, batch * count, aligned)
    _scan[(batch * count * triton.cdiv(values, tile.columns),)](
        *view(state), step.state_lengths, step.state_lengths.stride(0), step.lengths, step.counts, step.cache_rows,
        step.pending_index, step.parents, done, *(argument for x in (*pending, *new, q) for argument in view(x)), out,
        updates, *packed(*heads), rows, pending_rows, pending[0].shape[1], -1 if step.keep is None else step.keep,
        len(state), count, count // key_heads, *numbers, keys=keys, values=values, LANES=tile.lanes,
        COLUMNS=tile.columns, DELTA=delta, SETTLES=step.keep is not None, **options, num_warps=1, maxnreg=tile.registers,
        **ROUNDED,
    )  # fmt: skip
    kept_rows = (k, v if updates is None else updates, new[2])
    inputs = [None if x is None or old is None else (old, x) for old, x in zip(pending, kept_rows)]
    keep_rows(step, done, rows, inputs, updates=delta)
    return out


def gated_delta_(args: DeltaArguments) -> Tensor:
    scale = args.k.shape[3] ** -0.5 if args.scale is None else float(args.scale)
    return _scan_step(
        True, args.state, (args.pending_k, args.pending_update, args.pending_g), (args.k, args.v, args.g, args.beta),
        args.q, args.step, (args.A, args.dt_bias, None), (scale, float(args.l2norm_eps or 0.0), 0.0, 0.0),
        NORMALISED=args.l2norm_eps is not None, SIGMOID=args.sigmoid_beta, SOFTPLUS=args.A is not None,
    )  # fmt: skip


def selective_state_(args: SelectiveArguments) -> Tensor:
    most = float("inf") if args.dt_max is None else float(args.dt_max)
    return _scan_step(
        False, args.state, (args.pending_B, args.pending_x, args.pending_dt), (args.B, args.x, args.dt, None), args.C,
        args.step, (args.A, args.dt_bias, args.D), (1.0, 0.0, float(args.dt_min), most),
        NORMALISED=False, SIGMOID=False, SOFTPLUS=args.dt_softplus,
    )  # fmt: skip
