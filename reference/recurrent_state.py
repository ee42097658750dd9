"""Layers whose memory is a state: gated delta rule, Mamba 2, lightning attention, short convolution; row by row, in plain PyTorch.

A row of a cache is a sequence. What a layer remembers of it is its *state* after `state_lengths` positions, and what the rows after
these add to it, the *pending* rows: those of the last draft. A commit only says how many of them were accepted, by the length
of the sequence, and which, by `pending_index`. The next step replays them:

    state_lengths[r] <= lengths[r]      the accepted rows are pending rows pending_index[r, :lengths[r] - state_lengths[r]]

Arguments and results are those of `pdkernels.gated_delta_`, `selective_state_`, `short_conv_`, `state_commit_` and `state_trim_`.
Arithmetic is that of the state's dtype, in which float64 is allowed; a convolution's is float32, or float64 for such inputs.

Source: `torch_recurrent_gated_delta_rule`, `mamba2_selective_state_update`, `causal_conv1d_update` and `MiniMaxLightningAttention`
of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

LONGEST = 2**31 - 1
"""The most positions of a sequence."""

Rows = Sequence[Tensor | None]
"""An input of one sequence: a tensor for each row, or None."""


def _fail(op: str, argument: str, expectation: str, actual: int, sequence: int) -> None:
    raise ValueError(f"pdkernels.{op}: {argument} must {expectation}, got {actual} for sequence {sequence}.")


class _Step(NamedTuple):
    """What a call does to one sequence."""

    sequence: int
    row: int
    """Of the cache."""
    accepted: list[int]
    """The pending rows that become part of the state."""
    is_new: bool
    """Nothing is in the state yet: it counts as zero, whatever the memory holds."""
    rows: int
    """How many are new."""
    settled: int
    """How many of them become part of the state at once."""
    parents: list[int]
    """The new row before each new row; -1: the last committed one."""


def _steps(
    op: str,
    batch: int,
    rows: int,
    max_pending: int,
    state_lengths: Tensor,
    lengths: Tensor,
    counts: Tensor | None,
    cache_rows: Tensor | None,
    pending_index: Tensor | None,
    parents: Tensor | None,
    keep: int | None,
) -> list[_Step]:
    """The sequences that have new rows. Everything is checked before the first of them is computed."""
    found, seen = [], set()
    for b in range(batch):
        row = b if cache_rows is None else int(cache_rows[b])
        if not 0 <= row < lengths.shape[0]:
            _fail(op, "cache_rows", f"be in [0, {lengths.shape[0] - 1}]", row, b)
        if row in seen:
            _fail(op, "cache_rows", "be different for each sequence", row, b)
        seen.add(row)
        count = rows if counts is None else int(counts[b])
        if not 0 <= count <= rows:
            _fail(op, "counts", f"be in [0, {rows}]", count, b)
        if keep is None and count > max_pending:
            _fail(op, "counts", f"be at most max_pending ({max_pending}), or keep be given", count, b)
        if count == 0:
            continue
        length, held = int(lengths[row]), int(state_lengths[row])
        if not 0 <= held <= LONGEST:
            _fail(op, "state_lengths", f"be in [0, {LONGEST}]", held, b)
        if not held <= length <= held + max_pending:
            _fail(op, "lengths", f"be in [{held}, {held + max_pending}], up to max_pending more than state_lengths", length, b)  # fmt: skip
        if length + count > LONGEST:
            _fail(op, "lengths + counts", f"be at most {LONGEST}", length + count, b)
        accepted = list(range(length - held))
        if pending_index is not None:
            accepted = pending_index[row, : length - held].tolist()
        for at in accepted:
            if not 0 <= at < max_pending:
                _fail(op, "pending_index", f"be in [0, {max_pending - 1}]", at, b)
        settled = 0 if keep is None else max(count - keep, 0)
        before = list(range(-1, count - 1)) if parents is None else parents[b, :count].tolist()
        for i, parent in enumerate(before):  # settled rows are a path, and the others follow it
            least = min(i, settled) - 1
            if not least <= parent < i:
                _fail(op, "parents", f"be in [{least}, {i - 1}] for row {i}", parent, b)
        found.append(_Step(b, row, accepted, held == 0, count, settled, before))
    return found


def _run(
    step: _Step,
    state: Tensor,
    old: Sequence[Rows],
    new: Sequence[Rows],
    replay: Callable[..., Tensor],
    cell: Callable[..., tuple[Tensor, Any]],
) -> tuple[Tensor, list[Any]]:
    """The state once the accepted rows and those that are settled are in it, and the outputs of the new rows.

    `replay`: the next state, of a state and what is kept of a row; `old`: that of the pending rows.
    `cell`: the next state and an output, of a state and the inputs of a row; `new`: those of the new rows.
    """
    for at in step.accepted:
        state = replay(state, *(rows[at] for rows in old))
    after: list[Tensor] = []
    outputs = []
    for i, parent in enumerate(step.parents):
        following, out = cell(state if parent < 0 else after[parent], *(rows[i] for rows in new))
        after.append(following)
        outputs.append(out)
    return (after[step.settled - 1] if step.settled else state), outputs


def _store(
    steps: list[_Step],
    state_lengths: Tensor,
    lengths: Tensor,
    pending: Sequence[Tensor | None],
    new: Sequence[Tensor | None],
) -> None:
    """The new rows that are not settled become the pending ones."""
    for step in steps:
        kept = step.rows - step.settled
        for to, rows in zip(pending, new, strict=True):
            if to is not None and rows is not None:
                to[step.row, :kept] = rows[step.sequence, step.settled : step.rows]
        state_lengths[step.row] = lengths[step.row] + step.settled


def _unit(x: Tensor, eps: float) -> Tensor:
    """`l2norm` of transformers."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def gated_delta_(
    state: Tensor,
    state_lengths: Tensor,
    pending_k: Tensor,
    pending_update: Tensor,
    pending_g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    lengths: Tensor,
    counts: Tensor | None = None,
    cache_rows: Tensor | None = None,
    pending_index: Tensor | None = None,
    parents: Tensor | None = None,
    keep: int | None = None,
    scale: float | None = None,
    l2norm_eps: float | None = None,
    A: Tensor | None = None,
    dt_bias: Tensor | None = None,
    sigmoid_beta: bool = False,
) -> Tensor:
    """``S = exp(g) S + k (beta (v - (exp(g) S)^T k))^T``, and ``out = S^T (scale q)``.

    With `l2norm_eps` q and k are normalised first; with `A` the decay is ``A softplus(g + dt_bias)`` in place of g; with
    `sigmoid_beta` beta is a sigmoid's argument. Of a pending row ``beta (v - ..)``, its *update*, is kept.
    """
    (batch, rows, k_heads, keys), heads = k.shape, v.shape[2]
    steps = _steps("gated_delta_", batch, rows, pending_k.shape[1], state_lengths, lengths,
                   counts, cache_rows, pending_index, parents, keep)  # fmt: skip
    exact = state.dtype
    scale = keys**-0.5 if scale is None else scale

    def prepared(x: Tensor) -> Tensor:
        x = x.to(exact) if l2norm_eps is None else _unit(x.to(exact), l2norm_eps)
        return x.repeat_interleave(heads // k_heads, dim=0)

    def decayed(state: Tensor, g: Tensor) -> Tensor:
        g = g.to(exact)
        if A is not None:
            g = A.to(exact) * softplus(g if dt_bias is None else g + dt_bias.to(exact))
        return state * g.exp()[:, None, None]

    def replay(state: Tensor, k: Tensor, update: Tensor, g: Tensor) -> Tensor:
        return decayed(state, g) + prepared(k)[..., None] * update[:, None]

    def cell(state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, q: Tensor) -> tuple[Tensor, Any]:
        k, v, beta = prepared(k), v.to(exact), beta.to(exact)
        state = decayed(state, g)
        update = (v - (state * k[..., None]).sum(-2)) * (beta.sigmoid() if sigmoid_beta else beta)[:, None]
        q = prepared(q) * scale
        # Of the new state, in two parts, as a kernel that has read the old state once can compute it.
        out = (state * q[..., None]).sum(-2) + (q * k).sum(-1, keepdim=True) * update
        return state + k[..., None] * update[:, None], (out, update)

    out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    updates = torch.zeros(v.shape, dtype=exact, device=v.device)
    for step in steps:
        start = torch.zeros_like(state[step.row]) if step.is_new else state[step.row].clone()
        old = [list(x[step.row]) for x in (pending_k, pending_update, pending_g)]
        new = [list(x[step.sequence]) for x in (k, v, g, beta, q)]
        final, outputs = _run(step, start, old, new, replay, cell)
        if step.accepted or step.settled:
            state[step.row] = final
        for to, found in zip((out, updates), zip(*outputs)):
            to[step.sequence, : step.rows] = torch.stack(found).to(to.dtype)
    _store(steps, state_lengths, lengths, (pending_k, pending_update, pending_g), (k, updates, g))
    return out


def selective_state_(
    state: Tensor,
    state_lengths: Tensor,
    pending_x: Tensor,
    pending_B: Tensor,
    pending_dt: Tensor | None,
    x: Tensor,
    B: Tensor,
    C: Tensor,
    dt: Tensor | None,
    A: Tensor,
    lengths: Tensor,
    counts: Tensor | None = None,
    cache_rows: Tensor | None = None,
    pending_index: Tensor | None = None,
    parents: Tensor | None = None,
    keep: int | None = None,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_min: float = 0.0,
    dt_max: float | None = None,
) -> Tensor:
    """``S = exp(dt A) S + (dt B) x^T``, and ``out = S^T C + D x``; without `dt` it is 1: lightning attention.

    With `dt_bias` and `dt_softplus` dt is ``softplus(dt + dt_bias)``, and then lies between `dt_min` and `dt_max`.
    """
    (batch, rows, heads, _), groups = x.shape, B.shape[2]
    steps = _steps("selective_state_", batch, rows, pending_x.shape[1], state_lengths, lengths,
                   counts, cache_rows, pending_index, parents, keep)  # fmt: skip
    exact = state.dtype

    def cell(state: Tensor, x: Tensor, B: Tensor, dt: Tensor | None, C: Tensor | None = None) -> tuple[Tensor, Any]:
        x, B = x.to(exact), B.to(exact).repeat_interleave(heads // groups, dim=0)
        decay = A.to(exact)
        if dt is not None:
            dt = dt.to(exact) if dt_bias is None else dt.to(exact) + dt_bias.to(exact)
            dt = (softplus(dt) if dt_softplus else dt).clamp(dt_min, dt_max)
            decay, B = dt * decay, dt[:, None] * B
        state = state * decay.exp()[:, None, None] + B[..., None] * x[:, None]
        if C is None:
            return state, None
        y = (state * C.to(exact).repeat_interleave(heads // groups, dim=0)[..., None]).sum(-2)
        return state, y if D is None else y + D.to(exact)[:, None] * x

    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    for step in steps:
        start = torch.zeros_like(state[step.row]) if step.is_new else state[step.row].clone()
        old, new = (
            [[None] * length if given is None else list(given[at]) for given in inputs]
            for inputs, at, length in (
                ((pending_x, pending_B, pending_dt), step.row, pending_x.shape[1]),
                ((x, B, dt, C), step.sequence, rows),
            )
        )
        final, outputs = _run(step, start, old, new, lambda *row: cell(*row)[0], cell)
        if step.accepted or step.settled:
            state[step.row] = final
        out[step.sequence, : step.rows] = torch.stack(outputs).to(out.dtype)
    _store(steps, state_lengths, lengths, (pending_x, pending_B, pending_dt), (x, B, dt))
    return out


def short_conv_(
    state: Tensor,
    state_lengths: Tensor,
    pending: Tensor,
    x: Tensor,
    weight: Tensor,
    lengths: Tensor,
    counts: Tensor | None = None,
    cache_rows: Tensor | None = None,
    pending_index: Tensor | None = None,
    parents: Tensor | None = None,
    keep: int | None = None,
    bias: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    """A causal convolution of each channel: ``out[t] = activation(bias + sum_j weight[:, j] x[t - width + 1 + j])``.

    The state is the last ``width - 1`` inputs.
    """
    batch, rows, channels = x.shape
    steps = _steps("short_conv_", batch, rows, pending.shape[1], state_lengths, lengths,
                   counts, cache_rows, pending_index, parents, keep)  # fmt: skip
    exact = torch.float64 if x.dtype == torch.float64 else torch.float32

    def cell(window: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        window = torch.cat([window, x[None]])
        y = (window.to(exact) * weight.T.to(exact)).sum(0)
        y = y if bias is None else y + bias.to(exact)
        return window[1:], silu(y) if activation == "silu" else y

    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    for step in steps:
        start = torch.zeros_like(state[step.row]) if step.is_new else state[step.row].clone()
        rows_of = [list(pending[step.row])], [list(x[step.sequence])]
        final, outputs = _run(step, start, *rows_of, lambda *row: cell(*row)[0], cell)
        if step.accepted or step.settled:
            state[step.row] = final
        out[step.sequence, : step.rows] = torch.stack(outputs).to(out.dtype)
    _store(steps, state_lengths, lengths, [pending], [x])
    return out


def _layers(state_lengths: Tensor | Sequence[Tensor]) -> Tensor:
    """`(layers, cache rows)`."""
    given = [state_lengths] if isinstance(state_lengths, Tensor) else state_lengths
    return torch.cat([x if x.dim() == 2 else x[None] for x in given])


def state_commit_(
    lengths: Tensor,
    pending_index: Tensor,
    state_lengths: Tensor | Sequence[Tensor],
    counts: Tensor,
    source_index: Tensor | None = None,
    advance: bool = True,
) -> None:
    """Accepts rows of a draft: row ``source_index[r, i]`` after the committed ones becomes the i-th of them."""
    layers, max_pending = _layers(state_lengths), pending_index.shape[1]
    found = []
    for r, count in enumerate(counts.tolist()):
        most = LONGEST if source_index is None else source_index.shape[1]
        if not 0 <= count <= most:
            _fail("state_commit_", "counts", f"be in [0, {most}]", count, r)
        if count == 0:
            continue
        length, held = int(lengths[r]), int(layers[0, r])
        if not (layers[:, r] == held).all():
            _fail("state_commit_", "state_lengths", "be the same for all layers", int(layers[:, r].max()), r)
        if not 0 <= held <= LONGEST:
            _fail("state_commit_", "state_lengths", f"be in [0, {LONGEST}]", held, r)
        if not 0 <= length <= held + max_pending:
            _fail("state_commit_", "lengths", f"be in [0, {held + max_pending}]", length, r)
        if not held <= length + count <= held + max_pending:
            _fail("state_commit_", "lengths + counts", f"be in [{held}, {held + max_pending}]", length + count, r)
        ahead = (
            length - held
        )  # pending rows accepted before; negative: so many of the new rows are in the state already
        for i in range(count):
            source = i if source_index is None else int(source_index[r, i])
            low, high = (i, i) if ahead + i < 0 else (max(0, -ahead), max_pending - 1 - ahead)
            if not low <= source <= high:
                _fail("state_commit_", "source_index", f"be in [{low}, {high}] for row {i}", source, r)
            if ahead + i >= 0:
                found.append((r, ahead + i, ahead + source))
    for r, target, at in found:
        pending_index[r, target] = at
    if advance:
        lengths += counts.to(lengths.dtype)


def state_trim_(lengths: Tensor, new_lengths: Tensor, state_lengths: Tensor | Sequence[Tensor]) -> None:
    """``lengths[r] = new_lengths[r]``, which must not be less than what is in the state of any layer."""
    layers = _layers(state_lengths)
    for r, (length, wanted) in enumerate(zip(lengths.tolist(), new_lengths.tolist())):
        least = 0 if length == wanted else int(layers[:, r].max())
        if not least <= wanted <= length:
            _fail("state_trim_", "new_lengths", f"be in [{least}, {length}]", wanted, r)
    lengths.copy_(new_lengths.to(torch.int64))
