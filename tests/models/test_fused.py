"""Inference, with one op each between the products, against the plain PyTorch of a forward that records gradients."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from pdkernels import masks
from pdkernels.models import Transformer, TransformerConfig, YarnScaling
from tests.harness.error_budget import assert_within_budget

CONFIG = TransformerConfig(
    vocab_size=50, hidden_size=48, layers=3, heads=4, kv_heads=2, head_dim=16, intermediate_size=40
)
VARIANTS = {
    "plain": CONFIG,
    "biases, norms of heads": dataclasses.replace(CONFIG, qkv_bias=True, qk_norm=True),
    "neighbours are pairs": dataclasses.replace(CONFIG, rope_style="interleaved"),
    "stretched": dataclasses.replace(CONFIG, rope_scaling=YarnScaling(4.0, 8, 1.0, 0.1, 1.2, 0.1), max_positions=64),
}


def a_model(config: TransformerConfig) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5 + (parameter.dim() == 1))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_inference_is_as_good_as_what_training_sees(variant: str, dtype: torch.dtype) -> None:
    model = a_model(VARIANTS[variant])
    tokens = torch.randint(0, 50, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        exact = model.to(dtype).double()(tokens)
    model.to(dtype)
    recorded = model(tokens)
    assert recorded.requires_grad
    with torch.no_grad():
        assert_within_budget(model(tokens), exact, recorded.detach(), name="uncached")


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_at_their_own_positions_on_a_cache(variant: str, kind: str) -> None:
    """A tree after sequences of unequal length: the positions of a branch continue from its depth."""
    model, tree = a_model(VARIANTS[variant]), masks.tree([-1, 0, 0, 1, 2])
    depths = torch.tensor([0, 1, 1, 2, 2])
    tokens = torch.randint(0, 50, (2, 14), generator=torch.Generator().manual_seed(2))
    lengths = [9, 4]
    cache = model.new_cache(2, 32, kind=kind)
    if kind == "paged":
        cache.reserve_(torch.tensor([32, 32]))
    model(tokens[:, :9], cache=cache, counts=torch.tensor(lengths))
    cache.commit_(torch.tensor(lengths))
    found = model(tokens[:, 9:], cache=cache, positions=depths, mask=tree.plan(16, 16))
    for b, length in enumerate(lengths):
        whole = torch.cat([tokens[b : b + 1, :length], tokens[b : b + 1, 9:]], 1)
        seen = torch.ones(length + 5, length + 5, dtype=torch.bool).tril()
        seen[length:, length:] = tree.dense()
        positions = torch.cat([torch.arange(length), length + depths])
        expected = model(whole, mask=seen, positions=positions)[:, length:]
        torch.testing.assert_close(found[b : b + 1], expected.detach(), rtol=1e-4, atol=1e-4)


def calls(model: Transformer, tokens: torch.Tensor) -> Counter[str]:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        model(tokens)
    return Counter({event.key: event.count for event in profiled.key_averages()})


def test_one_op_each_between_the_products() -> None:
    model, tokens = a_model(CONFIG), torch.zeros(1, 6, dtype=torch.int64)
    with torch.no_grad():
        model(tokens)
        ops = calls(model, tokens)
    # Two norms per layer and the last one; the sums are part of them, except the last.
    assert ops["pdkernels::add_rms_norm"] == 2 * 3 + 1
    assert ops["pdkernels::silu_and_mul"] == ops["pdkernels::apply_rope_"] == 3
    assert ops["aten::add"] == 1
    assert not any(ops[f"aten::{name}"] for name in ("rms_norm", "mul", "silu", "addcmul", "cat"))
    assert calls(model, tokens)["pdkernels::add_rms_norm"] == 0


def test_autocast_takes_plain_pytorch() -> None:
    model, tokens = a_model(CONFIG), torch.randint(0, 50, (1, 12), generator=torch.Generator().manual_seed(3))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = model(tokens)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), model(tokens).detach(), rtol=0.05, atol=0.1)
