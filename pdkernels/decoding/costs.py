"""The costs by which ``block_size="auto"`` chooses lengths: measured times of forwards on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from pdkernels._validation import check, check_type, refuse
from pdkernels.generation.noise import checked_size
from pdkernels.generation.row_times import kept_row_times

BlockSize = int | Literal["auto"]


class StepCosts(NamedTuple):
    """Seconds of a batch's step, by all its rows: at index n those of ``n + 1`` rows."""

    plain: Sequence[float]
    """Of steps without a draft."""
    drafting: Sequence[float]
    """Of steps in which some sequence drafts."""
    sequence: float = 0.0
    """What each sequence after the first adds, beside its rows."""
    guess: float = 0.0
    """What a drafter takes for a guess."""
    packing: float = 0.0
    """What a step adds whose sequences have different numbers of rows, without padding."""
    wake: float = 0.0
    """What a step of one row costs in addition if it keeps what a drafter reads of it. Without that there is no draft
    in the next step, so the first draft after steps of one row comes a step later."""
    credit: float = 0.47
    """What rejected drafts may cost before anything is gained, in steps without a draft. A step of two rows, which may
    cost half of one more, can be tried at once, and with `SLACK` no text falls below 0.98 of the speed of decoding token
    by token from 31 steps on."""
    hope: float = 0.75
    """Share of acceptances in one imagined draft, which is all that is known at first."""

    @classmethod
    def of_rows(cls, seconds: Sequence[float], sequence: float = 0.0, guess: float = 0.0) -> StepCosts:
        """Of steps that are a forward, with drafts or without.

        >>> StepCosts.of_rows([1.0, 1.25]).drafting
        [1.0, 1.25]
        """
        return cls(seconds, seconds, sequence, guess)

    def of_block(self, batch: int, block: int, *, padded: bool = False) -> float:
        """What it costs each of `batch` sequences if all draft blocks of that size, in tokens as `draft_lengths_` counts
        them.

        >>> StepCosts.of_rows([1.0, 1.5]).of_block(1, 2)
        0.5
        """
        step = self.plain[batch - 1] + self.sequence * (batch - 1)
        token = step / batch
        if batch > 1 and not padded:
            token = (token + min(token, self.plain[batch - 1] - self.plain[batch - 2] + self.sequence)) / 2
        return (self.drafting[batch * block - 1] - self.plain[batch - 1]) / token / batch

    def later(self, draft: float, wake: float = 0.0) -> StepCosts:
        """With `draft` seconds for all drafts of a step, and those that a step takes to `wake` its drafter."""
        return self._replace(drafting=[step + draft for step in self.drafting], wake=wake)


def checked_block_size(op: str, value: BlockSize, most: int) -> tuple[int, bool]:
    """The size, `most` for "auto", and whether lengths are to be chosen."""
    if isinstance(value, str):  # arrays and the like have an == of their own
        check(value == "auto", op, "block_size", "be an int or 'auto'", repr(value))
        return most, True
    check_type(type(value) is int, op, "block_size", "be an int or 'auto'", type(value).__name__)
    return checked_size(op, "block_size", value), False


def step_costs(model: Any, slots: int, batch: int, guess: float = 0.0) -> StepCosts | None:
    """Of steps of `batch` sequences with up to `slots` rows each; None: there is nothing to choose, and so nothing to
    measure."""
    if slots == 1:
        return None
    inner = getattr(model, "model_itself", model)  # without filters, whose functions expect the texts of the call
    fault = "block_size='auto' would choose by times that differ between ranks"
    refuse(hasattr(inner, "ranks"), "decoding", fault, "Give a number.")
    times = kept_row_times(inner)
    seconds = [times.between(rows) for rows in range(1, batch * slots + 1)]
    costs = StepCosts.of_rows(seconds, times.sequence if batch > 1 else 0.0, guess)
    return costs._replace(packing=times.packing if batch > 1 else 0.0)


def guess_seconds(drafter: Any, batch: int) -> float:
    """Seconds in which a drafter makes a guess for one of `batch` sequences."""
    return kept_row_times(drafter).between(batch) / batch


def draft_seconds(drafter: Any, rows: int) -> float:
    """Seconds in which a drafter makes all guesses of a block of `rows`."""
    return kept_row_times(drafter).between(rows)
