"""Fast-dLLM v2: block diffusion on an exact prefix, block by block in small blocks, with a KV cache inside the block too.

Source: "Fast-dLLM v2: Efficient Block-Diffusion LLM" and the released code. The plain form is reference/fast_dllm_v2.py; both
take the same forwards, draw the same tokens and fill the same places.

Blocks stand at multiples of their size in the text, and every row sees its own block and those before it. The prompt's whole
blocks go through the model first. A block is filled small block by small block; when it is complete, one more forward writes
its K and V, which are exact from then on, and gives the first token of the next block. In between, a forward takes the whole
block, or only the rows of the small block, in front of what the others were at their last turn. All rows go to their places
in the KV cache, so that every sequence of a batch can be in a phase of its own.
"""

from __future__ import annotations

import torch

from pdkernels._validation import check, check_type
from pdkernels.decoding._masked import Canvas, SamplingOptions
from pdkernels.decoding._sampling import check_sampling, checked_flag, checked_mask_token, checked_number, checked_size
from pdkernels.decoding._session import Session
from pdkernels.masks import block_causal

_OP = "decoding.fast_dllm_v2"


def decode(
    session: Session,
    *,
    block_size: int = 32,
    small_block_size: int = 8,
    threshold: float = 0.9,
    block_cache: bool = True,
    temperature: float = 0.0,
    top_p: float = 1.0,
    mask_token: int | None = None,
    seed: int = 0,
    page_size: int | None = None,
) -> int:
    """Fill `session` block by block. What a place holds is never judged again.

    Args:
        block_size: places of a block; blocks are counted from the text's first token.
        small_block_size: places of a block that are filled together, from left to right.
        threshold: fill every place whose confidence is above it, and the surest one anyway.
        block_cache: keep K and V of the block between its forwards, which then take the small block's rows alone, unless its
            first place is open: that is predicted by the row before it. False: all take the whole block.
        temperature: of the guesses; their confidence is that of the distribution they are drawn from.
        top_p: draw only from the most likely tokens of so much mass, at a temperature above 0.

    Returns:
        Forwards that the sequences took part in, all together.
    """
    config = session.model.config
    kind = getattr(config, "attention", None), getattr(config, "predicts", None)
    actual = type(session.model).__name__ if None in kind else f"attention {kind[0]!r} and predicts {kind[1]!r}"
    check_type(kind == ("causal", "next"), _OP, "model", "be a causal one that predicts the next token", actual)
    mask_token = checked_mask_token(_OP, session.model, mask_token)
    checked_size(_OP, "block_size", block_size)
    checked_size(_OP, "small_block_size", small_block_size)
    check(
        small_block_size <= block_size,
        _OP,
        "small_block_size",
        f"be at most block_size ({block_size})",
        small_block_size,
    )
    checked_number(_OP, "threshold", threshold)
    checked_flag(_OP, "block_cache", block_cache)
    checked_number(_OP, "top_p", top_p, 1.0)
    check_sampling(_OP, temperature, seed)
    canvas = Canvas(
        session,
        mask_token,
        SamplingOptions(temperature, top_p=top_p if temperature else 1.0, distribution="sampling", seed=seed),
    )
    if not canvas.unfinished:
        return canvas.finish()
    blocks = Blocks(session, canvas, block_size, small_block_size, block_cache, page_size)
    blocks.prompts()
    wide = True
    while canvas.unfinished:
        canvas.begin()
        windows = blocks.windows()
        new = torch.maximum(windows, canvas.prompt_lengths[:, None])  # a mask token of the prompt is part of it
        places = canvas.open_places(new, small_block_size)
        guesses = canvas.guess(blocks.forward(block_size if wide else small_block_size), places, blocks.first)
        canvas.commit(windows, places, guesses.ids, guesses.probs, threshold=threshold, strict=True)
        blocks.move_on()
        facts = canvas.poll(blocks.whole)
        wide = any(whole and going for (whole,), going in zip(facts, canvas.running, strict=True))
    return canvas.finish()


class Blocks:
    """The block of each sequence, and what the next forward is about. Positions count from the text's first token.

    Attributes:
        complete: ``(batch,)`` bool: the block has no open place: the forward writes its K and V for good and gives one more
            token.
        whole: ``(batch,)`` bool: the forward takes the whole block, not the small one alone.
        first: ``(batch,)`` int64, the first row of the forward.
    """

    def __init__(
        self,
        session: Session,
        canvas: Canvas,
        block_size: int,
        small_block_size: int,
        keep: bool,
        page_size: int | None,
    ) -> None:
        self._session, self._canvas = session, canvas
        self._size, self._small, self._keep = block_size, small_block_size, keep
        self._cache = session.new_cache(page_size)
        self._row = torch.arange(canvas.tokens.shape[1], device=canvas.tokens.device)
        self._start = canvas.prompt_lengths // block_size * block_size
        self._kept = torch.zeros_like(canvas.going)  # K and V of the block are in the cache
        self._look()

    def prompts(self) -> None:
        """Run the whole blocks of the prompts; behind a prompt of nothing else the next token comes with them."""
        session, canvas, size = self._session, self._canvas, self._size
        width = session.longest // size * size
        if width == 0:
            return
        canvas.begin(self._start > 0)
        tokens = canvas.tokens[:, :width]
        mask = block_causal(width, size).plan(64, 64, tokens.device)
        hidden = session.model.hidden(tokens, cache=self._cache, counts=self._start, mask=mask)
        windows = canvas.windows(0, (self._start == canvas.prompt_lengths).long())
        places = canvas.open_places(windows, 1)
        guesses = canvas.guess(hidden, places)
        canvas.commit(windows, places, guesses.ids, guesses.probs)
        self._look()
        canvas.poll()

    def windows(self) -> torch.Tensor:
        """``(batch, 2)``: where the forward fills places: in the small block, or the first one behind the block."""
        canvas = self._canvas
        first = torch.where(self.complete, self._end, self._small_start) - canvas.prompt_lengths
        last = torch.where(self.complete, first + 1, self._small_end - canvas.prompt_lengths)
        return canvas.windows(first, last)

    def forward(self, width: int) -> torch.Tensor:
        """Hidden states ``(batch, width, hidden_size)`` of the rows from `first` on."""
        canvas = self._canvas
        counts = torch.where(self.whole, self._end, self._small_end) - self.first
        tokens = canvas.tokens.gather(1, (self.first[:, None] + self._row[:width]).clamp(max=len(self._row) - 1))
        return self._session.model.recompute(
            tokens, self._cache, self.first, counts=counts.masked_fill(~canvas.going, 0), visible=self._end
        )

    def move_on(self) -> None:
        """Behind a forward: to the next block where this one is complete."""
        self._start = torch.where(self.complete, self._end, self._start)
        self._kept = (self._kept | self.whole) & ~self.complete
        self._look()

    def _look(self) -> None:
        canvas = self._canvas
        self._end = torch.minimum(self._start + self._size, canvas.totals)
        open_ = canvas.masked(torch.stack([torch.maximum(self._start, canvas.prompt_lengths), self._end], 1))
        self.complete = ~open_.any(1)
        place = open_.long().argmax(1)  # of the first open one
        self._small_start = self._start + (place - self._start) // self._small * self._small
        self._small_end = torch.minimum(self._small_start + self._small, self._end)
        needed = place == self._small_start if self._keep else True
        self.whole = self.complete | ~self._kept | needed
        self.first = torch.where(self.whole, self._start, self._small_start)
