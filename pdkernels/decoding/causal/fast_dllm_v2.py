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

from functools import partial

import torch

from pdkernels._validation import check, check_type
from pdkernels.decoding.canvas.canvas import Canvas, GuessOptions, Step
from pdkernels.decoding.canvas.checks import check_keeps_rows
from pdkernels.decoding.canvas.states import checked_states
from pdkernels.decoding.canvas.steps import CanvasSteps
from pdkernels.decoding.causal._block_states import BlockStates
from pdkernels.decoding.causal._blocks import Blocks, Edits, rule
from pdkernels.decoding.causal._rewriting import EditRules, Rewriting
from pdkernels.decoding.steps import Rows, Steps, decoder
from pdkernels.generation.noise import checked_flag, checked_mask_token, checked_number, checked_size
from pdkernels.generation.session import Session, to_device_async
from pdkernels.ops import TokenStatistics

_OP = "decoding.fast_dllm_v2"


class FastV2Steps(CanvasSteps):
    """A filled position is never revised, unless `edit_threshold` is set. The host leads: each sequence is in its own block.

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
    """

    needs_host, led = "blocks, whose next rows the host chooses", True
    continues = False  # rows of a block see it whole

    def __init__(
        self,
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
    ) -> None:
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
        _check_pools(session, block_size, small_block_size == block_size or not block_cache)
        edit_tokens = mask_token, delete_token, split_token
        rules = _checked_rules(session, threshold, edit_threshold, max_edits, *edit_tokens, block_size)
        if checked_states(_OP, speculate) > 0:
            whole_blocks = small_block_size == block_size or not block_cache
            check(
                whole_blocks,
                _OP,
                "speculate",
                "be 0 with small blocks and block_cache",
                speculate,
                "Pass block_cache=False.",
            )
            check(edit_threshold is None, _OP, "speculate", "be 0 with edit_threshold", speculate)
        canvas = Canvas(session, mask_token, GuessOptions(session.sampler.when_drawing, "sampling"))
        self.threshold, self.rewrites = threshold, rules is not None
        self.blocks = blocks = Blocks(session, canvas, block_size, small_block_size, steps, block_cache, page_size)
        self.edits: Edits | Rewriting | None = None
        if rules is not None:
            self.edits = Rewriting(session, canvas, rules)
        elif edit_threshold is not None:
            self.edits = Edits(canvas, edit_threshold, max_edits)
        sizes = blocks.width, 1 + speculate, page_size, blocks.width
        self.states = BlockStates(session, blocks.cache, *sizes) if speculate else None
        widest = block_size if self.rewrites else small_block_size
        self._build(session, canvas, blocks, min(widest, canvas.tokens.shape[1]))

    def admit(self, row: int, other: Steps, length: int, capacity: int, other_row: int = 0) -> None:
        assert isinstance(other, FastV2Steps)
        super().admit(row, other, other.blocks.all[other_row].start, capacity, other_row)
        self.blocks.admit(row, other.blocks, other_row)
        if self.edits is not None:
            self.edits.begin(row)
        if self.states is not None and other.states is not None:
            self.states.admit(row, other.states, other_row)

    def start(self, session: Session) -> None:
        super().start(session)
        canvas, begun = self.canvas, self.blocks.begun
        if self.edits is not None:
            self.entry.final.zero_()
            for number in range(session.batch):
                self.edits.begin(number)
        if self.states is not None:
            self.states.begin()
        canvas.answers = [[canvas.mask_token] * self.limit for _ in begun]
        self._take(begun, 1, [0] * session.batch)
        if any(begun):
            step, hidden = self.blocks.prompts()
            self._fill(step, {}, hidden, None)
        self.entry.taking.copy_(self.entry.pending)

    def step(self, width: int | None = None, ragged: bool = True) -> None:
        canvas, blocks, states, edits = self.canvas, self.blocks, self.states, self.edits
        stepping, runs, texts = self._read(), True, blocks.texts()
        if states is not None:
            stepping, runs = states.stepping(texts, stepping)
        self._take(stepping, int(runs), [row.number for row in self.entry.seen])
        step = blocks.next(stepping)
        if states is not None:
            hidden = _states_of(blocks, states, step, stepping, runs, self.threshold)
        else:
            hidden = blocks.forward(step)
        if isinstance(edits, Rewriting):
            step, confidence, rewritten, changed = edits.write(hidden, blocks.all)
            canvas.put(step, rewritten)
            self._note(step, confidence, changed)
        elif edits is not None:
            guesses = canvas.guess(hidden, step, step.columns[0])
            done = canvas.fill(step, guesses.ids, guesses.probs, **rule(step, self.threshold))
            edits.write(hidden, blocks.all, step.columns[0])
            self._note(step, guesses.probs, done.committed)
        else:
            guesses = self._fill(step, rule(step, self.threshold), hidden, step.columns[0])
        if edits is not None or states is not None:
            canvas.answers = self.entry.answer.tolist()
        if edits is not None and edits.settle(blocks.all):
            assert canvas.final_ends is not None
            self.entry.final.copy_(to_device_async([canvas.final_ends], canvas.tokens.device)[0])
            self._settle(canvas.no_choice > 0)
        if states is not None:
            _expect(canvas, blocks, states, step, guesses, texts, stepping)
        blocks.move_on()

    def opened(self, session: Session, rows: Rows) -> int:
        super().opened(session, rows)
        begun = [row.ran > 0 for row in rows]
        if any(begun):
            session.canvas.begin(begun)
        for sequence, row in enumerate(rows):
            if begun[sequence]:
                self._recorded(session, sequence, [self.canvas.mask_token] * self.limit, row)
        return sum(begun)


decode = decoder(FastV2Steps)


def _states_of(
    blocks: Blocks, states: BlockStates, step: Step, stepping: list[bool], runs: bool, threshold: float
) -> torch.Tensor:
    """Hidden states of the blocks, after a forward if the step `runs` one."""
    texts = blocks.texts()
    if runs:
        coming = [blocks.coming(number, threshold) for number in range(len(texts))]
        starts = [block.start for block in blocks.all]
        states.compute(partial(blocks.run, step), texts, stepping, coming, starts, step.positions.device)
    return states.hidden(texts, stepping)


def _expect(
    canvas: Canvas,
    blocks: Blocks,
    states: BlockStates,
    step: Step,
    guesses: TokenStatistics,
    texts: list[tuple[int, ...]],
    stepping: list[bool],
) -> None:
    """After a step from `texts`: rows of complete blocks are kept, and the others' guesses are those of the next steps."""
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


def _check_pools(session: Session, block_size: int, whole_blocks: bool) -> None:
    """For a model whose blocks of rows share experts, which those that a forward leaves out would choose with."""
    rows = getattr(getattr(session.model.config, "experts", None), "pool_rows", 0)
    if not rows:
        return
    check(block_size % rows == 0, _OP, "block_size", f"be a multiple of {rows}, whose rows share experts", block_size)
    expectation = "be block_size for a model whose blocks of rows share experts"
    check(whole_blocks, _OP, "small_block_size", expectation, "a smaller one", "Or pass block_cache=False.")


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
