"""Automata over tokens equal the plain reference, on random automata and random canvases."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from pdkernels import _host
from reference import token_automaton as reference
from tests.support.drafted_masks import check_masks_of_a_draft

FAR = 2**31 - 1


def random_case(seed: int) -> tuple[_host.ByteAutomaton, _host.TokenAutomaton, list[bytes | None], random.Random]:
    """A nondeterministic automaton over three bytes, and tokens of one to three of them."""
    draw = random.Random(seed)
    states = draw.randint(2, 6)
    edges = []
    for _ in range(draw.randint(3, 12)):
        first = draw.randint(97, 99)
        edges.append((draw.randrange(states), first, draw.randint(first, 99), draw.randrange(states)))
    empty = [(draw.randrange(states), draw.randrange(states)) for _ in range(draw.randint(0, 3))]
    made = _host.ByteAutomaton(states, edges, empty, 0, states - 1, 1000, 100_000)
    words = {bytes(draw.choice(b"abc") for _ in range(draw.randint(1, 3))) for _ in range(draw.randint(2, 7))}
    tokens: list[bytes | None] = [*sorted(words), None, b""]
    if draw.random() < 0.3:
        tokens.remove(None)
        tokens.append(b"")
    if made.states == 0:
        return random_case(seed + 1000)
    ends = [n for n, token in enumerate(tokens) if token is None]
    over = _host.TokenAutomaton(made, [token or b"" for token in tokens], ends, 100_000)
    return made, over, tokens, draw


def bits_of(words: Any, count: int) -> list[int]:
    return [n for n in range(count) if words[n // 32] >> (n % 32) & 1]


@pytest.mark.parametrize("seed", range(150))
def test_passes_equal_the_reference(seed: int) -> None:
    made, over, tokens, draw = random_case(seed)
    language = made.table, made.accepting, tokens
    words = np.zeros(1, dtype=np.int32)
    assert (FAR if (d := reference.distance(*language, 0)) == math.inf else d) == over.distance(0)
    for _ in range(6):
        length, budget = draw.randint(1, 5), draw.randint(0, 3)
        canvas = [draw.choice([-1, -1, draw.randrange(len(tokens))]) for _ in range(length)]
        places = over.places(canvas, [0], budget)
        assert bool(places) == reference.completable(*language, canvas, 0, budget)
        masks = [n for n, token in enumerate(canvas) if token == -1]
        scores = [[math.log(draw.random()) for _ in tokens] for _ in masks]
        rows = np.array(scores, dtype=np.float32).reshape(len(masks), len(tokens))
        found = over.best(canvas, [0], budget, rows)
        most = reference.best(*language, canvas, 0, budget, rows.tolist())
        assert bool(found) == (most > -math.inf)
        if found:
            assert reference.completable(*language, found, 0, budget)
            assert sum(rows[n, found[at]] for n, at in enumerate(masks)) == pytest.approx(most, abs=1e-4)
            assert all(token in (-1, found[at]) for at, token in enumerate(canvas))
        for at in masks:
            expected = reference.allowed(*language, canvas, at, 0, budget)
            if places:
                count, last = over.allowed(places[at], places[at + 1], words)
                assert bits_of(words, len(tokens)) == expected
                assert (count, last) == (len(expected), max(expected))
            else:
                assert expected == []


@pytest.mark.parametrize("seed", range(60))
def test_masks_of_states_equal_the_reference(seed: int) -> None:
    made, over, tokens, draw = random_case(seed)
    language = made.table, made.accepting, tokens
    words = np.zeros(1, dtype=np.int32)
    for _ in range(8):
        text = [draw.randrange(len(tokens)) for _ in range(draw.randint(0, 4))]
        budget, state = draw.randint(0, 4), over.follow(0, text)
        there: int | None = 0
        for token in text:
            there = None if there is None else reference.follow(*language[:2], tokens[token], there)
        assert (state == -1) == (there is None)
        if there is None:
            continue
        expected = [
            n
            for n, token in enumerate(tokens)
            if (to := reference.follow(*language[:2], token, there)) is not None
            and reference.distance(*language, to) <= budget
        ]
        over.mask(state, budget, words)
        assert bits_of(words, len(tokens)) == expected
        assert over.accepting(state) == (there == reference.DONE or made.accepting[there])


@pytest.mark.parametrize("seed", range(30))
def test_masks_of_a_draft_are_those_of_its_rows(seed: int) -> None:
    _, automaton, tokens, draw = random_case(seed)
    check_masks_of_a_draft(automaton, len(tokens), draw)


def test_the_construction_is_bounded() -> None:
    # (a|b)*a(a|b){n} has 2 ** n states.
    edges = [(0, 97, 98, 0), (0, 97, 97, 1), *((n, 97, 98, n + 1) for n in range(1, 20))]
    for limits in ((1000, 10**9), (10**9, 10**5)):
        with pytest.raises(_host.TooLarge):
            _host.ByteAutomaton(21, edges, [], 0, 20, *limits)
    long = _host.ByteAutomaton(400, [(n, 97, 98, n + 1) for n in range(399)], [], 0, 399, 1000, 10**6)
    tokens = [b"a" * n for n in range(1, 200)]
    with pytest.raises(_host.TooLarge):
        _host.TokenAutomaton(long, tokens, [], 1000)


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="edges must join states"):
        _host.ByteAutomaton(1, [(0, 97, 97, 1)], [], 0, 0, 10, 10)
    made = _host.ByteAutomaton(2, [(0, 97, 97, 1)], [], 0, 1, 10, 10)
    over = _host.TokenAutomaton(made, [b"a", b""], [1], 100)
    with pytest.raises(ValueError, match="unknown state"):
        over.next(7, 0)
    with pytest.raises(ValueError, match="a row of int32"):
        over.mask(0, 1, np.zeros(2, dtype=np.int32))
    with pytest.raises(ValueError, match="a row for each mask"):
        over.best([-1], [0], 0, np.zeros(3, dtype=np.float32))
    with pytest.raises(ValueError, match="ends must be tokens without bytes"):
        _host.TokenAutomaton(made, [b"a", b""], [0], 100)
    for rows, bits in (([(1, 1, [])], np.zeros(1)), ([(0, 1, [])], np.zeros(1, dtype=np.int64))):
        with pytest.raises(ValueError, match="rows of int32"):
            over.masks(0, rows, bits)
    assert over.next(0, 5) == -1
