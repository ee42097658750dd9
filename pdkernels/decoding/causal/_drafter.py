"""What decoders with a second model share: a step drafts with it first, then the target verifies."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from pdkernels._validation import check, refuse
from pdkernels.decoding.costs import StepCosts
from pdkernels.decoding.steps import DraftSteps, Rows, Steps
from pdkernels.generation.noise import OWN
from pdkernels.generation.sampler import Sampler
from pdkernels.generation.session import Session, has_no_choice, to_device_async
from pdkernels.models.protocols import keeps_windows
from pdkernels.ops import verify_draft

UNREAD = 16
"""Rows that may wait while nothing is drafted: a drafter reads them together."""


class DrafterSteps(DraftSteps):
    """Steps that draft, verify, and take over what was accepted.

    A draft is made at the beginning of its step, when the host knows how long it may be: `entry.draft` is the known
    token alone, and `entry.verified` the draft of the last step.
    """

    drafter: Any
    drafted: Any
    """The drafter's cache. Its lengths are those of its committed rows, never more than the target's."""
    sampler: Sampler
    banned: tuple[int, ...]
    _forced: torch.Tensor | None = None
    """``(batch, slots - 1)``: what grammars force in the next draft, -1 elsewhere."""

    def allocate_drafter(
        self,
        op: str,
        session: Session,
        slots: int,
        page_size: int | None,
        drafter: Any,
        costs: StepCosts | None = None,
        rows: int = 0,
        drafted: int = 0,
    ) -> None:
        """`allocate`, and the drafter's cache, whose rows past a text have room too: `slots` of them, or `drafted` if
        these are more."""
        columns = {"draft": 1, "verified": slots, "predictions": slots, "checked": None}
        self.allocate(session, slots, page_size, costs=costs, rows=rows, **columns)
        self.drafter = drafter
        room = max(slots, drafted)
        few = {"drafts": room + UNREAD} if keeps_windows(drafter) else {}
        self.drafted = drafter.new_cache(session.batch, session.longest + session.max_new_tokens + room, **few)
        here, there = self.cache.lengths.device, self.drafted.lengths.device
        check(here == there, op, "drafter", f"be on the model's device ({here})", there)

    @abstractmethod
    def draft(self, width: int) -> torch.Tensor:
        """Guesses ``(batch, width - 1)`` for what follows the known tokens, each as `or_forced` gives it."""

    def or_forced(self, number: int, guess: torch.Tensor) -> torch.Tensor:
        """The guesses ``(batch, 1)`` for token `number` of a draft, but for what a grammar forces there."""
        if self._forced is None:
            return guess
        forced = self._forced[:, number - 1 : number]
        return torch.where(forced < 0, guess, forced)

    def place(self, drafts: Sequence[Sequence[int]]) -> None:
        room = self.slots - 1
        rows = [[*tokens, *[-1] * (room - len(tokens))] for tokens in drafts]
        self._forced = to_device_async(rows, self.cache.lengths.device)

    @abstractmethod
    def forward(self, draft: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
        """The target's logits of a draft."""

    def accept(self, draft: torch.Tensor, accepted: torch.Tensor, next_token: torch.Tensor) -> None:
        """After a commit: takes over the first `accepted` tokens of `draft`, after which comes `next_token`."""

    @property
    def reads_rows(self) -> bool:
        """Whether a step keeps some of its rows for the drafter."""
        return False

    def step(self, width: int | None = None, ragged: bool = True) -> None:
        entry, width = self.entry, width or self.slots
        if width == 1 and not self.reads_rows:
            draft = entry.draft.clone()
            accepted = self.plain_step()
            if accepted is not None:
                entry.checked.copy_(accepted)
                entry.verified[:, :1], entry.predictions[:, :1], self._forced = draft, entry.draft, None
                self._next_length(accepted)
                self.accept(draft, accepted, entry.draft)
                return
        draft = entry.draft.clone() if width == 1 else torch.cat([entry.draft, self.draft(width)], 1)
        self._forced = None
        counts = entry.pending if ragged else None
        logits = self.forward(draft, counts)
        positions = self.cache.lengths[:, None] + 1 + self.slot[:width]
        predictions = self.sampler.sample(logits, positions, self.seeds, OWN, self.banned)
        self.take(draft, entry.pending, logits, predictions)

    def take(
        self,
        draft: torch.Tensor,
        lengths: torch.Tensor,
        logits: torch.Tensor,
        predictions: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> None:
        """Verifies the first `lengths` tokens of each draft ``(batch, width)`` by the target's `predictions`, drawn
        from `logits`.

        `rows`: where they are in the forward; None: in their order.
        """
        entry, valid, width = self.entry, predictions.clamp(min=0), draft.shape[1]
        verdict = verify_draft(draft, valid, draft_lengths=lengths, end_tokens=self.ends)
        if rows is None:  # an argument that caches of most methods need not have
            self.cache.commit_(verdict.accepted)
        else:
            self.cache.commit_(verdict.accepted, rows)
        entry.checked.copy_(lengths)
        entry.verified[:, :width] = draft
        entry.predictions[:, :width] = valid
        entry.draft[:, 0] = verdict.next_token.clamp(min=0)
        self.judge(verdict, has_no_choice(logits, predictions))
        self.accept(draft, verdict.accepted, entry.draft)

    def admit(self, row: int, other: Steps, length: int, capacity: int, other_row: int = 0) -> None:
        super().admit(row, other, length, capacity, other_row)
        assert isinstance(other, DrafterSteps)
        # A drafter may have read less than the text.
        self.drafted.copy_row_(row, other.drafted, other_row, int(other.drafted.lengths[other_row]))

    def stepped(self, session: Session, before: Rows, rows: Rows) -> int:
        taken_part: int = sum(row.pending > 0 for row in before)
        session.forwards += taken_part > 0
        for sequence, (old, row) in enumerate(zip(before, rows, strict=True)):
            if old.pending:
                length = row.checked
                draft, predictions = row.verified[:length], row.predictions[:length]
                session.log_step(sequence, draft, predictions, accepted=row.accepted, next_token=row.draft[0])
        return taken_part


def checked_drafter(op: str, model: Any, requested: Any, method: str) -> Any:
    """The drafter of a call, or the model's own for this method."""
    drafter = getattr(model, "drafters", {}).get(method) if requested is None else requested
    remedy = f"Pass drafter, or put one into the model's attribute `drafters`, a dict, under {method!r}."
    refuse(drafter is None, op, "the model has no drafter for this method", remedy)
    return drafter
