"""The costs by which ``block_size="auto"`` chooses lengths: measured times of forwards on this machine."""

from __future__ import annotations

from typing import Any, Literal

from pdkernels._validation import check, check_type, refuse
from pdkernels.decoding.row_times import kept_row_times
from pdkernels.generation.noise import checked_size

BlockSize = int | Literal["auto"]


def checked_block_size(op: str, value: BlockSize, most: int) -> tuple[int, bool]:
    """The size, `most` for "auto", and whether lengths are to be chosen."""
    if isinstance(value, str):  # arrays and the like have an == of their own
        check(value == "auto", op, "block_size", "be an int or 'auto'", repr(value))
        return most, True
    check_type(type(value) is int, op, "block_size", "be an int or 'auto'", type(value).__name__)
    return checked_size(op, "block_size", value), False


def step_costs(model: Any, slots: int, guess: float = 0.0, draft: float = 0.0) -> list[float]:
    """Seconds of steps with 1 .. `slots` rows, of which each but the first takes `guess` seconds to draft, or all of
    them `draft`."""
    if slots == 1:  # nothing to choose, and so nothing to measure
        return [1.0]
    inner = getattr(model, "model_itself", model)  # without filters, whose functions expect the texts of the call
    fault = "block_size='auto' would choose by times that differ between ranks"
    refuse(hasattr(inner, "ranks"), "decoding", fault, "Give a number.")
    times = kept_row_times(inner)
    return [times.between(rows) + guess * (rows - 1) + draft * (rows > 1) for rows in range(1, slots + 1)]


def guess_seconds(drafter: Any) -> float:
    """Seconds in which a drafter makes a guess."""
    return kept_row_times(drafter).between(1)


def draft_seconds(drafter: Any, rows: int) -> float:
    """Seconds in which a drafter makes all guesses of a block of `rows`."""
    return kept_row_times(drafter).between(rows)
