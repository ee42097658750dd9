"""Block diffusion: selection rules, masks and refreshes, and steps written out by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels.reference import masks
from pdkernels.reference.autoregressive import autoregressive
from pdkernels.reference.block_diffusion import (
    DenoiseStep,
    block_diffusion,
    confident,
    is_complete,
    most_confident,
    quotas,
)
from pdkernels.reference.sampling import sampled_autoregressive, uniforms
from tests.support.causal import SCRIPTS, VOCABULARY
from tests.support.tri_mode import MASK, SKILLS, Call, ScriptedTriMode, Table, TinyTransformer, never, patchy

token = st.integers(0, MASK - 1)
refreshes = st.sampled_from(["causal", "bidirectional"])


class Scored(ScriptedTriMode):
    """Confidence by position, cycling through `levels`."""

    levels = (8.0, 2.0, 4.0)  # 0.99, 0.24, 0.70

    def logits(self, call: Call) -> torch.Tensor:
        out = super().logits(call)
        for row, (token, position) in enumerate(zip(call.tokens, call.positions)):
            if token == MASK:
                out[row] *= self.levels[position % 3] / out[row].max()
        return out


@settings(max_examples=60)
@given(
    script=st.sampled_from(sorted(SCRIPTS)),
    prompt=st.lists(token, min_size=1, max_size=5),
    limit=st.integers(0, 14),
    block_size=st.integers(1, 6),
    threshold=st.sampled_from([0.0, 0.5, 0.9, 1.0, None]),
    steps=st.sampled_from([None, 1, 2, 9]),
    ends=st.lists(token, max_size=2),
)
def test_a_model_that_guesses_right_writes_what_it_would_autoregressively(
    script, prompt, limit, block_size, threshold, steps, ends
) -> None:
    model = ScriptedTriMode(SCRIPTS[script])
    greedy = autoregressive(model, prompt, limit, end_tokens=ends)
    result = block_diffusion(
        model,
        prompt,
        limit,
        mask_token=MASK,
        block_size=block_size,
        threshold=threshold,
        steps_per_block=steps if threshold is None else None,
        end_tokens=ends,
    )
    assert result.tokens == greedy.tokens


@settings(max_examples=60)
@given(
    skill=st.sampled_from(sorted(SKILLS)),
    limit=st.integers(0, 14),
    block_size=st.integers(1, 6),
    threshold=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    refresh=refreshes,
    ends=st.lists(token, max_size=2),
)
def test_what_holds_for_every_run(
    skill: str, limit: int, block_size: int, threshold: float, refresh: str, ends: list[int]
) -> None:
    model = Scored(SCRIPTS["history"], SKILLS[skill])
    run = lambda limit, ends: block_diffusion(  # noqa: E731
        model,
        [3, 1, 4],
        limit,
        mask_token=MASK,
        block_size=block_size,
        threshold=threshold,
        refresh=refresh,
        end_tokens=ends,
    )
    whole, result = run(20, ()), run(limit, ends)
    expected = whole.tokens[:limit]
    ends_at = [place for place, token in enumerate(expected) if token in ends]
    assert result.tokens == (expected[: ends_at[0] + 1] if ends_at else expected)
    blocks = -(-len(result.tokens) // block_size)
    assert result.forwards == blocks + len(
        result.trace
    )  # one for the prompt, one per refresh; the last block needs none
    assert MASK not in result.tokens
    for step in result.trace:
        assert step.committed and all(step.block[slot] == MASK != token for slot, token in step.committed.items())
    for step, following in zip(result.trace, result.trace[1:]):
        if following.block.count(MASK) < block_size - (refresh == "causal"):  # not the first step of a block
            assert following.block == [step.committed.get(slot, token) for slot, token in enumerate(step.block)]


@pytest.mark.parametrize("refresh", ["causal", "bidirectional"])
def test_the_masks_and_the_refresh(refresh: str) -> None:
    model = ScriptedTriMode(SCRIPTS["mixed"], patchy)
    result = block_diffusion(model, [3, 1, 4], 12, mask_token=MASK, block_size=4, threshold=0.9, refresh=refresh)
    text = [3, 1, 4, *result.tokens]
    refreshed = []
    for call in model.calls:
        length = len(call.tokens)
        if MASK not in call.tokens:
            refreshed.append(call.tokens)
            assert torch.equal(call.mask, masks.causal(length)[0])
            continue
        start = length - 4
        assert call.tokens[:start] == text[:start]
        prefix = start if refresh == "causal" else 3
        visible, positions = masks.block_causal(length, 4, prefix_len=prefix)
        assert torch.equal(call.mask, visible) and call.positions == positions.tolist()
        noise = torch.tensor(call.tokens) == MASK
        assert call.mask[start:].all() and not call.mask[:start, noise].any(), "the past sees a mask"
    assert refreshed == ([text[:3], text[:7], text[:11]] if refresh == "causal" else [])
    assert result.forwards == len(model.calls) + 3 * (refresh == "bidirectional")


def test_a_block_by_hand() -> None:
    """Positions 1 .. 4 after the prompt [0]; confidence 0.24, 0.70, 0.99, 0.24 by position modulo 3."""
    model = Scored(lambda history: len(history) % 10)
    result = block_diffusion(model, [0], 4, mask_token=MASK, block_size=4, threshold=0.9)
    assert result == (
        [1, 2, 3, 4],
        4,
        [
            DenoiseStep([1, MASK, MASK, MASK], {2: 3}),  # 0.99 reaches 0.9
            DenoiseStep([1, MASK, 3, MASK], {1: 2}),  # nothing does: the best one, 0.70
            DenoiseStep([1, 2, 3, MASK], {3: 4}),
        ],
    )
    assert block_diffusion(model, [0], 4, mask_token=MASK, block_size=4, threshold=0.6).trace == [
        DenoiseStep([1, MASK, MASK, MASK], {1: 2, 2: 3}),
        DenoiseStep([1, 2, 3, MASK], {3: 4}),
    ]
    assert block_diffusion(model, [0], 4, mask_token=MASK, block_size=4, threshold=None, steps_per_block=2).trace == [
        DenoiseStep([1, MASK, MASK, MASK], {1: 2, 2: 3}),
        DenoiseStep([1, 2, 3, MASK], {3: 4}),
    ]
    both = block_diffusion(model, [0], 8, mask_token=MASK, block_size=4, threshold=0.0, refresh="bidirectional")
    assert both.forwards == 4 and [step.block for step in both.trace] == [[MASK] * 4] * 2


def test_a_wrong_guess_stays_and_the_seed_of_the_next_block_is_conditioned_on_it() -> None:
    model = ScriptedTriMode(SCRIPTS["bigram"], never)
    result = block_diffusion(model, [5], 4, mask_token=MASK, block_size=2, threshold=0.9)
    seed = (3 * 5 + 1) % VOCABULARY
    wrong = (3 * seed + 2) % VOCABULARY
    next_seed = (3 * wrong + 1) % VOCABULARY
    assert result.tokens == [seed, wrong, next_seed, (3 * next_seed + 2) % VOCABULARY]


def test_where_it_stops() -> None:
    model = Scored(lambda history: len(history) % 10)
    run = lambda limit, ends: block_diffusion(  # noqa: E731
        model, [0], limit, mask_token=MASK, block_size=4, threshold=0.9, end_tokens=ends
    )
    assert run(0, ()) == ([], 0, [])
    assert run(8, (1,)) == ([1], 1, [])  # the prompt's token: nothing to denoise
    assert run(1, ()) == ([1], 1, [])
    # 3 is filled first, but 2 before it is open: it ends the block only when that is filled, and 4 never is.
    assert run(8, (3,))[:2] == ([1, 2, 3], 3)
    assert run(3, ())[:2] == ([1, 2, 3], 3)
    assert run(2, ())[:2] == ([1, 2], 3)
    assert run(5, ())[:2] == ([1, 2, 3, 4, 5], 5)  # the last one is the refresh's token
    assert run(8, (5,))[:2] == ([1, 2, 3, 4, 5], 5)


def test_blocks_of_one_are_autoregressive() -> None:
    model = TinyTransformer(6, seed=3)
    greedy = autoregressive(model, [1, 2], 6)
    result = block_diffusion(model, [1, 2], 6, mask_token=5, block_size=1)
    assert result == (greedy.tokens, greedy.forwards, [])
    sampled = sampled_autoregressive(model, [1, 2], 6, temperature=1.5, seed=8)
    assert (
        block_diffusion(model, [1, 2], 6, mask_token=5, block_size=1, temperature=1.5, seed=8).tokens == sampled.tokens
    )


def test_sampling_draws_candidates_and_ranks_them_without_the_noise() -> None:
    model = Table(5, seed=2)
    results = [
        block_diffusion(model, [1], 6, mask_token=4, block_size=6, temperature=1.0, seed=seed) for seed in range(12)
    ]
    assert results[0] == block_diffusion(model, [1], 6, mask_token=4, block_size=6, temperature=1.0, seed=0)
    assert len({tuple(result.tokens) for result in results}) > 6
    model.calls.clear()
    result = block_diffusion(model, [1], 6, mask_token=4, block_size=6, temperature=1.0, threshold=1.0, seed=5)
    for number, (call, step) in enumerate(zip(model.calls[1:], result.trace, strict=True), start=2):
        logits = model.logits(call)[1:, :4]  # neither the prompt's row nor the mask token
        noise = -torch.log(-torch.log(uniforms(5, number, torch.arange(1, 7)[:, None], torch.arange(5))))[:, :4]
        candidates = (logits + noise).argmax(-1).tolist()
        confidence = logits.softmax(-1)[range(6), candidates].tolist()
        best = max((slot for slot in range(6) if step.block[slot] == 4), key=confidence.__getitem__)
        assert step.committed == {best: candidates[best]}


@given(
    confidence=st.lists(st.sampled_from([0.1, 0.5, 0.9]), min_size=1, max_size=8),
    threshold=st.sampled_from([0.0, 0.5, 0.7, 1.0]),
    count=st.integers(1, 9),
    data=st.data(),
)
def test_selection(confidence: list[float], threshold: float, count: int, data: st.DataObject) -> None:
    slots = data.draw(st.lists(st.sampled_from(range(len(confidence))), min_size=1, unique=True).map(sorted))
    chosen = confident(confidence, slots, threshold)
    best = max(confidence[slot] for slot in slots)
    reaching = [slot for slot in slots if confidence[slot] >= threshold]
    assert chosen == (reaching or [next(slot for slot in slots if confidence[slot] == best)])
    top = most_confident(confidence, slots, count)
    assert len(top) == min(count, len(slots)) and top == sorted(top)
    for slot in set(slots) - set(top):
        assert all((confidence[kept], -kept) > (confidence[slot], -slot) for kept in top)


@given(masks_left=st.integers(1, 40), steps=st.integers(1, 40))
def test_quotas(masks_left: int, steps: int) -> None:
    spread = quotas(masks_left, steps)
    assert sum(spread) == masks_left and len(spread) == min(steps, masks_left)
    assert spread == sorted(spread, reverse=True) and spread[0] - spread[-1] <= 1 <= spread[-1]


@pytest.mark.parametrize(
    ("slots", "count", "ends", "expected"),
    [
        ([], 3, (), True),
        ([2], 3, (), False),
        ([2], 2, (), True),
        ([2], 3, (7,), True),  # an end token before the open slot
        ([0], 3, (7,), False),
        ([1], 3, (5,), True),
        ([1], 3, (7,), False),
    ],
)
def test_is_complete(slots: list[int], count: int, ends: tuple[int, ...], expected: bool) -> None:
    assert is_complete([5, 7, 9], slots, count, ends) is expected


def test_refusals() -> None:
    with pytest.raises(ValueError, match="refresh must be 'causal' or 'bidirectional', got 'never'"):
        block_diffusion(Table(4), [1], 3, mask_token=3, refresh="never")
    with pytest.raises(ValueError, match="steps_per_block must be None with a threshold, got 2"):
        block_diffusion(Table(4), [1], 3, mask_token=3, steps_per_block=2)
