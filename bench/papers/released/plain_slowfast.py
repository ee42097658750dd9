"""SlowFast Sampling as released, as plainly as it can be written: the loops for LLaDA and for Dream.

Source: the code released with "Accelerating Diffusion Large Language Models with Slow Fast Sampling".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import pvariance
from statistics import variance as unbiased
from typing import Any

from pdkernels.reference.masked_sampling import Canvas, Guesses, MaskedResult, Window, surest
from pdkernels.reference.slowfast import slowfast


def released_slowfast(
    model: Any,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    loop: str = "llada",
    tau_explore: float | None = None,
    tau_high: float = 0.85,
    block_size: int | None = None,
    **options: Any,
) -> MaskedResult:
    """:func:`pdkernels.reference.slowfast.slowfast` with the slow phase of a released loop; equality reaches both thresholds.

    "llada": the span ends as for ``cycle="last"``. No slow phase ends early: if the notes are stable no more are taken, but
    `max_exploration` forwards are made, even of a full block. Slow forwards commit all guesses that reach `tau_explore` (None:
    `tau_high`), or else the `k_slow` best ones; the code's "two or more, else the best one" is the same.

    "dream", whose settings are ``max_exploration=6, tau_min=0.1, tau_explore=0.8, tau_high=0.9``: the same, but notes of 0 precede the
    first one, the unbiased variance may equal `variance`, the mean is rounded, and the slow phase ends with the last mask of the block.
    A mean before the cycle's start, where that code would not go on, is one position after it.

    Where the released code differs otherwise: in a batch a full span still takes a position of confidence -inf and overwrites its
    token. It stores the logits of the suffix that it leaves out and never commits by them; here they are not kept. Its softmax
    is in the model's dtype. Its cycles are at most 256.
    """
    explored = partial(
        _horizon,
        dream=loop == "dream",
        tau_explore=tau_high if tau_explore is None else tau_explore,
        block_size=block_size or max(max_new_tokens, 1),
    )
    given = {"tau_high": tau_high, "block_size": block_size, "explored": explored, "strict": False}
    return slowfast(model, prompt, max_new_tokens, **given, **options)


def _horizon(
    canvas: Canvas,
    look: Callable[[], Guesses],
    span: Window,
    *,
    max_exploration: int,
    window: int,
    variance: float,
    tau_min: float,
    k_slow: int,
    cycle: str,
    dream: bool,
    tau_explore: float,
    block_size: int,
) -> int:
    """See :func:`pdkernels.reference.slowfast.horizon`."""
    start, stop = span
    origin = start - (start - canvas.start) % block_size  # of the block, from which notes count
    ends = [0] * window if dream else []
    stable = False
    for _ in range(max_exploration):
        if canvas.done or (dream and not canvas.masks(span)):
            break
        guesses = look()
        if not stable:
            clear = [p for p, c in guesses.confidence.items() if c >= tau_min]
            ends.append(max(clear, default=start) + 1 - origin)
            recent = ends[-window:]
            if dream:
                stable = window > 1 and unbiased(recent) <= variance
            else:
                stable = len(ends) >= window and pvariance(recent) < variance
        canvas.commit(guesses, surest(guesses.confidence, threshold=tau_explore, quota=k_slow), span)
    recent = ends[-window:]
    if not recent or max_exploration == 0:
        return stop
    if stable:
        return origin + recent[-1]
    if dream:
        return max(origin + round(sum(recent) / len(recent)), start + 1)
    return origin + sum(recent) // len(recent)
