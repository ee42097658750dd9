"""Masks inside prompts are filled on request: given tokens stay, alone and in a batch, and methods agree where they must."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pdkernels.decoding import available, find, generate, sequence_seed
from tests.support.causal import FakeModel
from tests.support.masked import MASK, Scripted, deep_masked, hashed, small_masked

M = MASK
PROMPTS = [[1, M, M, 3, M, 4], [7, M], [5, 6], [2, M, 8, M]]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llada", {}),
    ("llada", {"block_size": 2}),
    ("llada", {"block_size": 3, "steps": 6, "guidance": 0.5, "temperature": 0.7}),
    ("llada", {"remasking": "random"}),
    ("dream", {}),
    ("dream", {"steps": 4, "algorithm": "maskgit_plus", "temperature": 0.7, "order_temperature": 0.3}),
    ("dream", {"steps": 5, "algorithm": "origin"}),
    ("slowfast", {"max_exploration": 3}),
    ("slowfast", {"block_size": 2, "cycle": "mean", "max_exploration": 2}),
    ("fast_dllm", {"block_size": 2}),
    ("fast_dllm", {"block_size": 3, "cache": "prefix", "page_size": 3}),
    ("fast_dllm", {"cache": "none", "threshold": None, "factor": 0.5}),
    ("dllm_cache", {"gen_interval": 2}),
    ("slowfast", {"prompt_interval": 3, "gen_interval": 2, "transfer_ratio": 0.3}),
]


@pytest.mark.covering
@pytest.mark.parametrize(("predicts", "new"), [("own", 3), ("next", 0)])
@pytest.mark.parametrize(("method", "options"), CASES, ids=range(len(CASES)))
def test_given_tokens_stay_and_masks_are_filled(method: str, options: dict[str, Any], predicts: str, new: int) -> None:
    model = deep_masked(3, predicts)
    prompts = PROMPTS if new else [prompt for prompt in PROMPTS if M in prompt]
    if method in ("llada", "fast_dllm") and options.get("steps"):
        prompts = prompts[:1]
    options = {"max_new_tokens": new, "end_tokens": (3, 4), "infill": True, **options}
    alone = [
        generate(model, prompt, find(method), seed=sequence_seed(0, number), **options)
        for number, prompt in enumerate(prompts)
    ]
    for prompt, result in zip(prompts, alone, strict=True):
        text = result.tokens.tolist()
        assert M not in text and len(prompt) <= len(text) <= len(prompt) + new
        assert all(now == before for now, before in zip(text, prompt) if before != M)
        filled = len(text) - sum(token != M for token in prompt)
        assert result.stats.tokens == filled and sum(result.stats.accepted[0]) >= filled
        more = text[len(prompt) :]
        assert len(more) == new or more[-1] in (3, 4)
    if method != "dllm_cache" and "prompt_interval" not in options:
        together = generate(model, prompts, find(method), trace=True, **options)
        assert [ids.tolist() for ids in together.tokens] == [result.tokens.tolist() for result in alone]
        assert together.stats.accepted == [result.stats.accepted[0] for result in alone]


@pytest.mark.parametrize(("method", "options"), CASES, ids=range(len(CASES)))
def test_without_masks_it_is_the_plain_method(method: str, options: dict[str, Any]) -> None:
    model, prompt = deep_masked(3), [5, 6]
    plain, filled = (
        generate(model, prompt, find(method), max_new_tokens=6, infill=on, trace=True, **options)
        for on in (False, True)
    )
    assert filled.tokens.tolist() == [*prompt, *plain.tokens.tolist()]
    assert filled.stats.accepted == plain.stats.accepted and filled.stats.forwards == plain.stats.forwards


def test_one_step_fills_with_the_predictions() -> None:
    """The most confident mask first, each given all others: by hand, on a model of the whole text."""
    model, text = small_masked(2), [M, 1, M, 9, M]
    result = generate(model, text, "llada", max_new_tokens=0, infill=True)
    while M in text:
        logits = model(torch.tensor([text]))[0]
        logits[:, M] = -torch.inf
        sure, ids = logits.softmax(-1).max(-1)
        at = max((n for n, token in enumerate(text) if token == M), key=lambda n: (float(sure[n]), -n))
        text[at] = int(ids[at])
    assert result.tokens.tolist() == text and result.stats.forwards == 3


def test_end_tokens_count_after_the_prompt_only() -> None:
    model = Scripted(hashed(4), end_tokens=tuple(range(MASK)))
    result = generate(model, [1, M, 3, M, 5], "llada", max_new_tokens=4, infill=True)
    assert len(result.tokens) == 6  # the first new token ends it


def test_without_infill_masks_in_a_prompt_stay() -> None:
    result = generate(small_masked(2), [1, M, 3], "llada", max_new_tokens=2)
    assert len(result.tokens) == 2 and result.stats.forwards == 2


def test_errors() -> None:
    model = small_masked(2)
    with pytest.raises(
        ValueError, match=r"infill must be False for method 'jacobi', got True. These can: llada, dream"
    ):
        generate(FakeModel(len), [1], "jacobi", infill=True)
    with pytest.raises(TypeError, match="infill must be a bool, got int"):
        generate(model, [1], find("llada"), infill=1)
    with pytest.raises(ValueError, match="the prompt starts with a mask, but rows of this model predict the next"):
        generate(small_masked(2, "next"), [M, 1], "llada", infill=True)
    with pytest.raises(ValueError, match="infill=True on a feature cache takes one prompt, got 2"):
        generate(deep_masked(3), [[1, M], [2, M]], "dllm_cache", infill=True)
    with pytest.raises(ValueError, match="steps must be None with infill=True"):
        generate(model, [1, M], "fast_dllm", infill=True, threshold=None, steps=6, max_new_tokens=4, block_size=2)
    assert {name for name in available() if find(name).fills_prompts} == {
        "llada",
        "dream",
        "slowfast",
        "dllm_cache",
        "fast_dllm",
    }
