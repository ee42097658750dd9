"""Steps of the decoders that fill a canvas, where the device alone decides which window is filled next.

The candidates of a step are the positions of a window, of which there are as many in every step; those without a mask are left out by
their position, -1. So shapes are static, and the head still computes only rows of masks. A forward, the guesses and the choice
of positions are those of the decoders that a host leads (`decoding/_masked.py`).
"""

from __future__ import annotations

from typing import Any

import torch

from pdkernels.decoding._masked import Canvas, Step
from pdkernels.decoding._masked_forward import WholeCanvas
from pdkernels.decoding._masked_record import CanvasRecord
from pdkernels.decoding._session import Session, is_end
from pdkernels.decoding._steps import Rows, Steps, number_of
from pdkernels.decoding.traces import MaskedStep

_OWN = 6  # columns of an entry before the text


class CanvasSteps(Steps):
    """An entry: whether a sequence still has masks that it needs, how many were filled, the next form and whether the sequence takes
    part in it, the last window, the new positions, and fp64 scores of the window's positions, as bits.

    Subclasses define `__init__`, which calls `_build`, and `_plan`.
    """

    def _build(self, sizes: Session, canvas: Canvas, forward: WholeCanvas, widest: int, random: bool = False) -> None:
        """`widest`: positions of a window at most."""
        self.canvas, self.forward, self.random, self.limit = canvas, forward, random, canvas.limit
        device, batch = canvas.tokens.device, sizes.batch
        self.slot = torch.arange(min(widest, self.limit), device=device)
        self.offsets = torch.arange(self.limit, device=device)
        self.ends = sizes.ends_on(device)
        self.number = canvas.prompt_lengths.new_zeros(batch)  # of each sequence's last forward
        self.entry = self.number.new_zeros(batch, _OWN + self.limit + len(self.slot))
        self.left, self.filled, self.form, self.taking, self.first, self.last = self.entry[:, :_OWN].unbind(1)
        self.answer, self.scores = self.entry[:, _OWN:].split([self.limit, len(self.slot)], 1)
        self.remaining = self.left  # only whether it is 0 matters

    @property
    def most_entries(self) -> int:
        """One before the first forward, and one for each, which fills a position."""
        return self.limit + 1

    def _plan(self, first_only: bool = False) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Beginning and end of the next window of each sequence, ``(batch,)``, from the end of the prompt; and the rule of `unmask_`.
        `first_only`: no more than the first position."""
        raise NotImplementedError

    def _move(self, masks: torch.Tensor) -> None:
        """After a step that left `masks` ``(batch, new positions)``."""
        self.taking.copy_(self.left)

    def start(self, session: Session) -> None:
        self.canvas.restart(session)
        self.forward.restart()
        self.number.zero_()
        self.entry.zero_()
        self.left.fill_(1)
        self.taking.fill_(1)
        self.answer.fill_(self.canvas.mask_token)

    def step(self, width: int | None = None, ragged: bool = True) -> None:
        step, rule = self._open()
        self._fill(step, rule, self.forward(), self.forward.first_row)

    def _open(self, first_only: bool = False) -> tuple[Step, dict[str, Any]]:
        """What the next forward may fill, and by which rule."""
        canvas, (first, last, rule) = self.canvas, self._plan(first_only)
        last = torch.where(self.taking > 0, last, first)
        windows = canvas.prompt_lengths[:, None] + torch.stack([first, last], 1)
        at = windows[:, :1] + self.slot
        masked = canvas.tokens.gather(1, at.clamp(max=canvas.tokens.shape[1] - 1)) == canvas.mask_token
        positions = at.masked_fill(~masked | (at >= windows[:, 1:]), -1)
        self.number += self.taking
        self.first.copy_(windows[:, 0])
        self.last.copy_(windows[:, 1])
        return Step(windows, positions, False, self.number[:, None]), rule

    def _fill(self, step: Step, rule: dict[str, Any], hidden: torch.Tensor, first_row: torch.Tensor | None) -> None:
        canvas = self.canvas
        guesses = canvas.guess(hidden, step, first_row)
        scores = canvas.turns(step) if self.random else guesses.probs
        done = canvas.fill(step, guesses.ids, None if self.random else guesses.probs, **rule)
        self.scores.copy_(scores.double().view(torch.int64))
        self.answer.copy_(canvas.tokens.gather(1, canvas.prompt_lengths[:, None] + self.offsets))
        masks = self.answer == canvas.mask_token
        over = ~masks.any(1)
        if self.ends is not None:
            over |= (is_end(self.answer, self.ends) & (masks.cumsum(1) == 0)).any(1)
        broken = canvas.broken > 0
        self.filled.copy_(done.committed.masked_fill(broken, -1))
        self.left.masked_fill_(over | broken, 0)
        self._move(masks)

    def opened(self, session: Session, rows: Rows) -> int:
        self.record = CanvasRecord(session, self.canvas.mask_token)
        return 0  # the prompts have no forward of their own

    def stepped(self, session: Session, before: Rows, rows: Rows) -> int:
        record, part = self.record, [row[3] > 0 for row in before]
        record.begin(part)
        for sequence, (old, new, taking) in enumerate(zip(before, rows, part, strict=True)):
            if not taking:
                continue
            session.accepted[sequence].append(new[1])
            if session.trace is not None:
                session.trace[sequence].append(self._traced(session.prompts[sequence], old, new))
            record.look(sequence, new[_OWN : _OWN + self.limit], broken=False)
        return sum(part)

    def _traced(self, prompt: list[int], old: list[int], new: list[int]) -> MaskedStep:
        mask, (first, last) = self.canvas.mask_token, new[4:6]
        was, now = ([*prompt, *row[_OWN : _OWN + self.limit]] for row in (old, new))
        open_ = [at for at in range(first, last) if was[at] == mask]
        bits = new[_OWN + self.limit :]
        confidence = {at: number_of(bits[at - first]) for at in open_}
        return MaskedStep(was, {at: now[at] for at in open_ if now[at] != mask}, confidence, (first, last))
