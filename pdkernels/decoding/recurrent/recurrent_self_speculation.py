"""Self-speculation of a recurrent-depth model: few recurrences draft some tokens, the full number verifies the draft at
once.

Source: Geiping et al., "Scaling up test-time compute with latent reasoning", section 6.3; the defaults are those of the
baseline in "Efficient parallel samplers for recurrent-depth models", section 5. The plain form is
reference/recurrent_self_speculation.py; both take the same forwards and accept the same part of every draft.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pdkernels._validation import check, check_type
from pdkernels.decoding.recurrent._parts import (
    NewState,
    Sampling,
    Schedule,
    checked_core,
    checked_model,
    checked_recurrences,
    prefill,
)
from pdkernels.generation.noise import checked_number, checked_size
from pdkernels.generation.session import Session, accepted_without_choice
from pdkernels.ops import kv_trim_, verify_draft

_OP = "decoding.recurrent_self_speculation"


def decode(
    session: Session,
    *,
    block_size: int = 4,
    draft_recurrences: int = 4,
    verification_threshold: float = 1.0,
    init_scale: float = 1.0,
    kept_recurrences: int = 1,
    core_noise: float = 0.0,
    core_noise_schedule: Schedule = "harmonic",
    new_state: NewState = "fresh",
    recurrences: int | None = None,
    page_size: int | None = None,
) -> int:
    """Fills `session` with the tokens of forwards over whole drafts; drafting needs no extra model or cache.

    Its K and V lie past the cursor, where the verifying forward overwrites them. That forward reads the rows of the
    draft after as many recurrences as it has run itself; `recurrent_static` reads them after all recurrences. So the
    tokens are equal where states have converged, not by construction.

    Args:
        block_size: maximum tokens per draft, each drafted by a forward; 0 is `recurrent_static`. Four tokens of four
            recurrences were the best draft for Huginn-0125 on GSM8K (the sampler's paper, section 5);
            `tiny-recurrent` is faster with 8.
        draft_recurrences: recurrences of a drafting forward.
        verification_threshold: below 1, a drafted token is also accepted if the verifier gives it at least this share
            of the likeliest token's probability.
        new_state: "copied" starts a drafted token's recurrences from the last state of the token before it, and the
            verifier's from the states that the drafts left; "fresh" starts all from the initial states of their
            positions.
        recurrences: recurrences of the prompt and of the verifying forwards; None: as many as the model was trained
            for.
        temperature: sampling temperature of drafter and verifier, which sample a position with the same random numbers;
            0 is greedy.

    Returns:
        Forwards that the sequences took part in, summed.
    """
    model = checked_model(_OP, session)
    recurrences = checked_recurrences(_OP, "recurrences", model, recurrences)
    sampling = Sampling.of(session)
    check_type(type(block_size) is int, _OP, "block_size", "be an int", type(block_size).__name__)
    check(block_size >= 0, _OP, "block_size", "be at least 0", block_size)
    checked_size(_OP, "draft_recurrences", draft_recurrences)
    checked_number(_OP, "verification_threshold", verification_threshold, 1.0)
    maximum, noise = max(recurrences, draft_recurrences), (core_noise, core_noise_schedule)
    core = checked_core(_OP, model, maximum, init_scale, kept_recurrences, *noise, new_state)
    limit = session.max_new_tokens
    if limit == 0:
        return 0
    cache, first, ended, ends, _, active, before = prefill(session, recurrences, sampling, page_size, core)
    lengths = cache.lengths  # grows in place with every commit
    # No row for tokens that were not requested.
    slots = max(1, min(1 + block_size, limit - 1))
    slot = torch.arange(slots, device=lengths.device)
    block = torch.zeros(session.batch, slots, dtype=torch.int64, device=lengths.device)
    block[:, :1] = first
    remaining = torch.full_like(lengths, limit - 1).masked_fill_(ended, 0)  # tokens left; 0 once a sequence is done
    draft_lengths = remaining.clamp(max=slots)

    host_lengths = [slots if unfinished else 0 for unfinished in active]
    session.stop_(host_lengths, remaining, draft_lengths)
    taken_part = session.batch
    while (width := max(host_lengths)) > 0:
        cursor = lengths.clone()
        chain = [before]
        forced, shared = _write_forced(block, session, host_lengths)
        # Rows that start from each other's last states have a forward each.
        skipped = 0 if core.copied else shared
        for row in range(skipped, width - 1):
            token = block[:, (row if row > skipped else 0) : row + 1]
            logits, state = core.forward(model, token, cache, draft_recurrences, sampling.seeds, before=chain[-1])
            chain.append(state if core.copied else None)
            # While drafting, the draft counts as text. A sequence whose draft is complete goes through the model too.
            cache.commit_((draft_lengths > row + 1).to(lengths.dtype) * token.shape[1])
            guess = sampling.sample(logits[:, -1:], (cursor + row + 1)[:, None]).clamp(min=0)
            after = block[:, row + 1 : row + 2]
            after.copy_(guess if forced is None else torch.where(forced > row, after, guess))
        kv_trim_(lengths, cursor)  # not the cache's own, which would release pages

        draft = block[:, :width]
        counts = None if min(host_lengths) == width else draft_lengths
        begun = _begun(chain, draft_lengths, slot[:width])
        logits, states = core.forward(model, draft, cache, recurrences, sampling.seeds, counts, before=begun)
        predictions = sampling.sample(logits, cursor[:, None] + 1 + slot[:width])
        if verification_threshold < 1:
            predictions = _lenient(predictions, logits, draft, draft_lengths, verification_threshold)
        after, rows = cursor[:, None] + 1 + slot[:width], slot[:width] < draft_lengths[:, None]
        session.note(session.plain(logits), predictions, after, rows)
        verdict = verify_draft(draft, predictions, draft_lengths=draft_lengths, end_tokens=ends)
        cache.commit_(verdict.accepted)
        if core.copied and states is not None:
            last = (verdict.accepted - 1).clamp(min=0)[:, None, None]
            before = states.gather(1, last.expand(-1, -1, states.shape[-1]))
        session.forwards += width - skipped
        session.recurrences += (width - 1 - skipped) * draft_recurrences + recurrences

        # The verifier's next token is known, so it counts; a finished sequence has nothing remaining.
        remaining = (remaining - verdict.accepted).masked_fill_(verdict.ended, 0)
        draft_lengths = remaining.clamp(max=slots)

        # The one read of the device in a cycle.
        accepted = verdict.accepted.masked_fill(accepted_without_choice(logits, predictions, verdict.accepted), -1)
        columns = [torch.stack([accepted, draft_lengths, verdict.next_token], 1), draft]
        if session.trace is not None:
            columns.append(predictions)
        poll = torch.cat(columns, 1).tolist()
        for sequence, (accepted, _, next_token, *tokens) in enumerate(poll):
            if (length := host_lengths[sequence]) > 0:
                taken_part += length - min(skipped, length - 1)  # its drafting forwards and the verifying one
                judged = tokens[width:][:length] if session.trace is not None else None
                session.log_step(sequence, tokens[:length], judged, accepted=accepted, next_token=next_token)
        host_lengths = [row[1] for row in poll]
        session.stop_(host_lengths, remaining, draft_lengths)
        block[:, 0] = verdict.next_token.clamp(min=0)  # -1 in a finished sequence
    return taken_part


def _write_forced(block: Tensor, session: Session, lengths: list[int]) -> tuple[Tensor | None, int]:
    """Writes what grammars force into drafts of `lengths`. How many tokens of each draft they are, ``(batch, 1)``, and
    how many all drafts have, of which none needs a forward."""
    forced = session.forced([length - 1 for length in lengths])
    if not any(forced):
        return None, 0
    for sequence, tokens in enumerate(forced):
        block[sequence, 1 : 1 + len(tokens)] = torch.tensor(tokens, dtype=torch.int64, device=block.device)
    longest, pairs = max(lengths) - 1, [*zip(forced, lengths, strict=True)]
    shared = min(longest if len(tokens) >= length - 1 else len(tokens) for tokens, length in pairs)
    return torch.tensor([[len(tokens)] for tokens in forced], device=block.device), shared


def _begun(chain: list[Tensor | None], lengths: Tensor, slot: Tensor) -> Tensor | None:
    """Where the judge's rows begin, ``(batch, width, E)``: each from the state of its own draft forward, the last row
    of a draft from that of the row before. `chain` has the state before the draft, then that after each of its
    forwards.
    """
    states = [state for state in chain if state is not None]
    if not states:
        return None
    index = torch.minimum(slot + 1, (lengths[:, None] - 1).clamp(min=0))
    return torch.cat(states, 1).gather(1, index[..., None].expand(-1, -1, states[0].shape[-1]))


def _lenient(predictions: Tensor, logits: Tensor, draft: Tensor, lengths: Tensor, threshold: float) -> Tensor:
    """`predictions` ``(batch, T)`` with the drafted token in place of the verifier's, wherever it is probable
    enough."""
    following = draft[:, 1:]
    draft_logits = logits[:, :-1].gather(-1, following[..., None])[..., 0]
    near_best = draft_logits >= logits[:, :-1].amax(-1) + math.log(max(threshold, 1e-300))
    near_best &= torch.arange(1, draft.shape[1], device=draft.device) < lengths[:, None]  # what follows is padding
    return torch.cat([torch.where(near_best, following, predictions[:, :-1]), predictions[:, -1:]], 1)
