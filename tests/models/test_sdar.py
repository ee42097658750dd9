"""SDAR from a folder: Qwen3's logits under a block-causal mask, and the published sampler's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pdkernels import models
from pdkernels.decoding import available, generate, supports
from pdkernels.masks import block_causal
from tests.models.test_zoo import write
from tests.support.block_sampler import block_sampler
from tests.support.checkpoints import QWEN3 as SMALL
from tests.support.checkpoints import plain_logits, random_checkpoint

MASK, END, BLOCK = 19, 20, 4
QWEN3 = {**SMALL, "head_dim": 16}
SDAR = {**QWEN3, "model_type": "sdar", "architectures": ["SDARForCausalLM"], "mask_token_id": MASK}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdar")
    write(folder, SDAR, random_checkpoint(QWEN3))
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> models.Transformer:
    loaded = models.load(folder, dtype=torch.float64)
    assert isinstance(loaded, models.Transformer)
    return loaded


def test_logits_are_those_of_qwen3_under_its_mask(model: models.Transformer, folder: Path) -> None:
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, MASK, 5]
    visible = [[i // BLOCK >= j // BLOCK for j in range(10)] for i in range(10)]
    expected = plain_logits(random_checkpoint(QWEN3), QWEN3, tokens, visible=visible)
    mask = block_causal(10, BLOCK)
    exact = model(torch.tensor([tokens]), mask=mask.dense())[0]
    torch.testing.assert_close(exact, expected, rtol=1e-9, atol=1e-9)
    planned = models.load(folder, dtype=torch.float32)(torch.tensor([tokens]), mask=mask.plan())[0]
    torch.testing.assert_close(planned.double(), expected, rtol=1e-4, atol=1e-4)


def test_what_a_folder_says_of_it(model: models.Transformer, folder: Path, tmp_path: Path) -> None:
    config = model.config
    assert (config.attention, config.predicts, config.qk_norm) == ("causal", "own", True)
    assert (model.mask_token, model.end_tokens) == (MASK, (END,))
    assert [name for name in available() if supports(name, model)] == ["fast_dllm_v2"]
    write(tmp_path, {name: value for name, value in SDAR.items() if name != "mask_token_id"}, random_checkpoint(QWEN3))
    with pytest.raises(ValueError, match=r"mask_token_id must be an id below vocab_size \(21\), got 151669"):
        models.load(tmp_path)


def forward_of(model: Any) -> Any:
    def forward(tokens: list[int], visible: Tensor) -> Tensor:
        logits: Tensor = model(torch.tensor([tokens]), mask=visible)[0]
        return logits

    return forward


PROMPTS = [[3, 1, 4], [1, 5, 9, 2], [6, 5, 3, 5, 8, 9], [7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4]]


@pytest.mark.covering
@pytest.mark.parametrize("steps", [4, 2, 3, 1])
@pytest.mark.parametrize("threshold", [0.85, 0.3])
def test_tokens_of_the_published_sampler(model: models.Transformer, threshold: float, steps: int) -> None:
    """Prompts that end inside their first block, with a block, and inside a later one; alone and in a batch."""
    options: dict[str, Any] = {"block_size": BLOCK, "small_block_size": BLOCK, "threshold": threshold, "steps": steps}
    texts, forwards = [], []
    for prompt in PROMPTS:
        new = 24 - len(prompt)
        plain = block_sampler(forward_of(model), prompt, new, MASK, BLOCK, steps, threshold)
        alone = generate(model, prompt, "fast_dllm_v2", max_new_tokens=new, end_tokens=(), **options)
        assert alone.tokens.tolist() == plain.tokens
        # The prompt's whole blocks, and a forward that stores each block but the last.
        first = len(prompt) // BLOCK
        assert alone.stats.forwards == (first > 0) + plain.forwards + 6 - first - 1
        texts.append(prompt + plain.tokens)
        forwards.append(plain.forwards)
    together = generate(model, PROMPTS, "fast_dllm_v2", max_new_tokens=13, end_tokens=(), **options)
    for prompt, text, tokens in zip(PROMPTS, texts, together.tokens, strict=True):
        whole = (len(prompt) + 13) // BLOCK * BLOCK  # a last block that the limit cuts sees fewer masks
        assert (prompt + tokens.tolist())[:whole] == text[:whole]
    if steps == 4:
        assert (min(forwards) < 13) == (threshold < 0.5)


def test_an_end_token_ends_the_text(model: models.Transformer) -> None:
    options: dict[str, Any] = {"block_size": BLOCK, "small_block_size": BLOCK, "threshold": 0.85}
    whole = generate(model, PROMPTS[2], "fast_dllm_v2", max_new_tokens=18, end_tokens=(), **options).tokens.tolist()
    end = whole[9]
    cut = generate(model, PROMPTS[2], "fast_dllm_v2", max_new_tokens=18, end_tokens=(end,), **options)
    assert cut.tokens.tolist() == whole[: whole.index(end) + 1]
