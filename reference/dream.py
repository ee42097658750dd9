"""Dream's sampler: times from 1 down to eps determine the number of masks to fill; a score or a random order selects them.

Source: "Dream 7B: Diffusion Large Language Models" and the sampler published with it, which SlowFast Sampling and Planned
Diffusion build on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from .autoregressive import Model
from .masked_sampling import (
    Canvas,
    Guesses,
    MaskedResult,
    bidirectional,
    guess,
    margin,
    negative_entropy,
    probability,
    surest,
    timesteps,
)
from .unmask import random_order

SCORES = {
    "origin": probability,
    "maskgit_plus": probability,
    "topk_margin": margin,
    "entropy": negative_entropy,
    "confidence_threshold": probability,
}


def time_quota(masks: int, time: float, after: float) -> int:
    """How many of `masks` are filled between two times: each with probability ``1 - after / time``, the total rounded down.

    >>> time_quota(10, 0.5, 0.3)
    4
    """
    return int(masks * (1 - after / time))


@torch.no_grad()
def dream(
    model: Model,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    mask_token: int,
    steps: int | None = None,
    algorithm: str = "entropy",
    eps: float = 1e-3,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    order_temperature: float = 0.0,
    threshold: float = 0.9,
    end_tokens: Sequence[int] = (),
    seed: int = 0,
) -> MaskedResult:
    """Runs `steps` forwards over the whole canvas: forward i commits :func:`time_quota` positions, the last one all that are left.

    The scores are those of the distribution that the guess is sampled from, tempered and filtered. A forward may commit nothing:
    with as many steps as tokens the first one commits nothing, and the last one commits two.

    Where the published code differs: it counts and ranks the masks of a whole batch together. Its entropy has 1e-10 in the
    logarithm, and its filter cuts between ties (masked_sampling.py).

    Args:
        model, prompt, max_new_tokens, mask_token, end_tokens, seed: as in :func:`~pdkernels.reference.llada.llada`.
        steps: forwards; None: as many as tokens.
        algorithm: "maskgit_plus": the probability of the guess; "topk_margin": how far the most probable token is ahead of the
            second; "entropy": the negative entropy of the distribution; "origin": every mask is filled at random, with probability
            1 - s / t between the times t and s, if its uniform number (unmask.py) is at least s / t. The trace has
            that number as confidence. "confidence_threshold" (of Fast-dLLM's sampler for Dream): all guesses whose probability
            reaches `threshold`, and the best one anyway; the times count for nothing.
        eps: the last time.
        temperature, top_p, top_k: of the distribution; the filters also apply at temperature 0. `top_p` uses the distribution
            of all tokens.
        order_temperature: 0 takes the best scores. Above 0, positions are drawn without replacement from
            softmax(score / order_temperature): the best ones of ``score / order_temperature - ln(-ln u)``, which the trace reports
            as confidence, where u is the position's uniform number. It must be 0 for "origin".

    >>> said = lambda tokens, positions, mask: torch.eye(9, dtype=torch.float64)[positions % 8] * (9.0 - positions[..., None])
    >>> result = dream(said, [0, 1], 4, mask_token=8)
    >>> result.tokens, [list(step.committed) for step in result.trace]
    ([2, 3, 4, 5], [[], [2], [3], [4, 5]])
    """
    op = "pdkernels.dream"
    if algorithm not in SCORES:
        raise ValueError(f"{op}: algorithm must be one of {tuple(SCORES)}, got {algorithm!r}.")
    if algorithm == "origin" and order_temperature != 0:
        raise ValueError(f"{op}: order_temperature must be 0 where chance decides, got {order_temperature}.")
    steps = max_new_tokens if steps is None else steps
    if steps < 1 and max_new_tokens > 0:
        raise ValueError(f"{op}: steps must be at least 1, got {steps}.")
    canvas = Canvas(prompt, max_new_tokens, mask_token, end_tokens)
    forward, window = bidirectional(model), (canvas.start, canvas.end)
    for step, (time, after) in enumerate(itertools.pairwise(timesteps(steps, eps) if max_new_tokens else ())):
        if canvas.done:
            break
        canvas.forwards += 1
        guesses = guess(
            canvas,
            forward(canvas.tokens),
            window,
            temperature=temperature,
            seed=seed,
            distribution="sampling",
            top_p=top_p,
            top_k=top_k,
            score=SCORES[algorithm],
        )
        uniform = dict(zip(guesses.tokens, random_order(seed, canvas.forwards, list(guesses.tokens))))
        if algorithm == "origin":
            guesses = Guesses(guesses.tokens, uniform)
        elif order_temperature > 0:
            noisy = {p: c / order_temperature - math.log(-math.log(uniform[p])) for p, c in guesses.confidence.items()}
            guesses = Guesses(guesses.tokens, noisy)
        if step == steps - 1:
            chosen = list(guesses.tokens)
        elif algorithm == "confidence_threshold":
            chosen = surest(guesses.confidence, threshold=threshold, quota=1)
        elif algorithm == "origin":
            chosen = [p for p, u in uniform.items() if u >= after / time]
        else:
            chosen = surest(guesses.confidence, quota=time_quota(len(guesses.tokens), time, after))
        canvas.commit(guesses, chosen, window)
    return canvas.result()
