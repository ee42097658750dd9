"""Fast-dLLM: rules and schedules, and its caches against forwards that hold old and new rows side by side."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels.reference.fast_dllm import fast_dllm
from pdkernels.reference.llada import llada
from pdkernels.reference.masked_model import MaskedTransformerReference, random_weights
from pdkernels.reference.masked_sampling import MaskedStep
from tests.support.masked import MASK, ScriptedMasked, fixed, moody, spreading, word

MODELS = {
    "own": MaskedTransformerReference(random_weights("llada", seed=2), heads=4, names="llada"),
    "next": MaskedTransformerReference(random_weights("qwen2", seed=2), heads=4, names="qwen2"),
}
PROMPT = [3, 1, 4]


def side_by_side(
    model: MaskedTransformerReference, entry: list[int], now: list[int], start: int, stop: int
) -> torch.Tensor:
    """Logits by position of the rows start .. stop - 1 of `now`, where all other rows are those of `entry`."""
    length, fresh = len(entry), stop - start
    tokens = torch.tensor([[*entry, *now[start:stop]]])
    positions = torch.tensor([[*range(length), *range(start, stop)]])
    mask = torch.ones(length + fresh, length + fresh, dtype=torch.bool)
    mask[:length, length:] = False
    mask[length:, start:stop] = False
    logits = torch.full((length + 1, model.vocab_size), torch.nan, dtype=torch.float64)
    shift = model.predicts == "next"
    logits[start + shift : stop + shift] = model(tokens, positions, mask)[0, length:]
    logits[:, 12] = -torch.inf
    return logits


@pytest.mark.parametrize("predicts", ["own", "next"])
@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
@pytest.mark.parametrize("threshold", [0.3, 0.4])
def test_caches_are_old_rows(predicts: str, cache: str, threshold: float) -> None:
    model, size, end = MODELS[predicts], 4, 3 + 10
    result = fast_dllm(model, PROMPT, 10, mask_token=12, block_size=size, cache=cache, threshold=threshold)
    assert len(result.tokens) == 10 and result.forwards == len(result.trace)
    several = 0
    for step in result.trace:
        start = 3 + (min(p for p in range(3, end) if step.tokens[p] == 12) - 3) // size * size
        stop = min(start + size, end)
        entry = step.tokens[:start] + [12] * (end - start)
        first = step.tokens == entry
        if cache == "none" or first:
            logits = side_by_side(model, step.tokens, step.tokens, 0, end)
        else:
            logits = side_by_side(model, entry, step.tokens, start, end if cache == "prefix" else stop)
        single = first and cache != "none" and predicts == "next"
        assert step.window == (start, start + 1 if single else stop)
        masks = [p for p in range(*step.window) if step.tokens[p] == 12]
        distribution = logits[masks].softmax(-1)
        assert step.confidence == pytest.approx(dict(zip(masks, distribution.amax(-1).tolist())), rel=1e-9)
        guesses = dict(zip(masks, distribution.argmax(-1).tolist()))
        chosen = [p for p in masks if step.confidence[p] >= threshold] or [max(masks, key=lambda p: step.confidence[p])]
        assert step.committed == {p: guesses[p] for p in (masks if single else chosen)}
        several += len(step.committed) > 1
    assert several or threshold == 0.4


def test_the_caches_differ_at_all() -> None:
    model = MODELS["own"]
    run = lambda cache: fast_dllm(model, PROMPT, 12, mask_token=12, block_size=4, cache=cache, threshold=0.6)  # noqa: E731
    runs = [run(cache) for cache in ("none", "prefix", "dual")]
    confidences = [[sorted(step.confidence.values()) for step in run.trace] for run in runs]
    assert confidences[0] != confidences[1] != confidences[2] != confidences[0]
    assert all(len({run.trace[0].confidence[p] for run in runs}) == 1 for p in runs[0].trace[0].confidence)


@settings(max_examples=25)
@given(
    rule=st.sampled_from([fixed([0.3, 0.9, 0.5, 0.9, 0.7]), spreading, moody]),
    predicts=st.sampled_from(["own", "next"]),
    limit=st.integers(0, 9),
    block_size=st.integers(1, 6),
)
def test_without_a_cache_it_is_llada_with_another_rule(
    rule: object, predicts: str, limit: int, block_size: int
) -> None:
    model = ScriptedMasked(rule, predicts)  # type: ignore[arg-type]
    options = {"mask_token": MASK, "block_size": block_size}
    single = llada(model, PROMPT, limit, **options)
    assert fast_dllm(model, PROMPT, limit, cache="none", threshold=1.1, **options) == single
    assert fast_dllm(model, PROMPT, limit, cache="none", threshold=None, **options) == single
    blocks = -(-limit // block_size)
    assert fast_dllm(model, PROMPT, limit, cache="none", threshold=0.0, **options).forwards == blocks
    if blocks:
        two = {"steps": 2 * blocks, **options}
        assert fast_dllm(model, PROMPT, limit, cache="none", threshold=None, **two) == llada(
            model, PROMPT, limit, **two
        )


def test_threshold_and_factor_by_hand() -> None:
    """Confidence 0.3, 0.9, 0.5, 0.9, 0.7 from position 1 on."""
    model = ScriptedMasked(fixed([0.3, 0.9, 0.5, 0.9, 0.7]))
    committed = lambda **options: [  # noqa: E731
        sorted(step.committed) for step in fast_dllm(model, [3], 5, mask_token=MASK, cache="none", **options).trace
    ]
    assert committed(threshold=0.9 - 1e-9) == [[2, 4], [5], [3], [1]]  # two reach it, then the best one
    assert committed(threshold=0.6) == [[2, 4, 5], [3], [1]]
    # c = .9 .9 .7 .5 .3 against 1 - f / 3, 1 - f / 4, ...: with f = 1 .667 .75 fails at rank 3
    # then .7 .5 .3 fails at rank 2, then .5 .3 fails at its last rank, which does not count.
    assert committed(threshold=None, factor=1.0) == [[2, 4], [5], [1, 3]]
    assert committed(threshold=None, factor=5.0) == [[1, 2, 3, 4, 5]]
    assert committed(threshold=0.9 - 1e-9, block_size=2) == [[2], [1], [4], [3], [5]]
    assert committed(threshold=None, steps=2) == [[2, 4, 5], [1, 3]]


@pytest.mark.parametrize(
    ("steps", "committed"), [(None, [1, 1, 1, 1]), (1, [1, 3]), (2, [1, 3]), (3, [1, 2, 1]), (9, [1] * 4)]
)
def test_quotas_after_an_entry_that_commits_one_position(steps: int | None, committed: list[int]) -> None:
    result = fast_dllm(MODELS["next"], PROMPT, 4, mask_token=12, threshold=None, steps=steps)
    assert [len(step.committed) for step in result.trace] == committed
    assert list(result.trace[0].committed) == [3] and result.trace[0].window == (3, 4)


def test_end_and_trace() -> None:
    model = ScriptedMasked(fixed([0.5, 0.9, 0.4]))
    result = fast_dllm(model, [3], 6, mask_token=MASK, cache="none", block_size=3, end_tokens=(word(2),))
    assert result == (
        [word(1), word(2)],
        2,
        [
            MaskedStep([3] + [MASK] * 6, {2: word(2)}, pytest.approx({1: 0.5, 2: 0.9, 3: 0.4}), (1, 4)),
            MaskedStep([3, MASK, word(2)] + [MASK] * 4, {1: word(1)}, pytest.approx({1: 0.5, 3: 0.4}), (1, 4)),
        ],
    )


def test_refusals() -> None:
    model = ScriptedMasked(moody)
    with pytest.raises(ValueError, match="cache must be 'none', 'prefix' or 'dual', got 'both'"):
        fast_dllm(model, [1], 3, mask_token=MASK, cache="both")
    with pytest.raises(ValueError, match=r"factor must be None with a threshold, got 1.0. Pass threshold=None"):
        fast_dllm(model, [1], 3, mask_token=MASK, factor=1.0)
    with pytest.raises(
        ValueError, match=r"steps must be None with a threshold or a factor, got 3. Pass threshold=None"
    ):
        fast_dllm(model, [1], 3, mask_token=MASK, steps=3)
    with pytest.raises(ValueError, match=r"fast_dllm: steps must be a multiple of the number of blocks \(2\), got 3"):
        fast_dllm(model, [1], 4, mask_token=MASK, threshold=None, steps=3, block_size=2)
