"""Quadratic self-speculation: the tokens, forwards and acceptances of the plain reference, and those of greedy decoding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels.decoding import generate
from pdkernels.decoding.causal.quadratic_self_speculation import _mixed
from pdkernels.reference.autoregressive import autoregressive
from pdkernels.reference.quadratic_self_speculation import quadratic_self_speculation, verifier
from pdkernels.reference.sampling import sampled_autoregressive
from tests.harness.sessions import error_of
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
    assert_same,
    drafter,
    prompts,
    small_transformer,
)

METHOD = "quadratic_self_speculation"


@st.composite
def shapes(draw: st.DrawFn, ensembles: bool = True) -> dict[str, Any]:
    """Widths and forms of drafts, groups and verifier."""
    shift = draw(st.integers(0, 1))
    block_size = draw(st.integers(1, 6))
    more = draw(st.sampled_from([None, 0, 0, 1, 2]))
    weight = draw(st.sampled_from([1.0, 1.0, 0.6, 0.0])) if ensembles and shift == 0 else 1.0
    return {
        "block_size": block_size,
        "label_shift": shift,
        "masks_per_group": None if more is None else block_size - shift + more,
        "in_group": draw(st.sampled_from(["bidirectional", "causal"])),
        "ensemble_weight": weight,
        "ensemble": draw(st.sampled_from(["probability", "logit"])),
    }


@settings(max_examples=120)
@given(
    script=st.sampled_from(sorted(SCRIPTS)),
    skill=st.sampled_from(sorted(SKILLS)),
    batch=prompts(MASK + 1),
    limit=st.integers(0, 20),
    shape=shapes(ensembles=False),
    temperature=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    ends=st.lists(st.integers(0, MASK - 1), max_size=3),
    seed=seeds,
    page_size=page_sizes,
)
def test_equals_the_reference_on_scripts(
    script, skill, batch, limit, shape, temperature, ends, seed, page_size
) -> None:
    fake = ScriptedTriMode(SCRIPTS[script], SKILLS[skill], shape["label_shift"])
    model = Cached(fake, MASK + 1)
    options = {**shape, "temperature": temperature, "seed": seed}
    result = generate(
        model, batch, METHOD, max_new_tokens=limit, end_tokens=ends, trace=True, page_size=page_size, **options
    )
    expected = [
        quadratic_self_speculation(fake, p, limit, mask_token=MASK, end_tokens=ends, **options)
        for p, options in streams(batch, options)
    ]
    assert_same(result, expected, lockstep=True)
    if temperature == 0:
        for tokens, prompt in zip(result.tokens, batch, strict=True):
            assert tokens.tolist() == autoregressive(fake, prompt, limit, end_tokens=ends).tokens
    if limit:  # a finished sequence does not change, and the cache holds draft tokens only
        committed = [len(p) + sum(step.accepted for step in one.trace) for p, one in zip(batch, expected, strict=True)]
        assert model.cache.lengths.tolist() == committed
    assert max(model.head_rows, default=0) <= shape["block_size"]


@settings(max_examples=60)
@given(
    weights=st.integers(0, 3),
    adapter=st.booleans(),
    batch=prompts(13),
    limit=st.integers(1, 16),
    shape=shapes(),
    temperature=st.sampled_from([0.0, 0.3, 1.0]),
    ends=st.lists(st.integers(0, 12), max_size=2),
    seed=seeds,
    page_size=page_sizes,
)
def test_a_random_transformer(weights, adapter, batch, limit, shape, temperature, ends, seed, page_size) -> None:
    model = small_transformer(weights, adapter=adapter)
    options = {**shape, "temperature": temperature, "seed": seed}
    keeper = KeepsCache(model)
    result = generate(
        keeper, batch, METHOD, max_new_tokens=limit, end_tokens=ends, trace=True, page_size=page_size, **options
    )
    expected = [
        quadratic_self_speculation(
            Plain(model), p, limit, mask_token=12, end_tokens=ends, draft_model=drafter(model), **options
        )
        for p, options in streams(batch, options)
    ]
    assert_same(result, expected, lockstep=True)
    sequences = [prompt + tokens.tolist() for prompt, tokens in zip(batch, result.tokens, strict=True)]
    assert_cache_is_causal(model, keeper.cache, sequences)
    if shape["ensemble_weight"] == 1:
        for (prompt, own), tokens in zip(streams(batch, {"seed": seed}), result.tokens, strict=True):
            sampled = sampled_autoregressive(
                Plain(model), prompt, limit, temperature=temperature, end_tokens=ends, **own
            )
            assert tokens.tolist() == sampled.tokens


@settings(max_examples=30)
@given(seed=seeds, batch=prompts(5), limit=st.integers(1, 10), shape=shapes(), temperature=st.sampled_from([0.0, 0.8]))
def test_a_random_table(
    seed: int, batch: list[list[int]], limit: int, shape: dict[str, Any], temperature: float
) -> None:
    fake = Table(5, seed=seed % 97)
    options = {**shape, "temperature": temperature, "seed": seed}
    result = generate(Cached(fake, 5), batch, METHOD, max_new_tokens=limit, trace=True, **options)
    expected = [
        quadratic_self_speculation(fake, prompt, limit, mask_token=4, **options)
        for prompt, options in streams(batch, options)
    ]
    assert_same(result, expected, lockstep=True)


@settings(max_examples=20)
@given(batch=prompts(13), limit=st.integers(0, 12), shift=st.integers(0, 1))
def test_a_draft_of_one_token_is_autoregressive(batch: list[list[int]], limit: int, shift: int) -> None:
    model = small_transformer(3)
    greedy = generate(model, batch, max_new_tokens=limit, trace=True)
    result = generate(model, batch, METHOD, max_new_tokens=limit, trace=True, block_size=1, label_shift=shift)
    assert result.stats.trace == greedy.stats.trace
    assert result.stats.forwards == greedy.stats.forwards


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
            expected = quadratic_self_speculation(
                fake, [7, 7], limit, mask_token=MASK, end_tokens=(END,), block_size=block_size
            )
            assert_same(result, [expected], lockstep=True)


def test_accepts_what_is_drafted_well() -> None:
    fake = ScriptedTriMode(SCRIPTS["history"])
    result = generate(Cached(fake, MASK + 1), [3, 1], METHOD, max_new_tokens=33, block_size=8)
    assert result.stats.accepted == [[8, 8, 8, 8]] and result.stats.forwards == 5


def test_adapters_act_on_masks_alone() -> None:
    """The drafts differ, the tokens do not."""
    model, without = small_transformer(0, adapter=True), small_transformer(0)
    adapted, bare = (
        generate(m, [1, 2, 3], METHOD, max_new_tokens=20, trace=True, block_size=4) for m in (model, without)
    )
    assert torch.equal(adapted.tokens, bare.tokens)
    assert [step.draft for step in adapted.stats.trace[0]] != [step.draft for step in bare.stats.trace[0]]


def test_the_head_runs_on_rows_that_are_needed() -> None:
    """The draft's rows, then one group's; with an ensemble also the first mask of every group."""
    model = Cached(ScriptedTriMode(SCRIPTS["position"]), MASK + 1)
    generate(model, [[1, 2, 3, 4], [5]], METHOD, max_new_tokens=9, block_size=6)
    assert model.head_rows == [6, 6, 5, 2, 5]
    model.head_rows.clear()
    generate(model, [[1, 2, 3, 4], [5]], METHOD, max_new_tokens=3, block_size=6, ensemble_weight=0.5)
    assert model.head_rows == [2, 2, 2, 1]


# ---- errors

ERRORS: dict[str, Any] = {
    "block_size must be at least 1, got 0.": {"block_size": 0},
    "TypeError: block_size must be an int or 'auto', got float.": {"block_size": 2.0},
    "masks_per_group must be at least 4, got 3. Every draft token after the first comes from a mask.": {
        "block_size": 4,
        "masks_per_group": 3,
    },
    "TypeError: masks_per_group must be an int, got float.": {"masks_per_group": 20.0},
    "label_shift must be 0 or 1, got 2.": {"label_shift": 2},
    "in_group must be one of 'bidirectional', 'causal', got 'none'.": {"in_group": "none"},
    "ensemble_weight must be in [0, 1], got 1.5.": {"ensemble_weight": 1.5},
    "TypeError: ensemble_weight must be a number, got NoneType.": {"ensemble_weight": None},
    "ensemble_weight must be 1 with label_shift=1, got 0.5. No mask is about the verifier's position.": {
        "ensemble_weight": 0.5,
        "label_shift": 1,
    },
    "ensemble must be one of 'probability', 'logit', got 'mean'.": {"ensemble": "mean"},
    "temperature must be finite and at least 0, got -1.0.": {"temperature": -1.0},
    "TypeError: seed must be an int or a list of ints, got float.": {"seed": 1.5},
    "mask_token must be an id in 0 .. 23, got -1.": {"mask_token": -1},
}


@pytest.mark.parametrize("text, options", ERRORS.items())
@pytest.mark.parametrize("limit", [0, 4])
def test_errors(options: dict[str, Any], text: str, limit: int) -> None:
    error, text = kind_of(text)
    model = Cached(ScriptedTriMode(SCRIPTS["position"]), MASK + 1)
    with pytest.raises(error) as raised:
        generate(model, [1], METHOD, max_new_tokens=limit, **options)
    assert str(raised.value) == error_of("quadratic_self_speculation", text)


@pytest.mark.parametrize("form", ["probability", "logit"])
@pytest.mark.parametrize("weight", [0, 0.0, 0.25])
def test_a_token_that_one_side_rules_out(form: str, weight: float) -> None:
    own, diffusion = torch.tensor([[-math.inf, 1.0, 0.0]]), torch.tensor([[3.0, -math.inf, 2.0]])
    ruled_out = torch.tensor([[False, weight == 0 or form == "logit", False]])
    ruled_out[0, 0] = weight > 0 and form == "logit"
    for mixed in (_mixed(own, diffusion, weight, form), verifier(own, diffusion, weight, form)):
        assert torch.equal(mixed == -math.inf, ruled_out) and not mixed.isnan().any()
