"""Blocks whose tokens are deleted and inserted, too: LLaDA2.2's edits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels.decoding import generate
from pdkernels.decoding.causal._rewriting import BlockEdits, EditRules
from reference.levenshtein_edits import levenshtein_edits
from tests.support.base import streams
from tests.support.block_sampler import joint_threshold_indel
from tests.support.masked import MASK, deep_masked, prompts, with_parts
from tests.support.masked_promises import assert_same_or_waiting

METHOD = "fast_dllm_v2"
DELETE, SPLIT = 4, 7  # ids that the random models often guess
TOKENS = {"delete_token": DELETE, "split_token": SPLIT}


def model_of(seed: int) -> Any:
    return deep_masked(seed, "own", 8, "causal")


def sizes(block: int) -> dict[str, int]:
    return {"block_size": block, "small_block_size": block}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2),
    batch=prompts,
    limit=st.integers(1, 11),
    block=st.integers(1, 6),
    threshold=st.sampled_from([0.1, 0.3, 0.9]),
    edit_threshold=st.sampled_from([0.0, 0.15, 0.3, 0.8]),
    max_edits=st.integers(1, 6),
    tokens=st.permutations(range(MASK)),
    ends=st.lists(st.integers(0, MASK - 1), max_size=2),
)
def test_equals_the_reference(seed, batch, limit, block, threshold, edit_threshold, max_edits, tokens, ends) -> None:
    options = {"threshold": threshold, "edit_threshold": edit_threshold, "max_edits": max_edits}
    options |= dict(zip(TOKENS, tokens))
    model = model_of(seed)
    given = {**options, **sizes(block), "end_tokens": ends, "trace": True}
    result = generate(model, batch, METHOD, max_new_tokens=limit, **given)
    plain = [
        levenshtein_edits(with_parts(model), prompt, limit, mask_token=MASK, block_size=block, **own)
        for prompt, own in streams(batch, {**options, "end_tokens": ends})
    ]
    assert_same_or_waiting(result, plain, len(batch) > 1)


@pytest.mark.parametrize(("threshold", "edit_threshold"), [(0.5, 0.0), (0.7, 0.3), (0.2, 0.1)])
def test_tokens_of_the_published_loop(threshold: float, edit_threshold: float) -> None:
    """SGLang's, over whole blocks: with deletions, insertions, states that come again, and blocks that the limit ends."""
    block, new, counts = 6, 18, torch.zeros(4)
    for number in range(60):
        model, prompt = model_of(number % 3), [1 + number % 9, 5, 2, 7, 3, number % 11][: 1 + number % 6]
        length = (len(prompt) + new) // block * block - len(prompt)
        delete, split = number % 12, (number // 3 + 5) % 12
        if delete == split:
            continue

        def forward(text: list[int], visible: torch.Tensor, model: Any = model) -> torch.Tensor:
            logits: torch.Tensor = model(torch.tensor([text]), mask=visible)[0]
            return logits

        thresholds = {"threshold": threshold, "edit_threshold": edit_threshold}
        written = joint_threshold_indel(forward, prompt, length, MASK, delete, split, block, most=5, **thresholds)
        options = {"max_new_tokens": length, "end_tokens": (), "delete_token": delete, "split_token": split}
        result = generate(model, prompt, METHOD, max_edits=5, **sizes(block), **thresholds, **options)
        assert result.tokens.tolist() == written.tokens
        counts += torch.tensor(written[1:])
    assert bool((counts > 0).all())


def edits(tokens: list[int], most: int = 9) -> BlockEdits:
    rules = EditRules(0.5, 0.2, most, MASK, DELETE, SPLIT, len(tokens))
    return BlockEdits(rules, [token == MASK for token in tokens])


def never(place: int, excluded: set[int]) -> int:
    raise AssertionError("another guess")


@pytest.mark.parametrize(
    ("tokens", "guesses", "after"),
    [
        ([1, 2, 3], [1, DELETE, 3], [1, 3, MASK]),
        ([1, 2, 3], [1, SPLIT, 3], [1, MASK, 2]),
        ([1, 2, 3], [DELETE, 2, SPLIT], [2, MASK, 3]),
        ([1, MASK, 3], [1, SPLIT, 3], [1, MASK, MASK]),
        ([1, MASK, 3], [5, DELETE, 3], [5, 3, MASK]),
        ([1, DELETE, 3], [1, DELETE, 3], [1, DELETE, 3]),  # that it stands there is no edit
    ],
)
def test_a_block_moves(tokens: list[int], guesses: list[int], after: list[int]) -> None:
    assert edits(tokens).rewritten(tokens, guesses, [0.9] * 3, never) == after


def test_masks_that_edits_make_are_filled_with_one_of_the_beginning() -> None:
    """As many of the surest as there are new ones, and one more; once none of the beginning is left, all."""
    block = edits([MASK, MASK, MASK, 1])
    after = block.rewritten([MASK, MASK, MASK, 1], [5, 6, 3, SPLIT], [0.1, 0.4, 0.3, 0.9], never)
    assert (after, block.original) == ([MASK, 6, MASK, MASK], [True, True, True, False])
    after = block.rewritten(after, [5, 6, 3, 8], [0.1, 0.9, 0.3, 0.4], never)
    assert after == [MASK, 6, 3, 8]
    block = edits([1, 2])
    assert block.rewritten([1, 2], [DELETE, 2], [0.9, 0.9], never) == [2, MASK]
    assert block.rewritten([2, MASK], [2, 3], [0.9, 0.0], never) == [2, 3]


def test_the_last_update_writes_none_of_the_tokens_that_edit() -> None:
    block, excluded = edits([1, 2], most=1), list[Any]()

    def again(place: int, tokens: set[int]) -> int:
        excluded.append((place, tokens))
        return 9

    assert block.rewritten([1, 2], [DELETE, 2], [0.9, 0.9], again) == [9, 2]
    assert excluded == [(0, {MASK, DELETE, SPLIT})] and block.finished


def test_a_state_that_comes_again_is_left_by_another_guess() -> None:
    block = edits([1, 2])
    assert block.rewritten([1, 2], [3, 2], [0.9, 0.9], never) == [3, 2]
    assert block.rewritten([3, 2], [1, 2], [0.9, 0.9], never) == [1, 2]
    assert block.rewritten([1, 2], [3, 2], [0.9, 0.9], lambda place, excluded: max(excluded - {MASK}) + 2) == [5, 2]


def test_tokens_are_told_once_their_block_is_final() -> None:
    heard = list[Any]()
    options = {"threshold": 0.1, "edit_threshold": 0.0, "end_tokens": (), "max_new_tokens": 11, **sizes(4), **TOKENS}
    result = generate(
        model_of(1), [3, 1], METHOD, on_tokens=lambda _, tokens, *rest: heard.append(list(tokens)), **options
    )
    assert [token for tokens in heard for token in tokens] == result.tokens.tolist()
    assert [len(tokens) for tokens in heard] == [2, 4, 4, 1]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"delete_token": 1}, "split_token must be given with delete_token"),
        ({"split_token": 1}, "delete_token must be given with split_token"),
        ({**TOKENS, "split_token": DELETE}, "split_token must be another token than delete_token, got 4"),
        ({**TOKENS, "split_token": MASK}, "split_token must not be the mask token"),
        ({**TOKENS, "delete_token": 99}, "delete_token must be an id below vocab_size"),
        ({**TOKENS, "delete_token": True}, "delete_token must be an id below vocab_size"),
        ({**TOKENS, "edit_threshold": None}, "delete_token must be None without edit_threshold"),
        ({**TOKENS, "repetition_penalty": 1.2}, "delete_token must be None with a bias, penalties"),
        ({**TOKENS, "speculate": 2}, "speculate must be 0 with edit_threshold"),
        ({**TOKENS, "temperature": 0.5}, "with a temperature above 0"),
    ],
)
def test_what_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        generate(model_of(0), [1, 2], METHOD, max_new_tokens=4, **{"edit_threshold": 0.5, **sizes(4), **options})
