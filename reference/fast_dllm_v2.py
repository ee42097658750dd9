"""Fast-dLLM v2: block after block on an exact past; within a block, small blocks from left to right that each see the whole block.

Sources: "Fast-dLLM v2: Efficient Block-Diffusion LLM" and the sampler published with it; the samplers published with SDAR and LLaDA2.

Blocks start at multiples of their size in the text, wherever the prompt ends. A row attends to its own block and earlier ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .fast_dllm import recomputed
from .masked_model import MaskedTransformerReference
from .masked_sampling import Canvas, Guesses, MaskedResult, Window, guess, quotas, surest
from .sampling import filtered, without


@torch.no_grad()
def fast_dllm_v2(
    model: MaskedTransformerReference,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    mask_token: int,
    block_size: int = 32,
    small_block_size: int = 8,
    threshold: float = 0.9,
    steps: int | None = None,
    block_cache: bool = True,
    edit_threshold: float | None = None,
    max_edits: int = 16,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    min_p: float = 0.0,
    end_tokens: Sequence[int] = (),
    seed: int = 0,
) -> MaskedResult:
    """Fills the block that the prompt ends in, then one block after another.

    - The prompt's whole blocks are one forward, if it has any. If they end with the prompt, the last row gives the next
      token.
    - In a block, the first small block with a mask is filled: commit all guesses in it whose confidence exceeds
      `threshold`; if those are fewer than the step's share of `small_block_size`, that many of the most confident ones. The forward
      takes all rows of the block and keeps their K and V. With `block_cache` it takes only the small block's rows if those K and V
      exist and the small block's first position is filled (no row of the small block predicts it): the other rows are attended to as
      last computed.
    - When the block is full, a forward of all its rows makes its K and V exact and gives the first token of the next block.
      The last block needs none.

    Rows of SDAR and LLaDA2 predict their own tokens: then no forward gives a token of the next block, and every small block has the row
    that predicts its first position. Their samplers have small blocks as large as the block.

    With `edit_threshold`, every forward over a block also replaces its tokens that are not the prompt's wherever another guess is more
    probable than that; a block is finished by a forward without masks that changes nothing, or that comes after `max_edits` such forwards
    (JointThreshold in SGLang; LLaDA2.1, arXiv 2602.08676). Small blocks are then as large as the block, and rows predict their own tokens.

    The confidence is the guess's probability in the distribution that it is drawn from, tempered and filtered; at temperature 0
    there is no filter. Where the published code differs: the token from the prompt or a full block is the argmax at
    any temperature, here it is drawn like all others. Its last block is always complete, here the canvas ends at
    the limit. In a batch it draws from the distributions of the first sequence. SDAR's code may fill a position again if fewer masks are
    left than a step's share; here filled positions are final, as in LLaDA2's.

    Args:
        model: with parts (masked_model.py).
        prompt, max_new_tokens, mask_token, end_tokens, seed: as in :func:`~pdkernels.reference.llada.llada`.
        block_size, small_block_size: positions.
        threshold: 1 commits one token per forward, or a step's share.
        steps: forwards that share a small block evenly, the first ones commit one more (`denoising_steps`); None, or more than it has
            positions: one for each.
        block_cache: False: all forwards run the whole block.
        edit_threshold, max_edits: None: tokens stay.
        temperature, top_k, top_p, min_p: of the guesses, applied in this order.

    >>> from pdkernels.reference.masked_model import random_weights
    >>> model = MaskedTransformerReference(random_weights("qwen2"), heads=4, names="qwen2")
    >>> result = fast_dllm_v2(model, [1, 2, 3, 4], 6, mask_token=12, block_size=4, small_block_size=2, threshold=1.0)
    >>> [step.window for step in result.trace]
    [(4, 5), (4, 6), (6, 8), (6, 8), (8, 9), (8, 10)]
    """
    op = "pdkernels.fast_dllm_v2"
    if not 1 <= small_block_size <= block_size:
        raise ValueError(f"{op}: small_block_size must be in 1 .. block_size ({block_size}), got {small_block_size}.")
    canvas = Canvas(prompt, max_new_tokens, mask_token, end_tokens)
    past = model.new_past()

    shares = quotas(small_block_size, min(steps or small_block_size, small_block_size))
    following = int(model.predicts == "next")

    def commit(logits: torch.Tensor, window: Window, share: int = 1) -> None:
        guesses = Guesses({}, {})
        if canvas.masks(window):
            shares_kept = (top_p, min_p) if temperature > 0 else (1.0, 0.0)
            logits = filtered(without(logits, mask_token), temperature, top_k)
            guesses = guess(
                canvas,
                logits,
                window,
                temperature=temperature,
                seed=seed,
                distribution="sampling",
                top_p=shares_kept[0],
                min_p=shares_kept[1],
            )
        chosen = surest(guesses.confidence, threshold=threshold, strict=True, min_count=share, quota=share)
        canvas.commit(guesses, chosen, window)

    start = canvas.start // block_size * block_size
    if start and not canvas.done:
        canvas.forwards += 1
        for first in range(
            0, start, block_size
        ):  # which attend to no later block, in the published forward because of its mask
            logits = recomputed(model, canvas, first, first + block_size, past)
        commit(logits, (canvas.start, canvas.start + following * (start == canvas.start)))
    while edit_threshold is not None and not canvas.done:
        stop, step, edits, final = min(start + block_size, canvas.end), 0, 0, False
        while not final:
            canvas.forwards += 1
            logits = without(recomputed(model, canvas, start, stop, past), mask_token)
            full = not canvas.masks((start, stop))
            filled = [n for n in range(max(start, canvas.start), stop) if canvas.tokens[n] != mask_token]
            commit(logits, (stop, stop) if full else (start, stop), 1 if full else shares[step])
            step, edits, earlier = step + 1, edits + full, list(canvas.tokens)
            for n in filled if edits <= max_edits else []:
                probability, token = logits[n].double().softmax(-1).max(-1)
                if probability > edit_threshold:
                    canvas.tokens[n] = int(token)
            final = full and canvas.tokens == earlier
        start = stop
    while not canvas.done:
        stop = min(start + block_size, canvas.end)
        kept, before, step = False, -1, 0
        while canvas.masks((start, stop)) and not canvas.done:
            masked = canvas.masks((start, stop))[0]
            small = masked - (masked - start) % small_block_size
            small_stop = min(small + small_block_size, stop)
            step, before = (step + 1 if small == before else 0), small
            alone = block_cache and kept and masked >= small + following
            canvas.forwards += 1
            rows = (small, small_stop) if alone else (start, stop)
            commit(recomputed(model, canvas, *rows, past), (small, small_stop), shares[step])
            kept = True
        if not canvas.done:
            canvas.forwards += 1
            commit(recomputed(model, canvas, start, stop, past), (stop, stop + following))
            start = stop
    return canvas.result()
