"""Prompts of a model with recurrent states that branch further back than its states go."""

from __future__ import annotations

import pytest
import torch

import pdkernels as pd
from pdkernels.engine.prefixes import Prefixes
from pdkernels.models import Hybrid, HybridConfig

NEW = 6


@pytest.fixture(scope="module")
def model() -> Hybrid:
    torch.manual_seed(0)
    config = HybridConfig(
        vocab_size=61, hidden_size=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate_size=48, max_positions=512,
        mixers=("delta", "attention"), key_heads=2, value_heads=4, key_dim=8, value_dim=8,
    )  # fmt: skip
    made = Hybrid(config).eval().requires_grad_(False)
    for parameter in made.parameters():
        if parameter.dim() >= 2:
            parameter.normal_(std=0.4)
    return made


def texts() -> list[list[int]]:
    """A common beginning, and three ends each longer than what is pending of a prompt."""
    drawn = torch.randint(0, 61, (4, 90), generator=torch.Generator().manual_seed(1)).tolist()
    return [drawn[0] + end for end in drawn[1:]]


def test_a_third_prompt_begins_where_two_have_branched(model: Hybrid) -> None:
    with pd.Engine(model, prompt_tokens_per_step=50, max_prompt_tokens=200, max_new_tokens=NEW) as engine:
        reused = []
        for text in texts():
            found = engine.submit(text, "autoregressive", max_new_tokens=NEW, end_tokens=()).result()
            alone = pd.decoding.generate(model, text, "autoregressive", max_new_tokens=NEW, end_tokens=())
            assert found.tokens.tolist() == alone.tokens.tolist()
            reused.append(engine.metrics().reused_tokens)
    assert reused == [0, 0, 90]


def kept(model: Hybrid, prefixes: Prefixes, tokens: list[int]) -> None:
    cache = model.new_cache(1, len(tokens))
    model(torch.tensor([tokens]), cache=cache)
    cache.commit_(torch.tensor([len(tokens)]))
    prefixes.keep((model,), tokens, cache)


def test_a_beginning_is_kept_beside_a_text_that_cannot_go_back_to_it(model: Hybrid) -> None:
    first, second, third = texts()
    prefixes = Prefixes(1000)
    with torch.inference_mode():
        kept(model, prefixes, first)
        assert prefixes.find((model,), [*first, 1])[1:] == (180, 0)
        assert prefixes.find((model,), second)[1:] == (0, 90)
        kept(model, prefixes, first[:90])
        assert prefixes.tokens == 270
        assert prefixes.find((model,), second)[1:] == (90, 0)
        assert prefixes.find((model,), [*first, 1])[1:] == (180, 0)
        kept(model, prefixes, first[:170])  # to which the first text goes back
        assert prefixes.tokens == 270
        kept(model, prefixes, [*first, 2, 3])  # which goes back to all of the first text, but not to its beginning
        assert prefixes.tokens == 272
