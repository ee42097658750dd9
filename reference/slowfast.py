"""SlowFast Sampling: explore how far the model is confident, fill that span quickly, and continue after it.

Source: "Accelerating Diffusion Large Language Models with Slow Fast Sampling", section 3.3, and the code of its LLaDA sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import pvariance
from typing import cast

import torch

from .autoregressive import Model
from .dllm_cache import FeatureCache
from .masked_model import MaskedTransformerReference
from .masked_sampling import Canvas, Forward, Guesses, MaskedResult, Window, bidirectional, blocks, guess, surest


def horizon(
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
) -> int:
    """The slow phase between the start and the end of `span`; returns the end of the fast phase's span, after its start.

    `look` runs a forward and guesses every mask of the span.
    """
    start, stop = span
    ends = list[int]()  # candidates, each the position after the last confident one
    stable = False
    while len(ends) < max_exploration and canvas.masks(span) and not canvas.done and not stable:
        guesses = look()
        ends.append(max((p for p, c in guesses.confidence.items() if c > tau_min), default=start) + 1)
        stable = len(ends) >= window and pvariance(ends[-window:]) < variance
        canvas.commit(guesses, surest(guesses.confidence, quota=k_slow), span)
    recent = ends[-window:]
    if not recent:
        return stop
    return recent[-1] if stable and cycle == "last" else sum(recent) // len(recent)


@torch.no_grad()
def slowfast(
    model: Model | MaskedTransformerReference,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    mask_token: int,
    block_size: int | None = None,
    max_exploration: int = 8,
    window: int = 2,
    variance: float = 1.0,
    tau_min: float = 0.1,
    tau_high: float = 0.85,
    k_slow: int = 1,
    k_fast: int = 1,
    cycle: str = "last",
    drop_suffix: bool = True,
    prompt_interval: int | None = None,
    gen_interval: int = 1,
    transfer_ratio: float = 0.0,
    temperature: float = 0.0,
    end_tokens: Sequence[int] = (),
    seed: int = 0,
    explored: Callable[..., int] = horizon,
    strict: bool = True,
) -> MaskedResult:
    """Cycles of a slow and a fast phase, each starting where the last one ended, until a block has no mask.

    *Slow*, at most `max_exploration` forwards: note how far the guesses extend whose confidence exceeds `tau_min` (one position
    if none does), from the cycle's start to the block's end, and commit the `k_slow` most confident ones there. The phase is
    over when
    the population variance of the last `window` notes is below `variance`, or no mask is left. Only masks count: text already
    written has no confidence (the paper does not specify).

    *Fast*, until the span from the cycle's start to that end has no mask: commit all guesses in it whose confidence exceeds
    `tau_high`; if none does, the `k_fast` most confident ones.

    The paper contradicts itself on the end of the span: equation 9 takes the mean of the last `window` notes, the sentences
    after it the last note if they are stable, and a position to be determined conservatively if not. cycle="mean" is the
    equation, rounded down to a position; cycle="last" the sentences, where the conservative position is that mean, as in the code.

    The released loops differ: see docs/papers/released.md.

    Args:
        model, prompt, max_new_tokens, mask_token, temperature, end_tokens, seed: as in
            :func:`~pdkernels.reference.llada.llada`.
        block_size: positions of a block; None: a single block, as in the paper.
        max_exploration: K_max. With 0 the span is the whole block.
        window: W_hist, at least 1.
        variance: sigma squared, below which the last notes are stable. With the paper's, two notes may be one position apart.
        tau_min, tau_high: of the slow and the fast phase.
        k_slow, k_fast: never given by the paper; 1 in the code. k_fast is at least 1.
        cycle: "last" or "mean".
        drop_suffix: the fast forwards of a cycle, except its first, leave out everything after the span. That is what the
            paper's out-of-span caching amounts to in the code; the span no longer attends to the masks after it, so results change.
        prompt_interval, gen_interval, transfer_ratio: of a :class:`~pdkernels.reference.dllm_cache.FeatureCache` that all
            forwards go through; needs a model with parts (masked_model.py). None: no cache. A forward without the suffix
            leaves the cached rows of the suffix unchanged.
        explored: the slow phase, :func:`horizon` or one like it.
        strict: whether a fast step fills only what exceeds `tau_high`, not what equals it.

    >>> said = lambda tokens, positions, mask: torch.eye(9, dtype=torch.float64)[positions % 8] * (8.0 - positions[..., None])
    >>> result = slowfast(said, [0, 1], 5, mask_token=8, tau_min=0.5)
    >>> result.tokens, [(step.window, list(step.committed)) for step in result.trace]
    ([2, 3, 4, 5, 6], [((2, 7), [2]), ((2, 7), [3]), ((2, 7), [4]), ((2, 7), [5]), ((2, 7), [6])])
    """
    op = "pdkernels.slowfast"
    if cycle not in ("last", "mean"):
        raise ValueError(f"{op}: cycle must be 'last' or 'mean', got {cycle!r}.")
    sizes = {
        "max_exploration": (max_exploration, 0),
        "window": (window, 1),
        "k_slow": (k_slow, 0),
        "k_fast": (k_fast, 1),
    }
    for name, (value, minimum) in sizes.items():
        if value < minimum:
            raise ValueError(f"{op}: {name} must be at least {minimum}, got {value}.")
    canvas = Canvas(prompt, max_new_tokens, mask_token, end_tokens)
    if prompt_interval is None:
        if gen_interval != 1 or transfer_ratio != 0:
            actual = f"{gen_interval} and {transfer_ratio}"
            raise ValueError(
                f"{op}: gen_interval and transfer_ratio must be 1 and 0 without prompt_interval, got {actual}."
            )
        forward: Forward = bidirectional(model)
    else:
        forward = FeatureCache(
            cast(MaskedTransformerReference, model),
            canvas.start,
            prompt_interval=prompt_interval,
            gen_interval=gen_interval,
            transfer_ratio=transfer_ratio,
        )

    def look(span: Window, rows: int) -> Guesses:
        """A forward of the first `rows` positions, and its guesses for the masks of the span."""
        canvas.forwards += 1
        return guess(canvas, forward(canvas.tokens[:rows]), span, temperature=temperature, seed=seed)

    for start, stop in blocks(canvas, block_size):
        while canvas.masks((start, stop)) and not canvas.done:

            def explore(span: Window = (start, stop)) -> Guesses:
                return look(span, canvas.end)

            end = explored(
                canvas,
                explore,
                (start, stop),
                max_exploration=max_exploration,
                window=window,
                variance=variance,
                tau_min=tau_min,
                k_slow=k_slow,
                cycle=cycle,
            )
            rows = canvas.end
            while canvas.masks((start, end)) and not canvas.done:
                guesses = look((start, end), rows)
                chosen = surest(guesses.confidence, threshold=tau_high, quota=k_fast, strict=strict)
                canvas.commit(guesses, chosen, (start, end))
                rows = end if drop_suffix else canvas.end
            start = end
    return canvas.result()
