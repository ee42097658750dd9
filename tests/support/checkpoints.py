"""Qwen2, Qwen3, Llama and Ministral3 written independently from the published maths: plain, uncached, fp64, HF names."""

from __future__ import annotations

import math
from typing import Any

import torch

State = dict[str, torch.Tensor]


def random_checkpoint(fields: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float64) -> State:
    """Random tensors with the names and shapes of a checkpoint with this config.json."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.3).to(dtype)

    hidden, inner, vocab = fields["hidden_size"], fields["intermediate_size"], fields["vocab_size"]
    heads, kv_heads, head_dim = _heads(fields)
    state = {"model.embed_tokens.weight": matrix(vocab, hidden), "model.norm.weight": 1 + matrix(hidden)}
    for layer in range(fields["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        for part, width in (("q", heads * head_dim), ("k", kv_heads * head_dim), ("v", kv_heads * head_dim)):
            state[f"{name}self_attn.{part}_proj.weight"] = matrix(width, hidden)
            if fields["model_type"] == "qwen2" or fields.get("attention_bias"):
                state[f"{name}self_attn.{part}_proj.bias"] = matrix(width)
            if fields["model_type"] in ("qwen3", "qwen3_moe") and part != "v":
                state[f"{name}self_attn.{part}_norm.weight"] = 1 + matrix(head_dim)
        state[f"{name}self_attn.o_proj.weight"] = matrix(hidden, heads * head_dim)
        experts = fields.get("num_experts", 0)
        if experts:
            state[f"{name}mlp.gate.weight"] = matrix(experts, hidden)
        for module in [f"experts.{i}." for i in range(experts)] or [""]:
            width = fields["moe_intermediate_size"] if experts else inner
            state[f"{name}mlp.{module}gate_proj.weight"] = matrix(width, hidden)
            state[f"{name}mlp.{module}up_proj.weight"] = matrix(width, hidden)
            state[f"{name}mlp.{module}down_proj.weight"] = matrix(hidden, width)
        if fields.get("attention_bias"):
            state[f"{name}self_attn.o_proj.bias"] = matrix(hidden)
        if fields.get("mlp_bias"):
            for part, width in (("gate", inner), ("up", inner), ("down", hidden)):
                state[f"{name}mlp.{part}_proj.bias"] = matrix(width)
        state[f"{name}input_layernorm.weight"] = 1 + matrix(hidden)
        state[f"{name}post_attention_layernorm.weight"] = 1 + matrix(hidden)
    if not fields.get("tie_word_embeddings", False):
        state["lm_head.weight"] = matrix(vocab, hidden)
    return state


def _heads(fields: dict[str, Any]) -> tuple[int, int, int]:
    heads = fields["num_attention_heads"]
    return heads, fields["num_key_value_heads"], fields.get("head_dim", fields["hidden_size"] // heads)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rope_of(fields: dict[str, Any]) -> dict[str, Any]:
    """The RoPE fields of a config.json besides its base, under either of the two published names; the older one wins."""
    return fields.get("rope_scaling") or fields.get("rope_parameters") or {}


def frequency(pair: int, head_dim: int, fields: dict[str, Any]) -> float:
    """Radians per position of a pair of components."""
    rope = rope_of(fields)
    theta = rope.get("rope_theta", fields.get("rope_theta", 10000.0))
    plain = theta ** (-2 * pair / head_dim)
    if rope.get("rope_type", "default") == "default":
        return plain
    if rope["rope_type"] == "linear":
        return plain / rope["factor"]
    original = rope["original_max_position_embeddings"]
    if rope["rope_type"] == "llama3":
        wavelength = 2 * math.pi / plain
        if wavelength < original / rope["high_freq_factor"]:
            return plain
        if wavelength > original / rope["low_freq_factor"]:
            return plain / rope["factor"]
        smooth = (original / wavelength - rope["low_freq_factor"]) / (
            rope["high_freq_factor"] - rope["low_freq_factor"]
        )
        return (1 - smooth) * plain / rope["factor"] + smooth * plain

    def boundary(turns: float) -> float:
        return head_dim * math.log(original / (2 * math.pi * turns)) / (2 * math.log(theta))

    low, high = boundary(rope["beta_fast"]), boundary(rope["beta_slow"])
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = min(1.0, max(0.0, (pair - low) / (high - low if high != low else 0.001)))
    return ramp * plain / rope["factor"] + (1 - ramp) * plain


def magnitude(fields: dict[str, Any]) -> float:
    """Factor of rotated q and of rotated k."""
    rope = rope_of(fields)
    if rope.get("rope_type") != "yarn":
        return 1.0
    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]
    one, other = ((0.1 * rope.get(name, 0) * math.log(rope["factor"]) + 1) for name in ("mscale", "mscale_all_dim"))
    return one / other if rope.get("mscale") and rope.get("mscale_all_dim") else 0.1 * math.log(rope["factor"]) + 1


def rotate_pairs(
    x: torch.Tensor, positions: list[int], fields: dict[str, Any], interleaved: bool = False
) -> torch.Tensor:
    """Rotates x (length, head_dim), pair by pair."""
    out = torch.empty_like(x)
    head_dim = x.shape[-1]
    for pair in range(head_dim // 2):
        first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + head_dim // 2)
        for row, position in enumerate(positions):
            angle = position * frequency(pair, head_dim, fields)
            a, b = x[row, first], x[row, second]
            out[row, first] = a * math.cos(angle) - b * math.sin(angle)
            out[row, second] = a * math.sin(angle) + b * math.cos(angle)
    return out


def plain_logits(
    state: State,
    fields: dict[str, Any],
    tokens: list[int],
    *,
    interleaved: bool = False,
    positions: list[int] | None = None,
    visible: list[list[bool]] | None = None,
) -> torch.Tensor:
    """Logits (length, vocab) in fp64."""
    state = {name: tensor.double() for name, tensor in state.items()}
    length = len(tokens)
    positions = positions if positions is not None else list(range(length))
    heads, kv_heads, head_dim = _heads(fields)
    eps = float(fields.get("rms_norm_eps", 1e-6))
    rope = rope_of(fields)
    x = state["model.embed_tokens.weight"][tokens]
    for layer in range(fields["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        h = _norm(x, state[f"{name}input_layernorm.weight"], eps)
        q, k, v = (
            h @ state[f"{name}self_attn.{part}_proj.weight"].T + state.get(f"{name}self_attn.{part}_proj.bias", 0.0)
            for part in "qkv"
        )
        outputs = []
        for head in range(heads):
            kv = head // (heads // kv_heads)
            q_head, k_head = q[:, head * head_dim :][:, :head_dim], k[:, kv * head_dim :][:, :head_dim]
            if fields["model_type"] == "qwen3":
                q_head = _norm(q_head, state[f"{name}self_attn.q_norm.weight"], eps)
                k_head = _norm(k_head, state[f"{name}self_attn.k_norm.weight"], eps)
            q_head = rotate_pairs(q_head, positions, fields, interleaved)
            k_head = rotate_pairs(k_head, positions, fields, interleaved)
            v_head = v[:, kv * head_dim :][:, :head_dim]
            beta = rope.get("llama_4_scaling_beta", 0.0)
            if beta:
                original = rope["original_max_position_embeddings"]
                scales = [[1 + beta * math.log(1 + p // original)] for p in positions]
                q_head = q_head * torch.tensor(scales, dtype=torch.float64)
            scores = q_head @ k_head.T / math.sqrt(head_dim) * magnitude(fields) ** 2
            for i in range(length):
                for j in range(length):
                    if not (visible[i][j] if visible is not None else j <= i):
                        scores[i, j] = -math.inf
            outputs.append(torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True)) @ v_head)
        x = x + torch.cat(outputs, -1) @ state[f"{name}self_attn.o_proj.weight"].T
        x = x + state.get(f"{name}self_attn.o_proj.bias", 0.0)
        h = _norm(x, state[f"{name}post_attention_layernorm.weight"], eps)
        gate = h @ state[f"{name}mlp.gate_proj.weight"].T + state.get(f"{name}mlp.gate_proj.bias", 0.0)
        up = h @ state[f"{name}mlp.up_proj.weight"].T + state.get(f"{name}mlp.up_proj.bias", 0.0)
        x = x + (gate / (1 + torch.exp(-gate)) * up) @ state[f"{name}mlp.down_proj.weight"].T
        x = x + state.get(f"{name}mlp.down_proj.bias", 0.0)
    x = _norm(x, state["model.norm.weight"], eps)
    return x @ state.get("lm_head.weight", state["model.embed_tokens.weight"]).T


QWEN2 = {
    "model_type": "qwen2",
    "vocab_size": 23,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 20,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 64,
    "eos_token_id": 5,
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 19,
    "hidden_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 12,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
}
MINISTRAL3 = {
    "model_type": "ministral3",
    "vocab_size": 17,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 24,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
    "dtype": "bfloat16",
    "eos_token_id": [2, 11],
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "beta_fast": 1.0,
        "beta_slow": 0.1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 21,
    "hidden_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "max_position_embeddings": 64,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 2,
    "rope_scaling": None,
    "eos_token_id": 20,
}
# Of its eight pairs one keeps its frequency, two are in between, five are slowed down.
LLAMA31 = {
    **LLAMA,
    "head_dim": 16,
    "rope_theta": 100.0,
    "rope_scaling": dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
    ),
}
LINEAR = {**LLAMA, "rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.5}}
BIASED = {**LLAMA, "attention_bias": True, "mlp_bias": True}
CHECKPOINTS = {
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "llama": LLAMA,
    "llama 3.1": LLAMA31,
    "linear": LINEAR,
    "biased": BIASED,
    "ministral3": MINISTRAL3,
}
