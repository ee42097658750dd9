"""Linear self-speculation against autoregressive decoding, against its distribution, and against steps written out by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels.reference import masks
from pdkernels.reference.autoregressive import autoregressive
from pdkernels.reference.linear_self_speculation import LinearStep, linear_self_speculation, verdicts
from pdkernels.reference.sampling import draw, sampled_autoregressive, uniforms
from tests.harness.error_budget import assert_within_budget
from tests.support.base import follows, sequence_distribution
from tests.support.causal import SCRIPTS, from_list
from tests.support.tri_mode import (
    MASK,
    SKILLS,
    ScriptedTriMode,
    Table,
    TinyTransformer,
    always,
    assert_clean_rows_see_no_noise,
    never,
    patchy,
)

token = st.integers(0, MASK - 1)
seeds = st.integers(0, 2**64 - 1)


@given(
    script=st.sampled_from(sorted(SCRIPTS)),
    skill=st.sampled_from(sorted(SKILLS)),
    prompt=st.lists(token, min_size=1, max_size=6),
    limit=st.integers(0, 16),
    block_size=st.integers(1, 7),
    threshold=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    ends=st.lists(token, max_size=2),
    verification=st.sampled_from(["compare", "rejection"]),
)
def test_greedy_equals_autoregressive(script, skill, prompt, limit, block_size, threshold, ends, verification) -> None:
    model = ScriptedTriMode(SCRIPTS[script], SKILLS[skill])
    greedy = autoregressive(model, prompt, limit, end_tokens=ends)
    model.calls.clear()
    result = linear_self_speculation(
        model,
        prompt,
        limit,
        mask_token=MASK,
        block_size=block_size,
        end_tokens=ends,
        verification=verification,
        threshold=threshold if verification == "compare" else 0.0,
        draft_model=model,
    )
    assert result.tokens == greedy.tokens
    assert result.forwards == len(model.calls) == (limit > 0) + sum(step.forwards for step in result.trace)
    assert all(1 <= step.accepted <= len(step.draft) == len(step.predictions) <= block_size for step in result.trace)
    alone = [step for step in result.trace if len(step.draft) == 1]
    assert all(step.forwards == 1 for step in alone) and (block_size == 1 or len(alone) <= 2)
    assert all(2 <= step.forwards <= block_size for step in result.trace if step not in alone)
    assert_clean_rows_see_no_noise(model.calls, MASK, ends)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 99), prompt=st.lists(st.integers(0, 5), min_size=1, max_size=5), block_size=st.integers(1, 6)
)
def test_greedy_on_a_transformer(seed: int, prompt: list[int], block_size: int) -> None:
    """A random model even predicts the mask token occasionally, which on request is an ordinary token for the verifier."""
    model = TinyTransformer(6, seed)
    greedy = autoregressive(model, prompt, 9)
    for drafter in (None, model):
        result = linear_self_speculation(
            model, prompt, 9, mask_token=5, block_size=block_size, draft_model=drafter, allow_mask_token=True
        )
        assert result.tokens == greedy.tokens


@settings(max_examples=40)
@given(
    seed=seeds,
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    block_size=st.integers(1, 5),
    threshold=st.sampled_from([0.0, 0.5]),
    ends=st.lists(st.integers(0, 3), max_size=1),
    limit=st.integers(0, 8),
)
def test_sample_and_compare_writes_the_sampled_tokens(
    seed: int, temperature: float, block_size: int, threshold: float, ends: list[int], limit: int
) -> None:
    model = Table(5)
    sampled = sampled_autoregressive(model, [2, 0], limit, temperature=temperature, end_tokens=ends, seed=seed)
    result = linear_self_speculation(
        model,
        [2, 0],
        limit,
        mask_token=4,
        block_size=block_size,
        threshold=threshold,
        temperature=temperature,
        end_tokens=ends,
        seed=seed,
    )
    assert result.tokens == sampled.tokens


@settings(max_examples=30)
@given(
    seed=seeds,
    verification=st.sampled_from(["compare", "rejection"]),
    block_size=st.integers(1, 5),
    limit=st.integers(0, 7),
)
def test_a_short_generation_begins_a_long_one(seed: int, verification: str, block_size: int, limit: int) -> None:
    run = lambda length: linear_self_speculation(  # noqa: E731
        Table(5),
        [1],
        length,
        mask_token=4,
        block_size=block_size,
        temperature=1.0,
        verification=verification,
        seed=seed,
    )
    assert run(limit).tokens == run(8).tokens[:limit]


@pytest.fixture(scope="module")
def small() -> Table:
    return Table(4, seed=3)


def outcomes(model: Table, runs: int, temperature: float, **options: Any) -> tuple[Counter[tuple[int, ...]], float]:
    """Counts of each triple of tokens, and the draft tokens accepted per cycle."""
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = cycles = 0
    for seed in range(runs):
        result = linear_self_speculation(model, [1], 3, mask_token=3, temperature=temperature, seed=seed, **options)
        counts[tuple(result.tokens)] += 1
        accepted += sum(step.accepted for step in result.trace)
        cycles += len(result.trace)
    return counts, accepted / cycles


@pytest.mark.slow
def test_distribution_of_both_verifications(small: Table) -> None:
    expected = sequence_distribution(small, [1], 3, 1.2)
    assert len(expected) == 27 and abs(sum(expected.values()) - 1) < 1e-12
    compare, compared = outcomes(small, 400, 1.2, block_size=4, verification="compare")
    reject, tested = outcomes(small, 400, 1.2, block_size=4, verification="rejection")
    assert follows(compare, expected) and follows(reject, expected)
    assert tested > compared + 0.05  # sum of min(p, q) against sum of p q
    assert not follows(reject, sequence_distribution(small, [1], 3, 0.8))  # the test does distinguish distributions


def test_verdict_is_the_distribution_of_the_verifier() -> None:
    p, q = torch.tensor([0.5, 0.2, 0.3, 0.0]).double(), torch.tensor([0.1, 0.6, 0.2, 0.1]).double()
    places = range(3000)
    guesses = draw(q.log().expand(3000, 4), places, 1.0, 7, 3)
    results = verdicts(p.expand(3000, 4), q.expand(3000, 4), guesses, places, 7, 4)
    counts = Counter((result,) for result in results)
    assert follows(counts, {(v,): p[v].item() for v in range(3)})
    kept = [result == guess for result, guess in zip(results, guesses)]
    assert abs(sum(kept) / 3000 - 0.5) < 0.04  # sum of min(p, q)
    u = uniforms(7, 4, torch.arange(3000), torch.tensor(0))
    assert kept == (u * q[guesses] < p[guesses]).tolist()


def test_zero_accepted_and_all_accepted() -> None:
    written = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    model = ScriptedTriMode(from_list(written, 2), never)
    result = linear_self_speculation(model, [9, 8], 4, mask_token=MASK, block_size=3)
    assert result == (
        [1, 2, 3, 4],
        5,
        # The guesses are the right tokens plus one. Off its track the script predicts 0. The last two are not drafted.
        [LinearStep([1, 3, 4], [2, 0, 0], 1, 2), LinearStep([2], [3], 1, 1), LinearStep([3], [4], 1, 1)],
    )
    model = ScriptedTriMode(from_list(written, 2), always)
    result = linear_self_speculation(model, [9, 8], 9, mask_token=MASK, block_size=3)
    assert result == (
        written,
        7,
        [
            LinearStep([1, 2, 3], [2, 3, 4], 3, 2),
            LinearStep([4, 5, 6], [5, 6, 7], 3, 2),
            LinearStep([7], [8], 1, 1),
            LinearStep([8], [9], 1, 1),
        ],
    )


def test_some_accepted() -> None:
    model = ScriptedTriMode(from_list([1, 2, 3, 4, 5, 6], 2), lambda history, position: position != 5)
    result = linear_self_speculation(model, [9, 8], 6, mask_token=MASK, block_size=4)
    # Positions 3 and 4 are guessed right, 5 is not: the bonus token corrects it.
    assert result.trace[0] == LinearStep([1, 2, 3, 5], [2, 3, 4, 0], 3, 2)
    assert result.tokens[:4] == [1, 2, 3, 4] and result.trace[1] == LinearStep([4], [5], 1, 1)


@pytest.mark.parametrize(
    ("ends", "limit", "tokens", "accepted", "forwards"),
    [
        ((1,), 9, [1], [], 1),  # the prompt's own token
        ((2,), 9, [1, 2], [2], 3),  # the first draft token
        ((3,), 9, [1, 2, 3], [3], 3),  # inside the accepted part
        ((4,), 9, [1, 2, 3, 4], [4], 3),  # its last token
        ((5,), 9, [1, 2, 3, 4, 5], [4], 3),  # the bonus token
        ((6, 7), 9, [1, 2, 3, 4, 5, 6], [4, 2], 5),
        ((), 1, [1], [], 1),
        ((), 2, [1, 2], [1], 2),  # only the bonus token is requested
        ((), 3, [1, 2, 3], [1, 1], 3),
        ((), 4, [1, 2, 3, 4], [3], 3),  # inside the accepted part
        ((), 5, [1, 2, 3, 4, 5], [4], 3),
        ((), 6, [1, 2, 3, 4, 5, 6], [4, 1], 4),
        ((4,), 4, [1, 2, 3, 4], [3], 3),
    ],
)
def test_where_it_stops(
    ends: tuple[int, ...], limit: int, tokens: list[int], accepted: list[int], forwards: int
) -> None:
    model = ScriptedTriMode(from_list([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 2))
    result = linear_self_speculation(model, [9, 8], limit, mask_token=MASK, block_size=4, end_tokens=ends)
    assert result.tokens == tokens and result.forwards == forwards
    assert [step.accepted for step in result.trace] == accepted


def test_the_masks_of_both_passes() -> None:
    model = ScriptedTriMode(SCRIPTS["mixed"], patchy)
    linear_self_speculation(model, [3, 1, 4], 9, mask_token=MASK, block_size=4, draft_model=model)
    prompt, *passes = model.calls
    assert prompt.tokens == [3, 1, 4] and torch.equal(prompt.mask, masks.causal(3)[0])
    for draft, verify in zip(passes[::2], passes[1::2]):
        start = draft.tokens.index(MASK) - 1
        assert draft.tokens[start + 1 :] == [MASK] * 3 and draft.tokens[: start + 1] == verify.tokens[: start + 1]
        visible, positions = masks.block_causal(start + 4, 4, prefix_len=start)
        assert torch.equal(draft.mask, visible) and draft.positions == positions.tolist()
        assert draft.mask[start:].all()
        assert draft.adapted is not None and draft.adapted.tolist() == [False] * start + [True] * 4
        visible, positions = masks.causal(len(verify.tokens))
        assert torch.equal(verify.mask, visible) and verify.positions == positions.tolist() and verify.adapted is None


def test_a_threshold_drafts_again() -> None:
    model = ScriptedTriMode(SCRIPTS["history"], patchy)
    once = linear_self_speculation(model, [3, 1], 30, mask_token=MASK, block_size=6)
    model.calls.clear()
    often = linear_self_speculation(model, [3, 1], 30, mask_token=MASK, block_size=6, threshold=0.9, draft_model=model)
    assert often.tokens == once.tokens and often.forwards > once.forwards
    drafts = [call.tokens for call in model.calls if call.adapted is not None]
    for before, after in zip(drafts, drafts[1:]):
        if len(before) == len(after) and before[:-5] == after[:-5]:  # the same cycle
            assert all(new == old for old, new in zip(before, after) if old != MASK)
            assert after.count(MASK) < before.count(MASK)


def test_adapters_act_on_the_block_alone() -> None:
    """Recomputing everything with `adapted` is a draft pass over a cache that the plain model filled."""
    model = TinyTransformer(40, seed=2)
    prefix, block = torch.arange(9), torch.tensor([3, 39, 39, 39])
    _, past = model.run(prefix, torch.arange(9), masks.causal(9)[0], None)
    adapted = torch.ones(4, dtype=torch.bool)
    cached, _ = model.run(block, torch.arange(9, 13), torch.ones(4, 13, dtype=torch.bool), adapted, past)
    mask, positions = masks.block_causal(13, 4, prefix_len=9)
    whole = model(torch.cat([prefix, block])[None], positions[None], mask, positions >= 9)[0, 9:]
    plain = model(torch.cat([prefix, block])[None], positions[None], mask)[0, 9:]
    assert_within_budget(cached.float(), whole, whole.float(), name="draft pass")
    with pytest.raises(AssertionError):
        assert_within_budget(plain.float(), whole, whole.float(), name="draft pass without adapters")


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"verification must be 'compare' or 'rejection', got 'hope'"):
        linear_self_speculation(Table(4), [1], 3, mask_token=3, verification="hope")
    with pytest.raises(ValueError, match=r"threshold must be 0 with verification='rejection', got 0.5"):
        linear_self_speculation(Table(4), [1], 3, mask_token=3, verification="rejection", threshold=0.5)
