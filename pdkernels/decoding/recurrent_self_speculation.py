"""Self-speculation of a recurrent-depth model: few recurrences draft some tokens, the full number verifies the draft at once.

Source: Geiping et al., "Scaling up test-time compute with latent reasoning", section 6.3. The plain form is
reference/recurrent_self_speculation.py; both take the same forwards and accept the same part of every draft.
"""

from __future__ import annotations

import torch

from pdkernels._validation import check, check_type
from pdkernels.decoding._recurrent import checked_model, checked_recurrences, checked_sampling, prefill
from pdkernels.decoding._sampling import Seed, checked_size
from pdkernels.decoding._session import Session, judged_by_nan
from pdkernels.ops import kv_trim_, verify_draft

_OP = "decoding.recurrent_self_speculation"


def decode(
    session: Session,
    *,
    block_size: int = 8,
    draft_recurrences: int = 4,
    recurrences: int | None = None,
    temperature: float = 0.0,
    top_p: float | None = None,
    min_p: float | None = None,
    top_k: int | None = None,
    seed: Seed = 0,
    page_size: int | None = None,
) -> int:
    """Fills `session` with the tokens of forwards over whole drafts; drafting needs no extra model or cache.

    Its K and V lie past the cursor, where the verifying forward overwrites them. That forward reads the rows of the draft
    after as many recurrences as it has run itself; `recurrent_static` reads them after all recurrences. So the tokens are equal
    where states have converged, not by construction.

    Args:
        block_size: most tokens of a draft, one recurrent forward each; 0 is `recurrent_static`.
        draft_recurrences: of these forwards.
        recurrences: of the prompt and of the verifying forwards; None: those the model was trained for.
        temperature: of drafts and verifier, which draw a position's token with the same numbers; 0 is greedy.

    Returns:
        Forwards that the sequences took part in, summed.
    """
    model = checked_model(_OP, session)
    recurrences = checked_recurrences(_OP, "recurrences", model, recurrences)
    sampling = checked_sampling(_OP, session, temperature, top_p, min_p, top_k, seed)
    check_type(type(block_size) is int, _OP, "block_size", "be an int", type(block_size).__name__)
    check(block_size >= 0, _OP, "block_size", "be at least 0", block_size)
    checked_size(_OP, "draft_recurrences", draft_recurrences)
    limit = session.max_new_tokens
    if limit == 0:
        return 0
    cache, first, ended, ends, _, active = prefill(session, recurrences, sampling, page_size)
    lengths = cache.lengths  # grows in place with every commit
    # No row for tokens that were not requested.
    slots = max(1, min(1 + block_size, limit - 1))
    slot = torch.arange(slots, device=lengths.device)
    block = torch.zeros(session.batch, slots, dtype=torch.int64, device=lengths.device)
    block[:, :1] = first
    remaining = torch.full_like(lengths, limit - 1).masked_fill_(ended, 0)  # tokens left; 0 once a sequence is done
    draft_lengths = remaining.clamp(max=slots)

    host_lengths = [slots if more else 0 for more in active]
    taken_part = session.batch
    while (width := max(host_lengths)) > 0:
        cursor = lengths.clone()
        for row in range(width - 1):
            logits = model(block[:, row : row + 1], cache=cache, recurrences=draft_recurrences, seed=sampling.seeds)
            # While drafting, the draft counts as text. A sequence whose draft is complete goes through the model too.
            cache.commit_((draft_lengths > row + 1).to(lengths.dtype))
            block[:, row + 1 : row + 2] = sampling.draw(logits, (cursor + row + 1)[:, None])
        kv_trim_(lengths, cursor)  # not the cache's own, which would release pages

        draft = block[:, :width]
        counts = None if min(host_lengths) == width else draft_lengths
        logits = model(draft, cache=cache, counts=counts, recurrences=recurrences, seed=sampling.seeds)
        predictions = sampling.draw(logits, cursor[:, None] + 1 + slot[:width])
        verdict = verify_draft(draft, predictions, draft_lengths=draft_lengths, end_tokens=ends)
        cache.commit_(verdict.accepted)
        session.forwards += width
        session.recurrences += (width - 1) * draft_recurrences + recurrences

        # The verifier's next token is known, so it counts; a finished sequence has nothing remaining.
        remaining = (remaining - verdict.accepted).masked_fill_(verdict.ended, 0)
        draft_lengths = remaining.clamp(max=slots)

        # The one read of the device in a cycle.
        accepted = verdict.accepted.masked_fill(judged_by_nan(logits, predictions, verdict.accepted), -1)
        columns = [torch.stack([accepted, draft_lengths, verdict.next_token], 1), draft]
        if session.trace is not None:
            columns.append(predictions)
        poll = torch.cat(columns, 1).tolist()
        for sequence, (accepted, _, next_token, *tokens) in enumerate(poll):
            if (length := host_lengths[sequence]) > 0:
                taken_part += length  # its drafting forwards and the verifying one
                judged = tokens[width:][:length] if session.trace is not None else None
                session.log_step(sequence, tokens[:length], judged, accepted=accepted, next_token=next_token)
        host_lengths = [row[1] for row in poll]
        block[:, 0] = verdict.next_token.clamp(min=0)  # -1 in a finished sequence
    return taken_part
