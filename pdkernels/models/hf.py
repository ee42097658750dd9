"""Checkpoints with Hugging Face names: configuration and tensors, both ways.

Qwen2, Qwen3, Llama, Mistral, Ministral3, and the diffusion models Dream, Fast-dLLM v2, SDAR and Nemotron-Labs-Diffusion.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from pdkernels.models.config import TransformerConfig
from pdkernels.models.fields import Fields, demand, read_from, shown
from pdkernels.models.layout import Layout, Parts
from pdkernels.models.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling

NEMOTRON = "nemotron_labs_diffusion"
ARCHITECTURES = ("qwen2", "qwen3", "llama", "mistral", "ministral3", "Dream", "Fast_dLLM_Qwen", "sdar", NEMOTRON)
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
MASK_TOKENS = {"Fast_dLLM_Qwen": 151665, "sdar": 151669}
"""The defaults of the published code for fields missing in a config.json."""

_HEAD = "lm_head.weight"
_REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


def from_hf_config(config: Mapping[str, Any]) -> TransformerConfig:
    """The `TransformerConfig` of a parsed `config.json`.

    Raises ValueError for fields that are missing or of the wrong kind, NotImplementedError for what the transformer does not
    compute (another architecture, activation, RoPE scaling or a sliding window), so that no checkpoint gives wrong results.

    >>> from_hf_config({"model_type": "qwen2", "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2,
    ...                 "num_attention_heads": 4, "intermediate_size": 96, "rope_theta": 1e6}).qkv_bias
    True
    """
    fields = Fields(config)
    fields.require(_REQUIRED)
    kind = fields.get("model_type")
    demand(kind in ARCHITECTURES, "model_type", f"be one of {', '.join(ARCHITECTURES)}", shown(kind))
    # Dream has Qwen2's layers, without a causal mask: row i still predicts token i + 1, which may be a mask. Fast-dLLM v2 has
    # them too, and is causal except for the block that it fills. So is SDAR, with Qwen3's layers and rows that predict their own
    # token.
    like_qwen2, like_qwen3 = kind in ("qwen2", "Dream", "Fast_dLLM_Qwen"), kind in ("qwen3", "sdar")
    if like_qwen3:  # the published classes default to 128, regardless of the other sizes
        fields.require(("head_dim",))
    activation = fields.get("hidden_act", "silu")
    demand(activation == "silu", "hidden_act", "be 'silu'", shown(activation))
    demand(not fields.flag("use_mrope", False), "use_mrope", "be false", True)
    max_positions = fields.integer("max_position_embeddings", 2048)
    windowed = fields.flag("use_sliding_window", not like_qwen2 and not like_qwen3)
    window = fields.maybe_integer("sliding_window")
    fits = not windowed or window is None or window >= max_positions
    demand(fits, "sliding_window", f"be absent or cover all {max_positions} positions", window)
    rope = fields.part("rope_parameters") or fields.part("rope_scaling")
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    biased, mlp_biased = fields.flag("attention_bias", False), fields.flag("mlp_bias", False)
    demand(not mlp_biased or kind == "llama", "mlp_bias", "be false", True)
    if kind == NEMOTRON:  # the default of its class is no token
        fields.require(("mask_token_id",))
    with read_from("config.json"):
        return TransformerConfig(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden,
            layers=fields.integer("num_hidden_layers"),
            heads=heads,
            kv_heads=fields.integer("num_key_value_heads", heads),
            head_dim=fields.integer("head_dim", max(hidden // heads, 1)),
            intermediate_size=fields.integer("intermediate_size"),
            rope_theta=rope.number("rope_theta", fields.number("rope_theta", 10000.0, above=0), above=0),
            rope_scaling=_rope_scaling(rope, max_positions),
            norm_eps=fields.number("rms_norm_eps", 1e-6, least=0),
            qkv_bias=biased or like_qwen2,
            output_bias=biased and (kind == "llama" or like_qwen3),
            mlp_bias=mlp_biased,
            qk_norm=like_qwen3,
            tied_head=fields.flag("tie_word_embeddings", False),
            attention="bidirectional" if kind == "Dream" else "causal",
            predicts="own" if kind == "sdar" else "next",
            max_positions=max_positions,
        )


def _rope_scaling(rope: Fields, max_positions: int) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    demand(kind in ROPE_TYPES, "rope_type", f"be one of {', '.join(ROPE_TYPES)}", shown(kind))
    share = rope.number("partial_rotary_factor", 1.0)
    demand(share == 1.0, "partial_rotary_factor", "be 1", share)
    beta = rope.number("llama_4_scaling_beta", 0.0, least=0)
    demand(beta == 0 or kind == "yarn", "llama_4_scaling_beta", "be 0 without rope_type 'yarn'", beta)
    if kind == "default":
        return None
    rope.require(("factor",))
    factor = rope.number("factor", above=0) if kind == "yarn" else rope.number("factor", least=1)
    if kind == "linear":
        return LinearScaling(factor)
    if kind == "llama3":
        rope.require(("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
        original = rope.integer("original_max_position_embeddings")
        return Llama3Scaling(factor, original, rope.number("low_freq_factor"), rope.number("high_freq_factor"))

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(max(factor, 1.0)) + 1.0

    one, other = rope.number("mscale", 0.0, least=0), rope.number("mscale_all_dim", 0.0, least=0)
    usual = magnitude(one) / magnitude(other) if one and other else magnitude(1.0)
    demand(rope.flag("truncate", True), "truncate", "be true", "false")
    return YarnScaling(
        factor=factor,
        original_positions=rope.integer("original_max_position_embeddings", max_positions),
        beta_fast=rope.number("beta_fast", 32.0, above=0),
        beta_slow=rope.number("beta_slow", 1.0, above=0),
        attention_factor=rope.number("attention_factor", usual, above=0),
        query_beta=beta,
    )


def layout(config: TransformerConfig, kind: str = "") -> Layout:
    """The tensors of a checkpoint with this configuration; `kind` is its model_type if that has its own names."""
    body, head = ("encoder.", "diffusion_head.weight") if kind == NEMOTRON else ("model.", _HEAD)
    parts = partial(_parts, config, body, head)
    return Layout(parts, config.layers, f"{body}embed_tokens.weight", head, config.tied_head)


def _parts(config: TransformerConfig, body: str, head: str) -> Iterator[tuple[str, Parts]]:
    hidden, inner, matrix = config.hidden_size, config.intermediate_size, (config.vocab_size, config.hidden_size)
    query, key_value = config.heads * config.head_dim, config.kv_heads * config.head_dim
    yield "embedding", {f"{body}embed_tokens.weight": matrix}
    for index in range(config.layers):
        ours, theirs = f"layers.{index}.", f"{body}layers.{index}."
        widths = {"q": query, "k": key_value, "v": key_value}
        yield f"{ours}qkv", {f"{theirs}self_attn.{name}_proj.weight": (width, hidden) for name, width in widths.items()}
        if config.qkv_bias:
            yield f"{ours}qkv_bias", {f"{theirs}self_attn.{name}_proj.bias": (width,) for name, width in widths.items()}
        if config.qk_norm:
            for name in ("q_norm", "k_norm"):
                yield f"{ours}{name}", {f"{theirs}self_attn.{name}.weight": (config.head_dim,)}
        yield f"{ours}output", {f"{theirs}self_attn.o_proj.weight": (hidden, query)}
        if config.output_bias:
            yield f"{ours}output_bias", {f"{theirs}self_attn.o_proj.bias": (hidden,)}
        yield f"{ours}gate_up", {f"{theirs}mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        yield f"{ours}down", {f"{theirs}mlp.down_proj.weight": (hidden, inner)}
        if config.mlp_bias:
            yield f"{ours}gate_up_bias", {f"{theirs}mlp.{name}_proj.bias": (inner,) for name in ("gate", "up")}
            yield f"{ours}down_bias", {f"{theirs}mlp.down_proj.bias": (hidden,)}
        yield f"{ours}attention_norm", {f"{theirs}input_layernorm.weight": (hidden,)}
        yield f"{ours}mlp_norm", {f"{theirs}post_attention_layernorm.weight": (hidden,)}
    yield "norm", {f"{body}norm.weight": (hidden,)}
    if not config.tied_head:
        yield "head", {head: matrix}


def from_hf_state_dict(state: Mapping[str, torch.Tensor], config: TransformerConfig) -> dict[str, torch.Tensor]:
    """Our state dict from one with Hugging Face names: q, k, v and gate, up become one matrix each.

    Raises ValueError for tensors that are missing, left over or of another shape, NotImplementedError for tensors that are not
    floating point. A stored `lm_head` of a tied model must equal the embedding.
    """
    return layout(config).gather(state)


def to_hf_state_dict(state: Mapping[str, torch.Tensor], config: TransformerConfig) -> dict[str, torch.Tensor]:
    """The inverse of `from_hf_state_dict`; the tensors are views of ours."""
    return layout(config).scatter(state)
