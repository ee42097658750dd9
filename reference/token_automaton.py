"""Tokens that keep a text inside a language, by the plainest means: sets of states, and every path counted.

The language is given by a table: ``table[state][byte]`` is the next state, or -1. State 0 starts. `DONE` is the state after an end token,
where every token may follow. Masks in a canvas are -1.

Sources: Willard and Louf, "Efficient guided generation for large language models" (arXiv 2307.09702), for the automaton over tokens; Suresh et al.,
"DINGO: Constrained inference for diffusion LLMs" (arXiv 2505.23061), for the most probable completion of a canvas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

DONE = -2
MASK = -1


def follow(table: Sequence[Sequence[int]], accepting: Sequence[bool], token: bytes | None, state: int) -> int | None:
    """The state after a token; None is the end token, and no state is None."""
    if state == DONE:
        return DONE
    if token is None:
        return DONE if accepting[state] else None
    if not token:
        return None
    for byte in token:
        state = table[state][byte]
        if state < 0:
            return None
    return state


def distance(
    table: Sequence[Sequence[int]], accepting: Sequence[bool], tokens: Sequence[bytes | None], state: int
) -> float:
    """The fewest tokens from a state to a whole text, an end token not counted."""
    reached, steps = {state}, 0
    seen = set(reached)
    while reached:
        if any(one == DONE or accepting[one] for one in reached):
            return steps
        following = {
            to
            for one in reached
            for token in tokens
            if token is not None and (to := follow(table, accepting, token, one)) is not None
        }
        reached = following - seen
        seen |= reached
        steps += 1
    return math.inf


def completable(
    table: Sequence[Sequence[int]],
    accepting: Sequence[bool],
    tokens: Sequence[bytes | None],
    canvas: Sequence[int],
    start: int,
    budget: int,
) -> bool:
    """Whether tokens in place of the masks, and at most `budget` after the canvas, make it a text of the language."""
    states = {start}
    for given in canvas:
        several = range(len(tokens)) if given == MASK else [given]
        found = {follow(table, accepting, tokens[token], state) for state in states for token in several}
        states = {state for state in found if state is not None}
    return any(distance(table, accepting, tokens, state) <= budget for state in states)


def allowed(
    table: Sequence[Sequence[int]],
    accepting: Sequence[bool],
    tokens: Sequence[bytes | None],
    canvas: Sequence[int],
    position: int,
    start: int,
    budget: int,
) -> list[int]:
    """The tokens that may stand at a masked position."""
    before, after = list(canvas[:position]), list(canvas[position + 1 :])
    return [
        token
        for token in range(len(tokens))
        if completable(table, accepting, tokens, [*before, token, *after], start, budget)
    ]


def best(
    table: Sequence[Sequence[int]],
    accepting: Sequence[bool],
    tokens: Sequence[bytes | None],
    canvas: Sequence[int],
    start: int,
    budget: int,
    scores: Sequence[Sequence[float]],
) -> float:
    """The log-probability of the most probable completion; -inf if there is none. `scores` has a row for each mask."""
    found = {start: 0.0}
    rows = iter(scores)
    for given in canvas:
        then: dict[int, float] = {}
        row = next(rows) if given == MASK else None
        for state, score in found.items():
            for token in range(len(tokens)) if row is not None else [given]:
                to = follow(table, accepting, tokens[token], state)
                more = score + (row[token] if row is not None else 0.0)
                if to is not None and more > then.get(to, -math.inf):
                    then[to] = more
        found = then
    ends = [score for state, score in found.items() if distance(table, accepting, tokens, state) <= budget]
    return max(ends, default=-math.inf)
