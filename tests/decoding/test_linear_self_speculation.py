"""Linear self-speculation: the tokens, forwards and acceptances of the plain reference, and those of greedy decoding."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels._philox import random_words, uniforms, uniforms_at
from pdkernels.decoding import generate
from pdkernels.generation.noise import sample
from pdkernels.reference import sampling
from pdkernels.reference.autoregressive import autoregressive
from pdkernels.reference.linear_self_speculation import linear_self_speculation
from pdkernels.reference.philox import random_words as plain_words
from pdkernels.reference.sampling import sampled_autoregressive
from tests.harness.sessions import error_of
from tests.support.base import KeepsCache, Plain, page_sizes, reads_of_the_device, seeds, streams
from tests.support.causal import SCRIPTS
from tests.support.errors import kind_of
from tests.support.tri_mode import (
    MASK,
    SKILLS,
    Cached,
    ScriptedTriMode,
    Table,
    assert_cache_is_causal,
    assert_same,
    drafter,
    lowest_confidence,
    prompts,
    small_transformer,
)

METHOD = "linear_self_speculation"
# verification and threshold
kinds = st.sampled_from([("compare", 0.0), ("compare", 0.3), ("compare", 0.7), ("compare", 1.5), ("rejection", 0.0)])


@settings(max_examples=150)
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
    model = Cached(fake, MASK + 1)
    options: dict[str, Any] = dict(
        block_size=block_size, verification=kind[0], threshold=kind[1], temperature=temperature, seed=seed
    )
    result = generate(
        model, batch, METHOD, max_new_tokens=limit, end_tokens=ends, trace=True, page_size=page_size, **options
    )
    expected = [
        linear_self_speculation(fake, p, limit, mask_token=MASK, end_tokens=ends, **options)
        for p, options in streams(batch, options)
    ]
    assert_same(result, expected, lockstep=False)
    if temperature == 0:
        for tokens, prompt in zip(result.tokens, batch, strict=True):
            assert tokens.tolist() == autoregressive(fake, prompt, limit, end_tokens=ends).tokens
    if limit:  # a finished sequence does not change
        committed = [len(p) + sum(step.accepted for step in one.trace) for p, one in zip(batch, expected, strict=True)]
        assert model.cache.lengths.tolist() == committed


@settings(max_examples=60)
@given(
    weights=st.integers(0, 3),
    adapter=st.booleans(),
    batch=prompts(13),
    limit=st.integers(1, 16),
    block_size=st.integers(1, 6),
    kind=kinds,
    temperature=st.sampled_from([0.0, 0.3, 1.0]),
    ends=st.lists(st.integers(0, 12), max_size=2),
    seed=seeds,
    page_size=page_sizes,
)
def test_a_random_transformer(
    weights, adapter, batch, limit, block_size, kind, temperature, ends, seed, page_size
) -> None:
    model = small_transformer(weights, adapter=adapter)
    options: dict[str, Any] = dict(
        block_size=block_size, verification=kind[0], threshold=kind[1], temperature=temperature, seed=seed
    )
    keeper = KeepsCache(model)
    result = generate(
        keeper, batch, METHOD, max_new_tokens=limit, end_tokens=ends, trace=True, page_size=page_size, **options
    )
    expected = [
        linear_self_speculation(
            Plain(model), p, limit, mask_token=12, end_tokens=ends, draft_model=drafter(model), **options
        )
        for p, options in streams(batch, options)
    ]
    assert_same(result, expected, lockstep=False)
    sequences = [prompt + tokens.tolist() for prompt, tokens in zip(batch, result.tokens, strict=True)]
    assert_cache_is_causal(model, keeper.cache, sequences)
    if kind[0] == "compare":
        for (prompt, own), tokens in zip(streams(batch, {"seed": seed}), result.tokens, strict=True):
            sampled = sampled_autoregressive(
                Plain(model), prompt, limit, temperature=temperature, end_tokens=ends, **own
            )
            assert tokens.tolist() == sampled.tokens


@pytest.mark.parametrize("verification", ["compare", "rejection"])
def test_at_the_smallest_temperature_draws_are_greedy(verification: str) -> None:
    """Logits divided by it would all be infinite."""
    model = small_transformer(5)
    options = {"verification": verification, "max_new_tokens": 10, "block_size": 4}
    sampled, greedy = (generate(model, [1, 2], METHOD, temperature=t, **options).tokens for t in (1e-30, 0.0))
    assert torch.equal(sampled, greedy)
    reference = linear_self_speculation(
        Plain(model), [1, 2], 10, mask_token=12, block_size=4, temperature=1e-30, verification=verification
    )
    assert reference.tokens == greedy.tolist()


@settings(max_examples=30)
@given(seed=seeds, batch=prompts(5), limit=st.integers(1, 10), block_size=st.integers(1, 5), kind=kinds)
def test_a_random_table(
    seed: int, batch: list[list[int]], limit: int, block_size: int, kind: tuple[str, float]
) -> None:
    fake = Table(5, seed=seed % 97)
    options: dict[str, Any] = dict(
        block_size=block_size, verification=kind[0], threshold=kind[1] / 2, temperature=0.8, seed=seed
    )
    result = generate(Cached(fake, 5), batch, METHOD, max_new_tokens=limit, trace=True, **options)
    expected = [
        linear_self_speculation(fake, prompt, limit, mask_token=4, **options)
        for prompt, options in streams(batch, options)
    ]
    assert_same(result, expected, lockstep=False)


END = 22


@pytest.mark.covering
@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("skill", ["always", "never", "patchy"])
def test_an_end_token_at_every_position(block_size: int, skill: str) -> None:
    """First token, inside an accepted part, next token after a partial or a full acceptance; and every limit."""
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
            assert result.tokens[0].tolist() == written[: position + 1][:limit]
            expected = linear_self_speculation(
                fake, [7, 7], limit, mask_token=MASK, end_tokens=(END,), block_size=block_size
            )
            assert_same(result, [expected], True)


def test_accepts_what_is_drafted_well() -> None:
    fake = ScriptedTriMode(SCRIPTS["history"])
    result = generate(Cached(fake, MASK + 1), [3, 1], METHOD, max_new_tokens=33, block_size=8)
    assert result.stats.accepted == [[8, 8, 8, 8]] and result.stats.forwards == 9


def test_adapters_act_on_draft_passes_alone() -> None:
    """The drafts differ, the tokens do not."""
    model, without = small_transformer(0, adapter=True), small_transformer(0)
    adapted, bare = (
        generate(m, [1, 2, 3], METHOD, max_new_tokens=20, trace=True, block_size=4) for m in (model, without)
    )
    assert torch.equal(adapted.tokens, bare.tokens)
    assert [step.draft for step in adapted.stats.trace[0]] != [step.draft for step in bare.stats.trace[0]]


def test_a_confidence_that_equals_the_threshold_reaches_it() -> None:
    """The lowest of the script's three levels: every block is filled at once."""
    fake = ScriptedTriMode(SCRIPTS["position"])
    options: dict[str, Any] = {"block_size": 6, "threshold": lowest_confidence()}
    result = generate(Cached(fake, MASK + 1), [[3, 1]], METHOD, max_new_tokens=30, trace=True, **options)
    assert_same(result, [linear_self_speculation(fake, [3, 1], 30, mask_token=MASK, **options)], True)
    assert {step.forwards for step in result.stats.trace[0] if len(step.draft) > 1} == {2}


@pytest.mark.parametrize("threshold", [0.0, 0.7, 1.5])
def test_one_read_of_the_device_per_step(threshold: float) -> None:
    """And one per draft pass if that decides about the next."""
    model = Cached(ScriptedTriMode(SCRIPTS["sticky"], SKILLS["patchy"]), MASK + 1)
    options: dict[str, Any] = {"max_new_tokens": 24, "block_size": 5, "threshold": threshold, "end_tokens": (4,)}
    trace = generate(model, [[1, 2], [5]], METHOD, trace=True, **options).stats.trace
    reads = reads_of_the_device(model, [[1, 2], [5]], METHOD, **options)
    passes = [max(step.forwards for step in cycle if step) - 1 for cycle in zip_longest(*trace)]
    assert (max(passes) == 4) == (threshold > 1)
    assert reads == 1 + len(passes) + (sum(passes) if threshold else 0)


def test_the_head_runs_on_rows_that_are_needed() -> None:
    model = Cached(ScriptedTriMode(SCRIPTS["position"]), MASK + 1)
    generate(model, [[1, 2, 3, 4], [5]], METHOD, max_new_tokens=9, block_size=6)
    assert model.head_rows == [1, 5, 6, 1, 1]  # the last two tokens have no draft


# ---- draws


@given(
    seed=seeds,
    step=st.integers(0, 2**32 - 1),
    rows=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4),
    columns=st.integers(1, 11),
)
def test_random_words_are_those_of_the_reference(seed: int, step: int, rows: list[int], columns: int) -> None:
    row_positions = torch.tensor(rows)
    expected = plain_words(seed, torch.tensor(step), row_positions[:, None], torch.arange(columns))
    assert torch.equal(random_words(seed, step, row_positions, columns), expected)
    assert torch.equal(random_words(seed, torch.tensor([[step]]), row_positions[None], columns), expected[None])
    column = columns // 2
    at = uniforms_at(seed, step, row_positions, torch.full_like(row_positions, column))
    assert torch.equal(at, (expected[:, column].double() + 0.5) / 2**32)
    assert torch.equal(at, uniforms(seed, step, row_positions, columns)[:, column])


@pytest.mark.parametrize("temperature", [0.0, 0.4, 2.0])
def test_draws_are_those_of_the_reference(temperature: float) -> None:
    logits = torch.randn(2, 3, 17, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits[0, 0, 4] = logits[0, 0, 9] = 6.0
    positions = torch.tensor([[4, 5, 6], [9, 0, 1]])
    steps = torch.tensor([[3], [8]])
    actual = sample(logits, positions, temperature, torch.tensor([11, -4]), steps)
    for row in range(2):
        expected = sampling.draw(logits[row], positions[row].tolist(), temperature, (11, -4)[row], int(steps[row]))
        assert actual[row].tolist() == expected


# ---- errors

ERRORS: dict[str, Any] = {
    "block_size must be at least 1, got 0.": {"block_size": 0},
    "TypeError: block_size must be an int or 'auto', got float.": {"block_size": 2.0},
    "temperature must be finite and at least 0, got -1.0.": {"temperature": -1.0},
    "TypeError: temperature must be a number, got str.": {"temperature": "hot"},
    "TypeError: seed must be an int or a list of ints, got float.": {"seed": 1.5},
    "threshold must be at least 0, got -0.5.": {"threshold": -0.5},
    "TypeError: threshold must be a number, got NoneType.": {"threshold": None},
    "verification must be one of 'compare', 'rejection', got 'trust'.": {"verification": "trust"},
    (
        "threshold must be 0 with verification='rejection', got 0.5. Slots filled in later passes depend on others; "
        "use verification='compare'."
    ): {"verification": "rejection", "threshold": 0.5},
    "mask_token must be an id in 0 .. 23, got 24.": {"mask_token": 24},
    "TypeError: mask_token must be an int, got str.": {"mask_token": "x"},
}


@pytest.mark.parametrize("text, options", ERRORS.items())
@pytest.mark.parametrize("limit", [0, 4])
def test_errors(options: dict[str, Any], text: str, limit: int) -> None:
    error, text = kind_of(text)
    model = Cached(ScriptedTriMode(SCRIPTS["position"]), MASK + 1)
    with pytest.raises(error) as raised:
        generate(model, [1], METHOD, max_new_tokens=limit, **options)
    assert str(raised.value) == error_of("linear_self_speculation", text)
