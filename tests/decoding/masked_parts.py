"""Masked-diffusion models for tests of caches: deep ones with their plain form in parts, and scripted ones that remember."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pdkernels.decoding import DecodeResult
from pdkernels.models.transformer import Transformer, TransformerConfig
from pdkernels.reference.masked_model import LLADA, MaskedTransformerReference
from tests.decoding import masked_models
from tests.decoding.masked_models import MASK, VOCABULARY, Scripted


@cache
def deep_masked(
    seed: int, predicts: Any = "own", head_dim: int = 8, attention: Any = "bidirectional", qk_norm: bool = False
) -> Transformer:
    """Random fp64 weights, with a layer behind one that may be stale; the last id is the mask."""
    torch.manual_seed(seed)
    config = TransformerConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        layers=3,
        heads=4,
        kv_heads=2,
        head_dim=head_dim,
        intermediate_size=24,
        qkv_bias=True,
        qk_norm=qk_norm,
        tied_head=False,
        attention=attention,
        predicts=predicts,
    )
    model = Transformer(config, mask_token=MASK).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.4)
    return model.requires_grad_(False)


class NormedHeads(MaskedTransformerReference):
    """With Qwen3's norms of q's and k's heads: their weights for each layer."""

    head_norms: list[dict[str, Tensor]]

    def qkv(self, layer: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self._norm(x, "attention_norm", layer)
        q, k, v = (self._linear(x, name, layer).unflatten(-1, (-1, self.head_dim)) for name in "qkv")
        q, k = (
            y / (y.square().mean(-1, keepdim=True) + self.norm_eps).sqrt() * self.head_norms[layer][name]
            for name, y in (("q", q), ("k", k))
        )
        return self._rotate(q, positions), self._rotate(k, positions), v


@cache
def with_parts(model: Transformer) -> MaskedTransformerReference:
    """The same weights under LLaDA's names."""
    config = model.config
    sizes = [config.heads * config.head_dim, *[config.kv_heads * config.head_dim] * 2]
    weights = {f"{LLADA['embedding']}.weight": model.embedding, f"{LLADA['norm']}.weight": model.norm}
    weights[f"{LLADA['head']}.weight"] = model.embedding if model.head is None else model.head
    for index, layer in enumerate(model.layers):
        named = dict(zip("qkv", layer.qkv.split(sizes))) | dict(zip(("gate", "up"), layer.gate_up.chunk(2)))
        named |= {"attention_norm": layer.attention_norm, "out": layer.output}
        named |= {"feed_forward_norm": layer.mlp_norm, "down": layer.down}
        weights |= {f"{LLADA['layer']}{index}.{LLADA[name]}.weight": tensor for name, tensor in named.items()}
        if layer.qkv_bias is not None:
            biases = zip("qkv", layer.qkv_bias.split(sizes))
            weights |= {f"{LLADA['layer']}{index}.{LLADA[name]}.bias": tensor for name, tensor in biases}
    plain = (NormedHeads if config.qk_norm else MaskedTransformerReference)(
        weights,
        heads=config.heads,
        names="llada",
        rope_theta=config.rope_theta,
        norm_eps=config.norm_eps,
        predicts=config.predicts,
    )
    plain.head_norms = [{"q": layer.q_norm, "k": layer.k_norm} for layer in model.layers]
    return plain


class Remembering(Scripted):
    """Reads its text back from its cache, where a forward over some rows leaves the others as they are.

    Attributes:
        forwards: of each forward, first and last (exclusive) row of each sequence.
    """

    forwards: list[list[tuple[int, int]]]

    def new_cache(self, batch: int, capacity: int) -> Any:
        self.forwards = []
        return SimpleNamespace(batch=batch, capacity=capacity, texts=torch.full((batch, capacity), -1))

    def recompute(
        self,
        tokens: Tensor,
        cache: Any,
        starts: Tensor,
        *,
        visible: Tensor,
        slots: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> Tensor:
        batch, width = tokens.shape
        assert slots is None
        ends = starts + (width if counts is None else counts)
        assert bool((ends <= visible).all()) and int(visible.max()) <= cache.capacity
        self.forwards.append(list(zip(starts.tolist(), ends.tolist())))
        out = torch.full((batch, width, VOCABULARY), torch.nan, dtype=self.dtype)
        for b, (first, last) in enumerate(self.forwards[-1]):
            cache.texts[b, first:last] = tokens[b, : last - first]
            text = cache.texts[b, : visible[b]].tolist()
            assert -1 not in text, "a row was never computed"
            out[b, : last - first] = self.rows(text)[first:last]
        return out


def assert_same(result: DecodeResult, expected: list[Any], waits: bool) -> None:
    """As `masked_models.assert_same`; sequences that wait for others take more forwards together than any one of them."""
    forwards, most = result.stats.forwards, max(one.forwards for one in expected)
    if waits:
        assert most <= forwards <= sum(one.forwards for one in expected)
        result = replace(result, stats=replace(result.stats, forwards=most))
    masked_models.assert_same(result, expected)
