"""Shared by all steps that draft and verify tokens: the end of a draft, and the length of the next one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pdkernels.cache import WindowedCache
from pdkernels.decoding.costs import StepCosts
from pdkernels.decoding.steps.contract import Steps
from pdkernels.decoding.steps.entry import Entry, Rows
from pdkernels.decoding.steps.lengths import Lengths
from pdkernels.generation.batch_sampler import BatchSampler
from pdkernels.generation.noise import OWN
from pdkernels.generation.session import Session, has_no_choice, is_end
from pdkernels.models.architectures.greedy_steps import GreedySteps, greedy_steps
from pdkernels.ops.verify_draft import DraftVerdict

UNWATCHED = 8
"""Steps at a time that nobody waits for."""


class DraftSteps(Steps):
    """Steps with a verified draft each. A decoder calls `allocate` once, `begin` after the prompts' forward and `judge`
    after each verification; it keeps its own way to draft and to verify.

    An entry has `pending`, the length of the next draft; `draft`, that draft, whose first token is known; and
    `predictions`, what the verifier said to the last one.
    """

    lengths: Lengths | None = None
    """What chooses the lengths of drafts, if that is asked for."""
    packs: bool = False
    """Whether drafts of different lengths share a forward without padding: where the method and the model can, and the
    host knows the lengths without waiting for a device."""
    latents: Mapping[str, Any] = {}
    """Arguments of a forward that only some models have."""
    banned: tuple[int, ...] = ()
    """Tokens that are never drawn; a decoder sets them before `allocate`."""
    greedy: GreedySteps | None = None
    """Steps in which nothing is drafted, as one op, where there is one."""

    def allocate(
        self,
        session: Session,
        slots: int,
        page_size: int | None,
        *,
        costs: StepCosts | None = None,
        rows: int = 0,
        **columns: int | None,
    ) -> None:
        """Cache and state for drafts of at most `slots` tokens. `columns` of the entry replace `draft` and
        `predictions`.

        `costs`: of steps, if the length of drafts is to be chosen by what pays. `rows`: of a
        forward, if a draft has branches and so more rows than tokens that can be accepted.
        """
        self.model, self.limit, self.slots = session.model, session.max_new_tokens, slots
        self.spare = rows if rows > slots else 0
        # Its lengths grow in place with every commit.
        self.cache = session.new_cache(page_size, self.spare, drafts=max(rows, slots))
        device = self.cache.device
        self.seeds, self.ends = session.seeds.to(device), session.ends_on(device)
        self.slot = torch.arange(slots, device=device)
        packs = self.packs and session.batch > 1 and device.type == "cpu" and getattr(self.model, "packs_rows", False)
        self.packs = packs
        self.lengths = None
        if costs is not None and slots > 1:
            padded = session.batch > 1 and not packs
            if packs:
                costs = costs.later(costs.packing, costs.wake)
            self.lengths = Lengths(costs, slots, session.batch, device, padded=padded)
        self.remaining = torch.zeros_like(self.cache.lengths)
        """``(batch,)``: remaining tokens; 0 once a sequence is done."""
        self.entry = Entry(session.batch, device, **(columns or {"draft": slots, "predictions": slots}))
        if not columns or "draft" in columns:
            places = self.entry.table, self.entry.column("draft"), self.remaining, self.ends, self.banned
            self.greedy = greedy_steps(self.model, self.cache, *places)
        if isinstance(self.cache, WindowedCache):
            self.cache.bounded = self.entry.pending

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

    def predicted(
        self, draft: torch.Tensor, counts: torch.Tensor | None, banned: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the model draws after each token of `draft` ``(batch, R)``, and where its logits give no choice, both
        ``(batch, R)``. After the first `counts` ``(batch,)`` tokens of a draft, what it says is meaningless."""
        positions = self.cache.lengths[:, None] + 1 + self.slot[: draft.shape[1]]
        if counts is None or not self.packs:
            logits = self.model(draft, cache=self.cache, counts=counts, **self.latents)
            drawn = self.sampler.sample(logits, positions, self.seeds, OWN, banned)
            return drawn, has_no_choice(logits, drawn)
        valid = self.slot[: draft.shape[1]] < counts[:, None]
        begins = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        logits = self.model(draft[valid][None], cache=self.cache, cu_seqlens=begins, **self.latents)[0, :, None]
        sequence = valid.nonzero()[:, 0]
        sampler = self.sampler.of(sequence.tolist()) if isinstance(self.sampler, BatchSampler) else self.sampler
        drawn = sampler.sample(logits, positions[valid][:, None], self.seeds[sequence], OWN, banned)
        no_choice = torch.zeros_like(valid).masked_scatter_(valid, has_no_choice(logits, drawn))
        return torch.zeros_like(draft).masked_scatter_(valid, drawn), no_choice

    def is_watched(self, session: Session, replays: Sequence[Callable[[], None]]) -> bool:
        """Whether each step of a session must be seen by itself."""
        return bool(replays) or session.listens or session.stops.any

    def plain_step(self) -> torch.Tensor | None:
        """Runs a greedy step in which nothing is drafted as one op. Returns what was accepted, ``(batch,)``; None: it
        must run part by part.

        The entry has the next known token by then, and the lengths of the drafts that were verified.
        """
        if self.greedy is None or not self.sampler.greedy:
            return None
        accepted = self.entry.pending.clone()
        if self.greedy.run(1) is None:
            return None
        self.entry.pending.copy_(accepted)
        return accepted

    def judge(self, verdict: DraftVerdict, no_choice: torch.Tensor) -> None:
        """After a verification. `no_choice` ``(batch, R)``: the rows that had no distribution to draw from.

        The next draft is as long as slots and remaining tokens allow. A finished sequence has nothing remaining, so its
        draft is empty.
        """
        failed = (no_choice & (self.slot[: no_choice.shape[1]] < verdict.accepted[:, None])).any(1)
        self.remaining.sub_(verdict.accepted).masked_fill_(verdict.ended | failed, 0)
        self._next_length(verdict.accepted)
        self.entry.accepted.copy_(verdict.accepted).masked_fill_(failed, -1)

    def admit(self, row: int, other: Steps, length: int, capacity: int, other_row: int = 0) -> None:
        super().admit(row, other, length, capacity, other_row)
        if self.lengths is not None and len(self.remaining) > 1:
            # Its draft was chosen among others, or alone; without one nobody pays for it.
            self.entry.pending[row].clamp_(max=1)

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
