"""The fakes of the recurrence ops, which are their validation."""

from __future__ import annotations

from typing import cast

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
from pdkernels.reference import recurrence as reference

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
