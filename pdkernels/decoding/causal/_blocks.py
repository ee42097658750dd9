"""Blocks of texts that are filled on an exact prefix, as `fast_dllm_v2` describes it: what the next forward covers, and edits."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from pdkernels.decoding.canvas.canvas import Canvas, Step, share
from pdkernels.generation.session import Session
from pdkernels.masks import block_causal
from pdkernels.models.capabilities import rows_ahead


def rule(step: Step, threshold: float) -> dict[str, Any]:
    """By which a step of `Blocks.next` fills positions."""
    minimum = step.columns[3]
    return {"threshold": threshold, "strict": True, "min_count": minimum, "quota": minimum}


class Edits:
    """Tokens of blocks that are replaced, and which blocks are final."""

    def __init__(self, canvas: Canvas, above: float, most: int) -> None:
        self._canvas, self._above, self._most = canvas, above, most
        self._before: list[list[int]] = []
        canvas.final_ends = [0] * len(canvas.starts)

    def begin(self, number: int) -> None:
        """Another sequence takes the place of one."""
        assert self._canvas.final_ends is not None
        self._canvas.final_ends[number] = 0

    def write(self, hidden: torch.Tensor, blocks: list[Block], first: torch.Tensor) -> None:
        """After the masks of a forward are filled: replaces tokens that were there before it."""
        canvas, places = self._canvas, []
        self._before = canvas.answers[:]
        for block, answer, prompt, on in zip(blocks, canvas.answers, canvas.starts, canvas.active, strict=True):
            may = on and not (block.complete and block.edits >= self._most)
            inside = range(max(block.start - prompt, 0), block.end - prompt) if may else range(0)
            places.append([n for n in inside if answer[n] != canvas.mask_token])
        canvas.edit(hidden, places, self._above, first)

    def settle(self, blocks: list[Block]) -> bool:
        """After a read: a block without masks in which the forward has changed nothing is final. Whether there is one."""
        canvas, final = self._canvas, False
        assert canvas.final_ends is not None
        for number, block in enumerate(blocks):
            if canvas.active[number] and block.complete:
                block.edits += 1
                block.complete = canvas.answers[number] == self._before[number]
                if block.complete:
                    canvas.final_ends[number], block.edits, final = block.end - canvas.starts[number], 0, True
        return final


class Block:
    """The block of a sequence, and what the next forward covers. Positions are relative to the text's first token.

    Attributes:
        start, end: of the block.
        complete: it has no masked position: the forward writes its final K and V, and may give one more token.
        whole: the forward runs the whole block, not only the small one.
        rows: the first row of the forward, and the one after the last.
        window: positions that the forward fills: in the small block, or the first one after the block.
        step: number of the forward among those of its small block.
    """

    def __init__(self, start: int, shift: int) -> None:
        self.start, self._shift = start, shift  # a row predicts the position this many after it
        self.end, self.rows, self.window = start, (start, start), (start, start)
        self.complete, self.whole = False, True
        self.kept = False  # K and V of the block are in the cache
        self.step, self._first = -1, -1
        self.edits = 0  # forwards over the block without masks, if such edit it

    def look(self, answer: list[int], mask: int, prompt: int, sizes: tuple[int, int], keep: bool) -> None:
        """Determines the next forward from the text, where `answer` comes after `prompt` tokens."""
        size, small = sizes
        self.end = min(self.start + size, prompt + len(answer))
        # The prompt's tokens are part of it.
        opens = (n for n in range(max(self.start, prompt), self.end) if answer[n - prompt] == mask)
        position = next(opens, None)
        self.complete = position is None
        if position is None:
            self.whole, self.rows, self.window = True, (self.start, self.end), (self.end, self.end + self._shift)
            return
        first = self.start + (position - self.start) // small * small
        last = min(first + small, self.end)
        self.step = self.step + 1 if first == self._first else 0
        self._first = first
        self.whole = not self.kept or not keep or position < first + self._shift
        self.rows = (self.start, self.end) if self.whole else (first, last)
        self.window = first, last


class Blocks:
    """The blocks of all sequences, and forwards over them.

    Attributes:
        all: the block of each sequence.
        cache: of the model, with the rows before the blocks.
    """

    first_row: torch.Tensor | None = None
    state: tuple[torch.Tensor, ...] = ()

    def __init__(
        self,
        session: Session,
        canvas: Canvas,
        block_size: int,
        small_block_size: int,
        steps: int | None,
        keep: bool,
        page_size: int | None,
    ) -> None:
        self._model, self._canvas = session.model, canvas
        self._sizes, self._keep = (block_size, small_block_size), keep
        self._steps = small_block_size if steps is None else min(steps, small_block_size)
        self._shift = rows_ahead(session.model)
        self.width = min(block_size, canvas.tokens.shape[1])
        self.cache = session.new_cache(page_size, drafts=self.width)
        self._row = torch.arange(self.width, device=canvas.tokens.device)
        self.restart(session)

    def restart(self, session: Session) -> None:
        """Begins the texts of a session."""
        size, self._prompts = self._sizes[0], list(session.prompts)
        self.all = [Block(len(prompt) // size * size, self._shift) for prompt in self._prompts]

    def admit(self, number: int, other: Blocks, other_number: int) -> None:
        """Takes over a sequence, but for its rows."""
        self._prompts[number], self.all[number] = other._prompts[other_number], copy.copy(other.all[other_number])

    @property
    def begun(self) -> list[bool]:
        """Which prompts have whole blocks, for `prompts`."""
        return [block.start > 0 for block in self.all]

    def prompts(self) -> tuple[Step, torch.Tensor]:
        """Runs the whole blocks of the prompts: what that may fill, the next token after whole blocks only, and hidden
        states."""
        canvas, starts = self._canvas, [block.start for block in self.all]
        width = max(starts)
        tokens = canvas.tokens[:, :width]
        mask = block_causal(width, self._sizes[0]).plan(64, 64, tokens.device)
        next_tokens = [self._shift * (start == n) for start, n in zip(starts, canvas.starts, strict=True)]
        step = canvas.open([(0, count) for count in next_tokens], [starts])
        return step, self._model.hidden(tokens, cache=self.cache, counts=step.columns[0], mask=mask)

    def next(self, stepping: Sequence[bool]) -> Step:
        """What the next forward may fill in the sequences that take it, from row ``step.columns[0]`` on."""
        canvas, blocks = self._canvas, self.all
        for block, answer, prompt, takes in zip(blocks, canvas.answers, canvas.starts, stepping, strict=True):
            if takes:
                block.look(answer, canvas.mask_token, prompt, self._sizes, self._keep)
        windows = [(block.window[0] - n, block.window[1] - n) for block, n in zip(blocks, canvas.starts, strict=True)]
        first, last = ([block.rows[side] for block in blocks] for side in range(2))
        counts = [takes * (there - here) for takes, here, there in zip(stepping, first, last, strict=True)]
        small, ends = self._sizes[1], [block.end for block in blocks]
        minimum = [1 if block.complete else share(small, self._steps, block.step) for block in blocks]
        return canvas.open(windows, [first, counts, ends, minimum])

    def forward(self, step: Step) -> torch.Tensor:
        """Hidden states of the rows of `step`."""
        canvas, small = self._canvas, self._sizes[1]
        wide = any(active and block.whole for active, block in zip(canvas.active, self.all, strict=True))
        rows = step.columns[0][:, None] + self._row[: None if wide else small]
        tokens = canvas.tokens.gather(1, rows.clamp(max=canvas.tokens.shape[1] - 1))
        return self.run(step, tokens, self.cache)

    def run(self, step: Step, tokens: torch.Tensor, cache: Any, copies: int = 1) -> torch.Tensor:
        """A forward over `tokens`, with the rows of `step` for each of several copies."""
        starts, counts, ends = (column.repeat(copies) for column in step.columns[:3])
        hidden: torch.Tensor = self._model.recompute(tokens, cache, starts, counts=counts, visible=ends)
        return hidden

    def texts(self) -> list[tuple[int, ...]]:
        """The block of each sequence, as the host has last read it."""
        canvas, size = self._canvas, self._sizes[0]
        prompts = zip(self.all, self._prompts, canvas.answers, strict=True)
        return [tuple((prompt + answer)[block.start : block.start + size]) for block, prompt, answer in prompts]

    def coming(self, number: int, threshold: float) -> list[int]:
        """How many positions the next steps of a sequence may fill: with a threshold that can be reached, any number."""
        small, step = min(self._sizes[1], self.width), max(self.all[number].step, 0)
        shares = [share(small, self._steps, min(n, self._steps - 1)) for n in range(step, step + small)]
        return shares if threshold >= 1 else shares[:1] + [1] * small

    def move_on(self) -> None:
        """After a forward: moves to the next block if this one was complete."""
        for block in self.all:
            block.kept = (block.kept or block.whole) and not block.complete
            if block.complete:
                block.start = block.end
