"""Prompts of models with windows that other texts go on with: in caches with other pages, and with other rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.decoding import generate
from pdkernels.models import Gemma4, Gemma4Config
from pdkernels.models.architectures.windows import Window
from tests.decoding.test_windows import model_with

NEW = 24
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "end_tokens": ()}


def drawn(count: int) -> list[int]:
    return torch.randint(39, (count,), generator=torch.Generator().manual_seed(count)).tolist()


@pytest.mark.parametrize(
    ("window", "length", "method", "options"),
    [
        (16, 170, "jacobi", {"block_size": 20}),
        (16, 170, "autoregressive", {}),
        (16, 170, "autoregressive", {"page_size": 64}),
        (128, 300, "autoregressive", {"page_size": 256}),
        (128, 300, "jacobi", {"block_size": 4, "page_size": 16}),
    ],
)
def test_several_texts_of_a_prompt(window: int, length: int, method: str, options: dict[str, Any]) -> None:
    """Whether their cache keeps the last rows or all, the prompt's is copied to it."""
    model, text = model_with((Window(window), None)), drawn(length)
    alone = generate(model, text, method, **GREEDY, **options).tokens
    several = generate(model, text, method, n=2, **GREEDY, **options).tokens
    assert [tokens.tolist() for tokens in several] == [alone.tolist()] * 2


@pytest.mark.parametrize("page_size", [8, 16, 64])
def test_requests_with_pages_of_their_own(page_size: int) -> None:
    model, text = model_with((Window(16), None)), drawn(300)
    expected = generate(model, text, **GREEDY).tokens
    with pd.Engine(model, max_prompt_tokens=400, max_new_tokens=NEW, prompt_tokens_per_step=90) as engine:
        handles = [engine.submit(text, page_size=page_size, **GREEDY) for _ in range(3)]
        assert all(handle.result(60).tokens.equal(expected) for handle in handles)
        later = engine.submit([*text, 1, 2], page_size=page_size, **GREEDY)
        assert later.result(60).tokens.equal(generate(model, [*text, 1, 2], **GREEDY).tokens) and later.reused >= 300


def test_methods_whose_caches_keep_other_rows() -> None:
    """They do not go on with each other's prompts."""
    model, text = model_with((Window(128), None)), drawn(260)
    kinds: list[tuple[str, dict[str, Any]]] = [("autoregressive", {}), ("jacobi", {"block_size": 64})] * 2
    with pd.Engine(model, max_prompt_tokens=300, max_new_tokens=NEW) as engine:
        for method, options in kinds:
            found = engine.submit(text, method, page_size=16, **GREEDY, **options).result(60).tokens
            assert found.equal(generate(model, text, method, **GREEDY, **options).tokens)


def test_equal_short_prompts_after_a_long_one() -> None:
    model, short = model_with((Window(16), None)), drawn(100)
    with pd.Engine(model, max_prompt_tokens=700, max_new_tokens=NEW) as engine:
        reused = [engine.submit(text, page_size=16, **GREEDY) for text in (drawn(600), short, short)]
        assert [handle.result(60) is not None for handle in reused] and reused[2].reused >= 96


def test_a_folder_for_layers_of_two_widths(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "layers": 4, "heads": 2, "head_dim": 16, "full_head_dim": 32}
    sizes |= {"vocab_size": 40, "kv_heads": 2, "intermediate_size": 48, "reading_layers": 0, "layer_input_size": 16}
    torch.manual_seed(0)
    config = Gemma4Config(**sizes, windows=(Window(16), None) * 2, window_rope_theta=1e4)
    model, text = Gemma4(config).requires_grad_(False).eval(), drawn(300)
    for turn in range(2):
        with pd.Engine(model, prefix_dir=tmp_path, max_prompt_tokens=400, max_new_tokens=NEW) as engine:
            handle = engine.submit(text, **GREEDY)
            assert handle.result(60).tokens.equal(generate(model, text, **GREEDY).tokens)
            assert (handle.reused >= 256) == (turn == 1)


def test_speculation_over_states_is_refused() -> None:
    model = model_with((Window(16), None))
    with pd.Engine(model, max_prompt_tokens=400, max_new_tokens=NEW) as engine:
        with pytest.raises(ValueError, match="speculate must be 0 with a model whose layers have windows, got 2"):
            engine.submit(drawn(20), "block_diffusion", block_size=4, speculate=2, **GREEDY)
