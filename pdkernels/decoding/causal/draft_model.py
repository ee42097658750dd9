"""Speculative decoding with an ordinary small model as drafter: it guesses tokens one by one, and one forward of the
target verifies them.

Sources: Leviathan et al., "Fast inference from transformers via speculative decoding" (arXiv 2211.17192); Chen et al.,
"Accelerating large language model decoding with speculative sampling" (arXiv 2302.01318). A token is accepted if it is
the one that the target draws at its position, so sampled texts too are those of `autoregressive` with the same seed.
The drafter draws with the same noise: where two distributions are close, their draws are mostly equal.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pdkernels._validation import check, check_type, refuse_foreign
from pdkernels.decoding.causal._drafter import DrafterSteps, checked_drafter
from pdkernels.decoding.costs import BlockSize, checked_block_size, guess_seconds, step_costs
from pdkernels.decoding.steps import Steps, decoder
from pdkernels.generation.noise import OWN, banned_tokens, latents
from pdkernels.generation.session import Session
from pdkernels.models import load
from pdkernels.models.architectures.greedy_steps import greedy_steps
from pdkernels.models.capabilities import capabilities
from pdkernels.models.protocols import CausalModel, missing
from pdkernels.models.text.same_tokens import same_tokens

_OP = "decoding.draft_model"

_LONGEST = 8  # of drafts whose length is chosen


class DraftModelSteps(DrafterSteps):
    """The drafter keeps the text in a cache of its own, and reads what is new to it when it drafts.

    Args:
        drafter: a causal model with the target's vocabulary, or the name or path of one (`pdkernels.models.load`);
            None: the model's ``drafters["draft_model"]``. Sizes of vocabularies may differ by ids that no text has, if
            both models have the same tokenizer.
        block_size: tokens of a draft, the known first one included; 1 is autoregressive decoding. "auto" chooses
            the length of each draft by the measured times of forwards and by what was accepted so far; then it is never
            much slower than decoding token by token.
        temperature: sampling temperature; 0 is greedy. Drafter and target draw with the same noise and the same
            filters, so the tokens are those that `autoregressive` samples with the same seed.
    """

    def __init__(
        self,
        session: Session,
        *,
        drafter: Any = None,
        block_size: BlockSize = 5,
        allow_mask_token: bool = False,
        page_size: int | None = None,
    ) -> None:
        size, chosen = checked_block_size(_OP, block_size, _LONGEST)
        self.sampler = session.sampler
        self.banned = banned_tokens(_OP, session.model, allow_mask_token)
        drafter = _checked(session.model, checked_drafter(_OP, session.model, drafter, "draft_model"))
        slots = max(1, min(session.block(size), session.max_new_tokens - 1))
        costs = step_costs(session.model, slots, session.batch) if chosen else None
        if costs is not None:
            costs = costs._replace(guess=guess_seconds(drafter, session.batch))
        self.allocate_drafter(_OP, session, slots, page_size, drafter, costs)
        self.latents, self.draft_latents = latents(self.model, self.seeds), latents(drafter, self.seeds)
        width = session.longest + session.max_new_tokens + slots
        self.text = torch.zeros(session.batch, width, dtype=torch.int64, device=self.cache.device)
        """The text, the known token included."""
        self.most = 1  # the drafter has read all but this many tokens of any text, the known one included

    @classmethod
    def draws_by_row(cls, options: Mapping[str, Any]) -> bool:
        return True

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        return *super().state, self.text

    def admit(self, row: int, other: Steps, length: int, capacity: int, other_row: int = 0) -> None:
        super().admit(row, other, length, capacity, other_row)
        assert isinstance(other, DraftModelSteps)
        self.most = max(self.most, other.most)

    def step(self, width: int | None = None, ragged: bool = True) -> None:
        if width is None:  # as many as a graph must be ready for
            self.most = 2
        super().step(width, ragged)

    def start(self, session: Session) -> None:
        prompts, lengths = session.packed_prompts(session.longest, self.cache.device)
        self.cache.lengths.zero_(), self.drafted.lengths.zero_()
        last, counts = (lengths - 1)[:, None], session.ragged(lengths)
        logits = self.model(prompts, cache=self.cache, counts=counts, rows=last, **self.latents)
        first = self.sampler.sample(logits, lengths[:, None], self.seeds, OWN, self.banned)
        self.cache.commit_(lengths)
        if self.slots > 1:  # else it never drafts
            self._read(prompts, counts, last)
            self.drafted.commit_(lengths)
        self.begin(session, first, logits)
        self.entry.draft.copy_(first.clamp(min=0))
        self.text[:, : session.longest] = prompts
        self.text.scatter_(1, lengths[:, None], self.entry.draft)
        self.most = 1

    def draft(self, width: int) -> torch.Tensor:
        busy = self.entry.pending.sign()
        self._catch_up(busy)
        unread = self.cache.lengths - self.drafted.lengths + 1
        places = self.drafted.lengths[:, None] + torch.arange(self.most, device=unread.device)
        tokens = self.text.gather(1, places.clamp(max=self.text.shape[1] - 1))
        guesses, counts = [], unread * busy
        rows = (counts - 1).clamp(min=0)[:, None]
        same_size = self.drafter.config.vocab_size == self.model.config.vocab_size
        for number in range(1, width):
            logits = self._read(tokens, counts, rows)
            self.drafted.commit_(counts)
            positions = self.cache.lengths[:, None] + number
            drawn = self.sampler.sample(logits, positions, self.seeds, OWN, self.banned).clamp(min=0)
            tokens = self.or_forced(number, drawn)
            guesses.append(tokens)
            if number == 1 and 2 < width and self._forced is None and self.sampler.greedy and same_size:
                following = _following(self.drafter, self.drafted, tokens, busy, width - 2, self.banned)
                if following is not None:
                    guesses.append(following)
                    break
            counts, rows = busy, torch.zeros_like(rows)
        self.most = 1
        return torch.cat(guesses, 1)

    def _catch_up(self, busy: torch.Tensor) -> None:
        """Reads the text until what is left fits into a forward, of which layers with windows have room for some rows."""
        room = getattr(self.drafted, "drafts", self.most)
        while self.most > room:
            unread = self.cache.lengths - self.drafted.lengths + 1
            counts = ((unread - 1) * busy).clamp(max=room)
            places = self.drafted.lengths[:, None] + torch.arange(room, device=unread.device)
            tokens = self.text.gather(1, places.clamp(max=self.text.shape[1] - 1))
            self._read(tokens, counts, torch.zeros_like(counts)[:, None])
            self.drafted.commit_(counts)
            self.most = max(1, self.most - room)

    def _read(self, tokens: torch.Tensor, counts: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
        """The drafter's logits for the target's vocabulary. Ids that it lacks are read as another one, which only costs
        a guess."""
        extra = self.model.config.vocab_size - self.drafter.config.vocab_size
        if extra > 0:
            tokens = tokens.clamp(max=self.drafter.config.vocab_size - 1)
        logits: torch.Tensor = self.drafter(tokens, cache=self.drafted, counts=counts, rows=rows, **self.draft_latents)
        return torch.nn.functional.pad(logits, (0, extra), value=-torch.inf) if extra else logits

    def forward(self, draft: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
        logits: torch.Tensor = self.model(draft, cache=self.cache, counts=counts, **self.latents)
        return logits

    def accept(self, draft: torch.Tensor, accepted: torch.Tensor, next_token: torch.Tensor) -> None:
        lengths, width = self.cache.lengths, draft.shape[1]
        # What the drafter has read of a rejected guess is forgotten.
        self.drafted.lengths.copy_(torch.minimum(self.drafted.lengths, lengths))
        self.text.scatter_(1, (lengths - accepted)[:, None] + self.slot[:width], draft)
        self.text.scatter_(1, lengths[:, None], next_token)
        self.most += 1  # it has not read its own last guess, and nothing of a step without a draft


decode = decoder(DraftModelSteps)


def _following(
    drafter: Any, cache: Any, guess: torch.Tensor, busy: torch.Tensor, count: int, banned: tuple[int, ...]
) -> torch.Tensor | None:
    """The next `count` guesses ``(batch, count)`` of a drafter after its first one, as one op; None: they must be made
    one by one."""
    table, remaining = torch.cat([busy[:, None], torch.zeros_like(guess), guess], 1), busy * (count + 1)
    steps = greedy_steps(drafter, cache, table, 2, remaining, None, banned)
    lengths = cache.lengths.clone()
    entries = None if steps is None else steps.run(count)
    if entries is None:
        return None
    tables = torch.tensor(entries, device=guess.device)
    if bool((tables[:, :, 1] < 0).any()):  # logits without a choice end a sequence's steps, and a draft goes on
        cache.lengths.copy_(lengths)
        return None
    return tables[:, :, 2].T


def _checked(model: Any, drafter: Any) -> Any:
    if isinstance(drafter, (str, os.PathLike)):
        drafter = load(drafter if isinstance(drafter, str) else Path(drafter), device=model.device)
    refuse_foreign(_OP, "drafter", drafter)
    missing_member = missing(drafter, CausalModel)
    check_type(
        not missing_member, _OP, "drafter", "be a causal model", f"a {type(drafter).__name__} without {missing_member}"
    )
    offered = capabilities(drafter)
    check(
        "causal" in offered, _OP, "drafter", "be causal", ", ".join(sorted(offered)) or "a model without capabilities"
    )
    vocabulary, drafter_vocabulary = model.config.vocab_size, drafter.config.vocab_size
    compatible = vocabulary == drafter_vocabulary or _same_words(model, drafter)
    check(compatible, _OP, "drafter", f"have the model's vocabulary of {vocabulary} tokens", drafter_vocabulary)
    # As many tokens are not yet the same ones.
    alike = same_tokens(getattr(model, "tokenizer", None), getattr(drafter, "tokenizer", None))
    check(alike, _OP, "drafter", "have the model's tokenizer", "another one, whose ids mean other words")
    return drafter


def _same_words(model: Any, drafter: Any) -> bool:
    """Whether both have tokenizers with the same tokens, which no padding of an embedding changes."""
    tokenizers = [owner.tokenizer for owner in (model, drafter) if getattr(owner, "tokenizer", None) is not None]
    if len(tokenizers) < 2:
        return False
    first, second = (list(owner.token_bytes()) for owner in tokenizers)
    return first == second and len(first) <= min(model.config.vocab_size, drafter.config.vocab_size)
