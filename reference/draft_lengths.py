"""The length of a draft that pays, in plain Python: from what rows cost, and from what was accepted so far.

Source: Liu et al., "Optimizing speculative decoding for serving large language models using goodput" (arXiv 2406.14066): the length
with the most expected tokens for its time. Here it is also bounded by what may still be lost.
"""

from __future__ import annotations

import math

from torch import Tensor

WEIGHT = 1.0  # of imagined drafts, which are all that is known at first


def draft_lengths_(
    lengths: Tensor,
    accepted: Tensor,
    remaining: Tensor,
    acceptance_counts: Tensor,
    budget: Tensor,
    ready: Tensor,
    costs: Tensor,
    warmup_cost: float = 0.0,
    decay: float = 0.97,
    prior: float = 0.75,
    max_slowdown: float = 0.005,
) -> None:
    """Shapes as in ``pdkernels.draft_lengths_``."""
    prices: list[float] = costs.tolist()
    slots, price = len(prices), prices[0] * (1 + max_slowdown)
    for name, each in (("lengths", lengths), ("accepted", accepted)):
        for b, value in enumerate(each.tolist()):
            most = slots if name == "lengths" else int(lengths[b])
            if not 0 <= value <= most:
                raise ValueError(
                    f"pdkernels.draft_lengths_: {name} must be in [0, {most}], got {value} for sequence {b}."
                )
    for b in range(len(lengths)):
        length, correct = int(lengths[b]), int(accepted[b])
        counts, reached = ([decay * value for value in row] for row in acceptance_counts[b].tolist())
        for place in range(length):
            counts[place] += place < correct
            reached[place] += place <= correct
        balance = float(budget[b])
        if length > 0:
            balance += correct * price - prices[length - 1] - (warmup_cost if length == 1 and ready[b] else 0.0)
        acceptance_counts[b] = acceptance_counts.new_tensor([counts, reached])
        budget[b] = balance

        most_worth, chosen = -math.inf, 1
        chance, expected = 1.0, 0.0
        for place in range(slots):
            chance *= (counts[place] + (prior if place else 1.0) * WEIGHT) / (reached[place] + WEIGHT)
            expected += chance
            affordable = place == 0 or prices[place] - price <= (balance if ready[b] else balance - warmup_cost)
            if affordable and expected / prices[place] > most_worth:
                most_worth, chosen = expected / prices[place], place + 1
        lengths[b] = max(0, min(chosen, int(remaining[b])))
