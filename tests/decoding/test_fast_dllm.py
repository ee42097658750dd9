"""Fast-dLLM: tokens, forwards and filled positions of the plain reference, with what its caches leave stale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels.decoding import generate
from pdkernels.reference.fast_dllm import fast_dllm
from tests.support import masked_promises as shared
from tests.support.base import Plain, page_sizes, seeds, streams
from tests.support.masked import MASK, Remembering, deep_masked, hashed, with_parts
from tests.support.masked_promises import assert_same_or_waiting
from tests.support.tri_mode import prompts

METHOD = "fast_dllm"
CACHES = ("none", "prefix", "dual")
RULES: list[dict[str, Any]] = [
    {},
    {"threshold": 0.3},
    {"threshold": 0.6},
    {"threshold": 0.0},
    {"threshold": None, "factor": 0.5},
    {"threshold": None, "factor": 1.4},
    {"threshold": None},
]


def reference(model: Any, batch: list[list[int]], limit: int, **options: Any) -> list[Any]:
    return [fast_dllm(model, prompt, limit, mask_token=MASK, **options) for prompt, options in streams(batch, options)]


@settings(max_examples=100)
@given(
    model=st.tuples(st.integers(0, 1), st.sampled_from(["own", "next"])),
    batch=prompts(MASK + 2),  # a mask token inside a prompt is part of it
    limit=st.integers(1, 10),
    block_size=st.sampled_from([1, 3, 4, 4, 5, 32]),
    cache=st.sampled_from(CACHES),
    rule=st.sampled_from(RULES),
    per_block=st.sampled_from([None, 1, 2, 5]),
    temperature=st.sampled_from([0.0, 0.0, 0.7]),
    ends=st.lists(st.integers(0, MASK - 1), max_size=3),
    seed=seeds,
    page_size=page_sizes,
)
def test_equals_the_reference(
    model, batch, limit, block_size, cache, rule, per_block, temperature, ends, seed, page_size
) -> None:
    options = dict(block_size=block_size, cache=cache, temperature=temperature, end_tokens=ends, seed=seed, **rule)
    if rule == {"threshold": None} and per_block is not None:
        options["steps"] = per_block * -(-limit // block_size)
    transformer = deep_masked(*model)
    result = generate(transformer, batch, METHOD, max_new_tokens=limit, trace=True, page_size=page_size, **options)
    assert_same_or_waiting(result, reference(with_parts(transformer), batch, limit, **options), waits=cache != "none")


@pytest.mark.parametrize(
    ("per_block", "own", "shifted"),
    [
        (1, [5, 5, 1], [1, 4, 1, 4, 1]),
        (2, [3, 2, 3, 2, 1], [1, 4, 1, 4, 1]),
        (4, [2, 1, 1, 1, 2, 1, 1, 1, 1], [1, 2, 1, 1, 1, 2, 1, 1, 1]),
        (7, [1] * 11, [1] * 11),
    ],
)
def test_quotas(per_block: int, own: list[int], shifted: list[int]) -> None:
    """Equal shares of a block's positions, or of what its first forward leaves."""
    options: dict[str, Any] = {"block_size": 5, "threshold": None, "steps": 3 * per_block}
    for predicts, expected in (("own", own), ("next", shifted)):
        for cache in CACHES:
            model = deep_masked(0, predicts)
            result = generate(model, [[1, 2], [3]], METHOD, max_new_tokens=11, cache=cache, trace=True, **options)
            assert_same_or_waiting(
                result, reference(with_parts(model), [[1, 2], [3]], 11, cache=cache, **options), waits=False
            )
            assert result.stats.accepted == [own if cache == "none" else expected] * 2


@pytest.mark.parametrize("predicts", ["own", "next"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("rule", RULES[:3] + RULES[4:])
def test_which_rows_a_forward_takes(cache: str, predicts: str, rule: dict[str, Any]) -> None:
    """Whole canvases, then the rows from the block on or the block's own; the head runs for a block's open positions only."""
    batch, limit, size = [[1, 2, 3], [4]], 11, 4
    script = hashed(5, lambda u: 0.2 + 0.75 * u)
    model = Remembering(script, predicts)
    result = generate(model, batch, METHOD, max_new_tokens=limit, block_size=size, cache=cache, trace=True, **rule)
    if cache == "none" or predicts == "own":  # not visible in tokens with a script, whose caches are exact
        plain = Plain(Remembering(script, predicts))
        assert_same_or_waiting(
            result, reference(plain, batch, limit, block_size=size, cache="none", **rule), waits=cache != "none"
        )
    for sequence, (prompt, steps) in enumerate(zip(batch, result.stats.trace, strict=True)):
        taken = (forward[sequence] for forward in model.forwards)
        for step in steps:
            block = (step.window[0] - len(prompt)) // size * size + len(prompt)
            end = len(prompt) + limit
            entry = all(token == MASK for token in step.tokens[block : block + size])
            stop = min(block + size, end)
            expected = (0, end) if entry or cache == "none" else (block, end if cache == "prefix" else stop)
            assert expected in taken  # later ones; those before are of the other sequence, which this one waits for
            alone = entry and cache != "none" and predicts == "next"
            assert step.window == (block, block + 1 if alone else stop)
    assert max(model.head_rows) <= size and len(model.forwards) == result.stats.forwards


def test_a_block_that_the_first_forward_completes_has_no_other() -> None:
    model = Remembering(lambda text: [(7, 0.95)] * len(text))
    for cache in CACHES:
        result = generate(model, [[1, 2], [3]], METHOD, max_new_tokens=9, block_size=4, cache=cache)
        assert result.stats.accepted == [[4, 4, 1]] * 2 and result.stats.forwards == 3
    shifted = Remembering(lambda text: [(7, 0.95)] * len(text), "next")
    result = generate(shifted, [[1, 2], [3]], METHOD, max_new_tokens=9, block_size=4)
    assert result.stats.accepted == [[1, 3, 1, 3, 1]] * 2


def test_a_sequence_waits_for_the_block_of_another() -> None:
    """The first sequence is confident everywhere, the second nowhere: one forward per block against four."""

    def script(text: list[int]) -> list[tuple[int, float]]:
        return [(7, 0.95 if text[0] == 1 else 0.5)] * len(text)

    result = generate(Remembering(script), [[1], [2]], METHOD, max_new_tokens=8, block_size=4)
    assert result.stats.accepted == [[4, 4], [1] * 8] and result.stats.forwards == 8
    assert result.stats.tokens_per_forward == 16 / 10
    alone = generate(Remembering(script), [[1], [2]], METHOD, max_new_tokens=8, block_size=4, cache="none")
    assert alone.stats.accepted == result.stats.accepted and alone.stats.forwards == 8


def test_the_released_error_of_the_factor_rule() -> None:
    """A failure at the last rank only does not count, one before it does."""
    sure = {1: 0.99, 2: 0.01}
    model = Remembering(lambda text: [(7, sure.get(position, 0.02)) for position in range(len(text))])
    for limit, accepted in ((2, [2]), (3, [1, 2])):
        result = generate(model, [1], METHOD, max_new_tokens=limit, threshold=None, factor=1.0)
        assert result.stats.accepted == [accepted]


@pytest.mark.parametrize("predicts", ["own", "next"])
@pytest.mark.parametrize("cache", CACHES)
def test_blocks_of_one_position_are_the_same_with_every_cache(cache: str, predicts: str) -> None:
    model = deep_masked(0, predicts)
    result = generate(model, [[3, 1], [5]], METHOD, max_new_tokens=7, block_size=1, cache=cache, trace=True)
    expected = generate(model, [[3, 1], [5]], METHOD, max_new_tokens=7, block_size=1, cache="none", trace=True)
    assert all(map(torch.equal, result.tokens, expected.tokens)) and result.stats.forwards == 7


def test_errors() -> None:
    shared.assert_errors(
        METHOD,
        [
            ({"block_size": 0}, "block_size must be at least 1, got 0."),
            ({"cache": "double"}, "cache must be one of 'none', 'prefix', 'dual', got 'double'."),
            ({"threshold": "high"}, "TypeError: threshold must be a number, got str."),
            ({"threshold": -0.1}, "threshold must be at least 0, got -0.1."),
            ({"factor": 1.0}, "factor must be None with a threshold, got 1.0. Pass threshold=None."),
            ({"factor": -1, "threshold": None}, "factor must be at least 0, got -1."),
            ({"factor": float("inf"), "threshold": None}, "factor must be finite, got inf."),
            (
                {"steps": 4},
                "steps must be None with a threshold or a factor, got 4. Pass threshold=None and factor=None.",
            ),
            (
                {"steps": 4, "threshold": None, "factor": 1},
                "steps must be None with a threshold or a factor, got 4. Pass threshold=None and factor=None.",
            ),
            ({"steps": 0, "threshold": None}, "steps must be at least 1, got 0."),
            (
                {"steps": 3, "block_size": 2, "threshold": None},
                "steps must be a multiple of the number of blocks (2), got 3.",
            ),
            ({"temperature": -1.0}, "temperature must be finite and at least 0, got -1.0."),
            ({"seed": 1.5}, "TypeError: seed must be an int or a list of ints, got float."),
            ({"mask_token": 13}, "mask_token must be an id in 0 .. 12, got 13."),
        ],
    )
