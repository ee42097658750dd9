"""EAGLE-3 decoding in chains, as plainly as the paper writes it: nothing is cached, and every forward reads the whole text.

Source: "EAGLE-3" (arXiv 2503.01840).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor, cat, tensor


class Written(NamedTuple):
    """The new tokens; the drafts, and how many tokens of each were accepted, the known first one included."""

    tokens: list[int]
    drafts: list[list[int]]
    accepted: list[int]


def eagle(
    logits: Callable[[Tensor], Tensor],
    features: Callable[[Tensor], Tensor],
    rows: Callable[[Tensor, Tensor], Tensor],
    guess: Callable[[Tensor, int], int],
    draw: Callable[[Tensor, int], int],
    prompt: Sequence[int],
    max_new_tokens: int,
    block_size: int,
    end_tokens: Sequence[int] = (),
) -> Written:
    """Decodes a prompt.

    Args:
        logits: of a text ``(n,)``, the target's ``(n, V)``.
        features: of a text, what the head reads of the target, ``(n, hidden)``.
        rows: of the tokens after each row ``(n,)`` and of what is read of it ``(n, hidden)``, the head's rows ``(n, hidden)``.
        guess: of one row of the head and a position, the head's token there.
        draw: of a row of the target's logits and a position, the target's token there.
    """
    text = [*prompt, draw(logits(tensor(prompt))[-1], len(prompt))]
    drafts: list[list[int]] = []
    accepted: list[int] = []
    while len(text) - len(prompt) < max_new_tokens and text[-1] not in end_tokens:
        left = max_new_tokens - (len(text) - len(prompt))
        known, read = text[:], features(tensor(text[:-1]))
        while len(known) - len(text) < min(block_size, left) - 1:
            own = rows(tensor(known[1:]), read)[-1:]
            known.append(guess(own[0], len(known)))
            read = cat([read, own])
        told = logits(tensor(known))
        new, count = [], 0
        for position in range(len(text) - 1, len(known)):
            token = draw(told[position], position + 1)
            count += 1
            new.append(token)
            if token in end_tokens or known[position + 1 : position + 2] != [token]:
                break
        # An end token that was drafted is accepted with the draft.
        ended = new[-1] in end_tokens and known[len(text) : len(text) + count] == new
        drafts.append(known[len(text) - 1 :])
        accepted.append(count + ended)
        text += new
    return Written(text[len(prompt) :], drafts, accepted)
