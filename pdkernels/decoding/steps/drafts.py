"""Shared by all steps that draft and verify tokens: the end of a draft, and the length of the next one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pdkernels.decoding.steps.contract import Steps
from pdkernels.decoding.steps.entry import Entry, Rows
from pdkernels.decoding.steps.lengths import Lengths
from pdkernels.generation.session import Session, accepted_without_choice, has_no_choice, is_end
from pdkernels.ops.verify_draft import DraftVerdict


class DraftSteps(Steps):
    """Steps with a verified draft each. A decoder calls `allocate` once, `begin` after the prompts' forward and `judge`
    after each verification; it keeps its own way to draft and to verify.

    An entry has `pending`, the length of the next draft; `draft`, that draft, whose first token is known; and
    `predictions`, what the verifier said to the last one.
    """

    lengths: Lengths | None = None
    """What chooses the lengths of drafts, if that is asked for."""

    def allocate(
        self,
        session: Session,
        slots: int,
        page_size: int | None,
        *,
        costs: Sequence[float] = (),
        wake: float = 0.0,
        rows: int = 0,
        **columns: int | None,
    ) -> None:
        """Cache and state for drafts of at most `slots` tokens. `columns` of the entry replace `draft` and
        `predictions`.

        `costs` and `wake`: those of `Lengths`, if the length of drafts is to be chosen by what pays. `rows`: of a
        forward, if a draft has branches and so more rows than tokens that can be accepted.
        """
        self.model, self.limit, self.slots = session.model, session.max_new_tokens, slots
        self.spare = rows if rows > slots else 0
        # Its lengths grow in place with every commit.
        self.cache = session.new_cache(page_size, self.spare, drafts=max(rows, slots))
        device = self.cache.device
        self.seeds, self.ends = session.seeds.to(device), session.ends_on(device)
        self.slot = torch.arange(slots, device=device)
        self.lengths = Lengths(costs, session.batch, device, wake) if costs and slots > 1 else None
        self.remaining = torch.zeros_like(self.cache.lengths)
        """``(batch,)``: remaining tokens; 0 once a sequence is done."""
        self.entry = Entry(session.batch, device, **(columns or {"draft": slots, "predictions": slots}))

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        chosen = () if self.lengths is None else self.lengths.state
        return *super().state, self.remaining, *chosen

    @property
    def live(self) -> tuple[torch.Tensor, ...]:
        return self.remaining, self.entry.pending

    def begin(self, session: Session, first: torch.Tensor, logits: torch.Tensor) -> None:
        """Writes the entry after the prompts of `session`: tokens `first` ``(batch, 1)``, sampled from `logits`
        ``(batch, 1, V)``."""
        no_choice = has_no_choice(logits, first)[:, 0]
        self.entry.accepted.zero_().masked_fill_(no_choice, -1)
        self.remaining.fill_(session.max_new_tokens - 1).masked_fill_(no_choice, 0)
        if self.ends is not None:
            self.remaining.masked_fill_(is_end(first[:, 0], self.ends), 0)
        if self.lengths is not None:
            self.lengths.clear()
        self.entry.pending.zero_()
        self._next_length(torch.zeros_like(self.remaining))

    def judge(self, verdict: DraftVerdict, logits: torch.Tensor, predictions: torch.Tensor) -> None:
        """After a verification: the tokens `predictions` ``(batch, R)`` were drawn from the verifier's `logits`
        ``(batch, R, V)``.

        The next draft is as long as slots and remaining tokens allow. A finished sequence has nothing remaining, so its
        draft is empty.
        """
        no_choice = accepted_without_choice(logits, predictions, verdict.accepted)
        self.remaining.sub_(verdict.accepted).masked_fill_(verdict.ended | no_choice, 0)
        self._next_length(verdict.accepted)
        self.entry.accepted.copy_(verdict.accepted).masked_fill_(no_choice, -1)

    def forced(self, session: Session, rows: Rows) -> Rows:
        if session.grammar is None or self.slots == 1:
            return rows
        remaining = self.remaining.tolist()
        rooms = [
            min(self.slots, tokens_left) - 1 if row.pending else 0
            for row, tokens_left in zip(rows, remaining, strict=True)
        ]
        forced = session.forced(rooms)
        if not any(forced):
            return rows
        self.place(forced)
        for sequence, (row, tokens) in enumerate(zip(rows, forced, strict=True)):
            if tokens:
                self.entry.pending[sequence] = max(row.pending, 1 + len(tokens))
        return self.entry.rows()

    def place(self, drafts: Sequence[Sequence[int]]) -> None:
        """Puts tokens into the drafts of the next step, after the known ones."""
        for sequence, tokens in enumerate(drafts):
            if tokens:
                self.entry.draft[sequence, 1 : 1 + len(tokens)] = torch.tensor(tokens, device=self.slot.device)

    def _next_length(self, accepted: torch.Tensor) -> None:
        """The longest draft that slots and remaining tokens allow, and that pays. Of the last one so many tokens were
        `accepted`."""
        if self.lengths is None:
            self.entry.pending.copy_(self.remaining.clamp(max=self.slots))
        else:
            self.lengths.choose_(self.entry.pending, accepted, self.remaining)

    def opened(self, session: Session, rows: Rows) -> int:
        return record_first(session, [row.draft[0] for row in rows])

    def stepped(self, session: Session, before: Rows, rows: Rows) -> int:
        taken_part: int = sum(row.pending > 0 for row in before)
        session.forwards += taken_part > 0
        for sequence, (old, row) in enumerate(zip(before, rows, strict=True)):
            if length := old.pending:
                draft, predictions = old.draft[:length], row.predictions[:length]
                session.log_step(sequence, draft, predictions, accepted=row.accepted, next_token=row.draft[0])
        return taken_part


def record_first(session: Session, tokens: list[int]) -> int:
    """`Steps.opened` where the prompts have one forward, which gives a token each."""
    session.forwards += 1
    for sequence, token in enumerate(tokens):
        session.record_first(sequence, token)
    return session.batch
