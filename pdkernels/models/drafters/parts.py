"""What the folders of drafters have in common: layers of Llama and Qwen3, maps of vocabularies, and what the
speculators library says of both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pdkernels._validation import check
from pdkernels.models.architectures.config import TransformerConfig
from pdkernels.models.architectures.rope import LinearScaling, Llama3Scaling
from pdkernels.models.files.fields import OP, demand
from pdkernels.models.files.folder import Weights
from pdkernels.models.files.layout import Parts

# speculators stores what differs from the defaults of these classes of transformers.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
    },
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "intermediate_size": 22016,
    },
}


def layer_parts(body: TransformerConfig, prefix: str, source_prefix: str, width: int) -> Iterator[tuple[str, Parts]]:
    """Our parameters of a layer whose attention reads `width` numbers, and their parts."""
    hidden, inner = body.hidden_size, body.intermediate_size
    query, key_value = body.heads * body.head_dim, body.kv_heads * body.head_dim
    widths = {"q": query, "k": key_value, "v": key_value}
    yield f"{prefix}attention_norm", {f"{source_prefix}input_layernorm.weight": (hidden,)}
    yield (
        f"{prefix}qkv",
        {f"{source_prefix}self_attn.{name}_proj.weight": (size, width) for name, size in widths.items()},
    )
    if body.qkv_bias:
        yield (
            f"{prefix}qkv_bias",
            {f"{source_prefix}self_attn.{name}_proj.bias": (size,) for name, size in widths.items()},
        )
    if body.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield f"{prefix}{name}", {f"{source_prefix}self_attn.{name}.weight": (body.head_dim,)}
    yield f"{prefix}output", {f"{source_prefix}self_attn.o_proj.weight": (hidden, query)}
    if body.output_bias:
        yield f"{prefix}output_bias", {f"{source_prefix}self_attn.o_proj.bias": (hidden,)}
    yield f"{prefix}mlp_norm", {f"{source_prefix}post_attention_layernorm.weight": (hidden,)}
    yield f"{prefix}gate_up", {f"{source_prefix}mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
    yield f"{prefix}down", {f"{source_prefix}mlp.down_proj.weight": (hidden, inner)}
    if body.mlp_bias:
        yield f"{prefix}gate_up_bias", {f"{source_prefix}mlp.{name}_proj.bias": (inner,) for name in ("gate", "up")}
        yield f"{prefix}down_bias", {f"{source_prefix}mlp.down_proj.bias": (hidden,)}


def vocabulary_of(weights: Weights, size: int, target_size: int) -> Tensor:
    """The target's ids of the `size` tokens that are drafted, from their offsets in ``d2t``."""
    ids = torch.arange(size, device="cpu")
    if "d2t" not in weights.stored:
        check(
            size == target_size,
            OP,
            "drafter",
            f"hold d2t, the map of its {size} tokens to the target's {target_size}",
            "none",
        )
        return ids
    offsets = weights.whole("d2t")
    check(offsets.shape == (size,), OP, "d2t", f"have shape ({size},)", tuple(offsets.shape))
    integral = not (offsets.is_floating_point() or offsets.is_complex() or offsets.dtype == torch.bool)
    check(integral, OP, "d2t", "hold integers", offsets.dtype)
    ids = ids + offsets.long()
    low, high = (int(end) for end in ids.aminmax())
    check(low >= 0 and high < target_size, OP, "d2t", f"lead to ids in 0 .. {target_size - 1}", f"{low}..{high}")
    check(len(ids.unique()) == size, OP, "d2t", "lead to different ids", "the same one twice")
    if "t2d" in weights.stored:
        flags = weights.whole("t2d")
        check(flags.shape == (target_size,), OP, "t2d", f"have shape ({target_size},)", tuple(flags.shape))
        same = torch.equal(flags.bool().nonzero()[:, 0], ids.sort().values)
        check(same, OP, "t2d", "name the tokens of d2t", "others")
    return ids


def proposals(algorithm: str, target: str, tokens: int) -> dict[str, Any]:
    """The ``speculators_config``."""
    method = {"proposal_type": "greedy", "speculative_tokens": tokens, "accept_tolerance": 0.0, "verifier_accept_k": 1}
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [method],
        "verifier": {"name_or_path": target or None, "architectures": []},
    }


def window_config(body: TransformerConfig) -> dict[str, Any]:
    """The windows of layers as a config.json of Qwen3 has them."""
    sizes = {window.size for window in body.windows if window is not None}
    if not sizes:
        return {}
    demand(len(sizes) == 1, "windows", "have one size", sorted(sizes))
    kinds = ["full_attention" if window is None else "sliding_attention" for window in body.windows]
    return {"use_sliding_window": True, "sliding_window": sizes.pop(), "layer_types": kinds}


def layer_config(body: TransformerConfig) -> dict[str, Any]:
    """The sizes of layers as a config.json of Llama or Qwen3 has them."""
    family = "qwen3" if body.qk_norm else "llama"
    expressible = (
        body.qkv_bias == body.output_bias and not (body.mlp_bias and body.qk_norm) and body.rope_style == "half"
    )
    demand(expressible, "biases", "be those of Llama or Qwen3", body)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": body.rope_theta}
    scaling = body.rope_scaling
    if isinstance(scaling, LinearScaling):
        rope |= {"rope_type": "linear", "factor": scaling.factor}
    elif isinstance(scaling, Llama3Scaling):
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_positions,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
        }
    else:
        demand(scaling is None, "rope_scaling", "be linear, of Llama 3, or absent", scaling)
    fields: dict[str, Any] = {
        "model_type": family,
        "vocab_size": body.vocab_size,
        "hidden_size": body.hidden_size,
        "num_hidden_layers": body.layers,
        "num_attention_heads": body.heads,
        "num_key_value_heads": body.kv_heads,
        "head_dim": body.head_dim,
        "intermediate_size": body.intermediate_size,
        "hidden_act": "silu",
        "max_position_embeddings": body.max_positions,
        "rms_norm_eps": body.norm_eps,
        "attention_bias": body.qkv_bias,
        "tie_word_embeddings": False,
        "rope_parameters": rope,
    }
    return fields | ({"mlp_bias": body.mlp_bias} if family == "llama" else {})
