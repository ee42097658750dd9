"""Block diffusion: the tokens, forwards and filled slots of the plain reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels.decoding import DecodeResult, generate
from pdkernels.reference.autoregressive import autoregressive
from pdkernels.reference.block_diffusion import BlockDiffusionResult, block_diffusion
from tests.harness.sessions import error_of
from tests.support import tri_mode
from tests.support.base import KeepsCache, Plain, page_sizes, seeds, streams
from tests.support.causal import SCRIPTS
from tests.support.errors import kind_of
from tests.support.tri_mode import (
    MASK,
    SKILLS,
    Cached,
    ScriptedTriMode,
    Table,
    assert_cache_is_causal,
    lowest_confidence,
    prompts,
    small_transformer,
)

METHOD = "block_diffusion"
# threshold and steps_per_block
kinds = st.sampled_from(
    [
        (0.9, None),
        (0.5, None),
        (0.24, None),
        (0.0, None),
        (2.0, None),
        (None, None),
        (None, 1),
        (None, 2),
        (None, 3),
        (None, 9),
    ]
)


def assert_same(result: DecodeResult, expected: list[BlockDiffusionResult]) -> None:
    tri_mode.assert_same(result, expected, lockstep=False, accepted=lambda step: len(step.committed))


@settings(max_examples=120)
@given(
    script=st.sampled_from(sorted(SCRIPTS)),
    skill=st.sampled_from(sorted(SKILLS)),
    batch=prompts(MASK + 1),
    limit=st.integers(0, 20),
    block_size=st.integers(1, 7),
    kind=kinds,
    temperature=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    ends=st.lists(st.integers(0, MASK - 1), max_size=3),
    seed=seeds,
    page_size=page_sizes,
)
def test_equals_the_reference_on_scripts(
    script, skill, batch, limit, block_size, kind, temperature, ends, seed, page_size
) -> None:
    fake = ScriptedTriMode(SCRIPTS[script], SKILLS[skill])
    options: dict[str, Any] = dict(
        block_size=block_size, threshold=kind[0], steps_per_block=kind[1], temperature=temperature, seed=seed
    )
    result = generate(
        Cached(fake, MASK + 1),
        batch,
        METHOD,
        max_new_tokens=limit,
        end_tokens=ends,
        trace=True,
        page_size=page_size,
        **options,
    )
    expected = [
        block_diffusion(fake, p, limit, mask_token=MASK, end_tokens=ends, **options)
        for p, options in streams(batch, options)
    ]
    assert_same(result, expected)


@settings(max_examples=60)
@given(
    weights=st.integers(0, 3),
    batch=prompts(13),
    limit=st.integers(1, 16),
    block_size=st.integers(1, 6),
    kind=kinds,
    refresh=st.sampled_from(["causal", "bidirectional"]),
    temperature=st.sampled_from([0.0, 0.3, 1.0]),
    ends=st.lists(st.integers(0, 12), max_size=2),
    seed=seeds,
    page_size=page_sizes,
)
def test_a_random_transformer(
    weights, batch, limit, block_size, kind, refresh, temperature, ends, seed, page_size
) -> None:
    model = small_transformer(weights)
    options: dict[str, Any] = {
        "block_size": block_size,
        "threshold": kind[0],
        "steps_per_block": kind[1],
        "refresh": refresh,
        "temperature": temperature,
        "seed": seed,
    }
    keeper = KeepsCache(model)
    result = generate(
        keeper, batch, METHOD, max_new_tokens=limit, end_tokens=ends, trace=True, page_size=page_size, **options
    )
    expected = [
        block_diffusion(Plain(model), p, limit, mask_token=12, end_tokens=ends, **options)
        for p, options in streams(batch, options)
    ]
    assert_same(result, expected)
    if refresh == "causal":
        sequences = [prompt + tokens.tolist() for prompt, tokens in zip(batch, result.tokens, strict=True)]
        assert_cache_is_causal(model, keeper.cache, sequences)


@settings(max_examples=40)
@given(
    seed=seeds,
    batch=prompts(5),
    limit=st.integers(1, 10),
    block_size=st.integers(1, 5),
    kind=kinds,
    refresh=st.sampled_from(["causal", "bidirectional"]),
    temperature=st.sampled_from([0.0, 0.8]),
    ends=st.lists(st.integers(0, 4), max_size=2),
)
def test_a_random_table(seed, batch, limit, block_size, kind, refresh, temperature, ends) -> None:
    fake = Table(5, seed=seed % 97)
    options: dict[str, Any] = {
        "block_size": block_size,
        "threshold": kind[0],
        "steps_per_block": kind[1],
        "refresh": refresh,
        "temperature": temperature,
        "seed": seed,
    }
    result = generate(Cached(fake, 5), batch, METHOD, max_new_tokens=limit, end_tokens=ends, trace=True, **options)
    expected = [
        block_diffusion(fake, prompt, limit, mask_token=4, end_tokens=ends, **options)
        for prompt, options in streams(batch, options)
    ]
    assert_same(result, expected)


END = 22


@pytest.mark.covering
@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("skill", ["always", "patchy"])
def test_an_end_token_at_every_position(block_size: int, skill: str) -> None:
    """First token, inside a block, and with slots open after it; and every limit."""
    for position in range(8):
        written = [*range(1, 1 + position), END, 3, 3, 3]
        fake = ScriptedTriMode(lambda history: written[min(len(history) - 2, len(written) - 1)], SKILLS[skill])  # noqa: B023
        for limit in (position, position + 1, position + 2, 12):
            result = generate(
                Cached(fake, MASK + 1),
                [[7, 7]],
                METHOD,
                max_new_tokens=limit,
                end_tokens=(END,),
                trace=True,
                block_size=block_size,
            )
            expected = block_diffusion(fake, [7, 7], limit, mask_token=MASK, end_tokens=(END,), block_size=block_size)
            assert_same(result, [expected])
            if skill == "always":
                assert result.tokens[0].tolist() == written[: position + 1][:limit]


@settings(max_examples=20)
@given(batch=prompts(13), limit=st.integers(0, 10))
def test_blocks_of_one_token_are_autoregressive(batch: list[list[int]], limit: int) -> None:
    model = small_transformer(3)
    result = generate(model, batch, METHOD, max_new_tokens=limit, block_size=1)
    for prompt, tokens in zip(batch, result.tokens, strict=True):
        assert tokens.tolist() == autoregressive(Plain(model), prompt, limit).tokens
    assert result.stats.forwards == limit


def test_a_confidence_that_equals_the_threshold_reaches_it() -> None:
    """The lowest of the script's three levels: every block is filled at once."""
    fake = ScriptedTriMode(SCRIPTS["position"])
    options: dict[str, Any] = {"block_size": 6, "threshold": lowest_confidence()}
    result = generate(Cached(fake, MASK + 1), [[3, 1]], METHOD, max_new_tokens=30, trace=True, **options)
    assert_same(result, [block_diffusion(fake, [3, 1], 30, mask_token=MASK, **options)])
    assert result.stats.accepted == [[5] * 5]


# ---- errors

ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"block_size": 0}, "block_size must be at least 1, got 0."),
    ({"block_size": 2.0}, "TypeError: block_size must be an int or 'auto', got float."),
    ({"threshold": "high"}, "TypeError: threshold must be a number, got str."),
    ({"threshold": -0.1}, "threshold must be at least 0, got -0.1."),
    ({"threshold": math.nan}, "threshold must be at least 0, got nan."),
    ({"steps_per_block": 4}, "steps_per_block must be None with a threshold, got 4. Pass threshold=None."),
    ({"steps_per_block": 0, "threshold": None}, "steps_per_block must be at least 1, got 0."),
    ({"refresh": "never"}, "refresh must be one of 'causal', 'bidirectional', got 'never'."),
    ({"temperature": -1.0}, "temperature must be finite and at least 0, got -1.0."),
    ({"seed": 1.5}, "TypeError: seed must be an int or a list of ints, got float."),
    ({"mask_token": 24}, "mask_token must be an id in 0 .. 23, got 24."),
]


@pytest.mark.parametrize("options, text", ERRORS)
@pytest.mark.parametrize("limit", [0, 4])
def test_errors(options: dict[str, Any], text: str, limit: int) -> None:
    error, text = kind_of(text)
    model = Cached(ScriptedTriMode(SCRIPTS["position"]), MASK + 1)
    with pytest.raises(error) as raised:
        generate(model, [1], METHOD, max_new_tokens=limit, **options)
    assert str(raised.value) == error_of("block_diffusion", text)
