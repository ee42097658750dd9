"""Jacobi decoding as in the paper: no cache, one sequence, the whole sequence through the model each time.

Source: "Jacobi Forcing" (arXiv 2512.14681), section 3 (one block at a time) and section 4.2 (the running window).

Both loops keep one invariant: ``draft[0]`` is already verified, because the model itself predicted it after verified tokens.
A forward over the draft therefore verifies at least one more token, and the tokens are those of autoregressive decoding
regardless of the rest of the draft: greedy ones at temperature 0, and above it the same samples, whose random numbers are
keyed by their positions (sampling.py).

The unverified rest starts as random tokens of the sequence so far. Draft slot j is filled in step s with
``history[word(seed, s, 0, j) mod len(history)]`` (Philox words, see philox.py). `history` is the prompt and the tokens
committed before the forward of step s, so a decoder that never waits for its device can choose fillers before the verdict is
known. The row is 0 for every sequence, so that a sequence takes the same path alone and anywhere in a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .autoregressive import Model
from .philox import random_words
from .sampling import predictions as own_tokens


class JacobiStep(NamedTuple):
    draft: list[int]
    predictions: list[int]  # the model's own next token after each draft token
    accepted: int  # draft[:accepted] was committed; at least 1


class JacobiResult(NamedTuple):
    tokens: list[int]  # new tokens only; an end token that stopped the generation is the last one
    forwards: int  # the prompt's forward counts
    trace: list[JacobiStep]  # every forward but the prompt's


def filler_words(seed: int, steps: int, slots: int) -> list[list[int]]:
    """The random word of every step and draft slot."""
    return random_words(seed, torch.arange(steps)[:, None], torch.tensor(0), torch.arange(slots)).tolist()


def fillers(words: Sequence[int], history: Sequence[int]) -> list[int]:
    """A token from `history` for each of `words`."""
    return [history[word % len(history)] for word in words]


def accepted_length(draft: Sequence[int], predictions: Sequence[int], end_tokens: Sequence[int]) -> int:
    """1 + the number of leading draft tokens the model agrees with, cut after the first end token."""
    accepted = 1
    while accepted < len(draft) and draft[accepted] == predictions[accepted - 1]:
        accepted += 1
    for offset in range(accepted):
        if draft[offset] in end_tokens:
            return offset + 1
    return accepted


def jacobi(
    model: Model,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    block_size: int = 16,
    end_tokens: Sequence[int] = (),
    temperature: float = 0.0,
    seed: int = 0,
) -> JacobiResult:
    """Decodes block after block; inside a block the draft only shrinks, because its accepted head leaves it.

    Args:
        model: callable ``(tokens (1, T), positions (1, T), mask (T, T) bool) -> logits (1, T, V)``.
        prompt: token ids, at least one.
        max_new_tokens: stop after exactly this many new tokens, or earlier after an end token.
        block_size: tokens per block; the last block is limited by `max_new_tokens`.
        end_tokens: stop after one of these; it is kept as the last token.
        temperature: of sampling; 0 is greedy.
        seed: of sampling, and of the draft tokens that start a block, which affect only the number of forwards.
    """
    return _decode(model, list(prompt), max_new_tokens, block_size, end_tokens, temperature, seed, running=False)


def jacobi_window(
    model: Model,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    window: int,
    end_tokens: Sequence[int] = (),
    temperature: float = 0.0,
    seed: int = 0,
) -> JacobiResult:
    """The running window: the slots freed by an accepted head are refilled at once, so the draft stays `window` long.

    Arguments as in :func:`jacobi`. The authors' engine keeps the last committed token in slot 0 and refills with
    ids of the whole vocabulary; here slot 0 is the first uncommitted token, and a refill comes from the sequence so
    far as in :func:`jacobi`. Neither changes a token.
    """
    return _decode(model, list(prompt), max_new_tokens, window, end_tokens, temperature, seed, running=True)


def _decode(
    model: Model,
    prompt: list[int],
    limit: int,
    length: int,
    end_tokens: Sequence[int],
    temperature: float,
    seed: int,
    running: bool,
) -> JacobiResult:
    if limit == 0:
        return JacobiResult([], 0, [])

    # The prompt's forward gives the first draft: the exact first token, then guesses based on fillers. The last
    # requested token is never verified by its own forward, so a draft longer than limit - 1 would be wasted.
    draft_length = max(1, min(length, limit - 1))
    words = filler_words(seed, limit, length)
    guesses = own_tokens(model, prompt + fillers(words[0][: draft_length - 1], prompt), temperature, seed)
    draft = guesses[len(prompt) - 1 :]
    committed: list[int] = []
    trace: list[JacobiStep] = []

    while True:
        next_token = draft[0]
        if next_token in end_tokens or len(committed) + 1 == limit:
            return JacobiResult([*committed, next_token], 1 + len(trace), trace)

        history = prompt + committed
        predictions = own_tokens(model, history + draft, temperature, seed)[len(history) :]
        accepted = accepted_length(draft, predictions, end_tokens)
        trace.append(JacobiStep(draft, predictions, accepted))
        committed = committed + draft[:accepted]
        if committed[-1] in end_tokens:
            return JacobiResult(committed, 1 + len(trace), trace)

        fresh = fillers(words[len(trace)], history)
        if running:
            kept = predictions[accepted - 1 :]
            draft = kept + fresh[len(kept) :]
        elif accepted < len(draft):
            draft = predictions[accepted - 1 : -1]
        else:
            draft = [predictions[-1], *fresh[1:]]
        draft = draft[: max(1, limit - len(committed) - 1)]
