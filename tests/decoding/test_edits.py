"""Blocks whose tokens are replaced as long as a forward disagrees with them: LLaDA2.1's joint threshold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels.decoding import generate
from pdkernels.grammar import Grammar
from pdkernels.models import load
from reference.fast_dllm_v2 import fast_dllm_v2
from tests.support.base import streams
from tests.support.block_sampler import joint_threshold
from tests.support.masked import MASK, deep_masked, prompts, with_parts
from tests.support.masked_promises import assert_same_or_waiting

METHOD = "fast_dllm_v2"


def model_of(seed: int) -> Any:
    return deep_masked(seed, "own", 8, "causal")


def sizes(block: int) -> dict[str, int]:
    return {"block_size": block, "small_block_size": block}


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2),
    batch=prompts,
    limit=st.integers(1, 11),
    block=st.integers(1, 5),
    threshold=st.sampled_from([0.1, 0.3, 0.9]),
    edit_threshold=st.sampled_from([0.0, 0.15, 0.3, 0.8]),
    max_edits=st.integers(1, 5),
    ends=st.lists(st.integers(0, MASK - 1), max_size=2),
)
def test_equals_the_reference(seed, batch, limit, block, threshold, edit_threshold, max_edits, ends) -> None:
    options = {"threshold": threshold, "edit_threshold": edit_threshold, "max_edits": max_edits, **sizes(block)}
    model = model_of(seed)
    result = generate(model, batch, METHOD, max_new_tokens=limit, end_tokens=ends, trace=True, **options)
    plain = [
        fast_dllm_v2(with_parts(model), prompt, limit, mask_token=MASK, **given)
        for prompt, given in streams(batch, {**options, "end_tokens": ends})
    ]
    assert_same_or_waiting(result, plain, len(batch) > 1)


@pytest.mark.parametrize(("threshold", "edit_threshold"), [(0.5, 0.0), (0.7, 0.5), (0.2, 0.1)])
def test_tokens_of_the_published_sampler(threshold: float, edit_threshold: float) -> None:
    """SGLang's loop over whole blocks, in which every block is filled to its end."""
    block, new, edited = 4, 12, 0
    for seed in range(6):
        model, prompt = model_of(seed % 3), [1 + seed, 5, 2, 7, 3][: 3 + seed % 3]
        length = (len(prompt) + new) // block * block - len(prompt)

        def forward(text: list[int], visible: torch.Tensor, model: Any = model) -> torch.Tensor:
            logits: torch.Tensor = model(torch.tensor([text]), mask=visible)[0]
            return logits

        thresholds = {"threshold": threshold, "edit_threshold": edit_threshold}
        written = joint_threshold(forward, prompt, length, MASK, block, most=3, **thresholds)
        options = {"max_new_tokens": length, "end_tokens": (), **sizes(block), **thresholds}
        result = generate(model, prompt, METHOD, max_edits=3, **options)
        assert result.tokens.tolist() == written.tokens
        edited += written.edits
    assert edited > 0


def test_tokens_are_told_once_they_cannot_change() -> None:
    """Block by block, also where a token of a block was replaced after all its masks were filled."""
    model, heard = model_of(1), list[Any]()
    options = {"threshold": 0.1, "edit_threshold": 0.0, "end_tokens": (), "max_new_tokens": 11, **sizes(4)}
    result = generate(model, [3, 1], METHOD, on_tokens=lambda _, tokens, *rest: heard.append(list(tokens)), **options)
    assert [token for tokens in heard for token in tokens] == result.tokens.tolist()
    assert [len(tokens) for tokens in heard] == [2, 4, 4, 1]
    assert result.tokens.tolist() != generate(model, [3, 1], METHOD, **{**options, "edit_threshold": None}).tokens.tolist()  # fmt: skip


def test_what_is_refused() -> None:
    model, given = model_of(0), {"max_new_tokens": 4, "edit_threshold": 0.5}
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (model, {"small_block_size": 2, "block_size": 4}, "with small blocks that are smaller than the block"),
        (model, {**sizes(4), "temperature": 0.5}, "with a temperature above 0"),
        (model, {**sizes(4), "logprobs": 1}, "with logprobs"),
        (model, {**sizes(4), "edit_threshold": 1.5}, "edit_threshold must "),
        (model, {**sizes(4), "max_edits": 0}, "max_edits must "),
        (load("tiny-trimode"), sizes(4), "where a row predicts the next token"),
        (load("tiny-trimode"), {**sizes(4), "grammar": Grammar.choice(["ab"])}, "where a row predicts the next token"),
    ]
    for own, options, text in cases:
        prompt: Any = [1, 2] if own is model else "x"
        with pytest.raises(ValueError, match=text):
            generate(own, prompt, METHOD, **{**given, **options})
