"""States of a canvas that are computed before their step: the tokens, steps and random numbers of the plain sampler."""

from __future__ import annotations

import math
from collections import Counter
from copy import deepcopy
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels import models
from pdkernels.decoding import generate
from pdkernels.decoding.canvas.states import ranked_sets
from pdkernels.grammar import Grammar
from tests.support.base import seeds
from tests.support.masked import MASK, prompts, small_masked

LIMIT = 12


@cache
def small(seed: int, predicts: str) -> Any:
    """In float32: rows of float64 have other bits in another batch."""
    return deepcopy(small_masked(seed, predicts)).float()


def both(model: Any, batch: Any, speculate: int, **options: Any) -> tuple[Any, Any]:
    found = [generate(model, batch, "llada", trace=True, speculate=n, **options) for n in (0, speculate)]
    return found[0], found[1]


def assert_same(plain: Any, fast: Any) -> None:
    assert [row.tolist() for row in fast.tokens] == [row.tolist() for row in plain.tokens]
    assert fast.stats.accepted == plain.stats.accepted and fast.stats.trace == plain.stats.trace
    assert fast.stats.forwards <= plain.stats.forwards


@settings(max_examples=40, deadline=None)
@given(
    model=st.tuples(st.integers(0, 2), st.sampled_from(["own", "next"])),
    batch=prompts,
    speculate=st.integers(1, 9),
    limit=st.integers(1, 10),
    block_size=st.sampled_from([None, 1, 3, 4]),
    per_block=st.sampled_from([None, 1, 2, 5]),
    options=st.fixed_dictionaries(
        dict(
            temperature=st.sampled_from([0.0, 0.5, 1.0]),
            top_k=st.sampled_from([None, 3]),
            no_end=st.booleans(),
            late_end=st.booleans(),
            remainder=st.sampled_from(["first", "spread"]),
            infill=st.booleans(),
            repetition_penalty=st.sampled_from([1.0, 1.3]),
        )
    ),
    ends=st.lists(st.integers(0, MASK - 1), max_size=3),
    seed=seeds,
)
def test_tokens_of_the_plain_sampler(
    model, batch, speculate, limit, block_size, per_block, options, ends, seed
) -> None:
    blocks = -(-limit // (block_size or max(limit, 1)))
    steps = None if per_block is None else per_block * max(blocks, 1)
    given = {"block_size": block_size, "steps": steps, "end_tokens": ends, "seed": seed, "max_new_tokens": limit}
    assert_same(*both(small(*model), batch, speculate, **given, **options))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_many_texts_of_a_trained_model(temperature: float) -> None:
    """Alone, in a batch and with other seeds; and half the forwards are saved."""
    model, numbers = models.load("tiny-masked"), range(3, 90, 24)
    texts = [f"{a} + {b} = ?\n" for a in numbers for b in numbers]
    options = {"max_new_tokens": LIMIT, "temperature": temperature, "end_tokens": ()}
    plain, fast = both(model, texts, 7, seed=4, **options)
    assert_same(plain, fast)
    alone = [generate(model, text, "llada", speculate=7, seed=4, **options) for text in texts[:1]]
    assert torch.equal(alone[0].tokens, fast.tokens[0])
    once = [generate(model, texts[11], "llada", seed=seed, speculate=n, **options) for n in (0, 7) for seed in range(3)]
    assert [row.tokens.tolist() for row in once[:3]] == [row.tokens.tolist() for row in once[3:]]
    assert 2 * sum(row.stats.forwards for row in once[3:]) <= sum(row.stats.forwards for row in once[:3])


def test_a_grammar_is_followed() -> None:
    model = models.load("tiny-masked")
    plain, fast = both(model, "58 + 31 = ?\n", 5, max_new_tokens=16, grammar=Grammar.regex("[0-9 +=\n]{4,12}"))
    assert_same(plain, fast)


def test_states_are_the_most_likely_first() -> None:
    assert ranked_sets(6) == ((0,), (0, 1), (1,), (0, 1, 2), (0, 2), (0, 1, 2, 3))
    assert len(set(ranked_sets(100))) == 100


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"speculate": -1}, "speculate must be an int from 0 to 64, got -1"),
        ({"speculate": 65}, "speculate must be an int from 0 to 64, got 65"),
        ({"speculate": 2, "revise": 0.5}, "speculate must be 0 with random remasking, guidance or revise, got 2"),
        ({"speculate": 2, "guidance": 0.5}, "speculate must be 0 with random remasking, guidance or revise, got 2"),
        ({"speculate": 2, "remasking": "random"}, "speculate must be 0 with random remasking"),
    ],
)
def test_what_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        generate(small_masked(0), [[1, 2]], "llada", max_new_tokens=4, **options)


def test_the_law_is_that_of_the_sampler() -> None:
    """Of three tokens at temperature 0.5, by enumeration: all masks are guessed, the surest guess stays, the others are
    drawn anew. A state is met at the third step at the earliest."""
    model, prompt, draws, cold = small(2, "own"), (3, 5), 3000, 0.5  # so that states are met

    @cache
    def law(text: tuple[int, ...]) -> dict[tuple[int, ...], float]:
        masks = [n for n, token in enumerate(text) if token == MASK]
        if not masks:
            return {text: 1.0}
        logits = model(torch.tensor([[*prompt, *text]]))[0, len(prompt) :, :MASK].double()
        chances, drawn = logits.softmax(-1).tolist(), (logits / cold).softmax(-1).tolist()
        after = Counter[tuple[int, ...]]()
        for guesses in product(range(MASK), repeat=len(masks)):
            own = [chances[n][token] for n, token in zip(masks, guesses, strict=True)]
            surest = max(range(len(masks)), key=lambda k: (own[k], -k))
            after[(*text[: masks[surest]], guesses[surest], *text[masks[surest] + 1 :])] += math.prod(
                drawn[n][token] for n, token in zip(masks, guesses, strict=True)
            )
        found = Counter[tuple[int, ...]]()
        for state, weight in after.items():
            for end, chance in law(state).items():
                found[end] += weight * chance
        return dict(found)

    with torch.inference_mode():
        expected = Counter[tuple[int, ...]]()
        for text, chance in law((MASK,) * 3).items():
            expected[text[1:]] += draws * chance  # the last two, of which the counts are not too small
    options = {"max_new_tokens": 3, "temperature": cold, "seed": 9, "end_tokens": ()}
    alone = [generate(model, prompt, "llada", speculate=9, **{**options, "seed": seed}) for seed in range(60)]
    assert sum(one.stats.forwards for one in alone) < 3 * 60
    result = generate(model, [prompt] * draws, "llada", speculate=9, **options)
    found = Counter(tuple(row.tolist()[1:]) for row in result.tokens)
    common = {text for text, count in expected.items() if count >= 5}
    pairs = [(found[text], expected[text]) for text in common]
    pairs.append((draws - sum(seen for seen, _ in pairs), draws - sum(wanted for _, wanted in pairs)))
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in pairs)
    halves = torch.tensor([len(pairs) - 1, statistic], dtype=torch.float64) / 2
    assert len(pairs) > 12 and torch.special.gammaincc(halves[0], halves[1]) > 1e-4
