"""Linear self-speculation: one model drafts a block by diffusion, then verifies it autoregressively.

Source: "Nemotron-Labs-Diffusion", section 3.3. The plain form is reference/linear_self_speculation.py; both take the same
forwards, draw the same tokens and accept the same part of every draft.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from pdkernels._validation import check
from pdkernels.backends import backend_of
from pdkernels.decoding._sampling import (
    OWN,
    Seed,
    banned_tokens,
    checked_mask_token,
    checked_name,
    checked_number,
    checked_sampling,
    checked_size,
    distribution,
    drafted,
    draw,
    noise,
    statistics,
    uniforms,
    without_,
)
from pdkernels.decoding._session import Session, is_end, judged_without_choice, without_choice
from pdkernels.decoding._steps import Rows, Steps, decoder, record_first
from pdkernels.decoding.traces import LinearStep
from pdkernels.masks import full
from pdkernels.ops import unmask_, verify_draft

_OP = "decoding.linear_self_speculation"

Verification = Literal["compare", "rejection"]


class LinearSteps(Steps):
    """An entry: the next block's length; what was accepted of the last one, the next form (1: a verification), the token after it,
    the forwards it took; the last block, the verifier's predictions for it.

    Args:
        block_size: the known token and the masks that are drafted after it; 1 is autoregressive decoding.
        threshold: 0 fills a block in one draft pass. Above, a pass fills the slots whose confidence reaches it, and always the
            best one, until none is masked. Only the confidences tell whether another pass is needed, so the device is read once
            per forward, not once per step. A speculative pass would cost a forward, more than the wait.
        temperature: of draft and verifier; 0 is greedy.
        verification: "compare" accepts a draft token that equals the verifier's own draw, "rejection" accepts draft token x
            with probability ``min(1, p(x) / q(x))``: the same distribution, more accepted. It needs threshold 0.
    """

    def __init__(
        self,
        sizes: Session,
        *,
        block_size: int = 32,
        threshold: float = 0.0,
        temperature: float = 0.0,
        verification: Verification = "compare",
        mask_token: int | None = None,
        allow_mask_token: bool = False,
        seed: Seed = 0,
        page_size: int | None = None,
    ) -> None:
        checked_size(_OP, "block_size", block_size)
        seeds = checked_sampling(_OP, temperature, seed, sizes.batch)
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
        block_size = sizes.block(block_size)
        self.model, self.limit = sizes.model, sizes.max_new_tokens
        self.block_size, self.threshold, self.temperature = block_size, threshold, temperature
        self.mask_token = checked_mask_token(_OP, self.model, mask_token)
        self.banned = banned_tokens(_OP, self.model, allow_mask_token, self.mask_token)
        # At temperature 0 both verifications are the same.
        self.rejection = verification == "rejection" and temperature > 0 and block_size > 1
        self.most_passes = min(1, block_size - 1) if threshold == 0 else block_size - 1  # each fills at least one slot
        self.forms = ("step", "verify") if self.most_passes > 1 else ("step",)

        self.cache = sizes.new_cache(page_size)
        device = self.cache.device
        self.seeds = seeds.to(device)
        self.ends = sizes.ends_on(device)
        self.slot = torch.arange(block_size, device=device)
        self.everything = full(block_size).plan(64, 64, device)
        self.nothing = torch.zeros_like(self.cache.lengths)  # rows that a draft pass stores
        self.remaining = torch.zeros_like(self.cache.lengths)  # tokens left; 0 once a sequence is done
        self.forward = torch.zeros_like(self.cache.lengths)  # number of each sequence's last forward
        self.begun = torch.zeros_like(self.cache.lengths)  # `forward` before the block
        self.drafting = torch.zeros_like(self.cache.lengths)  # 1 while a block has masks
        self.fresh = torch.ones(1, dtype=torch.bool, device=device)  # the next pass begins a block
        self.entry = self.remaining.new_zeros(sizes.batch, 5 + 2 * block_size)
        self.draft_lengths, self.accepted, self.form, self.known, self.forwards = self.entry[:, :5].unbind(1)
        self.block, self.predictions = self.entry[:, 5:].split(block_size, 1)

    @property
    def most_entries(self) -> int:
        """With draft passes as rounds, each of which fills a slot."""
        return self.limit * (1 + (self.most_passes if len(self.forms) > 1 else 0))

    def start(self, session: Session) -> None:
        prompts, prompt_lengths = session.packed_prompts(session.longest, self.cache.device)
        self.cache.lengths.zero_()
        last = (prompt_lengths - 1)[:, None]
        logits = self.model(prompts, cache=self.cache, counts=session.ragged(prompt_lengths), rows=last)
        first = draw(logits, prompt_lengths[:, None], self.temperature, self.seeds, OWN, self.banned)[:, 0]
        broken = without_choice(logits, first[:, None])[:, 0]
        self.cache.commit_(prompt_lengths)
        self.known.copy_(first)
        self.accepted.zero_().masked_fill_(broken, -1)
        self.remaining.fill_(self.limit - 1).masked_fill_(broken, 0)
        if self.ends is not None:
            self.remaining.masked_fill_(is_end(first, self.ends), 0)
        self.draft_lengths.copy_(self.remaining.clamp(max=self.block_size))
        self.forward.fill_(1)
        self.begun.fill_(1)
        self.form.zero_()
        self.fresh.fill_(True)

    def step(self, width: int | None = None, ragged: bool = True) -> None:
        logits = self._draft()
        if len(self.forms) > 1:
            self.form.copy_((self.drafting == 0).all().expand_as(self.form))
        else:
            self._judge(logits, width or self.block_size, ragged)

    def verify(self, width: int | None = None, ragged: bool = True) -> None:
        """Judges the block that passes have filled."""
        self._judge(None, width or self.block_size, ragged)
        self.form.zero_()

    def _judge(self, logits: torch.Tensor | None, width: int, ragged: bool) -> None:
        """`logits`: of the draft, if their distribution is needed."""
        draft, lengths = self.block[:, :width], self.cache.lengths
        judged = self.model(draft, cache=self.cache, counts=self.draft_lengths if ragged else None)
        self.forward += 1
        positions = lengths[:, None] + 1 + self.slot[:width]
        predictions = draw(judged, positions, self.temperature, self.seeds, OWN, self.banned)
        own = predictions.clone() if self.rejection else predictions
        if logits is not None and self.rejection:
            tested = min(width, self.block_size - 1)  # the last row of a whole block has no guess to test
            guesses = self.block[:, 1 : tested + 1]
            predictions[:, :tested] = self._verdicts(
                judged[:, :tested], logits[:, :tested], guesses, positions[:, :tested]
            )
        verdict = verify_draft(draft, predictions, draft_lengths=self.draft_lengths, end_tokens=self.ends)
        self.cache.commit_(verdict.accepted)

        # The verifier's next token is known, so it counts; a finished sequence has nothing remaining.
        broken = judged_without_choice(judged, own, verdict.accepted)
        self.remaining.sub_(verdict.accepted).masked_fill_(verdict.ended | broken, 0)
        self.draft_lengths.copy_(self.remaining.clamp(max=self.block_size))
        self.accepted.copy_(verdict.accepted).masked_fill_(broken, -1)
        self.known.copy_(verdict.next_token)
        self.forwards.copy_(self.forward - self.begun)
        self.begun.copy_(self.forward)
        self.fresh.fill_(True)
        self.predictions[:, :width] = predictions

    def _draft(self) -> torch.Tensor | None:
        """A pass over the block after its known token; returns its logits if their distribution is needed."""
        self.block[:, 0] = self.known.clamp(min=0)  # -1 in a finished sequence
        masks = self.block[:, 1:].masked_fill_(self.fresh, self.mask_token)
        active = (self.draft_lengths > 0).long()
        self.drafting.copy_(torch.where(self.fresh, active, self.drafting))
        self.fresh.fill_(False)
        if self.most_passes == 0:
            return None
        self.forward += self.drafting
        # It only reads the cache: a draft pass leaves nothing but the draft.
        hidden = self.model.hidden(
            self.block, cache=self.cache, counts=self.nothing, mask=self.everything, adapted=self.model.has_adapter
        )[:, 1:]
        positions, numbers = self.cache.lengths[:, None] + self.slot[1:], self.forward[:, None]
        if self.rejection:  # which needs the probabilities of all tokens
            logits = without_(self.model.logits(hidden), self.mask_token)
            masks.copy_(drafted(draw(logits, positions, self.temperature, self.seeds, numbers), self.mask_token))
            return logits
        # Neither temperature nor noise enters the confidence.
        draws = noise(self.temperature, self.seeds, numbers, positions)
        guesses = statistics(self.model, hidden, suppress=self.mask_token, top_k=1, **draws)
        ids = drafted(guesses.ids, self.mask_token)
        if self.threshold == 0:
            masks.copy_(ids)
            return None
        remaining = unmask_(
            masks,
            ids,
            guesses.probs,
            mask_token=self.mask_token,
            windows=torch.stack([self.nothing, active * (self.block_size - 1)], 1),
            threshold=self.threshold,
            backend=backend_of(guesses.probs.dtype),
        ).remaining
        self.drafting.copy_(remaining.clamp(max=1))
        return None

    def _verdicts(
        self, judged: torch.Tensor, drafted: torch.Tensor, guesses: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """The tokens at `positions`: a guess with probability ``min(1, p / q)``, else a draw from ``max(p - q, 0)``.

        All ``(batch, R)``, the logits ``(batch, R, V)``. Leviathan et al., "Fast inference from transformers via speculative
        decoding", algorithm 1. It needs the probabilities of all tokens, and their difference, so fp64.
        """
        if self.banned:
            judged = without_(judged.clone(), self.mask_token)
        p, q = distribution(judged, self.temperature), distribution(drafted, self.temperature)
        u = uniforms(self.seeds[:, None], self.forward[:, None], positions, 1)[..., 0]
        at = guesses[..., None]
        # Empty where p equals q, but there the guess is accepted. Logarithms need no more digits than logits have.
        rest = (p - q).clamp(min=0).log().to(torch.promote_types(judged.dtype, torch.float32))
        others = draw(rest, positions, 1.0, self.seeds, OWN)
        return torch.where(u * q.gather(-1, at)[..., 0] < p.gather(-1, at)[..., 0], guesses, others)

    def opened(self, session: Session, rows: Rows) -> int:
        return record_first(session, rows, 3)

    def stepped(self, session: Session, before: Rows, rows: Rows) -> int:
        if len(self.forms) > 1 and not before[0][2]:
            return 0  # a draft pass, which its verification counts
        taken_part = []
        for sequence, ((length, *_), (_, accepted, _, known, forwards, *tokens)) in enumerate(zip(before, rows)):
            if length:
                drafted, judged = tokens[:length], tokens[self.block_size :][:length]
                taken_part.append(forwards)
                session.log_step(sequence, drafted, None, accepted=accepted, next_token=known)
                if session.trace is not None:
                    session.trace[sequence].append(LinearStep(drafted, judged, accepted, forwards))
        # The sequence drafted last took part in every forward.
        session.forwards += max(taken_part)
        return sum(taken_part)


decode = decoder(LinearSteps)
