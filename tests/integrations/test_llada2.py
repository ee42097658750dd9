"""LLaDA2's interface through `wrap`: the published sampler's tokens, though that runs whole texts and we run blocks on a cache."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import pdkernels as pd

pytest.importorskip("transformers", reason="needs create_bidirectional_mask", minversion="5")
from pdkernels.integrations.transformers import wrap
from tests.support.block_sampler import block_sampler
from tests.support.llada2 import END, MASK, random_llada2

BLOCK = 32
PROMPTS = [list(range(1, 1 + n)) for n in (5, 32, 45)]


@cache
def both() -> tuple[Any, Any]:
    """The model as published, and wrapped."""
    theirs = random_llada2()
    return theirs, wrap(copy.deepcopy(theirs), mask_token=MASK, predicts="own")


def published(tokens: list[int], visible: Tensor) -> Tensor:
    """A forward as in the published sampler: the whole window, under an additive mask of four dimensions."""
    mask = torch.where(visible, 0.0, -torch.inf)[None, None]
    positions = torch.arange(len(tokens))[None]
    logits: Tensor = both()[0](torch.tensor([tokens]), attention_mask=mask, position_ids=positions).logits[0]
    return logits


def test_logits_under_its_mask() -> None:
    tokens = (torch.arange(70)[None] * 7 + 3) % 59
    mask = pd.masks.block_causal(70, BLOCK)
    ours = both()[1](tokens, mask=mask.plan())
    torch.testing.assert_close(ours[0], published(tokens[0].tolist(), mask.dense()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("threshold", "steps"), [(0.95, 32), (0.2, 32), (0.95, 6)])
def test_tokens_of_the_published_sampler(threshold: float, steps: int) -> None:
    """Prompts that end inside their first block, with a block, and inside a later one, together."""
    model, options = both()[1], {"block_size": BLOCK, "small_block_size": BLOCK, "threshold": threshold, "steps": steps}
    result = pd.decoding.generate(model, PROMPTS, "fast_dllm_v2", max_new_tokens=59, end_tokens=(), **options)
    for prompt, tokens in zip(PROMPTS, result.tokens, strict=True):
        whole = (len(prompt) + 59) // BLOCK * BLOCK - len(prompt)
        plain = block_sampler(published, prompt, whole, MASK, BLOCK, steps, threshold)
        assert tokens[:whole].tolist() == plain.tokens
    if threshold < 0.5:
        assert plain.forwards < len(plain.tokens)


def test_an_end_token_and_what_else_runs_it() -> None:
    model = both()[1]
    assert model.end_tokens == (END,) and model.config.attention == "causal"
    assert [name for name in pd.decoding.available() if pd.decoding.supports(name, model)] == ["fast_dllm_v2"]
    with pytest.raises(
        TypeError, match="method must fit the model .block_causal, own_prediction., got 'jacobi', which requires causal"
    ):
        pd.decoding.generate(model, PROMPTS[0], "jacobi")


def test_attention_that_cannot_be_chosen_is_refused() -> None:
    """As in the first published code, which has a class for each implementation."""
    model = random_llada2(fixed_attention=True)
    words = "wrap: model must take the attention of its 3 layers from AttentionInterface, got Llada2ForDiffusion, which computes its own. "
    with pytest.raises(NotImplementedError, match=words + "pdkernels.models.from_callable takes any function"):
        wrap(model, mask_token=MASK, predicts="own")
    assert model.config._attn_implementation == "eager"
