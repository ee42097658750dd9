"""Jacobi decoding with lookup drafts: no cache, one sequence, the whole text through the model each time.

Sources: Saxena, "Prompt lookup decoding" (see lookup_draft.py); the pool of rejected tokens is that of "Jacobi Forcing"
(arXiv 2512.14681), section 4.

The last tokens of a text, including the known next one, may have occurred in it before. The tokens that followed there are the
next draft: it costs no forward, and is accepted wherever the model quotes its prompt or itself. The tokens are always those of
autoregressive decoding, because only tokens that the model predicts are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from .autoregressive import Model
from .jacobi import JacobiResult, JacobiStep, accepted_length
from .lookup_draft import looked_up
from .sampling import predictions as own_tokens

POOL = 4  # rejected tails kept


def jacobi_lookup(
    model: Model,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    block_size: int = 16,
    end_tokens: Sequence[int] = (),
    temperature: float = 0.0,
    seed: int = 0,
) -> JacobiResult:
    """Decoding with drafts of at most `block_size` tokens; arguments as in :func:`.jacobi.jacobi`.

    >>> import torch
    >>> table = torch.tensor([3, 0, 1, 2])  # 3 2 1 0 3 2 1 0 ..
    >>> loop = lambda tokens, positions, mask: torch.eye(4)[table[tokens]]
    >>> jacobi_lookup(loop, [3, 2], 12)[:2]
    ([1, 0, 3, 2, 1, 0, 3, 2, 1, 0, 3, 2], 6)
    """
    prompt = list(prompt)
    if max_new_tokens == 0:
        return JacobiResult([], 0, [])
    tokens = own_tokens(model, prompt, temperature, seed)[-1:]
    pool: deque[list[int]] = deque(maxlen=POOL)
    trace: list[JacobiStep] = []
    while tokens[-1] not in end_tokens and len(tokens) < max_new_tokens:
        history = prompt + tokens[:-1]
        # The last requested token is never verified by its own forward.
        maximum = min(block_size, max_new_tokens - len(tokens)) - 1
        draft = [tokens[-1], *looked_up(prompt + tokens, pool, block_size - 1)[:maximum]]
        predictions = own_tokens(model, history + draft, temperature, seed)[len(history) :]
        accepted = accepted_length(draft, predictions, end_tokens)
        trace.append(JacobiStep(draft, predictions, accepted))
        tokens = tokens[:-1] + draft[:accepted]
        if tokens[-1] not in end_tokens:
            tokens = [*tokens, predictions[accepted - 1]]
        if accepted < len(draft):
            pool.append(predictions[accepted - 1 :])
    return JacobiResult(tokens, 1 + len(trace), trace)
