"""A model of transformers with our attention and cache: a training step on a dual stream, and decoding.

The training step is forward, loss and backward of a small Qwen3 over the noisy and the clean half of a text; its baseline is PyTorch's
attention under the dense mask of pairs, made once. Losses and gradients are compared before anything is timed. FlexAttention has
no backward on a CPU, so there it is the baseline of the forward alone. Decoding is greedy, token by token, after a prompt; its baseline
is transformers' DynamicCache with sdpa.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import pdkernels as pd
from bench.devices import DRY_RUN
from bench.timing import compare

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from pdkernels.integrations.transformers import PdCache, register  # noqa: E402
from pdkernels.integrations.transformers._cache_names import cache_argument  # noqa: E402

V, BLOCK = 512, 32
TOKENS = 128 if DRY_RUN else 1024  # of the text; a training sequence has twice as many
PROMPTS, NEW = ((32,), 8) if DRY_RUN else ((1024, 4096), 64)
CACHES = {"contiguous": "PdCache", "paged": "PdCache in pages", "dynamic": "DynamicCache", "static": "StaticCache"}


def qwen3(implementation: str) -> Any:
    register()
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=V,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=512,
        max_position_embeddings=8192,
    )
    model = transformers.Qwen3ForCausalLM(config)
    model.set_attn_implementation(implementation)
    return model


def step(model: Any, tokens: Tensor, options: dict[str, Any]) -> Tensor:
    """The loss; gradients are in the model."""
    model.zero_grad(set_to_none=True)
    logits = model(tokens, use_cache=False, **options).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    loss.backward()
    return loss.detach()


def masked_as(implementation: str, mask: pd.masks.SegmentMask) -> dict[str, Any]:
    """The dual-stream mask in the form that an implementation reads."""
    if implementation == "pdkernels":
        return {"tile_plan": mask.plan()}
    if implementation == "sdpa":
        return {"attention_mask": torch.where(mask.dense(), 0.0, -torch.inf)[None, None]}
    rows, keys = mask.shape
    return {"attention_mask": create_block_mask(mask.mask_mod(), None, None, rows, keys, device="cpu")}


def gradients(model: Any) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def test_training_step(benchmark: Any) -> None:
    mask = pd.masks.dual_stream(TOKENS, BLOCK)
    tokens = torch.randint(0, V, (1, mask.shape[0]), generator=torch.Generator().manual_seed(1))
    common = {"position_ids": mask.positions[None]}
    ours, theirs = qwen3("pdkernels"), qwen3("sdpa")
    calls = [
        partial(step, model, tokens, common | masked_as(name, mask))
        for model, name in ((ours, "pdkernels"), (theirs, "sdpa"))
    ]
    losses = [call() for call in calls]
    torch.testing.assert_close(*losses, atol=1e-4, rtol=0)
    difference = (gradients(ours) - gradients(theirs)).norm()
    assert difference <= 1e-4 * gradients(theirs).norm()
    compare(
        benchmark,
        calls[0],
        baseline=calls[1],
        baseline_name="sdpa, dense mask",
        rounds=20,
        warmup=2,
        op="transformers",
        candidate="pdkernels",
        work=f"training step, {mask.shape[0]:,} rows",
    )


def test_forward(benchmark: Any) -> None:
    mask = pd.masks.dual_stream(TOKENS, BLOCK)
    tokens = torch.randint(0, V, (1, mask.shape[0]), generator=torch.Generator().manual_seed(1))
    calls = []
    for name in ("pdkernels", "flex_attention"):
        options = {"position_ids": mask.positions[None], "use_cache": False} | masked_as(name, mask)
        calls.append(torch.no_grad()(partial(qwen3(name).eval(), tokens, **options)))
    torch.testing.assert_close(*(call().logits for call in calls), atol=1e-4, rtol=0)
    compare(
        benchmark,
        calls[0],
        baseline=calls[1],
        baseline_name="flex_attention",
        rounds=20,
        warmup=2,
        op="transformers",
        candidate="pdkernels",
        work=f"its forward, {mask.shape[0]:,} rows",
    )


def written(model: Any, cache: str, prompt: Tensor) -> Tensor:
    options: dict[str, Any] = {"dynamic": {}, "static": {"cache_implementation": "static"}}.get(cache, {})
    if cache in ("contiguous", "paged"):
        options = {cache_argument(model.forward): PdCache(model.config, 1, prompt.shape[1] + NEW, kind=cache)}
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    text: Tensor = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), disable_compile=True, **settings, **options
    )
    return text


@pytest.mark.parametrize("length", PROMPTS)
@pytest.mark.parametrize(
    ("implementation", "cache"),
    [
        ("pdkernels", "contiguous"),
        ("pdkernels", "paged"),
        ("pdkernels", "dynamic"),
        ("pdkernels", "static"),
        ("sdpa", "static"),
    ],
)
def test_generate(benchmark: Any, implementation: str, cache: str, length: int) -> None:
    prompt = torch.randint(0, V, (1, length), generator=torch.Generator().manual_seed(2))
    call = partial(written, qwen3(implementation).eval(), cache, prompt)
    baseline = partial(written, qwen3("sdpa").eval(), "dynamic", prompt)
    assert torch.equal(call(), baseline())
    compare(
        benchmark,
        call,
        baseline=baseline,
        baseline_name="sdpa, DynamicCache",
        rounds=10,
        warmup=1,
        op="transformers",
        candidate=f"{implementation}, {CACHES[cache]}",
        work=f"{NEW} tokens after {length:,}",
    )
