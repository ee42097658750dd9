"""Block diffusion: a block of mask tokens is filled in by confidence, then its rows in the cache are refreshed.

Source: "Nemotron-Labs-Diffusion", section 3.2. The plain form is reference/block_diffusion.py; both take the same
forwards, sample the same tokens and fill the same slots.

All sequences of a batch fill their blocks in step: blocks are equally long, and a sequence whose block is done waits
for the others before all of them are refreshed in one forward. Its tokens do not wait.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch

from pdkernels._validation import check, check_type
from pdkernels.backends import backend_of
from pdkernels.decoding.canvas.canvas import share
from pdkernels.decoding.canvas.states import checked_states
from pdkernels.decoding.causal._block_states import BlockStates
from pdkernels.decoding.costs import BlockSize, checked_block_size, step_costs
from pdkernels.decoding.grammar_fill import Guessed, joint_guesses, settle_
from pdkernels.decoding.steps import Entry, Row, Rows, Steps, decoder, unfinished
from pdkernels.generation.grammar_rows import GrammarRows
from pdkernels.generation.noise import (
    OWN,
    banned_tokens,
    checked_mask_token,
    checked_name,
    checked_number,
    checked_size,
    statistics,
    suppress_,
)
from pdkernels.generation.session import Session, has_no_choice, is_end, to_device_async
from pdkernels.generation.traces import DenoiseStep
from pdkernels.masks import TilePlan, full
from pdkernels.models.architectures.sampler_head import SamplerHead
from pdkernels.ops import unmask_

_OP = "decoding.block_diffusion"

Refresh = Literal["causal", "bidirectional"]

_SIZES = (4, 8, 16, 32)  # of blocks, if it is chosen
_GAIN = 1.37  # tokens per forward of a block over those of one of half its size: the oracle's in Table 4


class BlockSteps(Steps):
    """Not the tokens of autoregressive decoding: a filled slot is never revised.

    An entry has `pending`, 1 while a sequence needs tokens; `accepted`, the slots that were filled; `taking`, whether
    the sequence takes part in the next round; `ran`, 1 if the last round had a forward for it, 0 if it took rows of an
    earlier one, -1 if it waited; and the `block`. Form 1 is a refresh.

    Args:
        block_size: tokens per block. "auto" takes 4, 8, 16 or 32: the size with the most tokens for the measured time of
            a forward over one block, if each doubling fills 1.37 times as many per forward (Table 4). It does not
            depend on the batch, but on the machine, and so do the tokens.
        threshold: fill every slot whose confidence reaches it, and always the best one. None: fill the most confident
            ones, evenly over `steps_per_block`.
        steps_per_block: forwards per block if `threshold` is None; by default as many as there are masks.
        refresh: "causal" runs a finished block through the model causally, which also gives the next block's first
            token; "bidirectional" is for block-causal models.
        temperature: sampling temperature of the guesses; slots are chosen by their confidence at temperature 1, without
            filters.
        sampler: a trained network whose scores replace the confidence; for temperature 0. It leaves slots after an end
            token masked.
        speculate: further states of a block that a forward computes, those that the coming steps may reach. A step whose
            state is among them needs no forward; the tokens are the same. Without a grammar, a bias or penalties.
    """

    forms = ("step", "refresh")
    shows_provisional = True
    follows_grammars = True

    def __init__(
        self,
        session: Session,
        *,
        block_size: BlockSize = 32,
        threshold: float | None = 0.9,
        steps_per_block: int | None = None,
        refresh: Refresh = "causal",
        mask_token: int | None = None,
        allow_mask_token: bool = False,
        page_size: int | None = None,
        sampler: SamplerHead | None = None,
        speculate: int = 0,
    ) -> None:
        checked_states(_OP, speculate)
        # Filters know the rows of a batch by the sequence they belong to, and states are further rows.
        check(
            not speculate or not session.filters.any,
            _OP,
            "speculate",
            "be 0 with a grammar, a bias, penalties, excluded tokens or min_new_tokens",
            speculate,
        )
        self.needs_host = "`speculate` above 0" if speculate else ""
        size, chosen = checked_block_size(_OP, block_size, _SIZES[-1])
        if threshold is not None:
            checked_number(_OP, "threshold", threshold)
            check(
                steps_per_block is None,
                _OP,
                "steps_per_block",
                "be None with a threshold",
                steps_per_block,
                "Pass threshold=None.",
            )
        if steps_per_block is not None:
            checked_size(_OP, "steps_per_block", steps_per_block)
        if sampler is not None:
            check_type(isinstance(sampler, SamplerHead), _OP, "sampler", "be a SamplerHead", type(sampler).__name__)
            temperature = session.params.temperature
            check(temperature == 0, _OP, "temperature", "be 0 with a sampler", temperature)
        checked_name(_OP, "refresh", refresh, get_args(Refresh))
        self.sampler = session.sampler
        self.model, self.limit, self.session = session.model, session.max_new_tokens, session
        self.threshold, self.network = threshold, sampler
        self.mask_token = checked_mask_token(_OP, self.model, mask_token)
        self.banned = banned_tokens(_OP, self.model, allow_mask_token, self.mask_token)
        self.block_size = block_size = session.block(_paying_size(self.model) if chosen else size)
        self.slots, self.resumes = block_size, refresh == "causal"
        self.filled = filled = 1 if refresh == "causal" else 0  # slots of a new block that are not masks

        self.cache = session.new_cache(page_size, drafts=block_size)
        device = self.cache.device
        self.seeds, self.ends = session.seeds.to(device), session.ends_on(device)
        self.slot = torch.arange(block_size, device=device)
        self.bidirectional = full(block_size).plan(64, 64, device)
        self.refreshed = None if refresh == "causal" else self.bidirectional
        quotas = _quotas(block_size - filled, steps_per_block) if threshold is None else [1]
        self.quotas = torch.tensor(quotas or [0], device=device)
        self.nothing = torch.zeros_like(self.cache.lengths)  # rows that a denoising step stores
        self.forward = torch.zeros_like(self.cache.lengths)  # number of each sequence's last forward
        self.limits = torch.full_like(self.nothing, self.limit)
        self.written = torch.zeros_like(self.nothing)  # tokens of the blocks before this one
        self.passes = torch.zeros_like(self.nothing)  # steps over this block
        self.entry = Entry(session.batch, device, form=None, taking=None, ran=None, block=block_size)
        self.entry.ran.fill_(1)  # steps with further states may need no forward
        sizes = block_size, 1 + speculate, page_size
        self.states = BlockStates(session, self.cache, *sizes, drafts=block_size) if speculate else None

    @classmethod
    def draws_by_row(cls, options: Mapping[str, Any]) -> bool:
        return options.get("sampler") is None  # which is for temperature 0

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        return *super().state, self.limits, self.written, self.passes, self.forward

    def admit(self, row: int, other: Steps, length: int, capacity: int, other_row: int = 0) -> None:
        super().admit(row, other, length, capacity, other_row)
        if self.states is not None:
            assert isinstance(other, BlockSteps) and other.states is not None
            self.states.admit(row, other.states, other_row)

    def joined(self) -> None:
        self._look()  # sequences that wait for a refresh wait for the new one too

    def end(self, sequences: Sequence[int]) -> None:
        super().end(sequences)
        self._look()

    @property
    def max_entries(self) -> int:
        """The prompts', and for each block one per mask and a refresh."""
        return 1 + -(-self.limit // self.block_size) * (self.block_size - self.filled + 1)

    def start(self, session: Session) -> None:
        prompts, lengths = session.packed_prompts(session.longest, self.cache.device)
        for state in (self.cache.lengths, self.written, self.forward, self.entry.accepted):
            state.zero_()
        self.limits.fill_(session.max_new_tokens)
        self.entry.pending.fill_(1)
        self._extend(prompts, lengths, (lengths - 1)[:, None], None)

    def refresh(self, width: int | None = None, ragged: bool = True) -> None:
        """Makes the finished block part of the past."""
        entry, last = self.entry, torch.full_like(self.nothing, self.block_size - 1)[:, None]
        counts = entry.pending * self.block_size
        self.written += counts
        self._extend(entry.block, counts, last, self.refreshed)

    def _extend(self, tokens: torch.Tensor, counts: torch.Tensor, last: torch.Tensor, mask: TilePlan | None) -> None:
        """Stores `tokens`, and begins a block after them."""
        logits = self.model(tokens, cache=self.cache, counts=counts, mask=mask, rows=last)
        self.forward += self.entry.pending
        self.cache.commit_(counts)
        self.passes.zero_()
        self.entry.block.fill_(self.mask_token)
        if self.states is not None:
            self.entry.ran.fill_(1)
            self.states.begin()
        if self.filled:
            first = self.sampler.sample(logits, self.cache.lengths[:, None], self.seeds, OWN, self.banned)
            self.entry.block[:, :1] = first
            session, taking = self.session, (self.entry.pending > 0)[:, None]
            session.note(session.plain(logits), first, self.cache.lengths[:, None], taking)
            self._found(has_no_choice(logits, first)[:, 0] & (self.entry.pending > 0), self.nothing)
        self._look()

    def step(self, width: int | None = None, ragged: bool = True) -> None:
        model, block, filled = self.model, self.entry.block, self.filled
        hidden, taking = self._hidden()
        self.forward += taking
        stop = self.block_size - filled
        if self.network is None:
            positions = self.cache.lengths[:, None] + self.slot[filled:]
            ends = taking * stop
            # Neither temperature nor filters nor noise enter the confidence.
            ids, confidence = self.sampler.guess(
                model, hidden[:, filled:], positions, self.seeds, self.forward[:, None], (self.mask_token,)
            )
        else:
            before_end = self._is_end().cumsum(1) == 0
            ends = taking * (before_end.sum(1) - filled).clamp(min=0)
            able = (block == self.mask_token) & (self.slot < ends[:, None] + filled)
            judged = judged_guesses(model, hidden, block, able, self.mask_token, self.network)
            ids, confidence = (column[:, filled:] for column in judged)
        no_choice = ((confidence.isnan() | (ids < 0)) & (block[:, filled:] == self.mask_token)).any(1) & (taking > 0)
        number = self.passes.clamp(max=len(self.quotas) - 1)
        guessed, grammar = None, self.session.grammar
        if grammar is not None:
            guessed, before = self._what_is_guessed(grammar, hidden), block.tolist()
            ids, confidence = joint_guesses(grammar, before, guessed, ids, confidence)
        masked = block[:, filled:] == self.mask_token
        done = unmask_(
            block[:, filled:],
            ids,
            confidence,
            mask_token=self.mask_token,
            windows=torch.stack([self.nothing, ends], 1),
            quota=self.quotas.index_select(0, number),
            threshold=self.threshold,
            backend=backend_of(confidence.dtype),
        )
        if grammar is not None and guessed is not None:
            settle_(grammar, list(block), before, guessed, confidence)
        if self.session.likely is not None:
            unfiltered = self.session.plain(model.logits(hidden))[:, filled:]
            tokens, places = block[:, filled:], self.cache.lengths[:, None] + self.slot[filled:]
            self.session.note(unfiltered, tokens, places, masked & (tokens != self.mask_token))
        self.passes += taking
        if self.states is not None:
            self._expect(self.states, hidden, ids, confidence, taking)
        self._found(no_choice, done.committed)
        self._look()

    def _hidden(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of all rows of the blocks; and which sequences take the step, 0 or 1 each."""
        entry, mask = self.entry, self.bidirectional
        if self.states is None:
            hidden: torch.Tensor = self.model.hidden(entry.block, cache=self.cache, counts=self.nothing, mask=mask)
            return hidden, entry.taking

        def forward(blocks: torch.Tensor, cache: Any, copies: int) -> torch.Tensor:
            rows: torch.Tensor = self.model.hidden(blocks, cache=cache, counts=self.nothing.repeat(copies), mask=mask)
            return rows

        device, active = entry.table.device, [taking > 0 for taking in entry.taking.tolist()]
        texts = [tuple(text) for text in entry.block.tolist()]
        stepping, runs = self.states.stepping(texts, active)
        if runs:
            # With a threshold a step fills what reaches it: any of the surest guesses.
            quotas = [1] * self.block_size if self.threshold is not None else self.quotas.tolist()
            coming = [quotas[min(n, len(quotas)) :] if self.threshold is None else quotas for n in self.passes.tolist()]
            self.states.compute(forward, texts, active, coming, self.cache.lengths.tolist(), device)
        moved = to_device_async([[int(takes), int(runs) if takes else -1] for takes in stepping], device)
        entry.ran.copy_(moved[:, 1])
        return self.states.hidden(texts, stepping), moved[:, 0]

    def _expect(
        self,
        states: BlockStates,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        confidence: torch.Tensor,
        taking: torch.Tensor,
    ) -> None:
        """Takes guesses for the next step: those of this one, or what this one would draw with the numbers of the next."""
        filled = self.filled
        if self.network is None and not self.sampler.greedy:
            positions = self.cache.lengths[:, None] + self.slot[filled:]
            ids, confidence = self.sampler.guess(
                self.model, hidden[:, filled:], positions, self.seeds, self.forward[:, None] + 1, (self.mask_token,)
            )
        texts = [tuple(text) for text in self.entry.block.tolist()]
        slots = [range(filled, self.block_size)] * len(texts)
        states.expect(texts, slots, ids, confidence, [takes > 0 for takes in taking.tolist()], self.mask_token)

    def _what_is_guessed(self, grammar: GrammarRows, hidden: torch.Tensor) -> Guessed:
        """For `grammar`, with the rows of `hidden` of a filtered model."""
        logits = suppress_(self.model.logits(hidden[:, self.filled :]), self.mask_token)
        # The filter of these logits has read the blocks before this one; the session of a running batch has no texts.
        prefix = [grammar.committed(sequence)[:count] for sequence, count in enumerate(self.written.tolist())]
        places = self.slot[self.filled :].expand(len(hidden), -1)

        def draw(sequence: int, row: int, allowed: torch.Tensor) -> torch.Tensor:
            row_slice = slice(sequence, sequence + 1)
            position = self.cache.lengths[row_slice, None] + places[row_slice, row : row + 1]
            return self.sampler.sample(
                allowed, position, self.seeds[row_slice], self.forward[row_slice, None], (self.mask_token,)
            )

        return Guessed(logits, places, prefix, draw)

    def _is_end(self) -> torch.Tensor:
        block = self.entry.block
        return torch.zeros_like(block, dtype=torch.bool) if self.ends is None else is_end(block, self.ends)

    def _found(self, no_choice: torch.Tensor, filled: torch.Tensor) -> None:
        self.entry.accepted.copy_(filled.masked_fill(no_choice, -1))
        self.entry.pending.masked_fill_(no_choice, 0)

    def _look(self) -> None:
        """Determines who drafts on, who is done, and whether all others have completed their blocks. Again, it says the
        same."""
        entry, pending = self.entry, self.entry.pending
        remaining = (self.limits - self.written)[:, None]
        needed = self.slot < remaining
        ends = self._is_end() & needed
        masks = (entry.block == self.mask_token) & needed & (self.slot >= self.filled)
        # A mask after an end token is not needed.
        drafting = (masks & (ends.cumsum(1) - ends.long() == 0)).any(1) & (pending > 0)
        closed = ~drafting.any()
        pending.masked_fill_(~drafting & (ends.any(1) | (remaining[:, 0] <= self.block_size)), 0)
        entry.form.copy_(closed.expand_as(pending))
        entry.taking.copy_(torch.where(closed, pending, drafting))

    def opened(self, session: Session, rows: Rows) -> int:
        session.forwards += 1
        for sequence, row in enumerate(rows):
            self._begun(session, sequence, row)
        return session.batch

    def stepped(self, session: Session, before: Rows, rows: Rows) -> int:
        taken_part: int = sum(old.taking > 0 and row.ran > 0 for old, row in zip(before, rows, strict=True))
        session.forwards += taken_part > 0
        for sequence, (old, row) in enumerate(zip(before, rows, strict=True)):
            if not old.taking or row.ran < 0:
                continue
            if old.form:
                self._begun(session, sequence, row)
                continue
            _record(session, sequence, old.block, row.block, self.mask_token)
            if row.form or not row.taking:
                self._close(session, sequence, row.block)
        return taken_part

    def provisional(self, session: Session, before: Row | None, row: Row) -> list[int | None]:
        if row.form or not row.taking:  # the block is on record
            return []
        begin = len(session.tokens[0]) - self.filled
        block = row.block[self.filled : session.max_new_tokens - begin]
        return unfinished(block, self.mask_token, session.end_tokens)

    def _begun(self, session: Session, sequence: int, row: Row) -> None:
        if self.filled:
            session.record_first(sequence, row.block[0])
        if row.form or not row.taking:
            self._close(session, sequence, row.block)

    def _close(self, session: Session, sequence: int, block: list[int]) -> None:
        """Records what a complete block gives."""
        before = len(session.tokens[sequence]) - self.filled
        length = min(self.block_size, session.max_new_tokens - before)
        ends = (n + 1 for n, token in enumerate(block[:length]) if token in session.end_tokens)
        stop = next(ends, length)
        if stop > self.filled:
            session.emit(sequence, block[self.filled : stop], stop - self.filled)


def _paying_size(model: Any) -> int:
    """The size of blocks with the most tokens for the time of a forward."""
    costs = step_costs(model, _SIZES[-1], 1)
    assert costs is not None
    return max(_SIZES, key=lambda size: _GAIN ** math.log2(size) / costs.plain[size - 1])


decode = decoder(BlockSteps)


def judged_guesses(
    model: Any, hidden: torch.Tensor, block: torch.Tensor, able: torch.Tensor, mask_token: int, sampler: SamplerHead
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best guess other than the mask for every slot of a block, and the sampler's score of it, both ``(batch,
    block)``; scores are valid where a slot is `able` to be filled.

    The network was trained on the model's distribution, masks included; one pass over the logits serves both.
    """
    best_tokens = statistics(model, hidden, top_k=min(5, model.config.vocab_size))
    best, second = best_tokens.top_ids[..., 0], best_tokens.top_ids[..., 1]
    return torch.where(best == mask_token, second, best), sampler.scores(best_tokens, block, able)


def _quotas(masks: int, steps: int | None) -> list[int]:
    """Slots to fill in each forward of a block: `masks` of them spread evenly, the remainder first.

    >>> _quotas(7, 3), _quotas(2, None)
    ([3, 2, 2], [1, 1])
    """
    steps = masks if steps is None else min(steps, masks)
    return [share(masks, steps, step) for step in range(steps)]


def _record(session: Session, sequence: int, before: list[int], after: list[int], mask_token: int) -> None:
    """One denoising step. Filled slots are recognized by their tokens: a guess is never the mask token."""
    filled = {slot: token for slot, (old, token) in enumerate(zip(before, after)) if old == mask_token != token}
    session.accepted[sequence].append(len(filled))
    if session.trace is not None:
        session.trace[sequence].append(DenoiseStep(before, filled))
