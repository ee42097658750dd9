"""Greedy autoregressive decoding: one token per forward, on the KV cache. The yardstick of every other method."""

from __future__ import annotations

import torch

from pdkernels.decoding._session import Session, is_end


def decode(session: Session, *, page_size: int | None = None) -> None:
    """Fill `session` with greedy tokens, one forward each (the prompt's forward gives the first).

    Options:
        page_size: rows per cache page; None keeps the cache contiguous.
    """
    if session.max_new_tokens == 0:
        return
    model = session.model
    cache = session.new_cache(page_size)
    device = cache.lengths.device
    prompts, prompt_lengths = session.packed_prompts(session.longest, device)
    ends = torch.tensor(session.end_tokens, dtype=torch.int64, device=device)

    last = (prompt_lengths - 1)[:, None]
    token = model(prompts, cache=cache, counts=session.ragged(prompt_lengths), rows=last).argmax(-1)
    session.forwards += 1
    cache.commit_(prompt_lengths)
    active = torch.ones_like(prompt_lengths)  # 1 while a sequence goes on, then 0: its cache stands still

    current = token[:, 0].tolist()
    for sequence, first in enumerate(current):
        session.record_first(sequence, first)
    going = [first not in session.end_tokens for first in current]

    for _ in range(session.max_new_tokens - 1):
        if not any(going):
            break
        if ends.numel():
            active = active.masked_fill(is_end(token[:, 0], ends), 0)
        # A finished sequence goes through the model too, but its row is never committed.
        token = model(token, cache=cache).argmax(-1)
        session.forwards += 1
        cache.commit_(active)
        following = token[:, 0].tolist()  # the one read of the device in a step
        for sequence in range(session.batch):
            if going[sequence]:
                session.record_step(
                    sequence, [current[sequence]], [following[sequence]], accepted=1, next_token=following[sequence]
                )
                going[sequence] = following[sequence] not in session.end_tokens
        current = following
