"""Self-speculation of a recurrent-depth model: few recurrences draft some tokens, the full number verifies the draft at once.

Source: Geiping et al., "Scaling up test-time compute with latent reasoning: a recurrent depth approach", section 6.3. The draft
needs neither its own model nor a cache: its K and V are past the cursor, where the verify forward overwrites them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .jacobi import accepted_length
from .recurrent_sampling import Init, RecurrentModel, choose, forward_with_states


class RecurrentDraftStep(NamedTuple):
    """One cycle."""

    cursor: int
    draft: list[int]  # draft[0] is already in the text
    predictions: list[int]  # the verifier's token after each draft token
    accepted: int  # draft[:accepted] is kept, then predictions[accepted - 1]


class RecurrentDraftResult(NamedTuple):
    tokens: list[int]  # new tokens only; an end token that stopped the generation is the last one
    forwards: int  # the prompt's, and those of every cycle: one per drafted token, one that verifies
    recurrences: int  # times the core ran
    trace: list[RecurrentDraftStep]


def recurrent_self_speculation(
    model: RecurrentModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    init: Init,
    recurrences: int = 32,
    block_size: int = 4,
    draft_recurrences: int = 4,
    verification_threshold: float = 1.0,
    new_state: str = "fresh",
    temperature: float = 0.0,
    top_p: float | None = None,
    min_p: float | None = None,
    top_k: int | None = None,
    end_tokens: Sequence[int] = (),
    seed: int = 0,
) -> RecurrentDraftResult:
    """Drafts token by token, verifies all in one causal forward, keeps what the verifier would have written.

    A cycle starts with the last token, whose K and V are not frozen yet. It drafts `block_size` tokens, or one fewer than the
    tokens left, autoregressively, even after a drafted end token. The verify forward takes the last token and the whole
    draft, and yields 1 to ``block_size + 1`` tokens. Draft and verifier draw a position's token with the same random numbers
    ("sample and compare"), so the verifier's token counts at every temperature and a good draft is accepted.

    Whether that is exactly the text of :func:`~pdkernels.reference.recurrent_static.recurrent_static` is up to the model: in the
    verify forward recurrence t of a row reads the earlier draft rows as they are after recurrence t, in static decoding as they
    are after the last (a slot keeps one row per position). It is exact with one recurrence, and where states have converged.

    Args:
        model, prompt, max_new_tokens, init, temperature, top_p, min_p, top_k, end_tokens, seed: as in
            :func:`~pdkernels.reference.recurrent_static.recurrent_static`.
        recurrences: of the prompt and of the verify forwards.
        block_size: most tokens of a draft; 0 is static decoding. Four tokens of four recurrences were the best draft for Huginn-0125
            on GSM8K ("Efficient parallel samplers for recurrent-depth models", section 5).
        draft_recurrences: of the draft forwards, at least 1.
        verification_threshold: below 1 a drafted token counts as the verifier's too if its probability is at least so many times
            the largest one, of the model's own distribution, as in the published code.
        new_state: "fresh", or "copied": a drafted token's recurrences start from the last state of the token before it, and the
            verifier's from the states that the draft left; its last row, which no draft forward has seen, from that of the row before.

    >>> import torch
    >>> from pdkernels.reference.recurrent_depth import RecurrentDepthReference, random_weights
    >>> model = RecurrentDepthReference(random_weights(state_scale=0.1))
    >>> zeros = lambda step, positions: torch.zeros(len(positions), 8, dtype=torch.float64)
    >>> result = recurrent_self_speculation(model, [1, 2, 3], 8, init=zeros, block_size=3)
    >>> [step.accepted for step in result.trace], result.forwards
    ([4, 3], 8)
    """
    if max_new_tokens == 0:
        return RecurrentDraftResult([], 0, 0, [])
    past = model.new_past()
    logits, states = forward_with_states(model, prompt, past, recurrences, init)
    before = states[-1:]
    past.freeze(len(prompt))
    tokens = choose(logits[-1:], [len(prompt)], temperature, top_p, min_p, seed, top_k)
    forwards, passes = 1, recurrences
    trace: list[RecurrentDraftStep] = []
    while tokens[-1] not in end_tokens and len(tokens) < max_new_tokens:
        cursor = past.length
        draft, chain, copied = tokens[-1:], [before], new_state == "copied"
        while len(draft) < min(1 + block_size, max_new_tokens - len(tokens)):
            first = chain[-1] if copied else None
            logits, state = forward_with_states(model, draft[-1:], past, draft_recurrences, init, first)
            chain.append(state)
            past.freeze(1)
            draft += choose(logits, [past.length], temperature, top_p, min_p, seed, top_k)
            forwards, passes = forwards + 1, passes + draft_recurrences
        past.cut(cursor)

        first = torch.cat([*chain[1:], chain[-1]]) if copied else None
        logits, states = forward_with_states(model, draft, past, recurrences, init, first)
        forwards, passes = forwards + 1, passes + recurrences
        positions = range(cursor + 1, cursor + 1 + len(draft))
        predictions = choose(logits, positions, temperature, top_p, min_p, seed, top_k)
        if verification_threshold < 1:
            for i, token in enumerate(draft[1:]):
                if logits[i, token] >= logits[i].max() + math.log(max(verification_threshold, 1e-300)):
                    predictions[i] = token
        accepted = accepted_length(draft, predictions, end_tokens)
        past.freeze(accepted)
        before = states[accepted - 1 : accepted]
        trace.append(RecurrentDraftStep(cursor, draft, predictions, accepted))
        tokens = tokens + draft[1:accepted]
        if tokens[-1] not in end_tokens:
            tokens.append(predictions[accepted - 1])
    return RecurrentDraftResult(tokens, forwards, passes, trace)
