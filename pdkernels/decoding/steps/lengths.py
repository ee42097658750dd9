"""The length of a draft that pays: from the cost of rows on this machine, and from what was accepted so far.

A draft of r rows is worth the tokens it is expected to give, by the running acceptance at each of its places, over the
cost of its step. A row costs time even if it is rejected, so the best length may be 1: no draft. One op on the device
counts and chooses (`pdkernels.draft_lengths_`), so a step still needs no host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pdkernels.ops import draft_lengths_

KEPT = 0.97  # of the counts, with each step: what is known fades, so that drafts are tried again
HOPE = 0.75  # share of acceptances in one imagined draft, which is all that is known at first
# What rejected drafts may cost: a share of the time of decoding token by token, and forwards of one row before anything
# is gained. A step of two rows, which may cost half a forward more, can be tried at once, and from 31 steps on no text
# falls below 0.98 of that speed.
SLACK, CREDIT = 0.005, 0.47


class Lengths:
    """Chooses the lengths of drafts of `batch` sequences.

    Args:
        costs: of a step with 1, 2, .. rows, drafting included, in any unit; the first is that of decoding token by
            token.
        wake: what a step of one row costs in addition if it keeps what a drafter reads of it. Without that there is no
            draft in the next step, so the first draft after steps of one row comes a step later.

    The cost of all steps never exceeds ``1 + SLACK`` times that of decoding the same tokens one by one, plus `CREDIT`
    forwards: a draft is only made if that would hold without any of it being accepted.

    >>> lengths, rows, left = Lengths([1.0, 1.1, 1.2, 1.3], 1, torch.device("cpu")), torch.tensor([0]), torch.tensor([99])
    >>> for _ in range(20):
    ...     lengths.choose_(rows, rows.clone(), left)  # everything is accepted
    >>> rows.tolist()
    [4]
    """

    def __init__(self, costs: Sequence[float], batch: int, device: torch.device, wake: float = 0.0) -> None:
        self.wake = wake
        self.costs = torch.tensor(costs, dtype=torch.float64, device=device)
        self.seen = torch.zeros(batch, 2, len(costs), dtype=torch.float64, device=device)
        """How often each place of a draft was accepted, and how often it was reached, fading. The first is the known
        token's."""
        self.balance = torch.zeros(batch, dtype=torch.float64, device=device)
        """What may still be lost."""
        self.ready = torch.ones(batch, dtype=torch.bool, device=device)
        """Whether the last row was kept for the drafter."""
        self.clear()

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        return self.seen, self.balance, self.ready

    def clear(self) -> None:
        """Forgets all sequences."""
        self.seen.zero_(), self.ready.fill_(True)
        self.balance.fill_(CREDIT).mul_(self.costs[0])

    def choose_(self, rows: torch.Tensor, accepted: torch.Tensor, remaining: torch.Tensor) -> None:
        """Counts a step whose drafts had `rows` ``(batch,)`` tokens, of which `accepted` were: 0 in a finished
        sequence, and before the first draft. Then `rows` become those of the next draft, the known token included, at
        most the `remaining`.

        `ready` says by now what holds after the step.
        """
        last = rows, accepted, remaining, self.seen, self.balance, self.ready, self.costs
        draft_lengths_(*last, warmup_cost=self.wake, decay=KEPT, prior=HOPE, max_slowdown=SLACK)
