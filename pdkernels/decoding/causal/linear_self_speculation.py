"""Linear self-speculation: one model drafts a block by diffusion, then verifies it autoregressively.

Source: "Nemotron-Labs-Diffusion", section 3.3. The plain form is reference/linear_self_speculation.py; both take the
same forwards, sample the same tokens and accept the same prefix of every draft.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, get_args

import torch

from pdkernels._philox import uniforms
from pdkernels._validation import check, refuse
from pdkernels.backends import backend_of
from pdkernels.decoding.costs import BlockSize, checked_block_size, step_costs
from pdkernels.decoding.steps import DraftSteps, Rows, decoder, record_first
from pdkernels.generation.noise import (
    OWN,
    banned_tokens,
    checked_mask_token,
    checked_name,
    checked_number,
    distribution,
    drafted,
    sample,
)
from pdkernels.generation.row_times import kept_row_times
from pdkernels.generation.sampler import Sampler
from pdkernels.generation.session import Session, has_no_choice, is_end
from pdkernels.generation.traces import LinearStep
from pdkernels.masks import TilePlan, full
from pdkernels.ops import unmask_, verify_draft

_OP = "decoding.linear_self_speculation"

Verification = Literal["compare", "rejection"]

_FEWEST = 3  # a draft takes a forward and saves at most one of two
_LONGEST = 32  # of blocks whose length is chosen
# A model that was trained for it guesses well: one block of this many tokens may be lost before that is known.
_HOPE, _TRIED = 0.97, 16


class LinearSteps(DraftSteps):
    """An entry has the token `known` after the last block, the `forwards` that the block took, the `block`, and the
    verifier's `predictions` for it. Form 1 is a verification.

    The last two tokens of a text have a forward each and no draft, which takes a forward too. With "rejection" they are
    drafted like the others, because there the drafts decide which tokens are sampled.

    Args:
        block_size: tokens per block: a known token and the masks drafted after it. 1 is autoregressive decoding. "auto"
            chooses in every step, by the measured times of forwards over the whole batch and by what was accepted so
            far: long blocks for few sequences, and token by token where so many run that drafts do not pay.
        threshold: 0 fills a block in one draft pass. Above, a pass fills the slots whose confidence reaches it, and
            always the best one, until none is masked that is to be verified: neither a slot past the last requested
            token nor one after a drafted end token. Only the confidences tell whether another pass is needed, so the
            device is read once per forward, not once per step. A speculative pass would cost a forward, more than the
            wait.
        temperature: sampling temperature of drafter and verifier; 0 is greedy. The filters too are those of both.
        verification: "compare" accepts a draft token that equals the verifier's own sample, "rejection" accepts draft
            token x with probability ``min(1, p(x) / q(x))``: this keeps the distribution and accepts more. It requires
            threshold 0.
    """

    sampler: Sampler

    resumes = True

    def __init__(
        self,
        session: Session,
        *,
        block_size: BlockSize = 32,
        threshold: float = 0.0,
        verification: Verification = "compare",
        mask_token: int | None = None,
        allow_mask_token: bool = False,
        page_size: int | None = None,
    ) -> None:
        size, chosen = checked_block_size(_OP, block_size, _LONGEST)
        self.sampler = session.sampler
        checked_number(_OP, "threshold", threshold)
        checked_name(_OP, "verification", verification, get_args(Verification))
        check(
            verification == "compare" or threshold == 0,
            _OP,
            "threshold",
            "be 0 with verification='rejection'",
            threshold,
            "Slots filled in later passes depend on others; use verification='compare'.",
        )
        fixed = verification == "compare" and threshold == 0
        fault = "block_size='auto' chooses by the time of one draft pass and a verification, and must not change tokens"
        refuse(chosen and not fixed, _OP, fault, "Use threshold=0 and verification='compare', or give a number.")
        self.session = session
        self.block_size = size = session.block(size)
        if chosen:
            self.block_size = size = max(1, min(size, session.max_new_tokens - 1))
        self.threshold = threshold
        self.mask_token = checked_mask_token(_OP, session.model, mask_token)
        self.banned = banned_tokens(_OP, session.model, allow_mask_token, self.mask_token)
        # At temperature 0 both verifications are the same.
        self.rejection = verification == "rejection" and self.sampler.temperature > 0 and size > 1
        self.max_passes = min(1, size - 1) if threshold == 0 else size - 1  # each fills at least one slot
        self.forms = ("step", "verify") if self.max_passes > 1 else ("step",)
        # From so many remaining tokens on, a draft may save a forward.
        self.fewest = 1 if self.rejection else _FEWEST

        columns: dict[str, Any] = {"form": None, "known": None, "forwards": None, "block": size, "predictions": size}
        costs = step_costs(session.model, size, session.batch) if chosen else None
        if costs is not None:
            passes = kept_row_times(DraftPass(getattr(session.model, "model_itself", session.model), self.mask_token))
            others = passes.sequence * (session.batch - 1)
            drafting = [step + passes.between(rows) + others for rows, step in enumerate(costs.plain, 1)]
            costs = costs._replace(drafting=drafting, hope=_HOPE)
            costs = costs._replace(credit=costs.of_block(session.batch, min(size, _TRIED), padded=True))
        self.allocate(session, size, page_size, costs=costs, **columns)
        self.bidirectional = _bidirectional(size, self.cache.device)  # kept here for a graph
        self.nothing = torch.zeros_like(self.cache.lengths)  # rows that a draft pass stores
        self.forward = torch.zeros_like(self.cache.lengths)  # number of each sequence's last forward
        self.begun = torch.zeros_like(self.cache.lengths)  # `forward` before the block
        self.drafting = torch.zeros_like(self.cache.lengths)  # 1 while a block has masks to fill
        self.fresh = torch.ones_like(self.drafting, dtype=torch.bool)  # the next pass begins a block

    @classmethod
    def draws_by_row(cls, options: Mapping[str, Any]) -> bool:
        return bool(options.get("verification", "compare") == "compare")  # rejection needs a temperature

    @property
    def max_entries(self) -> int:
        """With draft passes as rounds, each of which fills a slot."""
        return self.limit * (1 + (self.max_passes if len(self.forms) > 1 else 0))

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        return *super().state, self.forward, self.begun, self.drafting, self.fresh

    @property
    def live(self) -> tuple[torch.Tensor, ...]:
        return *super().live, self.drafting

    def joined(self) -> None:
        self._look()

    def end(self, sequences: Sequence[int]) -> None:
        super().end(sequences)
        self._look()

    def _look(self) -> None:
        """A sequence whose block is filled waits for the others."""
        self.entry.form.copy_((self.drafting == 0).all().expand_as(self.drafting))

    def _next_length(self, accepted: torch.Tensor) -> None:
        super()._next_length(accepted)
        pending = self.entry.pending
        drafts = (self.remaining >= self.fewest) & (self.block_size > 1 if self.lengths is None else pending > 1)
        self.drafting.copy_(drafts)
        pending.copy_(torch.where(drafts, pending, pending.clamp(max=1)))

    def start(self, session: Session) -> None:
        prompts, prompt_lengths = session.packed_prompts(session.longest, self.cache.device)
        self.cache.lengths.zero_()
        last = (prompt_lengths - 1)[:, None]
        logits = self.model(prompts, cache=self.cache, counts=session.ragged(prompt_lengths), rows=last)
        first = self.sampler.sample(logits, prompt_lengths[:, None], self.seeds, OWN, self.banned)
        self.cache.commit_(prompt_lengths)
        self.begin(session, first, logits)
        self.entry.known.copy_(first[:, 0])
        self.forward.fill_(1)
        self.begun.fill_(1)
        self.fresh.fill_(True)
        self._look()

    def step(self, width: int | None = None, ragged: bool = True) -> None:
        if self.lengths is not None and width == 1:
            self._decode_alone()
            return
        width = width or self.block_size
        drafted_width = self.block_size if self.lengths is None else width
        logits = None if width == 1 and not self.rejection else self.draft(drafted_width)
        if len(self.forms) > 1:
            self._look()
        else:
            self._verify(logits, width, ragged)

    def _decode_alone(self) -> None:
        """A step in which nothing is drafted: that of `autoregressive`."""
        entry, taking = self.entry, self.entry.pending.clone()
        token = entry.known[:, None].clamp(min=0)
        # A finished sequence goes through the model too, but its row is never committed.
        logits = self.model(token, cache=self.cache)
        following = self.sampler.sample(logits, self.cache.lengths[:, None] + 1, self.seeds, OWN, self.banned)
        self.cache.commit_(taking)
        failed = has_no_choice(logits, following)[:, 0] & (taking > 0)
        over = failed if self.ends is None else failed | is_end(following[:, 0], self.ends)
        self.remaining.sub_(taking).masked_fill_(over, 0)
        entry.block[:, :1], entry.predictions[:, :1] = token, following
        entry.known.copy_(following[:, 0])
        self.forward += 1
        entry.forwards.fill_(1)
        self.begun.copy_(self.forward)
        self._next_length(taking)
        entry.accepted.copy_(taking).masked_fill_(failed, -1)

    def verify(self, width: int | None = None, ragged: bool = True) -> None:
        """Verifies the block that passes have filled."""
        self._verify(None, width or self.block_size, ragged)
        self._look()

    def _verify(self, drafted: torch.Tensor | None, width: int, ragged: bool) -> None:
        """`drafted`: filtered logits of the draft, if their distribution is needed."""
        entry, lengths = self.entry, self.cache.lengths
        self._open()
        if self.session.grammar is not None and not self.rejection:  # whose guesses have the law of the drafter
            self._force()
        draft = entry.block[:, :width]
        logits = self.model(draft, cache=self.cache, counts=entry.pending if ragged else None)
        self.forward += 1
        positions = lengths[:, None] + 1 + self.slot[:width]
        predictions = self.sampler.sample(logits, positions, self.seeds, OWN, self.banned)
        verified = predictions.clone() if self.rejection else predictions
        if drafted is not None and self.rejection:
            tested = min(width, self.block_size - 1)  # the last row of a whole block has no guess to test
            guesses = entry.block[:, 1 : tested + 1]
            predictions[:, :tested] = self._verdicts(
                logits[:, :tested], drafted[:, :tested], guesses, positions[:, :tested]
            )
        verdict = verify_draft(draft, predictions, draft_lengths=entry.pending, end_tokens=self.ends)
        self.cache.commit_(verdict.accepted)
        self.judge(verdict, has_no_choice(logits, verified))
        entry.known.copy_(verdict.next_token)
        entry.forwards.copy_(self.forward - self.begun)
        self.begun.copy_(self.forward)
        self.fresh.fill_(True)
        entry.predictions[:, :width] = predictions

    def _force(self) -> None:
        """Writes what no text of a grammar leaves out into the block."""
        rooms = [pending - 1 for pending in self.entry.pending.tolist()]
        for sequence, tokens in enumerate(self.session.forced(rooms)):
            forced = torch.tensor(tokens, dtype=torch.int64, device=self.slot.device)
            self.entry.block[sequence, 1 : 1 + len(tokens)] = forced

    def forced(self, session: Session, rows: Rows) -> Rows:
        return rows  # a step writes them itself, after its draft passes

    def draft(self, width: int) -> torch.Tensor | None:
        """A pass over the first `width` tokens of the block, after its known one; returns its filtered logits if their
        distribution is needed."""
        self._open()
        if self.max_passes == 0 or width == 1:
            return None
        block = self.entry.block[:, :width]
        masks = block[:, 1:]
        self.forward += self.drafting
        # The pass only reads the cache: its only result is the draft.
        mask = self.bidirectional if width == self.block_size else _bidirectional(width, self.cache.device)
        hidden = self.model.hidden(
            block, cache=self.cache, counts=self.nothing, mask=mask, adapted=self.model.has_adapter
        )[:, 1:]
        positions, numbers = self.cache.lengths[:, None] + self.slot[1:width], self.forward[:, None]
        if self.rejection:  # which needs the probabilities of all tokens
            logits = self.sampler.filtered(self.model.logits(hidden), (self.mask_token,))
            guesses = sample(logits, positions, self.sampler.temperature, self.seeds, numbers)
            masks.copy_(drafted(guesses, self.mask_token))
            return logits
        if self.threshold == 0:
            guesses = self.sampler.draw(self.model, hidden, positions, self.seeds, numbers, (self.mask_token,))
            masks.copy_(drafted(guesses, self.mask_token))
            return None
        # Neither temperature nor filters nor noise enter the confidence.
        guesses, confidence = self.sampler.guess(self.model, hidden, positions, self.seeds, numbers, (self.mask_token,))
        unmask_(
            masks,
            drafted(guesses, self.mask_token),
            confidence,
            mask_token=self.mask_token,
            windows=torch.stack([self.nothing, self.drafting * (self.block_size - 1)], 1),
            threshold=self.threshold,
            backend=backend_of(confidence.dtype),
        )
        masked = masks == self.mask_token
        needed = self.slot[1:] < self.entry.pending[:, None]
        if self.ends is not None:
            needed &= (is_end(masks, self.ends) & ~masked).cumsum(1) == 0
        self.drafting.mul_((masked & needed).any(1))
        return None

    def _open(self) -> None:
        """Begins a block after each token that became known since the last pass."""
        block = self.entry.block
        block[:, 0] = self.entry.known.clamp(min=0)  # -1 in a finished sequence
        block[:, 1:].masked_fill_(self.fresh[:, None], self.mask_token)
        self.fresh.fill_(False)

    def _verdicts(
        self, judged: torch.Tensor, drafted: torch.Tensor, guesses: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """The tokens at `positions`: a guess with probability ``min(1, p / q)``, else a sample from ``max(p - q, 0)``.

        All ``(batch, R)``, the logits ``(batch, R, V)``. Leviathan et al., "Fast inference from transformers via
        speculative decoding", algorithm 1. It needs the probabilities of all tokens, and their difference, so fp64.
        """
        p, q = (
            distribution(logits, self.sampler.temperature)
            for logits in (self.sampler.filtered(judged, self.banned), drafted)
        )
        u = uniforms(self.seeds[:, None], self.forward[:, None], positions, 1)[..., 0]
        at = guesses[..., None]
        # Empty where p equals q, but there the guess is accepted. Logarithms need no more digits than logits have.
        residual = (p - q).clamp(min=0).log().to(torch.promote_types(judged.dtype, torch.float32))
        resampled = sample(residual, positions, 1.0, self.seeds, OWN)
        return torch.where(u * q.gather(-1, at)[..., 0] < p.gather(-1, at)[..., 0], guesses, resampled)

    def opened(self, session: Session, rows: Rows) -> int:
        return record_first(session, [row.known for row in rows])

    def stepped(self, session: Session, before: Rows, rows: Rows) -> int:
        if len(self.forms) > 1 and not before[0].form:
            return 0  # a draft pass, which its verification counts
        taken_part = []
        for sequence, (old, row) in enumerate(zip(before, rows, strict=True)):
            if length := old.pending:
                draft, predictions = row.block[:length], row.predictions[:length]
                taken_part.append(row.forwards)
                session.log_step(sequence, draft, None, accepted=row.accepted, next_token=row.known)
                if session.trace is not None:
                    session.trace[sequence].append(LinearStep(draft, predictions, row.accepted, row.forwards))
        # The sequence drafted last took part in every forward.
        session.forwards += max(taken_part, default=0)
        return sum(taken_part)


class DraftPass:
    """A draft pass as a model whose forwards can be timed: rows of masks that see each other, and a token of each."""

    packs_rows = False

    def __init__(self, model: Any, mask_token: int) -> None:
        self.model, self.mask_token = model, mask_token

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, tokens: torch.Tensor, *, cache: Any, rows: torch.Tensor | None = None) -> torch.Tensor:
        if rows is not None:  # the prefix
            logits: torch.Tensor = self.model(tokens, cache=cache, rows=rows)
            return logits
        plan, nothing = _bidirectional(tokens.shape[1], cache.lengths.device), torch.zeros_like(cache.lengths)
        adapted = self.model.has_adapter
        hidden = self.model.hidden(tokens, cache=cache, counts=nothing, mask=plan, adapted=adapted)
        return Sampler().draw(self.model, hidden, tokens, nothing, 0, (self.mask_token,))


decode = decoder(LinearSteps)


@lru_cache(maxsize=64)
def _bidirectional(rows: int, device: torch.device) -> TilePlan:
    return full(rows).plan(64, 64, device)
