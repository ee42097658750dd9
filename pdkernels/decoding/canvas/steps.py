"""Steps of the decoders that fill a canvas, where the device alone decides which window is filled next.

The candidates of a step are the positions of a window, of which there are as many in every step; those without a mask
are left out by their position, -1. So shapes are static, and the head still computes only rows of masks. A forward, the
guesses and the choice of positions are those of the decoders that a host leads (`decoding/canvas/canvas.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from pdkernels.decoding.canvas.canvas import Canvas, Step
from pdkernels.decoding.canvas.record import CanvasRecord
from pdkernels.decoding.steps import Entry, Row, Rows, Steps, float_of, unfinished
from pdkernels.generation.session import Session, is_end, to_device_async
from pdkernels.generation.traces import MaskedStep
from pdkernels.ops import TokenStatistics


class Forward(Protocol):
    """What the steps use of `forward.py`; those that no host leads also call it."""

    cache: Any

    @property
    def first_row(self) -> torch.Tensor | None: ...

    @property
    def state(self) -> tuple[torch.Tensor, ...]: ...

    def restart(self, session: Session) -> None: ...


class CanvasSteps(Steps):
    """An entry has `pending`, 1 while a sequence has masks that it needs; `accepted`, how many were filled; `taking`,
    whether it takes part in the next round; `ran`, how many forwards the last round had for it, 0 if it took rows of an
    earlier one, -1 if it waited; the `number` of its last forward; the last window, from `first` up to `last`; the `answer`, its new positions, of which
    none from `final` on is final; and fp64 `scores` of the window's positions, as bits.

    A sequence that joins has as many new positions as the others: windows and schedules are made for their number.

    Subclasses define `__init__`, which calls `_build`, and `_plan`; or, where the host chooses windows from the texts that
    `_read` reads, `step`.
    """

    any_limit = False
    keeps_pages = True
    follows_grammars = True
    shows_provisional = True
    led: bool = False
    """Whether steps are those of `Canvas.open`, which have masked positions alone."""
    rewrites: bool = False
    """Whether a step may change every position of its window, not masks alone."""

    def _build(self, session: Session, canvas: Canvas, forward: Forward, widest: int, random: bool = False) -> None:
        """`widest`: maximum number of positions of a window."""
        self.canvas, self.random, self.limit = canvas, random, canvas.limit
        self.forward: Any = forward
        device, batch = canvas.tokens.device, session.batch
        self.slot = torch.arange(widest, device=device)
        self.offsets = torch.arange(self.limit, device=device)
        self.cache, self.seeds, self.ends = forward.cache, canvas.seeds, session.ends_on(device)
        names = ("form", "taking", "ran", "number", "first", "last", "final")
        columns: dict[str, int | None] = dict.fromkeys(names)
        self.entry = Entry(batch, device, **columns, answer=self.limit, scores=len(self.slot))
        self.number = self.entry.number

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        return *super().state, *self.canvas.state, *self.forward.state

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
        self.forward.restart(session)
        entry = self.entry
        entry.table.zero_()
        for column in (entry.pending, entry.taking, entry.ran):
            column.fill_(1)
        entry.final.fill_(self.limit)
        entry.answer.fill_(self.canvas.mask_token)

    def _read(self) -> list[bool]:
        """Takes the texts of the entry, as read, for `Canvas.open`; returns who takes the next round."""
        canvas, rows = self.canvas, self.entry.seen
        canvas.answers = [row.answer for row in rows]
        canvas.active = [row.taking > 0 for row in rows]
        return canvas.active

    def _take(self, stepping: Sequence[bool], ran: int, numbers: Sequence[int]) -> None:
        """Says who takes the round instead, with so many forwards; `numbers`: of the last ones."""
        numbers = [number + takes for number, takes in zip(numbers, stepping, strict=True)]
        taking = zip(stepping, numbers, strict=True)
        moved = to_device_async([[takes, ran if takes else -1, n] for takes, n in taking], self.number.device)
        for column, values in zip((self.entry.taking, self.entry.ran, self.number), moved.unbind(1), strict=True):
            column.copy_(values)
        self.canvas.take(stepping, numbers)

    def _tell_forwards(self, ran: Sequence[int]) -> None:
        """Says how many forwards each sequence took in this round."""
        self.entry.ran.copy_(to_device_async([[*ran]], self.number.device)[0])

    def admit(self, row: int, other: Steps, length: int, capacity: int, other_row: int = 0) -> None:
        super().admit(row, other, length, capacity, other_row)
        assert isinstance(other, CanvasSteps)
        self.canvas.starts[row] = other.canvas.starts[other_row]

    def step(self, width: int | None = None, ragged: bool = True) -> None:
        step, rule = self._open()
        self._fill(step, rule, self.forward(), self.forward.first_row)

    def _open(self, first_only: bool = False) -> tuple[Step, dict[str, Any]]:
        """The positions that the next forward may fill, and the rule."""
        canvas, entry, (first, last, rule) = self.canvas, self.entry, self._plan(first_only)
        last = torch.where(entry.taking > 0, last, first)
        windows = canvas.prompt_lengths[:, None] + torch.stack([first, last], 1)
        at = windows[:, :1] + self.slot
        masked = canvas.tokens.gather(1, at.clamp(max=canvas.tokens.shape[1] - 1)) == canvas.mask_token
        positions = at.masked_fill(~masked | (at >= windows[:, 1:]), -1)
        self.number += entry.taking
        return Step(windows, positions, False, self.number[:, None]), rule

    def _fill(
        self, step: Step, rule: dict[str, Any], hidden: torch.Tensor, first_row: torch.Tensor | None
    ) -> TokenStatistics:
        canvas = self.canvas
        guesses = canvas.guess(hidden, step, first_row)
        confidence, shown = self._confidence(step, guesses)
        done = canvas.fill(step, guesses.ids, confidence, shown, **rule)
        self._note(step, shown, done.committed)
        return guesses

    def _confidence(self, step: Step, guesses: TokenStatistics) -> tuple[torch.Tensor | None, torch.Tensor]:
        """What a step ranks positions by, None for a random order; and what a trace shows of that."""
        return (None, self.canvas.turns(step)) if self.random else (guesses.probs, guesses.probs)

    def _note(self, step: Step, scores: torch.Tensor, committed: torch.Tensor) -> None:
        """Writes the entry, after the canvas has changed."""
        canvas, entry = self.canvas, self.entry
        entry.first.copy_(step.windows[:, 0])
        entry.last.copy_(step.windows[:, 1])
        bits = scores.double().view(torch.int64)
        if self.led:
            at = (step.positions - step.windows[:, :1]).masked_fill(step.positions < 0, len(self.slot))
            bits = bits.new_zeros(len(bits), len(self.slot) + 1).scatter_(1, at, bits)[:, :-1]
        entry.scores.copy_(bits)
        entry.answer.copy_(canvas.tokens.gather(1, canvas.prompt_lengths[:, None] + self.offsets))
        no_choice = canvas.no_choice > 0
        entry.accepted.copy_(committed.masked_fill(no_choice, -1))
        self._settle(no_choice)

    def _settle(self, no_choice: torch.Tensor) -> None:
        """Decides who is done."""
        entry = self.entry
        masks = entry.answer == self.canvas.mask_token
        is_open = masks | (self.offsets >= entry.final[:, None])
        complete = ~is_open.any(1)
        if self.ends is not None:
            complete |= (is_end(entry.answer, self.ends) & (is_open.cumsum(1) == 0)).any(1)
        entry.pending.masked_fill_(complete | no_choice, 0)
        self._move(masks)

    def opened(self, session: Session, rows: Rows) -> int:
        session.canvas = CanvasRecord(session, self.canvas.mask_token)
        return 0  # the prompts have no forward of their own

    def stepped(self, session: Session, before: Rows, rows: Rows) -> int:
        pairs = zip(before, rows, strict=True)
        record, taking_part = session.canvas, [old.taking > 0 and new.ran >= 0 for old, new in pairs]
        ran: int = max((row.ran for takes, row in zip(taking_part, rows, strict=True) if takes), default=0)
        if any(taking_part):
            record.begin(taking_part)
            if ran == 0:
                record.reuse()
        for _ in range(1, ran):
            record.run_again()
        for sequence, (old, new, taking) in enumerate(zip(before, rows, taking_part, strict=True)):
            if taking:
                self._recorded(session, sequence, old.answer, new)
        taken_part: int = ran * sum(taking_part)
        return taken_part

    def _recorded(self, session: Session, sequence: int, answer: list[int], row: Row) -> None:
        """Records a step from `answer` to that of `row`."""
        session.accepted[sequence].append(row.accepted)
        if session.trace is not None:
            session.trace[sequence].append(self._traced(session.prompts[sequence], answer, row))
        record = session.canvas
        if record.final_ends is not None or row.final < self.limit:
            record.final_ends = record.final_ends or [0] * session.batch
            record.final_ends[sequence] = row.final
        record.look(sequence, row.answer, no_choice=False)

    def provisional(self, session: Session, before: Row | None, row: Row) -> list[int | None]:
        return unfinished(row.answer[len(session.tokens[0]) :], self.canvas.mask_token, session.end_tokens)

    def _traced(self, prompt: list[int], answer: list[int], row: Row) -> MaskedStep:
        first, last = row.first, row.last
        was, now = [*prompt, *answer], [*prompt, *row.answer]
        places = range(max(first, len(prompt)), min(last, len(was)))
        open_ = [at for at in places if self.rewrites or was[at] == self.canvas.mask_token]
        confidence = {at: float_of(row.scores[at - first]) for at in open_}
        return MaskedStep(was, {at: now[at] for at in open_ if now[at] != was[at]}, confidence, (first, last))
