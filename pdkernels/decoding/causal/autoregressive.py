"""Autoregressive decoding: one token per forward, on the KV cache. The baseline of every other method.

Tokens that a grammar leaves no choice about share a forward: they are drafted without the model and verified.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pdkernels.decoding.steps import DraftSteps, Rows, decoder
from pdkernels.decoding.steps.drafts import UNWATCHED
from pdkernels.generation.next_token import write_likeliest_, write_next_token_
from pdkernels.generation.noise import OWN, banned_tokens, latents
from pdkernels.generation.session import Session
from pdkernels.models.capabilities import capabilities
from pdkernels.ops import verify_draft

_OP = "decoding.autoregressive"

_FORCED = 16  # tokens of a forward, the known one included, if a grammar forces the others


class AutoregressiveSteps(DraftSteps):
    """Drafts of the known token alone, whose row's prediction is always right; with a grammar also of what it
    forces."""

    resumes = True

    def __init__(self, session: Session, *, allow_mask_token: bool = False, page_size: int | None = None) -> None:
        self.sampler = session.sampler
        self.banned = banned_tokens(_OP, session.model, allow_mask_token)
        # On a recurrent-depth model, rows of one forward read each other before their last recurrence.
        alone = session.grammar is None or "recurrent" in capabilities(session.model)
        slots = 1 if alone else max(1, min(_FORCED, session.max_new_tokens - 1))
        columns: dict[str, Any] = {"draft": slots} | ({"predictions": slots} if slots > 1 else {})
        self.allocate(session, slots, page_size, **columns)
        self.latents = latents(self.model, self.seeds)
        if slots > 1:
            self.greedy = None  # a grammar says what comes next

    @classmethod
    def draws_by_row(cls, options: Mapping[str, Any]) -> bool:
        return True

    def start(self, session: Session) -> None:
        prompts, prompt_lengths = session.packed_prompts(session.longest, self.cache.device)
        self.cache.lengths.zero_()
        last = (prompt_lengths - 1)[:, None]
        logits = self.model(prompts, cache=self.cache, counts=session.ragged(prompt_lengths), rows=last, **self.latents)
        first = self._draw(logits, prompt_lengths)
        self.cache.commit_(prompt_lengths)
        self.begin(session, first, logits)
        self.entry.draft[:, :1] = first.clamp(min=0)

    def step(self, width: int | None = None, ragged: bool = True) -> None:
        if self.slots > 1:
            self._verify(width or self.slots, ragged)
            return
        if self.greedy is not None and self.sampler.greedy and self.greedy.run(1) is not None:
            return
        # A finished sequence goes through the model too, but its row is never committed: its cache does not change.
        entry = self.entry
        logits = self.model(entry.draft, cache=self.cache, **self.latents)
        known = entry, self.remaining, self.cache, logits
        if self.sampler.greedy and write_likeliest_(*known, self.ends, self.banned):
            return
        write_next_token_(*known, self._draw(logits, self.cache.lengths + 1), self.ends)

    def rounds(self, session: Session, rows: Rows, replays: Sequence[Callable[[], None]] = ()) -> list[Rows]:
        if self.greedy is not None and self.sampler.greedy and not self.is_watched(session, replays):
            entries = self.greedy.run(UNWATCHED)
            if entries is not None:
                return [self.entry.rows(values) for values in entries]
        return super().rounds(session, rows, replays)

    def _verify(self, width: int, ragged: bool) -> None:
        entry, counts = self.entry, self.entry.pending if ragged else None
        predictions, no_choice = self.predicted(entry.draft[:, :width], counts, self.banned)
        entry.predictions[:, :width] = predictions.clamp(min=0)
        verdict = verify_draft(entry.draft, entry.predictions, draft_lengths=entry.pending, end_tokens=self.ends)
        self.cache.commit_(verdict.accepted)
        entry.draft[:, 0] = verdict.next_token.clamp(min=0)
        self.judge(verdict, no_choice)

    def _next_length(self, accepted: torch.Tensor | None = None) -> None:
        self.entry.pending.copy_(self.remaining.clamp(max=1))

    def _draw(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.sampler.sample(logits, positions[:, None], self.seeds, OWN, self.banned)

    def stepped(self, session: Session, before: Rows, rows: Rows) -> int:
        if self.slots > 1:
            return super().stepped(session, before, rows)
        taken_part: int = sum(row.pending for row in before)
        session.forwards += taken_part > 0
        for sequence, (old, row) in enumerate(zip(before, rows, strict=True)):
            if old.pending:
                session.log_step(sequence, old.draft, row.draft, accepted=1, next_token=row.draft[0])
        return taken_part


decode = decoder(AutoregressiveSteps)
