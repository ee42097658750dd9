"""Jacobi decoding with lookup drafts: no cache, one sequence, the whole text through the model each time.

Sources: Saxena, "Prompt lookup decoding" (github.com/apoorvumang/prompt-lookup-decoding, 2023), here with the longest match and a
draft that grows with it; the pool of rejected tokens is that of "Jacobi Forcing" (arXiv 2512.14681), section 4.

The last tokens of a text, including the known next one, may have occurred in it before. The tokens that followed there are the
next draft: it costs no forward, and is accepted wherever the model quotes its prompt or itself. The tokens are always those of
autoregressive decoding, because only tokens that the model predicts are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import cycle, islice

from .autoregressive import Model
from .jacobi import JacobiResult, JacobiStep, accepted_length
from .sampling import predictions as own_tokens

REACH = 5  # the largest number of tokens compared
LEAST = 2  # a match of one token is too weak
GROWTH = 3  # tokens drafted per matching token
POOL = 4  # rejected tails kept


def longest_match(last: Sequence[int], searched: Sequence[int]) -> tuple[int, int]:
    """The length of the longest suffix of `last` that occurs in `searched`, and the index after it; the last of equally long matches.

    >>> longest_match([9, 1, 2], [1, 2, 7, 9, 1, 2, 8, 1, 2]), longest_match([1], [2])
    ((3, 6), (0, 1))
    """
    best = (0, 0)
    for after in range(1, len(searched) + 1):
        length = 0
        while length < min(after, len(last)) and searched[after - 1 - length] == last[-1 - length]:
            length += 1
        best = max(best, (length, after))
    return best


def looked_up(text: Sequence[int], pool: Iterable[Sequence[int]], maximum: int) -> list[int]:
    """At most `maximum` draft tokens after `text`: those that followed its last tokens earlier, in the text or in an entry of `pool`.

    The longest match wins, then the text over the pool, then the newer match. A draft that reaches the end of the text continues
    with itself, so that a repeating text is drafted at full length.

    >>> looked_up([1, 2, 3, 1, 2], [], 9), looked_up([7, 1, 2], [[7, 1, 2, 4]], 9), looked_up([1, 2, 3], [], 9)
    ([3, 1, 2, 3, 1, 2], [4], [])
    """
    last = text[-REACH:]
    length, followed = 0, list[int]()
    for entry in pool:
        own, after = longest_match(last, entry[:-1])
        if own >= length:
            length, followed = own, list(entry[after:])
    own, after = longest_match(last, text[:-1])
    if own >= length:
        length, followed = own, list(islice(cycle(text[after:]), maximum))
    if length < LEAST:
        return []
    return followed[: maximum if length == REACH else min(maximum, GROWTH * length)]


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
