"""Drafts from a suffix automaton: what followed the longest end of the text that occurred before, in the text or in
earlier ones.

Source: Oliaro et al., "SuffixDecoding" (arXiv 2411.04975). The plain form of its drafts is reference/suffix.py. Unlike
the lookup of `jacobi`, which compares at most five tokens and searches a request's own text on the device, matches here
may have any length, a pool keeps the texts of earlier requests, and a token costs the host a few steps, however long
the texts are.
"""

from __future__ import annotations

import torch

from pdkernels._validation import check_type
from pdkernels.decoding.costs import BlockSize, checked_block_size, step_costs
from pdkernels.decoding.steps import DraftSteps, Rows, run
from pdkernels.decoding.suffixes import Reader, SuffixPool
from pdkernels.generation.noise import OWN, banned_tokens, latents
from pdkernels.generation.session import Session, to_device_async
from pdkernels.ops import verify_draft

_OP = "decoding.suffix"

_LONGEST = 16  # of drafts whose length is chosen


class SuffixSteps(DraftSteps):
    """The host matches the texts that it has recorded, and sends the next drafts to the device."""

    needs_host = "its automaton"
    packs = True

    def __init__(
        self,
        session: Session,
        *,
        pool: SuffixPool | None,
        block_size: BlockSize,
        allow_mask_token: bool,
        page_size: int | None,
    ) -> None:
        size, chosen = checked_block_size(_OP, block_size, _LONGEST)
        valid = pool is None or isinstance(pool, SuffixPool)
        check_type(valid, _OP, "pool", "be a SuffixPool or None", type(pool).__name__)
        self.sampler = session.sampler
        self.banned = banned_tokens(_OP, session.model, allow_mask_token)
        slots = max(1, min(session.block(size), session.max_new_tokens - 1))
        costs = step_costs(session.model, slots, session.batch) if chosen else None
        self.allocate(session, slots, page_size, costs=costs, draft=1, predictions=slots)
        self.latents = latents(self.model, self.seeds)
        self.readers = [Reader(pool) for _ in session.prompts]
        self.drafts: list[list[int]] = []

    def start(self, session: Session) -> None:
        prompts, lengths = session.packed_prompts(session.longest, self.cache.device)
        self.cache.lengths.zero_()
        last, counts = (lengths - 1)[:, None], session.ragged(lengths)
        logits = self.model(prompts, cache=self.cache, counts=counts, rows=last, **self.latents)
        first = self.sampler.sample(logits, lengths[:, None], self.seeds, OWN, self.banned)
        self.cache.commit_(lengths)
        self.begin(session, first, logits)
        self.entry.draft.copy_(first.clamp(min=0))
        for reader, prompt in zip(self.readers, session.prompts, strict=True):  # while the device computes
            for token in prompt:
                reader.append(token)

    def step(self, width: int | None = None, ragged: bool = True) -> None:
        entry, width = self.entry, max(map(len, self.drafts))
        rows = [[len(draft), *draft, *[0] * (width - len(draft))] for draft in self.drafts]
        sent = to_device_async(rows, self.cache.device)
        # A stop string may have ended a sequence after its draft was made.
        counts, draft = torch.minimum(sent[:, 0], entry.pending), sent[:, 1:]
        entry.pending.copy_(counts)
        accepted = self.plain_step() if width == 1 else None
        if accepted is not None:
            entry.predictions[:, :1] = entry.draft
            self._next_length(accepted)
            return
        shared = len({len(draft) for draft in self.drafts}) == 1
        predictions, no_choice = self.predicted(draft, None if shared else counts, self.banned)
        valid = predictions.clamp(min=0)
        verdict = verify_draft(draft, valid, draft_lengths=counts, end_tokens=self.ends)
        self.cache.commit_(verdict.accepted)
        entry.predictions[:, :width] = valid
        entry.draft[:, 0] = verdict.next_token.clamp(min=0)
        self.judge(verdict, no_choice)

    def opened(self, session: Session, rows: Rows) -> int:
        taken_part = super().opened(session, rows)
        for row, reader in zip(rows, self.readers, strict=True):
            reader.append(row.draft[0])
        self._draft(rows)
        return taken_part

    def stepped(self, session: Session, before: Rows, rows: Rows) -> int:
        taken_part: int = sum(row.pending > 0 for row in before)
        session.forwards += taken_part > 0
        for sequence, (old, row) in enumerate(zip(before, rows, strict=True)):
            if old.pending:
                draft, accepted = self.drafts[sequence], row.accepted
                predictions = row.predictions[: len(draft)]
                session.log_step(sequence, draft, predictions, accepted=accepted, next_token=row.draft[0])
                for token in (*draft[1:accepted], row.draft[0]):
                    self.readers[sequence].append(token)
        self._draft(rows)
        return taken_part

    def forced(self, session: Session, rows: Rows) -> Rows:
        for sequence, tokens in enumerate(session.forced([row.pending - 1 for row in rows])):
            if tokens:
                self.drafts[sequence] = [rows[sequence].draft[0], *tokens]
        return rows

    def _draft(self, rows: Rows) -> None:
        """The next drafts, whose first tokens are known."""
        self.drafts = [
            [row.draft[0], *(reader.draft(row.pending - 1) if row.pending > 1 else [])][: row.pending]
            for row, reader in zip(rows, self.readers, strict=True)
        ]


def decode(
    session: Session,
    *,
    pool: SuffixPool | None = None,
    block_size: BlockSize = 16,
    allow_mask_token: bool = False,
    page_size: int | None = None,
) -> int:
    """Fills a session.

    Args:
        pool: a `SuffixPool` of earlier texts, to which the prompts and new tokens of this call are added at its end. It
            changes how many forwards a text takes, never the text. None: only the text itself is searched.
        block_size: maximum tokens of a draft, the known first one included. A match of n tokens drafts 3 n, and no
            match drafts none. "auto" drafts less where that pays, by the measured times of forwards and by what was
            accepted so far.
        temperature: sampling temperature; 0 is greedy. The noise of a sample is keyed by its position and seed, so the
            tokens are those that `autoregressive` samples with the same seed.
    """
    steps = SuffixSteps(
        session, pool=pool, block_size=block_size, allow_mask_token=allow_mask_token, page_size=page_size
    )
    taken_part = run(steps, session)
    if pool is not None:
        for prompt, tokens in zip(session.prompts, session.tokens, strict=True):
            pool.add((*prompt, *tokens))
    return taken_part
