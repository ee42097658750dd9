"""Block diffusion: a block of mask tokens is filled in by confidence, then its place in the cache is refreshed.

Source: "Nemotron-Labs-Diffusion", section 3.2. The plain form is reference/block_diffusion.py; both take the same forwards,
draw the same tokens and fill the same slots.

All sequences of a batch work on their blocks together: blocks are equally long, and a sequence whose block is done waits for
the others before all of them are refreshed in one forward.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from pdkernels._validation import check
from pdkernels.decoding._masked import share
from pdkernels.decoding._sampling import (
    OWN,
    check_sampling,
    checked_mask_token,
    checked_number,
    checked_size,
    distribution,
    draw,
    without_,
)
from pdkernels.decoding._session import Session, is_end
from pdkernels.decoding.result import DenoiseStep
from pdkernels.masks import full

_OP = "decoding.block_diffusion"

Refresh = Literal["causal", "bidirectional"]


def decode(
    session: Session,
    *,
    block_size: int = 32,
    threshold: float | None = 0.9,
    steps_per_block: int | None = None,
    refresh: Refresh = "causal",
    temperature: float = 0.0,
    mask_token: int | None = None,
    seed: int = 0,
    page_size: int | None = None,
) -> int:
    """Fill `session` block by block. Not the tokens of autoregressive decoding: what a slot holds is never judged again.

    Args:
        block_size: tokens of a block.
        threshold: fill every slot whose confidence reaches it, and the best one anyway. None: fill the most confident ones,
            evenly over `steps_per_block`.
        steps_per_block: forwards per block if `threshold` is None; by default as many as there are masks.
        refresh: "causal" runs a finished block through the model causally, which also gives the next block's first token;
            "bidirectional" is for models whose past is causal by blocks.
        temperature: of the candidates; slots are chosen by the confidence without it.

    Returns:
        Forwards that the sequences took part in, all together.
    """
    checked_size(_OP, "block_size", block_size)
    if threshold is not None:
        checked_number(_OP, "threshold", threshold)
        check(
            steps_per_block is None,
            _OP,
            "steps_per_block",
            "be None beside a threshold",
            steps_per_block,
            "Pass threshold=None.",
        )
    if steps_per_block is not None:
        checked_size(_OP, "steps_per_block", steps_per_block)
    check(refresh in get_args(Refresh), _OP, "refresh", "be 'causal' or 'bidirectional'", repr(refresh))
    check_sampling(_OP, temperature, seed)
    model = session.model
    mask_token = checked_mask_token(_OP, model, mask_token)
    limit = session.max_new_tokens
    if limit == 0:
        return 0
    known = 1 if refresh == "causal" else 0  # slots of a new block that are no masks

    cache = session.new_cache(page_size)
    lengths = cache.lengths  # grows in place with every commit
    device = lengths.device
    ends = torch.tensor(session.end_tokens, dtype=torch.int64, device=device)
    slot = torch.arange(block_size, device=device)
    everything = full(block_size).plan(64, 64, device)
    nothing = torch.zeros_like(lengths)  # what a denoising step stores

    block, prompt_lengths = session.packed_prompts(session.longest, device)
    counts, last = prompt_lengths, (prompt_lengths - 1)[:, None]
    mask = None
    forward = torch.zeros_like(lengths)  # number of each sequence's last forward
    active = torch.ones_like(lengths, dtype=torch.bool)
    host_active = [True] * session.batch
    written, taken_part = 0, 0

    while True:
        # The prompt, or the block that is done, becomes part of the past.
        logits = model(block, cache=cache, counts=counts, mask=mask, rows=last)
        session.forwards += 1
        forward += active
        taken_part += sum(host_active)
        cache.commit_(counts)

        wanted = min(block_size, limit - written)
        block = torch.full((session.batch, block_size), mask_token, device=device)
        block[:, :known] = draw(logits, lengths[:, None], temperature, seed, OWN)[:, :known]
        unfilled = (slot >= known).expand(session.batch, -1)
        going = active & ~_settled(block, unfilled, wanted, ends)
        host_block, host_going = _poll(block, going)
        for sequence, tokens in enumerate(host_block):
            if host_active[sequence]:
                for token in tokens[:known]:
                    session.record_first(sequence, token)

        step = 0
        while any(host_going):
            forward += going
            logits = model(block, cache=cache, counts=nothing, mask=everything, rows=slice(known, None))
            session.forwards += 1
            without_(logits, mask_token)
            guesses = draw(logits, lengths[:, None] + slot[known:], temperature, seed, forward[:, None])
            confidence = distribution(logits, 1.0).gather(-1, guesses[..., None])[..., 0]
            confidence = confidence.masked_fill(~unfilled[:, known:], -1)
            count = 1 if threshold is not None else _quota(block_size - known, steps_per_block, step)
            best = confidence.argsort(dim=-1, descending=True, stable=True)[:, :count]
            chosen = torch.zeros_like(unfilled[:, known:]).scatter(1, best, True)
            if threshold is not None:
                chosen |= confidence >= threshold
            chosen &= unfilled[:, known:] & going[:, None]
            block[:, known:] = torch.where(chosen, guesses, block[:, known:])
            unfilled = torch.cat([unfilled[:, :known], unfilled[:, known:] & ~chosen], 1)
            going = going & ~_settled(block, unfilled, wanted, ends)
            step += 1

            before, was_going = host_block, host_going
            host_block, host_going = _poll(block, going)
            for sequence in range(session.batch):
                if was_going[sequence]:
                    taken_part += 1
                    _record(session, sequence, before[sequence], host_block[sequence], mask_token)

        written += wanted
        for sequence, tokens in enumerate(host_block):
            if host_active[sequence]:
                stop = next((i + 1 for i, token in enumerate(tokens[:wanted]) if token in session.end_tokens), wanted)
                if stop > known:
                    session.emit(sequence, tokens[known:stop], stop - known)
                host_active[sequence] = not any(token in session.end_tokens for token in tokens[:wanted])
        if written == limit or not any(host_active):
            return taken_part
        active = active & ~is_end(block[:, :wanted], ends).any(1)
        counts = active * block_size
        mask = None if refresh == "causal" else everything
        last = torch.full_like(last, block_size - 1)


def _poll(block: torch.Tensor, going: torch.Tensor) -> tuple[list[list[int]], list[bool]]:
    """The one read of the device in a step: the blocks, and which sequences have something open that they need."""
    rows = torch.cat([going[:, None], block], 1).tolist()
    return [row[1:] for row in rows], [row[0] != 0 for row in rows]


def _settled(block: torch.Tensor, unfilled: torch.Tensor, wanted: int, ends: torch.Tensor) -> torch.Tensor:
    """``(batch,)``: nothing is open among the first `wanted` tokens, or before an end token among them."""
    sure = unfilled[:, :wanted].cumsum(1) == 0
    return sure.all(1) | (sure & is_end(block[:, :wanted], ends)).any(1)


def _quota(masks: int, steps: int | None, step: int) -> int:
    """Slots to fill in forward `step` of a block: `masks` of them spread evenly, the remainder first."""
    steps = masks if steps is None else min(steps, masks)
    return share(masks, steps, step)


def _record(session: Session, sequence: int, before: list[int], after: list[int], mask_token: int) -> None:
    """One denoising step. What it filled shows: a guess is never the mask token."""
    filled = {slot: token for slot, (old, token) in enumerate(zip(before, after)) if old == mask_token != token}
    session.accepted[sequence].append(len(filled))
    if session.trace is not None:
        session.trace[sequence].append(DenoiseStep(before, filled))
