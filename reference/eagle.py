"""EAGLE-3 decoding in chains and in trees, as plainly as the papers write it: nothing is cached, and every forward reads the whole text.

Sources: "EAGLE-3" (arXiv 2503.01840); trees: "EAGLE-2" (arXiv 2406.16858).
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


def eagle_tree(
    logits: Callable[[Tensor], Tensor],
    features: Callable[[Tensor], Tensor],
    rows: Callable[[Tensor, Tensor], Tensor],
    guesses: Callable[[Tensor, int], Sequence[tuple[int, float]]],
    draw: Callable[[Tensor, int], int],
    prompt: Sequence[int],
    max_new_tokens: int,
    block_size: int,
    branches: int,
    nodes: int,
    end_tokens: Sequence[int] = (),
) -> Written:
    """Decodes a prompt with drafted trees. A draft of the result is the path that the target took.

    Args:
        guesses: of one row of the head and a position, the head's best tokens there and the logarithms of their probabilities.
        branches: at each depth the most confident nodes are extended, as many as this.
        nodes: of the whole tree the most confident ones are kept, the known token included.
        logits, features, rows, draw, prompt: as of `eagle`.
    """
    text = [*prompt, draw(logits(tensor(prompt))[-1], len(prompt))]
    drafts: list[list[int]] = []
    accepted: list[int] = []
    while len(text) - len(prompt) < max_new_tokens and text[-1] not in end_tokens:
        read = features(tensor(text[:-1]))

        def last_row(path: tuple[int, ...], text: list[int] = text, read: Tensor = read) -> Tensor:
            """The head's row after the text and a path."""
            own = rows(tensor(text[1:]), read)[-1:]
            for count in range(1, len(path) + 1):
                read = cat([read, own])
                own = rows(tensor([*text, *path[:count]][1:]), read)[-1:]
            return own[0]

        known: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
        extended = known
        for _ in range(min(block_size, max_new_tokens - (len(text) - len(prompt))) - 1):
            found = [
                ((*path, token), confidence + share)
                for path, confidence in extended
                for token, share in guesses(last_row(path), len(text) + len(path))
            ]
            known = known + found
            extended = sorted(found, key=lambda node: -node[1])[:branches]
        kept = {path for path, _ in sorted(known, key=lambda node: -node[1])[:nodes]}
        path: tuple[int, ...] = ()
        while True:
            token = draw(logits(tensor([*text, *path]))[-1], len(text) + len(path))
            if (*path, token) not in kept:
                break
            path = (*path, token)
            if token in end_tokens:
                break
        drafts.append([text[-1], *path])
        accepted.append(1 + len(path))
        text += path if path and path[-1] in end_tokens else (*path, token)
    return Written(text[len(prompt) :], drafts, accepted)
