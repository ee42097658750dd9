"""Autoregressive decoding of a recurrent-depth model with a fixed number of recurrences, which the parallel samplers
approximate."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .recurrent_sampling import Init, RecurrentModel, RecurrentResult, RecurrentStep, choose, forward_with_states


def recurrent_static(
    model: RecurrentModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    init: Init,
    recurrences: int = 32,
    new_state: str = "fresh",
    temperature: float = 0.0,
    top_p: float | None = None,
    min_p: float | None = None,
    top_k: int | None = None,
    end_tokens: Sequence[int] = (),
    seed: int = 0,
) -> RecurrentResult:
    """One token per forward. A slot keeps one row per position, that of the last recurrence, for all recurrences of later tokens.

    So a token's logits equal those of one forward over the whole text only where states have converged (or with one recurrence):
    within one forward, recurrence t of a row reads the earlier rows as they are after recurrence t.

    Args:
        model: parts without batch, see :class:`~pdkernels.reference.recurrent_sampling.RecurrentModel`.
        prompt: token ids, at least one.
        max_new_tokens: stop after this many new tokens.
        init: ``(step, positions) -> (T, E)``, states drawn for positions; step 0 gives the initial ones.
        recurrences: of the prompt and of every token.
        new_state: where a new token's recurrences start: "fresh" from the state of its position, "copied" from the last state of the
            token before it (the published "continuous compute").
        temperature, top_p, min_p, top_k: of the draws, see :func:`~pdkernels.reference.recurrent_sampling.filtered`.
        end_tokens: stop after one of these; it is kept as the last token.
        seed: of the draws.
    """
    if max_new_tokens == 0:
        return RecurrentResult([], 0, 0, [])
    past = model.new_past()
    logits, state = forward_with_states(model, prompt, past, recurrences, init)
    past.freeze(len(prompt))
    tokens = choose(logits[-1:], [len(prompt)], temperature, top_p, min_p, seed, top_k)
    trace: list[RecurrentStep] = []
    while tokens[-1] not in end_tokens and len(tokens) < max_new_tokens:
        cursor = past.length
        first = state[-1:] if new_state == "copied" else None
        logits, state = forward_with_states(model, tokens[-1:], past, recurrences, init, first)
        past.freeze(1)
        predictions = choose(logits, [cursor + 1], temperature, top_p, min_p, seed, top_k)
        trace.append(RecurrentStep(cursor, tokens[-1:], predictions, [math.inf], 1))
        tokens = tokens + predictions
    forwards = 1 + len(trace)
    return RecurrentResult(tokens, forwards, forwards * recurrences, trace)
