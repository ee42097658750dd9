"""What a masked sampler may be told besides its schedule: a threshold and hooks of Dream's, Dream's SlowFast, tokens taken back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels.decoding import generate
from pdkernels.reference.dream import dream
from pdkernels.reference.llada import llada
from tests.support.base import Plain, streams
from tests.support.masked import MASK, prompts, small_masked
from tests.support.masked_promises import assert_same

BATCH = [[3, 1, 4], [5, MASK, 2, 6], [1]]
ends_ = st.lists(st.integers(0, MASK - 1), max_size=2)


def references(sampler: Any, model: Any, batch: list[list[int]], limit: int, **options: Any) -> list[Any]:
    return [sampler(Plain(model), prompt, limit, mask_token=MASK, **own) for prompt, own in streams(batch, options)]


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2),
    batch=prompts,
    limit=st.integers(1, 10),
    options=st.fixed_dictionaries(
        {
            "threshold": st.sampled_from([0.3, 0.0, 0.6, 1.0]),
            "steps": st.sampled_from([None, 1, 3]),
            "temperature": st.sampled_from([0.0, 0.7]),
        }
    ),
    ends=ends_,
)
def test_dream_by_a_threshold(seed: int, batch: Any, limit: int, options: Any, ends: list[int]) -> None:
    options = {"algorithm": "confidence_threshold", "end_tokens": ends, **options}
    result = generate(small_masked(seed), batch, "dream", max_new_tokens=limit, trace=True, **options)
    assert_same(result, references(dream, small_masked(seed), batch, limit, **options))


def test_hooks_of_dream() -> None:
    model, options = small_masked(1), {"max_new_tokens": 6, "steps": 4}
    free = [tokens.tolist() for tokens in generate(model, BATCH, "dream", **options).tokens]
    banned = free[0][0]
    seen: list[int] = []

    def without(step: int, texts: torch.Tensor, positions: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        seen.append(step)
        assert texts.shape == (3, 10) and logits.shape[:2] == positions.shape
        return logits.index_fill(-1, torch.tensor([banned]), -torch.inf)

    hooked = generate(model, BATCH, "dream", logits_hook=without, **options)
    assert seen == [0, 1, 2, 3] and all(banned not in tokens.tolist() for tokens in hooked.tokens)
    same = generate(model, BATCH, "dream", tokens_hook=lambda step, texts: texts, **options)
    assert [tokens.tolist() for tokens in same.tokens] == free

    def masked_again(step: int, texts: torch.Tensor) -> torch.Tensor:
        """The first token is taken back once, and prompts cannot be changed."""
        texts[:, :] = torch.where(texts == banned, MASK if step == 1 else banned, texts)
        texts[:, 0] = 0
        return texts

    heard: list[int] = []
    listen = {"on_tokens": lambda sequence, ids, accepted: heard.append(len(ids))}
    told = generate(model, BATCH, "dream", tokens_hook=masked_again, **options, **listen)
    assert [len(tokens) for tokens in told.tokens] == [6] * 3 and heard == [6] * 3
    for (prompt, own), tokens in zip(streams(BATCH, options), told.tokens, strict=True):
        assert MASK not in tokens.tolist()
        assert torch.equal(generate(model, prompt, "dream", tokens_hook=masked_again, **own).tokens, tokens)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2),
    batch=prompts,
    limit=st.integers(1, 10),
    block_size=st.sampled_from([None, 3]),
    per_block=st.sampled_from([None, 1, 2]),
    revise=st.sampled_from([0.2, 0.5, 1.0]),
    temperature=st.sampled_from([0.0, 0.8]),
    ends=ends_,
)
def test_tokens_that_are_taken_back(seed, batch, limit, block_size, per_block, revise, temperature, ends) -> None:
    steps = None if per_block is None else per_block * -(-limit // (block_size or limit))
    options = {"block_size": block_size, "steps": steps, "revise": revise, "temperature": temperature}
    options["end_tokens"] = ends
    result = generate(small_masked(seed), batch, "llada", max_new_tokens=limit, **options)
    expected = references(llada, small_masked(seed), batch, limit, **options)
    assert [tokens.tolist() for tokens in result.tokens] == [one.tokens for one in expected]
    assert result.stats.forwards == max(one.forwards for one in expected)


def test_what_may_be_taken_back_is_not_told() -> None:
    heard: list[list[int]] = [[] for _ in BATCH]
    options = {"max_new_tokens": 10, "steps": 10, "block_size": 5, "revise": 0.9, "end_tokens": ()}
    texts = generate(
        small_masked(1), BATCH, "llada", on_tokens=lambda number, ids, _: heard[number].extend(ids), **options
    )
    assert all(map(len, heard))
    assert heard == [ids.tolist()[-len(told) :] for ids, told in zip(texts.tokens, heard, strict=True)]


def test_taking_back_changes_texts() -> None:
    model, options = small_masked(1), {"max_new_tokens": 10, "steps": 5}
    final = generate(model, BATCH, "llada", **options)
    revised = generate(model, BATCH, "llada", revise=0.9, **options)
    assert revised.stats.forwards > final.stats.forwards
    with pytest.raises(ValueError, match="revise must be 0"):
        generate(model, BATCH, "llada", revise=0.5, remasking="random", **options)
    with pytest.raises(ValueError, match="tokens_hook"):
        generate(model, BATCH, "dream", algorithm="origin", tokens_hook=lambda step, texts: texts, **options)
