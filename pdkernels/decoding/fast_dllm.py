"""Fast-dLLM: blocks of a canvas, filled in parallel by confidence, on a KV cache that is refreshed once per block.

Source: "Fast-dLLM", sections 3.2 and 3.3, and the released code. The plain form is reference/fast_dllm.py; both take the same
forwards, draw the same tokens and fill the same places. A block that is complete behind its first forward has no other one,
as in the later revision of that code.

A block begins with a forward over the whole canvas, which writes every K and V anew. Until the block is complete, forwards then
take fewer rows: those from the block on ("prefix"), or the block's own ("dual"), whose K and V replace what stood in their
places. All sequences of a batch work on their blocks together: one whose block is complete waits for the others, in no
forward of its own.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch

from pdkernels._validation import check
from pdkernels.decoding._masked import Canvas, SamplingOptions, WholeCanvas, blocks_of, checked_masked_model, share
from pdkernels.decoding._sampling import check_sampling, checked_name, checked_number, checked_size
from pdkernels.decoding._session import Session

_OP = "decoding.fast_dllm"

Kept = Literal["none", "prefix", "dual"]


def decode(
    session: Session,
    *,
    block_size: int = 32,
    cache: Kept = "dual",
    threshold: float | None = 0.9,
    factor: float | None = None,
    steps: int | None = None,
    temperature: float = 0.0,
    mask_token: int | None = None,
    seed: int = 0,
    page_size: int | None = None,
) -> int:
    """Fill `session` block by block. What a place holds is never judged again.

    Args:
        block_size: new places that are filled together.
        cache: "dual" recomputes the block alone, "prefix" the block and everything behind it, "none" the whole canvas.
        threshold: fill every place whose confidence reaches it, and the surest one anyway.
        factor: fill the first n of the places by confidence, as far as that of the n-th is at least ``1 - factor / (n + 1)``.
        steps: forwards, shared evenly by the blocks, if `threshold` and `factor` are None: the places of a block are shared
            evenly by its forwards. None: one for each token.
        temperature: of the guesses; places are chosen by the confidence without it.

    Where rows predict the next token and there is a cache, a block's first forward fills the block's first place alone, however
    sure it is: that is predicted by the row before the block, which its other forwards do not take.

    Returns:
        Forwards that the sequences took part in, all together.
    """
    mask_token = checked_masked_model(_OP, session, mask_token)
    checked_size(_OP, "block_size", block_size)
    checked_name(_OP, "cache", cache, get_args(Kept))
    for name, value in (("threshold", threshold), ("factor", factor)):
        if value is not None:
            checked_number(_OP, name, value)
    check(
        threshold is None or factor is None, _OP, "factor", "be None beside a threshold", factor, "Pass threshold=None."
    )
    check(factor != math.inf, _OP, "factor", "be finite", factor)
    check_sampling(_OP, temperature, seed)
    limit = session.max_new_tokens
    blocks = len(blocks_of(limit, block_size))
    if steps is not None:
        checked_size(_OP, "steps", steps)
        check(
            threshold is None and factor is None,
            _OP,
            "steps",
            "be None beside a threshold or a factor",
            steps,
            "Pass threshold=None and factor=None.",
        )
        check(
            blocks == 0 or steps % blocks == 0, _OP, "steps", f"be a multiple of the number of blocks ({blocks})", steps
        )
    canvas = Canvas(session, mask_token, SamplingOptions(temperature, seed=seed))
    if blocks == 0:
        return canvas.finish()

    rows = Rows(session, canvas, page_size)
    next_token = int(
        cache != "none" and session.model.config.predicts == "next"
    )  # places that an entry fills, and it alone
    size = min(block_size, limit)
    behind = limit + block_size  # with a cache: places from the beginning of the block on, on the host
    # The block's first place, counted from the end of the prompt. Sequences that are done may stay behind.
    first = torch.zeros_like(canvas.totals)
    taken = torch.zeros_like(first)  # forwards that the block had
    entry, open_ = True, None
    while canvas.unfinished:
        block = canvas.windows(first, (first + block_size).clamp(max=limit))
        if entry:
            canvas.begin()
            behind -= block_size
            start, hidden = None, rows()
        else:
            canvas.begin(open_)
            start = canvas.prompt_lengths + first
            hidden = rows.recompute(start, behind if cache == "prefix" else min(block_size, behind))
        alone = entry and next_token
        windows = canvas.windows(first, first + 1) if alone else block
        places = canvas.open_places(windows, 1 if alone else size)
        guesses = canvas.guess(hidden, places, start)
        rule: dict[str, Any] = {} if alone else {"threshold": threshold, "factor": factor}
        if steps is not None and not alone:
            masks = ((limit - first).clamp(max=block_size) - next_token).clamp(min=0)
            rule = {"quota": share(masks, max(1, steps // blocks - next_token), taken - next_token)}
        canvas.commit(windows, places, guesses.ids, guesses.probs, **rule)

        open_ = canvas.masked(block).any(1)
        facts = canvas.poll(open_)
        entry = cache == "none" or not any(
            is_open and going for (is_open,), going in zip(facts, canvas.running, strict=True)
        )
        taken = taken + 1
        if entry:  # who is done with its block goes on to the next one; with a cache these are all
            first = torch.where(open_, first, first + block_size).clamp(max=limit)
            taken = torch.where(open_, taken, 0)
    return canvas.finish()


class Rows(WholeCanvas):
    """Forwards over rows of the canvases that stand side by side; all others are in the KV cache as they were last computed."""

    def recompute(self, starts: torch.Tensor, width: int) -> torch.Tensor:
        """Hidden states ``(batch, width, hidden_size)`` of the rows from `starts` ``(batch,)`` on; they see the whole canvas."""
        row = torch.arange(width, device=starts.device)
        tokens = self._canvas.tokens.gather(1, starts[:, None] + row)
        return self._model.recompute(tokens, self._cache, starts, visible=self._canvas.totals)
