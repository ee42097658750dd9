"""Steps of layers with a state, in Triton. Convolutions: `_short_conv.py`, edits of lengths: `_state_lengths.py`.

Two launches make a step. In the first, a program holds a tile of a head's state in registers, some columns with all
keys: it replays the accepted rows, stores the state, and goes on through the new rows without storing it again. Columns
do not depend on each other. The second makes the new rows the pending ones, once no program reads those of before.
Every program of the first checks the values of its sequence; what one of them found is passed on to the second, which
must not read lengths that it writes.

No product is contracted with a sum, and a row is computed by the same code wherever it is: its bits do not depend on
the steps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdkernels._recurrent_state import DeltaArguments, SelectiveArguments, StepArguments
from pdkernels.triton._short_conv import short_conv_
from pdkernels.triton._state_lengths import state_commit_, state_trim_
from pdkernels.triton._state_steps import dense, keep_rows, packed, sequence_of, sigmoid, view
from pdkernels.triton.blocking import ROUNDED

__all__ = ["gated_delta_", "selective_state_", "short_conv_", "state_commit_", "state_trim_"]

COLUMNS = 32
"""The most columns of a tile of a state."""


@triton.jit
def _softplus(x):
    """Softplus as on the CPU: the logarithm is an odd series of t / (2 + t)."""
    t = tl.exp(-tl.abs(x))
    z = t / (2.0 + t)
    w = z * z
    p = 1.0 / 17
    for half in tl.static_range(8):
        p = p * w + 1.0 / (15 - 2 * half)
    soft = tl.maximum(x, 0.0) + (z + z) * p
    return tl.where((x > 20.0) | (x != x), x, soft)


@triton.jit
def _unit(x, eps):
    return x * (1.0 / tl.sqrt_rn(tl.sum(x * x) + eps))


@triton.jit
def _row(at_k, at_v, at_gate, at_beta, key, keys, column, values, eps, decay_factor, dt_bias, dt_min, dt_max,
         DELTA: tl.constexpr, NORMALISED: tl.constexpr, SIGMOID: tl.constexpr, SOFTPLUS: tl.constexpr):  # fmt: skip
    """(k, v, decay, beta) of a row; the pointers are those of its head. A row with a known update (its v) has no
    beta."""
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
                beta = sigmoid(beta)
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


@triton.jit(do_not_specialize=["rows", "pending_rows", "most", "keep", "size"])
def _scan(
    state, state_row, state_head, state_key, state_lengths, sl_stride, lengths, counts, cache_rows, index, parents,
    done, old_k, ok_b, ok_r, ok_h, old_v, ov_b, ov_r, ov_h, old_gate, og_b, og_r, og_h, new_k, k_b, k_r, k_h, new_v,
    v_b, v_r, v_h, new_gate, g_b, g_r, g_h, new_beta, b_b, b_r, b_h, q, q_b, q_r, q_h, out, updates, A, dt_biases, D,
    rows, pending_rows, most, keep, size, heads, group, keys, values, scale, eps, dt_min, dt_max, KEYS: tl.constexpr,
    COLUMNS: tl.constexpr, DELTA: tl.constexpr, NORMALISED: tl.constexpr, SIGMOID: tl.constexpr,
    SOFTPLUS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(values, COLUMNS)
    head_block = tl.program_id(0) % (heads * blocks)
    b, h = tl.program_id(0) // (heads * blocks), head_block // blocks
    row, count, accepted, settled, is_new = sequence_of(
        b, rows, most, keep, size, state_lengths, sl_stride, lengths, counts, cache_rows, index, parents
    )
    if head_block == 0:
        tl.store(done + b, tl.where(count > 0, settled, -1))
    b, h = b.to(tl.int64), h.to(tl.int64)
    kh = h // group
    key, column = tl.arange(0, KEYS), head_block % blocks * COLUMNS + tl.arange(0, COLUMNS)
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
        factor, dt_bias, skip = 0.0, 0.0, 0.0
        if A is not None:
            factor = tl.load(A + h).to(tl.float32)
        if dt_biases is not None:
            dt_bias = tl.load(dt_biases + h).to(tl.float32)
        if D is not None:
            skip = tl.load(D + h).to(tl.float32)
        at_state = state + row * state_row + h * state_head + key.to(tl.int64)[:, None] * state_key + column[None, :]
        mask = (key < keys)[:, None] & real[None, :]
        current = tl.load(at_state, mask=mask & (is_new == 0), other=0.0)
        for i in range(0, accepted):
            at = row * 0 + i  # in 64 bits, interpreted too
            if index is not None:
                at = tl.load(index + row * most + i).to(tl.int64)
            gate_at = old_gate
            if old_gate is not None:
                gate_at = old_gate + at * og_r
            k, v, decay, beta = _row(
                old_k + at * ok_r, old_v + at * ov_r, gate_at, None, key, keys, column, values, eps, factor, dt_bias,
                dt_min, dt_max, DELTA, NORMALISED, SIGMOID, SOFTPLUS,
            )  # fmt: skip
            current, _, _ = _after(current, k, v, decay, beta, False)
        if parents is not None:
            base = tl.zeros_like(current)  # set before it is read; as `current`, Triton would not carry it
        for i in range(0, count):
            if i == settled:
                if accepted + settled > 0:
                    tl.store(at_state, current, mask=mask)
                if parents is not None:
                    base = current
            if parents is not None:
                parent = tl.load(parents + b * rows + i).to(tl.int64)
                # Its ancestors from the state on, found upwards: each time, the last that is not in `current`.
                if parent != i - 1:
                    current = base
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
                        k, v, decay, beta = _row(
                            new_k + following * k_r, new_v + following * v_r, gate_at, beta_at, key, keys, column,
                            values, eps, factor, dt_bias, dt_min, dt_max, DELTA, NORMALISED, SIGMOID, SOFTPLUS,
                        )  # fmt: skip
                        current, _, _ = _after(current, k, v, decay, beta, DELTA)
                        ancestor = following
            gate_at = new_gate
            beta_at = new_beta
            if new_gate is not None:
                gate_at = new_gate + i * g_r
            if new_beta is not None:
                beta_at = new_beta + i * b_r
            k, v, decay, beta = _row(
                new_k + i * k_r, new_v + i * v_r, gate_at, beta_at, key, keys, column, values, eps, factor, dt_bias,
                dt_min, dt_max, DELTA, NORMALISED, SIGMOID, SOFTPLUS,
            )  # fmt: skip
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
            tl.store(at_state, current, mask=mask)


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
    updates = torch.empty(batch, pending_rows, count, values, device=v.device) if delta else None
    columns = min(COLUMNS, triton.next_power_of_2(values))
    _scan[(batch * count * triton.cdiv(values, columns),)](
        *view(state), step.state_lengths, step.state_lengths.stride(0), step.lengths, step.counts, step.cache_rows,
        step.pending_index, step.parents, done, *(argument for x in (*pending, *new, q) for argument in view(x)), out,
        updates, *packed(*heads), rows, pending_rows, pending[0].shape[1], -1 if step.keep is None else step.keep,
        len(state), count, count // key_heads, keys, values, *numbers, KEYS=max(triton.next_power_of_2(keys), 2),
        COLUMNS=columns, DELTA=delta, **options, num_warps=4, **ROUNDED,
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
