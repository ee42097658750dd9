"""The length of a draft that pays: from the cost of rows on this machine, and from what was accepted so far.

A draft of r rows is worth the tokens it is expected to give, by the running acceptance at each of its places, over the cost of its
step. A row costs time even if it is rejected, so the best length may be 1: no draft. All of it is a few small tensor operations per
sequence, on the device, so a step still needs no host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

KEPT = 0.97  # of the counts, with each step: what is known fades, so that drafts are tried again
HOPE, WEIGHT = 0.75, 1.0  # share and weight of imagined acceptances, which are all that is known at first
# What rejected drafts may cost: a share of the time of decoding token by token, and forwards of one row before anything is gained. A step of
# two rows, which may cost half a forward more, can be tried at once, and from 31 steps on no text falls below 0.98 of that speed.
SLACK, CREDIT = 0.005, 0.47


class Lengths:
    """Chooses the lengths of drafts of `batch` sequences.

    Args:
        costs: of a step with 1, 2, .. rows, drafting included, in any unit; the first is that of decoding token by token.
        wake: what a step of one row costs in addition if it keeps what a drafter reads of it. Without that there is no draft in the
            next step, so the first draft after steps of one row comes a step later.

    The cost of all steps never exceeds ``1 + SLACK`` times that of decoding the same tokens one by one, plus `CREDIT` forwards: a draft is
    only made if that would hold without any of it being accepted.

    >>> lengths = Lengths([1.0, 1.1, 1.2, 1.3], 1, torch.device("cpu"))
    >>> for _ in range(20):
    ...     width = lengths.choose()
    ...     lengths.update(width, width)  # everything is accepted
    >>> lengths.choose().tolist()
    [4]
    """

    def __init__(self, costs: Sequence[float], batch: int, device: torch.device, wake: float = 0.0) -> None:
        self.wake = wake
        self.costs = torch.tensor(costs, dtype=torch.float64, device=device)
        self.seen = torch.zeros(batch, 2, len(costs), dtype=torch.float64, device=device)
        """How often each place of a draft was accepted, and how often it was reached, fading. The first is the known token's."""
        self.balance = torch.zeros(batch, dtype=torch.float64, device=device)
        """What may still be lost."""
        self.ready = torch.ones(batch, dtype=torch.bool, device=device)
        """Whether the last row was kept for the drafter."""
        prices = torch.tensor([costs[0] * (1 + SLACK), wake], dtype=torch.float64, device=device)
        over = self.costs - prices[0]
        over[0] = -torch.inf
        hope = torch.full_like(self.costs, HOPE * WEIGHT)
        hope[0] = WEIGHT
        # A step costs a few arrays of a handful of numbers, for which NumPy takes a fifth of PyTorch's time. Both have these operations.
        self._numpy: Any = _numpy() if device.type == "cpu" else None
        tensors = [self.costs, self.seen, self.balance, self.ready, over, hope]
        tensors += [torch.arange(len(costs), device=device), prices]
        self._arrays: tuple[Any, ...] = tuple(map(self._array, tensors))
        self._where: Any = (self._numpy or torch).where
        self.clear()

    def _array(self, tensor: torch.Tensor) -> Any:
        return tensor if self._numpy is None else tensor.numpy()

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        return self.seen, self.balance, self.ready

    def clear(self) -> None:
        """Forgets all sequences."""
        self.seen.zero_(), self.ready.fill_(True)
        self.balance.fill_(CREDIT).mul_(self.costs[0])

    def choose(self) -> torch.Tensor:
        """``(batch,)`` int64: rows of the next draft, the known token included."""
        costs, seen, balance, ready, over, hope, _, prices = self._arrays
        reached = ((seen[:, 0] + hope) / (seen[:, 1] + WEIGHT)).cumprod(1)
        left = balance - prices[1] * ~ready if self.wake else balance
        worth = self._where(over <= left[:, None], reached.cumsum(1) / costs, -math.inf)
        return torch.as_tensor(worth.argmax(1) + 1)

    def update(self, rows: torch.Tensor, accepted: torch.Tensor) -> None:
        """After a step whose drafts had `rows` ``(batch,)`` tokens, of which `accepted` were; 0 in a finished sequence.

        `ready` says by now what holds after the step.
        """
        costs, seen, balance, ready, _, _, place, prices = self._arrays
        own, right = self._array(rows), self._array(accepted)
        reached = (place < own[:, None]) & (place <= right[:, None])
        seen *= KEPT
        seen[:, 0] += reached & (place < right[:, None])
        seen[:, 1] += reached
        spent = costs[(own - 1).clip(0)]
        if self.wake:
            spent = spent + prices[1] * (ready & (own == 1))
        balance += (right * prices[0] - spent) * (own > 0)


def _numpy() -> Any:
    """NumPy, if it is installed."""
    try:
        import numpy
    except ImportError:
        return None
    return numpy
