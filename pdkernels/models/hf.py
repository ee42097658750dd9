"""Checkpoints with Hugging Face names: configuration and tensors, both ways.

Qwen2, Qwen3, Llama, Mistral, Ministral3, and the diffusion models Dream and Fast-dLLM v2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from pdkernels._validation import check, message
from pdkernels.models.config import TransformerConfig
from pdkernels.models.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling

ARCHITECTURES = ("qwen2", "qwen3", "llama", "mistral", "ministral3", "Dream", "Fast_dLLM_Qwen")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
MASK_TOKENS = {"Fast_dLLM_Qwen": 151665}
"""Where a config.json does not name one: what the published code takes."""

_OP = "models.load"
_REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


def from_hf_config(config: Mapping[str, Any]) -> TransformerConfig:
    """The `TransformerConfig` of a parsed `config.json`.

    Raises NotImplementedError for what the transformer does not compute (another architecture, activation, RoPE scaling
    or a sliding window), so that no checkpoint is run wrongly.

    >>> from_hf_config({"model_type": "qwen2", "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2,
    ...                 "num_attention_heads": 4, "intermediate_size": 96, "rope_theta": 1e6}).qkv_bias
    True
    """
    require(config, _REQUIRED)
    kind = config.get("model_type")
    demand(kind in ARCHITECTURES, "model_type", f"be one of {', '.join(ARCHITECTURES)}", repr(kind))
    # Dream has Qwen2's layers, without a causal mask: row i still predicts token i + 1, whose place may be a mask. Fast-dLLM v2 has
    # them too, and is causal but for the block that it fills.
    like_qwen2 = kind in ("qwen2", "Dream", "Fast_dLLM_Qwen")
    if kind == "qwen3":  # the published class takes 128 where none is named, whatever the other sizes
        require(config, ("head_dim",))
    activation = config.get("hidden_act", "silu")
    demand(activation == "silu", "hidden_act", "be 'silu'", repr(activation))
    max_positions = config.get("max_position_embeddings", 2048)
    demand(not config.get("use_mrope"), "use_mrope", "be false", config.get("use_mrope"))
    windowed = config.get("use_sliding_window", not like_qwen2 and kind != "qwen3")
    window = config.get("sliding_window") if windowed else None
    demand(
        window is None or window >= max_positions,
        "sliding_window",
        f"be absent or cover all {max_positions} positions",
        window,
    )
    rope_field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(rope_field) or {}
    return TransformerConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        intermediate_size=config["intermediate_size"],
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        rope_scaling=_rope_scaling(rope, f"config.json: {rope_field}", max_positions),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        qkv_bias=like_qwen2 or bool(config.get("attention_bias", False)),
        qk_norm=kind == "qwen3",
        tied_head=config.get("tie_word_embeddings", False),
        attention="bidirectional" if kind == "Dream" else "causal",
        max_positions=max_positions,
    )


def require(config: Mapping[str, Any], fields: Iterable[str], where: str = "config.json") -> None:
    """ValueError for a config.json, or a part of it, without one of these fields."""
    for name in fields:
        check(name in config, _OP, where, f"hold {name!r}", f"only {', '.join(sorted(config))}")


def demand(condition: bool, field: str, expectation: str, actual: object) -> None:
    """NotImplementedError for what a config.json asks for and our models do not compute."""
    if not condition:
        raise NotImplementedError(message(_OP, f"config.json: {field}", expectation, actual))


def _rope_scaling(rope: Mapping[str, Any], where: str, max_positions: int) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    demand(kind in ROPE_TYPES, "rope_type", f"be one of {', '.join(ROPE_TYPES)}", repr(kind))
    share = rope.get("partial_rotary_factor", 1.0)
    demand(share == 1.0, "partial_rotary_factor", "be 1", share)
    beta = float(rope.get("llama_4_scaling_beta") or 0.0)
    demand(beta == 0 or kind == "yarn", "llama_4_scaling_beta", "be 0 without rope_type 'yarn'", beta)
    if kind == "default":
        return None
    require(rope, ("factor",), where)
    factor = float(rope["factor"])
    if kind == "linear":
        return LinearScaling(factor)
    if kind == "llama3":
        fields = ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
        require(rope, fields, where)
        original, low, high = (rope[name] for name in fields)
        return Llama3Scaling(factor, original, float(low), float(high))

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0

    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        one, other = rope.get("mscale"), rope.get("mscale_all_dim")
        attention_factor = magnitude(one) / magnitude(other) if one and other else magnitude(1.0)
    demand(rope.get("truncate", True), "truncate", "be true", "false")
    return YarnScaling(
        factor=factor,
        original_positions=rope.get("original_max_position_embeddings") or max_positions,
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        attention_factor=float(attention_factor),
        query_beta=beta,
    )


def _names(config: TransformerConfig) -> Iterator[tuple[str, list[str]]]:
    """Each of our parameters, and the tensors that stand one after the other in it."""
    yield "embedding", ["model.embed_tokens.weight"]
    for index in range(config.layers):
        ours, theirs = f"layers.{index}.", f"model.layers.{index}."
        yield f"{ours}qkv", [f"{theirs}self_attn.{name}_proj.weight" for name in "qkv"]
        if config.qkv_bias:
            yield f"{ours}qkv_bias", [f"{theirs}self_attn.{name}_proj.bias" for name in "qkv"]
        if config.qk_norm:
            for name in ("q_norm", "k_norm"):
                yield f"{ours}{name}", [f"{theirs}self_attn.{name}.weight"]
        yield f"{ours}output", [f"{theirs}self_attn.o_proj.weight"]
        yield f"{ours}gate_up", [f"{theirs}mlp.{name}_proj.weight" for name in ("gate", "up")]
        yield f"{ours}down", [f"{theirs}mlp.down_proj.weight"]
        yield f"{ours}attention_norm", [f"{theirs}input_layernorm.weight"]
        yield f"{ours}mlp_norm", [f"{theirs}post_attention_layernorm.weight"]
    yield "norm", ["model.norm.weight"]
    if not config.tied_head:
        yield "head", ["lm_head.weight"]


def from_hf_state_dict(state: Mapping[str, torch.Tensor], config: TransformerConfig) -> dict[str, torch.Tensor]:
    """Our state dict from one with Hugging Face names: q, k, v and gate, up become one matrix each.

    Raises ValueError if tensors are missing or left over. A stored `lm_head` of a tied model must equal the embedding.
    """
    return gather(state, _names(config), tied=config.tied_head)


def gather(
    state: Mapping[str, torch.Tensor],
    names: Iterable[tuple[str, list[str]]],
    *,
    tied: bool,
    head: str = "lm_head.weight",
) -> dict[str, torch.Tensor]:
    """Our parameters, each with the published `names` of the tensors that stand one after the other in it."""
    # Some checkpoints store tables of RoPE, which follow from the configuration.
    left = {name: tensor for name, tensor in state.items() if not name.endswith(("rotary_emb.inv_freq", "freqs_cis"))}
    pairs = list(names)
    missing = [name for _, parts in pairs for name in parts if name not in left]
    check(not missing, _OP, "checkpoint", "hold every tensor of its config.json", f"none called {_some(missing)}")
    ours = {}
    for name, parts in pairs:
        tensors = [left.pop(part) for part in parts]
        ours[name] = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    if tied and head in left:
        same = torch.equal(left.pop(head), ours["embedding"])
        check(
            same,
            _OP,
            head,
            "equal the embedding of a tied model",
            "another matrix",
            "It is config.json that says whether they are tied.",
        )
    check(not left, _OP, "checkpoint", "hold only tensors of its config.json", f"also {_some(sorted(left))}")
    return ours


def to_hf_state_dict(state: Mapping[str, torch.Tensor], config: TransformerConfig) -> dict[str, torch.Tensor]:
    """The inverse of `from_hf_state_dict`; the tensors are views of ours."""
    return scatter(state, _names(config), config)


def scatter(
    state: Mapping[str, torch.Tensor], names: Iterable[tuple[str, list[str]]], config: TransformerConfig
) -> dict[str, torch.Tensor]:
    """The inverse of `gather`, for the parameters of a `Transformer`: views with the published names."""
    query, key_value = config.heads * config.head_dim, config.kv_heads * config.head_dim
    sizes = {3: [query, key_value, key_value], 2: [config.intermediate_size] * 2}
    theirs: dict[str, torch.Tensor] = {}
    for name, parts in names:
        tensors = [state[name]] if len(parts) == 1 else state[name].split(sizes[len(parts)])
        theirs.update(zip(parts, tensors, strict=True))
    return theirs


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
