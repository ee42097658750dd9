"""gpt-oss, whose attention has sinks, under `attn_implementation="pdkernels"`: as under transformers' own attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.20")
from transformers import AutoModelForCausalLM

from pdkernels.integrations.transformers import PdCache, register
from scripts import architectures
from tests.support.transformers_names import CACHE


def models(**options: Any) -> tuple[Any, Any]:
    """The same random model twice: with their attention, and with ours."""
    register()
    theirs = architectures.build("gpt_oss").eval()
    for layer in theirs.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    theirs.set_attn_implementation("eager")
    ours = AutoModelForCausalLM.from_config(theirs.config, attn_implementation="pdkernels").eval()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def test_whole_texts_padding_and_gradients() -> None:
    theirs, ours = models()
    tokens = torch.randint(3, 120, (2, 40), generator=torch.Generator().manual_seed(1))
    padded = torch.ones_like(tokens)
    padded[0, :9] = 0
    for mask in (None, padded):
        expected, found = (model(tokens, attention_mask=mask).logits for model in (theirs, ours))
        kept = slice(None) if mask is None else mask.bool()
        torch.testing.assert_close(found[kept], expected[kept], rtol=2e-4, atol=2e-4)
    for model in (theirs, ours):
        model(tokens).logits.square().mean().backward()
    for name in ("sinks", "q_proj.weight"):
        expected, found = (model.model.layers[1].self_attn.get_parameter(name).grad for model in (theirs, ours))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def test_generation_on_our_cache() -> None:
    theirs, ours = models()
    tokens = torch.randint(3, 120, (1, 12), generator=torch.Generator().manual_seed(2))
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = theirs.generate(tokens, **options)
    cache = PdCache(ours.config, 1, 64)
    assert torch.equal(ours.generate(tokens, **{CACHE: cache}, **options), expected)
    assert torch.equal(ours.generate(tokens, **options), expected)


def test_a_mask_of_the_callers_own() -> None:
    theirs, ours = models()
    tokens = torch.randint(3, 120, (1, 10), generator=torch.Generator().manual_seed(3))
    seen = torch.ones(10, 10, dtype=torch.bool).tril()
    seen[7, 2] = False
    mask = torch.zeros(1, 1, 10, 10).masked_fill_(~seen, torch.finfo(torch.float32).min)
    masks = {"full_attention": mask, "sliding_attention": mask}
    expected, found = (model(tokens, attention_mask=masks).logits for model in (theirs, ours))
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)
