"""DFlash: a small block-diffusion drafter guesses a whole block in one forward, and one forward of the target verifies
it.

Source: "DFlash" (arXiv 2602.06036). The drafter's context is the target's hidden states, as K and V in its own cache:
rows that were accepted are appended, and rejected ones never were in it. A block is not stored.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from pdkernels._validation import check, check_type
from pdkernels.decoding.causal._drafter import UNREAD, checked_drafter
from pdkernels.decoding.causal._features import FeatureSteps, check_sizes, shared_head
from pdkernels.decoding.costs import BlockSize, checked_block_size, draft_seconds, step_costs
from pdkernels.decoding.steps import decoder
from pdkernels.generation.noise import OWN, banned_tokens
from pdkernels.generation.session import Session
from pdkernels.models import DFlashHead, load_drafter

_OP = "decoding.dflash"


class DFlashSteps(FeatureSteps):
    """Row i of the head's cache is made from row i of the target, and is committed once the head has read it.

    Args:
        drafter: a `DFlashHead` for this model, or the folder of one (`pdkernels.models.load_drafter`); None: the
            model's ``drafters["dflash"]``.
        block_size: tokens of a draft that are verified, the known first one included; 1 is autoregressive decoding.
            None: all that the drafter guesses at once. "auto" chooses the length of each draft by the measured times of
            forwards and by what was accepted so far; then it is never much slower than decoding token by token.
        temperature: sampling temperature; 0 is greedy. Drafter and target draw with the same noise and the same
            filters, so the tokens are those that `autoregressive` samples with the same seed.
    """

    def __init__(
        self,
        session: Session,
        *,
        drafter: Any = None,
        block_size: BlockSize | None = None,
        allow_mask_token: bool = False,
        page_size: int | None = None,
    ) -> None:
        self.sampler = session.sampler
        self.banned = banned_tokens(_OP, session.model, allow_mask_token)
        requested = checked_drafter(_OP, session.model, drafter, "dflash")
        if isinstance(requested, (str, os.PathLike)):
            requested = load_drafter(requested if isinstance(requested, str) else Path(requested), session.model)
        head, shared = _checked(session.model, requested)
        self.shared = shared
        self.rows = head.config.block_size
        """Of a forward of the head."""
        self.first = head.config.first
        most = 1 + self.rows - self.first
        size, chosen = (most, False) if block_size is None else checked_block_size(_OP, block_size, most)
        check(size <= most, _OP, "block_size", f"be at most {most}, the tokens of the drafter's blocks", size)
        slots = max(1, min(session.block(size), session.max_new_tokens - 1))
        self.embed = session.model.embed if head.embedding is None else head.embed
        costs = step_costs(session.model, slots, session.batch) if chosen else None
        if costs is not None:
            timed = Drafts(head, self.embed, shared)
            costs = costs.later(draft_seconds(timed, self.rows * session.batch), draft_seconds(timed, self.rows))
        self.allocate_drafter(_OP, session, slots, page_size, head, costs, drafted=self.rows)
        self.allocate_features(session, head, slots + UNREAD)
        device = self.cache.device
        self.before = torch.zeros_like(self.entry.draft)
        """``(batch, 1)``, the token before the known one."""
        self.masks = torch.full((session.batch, self.rows - 1), head.config.mask_token, device=device)
        self.after = torch.arange(1, slots + 1, device=device)

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        return *super().state, self.before

    def start(self, session: Session) -> None:
        prompts, lengths = session.packed_prompts(session.longest, self.cache.device)
        self.cache.lengths.zero_(), self.drafted.lengths.zero_()
        last, counts = (lengths - 1)[:, None], session.ragged(lengths)
        hidden, taps = self.model.tapped(prompts, self.taps, cache=self.cache, counts=counts)
        index = last[..., None].expand(-1, -1, hidden.shape[-1])
        logits = self.model.logits(hidden.gather(1, index))
        first = self.sampler.sample(logits, lengths[:, None], self.seeds, OWN, self.banned)
        self.cache.commit_(lengths)
        self.begin(session, first, logits)
        self.before.copy_(prompts.gather(1, last))
        self.entry.draft.copy_(first.clamp(min=0))
        if self.slots > 1:  # else it never drafts
            self.drafter.read(self.drafter.fused(taps), cache=self.drafted, counts=lengths)
            self.drafted.commit_(lengths)
        self.fresh.zero_()
        self.most = 0

    def draft(self, width: int) -> torch.Tensor:
        self._read()
        block = torch.cat([self.entry.draft, self.masks], 1)
        hidden = self.drafter(self.embed(block), cache=self.drafted)
        if not self.drafter.whole_rows:
            hidden = hidden[:, : self.first + width - 1]
        positions = self.cache.lengths[:, None] + self.after[: width - 1]
        if not self.drafter.in_order:
            guesses = self._guess(hidden[:, self.first :], positions)
            return torch.cat([self.or_forced(n, guesses[:, n - 1 : n]) for n in range(1, width)], 1)
        known = self.entry.draft
        walk, path = self.drafter.walk(hidden, known, self.shared, self.before), [known]
        for number in range(width - 1):
            guess = self._drawn(walk(number, path[-1]), positions[:, number : number + 1])
            path.append(self.or_forced(number + 1, guess))
        return torch.cat(path[1:], 1)

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.drafter.logits(hidden, self.shared)
        return logits

    def _read(self) -> None:
        if self.most:
            self.drafter.read(self.features[:, : self.most], cache=self.drafted, counts=self.fresh)
            self.drafted.commit_(self.fresh)
            self.fresh.zero_()
            self.most = 0

    def accept(self, draft: torch.Tensor, accepted: torch.Tensor, next_token: torch.Tensor) -> None:
        self.before.copy_(draft.gather(1, (accepted[:, None] - 1).clamp(min=0)))
        if self.reads_rows:
            self.keep_features(accepted)


decode = decoder(DFlashSteps)


class Drafts:
    """A head as a model whose forwards can be timed: it reads the features of as many rows as a block has, and then
    guesses the block."""

    def __init__(self, head: DFlashHead, embed: Any, shared: Any) -> None:
        self.model_itself, self._embed, self.shared, self.new_cache = head, embed, shared, head.new_cache

    def __call__(self, tokens: torch.Tensor, *, cache: Any, rows: torch.Tensor | None = None) -> torch.Tensor:
        head, config = self.model_itself, self.model_itself.config
        sizes = *tokens.shape, len(config.taps), config.body.hidden_size
        head.read(head.fused(torch.zeros(sizes, dtype=head.dtype, device=tokens.device)), cache=cache)
        hidden = head(self._embed(tokens), cache=cache)
        if rows is not None:
            hidden = hidden.gather(1, rows[..., None].expand(-1, -1, hidden.shape[-1]))
        if not head.in_order:
            return head.logits(hidden, self.shared)
        # As many blocks as the rows make, each guess of all of them together.
        size = min(config.block_size, hidden.shape[1])
        blocks = hidden[:, : hidden.shape[1] // size * size].unflatten(1, (-1, size)).flatten(0, 1)
        token = tokens.new_zeros(len(blocks), 1)
        walk = head.walk(blocks, token, self.shared)
        logits = torch.empty(0)
        for number in range(size - config.first):
            logits = walk(number, token)
            token = head.vocabulary[logits.argmax(-1)]
        return logits


def _checked(model: Any, head: Any) -> tuple[DFlashHead, Any]:
    """The drafter, and the target's head if it has none of its own."""
    check_type(isinstance(head, DFlashHead), _OP, "drafter", "be a DFlashHead", type(head).__name__)
    assert isinstance(head, DFlashHead)
    check_sizes(_OP, model, head, head.config.body.hidden_size)
    return head, shared_head(_OP, model) if head.head is None else None
