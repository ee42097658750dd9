"""Fast-dLLM: all sufficiently confident guesses are committed at once, and K and V outside the current block are cached for a while.

Source: "Fast-dLLM: Training-free Acceleration of Diffusion LLM by Enabling KV Cache and Parallel Decoding" and its code for
LLaDA and Dream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from .autoregressive import Model
from .masked_model import KeyValues, MaskedTransformerReference
from .masked_sampling import (
    Canvas,
    MaskedResult,
    bidirectional,
    blocks,
    guess,
    predicts,
    quotas,
    steps_per_block,
    surest,
)


def recomputed(model: MaskedTransformerReference, canvas: Canvas, start: int, stop: int, past: KeyValues) -> Tensor:
    """Logits, row p for position p, from a forward of the rows ``start .. stop - 1`` over `past`.

    A model that predicts the next token does not predict position `start`, but does predict position `stop`. Rows of positions that
    are not predicted are NaN.
    """
    logits = model.recompute(canvas.tokens[start:stop], start, past)
    silent = start + (model.predicts == "next")
    return torch.cat([torch.full((silent, logits.shape[1]), torch.nan, dtype=logits.dtype), logits])


@torch.no_grad()
def fast_dllm(
    model: Model | MaskedTransformerReference,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    mask_token: int,
    block_size: int = 32,
    cache: str = "dual",
    threshold: float | None = 0.9,
    factor: float | None = None,
    steps: int | None = None,
    temperature: float = 0.0,
    end_tokens: Sequence[int] = (),
    seed: int = 0,
) -> MaskedResult:
    """Fills block after block.

    The first forward of a block runs all rows: every K and V is new, and tokens of the block are committed. After that

    - cache="none": all rows go through the model again in every forward;
    - cache="prefix": the rows from the block's start to the end of the canvas do, and see K and V of the rows before it as
      they were on entry, when the block was all masks;
    - cache="dual": only the rows of the block do, and they also attend to K and V of the rows after it as of entry.

    Models that predict the next token (Dream): no row of a block predicts the block's first position. With a cache the entry
    therefore commits only that position, regardless of its confidence; the forwards after it do the rest.

    Where the published code differs: its first version runs a forward after the entry even if the block is already complete.
    With a cache and batch > 1 it replaces rows of the wrong sequences. Dream commits by entropy on its own schedule if there
    is no threshold, here by the quotas of LLaDA; and its confidence includes the temperature, which none does here.

    Args:
        model, prompt, max_new_tokens, mask_token, temperature, end_tokens, seed: as in
            :func:`~pdkernels.reference.llada.llada`. A cache needs a model with parts, masked_model.py.
        block_size: positions of a block; the last one may be shorter.
        cache: "none", "prefix" or "dual".
        threshold: commit all guesses whose confidence reaches it (``>=``), and always the most confident one.
        factor: commit by the factor rule of :func:`~pdkernels.reference.masked_sampling.surest`; needs ``threshold=None``.
        steps: if neither is given, ``steps / blocks`` forwards of each block commit equal numbers of tokens, the first ones
            one more; None: one token per forward. After an entry that commits one position only, the others share the rest.

    >>> from pdkernels.reference.masked_model import random_weights
    >>> model = MaskedTransformerReference(random_weights("llada"), heads=4, names="llada")
    >>> run = lambda cache: fast_dllm(model, [1, 2, 3], 8, mask_token=12, block_size=4, threshold=0.5, cache=cache)
    >>> [run(cache).forwards for cache in ("none", "prefix", "dual")]
    [5, 5, 5]
    """
    op = "pdkernels.fast_dllm"
    if cache not in ("none", "prefix", "dual"):
        raise ValueError(f"{op}: cache must be 'none', 'prefix' or 'dual', got {cache!r}.")
    if threshold is not None and factor is not None:
        raise ValueError(f"{op}: factor must be None with a threshold, got {factor}. Pass threshold=None.")
    if steps is not None and (threshold is not None or factor is not None):
        raise ValueError(f"{op}: steps must be None with a threshold or a factor, got {steps}. Pass threshold=None.")
    canvas = Canvas(prompt, max_new_tokens, mask_token, end_tokens)
    windows = blocks(canvas, block_size)
    for window, count in zip(windows, steps_per_block("fast_dllm", steps, windows)):
        start, stop = window
        single = cache != "none" and predicts(model) == "next"
        left = quotas(stop - start - 1, max(count - 1, 1)) if single else quotas(stop - start, count)
        entry = True
        while canvas.masks(window) and not canvas.done:
            canvas.forwards += 1
            if cache == "none":
                logits = bidirectional(model)(canvas.tokens)
            elif entry:
                cached = cast(MaskedTransformerReference, model)
                past = cached.new_past()
                logits = recomputed(cached, canvas, 0, canvas.end, past)
            else:
                logits = recomputed(cached, canvas, start, stop if cache == "dual" else canvas.end, past)
            candidates = (start, start + 1) if single and entry else window
            guesses = guess(canvas, logits, candidates, temperature=temperature, seed=seed)
            if single and entry:
                chosen = [start]
            elif threshold is None and factor is None:
                chosen = surest(guesses.confidence, quota=left.pop(0))
            else:
                chosen = surest(guesses.confidence, threshold=threshold, factor=factor)
            canvas.commit(guesses, chosen, candidates)
            entry = False
    return canvas.result()
