"""Greedy Jacobi decoding: verify a whole draft per forward, keep what the model agrees with, guess the rest anew.

Source: "Jacobi Forcing" (arXiv 2512.14681), section 3 (one block at a time) and section 4.2 (the running window).
The plain form is reference/jacobi.py; both take the same forwards and accept the same tokens.
"""

from __future__ import annotations

import torch

from pdkernels._validation import check, check_type
from pdkernels.decoding._filler import filler_words
from pdkernels.decoding._session import Session, is_end
from pdkernels.ops import verify_draft

_OP = "decoding.jacobi"

DEFAULT_BLOCK_SIZE = 16


def decode(
    session: Session,
    *,
    block_size: int | None = None,
    window: int | None = None,
    seed: int = 0,
    page_size: int | None = None,
) -> None:
    """Fill `session` with greedy tokens, several per forward where drafts are accepted.

    Options:
        block_size: decode block after block of this many tokens (default 16): inside a block the draft only shrinks.
        window: keep a draft of this many tokens instead, refilled after every forward. Excludes `block_size`.
        seed: of the tokens that fill a draft before the model has guessed them; changes the forwards needed, never
            the tokens.
        page_size: rows per cache page; None keeps the cache contiguous.
    """
    length = _checked_length(block_size, window)
    check_type(type(seed) is int, _OP, "seed", "be an int", type(seed).__name__)
    running = window is not None
    limit = session.max_new_tokens
    if limit == 0:
        return
    # The last token asked for needs no forward of its own, so no draft is ever longer than limit - 1.
    slots = max(1, min(length, limit - 1))

    model = session.model
    cache = session.new_cache(page_size)
    lengths = cache.lengths  # grows in place with every commit
    device = lengths.device
    ends = torch.tensor(session.end_tokens, dtype=torch.int64, device=device) if session.end_tokens else None
    words = filler_words(seed, limit, slots, device)
    slot = torch.arange(slots, device=device)

    # Prompt and first draft in one forward: the first token exactly, and guesses that rest on fillers.
    history, prompt_lengths = session.packed_prompts(session.longest + limit + slots, device)
    first_fillers = history.gather(1, words[0, : slots - 1] % prompt_lengths[:, None])
    history.scatter_(1, prompt_lengths[:, None] + slot[:-1], first_fillers)
    width = session.longest + slots - 1
    rows = (prompt_lengths - 1)[:, None] + slot
    counts = session.ragged(prompt_lengths + (slots - 1))
    draft = model(history[:, :width], cache=cache, counts=counts, rows=rows).argmax(-1)
    session.forwards += 1
    cache.commit_(prompt_lengths)

    remaining = torch.full_like(prompt_lengths, limit - 1)  # tokens still to come; 0 once a sequence is done
    if ends is not None:
        remaining.masked_fill_(is_end(draft[:, 0], ends), 0)
    draft_lengths = remaining.clamp(max=slots)
    predictions = torch.empty_like(draft)
    step = torch.ones(1, dtype=torch.int64, device=device)

    host_draft = draft.tolist()
    host_lengths = [0 if row[0] in session.end_tokens else min(slots, limit - 1) for row in host_draft]
    for sequence, row in enumerate(host_draft):
        session.record_first(sequence, row[0])

    while (width := max(host_lengths)) > 0:
        counts = None if min(host_lengths) == width else draft_lengths
        torch.argmax(model(draft[:, :width], cache=cache, counts=counts), -1, out=predictions[:, :width])
        session.forwards += 1
        # Like its KV rows, a draft stands behind the committed history at its own place: only a commit makes it count.
        refill = history.gather(1, words.index_select(0, step) % lengths[:, None])
        history.scatter_(1, lengths[:, None] + slot, draft)
        verdict = verify_draft(draft, predictions, draft_lengths=draft_lengths, end_tokens=ends, refill=refill)
        cache.commit_(verdict.accepted)
        step += 1

        # A partly accepted block goes on with the rest of its draft; anything else starts from a full one. The model's
        # next token stands in slot 0 either way. A finished sequence has nothing remaining, hence an empty draft.
        remaining = (remaining - verdict.accepted).masked_fill_(verdict.ended, 0)
        if running:
            next_lengths = remaining.clamp(max=slots)
        else:
            rest = draft_lengths - verdict.accepted
            next_lengths = torch.minimum(rest.masked_fill_(rest == 0, slots), remaining)

        # The one read of the device in a step.
        columns = [verdict.accepted[:, None], next_lengths[:, None], verdict.new_draft]
        if session.trace is not None:
            columns.append(predictions)
        poll = torch.cat(columns, 1).tolist()
        for sequence, row in enumerate(poll):
            if (length := host_lengths[sequence]) > 0:
                session.record_step(
                    sequence,
                    host_draft[sequence][:length],
                    row[2 + slots :][:length] if session.trace is not None else None,
                    accepted=row[0],
                    next_token=row[2],
                )
        host_draft = [row[2 : 2 + slots] for row in poll]
        host_lengths = [row[1] for row in poll]
        draft, draft_lengths = verdict.new_draft, next_lengths


def _checked_length(block_size: int | None, window: int | None) -> int:
    """Length of a full draft."""
    check(
        block_size is None or window is None,
        _OP,
        "window",
        "stand alone",
        f"window={window} and block_size={block_size}",
        "Give block_size to decode block by block, or window to keep one running draft.",
    )
    for name, value in (("block_size", block_size), ("window", window)):
        if value is not None:
            check_type(type(value) is int, _OP, name, "be an int", type(value).__name__)
            check(value >= 1, _OP, name, "be at least 1", value)
            return value
    return DEFAULT_BLOCK_SIZE
