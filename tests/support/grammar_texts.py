"""Random texts of the languages of grammars."""

from __future__ import annotations

import random

from pdkernels.decoding import Grammar


def distances(grammar: Grammar) -> list[int]:
    """The fewest bytes from each state to a whole text."""
    runs, accepting = grammar.automaton.runs, grammar.automaton.accepting
    before: list[list[int]] = [[] for _ in runs]
    for state, edges in enumerate(runs):
        for to in {to for _, _, to in edges}:
            before[to].append(state)
    found = [0 if ends else -1 for ends in accepting]
    queue = [state for state, ends in enumerate(accepting) if ends]
    for state in queue:
        for one in before[state]:
            if found[one] < 0:
                found[one] = found[state] + 1
                queue.append(one)
    return found


def drawn(grammar: Grammar, count: int, seed: int = 0) -> list[str]:
    """Random texts of the language; after 60 bytes they end as soon as they can."""
    draw, found = random.Random(seed), []
    runs, accepting, left = grammar.automaton.runs, grammar.automaton.accepting, distances(grammar)
    while len(found) < count:
        state, text = 0, b""
        while True:
            edges = runs[state]
            if accepting[state] and (not edges or draw.random() < 0.2 or len(text) > 60):
                found.append(text.decode())
                break
            if len(text) > 60:
                edges = [edge for edge in edges if left[edge[2]] < left[state]]
            [(first, last, state)] = draw.choices(edges, [1 + last - first for first, last, _ in edges])
            text += bytes([draw.randint(first, last)])
    return found
