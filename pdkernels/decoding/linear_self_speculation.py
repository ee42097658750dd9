"""Linear self-speculation: one model drafts a block by diffusion, then judges it autoregressively.

Source: "Nemotron-Labs-Diffusion", section 3.3. The plain form is reference/linear_self_speculation.py; both take the same
forwards, draw the same tokens and accept the same part of every draft.
"""

from __future__ import annotations

import torch

from pdkernels._validation import check, check_type
from pdkernels.decoding._sampling import (
    OWN,
    check_sampling,
    checked_mask_token,
    checked_size,
    draw,
    law,
    uniforms,
    without_,
)
from pdkernels.decoding._session import Session, is_end
from pdkernels.decoding.result import LinearStep
from pdkernels.masks import full
from pdkernels.ops import verify_draft

_OP = "decoding.linear_self_speculation"


def decode(
    session: Session,
    *,
    block_size: int = 32,
    threshold: float = 0.0,
    temperature: float = 0.0,
    verification: str = "compare",
    mask_token: int | None = None,
    seed: int = 0,
    page_size: int | None = None,
) -> int:
    """Fill `session` with the verifier's tokens, several per cycle where drafts are accepted.

    Options:
        block_size: the known token and the masks that are drafted behind it; 1 is autoregressive decoding.
        threshold: 0 fills a block in one draft pass. Above, a pass fills the slots whose confidence reaches it, and the best
            one anyway, until none is open.
        temperature: of draft and verifier; 0 is greedy.
        verification: "compare" accepts a draft token that equals the verifier's own draw, "rejection" accepts draft token x
            with probability ``min(1, p(x) / q(x))``: the same law, more accepted. It needs threshold 0.
        mask_token: id of open slots; None: the model's.
        seed: of the draws.
        page_size: rows per cache page; None keeps the cache contiguous.

    Returns:
        Forwards that the sequences took part in, all together.
    """
    checked_size(_OP, "block_size", block_size)
    check_sampling(_OP, temperature, seed)
    check_type(type(threshold) in (int, float), _OP, "threshold", "be a number", type(threshold).__name__)
    check(threshold >= 0, _OP, "threshold", "be at least 0", threshold)
    check(verification in ("compare", "rejection"), _OP, "verification", "be 'compare' or 'rejection'", repr(verification))
    check(verification == "compare" or threshold == 0, _OP, "threshold", "be 0 with verification='rejection'", threshold,
          "Slots filled in later passes depend on others; use verification='compare'.")
    model = session.model
    mask_token = checked_mask_token(_OP, model, mask_token)
    limit = session.max_new_tokens
    if limit == 0:
        return 0
    # At temperature 0 both verifications are the same.
    rejection = verification == "rejection" and temperature > 0 and block_size > 1

    cache = session.new_cache(page_size)
    lengths = cache.lengths  # grows in place with every commit
    device = lengths.device
    ends = torch.tensor(session.end_tokens, dtype=torch.int64, device=device) if session.end_tokens else None
    slot = torch.arange(block_size, device=device)
    everything = full(block_size).plan(64, 64, device)
    nothing = torch.zeros_like(lengths)  # what a draft pass stores

    prompts, prompt_lengths = session.packed_prompts(session.longest, device)
    last = (prompt_lengths - 1)[:, None]
    logits = model(prompts, cache=cache, counts=session.ragged(prompt_lengths), rows=last)
    first = draw(logits, prompt_lengths[:, None], temperature, seed, OWN)
    session.forwards += 1
    cache.commit_(prompt_lengths)

    remaining = torch.full_like(prompt_lengths, limit - 1)  # tokens still to come; 0 once a sequence is done
    if ends is not None:
        remaining.masked_fill_(is_end(first[:, 0], ends), 0)
    draft_lengths = remaining.clamp(max=block_size)
    block = torch.full((session.batch, block_size), mask_token, device=device)
    block[:, :1] = first
    forward = torch.ones_like(prompt_lengths)  # number of each sequence's last forward

    known = first[:, 0].tolist()
    taken_part = session.batch
    for sequence, token in enumerate(known):
        session.record_first(sequence, token)
    host_lengths = [0 if token in session.end_tokens else min(block_size, limit - 1) for token in known]

    while (width := max(host_lengths)) > 0:
        before = forward.clone()
        unfilled = (draft_lengths > 0)[:, None].expand(-1, block_size - 1)
        drafting = block_size > 1
        while drafting:
            forward += unfilled.any(1)
            # It only reads the cache: of a draft pass nothing but the draft survives.
            logits = model(
                block, cache=cache, counts=nothing, mask=everything, rows=slice(1, None), adapted=model.has_adapter
            )
            session.forwards += 1
            without_(logits, mask_token)
            guesses = draw(logits, lengths[:, None] + slot[1:], temperature, seed, forward[:, None])
            if threshold == 0:
                block[:, 1:] = guesses
                break
            # Neither temperature nor noise enters the confidence.
            confidence = law(logits, 1.0).gather(-1, guesses[..., None])[..., 0].masked_fill_(~unfilled, -1)
            best = slot[:-1] == confidence.argmax(1, keepdim=True)
            chosen = unfilled & (best | (confidence >= threshold))
            block[:, 1:] = torch.where(chosen, guesses, block[:, 1:])
            unfilled = unfilled & ~chosen
            drafting = bool(unfilled.any())  # the read of the device in a step that only drafts

        draft = block[:, :width]
        counts = None if min(host_lengths) == width else draft_lengths
        judged = model(draft, cache=cache, counts=counts)
        session.forwards += 1
        forward += 1
        positions = lengths[:, None] + 1 + slot[:width]
        predictions = draw(judged, positions, temperature, seed, OWN)
        if rejection:
            tested = min(width, block_size - 1)  # the last row of a whole block has no guess to test
            p, q = law(judged[:, :tested], temperature), law(logits[:, :tested], temperature)
            predictions[:, :tested] = _verdicts(p, q, block[:, 1 : tested + 1], positions[:, :tested], seed, forward)
        verdict = verify_draft(draft, predictions, draft_lengths=draft_lengths, end_tokens=ends)
        cache.commit_(verdict.accepted)

        # The verifier's next token is known, hence counted; a finished sequence has nothing remaining.
        remaining = (remaining - verdict.accepted).masked_fill_(verdict.ended, 0)
        draft_lengths = remaining.clamp(max=block_size)

        # The one read of the device in a step that judges.
        facts = [verdict.accepted, draft_lengths, verdict.next_token, forward - before]
        columns = [torch.stack(facts, 1), draft]
        if session.trace is not None:
            columns.append(predictions)
        poll = torch.cat(columns, 1).tolist()
        for sequence, (accepted, _, next_token, forwards, *tokens) in enumerate(poll):
            if (length := host_lengths[sequence]) > 0:
                drafted = tokens[:width][:length]
                taken_part += forwards
                session.record_step(sequence, drafted, None, accepted=accepted, next_token=next_token)
                if session.trace is not None:
                    session.trace[sequence].append(LinearStep(drafted, tokens[width:][:length], accepted, forwards))
        host_lengths = [row[1] for row in poll]
        block[:, 0] = verdict.next_token.clamp(min=0)  # -1 in a finished sequence
        block[:, 1:] = mask_token
    return taken_part


def _verdicts(
    p: torch.Tensor, q: torch.Tensor, guesses: torch.Tensor, positions: torch.Tensor, seed: int, forward: torch.Tensor
) -> torch.Tensor:
    """The tokens that stand at `positions`: a guess with probability ``min(1, p / q)``, else a draw from ``max(p - q, 0)``.

    All ``(batch, R)``, the laws ``(batch, R, V)``; `forward` ``(batch,)`` names the test. Leviathan et al., "Fast inference
    from transformers via speculative decoding", algorithm 1.
    """
    u = uniforms(seed, forward[:, None], positions, 1)[..., 0]
    at = guesses[..., None]
    others = draw((p - q).clamp(min=0).log(), positions, 1.0, seed, OWN)
    return torch.where(u * q.gather(-1, at)[..., 0] < p.gather(-1, at)[..., 0], guesses, others)
