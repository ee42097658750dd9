"""Blocks whose tokens are also deleted and inserted, LLaDA2.2's edits.

Source: JointThresholdInDel of SGLang (sgl-project/sglang, pull request 31773). The released `generate` of LLaDA2.2 differs from it: its
steps have a schedule of masks, `max_edits` counts anew while a mask of the beginning is left, and what breaks a cycle is random.

Blocks start at multiples of their size in the text. A row attends to its own block and earlier ones, and predicts its own token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .fast_dllm import recomputed
from .masked_model import MaskedTransformerReference
from .masked_sampling import Canvas, MaskedResult, MaskedStep
from .sampling import without


@torch.no_grad()
def levenshtein_edits(
    model: MaskedTransformerReference,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    mask_token: int,
    delete_token: int,
    split_token: int,
    block_size: int = 32,
    threshold: float = 0.9,
    edit_threshold: float = 0.0,
    max_edits: int = 16,
    end_tokens: Sequence[int] = (),
    seed: int = 0,
) -> MaskedResult:
    """Fills one block after another, greedily. Every forward over a block

    1. fills masks: those more probable than `threshold`, but at least one more than there are masks that edits have made. Those are the
       surest ones, so a mask of the beginning is among them. Once none of the beginning is left, all masks are filled;
    2. replaces tokens, but not the prompt's, by other guesses that are more probable than `edit_threshold`;
    3. where the block has been the same before, takes another guess for the least sure change: the best one that has not been written there;
    4. removes the positions where `delete_token` was written, and where `split_token` was puts a mask before the token that was there. What
       then is beyond the block's end is dropped, and masks fill it up.

    A forward that has nothing to write ends the block. So does the last update, after which only K and V are computed: the forward number
    `max_edits` of those without a mask of the beginning, or forward `block_size + max_edits + 1`. It fills all masks, and guesses neither of
    the two tokens. As in all samplers here the mask token is never a guess.
    """
    canvas, past = Canvas(prompt, max_new_tokens, mask_token, end_tokens), model.new_past()
    start = canvas.start // block_size * block_size
    if start and not canvas.done:
        canvas.forwards += 1
        for first in range(0, start, block_size):
            recomputed(model, canvas, first, first + block_size, past)
        canvas.trace.append(MaskedStep(list(canvas.tokens), {}, {}, (canvas.start, canvas.start)))
    while not canvas.done:
        stop = min(start + block_size, canvas.end)
        first = max(start, canvas.start)
        text = canvas.tokens[first:stop]
        beginning = [token == mask_token for token in text]
        edits, updates, over = 0, 0, False
        seen: list[list[int]] = []
        history: list[tuple[int, int]] = []
        while True:
            canvas.forwards += 1
            canvas.tokens[first:stop] = text
            logits = torch.stack(
                [without(recomputed(model, canvas, start, stop, past), mask_token)[n] for n in range(first, stop)]
            ).double()
            sure, best = (column.tolist() for column in logits.softmax(-1).max(-1))
            window = (first, stop)
            confidence = dict(zip(range(first, stop), sure))
            size = len(text)
            masks = [n for n in range(size) if text[n] == mask_token]
            old_masks = [n for n in masks if beginning[n]]
            updates, edits = updates + 1, edits + (not old_masks)
            last = edits == max_edits or updates == block_size + max_edits + 1
            if over:
                fills, others = [], []
            else:
                fills = masks
                if old_masks and not last:
                    fills = [n for n in masks if sure[n] > threshold]
                    required = len(masks) - len(old_masks) + 1
                    if len(fills) < required:
                        fills = sorted(masks, key=lambda n: -sure[n])[:required]
                others = [n for n in range(size) if n not in masks and sure[n] > edit_threshold and best[n] != text[n]]
            if not fills + others:
                canvas.trace.append(MaskedStep(list(canvas.tokens), {}, confidence, window))
                break
            written = {n: best[n] for n in sorted(fills + others)}
            if last:
                three = torch.tensor([mask_token, delete_token, split_token])
                written = {n: int(logits[n].index_fill(0, three, -torch.inf).argmax()) for n in written}
            elif text in seen and any(text[n] != token for n, token in written.items()):
                place = min((n for n, token in written.items() if text[n] != token), key=lambda n: sure[n])
                tried = torch.tensor([token for n, token in history if n == place] + [mask_token])
                written[place] = int(logits[place].index_fill(0, tried, -torch.inf).argmax())
            seen.append(text)
            history += written.items()
            pairs: list[tuple[int, bool]] = []
            for n in range(size):
                token = written.get(n, text[n])
                if token == split_token and n in written:
                    pairs += [(mask_token, False), (text[n], beginning[n])]
                elif token != delete_token or n not in written:
                    pairs.append((token, beginning[n]))
            pairs = [*pairs, *[(mask_token, False)] * size][:size]
            after, beginning = [token for token, _ in pairs], [old for _, old in pairs]
            changed = {first + n: token for n, token in enumerate(after) if token != text[n]}
            canvas.trace.append(MaskedStep(list(canvas.tokens), changed, confidence, window))
            over = last
            if over and after == text:
                break
            text = after
        start = stop
    return canvas.result()
