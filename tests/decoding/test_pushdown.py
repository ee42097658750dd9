"""Canvases under recursive grammars equal the plain reference, on random grammars and random canvases."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from pdkernels import _host
from pdkernels.decoding import Grammar
from pdkernels.grammar.calls import call
from pdkernels.grammar.grammar import PushdownGrammar
from pdkernels.grammar.language import Alt, Expression, Seq, determinised, text
from reference import pushdown as reference
from tests.support.drafted_masks import check_masks_of_a_draft

FAR = 2**31 - 1
Tokens = list[bytes | None]


def automaton_of(rules: reference.Rules) -> _host.PushdownRules:
    def part(item: bytes | int) -> Expression:
        return call(item) if isinstance(item, int) else text(item.decode())

    expressions = [Alt(tuple(Seq(tuple(map(part, form))) for form in alternatives)) for alternatives in rules]
    return _host.PushdownRules([determinised(expression, "it") for expression in expressions])


def over(rules: _host.PushdownRules, tokens: Tokens) -> _host.PushdownText:
    ends = [n for n, token in enumerate(tokens) if token is None]
    return _host.PushdownText(_host.PushdownTokens(rules, [token or b"" for token in tokens], ends, 10**7))


def random_case(seed: int) -> tuple[reference.Rules, Tokens, random.Random]:
    """One to three rules of two letters and two brackets, and tokens of one to four of them."""
    draw = random.Random(seed)
    while True:
        count = draw.randint(1, 3)
        rules = [
            [
                tuple(
                    draw.choice([b"a", b"(", b")", b"a)", b"((", draw.randrange(count), draw.randrange(count)])
                    for _ in range(draw.randint(0, 3))
                )
                for _ in range(draw.randint(1, 4))
            ]
            for _ in range(count)
        ]
        made = automaton_of(rules)
        if not made.empty and made.looping < 0:
            break
    words = {b"a", b"(", b")"} | {
        bytes(draw.choice(b"a()") for _ in range(draw.randint(2, 4))) for _ in range(draw.randint(1, 4))
    }
    words -= set(draw.sample(sorted(words), draw.randint(0, 2)))
    return rules, [*sorted(words), b"", *([None] if draw.random() < 0.8 else [])], draw


def bits_of(words: np.ndarray, count: int) -> list[int]:
    return [n for n in range(count) if words[n // 32] >> (n % 32) & 1]


def random_canvas(rules: reference.Rules, tokens: Tokens, draw: random.Random) -> tuple[list[int], list[int], int]:
    prefix = [draw.randrange(len(tokens)) for _ in range(draw.choice([0, 0, 1, 2]))]
    canvas = [draw.choice([-1, -1, draw.randrange(len(tokens))]) for _ in range(draw.randint(1, 4))]
    return prefix, canvas, draw.randint(0, 2)


@pytest.mark.parametrize("seed", range(150))
def test_canvases_equal_the_reference(seed: int) -> None:
    rules, tokens, draw = random_case(seed)
    made, words = over(automaton_of(rules), tokens), np.zeros(1, dtype=np.int32)
    for _ in range(6):
        prefix, canvas, budget = random_canvas(rules, tokens, draw)
        state = made.follow(0, prefix)
        expected = reference.completable(rules, tokens, canvas, prefix, budget)
        if state < 0:
            assert not expected
            continue
        filled = made.fill(canvas, state, budget)
        assert bool(filled) == expected == bool(made.fill(canvas, state, budget, listed=False))
        for at in [n for n, token in enumerate(canvas) if expected and token == -1]:
            possible = reference.allowed(rules, tokens, canvas, at, prefix, budget)
            assert filled.allowed(at, words) == (len(possible), max(possible))
            assert bits_of(words, len(tokens)) == possible


@pytest.mark.parametrize("seed", range(100))
def test_the_most_probable_completion_equals_the_reference(seed: int) -> None:
    rules, tokens, draw = random_case(seed)
    made = over(automaton_of(rules), tokens)
    for _ in range(5):
        prefix, canvas, budget = random_canvas(rules, tokens, draw)
        state = made.follow(0, prefix)
        masks = [at for at, token in enumerate(canvas) if token == -1]
        scores = [[math.log(draw.random()) for _ in tokens] for _ in masks]
        if state < 0:
            continue
        if masks and draw.random() < 0.3:
            scores[0][draw.randrange(len(tokens))] = -math.inf
        rows = np.array(scores, dtype=np.float32).reshape(len(masks), len(tokens))
        found = made.best(canvas, state, budget, rows)
        most = reference.best(rules, tokens, canvas, prefix, budget, rows.tolist())
        assert bool(found) == (most > -math.inf)
        if found:
            assert reference.completable(rules, tokens, found, prefix, budget)
            assert all(token in (-1, found[at]) for at, token in enumerate(canvas))
            assert sum(float(rows[n, found[at]]) for n, at in enumerate(masks)) == pytest.approx(most, abs=1e-4)


@pytest.mark.parametrize("seed", range(60))
def test_prefixes_equal_the_reference(seed: int) -> None:
    rules, tokens, draw = random_case(seed)
    made, words = over(automaton_of(rules), tokens), np.zeros(1, dtype=np.int32)
    for _ in range(6):
        prefix, _, budget = random_canvas(rules, tokens, draw)
        state = made.follow(0, prefix)
        if state < 0:
            assert not reference.completable(rules, tokens, [], prefix, 3)
            continue
        assert made.accepting(state) == reference.completable(rules, tokens, [], prefix, 0)
        assert (made.distance(state) <= budget) == reference.completable(rules, tokens, [], prefix, budget)
        made.mask(state, budget, words)
        assert bits_of(words, len(tokens)) == reference.allowed(rules, tokens, [-1], 0, prefix, budget)


def test_every_completion_is_counted() -> None:
    """Against all texts, written out: as many brackets open as close."""
    tokens: Tokens = [b"(", b")", b"()", b")(", b"((", b"x", None]
    rules: reference.Rules = [[(), (b"(", 0, b")", 0), (b"x", 0)]]

    def balanced(text: bytes) -> bool:
        depths = list(itertools.accumulate({40: 1, 41: -1}.get(byte, 0) for byte in text))
        return not depths or (min(depths) >= 0 and depths[-1] == 0)

    made, words = over(automaton_of(rules), tokens), np.zeros(1, dtype=np.int32)
    draw = random.Random(7)
    for _ in range(40):
        canvas = [draw.choice([-1, -1, -1, draw.randrange(6)]) for _ in range(5)]
        good = []
        for choice in itertools.product(*[range(7) if token == -1 else [token] for token in canvas]):
            before = choice[: choice.index(6)] if 6 in choice else choice
            if balanced(b"".join(tokens[token] or b"" for token in before)):
                good.append(choice)
        filled = made.fill(canvas, 0, 0)
        assert bool(filled) == bool(good)
        for at in [n for n, token in enumerate(canvas) if good and token == -1]:
            filled.allowed(at, words)
            assert bits_of(words, 7) == sorted({choice[at] for choice in good})


LONG = {
    "sums": 'start: product ("+" product)*\nproduct: factor ("*" factor)*\nfactor: "1" | "(" start ")"',
    "pairs": 'start: "(" start ")" | "1"',
    "a list": 'start: "1" | "(" start ")" ("+" "1")*',
    "two rules": 'start: "(" other | "1"\nother: "*" start ")" | "1" ")"',
}
WORDS: Tokens = [b"(", b")", b"1", b"+", b"*", b"((", b"))", b")+", b"+(", b"1)", b"(*", b"", None]


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("seed", range(12))
def test_long_canvases_equal_those_of_an_unfolded_grammar(name: str, seed: int) -> None:
    """A canvas cannot hold more levels than its tokens open, so an automaton with as many levels knows the same of it."""
    draw, words, expected = random.Random(seed), np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.int32)
    vocabulary = [word for word in WORDS if not word or draw.random() < 0.7]
    ends, tokens = [len(vocabulary) - 1], [word or b"" for word in vocabulary]
    unfolded = _host.TokenAutomaton(Grammar.ebnf(LONG[name], depth=64).automaton, tokens, ends, 10**7)
    deep = Grammar.ebnf(LONG[name], depth=None)
    assert isinstance(deep, PushdownGrammar)
    made = over(deep.rules, vocabulary)
    length, budget = draw.choice([33, 48, 60]), draw.choice([0, 0, 3])
    prefix = draw.choice([[], [], [0]])
    canvas, state, start = [-1] * length, made.follow(0, prefix), unfolded.follow(0, prefix)
    assert (state < 0) == (start < 0)
    if state < 0:
        return
    for _ in range(10):
        filled, places = made.fill(canvas, state, budget), unfolded.places(canvas, [start], budget)
        assert bool(filled) == bool(places) == bool(made.fill(canvas, state, budget, listed=False))
        masks = [at for at, token in enumerate(canvas) if token == -1]
        if not places:
            break
        for at in masks:
            assert filled.allowed(at, words) == unfolded.allowed(places[at], places[at + 1], expected)
            assert words[0] == expected[0], (canvas, at)
        for at in draw.sample(masks, min(len(masks), draw.choice([1, 4, length // 5]))):
            # Sometimes a token that excludes others.
            places = unfolded.places(canvas, [start], budget)
            unfolded.allowed(places[at], places[at + 1], expected)
            token = draw.choice(bits_of(expected, len(vocabulary)))
            canvas[at] = token if unfolded.places([*canvas[:at], token, *canvas[at + 1 :]], [start], budget) else -1


@pytest.mark.parametrize("seed", range(30))
def test_masks_of_a_draft_are_those_of_its_rows(seed: int) -> None:
    rules, tokens, draw = random_case(seed)
    check_masks_of_a_draft(over(automaton_of(rules), tokens), len(tokens), draw)
