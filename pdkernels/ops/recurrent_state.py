"""Layers whose memory is a state: gated delta rule, Mamba 2, lightning attention and short convolutions, with drafts.

Keys and values of rejected rows are forgotten by shortening a length. A state can't be: it has to be that from before
the draft. So a step writes no state of new rows. It keeps what they add to it, which is small, as the *pending* rows of
the layer, and the next step replays those that were accepted into the state, which it writes once. What a row adds are
some of its inputs, and for the gated delta rule, where that takes a product with the state, the update that came of it.

A row of a cache is a sequence. Of it there are, for each layer, the state, how many positions are in it
(``state_lengths``), and the ``max_pending`` rows after these; for all layers together, ``lengths``, the committed
positions, which keys and values share, and ``pending_index``, which says which of the pending rows they are::

    position     0 .. state_lengths - 1    state_lengths .. lengths - 1                after lengths
                 in the state              accepted: pending rows pending_index[:n]    new rows, pending afterwards

A row whose ``state_lengths`` is 0 starts from a state of zeros, whatever its memory holds: to reuse it, set both
lengths to 0. A step that is repeated without a commit in between replays nothing, and forgets the draft before. A
sequence without new rows is left as it is.

The order of operations is fixed, row by row, in float32: a row has the same bits however rows are split into steps, in
any batch, on any number of threads. So verifying a draft computes exactly what decoding it row by row would.

On the CPU bad values raise and nothing is written. On CUDA such a sequence is left as it was, and its output is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from pdkernels._recurrent_state import ConvArguments, DeltaArguments, SelectiveArguments, StepArguments
from pdkernels._validation import (
    check_choice,
    check_device,
    check_fits_float,
    check_floats,
    check_index,
    check_indices,
    check_int,
    check_last_contiguous,
    check_number,
    check_type,
    fail,
    refuse,
)
from pdkernels.backends import Backend
from pdkernels.ops.library import Draw, call, define, schema_of
from pdkernels.reference import recurrent_state as reference

__all__ = ["gated_delta_", "selective_state_", "short_conv_", "state_commit_", "state_trim_"]

ACTIVATIONS = ("none", "silu")
UPDATES = "pending_update"
"""What is kept of a row of the gated delta rule in place of an input, in the state's dtype."""


def _check_step(op: str, new: dict[str, Tensor], pending: dict[str, Tensor], step: StepArguments) -> None:
    """What all steps share. `new`: inputs whose own shapes were checked; `pending`: where those of their rows are kept,
    in the same order."""
    state_lengths, lengths, counts, cache_rows, pending_index, parents, keep = step
    first = next(iter(new.values()))
    (batch, rows), device = first.shape[:2], first.device
    check_index(op, "lengths", lengths, (None,), device)
    size = lengths.shape[0]
    if cache_rows is None and size != batch:
        fail(op, "lengths", f"have shape ({batch},) like the batch, or cache_rows be given", tuple(lengths.shape))
    check_index(op, "state_lengths", state_lengths, (size,), device)
    check_indices(op, (batch,), device, counts=counts, cache_rows=cache_rows)
    most: int | None = None
    for (name, tensor), (like, given) in zip(pending.items(), new.items(), strict=True):
        if name == UPDATES:
            check_floats(op, name, tensor)
        else:
            check_floats(op, name, tensor, like=given)
        if tensor.dim() != given.dim() or tensor.shape[0] != size or tensor.shape[2:] != given.shape[2:]:
            tail = "".join(f", {int(n)}" for n in given.shape[2:])
            fail(op, name, f"have shape ({size}, max_pending{tail}) like lengths and {like}", tuple(tensor.shape))
        most = tensor.shape[1] if most is None else most
        if tensor.shape[1] != most:
            fail(op, name, f"have {most} rows like the other pending inputs", tensor.shape[1])
    assert most is not None
    check_indices(op, (size, most), device, pending_index=pending_index)
    check_indices(op, (batch, rows), device, parents=parents)
    if keep is not None:
        check_int(op, "keep", keep, 0)
        if keep > most:
            fail(op, "keep", f"be at most max_pending ({most})", keep)
    elif counts is None and rows > most:
        remedy = "Keep more pending rows, or pass keep, which says how many of the last rows stay pending."
        fail(op, next(iter(new)), f"have at most max_pending ({most}) rows", rows, remedy)


def _check_exact(op: str, name: str, tensor: Tensor, values: Tensor) -> None:
    """The dtype of states: that of a float64 reference is float64."""
    check_type(isinstance(tensor, Tensor), op, name, "be a tensor", type(tensor).__name__)
    wanted = torch.float64 if values.dtype == torch.float64 else torch.float32
    check_type(tensor.dtype == wanted, op, name, f"be {wanted}", tensor.dtype, "Convert it with .to().")


def _check_state(
    op: str, state: Tensor, size: int, heads: int, keys: int, values: Tensor, k: str, key_heads: int
) -> None:
    _check_exact(op, "state", state, values)
    check_device(op, "state", state, values.device)
    expected = (size, heads, keys, values.shape[3])
    if tuple(state.shape) != expected:
        fail(op, "state", f"have shape {tuple(map(int, expected))}", tuple(state.shape))
    if min(state.shape[1:]) < 1:
        fail(op, "state", "have at least one head, key and value", tuple(state.shape))
    if key_heads < 1 or heads % key_heads:
        fail(op, k, f"have heads that divide the {int(heads)} heads of the state", key_heads)
    check_last_contiguous(op, "Allocate it so.", state=state)


def _check_heads(op: str, heads: int, device: torch.device, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None:
            check_floats(op, name, tensor, (heads,))
            check_device(op, name, tensor, device)


def _check_rows(op: str, **tensors: Tensor) -> None:
    check_last_contiguous(op, "Call .contiguous() on it.", **tensors)


def fake_delta(given: DeltaArguments) -> Tensor:
    op, q, k, v, g, beta = "gated_delta_", given.q, given.k, given.v, given.g, given.beta
    check_floats(op, "v", v, (None, None, None, None))
    batch, rows, heads = v.shape[:3]
    check_floats(op, "k", k, (batch, rows, None, None), like=v)
    check_floats(op, "q", q, k.shape, like=v)
    for name, tensor in (("g", g), ("beta", beta)):
        check_floats(op, name, tensor, (batch, rows, heads))
        check_device(op, name, tensor, v.device)
    pending = {UPDATES: given.pending_update, "pending_k": given.pending_k, "pending_g": given.pending_g}
    _check_exact(op, UPDATES, given.pending_update, v)
    _check_step(op, {"v": v, "k": k, "g": g}, pending, given.step)
    _check_state(op, given.state, given.lengths.shape[0], heads, k.shape[3], v, "k", k.shape[2])
    _check_rows(op, q=q, k=k, v=v)
    check_last_contiguous(op, "Allocate it so.", pending_k=given.pending_k, pending_update=given.pending_update)
    _check_heads(op, heads, v.device, A=given.A, dt_bias=given.dt_bias)
    lonely = given.A is None and given.dt_bias is not None
    refuse(lonely, op, "dt_bias belongs to a decay that A makes", "Pass A too.")
    if given.scale is not None:
        check_number(op, "scale", given.scale)
    if given.l2norm_eps is not None:
        check_number(op, "l2norm_eps", given.l2norm_eps, 0.0, expectation="be 0 or more")
    return v.new_empty(v.shape)


def fake_selective(given: SelectiveArguments) -> Tensor:
    op, x, B, C, dt, pending_dt = "selective_state_", given.x, given.B, given.C, given.dt, given.pending_dt
    check_floats(op, "x", x, (None, None, None, None))
    batch, rows, heads = x.shape[:3]
    check_floats(op, "B", B, (batch, rows, None, None), like=x)
    check_floats(op, "C", C, B.shape, like=x)
    new, pending = {"x": x, "B": B}, {"pending_x": given.pending_x, "pending_B": given.pending_B}
    if dt is not None:
        check_floats(op, "dt", dt, (batch, rows, heads))
        check_device(op, "dt", dt, x.device)
        check_type(pending_dt is not None, op, "pending_dt", "be a tensor where dt is given", "None")
        assert pending_dt is not None
        new["dt"], pending["pending_dt"] = dt, pending_dt
    else:
        check_type(pending_dt is None, op, "pending_dt", "be None where dt is None", "a tensor")
        said = given.dt_bias is not None or given.dt_softplus
        refuse(said, op, "dt_bias and dt_softplus belong to dt, which is None", "Pass dt.")
    _check_step(op, new, pending, given.step)
    _check_state(op, given.state, given.lengths.shape[0], heads, B.shape[3], x, "B", B.shape[2])
    _check_rows(op, x=x, B=B, C=C)
    check_last_contiguous(op, "Allocate it so.", pending_x=given.pending_x, pending_B=given.pending_B)
    check_type(isinstance(given.A, Tensor), op, "A", "be a tensor", type(given.A).__name__)
    _check_heads(op, heads, x.device, A=given.A, D=given.D, dt_bias=given.dt_bias)
    check_number(op, "dt_min", given.dt_min)
    if given.dt_max is not None:
        check_number(op, "dt_max", given.dt_max)
    return x.new_empty(x.shape)


def fake_conv(given: ConvArguments) -> Tensor:
    op, x, weight = "short_conv_", given.x, given.weight
    check_floats(op, "x", x, (None, None, None))
    check_floats(op, "weight", weight, (x.shape[2], None), like=x)
    if min(weight.shape) < 1:
        fail(op, "weight", "have at least one channel and one column", tuple(weight.shape))
    _check_step(op, {"x": x}, {"pending": given.pending}, given.step)
    check_floats(op, "state", given.state, (given.lengths.shape[0], weight.shape[1] - 1, x.shape[2]), like=x)
    _check_rows(op, x=x, weight=weight)
    check_last_contiguous(op, "Allocate it so.", state=given.state, pending=given.pending)
    if given.bias is not None:
        check_floats(op, "bias", given.bias, (x.shape[2],), like=x)
    check_choice(op, "activation", given.activation, ACTIVATIONS)
    return x.new_empty(x.shape)


def _check_layers(op: str, state_lengths: list[Tensor], size: int, device: torch.device) -> None:
    layers = 0
    for i, tensor in enumerate(state_lengths):
        name = "state_lengths" if len(state_lengths) == 1 else f"state_lengths[{i}]"
        stacked = isinstance(tensor, Tensor) and tensor.dim() == 2
        check_index(op, name, tensor, (None, size) if stacked else (size,), device)
        layers += tensor.shape[0] if stacked else 1
    if layers == 0:
        fail(op, "state_lengths", "hold at least one layer", "none")


def fake_commit(
    lengths: Tensor,
    pending_index: Tensor,
    state_lengths: list[Tensor],
    counts: Tensor,
    source_index: Tensor | None = None,
    advance: bool = True,
) -> None:
    op = "state_commit_"
    check_index(op, "lengths", lengths, (None,), None)
    size, device = lengths.shape[0], lengths.device
    check_index(op, "pending_index", pending_index, (size, None), device)
    _check_layers(op, state_lengths, size, device)
    check_index(op, "counts", counts, (size,), device)
    if source_index is not None:
        check_index(op, "source_index", source_index, (size, None), device)


def fake_trim(lengths: Tensor, new_lengths: Tensor, state_lengths: list[Tensor]) -> None:
    op = "state_trim_"
    check_index(op, "lengths", lengths, (None,), None)
    size, device = lengths.shape[0], lengths.device
    check_index(op, "new_lengths", new_lengths, (size,), device)
    _check_layers(op, state_lengths, size, device)


def _example_step(draw: Draw) -> dict[str, Any]:
    """Two sequences of a cache, of which one has two accepted rows and the other none."""
    held = draw.ints(0, 9, 2)
    return {
        "state_lengths": held,
        "lengths": held + torch.tensor([2, 0]),
        "counts": torch.tensor([3, 2]),
        "pending_index": draw.ints(0, 3, 2, 4),
    }


def example_delta(draw: Draw) -> dict[str, Any]:
    return {
        "state": draw.floats(2, 2, 9, 20, dtype=torch.float32),
        "pending_k": draw.floats(2, 4, 1, 9),
        "pending_update": draw.floats(2, 4, 2, 20, dtype=torch.float32),
        "pending_g": -draw.floats(2, 4, 2).abs(),
        "q": draw.floats(2, 3, 1, 9),
        "k": draw.floats(2, 3, 1, 9),
        "v": draw.floats(2, 3, 2, 20),
        "g": -draw.floats(2, 3, 2).abs(),
        "beta": draw.floats(2, 3, 2).sigmoid(),
        "l2norm_eps": 1e-6,
        **_example_step(draw),
    }


def example_selective(draw: Draw) -> dict[str, Any]:
    return {
        "state": draw.floats(2, 2, 9, 20, dtype=torch.float32),
        "pending_x": draw.floats(2, 4, 2, 20),
        "pending_B": draw.floats(2, 4, 1, 9),
        "pending_dt": draw.floats(2, 4, 2),
        "x": draw.floats(2, 3, 2, 20),
        "B": draw.floats(2, 3, 1, 9),
        "C": draw.floats(2, 3, 1, 9),
        "dt": draw.floats(2, 3, 2),
        "A": -draw.floats(2).abs(),
        "D": draw.floats(2),
        "dt_softplus": True,
        **_example_step(draw),
    }


def example_conv(draw: Draw) -> dict[str, Any]:
    return {
        "state": draw.floats(2, 3, 40),
        "pending": draw.floats(2, 4, 40),
        "x": draw.floats(2, 3, 40),
        "weight": draw.floats(40, 4),
        "bias": draw.floats(40),
        "activation": "silu",
        **_example_step(draw),
    }


def example_commit(draw: Draw) -> dict[str, Any]:
    held = draw.ints(0, 9, 3)
    return {
        "lengths": held + torch.tensor([0, 1, 2]),
        "pending_index": draw.ints(0, 7, 3, 8),
        "state_lengths": held.expand(2, 3).clone(),
        "counts": torch.tensor([3, 0, 2]),
        "source_index": draw.rows(3, 4, of=6),
    }


def example_trim(draw: Draw) -> dict[str, Any]:
    held = draw.ints(0, 9, 2, 3)
    least = held.amax(0)
    return {"lengths": least + 4, "new_lengths": least + draw.ints(0, 4, 3), "state_lengths": held}


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
    *,
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
    backend: Backend = "auto",
) -> Tensor:
    """One step of a gated delta layer: replays accepted rows, and computes new ones, per head::

        S = exp(g) S;   S = S + k (beta (v - S^T k))^T;   out = S^T (scale q)

    Args:
        state: ``(cache rows, heads, keys, values)`` float32, contiguous last dimension. Written if rows are replayed or
            settled.
        state_lengths: ``(cache rows,)`` int32 or int64, positions in the state. Written.
        pending_k, pending_g: ``(cache rows, max_pending, ...)``, otherwise like `k` and `g`. Read, then written.
        pending_update: ``(cache rows, max_pending, heads, values)`` float32: ``beta (v - S^T k)``. Read, then written.
        q, k: ``(batch, rows, key_heads, keys)``, where `key_heads` divides `heads`; head h uses key head
            ``h // (heads // key_heads)``.
        v: ``(batch, rows, heads, values)`` float32, float16 or bfloat16, like q and k.
        g: ``(batch, rows, heads)``, the logarithm of the decay; any of these dtypes.
        beta: ``(batch, rows, heads)``, any of these dtypes.
        lengths: ``(cache rows,)`` int32 or int64, committed positions of each sequence.
        counts: ``(batch,)`` int32 or int64, new rows of each sequence; None: all. The others are padding, output 0.
        cache_rows: ``(batch,)`` int32 or int64, cache row of each sequence, all different. None: row b.
        pending_index: ``(cache rows, max_pending)`` int32 or int64, of `state_commit_`. None: a prefix is accepted.
        parents: ``(batch, rows)`` int32 or int64, for candidates of a tree: the new row before each new row, an earlier
            one, or -1 for the last committed row. Settled rows are a path, which the others follow. None: row i comes
            after row i - 1.
        keep: None: all new rows stay pending, so at most max_pending. A number, up to max_pending: only so many of each
            sequence's last rows do; those before are *settled*, part of the state at once, and the next commit has to
            accept them. For prompts.
        scale: of q; None: ``keys ** -0.5``.
        l2norm_eps: q and k are divided by ``sqrt(sum of squares + l2norm_eps)`` first; None: they are not.
        A: ``(heads,)``; the logarithm of the decay is ``A softplus(g + dt_bias)`` instead. None: it is g.
        dt_bias: ``(heads,)``; only with `A`. None: 0.
        sigmoid_beta: `beta` is the argument of a sigmoid.
        backend: see `pdkernels.show_config`. The reference takes float64 too, with a float64 state.

    Returns:
        ``(batch, rows, heads, values)``, contiguous, dtype of `v`.

    Raises:
        ValueError: shapes that do not fit; memory that overlaps; values out of range (nothing is written then).
        TypeError: dtypes that do not fit.
        NotImplementedError: an input that requires a gradient while gradients are recorded.

    Qwen3-Next and Qwen3.5 pass ``l2norm_eps=1e-6, A=-A_log.exp(), dt_bias=dt_bias, sigmoid_beta=True`` with g and beta
    as projected. The gates are then computed here, where a row's bits depend on nothing else.

    Source: "Gated Delta Networks" (arXiv 2412.06464); `torch_recurrent_gated_delta_rule` of transformers.

    Example:
        >>> import torch, pdkernels as pd
        >>> state, held, lengths = torch.zeros(1, 1, 1, 1), torch.tensor([0]), torch.tensor([0])
        >>> pending = [torch.zeros(1, 4, 1, 1), torch.zeros(1, 4, 1, 1), torch.zeros(1, 4, 1)]
        >>> one, zero = torch.ones(1, 3, 1, 1), torch.zeros(1, 3, 1)
        >>> half = torch.full((1, 3, 1), 0.5)
        >>> pd.gated_delta_(state, held, *pending, one, one, one, zero, half, lengths).flatten()
        tensor([0.5000, 0.7500, 0.8750])
        >>> lengths += 2   # two of the three rows are accepted
        >>> pd.gated_delta_(state, held, *pending, one, one, one, zero, half, lengths).flatten(), state.item()
        (tensor([0.8750, 0.9375, 0.9688]), 0.75)
    """
    for name, number in (("scale", scale), ("l2norm_eps", l2norm_eps)):
        if isinstance(number, int):  # torch would take any for an optional float
            check_fits_float("gated_delta_", name, number)
    arguments = DeltaArguments(
        state, state_lengths, pending_k, pending_update, pending_g, q, k, v, g, beta,
        lengths, counts, cache_rows, pending_index, parents, keep, scale, l2norm_eps, A, dt_bias, sigmoid_beta,
    )  # fmt: skip
    out: Tensor = call(delta_op, arguments, v, backend)
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
    *,
    counts: Tensor | None = None,
    cache_rows: Tensor | None = None,
    pending_index: Tensor | None = None,
    parents: Tensor | None = None,
    keep: int | None = None,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    backend: Backend = "auto",
) -> Tensor:
    """One step of a Mamba 2 layer: replays accepted rows, and computes new ones, per head::

        S = exp(dt A) S + (dt B) x^T;   out = S^T C + D x

    Without `dt` it is 1, which is lightning attention: x is v, B is k, C is q, and A the negative slope of each head.

    Args:
        state: ``(cache rows, heads, state_size, head_dim)`` float32: the transpose of transformers' states. Written.
        state_lengths, lengths, counts, cache_rows, pending_index, parents, keep: as in `gated_delta_`.
        pending_x, pending_B, pending_dt: ``(cache rows, max_pending, ...)``, otherwise like `x`, `B` and `dt`.
        x: ``(batch, rows, heads, head_dim)`` float32, float16 or bfloat16.
        B, C: ``(batch, rows, groups, state_size)``, like x; head h uses group ``h // (heads // groups)``.
        dt: ``(batch, rows, heads)``, any of these dtypes, or None.
        A: ``(heads,)``, negative: ``-exp(A_log)``.
        D: ``(heads,)``; None: 0.
        dt_bias, dt_softplus: dt is ``softplus(dt + dt_bias)``, or without one of them.
        dt_limit: what dt is clamped to after that.
        backend: see `pdkernels.show_config`. The reference takes float64 too, with a float64 state.

    Returns:
        ``(batch, rows, heads, head_dim)``, contiguous, dtype of `x`.

    Raises:
        ValueError: shapes that do not fit; memory that overlaps; values out of range (nothing is written then).
        TypeError: dtypes that do not fit.
        NotImplementedError: an input that requires a gradient while gradients are recorded.

    Source: "Transformers are SSMs" (arXiv 2405.21060); `mamba2_selective_state_update` and `MiniMaxLightningAttention`
    of transformers.

    Example:
        >>> import torch, pdkernels as pd
        >>> state, held, lengths = torch.zeros(1, 1, 1, 1), torch.tensor([0]), torch.tensor([0])
        >>> pending = torch.zeros(2, 1, 4, 1, 1)
        >>> one = torch.ones(1, 3, 1, 1)
        >>> A = torch.tensor([0.5]).log()
        >>> pd.selective_state_(state, held, *pending, None, one, one, one, None, A, lengths).flatten()
        tensor([1.0000, 1.5000, 1.7500])
    """
    pair = isinstance(dt_limit, (tuple, list)) and len(dt_limit) == 2
    check_type(pair, "selective_state_", "dt_limit", "be two numbers", dt_limit)
    if isinstance(dt_limit[1], int):  # torch would take any for an optional float
        check_fits_float("selective_state_", "dt_limit", dt_limit[1])
    arguments = SelectiveArguments(
        state, state_lengths, pending_x, pending_B, pending_dt, x, B, C, dt, A,
        lengths, counts, cache_rows, pending_index, parents, keep, D, dt_bias, dt_softplus, *dt_limit,
    )  # fmt: skip
    out: Tensor = call(selective_op, arguments, x, backend)
    return out


def short_conv_(
    state: Tensor,
    state_lengths: Tensor,
    pending: Tensor,
    x: Tensor,
    weight: Tensor,
    lengths: Tensor,
    *,
    bias: Tensor | None = None,
    counts: Tensor | None = None,
    cache_rows: Tensor | None = None,
    pending_index: Tensor | None = None,
    parents: Tensor | None = None,
    keep: int | None = None,
    activation: Literal["none", "silu"] = "none",
    backend: Backend = "auto",
) -> Tensor:
    """One step of a causal convolution of each channel, as before a recurrence and in LFM2::

        out[t] = activation(bias + sum_j weight[:, j] x[t - width + 1 + j])

    Args:
        state: ``(cache rows, width - 1, channels)``, dtype of `x`: the last inputs, oldest first. Written.
        state_lengths, lengths, counts, cache_rows, pending_index, parents, keep: as in `gated_delta_`.
        pending: ``(cache rows, max_pending, channels)``, dtype of `x`.
        x: ``(batch, rows, channels)`` float32, float16 or bfloat16.
        weight: ``(channels, width)``, like x: a `torch.nn.Conv1d`'s ``weight[:, 0]``.
        bias: ``(channels,)``, like x; None: 0.
        activation: "none" or "silu".
        backend: see `pdkernels.show_config`. The reference takes float64 too.

    Returns:
        ``(batch, rows, channels)``, contiguous, dtype of `x`. Sums and the activation are float32, rounded once.

    Raises:
        ValueError: shapes that do not fit; memory that overlaps; values out of range (nothing is written then).
        TypeError: dtypes that do not fit.
        NotImplementedError: an input that requires a gradient while gradients are recorded.

    LFM2 passes ``B * x`` and multiplies the result by C.

    Source: `causal_conv1d_update` and `Lfm2ShortConv` of transformers.

    Example:
        >>> import torch, pdkernels as pd
        >>> state, held, lengths = torch.zeros(1, 1, 1), torch.tensor([0]), torch.tensor([0])
        >>> pending, x = torch.zeros(1, 4, 1), torch.tensor([[[1.0], [2.0], [3.0]]])
        >>> pd.short_conv_(state, held, pending, x, torch.tensor([[1.0, 10.0]]), lengths).flatten()
        tensor([10., 21., 32.])
    """
    arguments = ConvArguments(
        state, state_lengths, pending, x, weight, lengths, counts, cache_rows, pending_index, parents, keep, bias,
        activation,
    )  # fmt: skip
    out: Tensor = call(conv_op, arguments, x, backend)
    return out


def state_commit_(
    lengths: Tensor,
    pending_index: Tensor,
    state_lengths: Tensor | Sequence[Tensor],
    counts: Tensor,
    source_index: Tensor | None = None,
    *,
    advance: bool = True,
    backend: Backend = "auto",
) -> None:
    """Accepts rows of a draft in all layers: row ``source_index[r, i]`` after the committed ones becomes the i-th.

    No state is touched: the next step of each layer replays the rows. They have to be a path of the draft, each
    computed after the one before it. Picture, rows 0, 2 and 5 of a draft of six::

        before   lengths 4, state_lengths 4    pending 0 1 2 3 4 5    pending_index . . . . . .
        after    lengths 7, state_lengths 4    pending 0 1 2 3 4 5    pending_index 0 2 5 . . .

    Args:
        lengths: ``(cache rows,)`` int32 or int64; updated in place, so not expanded.
        pending_index: ``(cache rows, max_pending)`` int32 or int64; written.
        state_lengths: ``(layers, cache rows)`` int32 or int64, those of one layer ``(cache rows,)``, or a list of both
            kinds. All layers must have run the same rows.
        counts: ``(cache rows,)`` int32 or int64, accepted rows of each sequence, 0 or more: settled and pending ones.
        source_index: ``(cache rows, rows)`` int32 or int64, counted from the sequence's length, as in `kv_commit_`;
            entries from ``counts[r]`` on are not read. Settled rows are where they are. None: the accepted rows are a
            prefix.
        advance: False leaves `lengths` as they are, for a cache with keys and values: `kv_commit_` advances them.
        backend: see `pdkernels.show_config`.

    Raises:
        ValueError: shapes that do not fit; lengths, counts or sources out of range (nothing is written then).
        TypeError: tensors that are not int32 or int64.

    Example:
        >>> import torch, pdkernels as pd
        >>> lengths, index = torch.tensor([4]), torch.zeros(1, 6, dtype=torch.int64)
        >>> pd.state_commit_(lengths, index, torch.tensor([4]), torch.tensor([3]), torch.tensor([[0, 2, 5]]))
        >>> lengths, index
        (tensor([7]), tensor([[0, 2, 5, 0, 0, 0]]))
    """
    layers = _as_list("state_commit_", state_lengths)
    call(commit_op, (lengths, pending_index, layers, counts, source_index, advance), lengths, backend)


def state_trim_(
    lengths: Tensor, new_lengths: Tensor, state_lengths: Tensor | Sequence[Tensor], *, backend: Backend = "auto"
) -> None:
    """Shortens sequences: ``lengths[r] = new_lengths[r]``, back to any position that is not in a state yet.

    Further back a sequence needs another state: a copy of one that was taken there, or its rows once more.

    Args:
        lengths: ``(cache rows,)`` int32 or int64; updated in place, so not expanded.
        new_lengths: ``(cache rows,)`` int32 or int64, each in ``[state_lengths[r], lengths[r]]``.
        state_lengths: as in `state_commit_`.
        backend: see `pdkernels.show_config`.

    Raises:
        ValueError: a length above the old one, or below what is in a state (no length changes then).
        TypeError: tensors that are not int32 or int64.

    Example:
        >>> import torch, pdkernels as pd
        >>> lengths = torch.tensor([5, 7]); pd.state_trim_(lengths, torch.tensor([5, 3]), torch.tensor([4, 2])); lengths
        tensor([5, 3])
    """
    call(trim_op, (lengths, new_lengths, _as_list("state_trim_", state_lengths)), lengths, backend)


def _as_list(op: str, state_lengths: Tensor | Sequence[Tensor]) -> list[Tensor]:
    if isinstance(state_lengths, Tensor):
        return [state_lengths]
    is_list = isinstance(state_lengths, (list, tuple))
    check_type(is_list, op, "state_lengths", "be a tensor or a list of them", type(state_lengths).__name__)
    return list(state_lengths)


def _by_triton(op: str, arguments: Any) -> Tensor:
    from pdkernels.triton import recurrent_state

    out: Tensor = getattr(recurrent_state, op)(arguments)
    return out


def _commit_triton(*arguments: Any) -> None:
    from pdkernels.triton.recurrent_state import state_commit_

    state_commit_(*arguments)


def _trim_triton(*arguments: Any) -> None:
    from pdkernels.triton.recurrent_state import state_trim_

    state_trim_(*arguments)


def _define(op: str, structure: Any, *mutated: str, **definition: Any) -> torch._ops.OpOverload:
    schema = schema_of(structure, mutated=("state", "state_lengths", *mutated))
    reference_op = getattr(reference, op)
    return define(
        f"{op}({schema}) -> (Tensor out)",
        structure=structure,
        reference=lambda arguments: reference_op(*arguments),
        triton=partial(_by_triton, op),
        **definition,
    )


delta_op = _define(
    "gated_delta_", DeltaArguments, "pending_k", "pending_update", "pending_g", fake=fake_delta, example=example_delta
)
selective_op = _define(
    "selective_state_",
    SelectiveArguments,
    "pending_x",
    "pending_B",
    "pending_dt",
    fake=fake_selective,
    example=example_selective,
)
conv_op = _define("short_conv_", ConvArguments, "pending", fake=fake_conv, example=example_conv)
commit_op = define(
    "state_commit_(Tensor(a!) lengths, Tensor(b!) pending_index, Tensor[] state_lengths, Tensor counts, "
    "Tensor? source_index=None, bool advance=True) -> ()",
    fake=fake_commit,
    reference=reference.state_commit_,
    example=example_commit,
    gradients="own",
    triton=_commit_triton,
)
trim_op = define(
    "state_trim_(Tensor(a!) lengths, Tensor new_lengths, Tensor[] state_lengths) -> ()",
    fake=fake_trim,
    reference=reference.state_trim_,
    example=example_trim,
    gradients="own",
    triton=_trim_triton,
)
