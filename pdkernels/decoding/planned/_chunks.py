"""How many masks of each chunk a step of planned diffusion commits.

All chunks of a round share one clock, set by the longest; each chunk has its own shares. A chunk of l tokens takes
about min(l, steps) steps, regardless of the ratio.
"""

from __future__ import annotations

import math


def steps_of(longest: int, ratio: float) -> int:
    """Steps for a round whose longest chunk has this many masks; at least one, if it has any.

    >>> steps_of(10, 0.25), steps_of(2, 0.25), steps_of(0, 1.0)
    (3, 1, 0)
    """
    return math.ceil(longest * ratio)


def quota(masks: int, step: int, steps: int) -> int:
    """How many of the masks left in a chunk step number `step` of `steps` commits.

    >>> quota(7, 0, 3), quota(4, 1, 3), quota(2, 2, 3)
    (3, 2, 2)
    """
    return -(-masks // (steps - step))
