"""The length of a draft that pays: from the cost of rows on this machine, and from what was accepted so far.

A draft of r rows is worth the tokens it is expected to give, by the running acceptance at each of its places, over the cost of its
step. A row costs time even if it is rejected, so the best length may be 1: no draft. All of it is a few small tensor operations per
sequence, on the device, so a step still needs no host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

KEPT = 0.97  # of the counts, with each step: what is known fades, so that drafts are tried again
HOPE, WEIGHT = 0.75, 1.0  # share and weight of imagined acceptances, which are all that is known at first
SLACK = 0.01  # of the time of decoding token by token that rejected drafts may cost
CREDIT = 1.0  # forwards of one row that they may cost before anything is gained


class Lengths:
    """Chooses the lengths of drafts of `batch` sequences.

    Args:
        costs: of a step with 1, 2, .. rows, drafting included, in any unit; the first is that of decoding token by token.

    The cost of all steps never exceeds ``1 + SLACK`` times that of decoding the same tokens one by one, plus `CREDIT` forwards: a draft is
    only made if that would hold without any of it being accepted.

    >>> lengths = Lengths([1.0, 1.1, 1.2, 1.3], 1, torch.device("cpu"))
    >>> for _ in range(20):
    ...     width = lengths.choose()
    ...     lengths.update(width, width)  # everything is accepted
    >>> lengths.choose().tolist()
    [4]
    """

    def __init__(self, costs: Sequence[float], batch: int, device: torch.device) -> None:
        self.costs = torch.tensor(costs, dtype=torch.float64, device=device)
        places = len(costs) - 1
        self.seen = torch.zeros(batch, 2, places, dtype=torch.float64, device=device)
        """How often each place of a draft was accepted, and how often it was reached, fading."""
        self.balance = torch.zeros(batch, dtype=torch.float64, device=device)
        """What may still be lost."""
        self._place = torch.arange(1, places + 1, device=device)
        self.clear()

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        return self.seen, self.balance

    def clear(self) -> None:
        """Forgets all sequences."""
        self.seen.zero_()
        self.balance.fill_(CREDIT).mul_(self.costs[0])

    def choose(self) -> torch.Tensor:
        """``(batch,)`` int64: rows of the next draft, the known token included."""
        hits, tries = self.seen.unbind(1)
        reached = ((hits + HOPE * WEIGHT) / (tries + WEIGHT)).cumprod(1)
        tokens = 1 + torch.nn.functional.pad(reached, (1, 0)).cumsum(1)
        worth = tokens / self.costs
        affordable = self.costs - self.costs[0] * (1 + SLACK) <= self.balance[:, None]
        affordable[:, 0] = True
        best = worth.masked_fill(~affordable, -torch.inf).argmax(1)
        return best + 1

    def update(self, rows: torch.Tensor, accepted: torch.Tensor) -> None:
        """After a step whose drafts had `rows` ``(batch,)`` tokens, of which `accepted` were; 0 in a finished sequence."""
        live = rows > 0
        reached = (self._place < rows[:, None]) & (self._place <= accepted[:, None])
        right = self._place < accepted[:, None]
        self.seen.mul_(KEPT)
        self.seen[:, 0] += reached & right
        self.seen[:, 1] += reached
        spent = self.costs[(rows - 1).clamp(min=0)]
        self.balance += (accepted * self.costs[0] * (1 + SLACK) - spent) * live
