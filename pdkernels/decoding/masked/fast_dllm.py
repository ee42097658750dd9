"""Fast-dLLM: blocks of a canvas, filled in parallel by confidence, on a KV cache that is refreshed once per block.

Source: "Fast-dLLM", sections 3.2 and 3.3, and the released code. The plain form is reference/fast_dllm.py; both take
the same forwards, draw the same tokens and fill the same positions. A block that is complete after its first forward
has no further one, as in the later revision of that code.

A block begins with a forward over the whole canvas, which rewrites all K and V. Until the block is complete, further
forwards take fewer rows: those from the block on ("prefix"), or the block's own ("dual"), whose K and V replace those
at their positions. All sequences of a batch fill their blocks in step: one whose block is complete waits for the
others, taking part in no forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch

from pdkernels._validation import check
from pdkernels.decoding.canvas.canvas import Canvas, GuessOptions, blocks_of, checked_masked_model, share
from pdkernels.decoding.canvas.checks import check_keeps_rows
from pdkernels.decoding.canvas.forward import WholeCanvas
from pdkernels.decoding.canvas.steps import CanvasSteps
from pdkernels.decoding.steps import Row, with_defaults
from pdkernels.generation.noise import checked_name, checked_number, checked_size
from pdkernels.generation.session import Session
from pdkernels.models.capabilities import rows_ahead

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
    mask_token: int | None = None,
    page_size: int | None = None,
) -> int:
    """Fills `session` block by block. A filled position is never revised.

    Args:
        block_size: new positions that are filled together.
        cache: "dual" recomputes only the block, "prefix" the block and everything after it, "none" the whole canvas.
        threshold: fill every position whose confidence reaches it, and always the most confident one.
        factor: fill positions in order of confidence while the confidence of the n-th is at least ``1 - factor / (n +
            1)``.
        steps: number of forwards, if `threshold` and `factor` are None. They are divided evenly among the blocks, and
            the positions of a block evenly among its forwards. None: one per token.
        temperature: sampling temperature of the guesses; positions are chosen by their confidence at temperature 1,
            without filters.

    Where rows predict the next token and there is a cache, a block's first forward fills only the block's first
    position, however confident it is: that is predicted by the row before the block, which its other forwards leave
    out.

    Returns:
        Forwards that the sequences took part in, summed.
    """
    canvas, blocks = begin(session, block_size, cache, threshold, factor, steps, mask_token)
    limit = session.max_new_tokens
    if blocks == 0:
        return canvas.finish()

    rows = Rows(session, canvas, page_size)
    # With a cache, and rows that predict the next token: an entry fills only the first position.
    next_token = rows_ahead(session.model) if cache != "none" else 0
    remaining = limit + block_size  # with a cache: positions from the beginning of the block on
    # The block's first position, counted from the end of the prompt, and forwards over the block so far.
    first, forwards = [0] * session.batch, [0] * session.batch
    entry, open_ = True, canvas.active
    while canvas.unfinished:
        canvas.begin(open_)
        alone = entry and next_token
        last = [min(n + block_size, limit) for n in first]
        quotas = [0] * session.batch
        if steps is not None:
            masks = [max(0, there - here - next_token) for here, there in zip(first, last, strict=True)]
            runs = max(1, steps // blocks - next_token)
            quotas = [1 if alone else share(n, runs, run - next_token) for n, run in zip(masks, forwards, strict=True)]
        windows = [(n, n + 1) for n in first] if alone else list(zip(first, last, strict=True))
        step = canvas.open(windows, [[n + m for n, m in zip(canvas.starts, first, strict=True)], quotas])
        if entry:
            remaining -= block_size
            start, hidden = None, rows()
        else:
            start = step.columns[0]
            hidden = rows.recompute(start, remaining if cache == "prefix" else min(block_size, remaining))
        guesses = canvas.guess(hidden, step, start)
        rule: dict[str, Any] = {} if alone else {"threshold": threshold, "factor": factor}
        if steps is not None:
            rule = {"quota": step.columns[1]}
        canvas.commit(step, guesses.ids, guesses.probs, **rule)
        canvas.poll()

        open_ = [canvas.is_open(sequence, *window) for sequence, window in enumerate(zip(first, last, strict=True))]
        entry = cache == "none" or not any(a and b for a, b in zip(open_, canvas.active, strict=True))
        if entry:  # sequences done with their block go on to the next one; with a cache these are all
            first = [n if active else min(n + block_size, limit) for n, active in zip(first, open_, strict=True)]
        forwards = [n + 1 if active or not entry else 0 for n, active in zip(forwards, open_, strict=True)]
        if entry:
            open_ = canvas.active
    return canvas.finish()


def begin(
    session: Session,
    block_size: int,
    cache: Kept,
    threshold: float | None,
    factor: float | None,
    steps: int | None,
    mask_token: int | None,
) -> tuple[Canvas, int]:
    """The canvas of `decode`, whose options are checked, and how many blocks it has."""
    mask_token = checked_masked_model(_OP, session, mask_token)
    checked_size(_OP, "block_size", block_size)
    checked_name(_OP, "cache", cache, get_args(Kept))
    for name, value in (("threshold", threshold), ("factor", factor)):
        if value is not None:
            checked_number(_OP, name, value)
    check(
        threshold is None or factor is None, _OP, "factor", "be None with a threshold", factor, "Pass threshold=None."
    )
    check(factor != math.inf, _OP, "factor", "be finite", factor)
    blocks = len(blocks_of(session.max_new_tokens, block_size))
    if steps is not None:
        checked_size(_OP, "steps", steps)
        check(
            threshold is None and factor is None,
            _OP,
            "steps",
            "be None with a threshold or a factor",
            steps,
            "Pass threshold=None and factor=None.",
        )
        check(
            blocks == 0 or steps % blocks == 0, _OP, "steps", f"be a multiple of the number of blocks ({blocks})", steps
        )
    if cache != "none":
        check_keeps_rows(_OP, session, "Pass cache='none', or see docs/own_models.md.")
    check(
        session.tails is None or steps is None,
        _OP,
        "steps",
        "be None with infill=True",
        steps,
        "The blocks then have different numbers of masks.",
    )
    return Canvas(session, mask_token, GuessOptions(session.sampler.when_drawing)), blocks


class Rows(WholeCanvas):
    """Forwards over adjacent rows of the canvases; all others are in the KV cache as last computed."""

    def recompute(self, starts: torch.Tensor, width: int, counts: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states ``(batch, width, hidden_size)`` of the rows from `starts` ``(batch,)`` on, of which the first
        `counts` are in the text; they see the whole canvas."""
        rows = starts[:, None] + torch.arange(width, device=starts.device)
        if counts is not None:
            rows = rows.clamp(max=self.width - 1)
        tokens = self._canvas.tokens.gather(1, rows)
        hidden: torch.Tensor = self._model.recompute(
            tokens, self.cache, starts, counts=counts, visible=self._canvas.totals
        )
        return hidden


class FastSteps(CanvasSteps):
    """`decode` with the blocks' bounds on the device. With a cache a step has two forms: a block's later forwards, and
    its first."""

    def __init__(self, session: Session, *, page_size: int | None = None, **options: Any) -> None:
        chosen = with_defaults(decode, options)
        del chosen["page_size"]
        canvas, blocks = begin(session, **chosen)
        self.block_size, self.threshold, self.factor = chosen["block_size"], chosen["threshold"], chosen["factor"]
        self.cached = chosen["cache"] != "none"
        self.forms = ("step", "enter") if self.cached else ("step",)
        self.next_token = rows_ahead(session.model) if self.cached else 0
        self.runs = None if chosen["steps"] is None else max(1, chosen["steps"] // blocks - self.next_token)
        self.rows = Rows(session, canvas, page_size)
        self._build(session, canvas, self.rows, min(self.block_size, canvas.limit))
        self.width = len(self.slot) if chosen["cache"] == "dual" else self.limit
        # The block's first position, counted from the end of the prompt, and forwards over the block so far.
        self.begins, self.taken = torch.zeros_like(self.number), torch.zeros_like(self.number)

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        return *super().state, self.begins, self.taken

    def ready(self, rows: Sequence[Row]) -> bool:
        # Only the forward that a block begins with computes whole canvases.
        return not self.cached or rows[0].form == 1 or not any(row.pending for row in rows)

    def joined(self) -> None:
        self.entry.form.fill_(int(self.cached))

    def start(self, session: Session) -> None:
        super().start(session)
        self.begins.zero_()
        self.taken.zero_()
        self.entry.form.fill_(int(self.cached))

    def step(self, width: int | None = None, ragged: bool = True) -> None:
        if not self.cached:
            super().step()
            return
        step, rule = self._open()
        start = self.canvas.prompt_lengths + self.begins
        counts = (self.canvas.totals - start).clamp(max=self.width)
        self._fill(step, rule, self.rows.recompute(start, self.width, counts), start)

    def enter(self, width: int | None = None, ragged: bool = True) -> None:
        """The forward over all rows that a block begins with."""
        step, rule = self._open(first_only=self.next_token > 0)
        self._fill(step, rule, self.rows(), None)

    @property
    def _last(self) -> torch.Tensor:
        last: torch.Tensor = (self.begins + self.block_size).clamp(max=self.limit)
        return last

    def _plan(self, first_only: bool = False) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        if first_only:
            return self.begins, self.begins + 1, {}
        if self.runs is None:
            return self.begins, self._last, {"threshold": self.threshold, "factor": self.factor}
        masks = (self._last - self.begins - self.next_token).clamp(min=0)
        quota = masks // self.runs + (self.taken - self.next_token < masks % self.runs)  # `share` on the device
        return self.begins, self._last, {"quota": quota}

    def _move(self, masks: torch.Tensor) -> None:
        in_block = (self.offsets >= self.begins[:, None]) & (self.offsets < self._last[:, None])
        open_ = (masks & in_block).any(1)
        # With a cache, sequences wait until the block is complete in all of them.
        enters = ~(open_ & (self.entry.pending > 0)).any().expand_as(open_) if self.cached else torch.ones_like(open_)
        self.taken.copy_(torch.where(open_ | ~enters, self.taken + 1, 0))
        self.begins.copy_(torch.where(enters & ~open_, self._last, self.begins))
        self.entry.taking.copy_(self.entry.pending * (open_ | enters))
        if self.cached:
            self.entry.form.copy_(enters)
