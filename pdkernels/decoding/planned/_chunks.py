"""How many masks of each chunk a step of planned diffusion commits.

All chunks of a round share one clock, set by the longest; each chunk has its own shares. "published" is the released schedule:
its times end at 0.001, so a step may commit one token too few and the last step commits what is left. A chunk of l tokens takes
about min(l, steps) steps, regardless of the ratio.
"""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["published", "even"]

_LAST_TIME = 1e-3


def steps_of(longest: int, ratio: float, schedule: Schedule) -> int:
    """Steps for a round whose longest chunk has this many masks; at least one, if it has any.

    >>> steps_of(10, 0.25, "published"), steps_of(10, 0.25, "even"), steps_of(2, 0.25, "published"), steps_of(0, 1.0, "even")
    (2, 3, 1, 0)
    """
    if longest == 0:
        return 0
    return max(1, int(longest * ratio) if schedule == "published" else math.ceil(longest * ratio))


def quota(masks: int, step: int, steps: int, schedule: Schedule) -> int:
    """How many of the masks left in a chunk step number `step` of `steps` commits.

    >>> def commits(masks, steps, schedule, found=()):
    ...     count = quota(masks, len(found), steps, schedule)
    ...     return [*found, count] if count == masks else commits(masks - count, steps, schedule, [*found, count])
    >>> commits(40, 10, "published"), commits(40, 10, "even")
    ([3, 4, 4, 4, 4, 4, 4, 4, 4, 5], [4, 4, 4, 4, 4, 4, 4, 4, 4, 4])
    """
    if step >= steps - 1:
        return masks
    if schedule == "even":
        return -(-masks // (steps - step))
    share = 1 - _time(step + 1, steps) / _time(step, steps)
    return min(masks, max(1, int(masks * share)))


def _time(step: int, steps: int) -> float:
    """Falls from 1 in equal steps."""
    return 1 + (_LAST_TIME - 1) * step / steps


def candidates(masks: int, step: int, steps: int, refused: int) -> int:
    """How many of a chunk's masks the published threshold rule looks at: the step's share plus what the previous step rejected.

    The released code may request more than there are.

    >>> candidates(40, 0, 20, 0), candidates(9, 25, 20, 3), candidates(9, 25, 20, 30)
    (2, 4, 9)
    """
    share = max(1, masks // (steps - step)) if step < steps else 1
    return min(masks, share + refused)
