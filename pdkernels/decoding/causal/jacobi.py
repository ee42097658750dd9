"""Jacobi decoding: verify a whole draft per forward, keep what the model agrees with, guess the rest again.

Source: "Jacobi Forcing" (arXiv 2512.14681), section 3 (one block at a time) and section 4.2 (the running window); for
drafts that are looked up, Saxena, "Prompt lookup decoding" (github.com/apoorvumang/prompt-lookup-decoding, 2023). The
plain forms are reference/jacobi.py and reference/jacobi_lookup.py; they take the same forwards and accept the same
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch

from pdkernels._validation import check, check_fits_memory, check_type, refuse
from pdkernels.decoding.causal._filler import filler_words
from pdkernels.decoding.causal.lookup import Lookup
from pdkernels.decoding.costs import BlockSize, checked_block_size, step_costs
from pdkernels.decoding.steps import DraftSteps, decoder
from pdkernels.generation.noise import OWN, banned_tokens, checked_name, latents
from pdkernels.generation.session import Session
from pdkernels.ops import DraftVerdict, verify_draft

_OP = "decoding.jacobi"

DEFAULT_BLOCK_SIZE = 16

Draft = Literal["model", "lookup"]


class JacobiSteps(DraftSteps):
    """One forward verifies the whole draft, and its predictions are the next one.

    On a recurrent-depth model with more than one recurrence the tokens may differ from those of `autoregressive`, at
    temperature 0 too: rows of one draft read each other after as many recurrences as they have had, and cached rows
    after all of them.

    Args:
        block_size: decode block after block of this many tokens (default 16; 128 in the paper, for GPUs): inside a block
            the draft only shrinks. "auto": a running draft, whose length is chosen in every step by the measured times of forwards and by what
            was accepted so far.
        window: keep a draft of this many tokens instead, refilled after every forward. Excludes `block_size`.
        draft: where guesses come from. "model": the predictions for the previous draft, and random tokens of the text
            where there are none; for models trained to jump ahead. "lookup": what followed earlier occurrences of the
            last tokens, in the text or in rejected drafts; it suits any model if the answer quotes its prompt or
            repeats itself. `block_size` or `window` then only limits the draft: a short match gives a short draft, and
            no match gives none.
        temperature: sampling temperature; 0 is greedy. The noise of a sample is keyed by its position and seed, so the
            tokens are those that `autoregressive` samples with the same seed, whatever was drafted.
        seed: seed of the samples, and of the random tokens that fill a draft until the model has made guesses. Those
            change how many forwards it takes, not the tokens. An int or a list, as elsewhere; for a recurrent-depth
            model it also seeds the initial states.
    """

    resumes = True
    packs = True

    def __init__(
        self,
        session: Session,
        *,
        block_size: BlockSize | None = None,
        window: int | None = None,
        draft: Draft = "model",
        allow_mask_token: bool = False,
        page_size: int | None = None,
    ) -> None:
        length, chosen = _checked_length(block_size, window)
        checked_name(_OP, "draft", draft, get_args(Draft))
        self.sampler = session.sampler
        self.windowed = window is not None or chosen
        self.banned = banned_tokens(_OP, session.model, allow_mask_token)
        # The last requested token needs no forward, so no draft is longer than limit - 1.
        batch, limit = session.batch, session.max_new_tokens
        slots = max(1, min(length, limit - 1))
        nbytes = 100 * batch * limit * slots  # bytes of random words, temporaries included
        if draft == "model":
            check_fits_memory(_OP, "block_size", length, nbytes, torch.device("cpu"))
        costs = step_costs(session.model, slots, session.batch) if chosen else None
        self.allocate(session, slots, page_size, costs=costs)
        self.latents = latents(self.model, self.seeds)
        width, device = session.longest + limit + slots, self.cache.device
        self.lookup = Lookup(batch, width, slots, device) if draft == "lookup" else None
        if self.lookup is None:
            self.words = filler_words(self.seeds, limit + 1, slots)  # the last ones for a sequence that is done
            self.history = torch.zeros(batch, width, dtype=torch.int64, device=device)
        else:
            self.history = self.lookup.text
        self.number = torch.zeros_like(self.remaining)  # of each sequence's step
        self.sequence = torch.arange(batch, device=device)

    @classmethod
    def draws_by_row(cls, options: Mapping[str, Any]) -> bool:
        return True

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        texts = (self.history, self.words) if self.lookup is None else (self.lookup.tokens,)
        return *super().state, self.number, *texts

    def reseed(self, seeds: torch.Tensor) -> None:
        super().reseed(seeds)
        if self.lookup is None:
            self.words.copy_(filler_words(self.seeds, self.words.shape[1], self.slots))

    def start(self, session: Session) -> None:
        packed, prompt_lengths = session.packed_prompts(self.history.shape[1], self.cache.device)
        guesses = self.slots - 1
        if self.lookup is None:
            # Prompt and first draft in one forward: the exact first token, and guesses based on fillers.
            self.history.copy_(packed)
            first_fillers = self.history.gather(1, self.words[:, 0, :guesses] % prompt_lengths[:, None])
            self.history.scatter_(1, prompt_lengths[:, None] + self.slot[:-1], first_fillers)
        else:
            guesses = 0
            self.lookup.clear()
            self.history.copy_(packed)
        self.cache.lengths.zero_()
        rows = (prompt_lengths - 1)[:, None] + self.slot[: guesses + 1]
        counts = session.ragged(prompt_lengths + guesses)
        tokens = self.history[:, : session.longest + guesses]
        logits = self.model(tokens, cache=self.cache, counts=counts, rows=rows, **self.latents)
        best = self.sampler.sample(logits, rows + 1, self.seeds, OWN, self.banned)
        self.entry.draft[:, : guesses + 1] = best.clamp(min=0)
        self.cache.commit_(prompt_lengths)
        self.begin(session, best[:, :1], logits[:, :1])
        if self.lookup is not None:
            self._look_up(torch.zeros_like(self.remaining))
        self.number.fill_(1)

    def step(self, width: int | None = None, ragged: bool = True) -> None:
        accepted = self.plain_step() if width == 1 and self.lookup is not None else None
        if accepted is not None:
            self.entry.predictions[:, :1] = self.entry.draft[:, :1]
            self._look_up(accepted)
            return
        verdict, remainder = self.verify(width, ragged)
        self.draft(verdict, remainder, width != 1)

    def verify(self, width: int | None, ragged: bool) -> tuple[DraftVerdict, torch.Tensor]:
        """Verifies and commits the draft. Returns the verdict, and how many tokens of each draft were left."""
        entry = self.entry
        counts = entry.pending if ragged else None
        predictions, no_choice = self.predicted(entry.draft[:, :width], counts, self.banned)
        entry.predictions[:, :width] = predictions.clamp(min=0)
        # Like its KV rows, a draft comes after the committed history at its own position: only a commit makes it part
        # of it.
        committed = self.cache.lengths[:, None]  # grows in place with every commit
        if self.lookup is None:
            refill = self.history.gather(1, self.words[self.sequence, self.number] % committed)
        else:
            refill = self.lookup.nothing
        if self.lookup is None or width != 1:  # the lookup has put the known token there
            self.history.scatter_(1, committed + self.slot, entry.draft)
        verdict = verify_draft(
            entry.draft, entry.predictions, draft_lengths=entry.pending, end_tokens=self.ends, refill=refill
        )
        self.cache.commit_(verdict.accepted)
        if self.lookup is None:
            # A sequence that is done accepts nothing and stays at its number: there are no more words than steps of a
            # generation.
            self.number += verdict.accepted.sign()
        remainder = entry.pending - verdict.accepted
        self.judge(verdict, no_choice)
        return verdict, remainder

    def _next_length(self, accepted: torch.Tensor) -> None:
        if self.lookup is None:  # else it is known when drafts have been looked up
            super()._next_length(accepted)

    def _look_up(self, accepted: torch.Tensor) -> None:
        """Looks the next drafts up, and keeps as much of what was found as pays. Of the last ones so many tokens were
        `accepted`."""
        assert self.lookup is not None
        lengths = self.remaining.clamp(max=self.slots)
        self.lookup.draft_(self.entry.draft, lengths, self.cache.lengths)
        if self.lengths is None:
            self.entry.pending.copy_(lengths)
        else:
            self.lengths.choose_(self.entry.pending, accepted, lengths)

    def draft(self, verdict: DraftVerdict, remainder: torch.Tensor, guessed: bool) -> None:
        """A partly accepted block continues with the `remainder` of its draft; anything else starts from a full one.
        The model's next token is in slot 0 either way. `guessed`: whether there may be one."""
        entry = self.entry
        entry.draft.copy_(verdict.new_draft.clamp(min=0))  # a finished sequence has none
        if self.lookup is not None:
            if guessed:
                self.lookup.keep(verdict.new_draft, remainder > 0)
            self._look_up(verdict.accepted)
        elif not self.windowed:
            entry.pending.copy_(torch.minimum(remainder.masked_fill_(remainder == 0, self.slots), self.remaining))


decode = decoder(JacobiSteps)


def _checked_length(block_size: BlockSize | None, window: int | None) -> tuple[int, bool]:
    """Length of a full draft, and whether lengths are to be chosen."""
    exclusive = block_size is not None and window is not None
    fault = f"block_size={block_size} and window={window} exclude each other"
    refuse(exclusive, _OP, fault, "Give block_size to decode block by block, or window to keep one running draft.")
    if window is not None:
        check_type(type(window) is int, _OP, "window", "be an int", type(window).__name__)
        check(window >= 1, _OP, "window", "be at least 1", window)
        return window, False
    size = DEFAULT_BLOCK_SIZE if block_size is None else block_size
    return checked_block_size(_OP, size, DEFAULT_BLOCK_SIZE)
