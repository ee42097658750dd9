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
    seen: Tensor,
    balance: Tensor,
    ready: Tensor,
    costs: Tensor,
    wake: float = 0.0,
    kept: float = 0.97,
    hope: float = 0.75,
    slack: float = 0.005,
) -> None:
    """Shapes as in ``pdkernels.draft_lengths_``."""
    prices: list[float] = costs.tolist()
    slots, price = len(prices), prices[0] * (1 + slack)
    for name, each in (("lengths", lengths), ("accepted", accepted)):
        for b, value in enumerate(each.tolist()):
            most = slots if name == "lengths" else int(lengths[b])
            if not 0 <= value <= most:
                raise ValueError(
                    f"pdkernels.draft_lengths_: {name} must be in [0, {most}], got {value} for sequence {b}."
                )
    for b in range(len(lengths)):
        own, right = int(lengths[b]), int(accepted[b])
        counts, reached = ([kept * value for value in row] for row in seen[b].tolist())
        for place in range(own):
            counts[place] += place < right
            reached[place] += place <= right
        left = float(balance[b])
        if own > 0:
            left += right * price - prices[own - 1] - (wake if own == 1 and ready[b] else 0.0)
        seen[b] = seen.new_tensor([counts, reached])
        balance[b] = left

        most_worth, chosen = -math.inf, 1
        chance, expected = 1.0, 0.0
        for place in range(slots):
            chance *= (counts[place] + (hope if place else 1.0) * WEIGHT) / (reached[place] + WEIGHT)
            expected += chance
            affordable = place == 0 or prices[place] - price <= (left if ready[b] else left - wake)
            if affordable and expected / prices[place] > most_worth:
                most_worth, chosen = expected / prices[place], place + 1
        lengths[b] = max(0, min(chosen, int(remaining[b])))
