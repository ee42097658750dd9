"""Autoregressive decoding of a recurrent-depth model with a fixed number of recurrences, which its parallel samplers
approximate.

Source: Geiping et al., "Scaling up test-time compute with latent reasoning", section 3. The plain form is
reference/recurrent_static.py.
"""

from __future__ import annotations

import math

from pdkernels.decoding.recurrent._parts import (
    NewState,
    Sampling,
    Schedule,
    checked_core,
    checked_model,
    checked_recurrences,
    prefill,
)
from pdkernels.generation.session import Session, flag_no_choice, is_end
from pdkernels.generation.traces import RecurrentStep

_OP = "decoding.recurrent_static"


def decode(
    session: Session,
    *,
    recurrences: int | None = None,
    init_scale: float = 1.0,
    kept_recurrences: int = 1,
    core_noise: float = 0.0,
    core_noise_schedule: Schedule = "harmonic",
    new_state: NewState = "fresh",
    page_size: int | None = None,
) -> None:
    """Fills `session` with one token per forward.

    By default the cache keeps one slot per position, however many recurrences there are: all recurrences of later
    tokens read the K and V of the last one.
    """
    model = checked_model(_OP, session)
    recurrences = checked_recurrences(_OP, "recurrences", model, recurrences)
    sampling = Sampling.of(session)
    noise = core_noise, core_noise_schedule
    core = checked_core(_OP, model, recurrences, init_scale, kept_recurrences, *noise, new_state)
    if session.max_new_tokens == 0:
        return
    cache, token, ended, ends, current, active, state = prefill(session, recurrences, sampling, page_size, core)
    active_rows = (~ended).to(cache.lengths.dtype)  # 1 while a sequence continues, then 0: its cache does not change

    for step in range(session.max_new_tokens - 1):
        session.stop_(active, active_rows)
        if not any(active):
            break
        # A finished sequence goes through the model too, but its row is never committed.
        before = state if core.copied else None
        logits, state = core.forward(model, token, cache, recurrences, sampling.seeds, before=before)
        cache.commit_(active_rows)
        token = sampling.sample(logits, cache.lengths[:, None])
        session.note(session.plain(logits), token, cache.lengths[:, None], active_rows[:, None] > 0)
        if ends is not None:
            active_rows = active_rows.masked_fill(is_end(token[:, 0], ends), 0)
        session.forwards += 1
        session.recurrences += recurrences
        following = flag_no_choice(logits, token)[:, 0].tolist()  # the one read of the device in a step
        for sequence in range(session.batch):
            if active[sequence]:
                if session.trace is not None:
                    cursor = len(session.prompts[sequence]) + step
                    token_before, token_after = [current[sequence]], [following[sequence]]
                    session.trace[sequence].append(RecurrentStep(cursor, token_before, token_after, [math.inf], 1))
                session.log_step(sequence, [current[sequence]], None, accepted=1, next_token=following[sequence])
                active[sequence] = following[sequence] not in session.end_tokens
        current = following
