"""Layouts of Jacobi Forcing: the noise-aware training mask, and candidate branches at decoding."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from pdkernels._validation import check
from pdkernels.masks.segment_mask import (
    Repeated,
    Run,
    Sees,
    SegmentMask,
    arange,
    check_tokens,
    choice,
    integer,
    inverse,
)

Conditioning = Literal["noisy", "clean", "window"]
Layout = Literal["streams", "interleaved"]


class NoiseAwareMask(SegmentMask):
    """A `noise_aware_causal` mask, with the rows that its losses read. All of them are int64, in the mask's row order.

    Attributes:
        prompt_len, block_size, num_blocks, conditioning, window, layout: as given to the builder.
    """

    prompt_len: int
    block_size: int
    num_blocks: int
    conditioning: Conditioning
    window: int | None
    layout: Layout

    @property
    def prompt_rows(self) -> Tensor:
        """``(prompt_len,)`` rows of the prompt."""
        return arange(self.prompt_len)

    @cached_property
    def noisy_rows(self) -> Tensor:
        """``(num_blocks, block_size)`` rows of the noisy blocks."""
        return self._block_rows(1, 0)

    @cached_property
    def clean_rows(self) -> Tensor:
        """``(num_blocks, block_size)`` rows of the clean blocks."""
        return self._block_rows(0, 1)

    def _block_rows(self, index_in_streams: int, index_in_pair: int) -> Tensor:
        rows = arange(self.prompt_len, self.q_len)
        if self.layout == "streams":
            return rows.view(2, self.num_blocks, self.block_size)[index_in_streams]
        return rows.view(self.num_blocks, 2, self.block_size)[:, index_in_pair]

    @cached_property
    def ar_rows(self) -> Tensor:
        """``(n - 1,)`` rows whose logits the autoregressive loss reads: prompt and clean blocks, all but the last of
        the n."""
        return torch.cat([self.prompt_rows, self.clean_rows.flatten()])[:-1]

    @cached_property
    def ar_targets(self) -> Tensor:
        """``(n - 1,)`` rows that hold the token each of `ar_rows` predicts. Leave out targets after the end token."""
        return torch.cat([self.prompt_rows, self.clean_rows.flatten()])[1:]

    @cached_property
    def student_rows(self) -> Tensor:
        """``(num_blocks, m)`` noisy rows that the consistency loss trains, from the first offset where the block
        differs from its clean one. m is block_size, or one less with ``conditioning="clean"``, whose trainer leaves out
        the last row."""
        return self.noisy_rows[:, : self._trained]

    @cached_property
    def teacher_rows(self) -> Tensor:
        """``(num_blocks, m)`` clean rows whose (detached) distributions `student_rows` learn."""
        return self.clean_rows[:, : self._trained]

    @property
    def _trained(self) -> int:
        return self.block_size - (self.conditioning == "clean")

    @cached_property
    def to_interleaved(self) -> Tensor:
        """``(tokens,)``: ``x[to_interleaved]`` puts tokens in this mask's order into the paper's interleaved order."""
        pairs = torch.stack([self.noisy_rows, self.clean_rows], dim=1)
        return torch.cat([self.prompt_rows, pairs.flatten()])

    @cached_property
    def from_interleaved(self) -> Tensor:
        """``(tokens,)``: ``x[from_interleaved]`` puts tokens in the interleaved order into this mask's order."""
        return inverse(self.to_interleaved)


def noise_aware_causal(
    prompt_len: int,
    block_size: int,
    num_blocks: int,
    conditioning: Conditioning = "noisy",
    window: int | None = None,
    layout: Layout = "streams",
) -> NoiseAwareMask:
    """A prompt, and each block of the answer twice: noisy and clean. Noisy blocks learn to jump to the clean ones.

    Clean rows attend causally to prompt and clean stream: an ordinary language model. The noisy block j sees the
    prompt, clean blocks before block i, noisy blocks i .. j - 1 and itself causally, where i depends on `conditioning`.
    So a noisy row at position p sees every position up to p once. No clean row attends to noise::

        prompt 1, blocks of 1, two of them; p: prompt, c: clean, n: noisy
        noisy              clean
          p c c n n          p c c n n
        p 1 . . . .        p 1 . . . .
        c 1 1 . . .        c 1 1 . . .
        c 1 1 1 . .        c 1 1 1 . .
        n 1 . . 1 .        n 1 . . 1 .
        n 1 . . 1 1        n 1 1 . . 1

    Args:
        prompt_len: tokens of the prompt, 0 or more.
        block_size: tokens of a block, 1 or more.
        num_blocks: noisy blocks, and as many clean ones; 0 or more.
        conditioning: the copy of earlier blocks that a noisy block attends to. ``"noisy"``: noisy blocks (i = 0), which
            makes the mask two causal sequences that share the prompt; ``"clean"``: clean blocks (i = j); ``"window"``:
            clean blocks of earlier windows and noisy blocks of its own (i = j rounded down to a multiple of `window`).
        window: blocks of a window, only with ``conditioning="window"``. It does not have to divide `num_blocks`.
        layout: ``"streams"``: prompt, clean blocks, noisy blocks, the order that fills tiles; ``"interleaved"``:
            prompt, noisy 0, clean 0, noisy 1, ..: the paper's order. Only the order of rows and columns differs.

    Returns:
        A square mask over ``prompt_len + 2 * block_size * num_blocks`` tokens. The noisy and the clean block j share
        positions ``prompt_len + j * block_size ..``.

    Raises:
        ValueError: sizes out of range, an unknown name, a missing or unexpected window.

    Source: Jacobi Forcing, figure 2b and its three trainers (noisy; clean as in CLLM; window). The docstring of the
    released window trainer says that blocks of a window see clean ones; its code and the paper say noisy, as here.

    Example:
        >>> import pdkernels as pd
        >>> mask = pd.masks.noise_aware_causal(prompt_len=1, block_size=2, num_blocks=2)
        >>> mask.positions.tolist()
        [0, 1, 2, 3, 4, 1, 2, 3, 4]
        >>> mask.student_rows.tolist(), mask.teacher_rows.tolist()
        ([[5, 6], [7, 8]], [[1, 2], [3, 4]])
        >>> mask.to_interleaved.tolist()
        [0, 5, 6, 1, 2, 7, 8, 3, 4]
    """
    op = "noise_aware_causal"
    prompt_len = integer(op, "prompt_len", prompt_len, 0)
    block_size = integer(op, "block_size", block_size, 1)
    num_blocks = integer(op, "num_blocks", num_blocks, 0)
    check_tokens(op, "num_blocks", prompt_len + 2 * num_blocks * block_size, 2 * num_blocks)
    choice(op, "conditioning", conditioning, ("noisy", "clean", "window"))
    choice(op, "layout", layout, ("streams", "interleaved"))
    if conditioning == "window":
        check(
            window is not None,
            f"masks.{op}",
            "window",
            'be given with conditioning="window"',
            window,
            "The paper's code uses 16.",
        )
        window = integer(op, "window", window, 1)
    else:
        check(window is None, f"masks.{op}", "window", f"be None with conditioning={conditioning!r}", window)
    context = {"noisy": num_blocks or 1, "clean": 1}.get(conditioning, window) or 1

    interleaved = layout == "interleaved"
    # Segment numbers of noisy and clean blocks: first, first + step, ..; the prompt is segment 0.
    step, first_noisy, first_clean = (2, 1, 2) if interleaved else (1, 1 + num_blocks, 1)
    runs: list[Run] = [(1, (Repeated(prompt_len, "causal", (), "prompt"),))]
    noisy_runs: list[Run] = []
    for i in [0] if context == 1 else range(0, num_blocks, context):
        # Blocks i, i + 1, ..: the noisy ones see clean blocks before i, or before their own.
        count = num_blocks if context == 1 else min(context, num_blocks - i)
        cleans = Sees(first_clean, first_clean + step * i, step, 0, step)
        clean_context, noisy_context = (
            (cleans, ())
            if context == 1
            else (cleans._replace(stop_by=0), (Sees(first_noisy + step * i, first_noisy + step * i, step, 0, step),))
        )
        noisy = Repeated(block_size, "causal", (Sees(0, 1), clean_context, *noisy_context), "noisy")
        clean = Repeated(block_size, "causal", (Sees(0, 1), cleans), "clean")
        noisy_runs.append((count, (noisy, clean) if interleaved else (noisy,)))
    if not interleaved:
        cleans = Sees(first_clean, first_clean, step, 0, step)
        runs.append((num_blocks, (Repeated(block_size, "causal", (Sees(0, 1), cleans), "clean"),)))

    stream = arange(prompt_len, prompt_len + num_blocks * block_size)
    block_positions = (
        torch.stack([stream.view(num_blocks, block_size)] * 2, dim=1) if interleaved else torch.stack([stream, stream])
    )
    mask = NoiseAwareMask._repeat(runs + noisy_runs, torch.cat([arange(prompt_len), block_positions.flatten()]))
    mask.prompt_len, mask.block_size, mask.num_blocks = prompt_len, block_size, num_blocks
    mask.conditioning, mask.window, mask.layout = conditioning, window, layout
    return mask


def candidates(count: int, length: int) -> SegmentMask:
    """Branches that continue the same prefix. Each is causal and masked from the others. The prefix is not part of the
    mask::

        candidates(2, 2)
            1 . . .
            1 1 . .
            . . 1 .
            . . 1 1

    Args:
        count: branches.
        length: tokens of a branch.

    Returns:
        A square mask over ``count * length`` tokens; positions start at 0 in each branch, relative to the cached
        length.

    Source: Jacobi Forcing, rejection recycling.

    Example:
        >>> import pdkernels as pd
        >>> pd.masks.candidates(2, 3).positions.tolist()
        [0, 1, 2, 0, 1, 2]
    """
    count, length = integer("candidates", "count", count, 0), integer("candidates", "length", length, 0)
    check_tokens("candidates", "count", count * length, count)
    return SegmentMask._repeat([(count, (Repeated(length, "causal", (), "candidate"),))], arange(length).repeat(count))
