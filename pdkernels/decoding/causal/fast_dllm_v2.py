"""Fast-dLLM v2: block diffusion on an exact prefix, block by block in small blocks, with a KV cache inside the block
too.

Sources: "Fast-dLLM v2: Efficient Block-Diffusion LLM" and the released code; for models that predict their own tokens,
the samplers published with SDAR and LLaDA2, which are this one with small blocks as large as the block. The plain form
is reference/fast_dllm_v2.py; both take the same forwards, draw the same tokens and fill the same positions.

Blocks begin at multiples of their size in the text, and every row sees its own block and those before it. The prompt's
whole blocks go through the model first. A block is filled small block by small block; when it is complete, one more
forward writes its K and V, which are exact from then on, and gives the first token of the next block if rows predict
the next token. In between, a forward takes the whole block, or only the rows of the small block, with the others as
last computed. All rows go to their positions in the KV cache, so that every sequence of a batch can be in its own
phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from pdkernels._validation import check, check_type
from pdkernels.decoding.canvas.canvas import Canvas, GuessOptions, Step, share
from pdkernels.decoding.canvas.checks import check_keeps_rows
from pdkernels.decoding.canvas.states import checked_states
from pdkernels.decoding.causal._block_states import BlockStates
from pdkernels.decoding.causal._rewriting import EditRules, Rewriting
from pdkernels.generation.noise import checked_flag, checked_mask_token, checked_number, checked_size
from pdkernels.generation.session import Session
from pdkernels.masks import block_causal
from pdkernels.models.capabilities import rows_ahead
from pdkernels.ops import TokenStatistics

_OP = "decoding.fast_dllm_v2"


def decode(
    session: Session,
    *,
    block_size: int = 32,
    small_block_size: int = 8,
    threshold: float = 0.9,
    steps: int | None = None,
    block_cache: bool = True,
    edit_threshold: float | None = None,
    max_edits: int = 16,
    delete_token: int | None = None,
    split_token: int | None = None,
    speculate: int = 0,
    mask_token: int | None = None,
    page_size: int | None = None,
) -> int:
    """Fills `session` block by block. A filled position is never revised, unless `edit_threshold` is set.

    Args:
        block_size: positions of a block; blocks are counted from the text's first token.
        small_block_size: positions of a block that are filled together, from left to right.
        threshold: fill every position whose confidence is above it, but at least the step's share of positions, the
            most confident ones first.
        steps: maximum forwards per small block, over which its positions are spread evenly. None: one per position.
        block_cache: keep K and V of the block between its forwards, which then run only the small block's rows, unless
            its first position is masked and predicted by the row before it. False: all run the whole block.
        edit_threshold: replace a token of the block, but not of the prompt, wherever a forward has another guess that is
            more probable than this (LLaDA2.1). A block is then final, and reported, after a forward that changes
            nothing in it. At temperature 0, for rows that predict their own tokens, with small blocks as large as the
            block. None: tokens stay.
        max_edits: maximum number of forwards that edit a block without masks.
        delete_token, split_token: ids with which a guess deletes its position, or inserts a mask before it (LLaDA2.2);
            the rest of the block moves. Both or neither, with `edit_threshold`, and without a bias or penalties.
            `max_edits` then counts the forwards over a block without masks that were there at its beginning.
        speculate: further states of a block that a forward computes, those that the coming steps may reach. A step whose
            state is among them needs no forward, not even the last one over a complete block; the tokens are the same.
            Where forwards run whole blocks: with small blocks as large as the block, or without `block_cache`; and
            without `edit_threshold`.
        temperature: sampling temperature of the guesses; their confidence is their probability at that temperature,
            after filters, which apply above 0 only.

    Returns:
        Forwards that the sequences took part in, summed.
    """
    config = session.model.config
    kind = getattr(config, "attention", None), getattr(config, "predicts", None)
    actual = type(session.model).__name__ if None in kind else f"attention {kind[0]!r} and predicts {kind[1]!r}"
    check_type(kind in (("causal", "next"), ("causal", "own")), _OP, "model", "be a causal one", actual)
    check_keeps_rows(_OP, session, "See docs/own_models.md.")
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
    if steps is not None:
        checked_size(_OP, "steps", steps)
    checked_flag(_OP, "block_cache", block_cache)
    checked_size(_OP, "max_edits", max_edits)
    if edit_threshold is not None:
        _check_edits(session, edit_threshold, kind[1] == "own", small_block_size == block_size)
    edit_tokens = mask_token, delete_token, split_token
    rules = _checked_rules(session, threshold, edit_threshold, max_edits, *edit_tokens, block_size)
    if checked_states(_OP, speculate) > 0:
        whole = small_block_size == block_size or not block_cache
        check(whole, _OP, "speculate", "be 0 with small blocks and block_cache", speculate, "Pass block_cache=False.")
        check(edit_threshold is None, _OP, "speculate", "be 0 with edit_threshold", speculate)
    canvas = Canvas(session, mask_token, GuessOptions(session.sampler.when_drawing, "sampling"))
    if not canvas.unfinished:
        return canvas.finish()
    blocks = Blocks(session, canvas, block_size, small_block_size, steps, block_cache, page_size)
    if speculate:
        states = BlockStates(session, blocks.cache, blocks.width, 1 + speculate, page_size)
        return _fill_speculating(canvas, blocks, states, threshold)
    if rules is not None:
        return _fill_rewriting(canvas, blocks, Rewriting(session, canvas, rules))
    edits = None if edit_threshold is None else Edits(canvas, edit_threshold, max_edits)
    if blocks.prompts():
        canvas.poll()
    while canvas.unfinished:
        canvas.begin()
        step = blocks.next(canvas.active)
        hidden = blocks.forward(step)
        blocks.commit(step, hidden, threshold)
        if edits is not None:
            edits.write(hidden, blocks.all, step.columns[0])
        canvas.poll()
        if edits is not None:
            edits.settle(blocks.all)
        blocks.move_on()
    return canvas.finish()


def _fill_speculating(canvas: Canvas, blocks: Blocks, states: BlockStates, threshold: float) -> int:
    """The loop with `states` of each block. A sequence whose state is known steps on, while the others wait."""
    if blocks.prompts():
        canvas.poll()
    while canvas.unfinished:
        texts = blocks.texts()
        stepping, runs = states.stepping(texts, canvas.active)
        canvas.begin(stepping)
        if not runs:
            canvas.reuse()
        step = blocks.next(stepping)
        if runs:
            coming = [blocks.coming(number, threshold) for number in range(len(texts))]
            starts = [block.start for block in blocks.all]
            forward = partial(blocks.run, step)
            states.compute(forward, texts, stepping, coming, starts, canvas.tokens.device)
        guesses = blocks.commit(step, states.hidden(texts, stepping), threshold)
        canvas.poll()
        for number, (block, text) in enumerate(zip(blocks.all, texts, strict=True)):
            if stepping[number] and block.complete:
                states.keep(number, text, block.end)
                states.begin([number])
        slots = [
            [at - block.start if at >= 0 else at for at in row]
            for row, block in zip(step.positions.tolist(), blocks.all, strict=True)
        ]
        going_on = [takes and not block.complete for takes, block in zip(stepping, blocks.all, strict=True)]
        states.expect(blocks.texts(), slots, guesses.ids, guesses.probs, going_on, canvas.mask_token)
        blocks.move_on()
    return canvas.finish()


def _fill_rewriting(canvas: Canvas, blocks: Blocks, rewriting: Rewriting) -> int:
    """The loop in which tokens are deleted and inserted, too."""
    if blocks.prompts():
        canvas.poll()
    while canvas.unfinished:
        canvas.begin()
        hidden = blocks.forward(blocks.next(canvas.active))
        rewriting.write(hidden, blocks.all)
        canvas.poll()
        rewriting.settle(blocks.all)
        blocks.move_on()
    return canvas.finish()


def _checked_rules(
    session: Session,
    threshold: float,
    edit_threshold: float | None,
    max_edits: int,
    mask_token: int,
    delete_token: int | None,
    split_token: int | None,
    block_size: int,
) -> EditRules | None:
    """How LLaDA2.2 edits, if its tokens are given."""
    names = ("delete_token", "split_token")
    if delete_token is None and split_token is None:
        return None
    for name, token, other in zip(names, (delete_token, split_token), names[::-1], strict=True):
        check(token is not None, _OP, name, f"be given with {other}", token)
        valid = type(token) is int and 0 <= token < session.model.config.vocab_size
        check(valid, _OP, name, f"be an id below vocab_size ({session.model.config.vocab_size})", token)
        check(token != mask_token, _OP, name, "not be the mask token", token)
    assert delete_token is not None and split_token is not None
    check(delete_token != split_token, _OP, "split_token", "be another token than delete_token", split_token)
    check(edit_threshold is not None, _OP, "delete_token", "be None without edit_threshold", delete_token)
    check(
        not session.filters.any, _OP, "delete_token", "be None with a bias, penalties or excluded tokens", delete_token
    )
    assert edit_threshold is not None
    return EditRules(threshold, edit_threshold, max_edits, mask_token, delete_token, split_token, block_size)


def _check_edits(session: Session, threshold: float, predicts_own: bool, whole_blocks: bool) -> None:
    checked_number(_OP, "edit_threshold", threshold, 1.0)
    for fits, expectation in (
        (predicts_own, "be None where a row predicts the next token"),
        (whole_blocks, "be None with small blocks that are smaller than the block"),
        (session.params.temperature == 0, "be None with a temperature above 0"),
        (session.grammar is None, "be None with a grammar"),
        (session.likely is None, "be None with logprobs, which are those of the forward that fills a position"),
    ):
        check(fits, _OP, "edit_threshold", expectation, threshold)


class Edits:
    """Tokens of blocks that are replaced, and which blocks are final."""

    def __init__(self, canvas: Canvas, above: float, most: int) -> None:
        self._canvas, self._above, self._most = canvas, above, most
        self._before: list[list[int]] = []
        canvas.final_ends = [0] * len(canvas.starts)

    def write(self, hidden: torch.Tensor, blocks: list[Block], first: torch.Tensor) -> None:
        """After the masks of a forward are filled: replaces tokens that were there before it."""
        canvas, places = self._canvas, []
        self._before = canvas.answers[:]
        for block, answer, prompt, on in zip(blocks, canvas.answers, canvas.starts, canvas.active, strict=True):
            may = on and not (block.complete and block.edits >= self._most)
            inside = range(max(block.start - prompt, 0), block.end - prompt) if may else range(0)
            places.append([n for n in inside if answer[n] != canvas.mask_token])
        canvas.edit(hidden, places, self._above, first)

    def settle(self, blocks: list[Block]) -> None:
        """After a poll: a block without masks in which the forward has changed nothing is final."""
        canvas, final = self._canvas, False
        assert canvas.final_ends is not None
        for number, block in enumerate(blocks):
            if canvas.active[number] and block.complete:
                block.edits += 1
                block.complete = canvas.answers[number] == self._before[number]
                if block.complete:
                    canvas.final_ends[number], block.edits, final = block.end - canvas.starts[number], 0, True
        if final:
            canvas.poll()


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
    """The blocks of all sequences, and forwards over them."""

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
        self._session, self._canvas = session, canvas
        self._sizes, self._keep = (block_size, small_block_size), keep
        self._steps = small_block_size if steps is None else min(steps, small_block_size)
        self._shift = rows_ahead(session.model)
        self.cache = session.new_cache(page_size)
        self.width = min(block_size, canvas.tokens.shape[1])
        self._row = torch.arange(self.width, device=canvas.tokens.device)
        self._blocks = self.all = [Block(start // block_size * block_size, self._shift) for start in canvas.starts]

    def prompts(self) -> bool:
        """Runs the whole blocks of the prompts, if any; a prompt of whole blocks only may also give its next token."""
        session, canvas, starts = self._session, self._canvas, [block.start for block in self._blocks]
        width = max(starts)
        if width == 0:
            return False
        canvas.begin([start > 0 for start in starts])
        tokens = canvas.tokens[:, :width]
        mask = block_causal(width, self._sizes[0]).plan(64, 64, tokens.device)
        next_tokens = [self._shift * (start == n) for start, n in zip(starts, canvas.starts, strict=True)]
        step = canvas.open([(0, count) for count in next_tokens], [starts])
        hidden = session.model.hidden(tokens, cache=self.cache, counts=step.columns[0], mask=mask)
        guesses = canvas.guess(hidden, step)
        canvas.commit(step, guesses.ids, guesses.probs)
        return True

    def next(self, stepping: Sequence[bool]) -> Step:
        """What the next forward may fill in the sequences that take it, from row ``step.columns[0]`` on."""
        canvas, blocks = self._canvas, self._blocks
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
        wide = any(active and block.whole for active, block in zip(canvas.active, self._blocks, strict=True))
        rows = step.columns[0][:, None] + self._row[: None if wide else small]
        tokens = canvas.tokens.gather(1, rows.clamp(max=canvas.tokens.shape[1] - 1))
        return self.run(step, tokens, self.cache)

    def run(self, step: Step, tokens: torch.Tensor, cache: Any, copies: int = 1) -> torch.Tensor:
        """A forward over `tokens`, with the rows of `step` for each of several copies."""
        starts, counts, ends = (column.repeat(copies) for column in step.columns[:3])
        hidden: torch.Tensor = self._session.model.recompute(tokens, cache, starts, counts=counts, visible=ends)
        return hidden

    def commit(self, step: Step, hidden: torch.Tensor, threshold: float) -> TokenStatistics:
        """Fills what `step` fills, and returns the guesses."""
        guesses, minimum = self._canvas.guess(hidden, step, step.columns[0]), step.columns[3]
        rule: dict[str, Any] = {"threshold": threshold, "strict": True, "min_count": minimum, "quota": minimum}
        self._canvas.commit(step, guesses.ids, guesses.probs, **rule)
        return guesses

    def texts(self) -> list[tuple[int, ...]]:
        """The block of each sequence, as of the last poll."""
        canvas, size = self._canvas, self._sizes[0]
        prompts = zip(self._blocks, self._session.prompts, canvas.answers, strict=True)
        return [tuple((prompt + answer)[block.start : block.start + size]) for block, prompt, answer in prompts]

    def coming(self, number: int, threshold: float) -> list[int]:
        """How many positions the next steps of a sequence may fill: with a threshold that can be reached, any number."""
        small, step = self._sizes[1], max(self._blocks[number].step, 0)
        shares = [share(small, self._steps, min(n, self._steps - 1)) for n in range(step, step + small)]
        return shares if threshold >= 1 else shares[:1] + [1] * small

    def move_on(self) -> None:
        """After a forward: moves to the next block if this one was complete."""
        for block in self._blocks:
            block.kept = (block.kept or block.whole) and not block.complete
            if block.complete:
                block.start = block.end
