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

from pdkernels._recurrent_state import ConvArguments, DeltaArguments, SelectiveArguments
from pdkernels._validation import check_fits_float, check_type
from pdkernels.backends import Backend
from pdkernels.ops import _recurrent_state as checks
from pdkernels.ops.library import call, define, schema_of
from pdkernels.reference import recurrent_state as reference

__all__ = ["gated_delta_", "selective_state_", "short_conv_", "state_commit_", "state_trim_"]


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
    "gated_delta_",
    DeltaArguments,
    "pending_k",
    "pending_update",
    "pending_g",
    fake=checks.fake_delta,
    example=checks.example_delta,
)
selective_op = _define(
    "selective_state_",
    SelectiveArguments,
    "pending_x",
    "pending_B",
    "pending_dt",
    fake=checks.fake_selective,
    example=checks.example_selective,
)
conv_op = _define("short_conv_", ConvArguments, "pending", fake=checks.fake_conv, example=checks.example_conv)
commit_op = define(
    "state_commit_(Tensor(a!) lengths, Tensor(b!) pending_index, Tensor[] state_lengths, Tensor counts, "
    "Tensor? source_index=None, bool advance=True) -> ()",
    fake=checks.fake_commit,
    reference=reference.state_commit_,
    example=checks.example_commit,
    gradients="own",
    triton=_commit_triton,
)
trim_op = define(
    "state_trim_(Tensor(a!) lengths, Tensor new_lengths, Tensor[] state_lengths) -> ()",
    fake=checks.fake_trim,
    reference=reference.state_trim_,
    example=checks.example_trim,
    gradients="own",
    triton=_trim_triton,
)
