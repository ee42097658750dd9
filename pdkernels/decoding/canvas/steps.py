"""Steps of the decoders that fill a canvas, where the device alone decides which window is filled next.

The candidates of a step are the positions of a window, of which there are as many in every step; those without a mask
are left out by their position, -1. So shapes are static, and the head still computes only rows of masks. A forward, the
guesses and the choice of positions are those of the decoders that a host leads (`decoding/canvas/canvas.py`).
"""

from __future__ import annotations

from typing import Any

import torch

from pdkernels.decoding.canvas.canvas import Canvas, Step
from pdkernels.decoding.canvas.forward import WholeCanvas
from pdkernels.decoding.canvas.record import CanvasRecord
from pdkernels.decoding.steps import Entry, Row, Rows, Steps, float_of, unfinished
from pdkernels.generation.session import Session, is_end
from pdkernels.generation.traces import MaskedStep
from pdkernels.ops import TokenStatistics


class CanvasSteps(Steps):
    """An entry has `pending`, 1 while a sequence has masks that it needs; `accepted`, how many were filled; `taking`,
    whether it takes part in the next round; `ran`, 1 if the last round had a forward for it, 0 if it took rows of an
    earlier one, -1 if it waited; the last window, from `first` up to `last`; the `answer`, its new positions; and fp64
    `scores` of the window's positions, as bits.

    A sequence that joins has as many new positions as the others: windows and schedules are made for their number.

    Subclasses define `__init__`, which calls `_build`, and `_plan`.
    """

    any_limit = False
    keeps_pages = True
    follows_grammars = True
    shows_provisional = True

    def _build(self, session: Session, canvas: Canvas, forward: WholeCanvas, widest: int, random: bool = False) -> None:
        """`widest`: maximum number of positions of a window."""
        self.canvas, self.forward, self.random, self.limit = canvas, forward, random, canvas.limit
        device, batch = canvas.tokens.device, session.batch
        self.slot = torch.arange(min(widest, self.limit), device=device)
        self.offsets = torch.arange(self.limit, device=device)
        self.cache, self.seeds, self.ends = forward.cache, canvas.seeds, session.ends_on(device)
        self.number = canvas.prompt_lengths.new_zeros(batch)  # of each sequence's last forward
        columns = {"form": None, "taking": None, "ran": None, "first": None, "last": None}
        self.entry = Entry(batch, device, **columns, answer=self.limit, scores=len(self.slot))

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        return *super().state, self.number, *self.canvas.state, *self.forward.state

    @property
    def live(self) -> tuple[torch.Tensor, ...]:
        return self.entry.pending, self.entry.taking

    @property
    def max_entries(self) -> int:
        """One before the first forward, and one for each, which fills a position."""
        return self.limit + 1

    def _plan(self, first_only: bool = False) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Beginning and end of the next window of each sequence, ``(batch,)``, from the end of the prompt; and the rule
        of `unmask_`. `first_only`: no more than the first position."""
        raise NotImplementedError

    def _move(self, masks: torch.Tensor) -> None:
        """After a step that left `masks` ``(batch, new positions)``."""
        self.entry.taking.copy_(self.entry.pending)

    def start(self, session: Session) -> None:
        self.canvas.restart(session)
        self.forward.restart()
        self.number.zero_()
        entry = self.entry
        entry.table.zero_()
        for column in (entry.pending, entry.taking, entry.ran):
            column.fill_(1)
        entry.answer.fill_(self.canvas.mask_token)

    def step(self, width: int | None = None, ragged: bool = True) -> None:
        step, rule = self._open()
        self._fill(step, rule, self.forward(), self.forward.first_row)

    def _open(self, first_only: bool = False) -> tuple[Step, dict[str, Any]]:
        """The positions that the next forward may fill, and the rule."""
        canvas, (first, last, rule) = self.canvas, self._plan(first_only)
        entry = self.entry
        last = torch.where(entry.taking > 0, last, first)
        windows = canvas.prompt_lengths[:, None] + torch.stack([first, last], 1)
        at = windows[:, :1] + self.slot
        masked = canvas.tokens.gather(1, at.clamp(max=canvas.tokens.shape[1] - 1)) == canvas.mask_token
        positions = at.masked_fill(~masked | (at >= windows[:, 1:]), -1)
        self.number += entry.taking
        entry.first.copy_(windows[:, 0])
        entry.last.copy_(windows[:, 1])
        return Step(windows, positions, False, self.number[:, None]), rule

    def _fill(
        self, step: Step, rule: dict[str, Any], hidden: torch.Tensor, first_row: torch.Tensor | None
    ) -> TokenStatistics:
        canvas, entry = self.canvas, self.entry
        guesses = canvas.guess(hidden, step, first_row)
        scores = canvas.turns(step) if self.random else guesses.probs
        done = canvas.fill(step, guesses.ids, None if self.random else guesses.probs, **rule)
        entry.scores.copy_(scores.double().view(torch.int64))
        entry.answer.copy_(canvas.tokens.gather(1, canvas.prompt_lengths[:, None] + self.offsets))
        masks = entry.answer == canvas.mask_token
        complete = ~masks.any(1)
        if self.ends is not None:
            complete |= (is_end(entry.answer, self.ends) & (masks.cumsum(1) == 0)).any(1)
        no_choice = canvas.no_choice > 0
        entry.accepted.copy_(done.committed.masked_fill(no_choice, -1))
        entry.pending.masked_fill_(complete | no_choice, 0)
        self._move(masks)
        return guesses

    def opened(self, session: Session, rows: Rows) -> int:
        session.canvas = CanvasRecord(session, self.canvas.mask_token)
        return 0  # the prompts have no forward of their own

    def stepped(self, session: Session, before: Rows, rows: Rows) -> int:
        pairs = zip(before, rows, strict=True)
        record, taking_part = session.canvas, [old.taking > 0 and new.ran >= 0 for old, new in pairs]
        ran = any(takes and row.ran > 0 for takes, row in zip(taking_part, rows, strict=True))
        if any(taking_part):
            record.begin(taking_part)
            if not ran:
                record.reuse()
        for sequence, (old, new, taking) in enumerate(zip(before, rows, taking_part, strict=True)):
            if not taking:
                continue
            session.accepted[sequence].append(new.accepted)
            if session.trace is not None:
                session.trace[sequence].append(self._traced(session.prompts[sequence], old, new))
            record.look(sequence, new.answer, no_choice=False)
        return sum(taking_part) if ran else 0

    def provisional(self, session: Session, before: Row | None, row: Row) -> list[int | None]:
        return unfinished(row.answer[len(session.tokens[0]) :], self.canvas.mask_token, session.end_tokens)

    def _traced(self, prompt: list[int], old: Row, new: Row) -> MaskedStep:
        mask, first, last = self.canvas.mask_token, new.first, new.last
        was, now = ([*prompt, *row.answer] for row in (old, new))
        open_ = [at for at in range(first, last) if was[at] == mask]
        confidence = {at: float_of(new.scores[at - first]) for at in open_}
        return MaskedStep(was, {at: now[at] for at in open_ if now[at] != mask}, confidence, (first, last))
