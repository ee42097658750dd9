"""SlowFast Sampling: explore how far the model is confident, fill that span quickly, and continue after it.

Source: "Accelerating Diffusion Large Language Models with Slow Fast Sampling", section 3.3, and the code of its LLaDA sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import pvariance
from statistics import variance as unbiased
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
    tau_high: float,
    k_slow: int,
    cycle: str,
    origin: int,
) -> int:
    """The slow phase between the start and the end of `span`; returns the end of the fast phase's span, after its start.

    `look` runs a forward and guesses every mask of the span.
    """
    start, stop = span
    published, dream = cycle in ("published", "dream"), cycle == "dream"
    ends = (
        [0] * window if dream else []
    )  # candidates, each the position after the last confident one, counted from `origin`
    stable = False
    for _ in range(max_exploration):
        if canvas.done or (cycle != "published" and not canvas.masks(span)) or (stable and not published):
            break
        guesses = look()
        if not stable:
            clear = [p for p, c in guesses.confidence.items() if c > tau_min or (published and c == tau_min)]
            ends.append(max(clear, default=start) + 1 - origin)
            recent = ends[-window:]
            if dream:
                stable = window > 1 and unbiased(recent) <= variance
            else:
                stable = len(ends) >= window and pvariance(recent) < variance
        if published:
            canvas.commit(guesses, surest(guesses.confidence, threshold=tau_high, quota=k_slow), span)
        else:
            canvas.commit(guesses, surest(guesses.confidence, quota=k_slow), span)
    recent = ends[-window:]
    if not recent or max_exploration == 0:
        return stop
    if stable and cycle != "mean":
        return origin + recent[-1]
    if dream:
        return max(origin + round(sum(recent) / len(recent)), start + 1)
    return origin + sum(recent) // len(recent)


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
    tau_explore: float | None = None,
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

    cycle="published" is the loop of the released code. The span ends as for "last". No slow phase ends early: if the notes are
    stable no more are taken, but `max_exploration` forwards are made, even of a full block. Slow forwards commit all guesses
    that reach `tau_high`, or else the `k_slow` best ones (the code's "two or more, else the best one" is the same), and
    equality reaches both thresholds.

    Where the published code differs otherwise: in a batch a full span still takes a position of confidence -inf and overwrites its
    token. It stores the logits of the suffix that it leaves out and never commits by them; here they are not kept. Its softmax
    is in the model's dtype. Its cycles are at most 256.

    cycle="dream" is the released loop for Dream, whose settings are ``max_exploration=6, tau_min=0.1, tau_explore=0.8, tau_high=0.9``:
    as "published", but notes of 0 precede the first one, the unbiased variance may equal `variance`, the mean is rounded, and
    the slow phase ends with the last mask of the block. A mean before the cycle's start, where that code would not go on, is one
    position after it.

    Args:
        model, prompt, max_new_tokens, mask_token, temperature, end_tokens, seed: as in
            :func:`~pdkernels.reference.llada.llada`.
        block_size: positions of a block; None: a single block, as in the paper.
        max_exploration: K_max. With 0 the span is the whole block.
        window: W_hist, at least 1.
        variance: sigma squared, below which the last notes are stable. With the paper's, two notes may be one position apart.
        tau_min, tau_high: of the slow and the fast phase.
        tau_explore: `tau_high` of the slow steps of the released loops; None: the same.
        k_slow, k_fast: never given by the paper; 1 in the code. k_fast is at least 1.
        cycle: "last", "mean", "published" or "dream".
        drop_suffix: the fast forwards of a cycle, except its first, leave out everything after the span. That is what the
            paper's out-of-span caching amounts to in the code; the span no longer attends to the masks after it, so results change.
        prompt_interval, gen_interval, transfer_ratio: of a :class:`~pdkernels.reference.dllm_cache.FeatureCache` that all
            forwards go through; needs a model with parts (masked_model.py). None: no cache. A forward without the suffix
            leaves the cached rows of the suffix unchanged.

    >>> said = lambda tokens, positions, mask: torch.eye(9, dtype=torch.float64)[positions % 8] * (8.0 - positions[..., None])
    >>> result = slowfast(said, [0, 1], 5, mask_token=8, tau_min=0.5)
    >>> result.tokens, [(step.window, list(step.committed)) for step in result.trace]
    ([2, 3, 4, 5, 6], [((2, 7), [2]), ((2, 7), [3]), ((2, 7), [4]), ((2, 7), [5]), ((2, 7), [6])])
    """
    op = "pdkernels.slowfast"
    if cycle not in ("last", "mean", "published", "dream"):
        raise ValueError(f"{op}: cycle must be 'last', 'mean', 'published' or 'dream', got {cycle!r}.")
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

    for origin, stop in blocks(canvas, block_size):
        start = origin
        while canvas.masks((start, stop)) and not canvas.done:

            def explore(span: Window = (start, stop)) -> Guesses:
                return look(span, canvas.end)

            end = horizon(
                canvas,
                explore,
                (start, stop),
                max_exploration=max_exploration,
                window=window,
                variance=variance,
                tau_min=tau_min,
                tau_high=tau_high if tau_explore is None else tau_explore,
                k_slow=k_slow,
                cycle=cycle,
                origin=origin,
            )
            rows = canvas.end
            while canvas.masks((start, end)) and not canvas.done:
                guesses = look((start, end), rows)
                chosen = surest(guesses.confidence, threshold=tau_high, quota=k_fast, strict=cycle in ("last", "mean"))
                canvas.commit(guesses, chosen, (start, end))
                rows = end if drop_suffix else canvas.end
            start = end
    return canvas.result()
