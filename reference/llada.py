"""LLaDA's sampler: in every forward the most confident guesses of the current block become text.

Source: "Large Language Diffusion Models" (LLaDA), section 2.4, and the sampler published with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from .autoregressive import Model
from .masked_sampling import (
    Canvas,
    Forward,
    Guesses,
    MaskedResult,
    Window,
    bidirectional,
    blocks,
    guess,
    quotas,
    steps_per_block,
    surest,
)
from .sampling import without
from .unmask import random_order


def guided(given: Forward, free: Forward, canvas: Canvas, guidance: float) -> Forward:
    """Classifier-free guidance: ``u + (w + 1) (c - u)``, u being the logits of `free` where the whole prompt is masked.

    Two rows of one forward. With w = 0 u cancels out, and it is not computed.
    """

    def both(tokens: Sequence[int]) -> Tensor:
        c, u = given(tokens), free([canvas.mask_token] * canvas.start + list(tokens[canvas.start :]))
        return u + (guidance + 1) * (c - u)

    return both if guidance else given


def unmask_by_quota(
    canvas: Canvas,
    forward: Forward,
    *,
    op: str,
    block_size: int | None,
    steps: int | None,
    remasking: str,
    temperature: float,
    no_end: bool,
    late_end: bool,
    seed: int,
    revise: float = 0.0,
    remainder: str = "first",
) -> MaskedResult:
    """The loop of :func:`llada` for any forward."""
    if remasking not in ("low_confidence", "random"):
        raise ValueError(f"pdkernels.{op}: remasking must be 'low_confidence' or 'random', got {remasking!r}.")
    if late_end and remasking == "random":
        raise ValueError(f"pdkernels.{op}: late_end must be False where chance decides, got True.")
    if remainder not in ("first", "spread"):
        raise ValueError(f"pdkernels.{op}: remainder must be 'first' or 'spread', got {remainder!r}.")
    shares = quotas if remainder == "first" else spread_quotas
    windows = blocks(canvas, block_size)
    doubted: set[int] = set()
    for window, count in zip(windows, steps_per_block(op, steps, windows)):
        masks = len(canvas.masks(window))
        each = -(-masks // max(min(count, masks), 1))
        done = canvas.done
        while revise > 0 and not done and canvas.masks(window):
            canvas.forwards += 1
            logits = forward(canvas.tokens)
            banned = canvas.end_tokens if no_end else ()
            guesses = guess(canvas, logits, window, temperature=temperature, seed=seed, banned=banned)
            low = doubtful(canvas, logits, window, revise) - doubted
            canvas.commit(guesses, surest(guesses.confidence, quota=each), window)
            for position in low:
                canvas.tokens[position] = canvas.mask_token
            doubted |= low
        for quota in shares(len(canvas.masks(window)), count):
            if canvas.done or quota == 0:
                break
            canvas.forwards += 1
            logits = forward(canvas.tokens)
            banned = canvas.end_tokens if no_end else ()
            guesses = guess(canvas, logits, window, temperature=temperature, seed=seed, banned=banned)
            if remasking == "random":
                positions = list(guesses.tokens)
                guesses = Guesses(guesses.tokens, dict(zip(positions, random_order(seed, canvas.forwards, positions))))
            elif late_end:
                # Same random words, so a draw that was not an end token is the same without them.
                rest = guess(canvas, logits, window, temperature=temperature, seed=seed, banned=canvas.end_tokens)
                confidence = {
                    p: 0.0 if t in canvas.end_tokens else rest.confidence[p] for p, t in guesses.tokens.items()
                }
                guesses = Guesses(guesses.tokens, confidence)
            canvas.commit(guesses, surest(guesses.confidence, quota=quota), window)
    return canvas.result()


def spread_quotas(masks: int, steps: int) -> list[int]:
    """Commits of each step by equation 6 of "SlowFast Sampling": before step k of N .. 1 ``floor(L (1 - k / N))`` positions are
    filled, after it ``floor(L (1 - (k - 1) / N))``. Its products of rounded quotients are exact here. With more steps than masks
    some would commit nothing, and are left out.

    >>> spread_quotas(7, 4), spread_quotas(7, 3), spread_quotas(3, 8)
    ([1, 2, 2, 2], [2, 2, 3], [1, 1, 1])
    """
    filled = [math.floor(masks * (1 - Fraction(k, steps))) for k in range(steps, -1, -1)]
    return [after - before for before, after in zip(filled, filled[1:]) if after > before]


def doubtful(canvas: Canvas, logits: torch.Tensor, window: Window, below: float) -> set[int]:
    """Filled positions of a window whose token has a probability below `below` by its row of `logits`, the mask apart."""
    rows = without(logits.double(), canvas.mask_token).softmax(-1)
    masks = set(canvas.masks(window))
    filled = [position for position in range(max(window[0], canvas.start), window[1]) if position not in masks]
    return {position for position in filled if rows[position, canvas.tokens[position]] < below}


@torch.no_grad()
def llada(
    model: Model,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    mask_token: int,
    block_size: int | None = None,
    steps: int | None = None,
    remasking: str = "low_confidence",
    remainder: str = "first",
    temperature: float = 0.0,
    guidance: float = 0.0,
    no_end: bool = False,
    late_end: bool = False,
    revise: float = 0.0,
    end_tokens: Sequence[int] = (),
    seed: int = 0,
) -> MaskedResult:
    """Block after block, each in ``steps / blocks`` forwards that commit equal numbers of tokens, the first ones one more.

    Where the published code differs:

    - If a block has fewer masks than steps, its last forwards commit nothing; the code runs them, here they are skipped.
    - Its candidates are all masks before the block's end, including those of the prompt; here those of the block. After the
      prompt that is the same.
    - Its confidence comes from a softmax in the model's dtype: in bf16 all probabilities above 0.998 are 1. Here it is fp64.
    - ``confidence_eos_eot_inf`` at T > 0 leaves the confidence of one of its two ids unchanged; `late_end` is its behaviour at
      T = 0, for all end tokens. ``logits_eos_inf`` bans one id, `no_end` all end tokens.
    - Guidance without an attention mask fails on a variable that was never assigned.

    Args:
        model, prompt, max_new_tokens: see masked_sampling.py. The prompt has at least one token.
        mask_token: id at masked positions.
        block_size: positions of a block; None: all in one block ("pure diffusion"). The last block may be shorter.
        steps: forwards of the whole generation, a multiple of the number of blocks; None: one per token.
        remasking: "low_confidence": the probability of the guess by softmax(logits), without temperature and noise, decides
            what is committed; "random": chance decides, and the trace has its uniform numbers as confidences.
        remainder: "first": see above; "spread": equation 6 of "SlowFast Sampling", see :func:`spread_quotas`. Without effect on
            `revise`.
        temperature: of the guesses.
        guidance: w of classifier-free guidance. A forward then has two rows, and is counted once.
        no_end: end tokens are never guessed.
        late_end: an end token may be the guess, but has confidence 0; all other confidences are those of a distribution without end
            tokens. Not with remasking="random".
        revise: above 0 tokens may be taken back: a step also opens the positions of its block whose token has less than this
            probability in its forward, each position once. Steps then fill an equal share, rounded up, until a block is full, which may
            take more of them; it is full before an end token counts. Not with random remasking or late ends.
        end_tokens: stop after one of these once no mask is left before it.
        seed: of the draws.

    >>> said = lambda tokens, positions, mask: torch.eye(9, dtype=torch.float64)[positions % 8] * (9.0 - positions[..., None])
    >>> result = llada(said, [0, 1], 4, mask_token=8, steps=2)
    >>> result.tokens, result.forwards, [step.committed for step in result.trace]
    ([2, 3, 4, 5], 2, [{2: 2, 3: 3}, {4: 4, 5: 5}])
    """
    canvas = Canvas(prompt, max_new_tokens, mask_token, end_tokens)
    forward = bidirectional(model)
    return unmask_by_quota(
        canvas,
        guided(forward, forward, canvas, guidance),
        op="llada",
        block_size=block_size,
        steps=steps,
        remasking=remasking,
        temperature=temperature,
        no_end=no_end,
        late_end=late_end,
        seed=seed,
        revise=revise,
        remainder=remainder,
    )
