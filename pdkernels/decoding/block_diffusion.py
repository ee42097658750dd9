"""Block diffusion: a block of mask tokens is filled in by confidence, then its rows in the cache are refreshed.

Source: "Nemotron-Labs-Diffusion", section 3.2. The plain form is reference/block_diffusion.py; both take the same forwards,
draw the same tokens and fill the same slots.

All sequences of a batch fill their blocks in step: blocks are equally long, and a sequence whose block is done waits for
the others before all of them are refreshed in one forward.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch

from pdkernels._validation import check, check_type
from pdkernels.backends import backend_of
from pdkernels.decoding._masked import share
from pdkernels.decoding._sampling import (
    OWN,
    Seed,
    banned_tokens,
    checked_mask_token,
    checked_number,
    checked_sampling,
    checked_size,
    draw,
    noise,
    statistics,
)
from pdkernels.decoding._session import Session, marked, sent
from pdkernels.decoding.traces import DenoiseStep
from pdkernels.masks import full
from pdkernels.models.sampler_head import SamplerHead
from pdkernels.ops import unmask_

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
    allow_mask_token: bool = False,
    seed: Seed = 0,
    page_size: int | None = None,
    sampler: SamplerHead | None = None,
) -> int:
    """Fills `session` block by block. Not the tokens of autoregressive decoding: a filled slot is never revised.

    Args:
        block_size: tokens of a block.
        threshold: fill every slot whose confidence reaches it, and always the best one. None: fill the most confident ones,
            evenly over `steps_per_block`.
        steps_per_block: forwards per block if `threshold` is None; by default as many as there are masks.
        refresh: "causal" runs a finished block through the model causally, which also gives the next block's first token;
            "bidirectional" is for models whose past is causal by blocks.
        temperature: of the candidates; slots are chosen by the confidence at temperature 1.
        sampler: a trained network whose scores replace the confidence; for temperature 0. Slots after an end token are
            left alone.

    Returns:
        Forwards that the sequences took part in, summed.
    """
    checked_size(_OP, "block_size", block_size)
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
        check(temperature == 0, _OP, "temperature", "be 0 with a sampler", temperature)
    check(refresh in get_args(Refresh), _OP, "refresh", "be 'causal' or 'bidirectional'", repr(refresh))
    seeds = checked_sampling(_OP, temperature, seed, session.batch)
    model = session.model
    mask_token = checked_mask_token(_OP, model, mask_token)
    banned = banned_tokens(_OP, model, allow_mask_token, mask_token)
    limit = session.max_new_tokens
    if limit == 0:
        return 0
    block_size = session.block(block_size)
    known = 1 if refresh == "causal" else 0  # slots of a new block that are not masks

    cache = session.new_cache(page_size)
    lengths = cache.lengths  # grows in place with every commit
    device = lengths.device
    seeds = seeds.to(device)
    slots = torch.arange(block_size, device=device)
    slot = slots[known:]
    everything = full(block_size).plan(64, 64, device)
    nothing = torch.zeros_like(lengths)  # rows that a denoising step stores

    block, prompt_lengths = session.packed_prompts(session.longest, device)
    counts, last = prompt_lengths, (prompt_lengths - 1)[:, None]
    mask = None
    numbers = [0] * session.batch  # of each sequence's last forward
    active = [True] * session.batch
    written = 0

    while True:
        # The prompt, or the finished block, becomes part of the past.
        logits = model(block, cache=cache, counts=counts, mask=mask, rows=last)
        session.forwards += 1
        numbers = [number + on for number, on in zip(numbers, active, strict=True)]
        cache.commit_(counts)

        wanted = min(block_size, limit - written)
        block = torch.full((session.batch, block_size), mask_token, device=device)
        if known:
            block[:, :1] = draw(logits, lengths[:, None], temperature, seeds, OWN, banned)
        rows = (marked(logits, block) if known else block).tolist()
        for sequence, tokens in enumerate(rows):
            if active[sequence]:
                for token in tokens[:known]:
                    session.record_first(sequence, token)

        step = 0
        while True:
            # These still have masks that are needed.
            drafting = [
                on and not stopped and _is_open(tokens[:wanted], known, mask_token, session.end_tokens)
                for on, stopped, tokens in zip(active, session.stopped, rows, strict=True)
            ]
            if not any(drafting):
                break
            numbers = [number + on for number, on in zip(numbers, drafting, strict=True)]
            stops = [block_size if sampler is None else _first_end(tokens, session.end_tokens) for tokens in rows]
            host = [
                [0, on * max(stop - known, 0), number]
                for on, stop, number in zip(drafting, stops, numbers, strict=True)
            ]
            table = sent(host, device)
            hidden = model.hidden(block, cache=cache, counts=nothing, mask=everything)
            session.forwards += 1
            if sampler is None:
                draws = noise(temperature, seeds, table[:, 2:], lengths[:, None] + slot)
                # Neither temperature nor noise enters the confidence.
                guesses = statistics(model, hidden[:, known:], suppress=mask_token, top_k=1, **draws)
                ids, sure = guesses.ids, guesses.probs
            else:
                able = (block == mask_token) & (slots < table[:, 1:2] + known)
                judged = judged_guesses(model, hidden, block, able, mask_token, sampler)
                ids, sure = (part[:, known:] for part in judged)
            broken = (sure.isnan() & (block[:, known:] == mask_token)).any(1, keepdim=True)
            count = 1 if threshold is not None else _quota(block_size - known, steps_per_block, step)
            unmask_(
                block[:, known:],
                ids,
                sure,
                mask_token=mask_token,
                windows=table[:, :2],
                quota=count,
                threshold=threshold,
                backend=backend_of(sure.dtype),
            )
            step += 1
            # The one read of the device in a step.
            read = torch.cat([block, broken.to(block.dtype)], 1).tolist()
            before, rows = rows, [line[:-1] for line in read]
            for sequence, on in enumerate(drafting):
                if on:
                    if read[sequence][-1]:
                        session.fail_not_numbers(sequence)
                    _record(session, sequence, before[sequence], rows[sequence], mask_token)

        written += wanted
        for sequence, tokens in enumerate(rows):
            if active[sequence]:
                stop = next((i + 1 for i, token in enumerate(tokens[:wanted]) if token in session.end_tokens), wanted)
                if stop > known:
                    session.emit(sequence, tokens[known:stop], stop - known)
                active[sequence] = not any(token in session.end_tokens for token in tokens[:wanted])
        session.stop_(active)
        if written == limit or not any(active):
            return sum(numbers)
        counts = sent([[on * block_size] for on in active], device)[:, 0]
        mask = None if refresh == "causal" else everything
        last = torch.full_like(last, block_size - 1)


def judged_guesses(
    model: Any, hidden: torch.Tensor, block: torch.Tensor, able: torch.Tensor, mask_token: int, sampler: SamplerHead
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best guess other than the mask for every slot of a block, and the sampler's score of it, both ``(batch, block)``; scores
    are valid where a slot is `able` to be filled.

    The network was trained on the model's distribution, masks included; one pass over the logits serves both.
    """
    found = statistics(model, hidden, top_k=min(5, model.config.vocab_size))
    best, second = found.top_ids[..., 0], found.top_ids[..., 1]
    return torch.where(best == mask_token, second, best), sampler.scores(found, block, able)


def _first_end(tokens: list[int], ends: tuple[int, ...]) -> int:
    """Index of the first end token, or the number of tokens.

    >>> _first_end([5, 7, 9, 7], (7,)), _first_end([5], (7,))
    (1, 1)
    """
    return next((index for index, token in enumerate(tokens) if token in ends), len(tokens))


def _is_open(tokens: list[int], known: int, mask_token: int, ends: tuple[int, ...]) -> bool:
    """Whether one of `tokens` after the first `known` is a mask with no end token before it.

    >>> [_is_open(tokens, 1, 9, (7,)) for tokens in ([5, 9, 7], [5, 7, 9], [9, 2, 3])]
    [True, False, False]
    """
    for n, token in enumerate(tokens):
        if n >= known and token == mask_token:
            return True
        if token in ends:
            return False
    return False


def _quota(masks: int, steps: int | None, step: int) -> int:
    """Slots to fill in forward `step` of a block: `masks` of them spread evenly, the remainder first."""
    steps = masks if steps is None else min(steps, masks)
    return share(masks, steps, step)


def _record(session: Session, sequence: int, before: list[int], after: list[int], mask_token: int) -> None:
    """One denoising step. Filled slots are recognized by their tokens: a guess is never the mask token."""
    filled = {slot: token for slot, (old, token) in enumerate(zip(before, after)) if old == mask_token != token}
    session.accepted[sequence].append(len(filled))
    if session.trace is not None:
        session.trace[sequence].append(DenoiseStep(before, filled))
