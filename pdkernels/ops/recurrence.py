"""The parts of a recurrent-depth sampler step around the model: noise, the exit test, and freezing and adding rows.

A sequence decodes many positions at once, its *wave*: row ``i`` is at position ``cursor[b] + i``, for ``i < width[b]``.
A step runs the prelude on the wave's tokens, `recurrence_inject` on the result, the core a few times, `recurrence_exit`
in place of the core's last norm, the coda, and `recurrence_advance_` on the predicted tokens. Rows that have converged
freeze: the wave's front moves on by ``advance[b]`` rows and new ones join at its end.

Nothing is moved when rows freeze: the next step reads for row ``i`` what this one left at row ``i + advance[b]``, so
states are always compared and blended position by position. All that varies is on the device; there is no host sync.

Source: "Efficient Parallel Samplers for Recurrent-Depth Models" (arXiv 2510.14961), Algorithms 1, 2, equations 1 to 3.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from pdkernels._validation import (
    check_choice,
    check_cuda_batch,
    check_device,
    check_floats,
    check_index,
    check_indices,
    check_int,
    check_last_contiguous,
    check_number,
    check_shape,
    check_type,
    fail,
    refuse,
)
from pdkernels.backends import Backend
from pdkernels.ops.library import Draw, call, define, keys, schema_of
from pdkernels.reference import recurrence as reference

__all__ = ["RecurrenceExit", "recurrence_advance_", "recurrence_exit", "recurrence_inject"]

INJECT, EXIT, ADVANCE = "recurrence_inject", "recurrence_exit", "recurrence_advance_"


def _rows(op: str, name: str, x: object, like: Tensor | None, sizes: tuple[int | None, ...]) -> None:
    """A tensor of vectors."""
    check_floats(op, name, x, sizes, like=like)
    check_last_contiguous(op, "Call .contiguous() on it.", **{name: cast(Tensor, x)})


def _counts(op: str, recurrences: Tensor, rows: int, batch: int, device: torch.device) -> None:
    check_index(op, "recurrences", recurrences, (batch, None), device)
    if recurrences.shape[1] < rows:
        fail(op, "recurrences", f"have at least {rows} columns", tuple(recurrences.shape))


def fake_inject(
    state: Tensor | None,
    embedding: Tensor,
    previous_embedding: Tensor | None,
    recurrences: Tensor,
    cursor: Tensor,
    width: Tensor,
    advance: Tensor,
    steps: Tensor,
    seed: int,
    seeds: Tensor | None,
    noise: float,
    schedule: str,
    horizon: int,
    mixer: str,
    momentum: float,
    init_std: float,
    new_state: str,
    damp_new: bool,
) -> Tensor:
    _rows(INJECT, "embedding", embedding, None, (None, None, None))
    check_cuda_batch(INJECT, "embedding", embedding)
    batch, rows, size = embedding.shape
    if state is not None:
        _rows(INJECT, "state", state, embedding, (batch, None, size))
    if previous_embedding is not None:
        before = None if state is None else state.shape[1]
        _rows(INJECT, "previous_embedding", previous_embedding, embedding, (batch, before, size))
    _counts(INJECT, recurrences, rows, batch, embedding.device)
    for name, vector in (("cursor", cursor), ("width", width), ("advance", advance), ("steps", steps)):
        check_index(INJECT, name, vector, (batch,), embedding.device)
    check_indices(INJECT, (batch,), embedding.device, seed=seeds)
    check_choice(INJECT, "schedule", schedule, reference.SCHEDULES)
    check_choice(INJECT, "mixer", mixer, reference.MIXERS)
    check_choice(INJECT, "new_state", new_state, reference.NEW_STATES)
    check_number(INJECT, "noise", noise, 0, 3.4e38, "be finite and not negative")
    check_number(INJECT, "momentum", momentum, 0, 1, "be in [0, 1]")
    check_number(INJECT, "init_std", init_std, 0, 3.4e38, "be finite and not negative")
    check_int(INJECT, "horizon", horizon, 1)
    return embedding.new_empty((batch, rows, 2 * size))


def fake_exit(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    previous: Tensor | None,
    recurrences: Tensor,
    width: Tensor,
    advance: Tensor,
    threshold: float,
    older: Tensor | None = None,
    older_advance: Tensor | None = None,
    min_recurrences: int = 1,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    _rows(EXIT, "x", x, None, (None, None, None))
    check_cuda_batch(EXIT, "x", x)
    batch, rows, size = x.shape
    _rows(EXIT, "residual", residual, x, (batch, rows, size))
    _rows(EXIT, "weight", weight, x, (size,))
    if previous is not None:
        _rows(EXIT, "previous", previous, x, (batch, None, size))
    _counts(EXIT, recurrences, rows, batch, x.device)
    check_index(EXIT, "width", width, (batch,), x.device)
    check_index(EXIT, "advance", advance, (batch,), x.device)
    refuse(older is None and older_advance is not None, EXIT, "older_advance is given without older")
    if older is not None and (previous is None or older_advance is None):
        missing = [name for name, x in (("previous", previous), ("older_advance", older_advance)) if x is None]
        refuse(True, EXIT, f"older is given without {' and '.join(missing)}", "A second difference takes all three.")
    if older is not None:
        _rows(EXIT, "older", older, x, (batch, None, size))
        check_index(EXIT, "older_advance", older_advance, (batch,), x.device)
    check_number(EXIT, "threshold", threshold)
    check_number(EXIT, "eps", eps, 0, expectation="be at least 0")
    check_int(EXIT, "min_recurrences", min_recurrences, 1, "A row that is new has nothing to be compared with.")
    shape = (batch, rows)
    return x.new_empty(x.shape), x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.bool)


def fake_advance(
    tokens: Tensor,
    predictions: Tensor,
    recurrences: Tensor,
    unchanged_steps: Tensor,
    width: Tensor,
    cursor: Tensor,
    advance: Tensor,
    steps: Tensor,
    remaining: Tensor,
    converged: Tensor | None,
    inner_recurrence: int,
    max_wavefront: int,
    max_recurrences: int,
    stability: int,
    rule: str,
    headway: int,
    filler: Tensor | None = None,
    end_tokens: Tensor | None = None,
    keep_changed: bool = True,
    keep_last: bool = False,
) -> None:
    check_index(ADVANCE, "tokens", tokens, (None, None), None)
    device, batch, capacity = tokens.device, tokens.shape[0], tokens.shape[1] - 1
    check_index(ADVANCE, "recurrences", recurrences, (batch, capacity), device)
    check_index(ADVANCE, "unchanged_steps", unchanged_steps, (batch, capacity), device)
    check_index(ADVANCE, "predictions", predictions, (batch, None), device)
    rows = predictions.shape[1]
    if rows > capacity:
        fail(ADVANCE, "predictions", f"have at most {capacity} columns", tuple(predictions.shape))
    vectors = (("width", width), ("cursor", cursor), ("advance", advance), ("steps", steps), ("remaining", remaining))
    for name, vector in vectors:
        check_index(ADVANCE, name, vector, (batch,), device)
    if converged is not None:
        check_type(isinstance(converged, Tensor), ADVANCE, "converged", "be a tensor", type(converged).__name__)
        check_type(converged.dtype == torch.bool, ADVANCE, "converged", "be a bool tensor", converged.dtype)
        check_shape(ADVANCE, "converged", converged, predictions.shape, " like predictions")
        check_device(ADVANCE, "converged", converged, device)
    check_int(ADVANCE, "inner_recurrence", inner_recurrence, 1)
    if inner_recurrence > 2**31 - 1:
        fail(ADVANCE, "inner_recurrence", "be at most 2**31 - 1", inner_recurrence)
    check_int(ADVANCE, "headway", headway, 1)
    check_int(ADVANCE, "max_recurrences", max_recurrences, 0)
    check_int(ADVANCE, "stability", stability, 0)
    check_choice(ADVANCE, "rule", rule, reference.RULES)
    if max_wavefront > capacity:
        fail(ADVANCE, "max_wavefront", f"be at most the capacity of {capacity} rows", max_wavefront)
    check_indices(ADVANCE, (batch, headway - 1), device, filler=filler)
    check_indices(ADVANCE, (None,), device, end_tokens=end_tokens)


class RecurrenceExit(NamedTuple):
    """The result of `recurrence_exit` for the rows of a step."""

    state: Tensor
    """(batch, rows, hidden): the normalised states, dtype of x; zeros past the wave."""
    distance: Tensor
    """(batch, rows) float32: the relative change of each state; +inf where there is no previous state."""
    converged: Tensor
    """(batch, rows) bool: the distance is below the threshold."""


def recurrence_inject(
    state: Tensor | None,
    embedding: Tensor,
    previous_embedding: Tensor | None,
    recurrences: Tensor,
    cursor: Tensor,
    width: Tensor,
    advance: Tensor,
    steps: Tensor,
    *,
    seed: int | Tensor = 0,
    noise: float = 0.0,
    schedule: Literal["constant", "linear", "harmonic", "root"] = "linear",
    horizon: int = 32,
    mixer: Literal["linear", "sqrt"] = "linear",
    momentum: float = 0.0,
    init_std: float = 0.4**0.5,
    new_state: Literal["fresh", "copied"] = "fresh",
    damp_new: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """Computes the adapter's input: states with noise, and embeddings blended with those of the previous step.

    A row is *new* before its first recurrence (``recurrences[b, i] == 0``, or `state` is None) and *old* from then on::

        new   z = init(0, position)              e = embedding
        old   z = state[b, i + advance[b]]       e = (1 - momentum) embedding + momentum previous
        both  z' = (1 - beta) z + beta init(1 + step, position)

    with ``previous = previous_embedding[b, i + advance[b]]``, position ``cursor[b] + i`` and step ``steps[b]``. beta
    depends on how often the row has been through the core, ``count = recurrences[b, i]``::

        constant  noise      linear  noise max(0, 1 - count / horizon)
        harmonic  noise / (1 + count)      root  noise / sqrt(1 + count)

    ``init(t, position)`` is the normal distribution with deviation `init_std`, truncated at three deviations. It is
    keyed by ``(seed, t, position, component)``: Philox4x32-10 with the counter ``(component // 4, position, t, 1)``. So
    the initial state of a row is independent of its noise, and a sequence gets the same noise alone and in a batch, and
    on every device. Only the upper 24 bits of a word are used, so there are 2**24 quantiles.

    Args:
        state: ``(batch, rows_before, hidden)``, the `RecurrenceExit.state` of the previous step; None: all rows are
            new.
        embedding: ``(batch, rows, hidden)``, the prelude's output; float32, float16 or bfloat16 (float64 with
            ``backend="reference"``).
        previous_embedding: shape of `state`, the blended embeddings of the previous step, such as
            ``result[..., hidden:]``; None: nothing is blended, and old rows keep their embedding like new ones.
        recurrences: ``(batch, >= rows)`` int32 or int64, recurrences run at each row so far.
        cursor, width, advance, steps: ``(batch,)`` int32 or int64, as `recurrence_advance_` leaves them.
        seed: key of all random numbers, an int or a ``(batch,)`` int32 or int64 tensor.
        noise: beta of a new row, 0 or more. A beta of 0 leaves a state unchanged and generates no noise.
        schedule, horizon: the decay of beta. The paper has "linear", the published code "harmonic".
        mixer: "sqrt" mixes with ``sqrt(max(1 - beta, 0))`` and ``sqrt(beta)``, which keeps the variance.
        momentum: in ``[0, 1]``; 0 leaves embeddings unchanged.
        init_std: deviation of the normal distribution before the cut.
        new_state: "copied" starts new rows from the sequence's last old row, if any.
        damp_new: rows without a previous embedding get ``(1 - momentum) embedding``, as in the published code: new
            rows, and all rows where `previous_embedding` is None.
        backend: see `pdkernels.show_config`.

    Returns:
        ``(batch, rows, 2 hidden)``: the states in ``[..., :hidden]``, the embeddings in ``[..., hidden:]``; zeros past
        the wave.

    Raises:
        ValueError: shapes that do not fit, options out of range; on the CPU a width outside ``[0, rows]``, a negative
            cursor or advance, an old row missing from `state`. On CUDA such a width is clamped and such a row is taken
            as new, unless ``PDKERNELS_DEBUG_CHECKS=1``.
        TypeError: dtypes that do not fit.
        NotImplementedError: an input that requires a gradient while gradients are recorded.

    Arithmetic is float32, each operation rounded separately in the order of the formulas, with one rounding to the
    dtype at the end: kernels and reference agree bit for bit. Tensors may have any strides with a contiguous last
    dimension.

    Source: lines 5 to 8 of Algorithms 1 and 2, equations 1 and 2; the schedules of section 3.4 and of the published
    code.

    Example:
        >>> import torch, pdkernels as pd
        >>> zero, one = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
        >>> state, embedding = torch.tensor([[[1., 2.], [3., 4.]]]), torch.ones(1, 2, 2)
        >>> recurrences = torch.tensor([[4, 0]])   # one row froze: row 0 was row 1, row 1 is new
        >>> step = one, 2 * one, one, one
        >>> result = pd.recurrence_inject(state, embedding, 3 * embedding, recurrences, *step, momentum=0.5)
        >>> z, e = result.chunk(2, -1)
        >>> z[0, 0], e[0]
        (tensor([3., 4.]), tensor([[2., 2.],
                [1., 1.]]))
    """
    tensors = (state, embedding, previous_embedding, recurrences, cursor, width, advance, steps)
    options = (*keys(INJECT, seed), noise, schedule, horizon, mixer, momentum, init_std, new_state, damp_new)
    out: Tensor = call(inject_op, (*tensors, *options), embedding, backend)
    return out


def recurrence_exit(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    previous: Tensor | None,
    recurrences: Tensor,
    width: Tensor,
    advance: Tensor,
    *,
    threshold: float,
    older: Tensor | None = None,
    older_advance: Tensor | None = None,
    min_recurrences: int = 1,
    eps: float = 1e-6,
    backend: Backend = "auto",
) -> RecurrenceExit:
    """Computes the core's last norm and the exit test of each row, in one pass.

    ``state = rms_norm(x + residual) * weight``: the sum and its norm in float32, rounded to the dtype, then times the
    weight in that dtype. A row has converged once its state stops moving::

        distance = |state - before| / |state|                      before = previous[b, i + advance[b]]
        distance = |state - 2 before + first| / |state|            first = older[b, i + advance[b] + older_advance[b]]

    computed in float32 from the stored states. The second line is for calls with `older`. Rows are compared by
    position. A row has the distance +inf without `previous`, with fewer than `min_recurrences` recurrences before this
    step, without a row in `previous` or `older`, or past the wave.

    Args:
        x, residual: ``(batch, rows, hidden)``, float32, float16 or bfloat16 (float64 with ``backend="reference"``): the
            operands of the last sum of the core, before its norm.
        weight: ``(hidden,)`` of that norm, dtype of x.
        previous: ``(batch, rows_before, hidden)`` states of the previous step, before any noise; None: no comparison.
        recurrences: ``(batch, >= rows)`` int32 or int64, recurrences at each row *before* this step.
        width, advance: ``(batch,)`` int32 or int64, as `recurrence_advance_` left them.
        threshold: rows with a smaller distance have converged. 0.03 in the paper.
        older, older_advance: ``(batch, rows_then, hidden)`` states of the step before `previous`, and the `advance` of
            that step.
        min_recurrences: 1 or more; with `older` the recurrences of two steps, so that a row has both states.
        eps: of the norm.
        backend: see `pdkernels.show_config`.

    Returns:
        `RecurrenceExit`. With the reference in float64 the distance is float64 too.

    Raises:
        ValueError: shapes that do not fit, options out of range; on the CPU a width outside ``[0, rows]`` or a negative
            advance. On CUDA such a width is clamped, unless ``PDKERNELS_DEBUG_CHECKS=1``.
        TypeError: dtypes that do not fit.
        NotImplementedError: an input that requires a gradient while gradients are recorded.

    Deterministic and independent of the batch. An unchanged zero state has distance 0; NaN never converges.

    Source: equation 3 and Algorithm 2 line 15; norm_4 of Huginn-0125's sandwich block.

    Example:
        >>> import torch, pdkernels as pd
        >>> zero, two = torch.zeros(1, dtype=torch.int64), torch.full((1,), 2)
        >>> x = torch.tensor([[[3., 3.], [3., -3.]]]); previous = torch.tensor([[[1., 1.], [1., 1.]]])
        >>> recurrences, weight = torch.tensor([[4, 4]]), torch.ones(2)
        >>> result = pd.recurrence_exit(x, 0 * x, weight, previous, recurrences, two, zero, threshold=0.03)
        >>> result.state, result.distance.round(decimals=3), result.converged
        (tensor([[[ 1.0000,  1.0000],
                 [ 1.0000, -1.0000]]]), tensor([[0.0000, 1.4140]]), tensor([[ True, False]]))
    """
    arguments = (
        x, residual, weight, previous, recurrences, width, advance, threshold, older, older_advance, min_recurrences,
        eps,
    )  # fmt: skip
    return RecurrenceExit(*call(exit_op, arguments, x, backend))


def recurrence_advance_(
    tokens: Tensor,
    predictions: Tensor,
    recurrences: Tensor,
    unchanged_steps: Tensor,
    width: Tensor,
    cursor: Tensor,
    advance: Tensor,
    steps: Tensor,
    remaining: Tensor,
    *,
    converged: Tensor | None = None,
    inner_recurrence: int,
    max_wavefront: int | None = None,
    max_recurrences: int = 0,
    stability: int = 0,
    rule: Literal["prefix", "last"] = "prefix",
    headway: int = 1,
    filler: Tensor | None = None,
    end_tokens: Tensor | None = None,
    keep_changed: bool = True,
    keep_last: bool = False,
    backend: Backend = "auto",
) -> None:
    """Ends a sampler step, in place: freezes the rows that are done, advances each wave and adds new rows to it.

    ``tokens[b, i]`` is the input of row ``i``, ``predictions[b, i]`` the token it gave for the next position. Row 0's
    input is already text; when ``n`` rows freeze, ``predictions[b, :n]`` becomes text too. The picture, with
    ``headway=1``::

        tokens        a b c         a is text; rows 0 and 1 are ready
        predictions   b c d
        advance = 2   text a b c, row 0 is now what row 2 was
        tokens        c d           c is text, d is a guess, and its row is new

    For each sequence with ``w = width[b] > 0`` rows, in this order:

    1. ``recurrences[b, i] += inner_recurrence`` and ``steps[b] += 1``. ``unchanged_steps[b, i]`` is incremented where
       an old row predicted ``tokens[b, i + 1]`` again, and is 0 elsewhere.
    2. A row is ready if it has converged, has `max_recurrences` (if above 0), or `stability` unchanged steps (if above
       0). Rule "prefix" freezes the ready rows before the first that is not (equation 3), "last" all up to the last
       ready one (Algorithm 2).
    3. `keep_changed`: rows stay in the wave from the first one whose input changed in this step: the cache holds K and
       V of its old input. `keep_last`: the last of the rows stays too, and is the first of the next step, as in the
       published code.
    4. ``n`` of them freeze: no more than ``remaining[b]``, and none past the first end token among the predictions.
       ``advance[b] = n``, ``cursor[b] += n``, ``remaining[b] -= n``.
    5. After an end token, or with nothing remaining, ``width[b] = 0``: the sequence has finished. Its tokens,
       recurrences and unchanged steps are not shifted.
    6. Otherwise ``width[b] = min(w - n + headway, max_wavefront, remaining[b])``; the remaining rows shift by ``n``,
       each input being the prediction of the row before it; the first new row gets the last prediction, others
       `filler`.

    A finished sequence (``width[b] == 0``) does not change, except for ``advance[b] = 0``. Past a wave, recurrences and
    unchanged steps are 0 and tokens are unspecified.

    Args:
        tokens: ``(batch, capacity + 1)`` int32 or int64.
        predictions: ``(batch, rows)`` int32 or int64, ``rows <= capacity``: the widest wave of this step, or more.
        recurrences, unchanged_steps: ``(batch, capacity)`` int32 or int64.
        width, cursor, advance, steps, remaining: ``(batch,)`` int32 or int64. `cursor` may be the lengths of a KV
            cache; `remaining` counts tokens that may still be frozen; `advance` is only written.
        converged: ``(batch, rows)`` bool, as from `recurrence_exit`; None: no row is.
        inner_recurrence: recurrences of this step.
        max_wavefront: in ``[1, capacity]``; None: capacity.
        max_recurrences, stability, rule, keep_changed, keep_last: see above.
        headway: rows that join a wave in each step, 1 or more.
        filler: ``(batch, headway - 1)`` int32 or int64, inputs of new rows without a prediction; None: 0.
        end_tokens: ``(n,)`` ids that end a sequence.
        backend: see `pdkernels.show_config`.

    Raises:
        ValueError: shapes that do not fit, written tensors that overlap, options out of range; on the CPU a width
            outside ``[0, min(rows, max_wavefront)]`` or a negative cursor or remaining (nothing is written then). On
            CUDA such a sequence is left exactly as it was, unless ``PDKERNELS_DEBUG_CHECKS=1``.
        TypeError: dtypes that do not fit.

    One launch, integers only, no host sync. A wave of at most one row (``max_wavefront=1``) is autoregressive decoding
    with an adaptive number of recurrences.

    Source: equation 3 and Algorithms 1 and 2; the published sampler for `keep_last`.

    Example:
        >>> import torch, pdkernels as pd
        >>> tokens, predictions = torch.tensor([[5, 6, 7, 0, 0]]), torch.tensor([[6, 7, 8]])
        >>> recurrences, unchanged_steps = torch.tensor([[8, 8, 4, 0]]), torch.zeros(1, 4, dtype=torch.int64)
        >>> width, cursor, advance, steps, remaining = (torch.tensor([n]) for n in (3, 10, 0, 2, 100))
        >>> converged = torch.tensor([[True, True, False]])
        >>> wave = tokens, predictions, recurrences, unchanged_steps, width, cursor, advance, steps, remaining
        >>> pd.recurrence_advance_(*wave, converged=converged, inner_recurrence=4)
        >>> advance.item(), cursor.item(), width.item(), tokens[0, :2].tolist(), recurrences[0].tolist()
        (2, 12, 2, [7, 8], [8, 0, 0, 0])
    """
    if max_wavefront is not None:
        check_int(ADVANCE, "max_wavefront", max_wavefront, 1, "Pass None for the whole capacity.")
    tensors = (tokens, predictions, recurrences, unchanged_steps, width, cursor, advance, steps, remaining, converged)
    limits = (inner_recurrence, max_wavefront or 0, max_recurrences, stability, rule, headway)
    call(advance_op, (*tensors, *limits, filler, end_tokens, keep_changed, keep_last), tokens, backend)


def _wave(draw: Draw) -> dict[str, Any]:
    """Two waves of at most six rows."""
    numbers = {name: draw.ints(low, high, 2) for name, low, high in (("cursor", 0, 8), ("width", 1, 6))}
    return {
        "recurrences": draw.ints(0, 8, 2, 6),
        **numbers,
        "advance": torch.zeros(2, dtype=torch.int64),
        "steps": draw.ints(0, 8, 2),
    }


def _example_inject(draw: Draw) -> dict[str, Any]:
    rows = {name: draw.floats(2, 6, 64) for name in ("state", "embedding", "previous_embedding")}
    return {**rows, **_wave(draw), "noise": 0.5, "momentum": 0.1}


def _example_exit(draw: Draw) -> dict[str, Any]:
    x, residual, previous = (draw.floats(2, 6, 64) for _ in range(3))
    wave = {name: x for name, x in _wave(draw).items() if name in ("recurrences", "width", "advance")}
    return {"x": x, "residual": residual, "weight": draw.floats(64), "previous": previous, **wave, "threshold": 1.4}


def _example_advance(draw: Draw) -> dict[str, Any]:
    tokens, predictions, converged = draw.ints(0, 8, 2, 7), draw.ints(0, 8, 2, 6), draw.ints(0, 1, 2, 6).bool()
    wave = {**_wave(draw), "unchanged_steps": torch.zeros(2, 6, dtype=torch.int64), "remaining": draw.ints(9, 19, 2)}
    return {"tokens": tokens, "predictions": predictions, **wave, "converged": converged, "inner_recurrence": 4}


inject_op = define(
    "recurrence_inject(Tensor? state, Tensor embedding, Tensor? previous_embedding, Tensor recurrences, Tensor cursor, Tensor width, "
    "Tensor advance, Tensor steps, int seed, Tensor? seeds, float noise, str schedule, int horizon, str mixer, float momentum, float init_std, "
    "str new_state, bool damp_new) -> (Tensor state)",
    fake=fake_inject,
    reference=reference.recurrence_inject,
    example=_example_inject,
)
exit_op = define(
    "recurrence_exit(Tensor x, Tensor residual, Tensor weight, Tensor? previous, Tensor recurrences, Tensor width, Tensor advance, "
    "float threshold, Tensor? older=None, Tensor? older_advance=None, int min_recurrences=1, float eps=1e-06) "
    f"-> ({schema_of(RecurrenceExit)})",
    fake=fake_exit,
    reference=reference.recurrence_exit,
    example=_example_exit,
)
advance_op = define(
    "recurrence_advance_(Tensor(a!) tokens, Tensor predictions, Tensor(b!) recurrences, Tensor(c!) unchanged_steps, Tensor(d!) width, "
    "Tensor(e!) cursor, Tensor(f!) advance, Tensor(g!) steps, Tensor(h!) remaining, Tensor? converged, int inner_recurrence, "
    "int max_wavefront, int max_recurrences, int stability, str rule, int headway, Tensor? filler=None, Tensor? end_tokens=None, "
    "bool keep_changed=True, bool keep_last=False) -> ()",
    fake=fake_advance,
    reference=reference.recurrence_advance_,
    example=_example_advance,
    gradients="own",
)
