"""Jacobi decoding of several blocks at once, with rejected drafts retried as branches of the same forward.

Source: "Jacobi Forcing" (arXiv 2512.14681), section 4 and algorithm 1 of its appendix A.
The plain form is reference/jacobi_multiblock.py; both take the same forwards and accept the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from pdkernels._validation import check, check_type
from pdkernels.decoding.causal._filler import filler_words
from pdkernels.decoding.causal._multiblock import Limits, Progress
from pdkernels.generation.noise import OWN, banned_tokens
from pdkernels.generation.params import MAX_POSITIONS
from pdkernels.generation.session import Session, flag_no_choice, has_no_choice
from pdkernels.masks import TilePlan, candidates
from pdkernels.ops import verify_draft

_OP = "decoding.jacobi_multiblock"

# Branches are padded to a multiple of this many tokens, so that few plans serve all steps.
BRANCH_STEP = 8

Predict = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # the tokens drawn from logits at positions


def decode(
    session: Session,
    *,
    block_size: int = 8,
    blocks: int = 2,
    spawn_ratio: float = 0.85,
    pool_size: int = 4,
    verification_size: int = 4,
    allow_mask_token: bool = False,
    page_size: int | None = None,
) -> None:
    """Fills `session` with the tokens of autoregressive decoding, several per forward where drafts or candidates are
    accepted.

    Args:
        block_size: tokens per block. The paper's 64 (`Method.paper_settings`) fill what a B200 computes in the time of
            one row; on a CPU few rows are free, and 8 are the fastest (docs/papers/jacobi.md).
        blocks: maximum number of active blocks, including the one being committed.
        spawn_ratio: a block opens the next one when this share of its tokens is accepted.
        pool_size: how many rejected sequences are kept to find candidates in; the oldest is dropped first. 0: no
            candidates.
        verification_size: maximum number of candidates verified per forward, including the draft; 1, the fastest on a
            CPU: only the draft.
        temperature: sampling temperature; 0 is greedy. The noise of a sample is keyed by its position and seed, so the
            tokens are those that `autoregressive` samples with the same seed, whatever was drafted.
        seed: seed of the samples, and of the random tokens that fill a draft until the model has made guesses. Those
            change how many forwards it takes, not the tokens. An int or a list, as elsewhere.
    """
    limits = _checked_limits(block_size, blocks, spawn_ratio, pool_size, verification_size)
    seeds = session.seeds
    sampler = session.sampler
    banned = banned_tokens(_OP, session.model, allow_mask_token)
    limit = session.max_new_tokens
    if limit == 0:
        return
    # A longer block or pool would never be used in full.
    block_size, limits = min(block_size, limit), limits._replace(pool_size=min(pool_size, 2 * limit))
    model = session.model
    room = _room(limits, limit)
    cache = session.new_cache(page_size, room, drafts=room)
    device = cache.lengths.device
    ends = session.ends_on(device)
    random_words = filler_words(seeds, limit, block_size)  # on the host, where drafts are put together

    numbers = seeds.to(device)

    def predict(logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return sampler.sample(logits, positions, numbers, OWN, banned)

    drafts = _first_drafts(session, cache, random_words[:, 0], max(1, min(block_size, limit - 1)), predict)
    active: list[Progress | None] = [None] * session.batch
    for sequence, (prompt, draft) in enumerate(zip(session.prompts, drafts)):
        session.record_first(sequence, draft[0])
        if draft[0] not in session.end_tokens and limit > 1 and not session.stopped[sequence]:
            active[sequence] = Progress(prompt, draft, limit, limits)

    sequences = torch.arange(session.batch, device=device)
    slot = torch.arange(block_size, device=device)
    while any(active):
        step = _packed(active, device)
        tail = _tail(step.branches, step.length, device) if step.branches > 1 else (None, None)
        logits = model(step.tokens, cache=cache, counts=step.counts, mask=tail[0], positions=tail[1], rows=step.rows)
        best = predict(logits, cache.lengths[:, None] + 1 + step.offsets)
        predictions = best.clamp(min=0).view(session.batch, step.branches, -1)
        session.forwards += 1

        drafted = step.tokens.view(session.batch, step.branches, -1)[..., : step.width]
        verdict = verify_draft(
            drafted, predictions[..., : step.width], draft_lengths=step.draft_lengths, end_tokens=ends
        )
        # The winner's rows move to the front; a lone branch is already there.
        source = None if step.branches == 1 else verdict.candidate[:, None] * step.length + slot[: step.width]
        cache.commit_(verdict.accepted, source)

        # The one read of the device in a step.
        lost = has_no_choice(logits, best).view_as(predictions)[sequences, verdict.candidate][:, : step.width]
        no_choice = (lost & (slot[: step.width] < verdict.accepted[:, None])).any(1)
        accepted = verdict.accepted.masked_fill(no_choice, -1)
        columns = torch.stack([accepted, verdict.next_token, verdict.candidate], 1)
        poll = torch.cat([columns, predictions[sequences, verdict.candidate]], 1).tolist()
        fresh = random_words[:, session.forwards - 1].tolist()
        for sequence, (progress, line) in enumerate(zip(active, poll)):
            if progress is None:
                continue
            accepted, next_token, candidate, *row_predictions = line
            draft = step.drafts[sequence][candidate]
            answers = row_predictions[: len(draft)]
            session.log_step(sequence, draft, answers, accepted, next_token)
            if next_token in session.end_tokens or accepted == progress.left or session.stopped[sequence]:
                active[sequence] = None
            else:
                progress.advance(draft, accepted, answers, row_predictions[step.width :], fresh[sequence])
                if session.grammar is not None:
                    first = progress.rows[0]
                    forced = session.grammar.drafted(sequence, session.tokens[sequence], len(first) - 1)
                    first[1 : 1 + len(forced)] = forced


class _Step(NamedTuple):
    """A forward over branches that continue the same prefix, each a row of the real block with the pseudo blocks after
    it."""

    drafts: list[list[list[int]]]  # per sequence, the draft at the front of each branch
    branches: int
    length: int  # tokens of a branch
    width: int  # of them, the leading ones that a draft of the batch may use
    tokens: torch.Tensor  # (batch, branches * length)
    rows: torch.Tensor | None  # (batch, branches * R): per branch the draft's rows, then those the pseudo blocks need
    draft_lengths: torch.Tensor  # (batch,), 0 for a finished sequence
    counts: torch.Tensor | None  # (batch,), None while all continue

    @property
    def offsets(self) -> torch.Tensor:
        """The position of each row of `rows` in its branch."""
        all_rows = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return (all_rows if self.rows is None else self.rows) % self.length


def _packed(active: Sequence[Progress | None], device: torch.device) -> _Step:
    """What every sequence tries, as one rectangle, in one copy to the device."""
    following = [progress.following() if progress else ([], []) for progress in active]
    drafts: list[list[list[int]]] = [progress.rows if progress else [[]] for progress in active]
    branches = max(map(len, drafts))
    width = max(len(rows[0]) for rows in drafts)
    # A sequence with fewer candidates repeats its draft, which has no effect, because the first candidate wins on ties.
    drafts = [rows + rows[:1] * (branches - len(rows)) for rows in drafts]
    length = max(len(rows[0]) + len(tokens) for rows, (tokens, _) in zip(drafts, following))
    if branches > 1:
        length = -(-length // BRANCH_STEP) * BRANCH_STEP
    waiting = max(len(read_positions) for _, read_positions in following)

    lines: list[list[int]] = []
    for rows, (tokens, read_positions) in zip(drafts, following):
        padding = [0] * (length - len(rows[0]) - len(tokens))
        offsets = [*range(width), *read_positions, *[0] * (waiting - len(read_positions))]
        line = [len(rows[0]), branches * length if rows[0] else 0]
        for row in rows:
            line += row + tokens + padding
        for start in range(0, branches * length, length):
            line += [start + position for position in offsets]
        lines.append(line)
    packed = torch.tensor(lines, device="cpu").to(device, non_blocking=True)
    all_asked = length == width and not waiting
    return _Step(
        drafts,
        branches,
        length,
        width,
        packed[:, 2 : 2 + branches * length].contiguous(),
        None if all_asked else packed[:, 2 + branches * length :],
        packed[:, 0].contiguous(),
        None if all(active) else packed[:, 1].contiguous(),
    )


@lru_cache(maxsize=64)
def _tail(branches: int, length: int, device: torch.device) -> tuple[TilePlan, torch.Tensor]:
    """The mask among the tokens of a step, and their positions after the prefix."""
    mask = candidates(branches, length)
    return mask.plan(32, 32, device), mask.positions.to(device)


def _first_drafts(
    session: Session, cache: Any, random_words: torch.Tensor, slots: int, predict: Predict
) -> list[list[int]]:
    """Prompt and first draft in one forward: the exact first token, and guesses based on fillers."""
    device = cache.lengths.device
    padded, lengths = session.packed_prompts(session.longest + slots - 1, device)
    slot = torch.arange(slots, device=device)
    fillers = padded.gather(1, random_words[:, : slots - 1].to(device) % lengths[:, None])
    padded.scatter_(1, lengths[:, None] + slot[:-1], fillers)
    counts = session.ragged(lengths + (slots - 1))
    last = (lengths - 1)[:, None] + slot
    logits = session.model(padded, cache=cache, counts=counts, rows=last)
    session.forwards += 1
    cache.commit_(lengths)
    rows: list[list[int]] = flag_no_choice(logits[:, :1], predict(logits, last + 1)).tolist()
    return rows


def _room(limits: Limits, max_new_tokens: int) -> int:
    """Rows of a cache for the branches of a step."""
    longest = min(limits.blocks * limits.block_size, max_new_tokens - 1) + BRANCH_STEP
    return min(limits.rows, 1 + limits.pool_size) * longest


def _checked_limits(block_size: int, blocks: int, spawn_ratio: float, pool_size: int, verification_size: int) -> Limits:
    for name, value, minimum in (
        ("block_size", block_size, 1),
        ("blocks", blocks, 1),
        ("pool_size", pool_size, 0),
        ("verification_size", verification_size, 1),
    ):
        check_type(type(value) is int, _OP, name, "be an int", type(value).__name__)
        check(value >= minimum, _OP, name, f"be at least {minimum}", value)
    # More than the maximum length of a text has no effect.
    block_size, blocks = min(block_size, MAX_POSITIONS), min(blocks, MAX_POSITIONS)
    pool_size, verification_size = min(pool_size, MAX_POSITIONS), min(verification_size, MAX_POSITIONS)
    check_type(type(spawn_ratio) in (int, float), _OP, "spawn_ratio", "be a number", type(spawn_ratio).__name__)
    check(0 <= spawn_ratio <= 1, _OP, "spawn_ratio", "be in [0, 1]", spawn_ratio)
    return Limits(block_size, blocks, math.ceil(spawn_ratio * block_size), pool_size, verification_size)
