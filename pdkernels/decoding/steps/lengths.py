"""The lengths of drafts that pay: from the cost of the whole batch's step on this machine, and from what was accepted so far.

A guess is worth the probability that it is accepted, by the running acceptance at its place and those before it. A row
costs time even if it is rejected, and among many sequences all of it, so the best length may be 1: no draft. Rows go to
the likeliest guesses of all sequences, as many as pay for the batch. One op on the device counts and chooses
(`pdkernels.draft_lengths_`), so a step still needs no host.
"""

from __future__ import annotations

from typing import Any

import torch

from pdkernels.decoding.costs import StepCosts
from pdkernels.ops import draft_lengths_

KEPT = 0.97  # of the counts, with each step: what is known fades, so that drafts are tried again
SLACK = 0.005  # share of the time of decoding token by token that rejected drafts may cost


class Lengths:
    """Chooses the lengths of drafts of `batch` sequences.

    Args:
        costs: of the steps of such a batch.
        slots: tokens of the longest draft, the known one included.
        padded: whether a step has rows for the longest draft in all sequences.

    The cost of all steps never exceeds ``1 + SLACK`` times that of decoding the same tokens one by one, plus
    `StepCosts.credit` steps for each sequence: a draft is only made if that would hold without any of it being accepted.

    >>> costs = StepCosts.of_rows([1.0, 1.1, 1.2, 1.3])
    >>> lengths, rows, left = Lengths(costs, 4, 1, torch.device("cpu")), torch.tensor([0]), torch.tensor([99])
    >>> for _ in range(20):
    ...     lengths.choose_(rows, rows.clone(), left)  # everything is accepted
    >>> rows.tolist()
    [4]
    """

    def __init__(self, costs: StepCosts, slots: int, batch: int, device: torch.device, *, padded: bool = False) -> None:
        self.seconds = torch.tensor([costs.plain, costs.drafting], dtype=torch.float64, device=device)
        self.credit, plain = costs.credit, costs.plain[0]
        self.options: dict[str, Any] = {
            "warmup_cost": costs.wake / plain,
            "sequence_cost": costs.sequence,
            "guess_cost": costs.guess,
            "decay": KEPT,
            "prior": costs.hope,
            "max_slowdown": SLACK,
            "padded": padded,
        }
        self.seen = torch.zeros(batch, 2, slots, dtype=torch.float64, device=device)
        """How often each place of a draft was accepted, and how often it was reached, fading. The first is the known
        token's."""
        self.balance = torch.zeros(batch, dtype=torch.float64, device=device)
        """What may still be lost, in tokens that are decoded one by one."""
        self.ready = torch.ones(batch, dtype=torch.bool, device=device)
        """Whether the last row was kept for the drafter."""
        self.clear()

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        return self.seen, self.balance, self.ready

    def clear(self) -> None:
        """Forgets all sequences."""
        self.seen.zero_(), self.ready.fill_(True), self.balance.fill_(self.credit)

    def choose_(self, rows: torch.Tensor, accepted: torch.Tensor, remaining: torch.Tensor) -> None:
        """Counts a step whose drafts had `rows` ``(batch,)`` tokens, of which `accepted` were: 0 in a finished
        sequence, and before the first draft. Then `rows` become those of the next draft, the known token included, at
        most the `remaining`.

        `ready` says by now what holds after the step.
        """
        draft_lengths_(rows, accepted, remaining, self.seen, self.balance, self.ready, self.seconds, **self.options)

    def pause_(self, rows: torch.Tensor, remaining: torch.Tensor, most: int) -> int:
        """Counts steps of one sequence in which nothing is drafted, before they run, until a draft pays; returns how
        many there are, `most` at most. `rows` ``(1,)`` are then those of the draft after them.

        `remaining` is that before these steps. None of them keeps its row for the drafter.
        """
        self.ready.zero_()
        accepted = torch.ones_like(rows)
        for steps in range(1, most + 1):
            self.choose_(rows.fill_(1), accepted, (remaining - steps).clamp(min=0))
            if int(rows) != 1:
                return steps
        return most
