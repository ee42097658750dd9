"""What the recurrence ops check: all but values. The fakes are part of it, as in `_library`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pdkernels._validation import check_index, check_own_places, check_type, fail
from pdkernels.ops._floats import check_floats, refuse_float64

INJECT, EXIT, ADVANCE = "recurrence_inject", "recurrence_exit", "recurrence_advance_"


def check_name(op: str, argument: str, value: object, names: tuple[str, ...]) -> None:
    if value not in names:
        fail(op, argument, f"be one of {', '.join(names)}", repr(value))


def check_int(op: str, argument: str, number: object, least: int, remedy: str = "") -> None:
    check_type(isinstance(number, (int, torch.SymInt)), op, argument, "be an int", type(number).__name__)
    if number < least:
        fail(op, argument, f"be at least {least}", number, remedy)


def _flag(op: str, argument: str, value: object) -> None:
    check_type(isinstance(value, bool), op, argument, "be a bool", type(value).__name__)


def _rows(op: str, name: str, x: object, like: Tensor | None, sizes: tuple[int | None, ...]) -> None:
    """A tensor of vectors, of the shape `sizes` (None: any size) and of the dtype and device of `like`."""
    check_floats(op, name, x, like=like)
    if x.dim() != len(sizes) or any(size is not None and size != have for size, have in zip(sizes, x.shape)):
        wanted = "(" + ", ".join("any" if size is None else str(size) for size in sizes) + ")"
        fail(op, name, f"have shape {wanted}", tuple(x.shape))
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        fail(op, name, "have a contiguous last dimension", f"strides {x.stride()}", "Call .contiguous() on it.")


def _counts(op: str, recurrences: object, rows: int, batch: int, device: torch.device) -> None:
    check_index(op, "recurrences", recurrences, (batch, None), device)
    if recurrences.shape[1] < rows:
        fail(op, "recurrences", f"have at least {rows} columns", tuple(recurrences.shape))


def check_inject(
    state: Tensor | None,
    embedding: Tensor,
    previous_embedding: Tensor | None,
    recurrences: Tensor,
    cursor: Tensor,
    width: Tensor,
    advance: Tensor,
    steps: Tensor,
    seed: int,
    noise: float,
    schedule: str,
    horizon: int,
    mixer: str,
    momentum: float,
    init_std: float,
    new_state: str,
    damp_new: bool,
) -> None:
    _rows(INJECT, "embedding", embedding, None, (None, None, None))
    batch, rows, size = embedding.shape
    if state is not None:
        _rows(INJECT, "state", state, embedding, (batch, None, size))
    if previous_embedding is not None:
        before = None if state is None else state.shape[1]
        _rows(INJECT, "previous_embedding", previous_embedding, embedding, (batch, before, size))
    _counts(INJECT, recurrences, rows, batch, embedding.device)
    for name, vector in (("cursor", cursor), ("width", width), ("advance", advance), ("steps", steps)):
        check_index(INJECT, name, vector, (batch,), embedding.device)
    for name, number, most in (
        ("noise", noise, math.inf),
        ("momentum", momentum, 1.0),
        ("init_std", init_std, math.inf),
    ):
        check_type(isinstance(number, (int, float)), INJECT, name, "be a number", type(number).__name__)
        if not 0 <= number <= most or number == math.inf:
            fail(INJECT, name, "be in [0, 1]" if most == 1 else "be finite and not negative", number)
    check_int(INJECT, "horizon", horizon, 1)
    _flag(INJECT, "damp_new", damp_new)


def fake_inject(state: Tensor | None, embedding: Tensor, *rest: Any) -> Tensor:
    check_inject(state, embedding, *rest)
    refuse_float64(INJECT, "embedding", embedding)
    return embedding.new_empty((embedding.shape[0], embedding.shape[1], 2 * embedding.shape[2]))


def check_exit(
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
) -> None:
    _rows(EXIT, "x", x, None, (None, None, None))
    batch, rows, size = x.shape
    _rows(EXIT, "residual", residual, x, (batch, rows, size))
    _rows(EXIT, "weight", weight, x, (size,))
    if previous is not None:
        _rows(EXIT, "previous", previous, x, (batch, None, size))
    _counts(EXIT, recurrences, rows, batch, x.device)
    check_index(EXIT, "width", width, (batch,), x.device)
    check_index(EXIT, "advance", advance, (batch,), x.device)
    if (older is None) != (older_advance is None) or (older is not None and previous is None):
        fail(EXIT, "older", "come with older_advance and previous", "only some of them")
    if older is not None:
        _rows(EXIT, "older", older, x, (batch, None, size))
        check_index(EXIT, "older_advance", older_advance, (batch,), x.device)
    for name, number in (("threshold", threshold), ("eps", eps)):
        check_type(isinstance(number, (int, float)), EXIT, name, "be a number", type(number).__name__)
    if threshold != threshold:
        fail(EXIT, "threshold", "be a number", threshold)
    if not eps >= 0:
        fail(EXIT, "eps", "be at least 0", eps)
    check_int(EXIT, "min_recurrences", min_recurrences, 1, "A row that is new has nothing to be compared with.")


def fake_exit(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    check_exit(x, *rest)
    refuse_float64(EXIT, "x", x)
    shape = (x.shape[0], x.shape[1])
    return x.new_empty(x.shape), x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.bool)


def fake_advance(
    tokens: Tensor,
    predictions: Tensor,
    recurrences: Tensor,
    stable: Tensor,
    width: Tensor,
    cursor: Tensor,
    advance: Tensor,
    steps: Tensor,
    remaining: Tensor,
    settled: Tensor | None,
    inner_recurrence: int,
    max_wavefront: int,
    max_recurrences: int,
    stability: int,
    rule: str,
    headway: int,
    filler: Tensor | None = None,
    end_tokens: Tensor | None = None,
    guard: bool = True,
    keep_last: bool = False,
) -> None:
    check_index(ADVANCE, "tokens", tokens, (None, None), None)
    device, batch, room = tokens.device, tokens.shape[0], tokens.shape[1] - 1
    check_index(ADVANCE, "recurrences", recurrences, (batch, room), device)
    check_index(ADVANCE, "stable", stable, (batch, room), device)
    check_index(ADVANCE, "predictions", predictions, (batch, None), device)
    rows = predictions.shape[1]
    if rows > room:
        fail(ADVANCE, "predictions", f"have at most {room} columns", tuple(predictions.shape))
    vectors = (("width", width), ("cursor", cursor), ("advance", advance), ("steps", steps), ("remaining", remaining))
    for name, vector in vectors:
        check_index(ADVANCE, name, vector, (batch,), device)
    check_own_places(ADVANCE, tokens=tokens, recurrences=recurrences, stable=stable, **dict(vectors))
    if settled is not None:
        check_type(isinstance(settled, Tensor), ADVANCE, "settled", "be a tensor", type(settled).__name__)
        check_type(settled.dtype == torch.bool, ADVANCE, "settled", "be a bool tensor", settled.dtype)
        if settled.shape != predictions.shape:
            fail(ADVANCE, "settled", f"have shape {tuple(predictions.shape)} like predictions", tuple(settled.shape))
        if settled.device != device:
            fail(ADVANCE, "settled", f"be on {device}", settled.device, f"Move it with .to({str(device)!r}).")
    from_one = (("inner_recurrence", inner_recurrence, 1), ("headway", headway, 1))
    for name, number, least in (*from_one, ("max_recurrences", max_recurrences, 0), ("stability", stability, 0)):
        check_int(ADVANCE, name, number, least)
    _flag(ADVANCE, "guard", guard)
    _flag(ADVANCE, "keep_last", keep_last)
    if max_wavefront > room:
        fail(ADVANCE, "max_wavefront", f"be at most the {room} rows there is room for", max_wavefront)
    if filler is not None:
        check_index(ADVANCE, "filler", filler, (batch, headway - 1), device)
    if end_tokens is not None:
        check_index(ADVANCE, "end_tokens", end_tokens, (None,), device)
