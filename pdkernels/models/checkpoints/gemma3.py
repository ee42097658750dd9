"""Gemma 3, its text model: configuration and tensors of published folders, and of GGUF files.

Layers have norms before and after attention and the MLP, whose weights are stored less 1, norms over each head of q and
k, and the gate of the MLP is a GELU. Five of six layers have a window, and a rotation of their own. Embeddings are
multiplied by the root of their size.

Sources: transformers, models/gemma3; github.com/ggml-org/llama.cpp, src/models/gemma3.cpp and convert_hf_to_gguf.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from pdkernels._validation import check
from pdkernels.models.architectures.config import TransformerConfig
from pdkernels.models.architectures.rope import LinearScaling, RopeScaling
from pdkernels.models.architectures.windows import MAX_LAYERS, Window
from pdkernels.models.checkpoints.hf_windows import KINDS, SLIDING, layer_kinds, windows_of
from pdkernels.models.files.fields import OP, Fields, demand, read_from, shown
from pdkernels.models.files.gguf_keys import Keys
from pdkernels.models.files.layout import Layout, Parts

MODEL_TYPE = "gemma3_text"
GGUF = "gemma3"
_27B = 62
"""Its layers: its queries are scaled by another size than that of a head, which GGUF files do not say."""
EVERY = 6
"""Each layer of this number sees the whole text, where config.json names no layers."""
LOCAL_THETA = 10000.0
_NORMS = ("norm", "attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm", "q_norm", "k_norm")


def from_gemma3_config(config: Mapping[str, Any]) -> TransformerConfig:
    """The `TransformerConfig` of a parsed `config.json`, of transformers 4 or 5. Raises as `from_hf_config`.

    >>> sizes = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 7, "num_attention_heads": 4, "intermediate_size": 96}
    >>> config = from_gemma3_config({"model_type": "gemma3_text", **sizes, "num_key_value_heads": 1, "sliding_window": 16})
    >>> [None if window is None else window.size for window in config.windows], config.embedding_scale
    ([16, 16, 16, 16, 16, None, 16], 8.0)
    """
    fields = Fields(config)
    fields.require(("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"))
    for name in ("hidden_activation", "hidden_act"):
        activation = fields.get(name, "gelu_pytorch_tanh")
        demand(activation in ("gelu_pytorch_tanh", None), name, "be 'gelu_pytorch_tanh'", shown(activation))
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "per_layer_config"):
        demand(not fields.get(name), name, "be absent", shown(fields.get(name)))
    for name in ("attention_bias", "use_bidirectional_attention"):
        demand(not fields.flag(name, False, null=False), name, "be false", True)
    layers, hidden = fields.integer("num_hidden_layers"), fields.integer("hidden_size")
    pattern = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", EVERY))
    kinds = layer_kinds(fields, layers, pattern)
    theta, scaling, local = _rotations(fields)
    with read_from("config.json"):
        return TransformerConfig(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden,
            layers=layers,
            heads=fields.integer("num_attention_heads"),
            kv_heads=fields.integer("num_key_value_heads", 4),
            head_dim=fields.integer("head_dim", 256),
            intermediate_size=fields.integer("intermediate_size"),
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=fields.number("rms_norm_eps", 1e-6, minimum=0),
            tied_head=fields.flag("tie_word_embeddings", True),
            max_positions=fields.integer("max_position_embeddings", 131072),
            windows=windows_of(fields, kinds, 4096),
            window_rope_theta=local if SLIDING in kinds else None,
            query_scale=fields.number("query_pre_attn_scalar", 256, above=0) ** -0.5,
            **settings(hidden),
        )


def from_keys(fields: Keys, vocab_size: int, scaling: RopeScaling | None, tied: bool) -> TransformerConfig:
    """The `TransformerConfig` of a GGUF file's keys."""
    hidden, heads, layers = (
        fields.integer(name) for name in ("embedding_length", "attention.head_count", "block_count")
    )
    check(layers <= MAX_LAYERS, OP, f"{fields.where}.block_count", f"be at most {MAX_LAYERS}", layers)
    head_dim, window = fields.integer("attention.key_length"), fields.integer("attention.sliding_window", minimum=1)
    for name in ("attention.value_length", "rope.dimension_count"):
        width = fields.integer(name)
        check(width == head_dim, OP, f"{fields.where}.{name}", f"be the size of a head ({head_dim})", width)
    return TransformerConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=fields.integer("attention.head_count_kv"),
        head_dim=head_dim,
        intermediate_size=fields.integer("feed_forward_length"),
        rope_theta=fields.number("rope.freq_base", above=0),
        rope_scaling=scaling,
        norm_eps=fields.number("attention.layer_norm_rms_epsilon", minimum=0),
        tied_head=tied,
        max_positions=fields.integer("context_length"),
        windows=tuple(None if (layer + 1) % EVERY == 0 else Window(window) for layer in range(layers)),
        window_rope_theta=fields.number("rope.freq_base_swa", above=0),
        query_scale=(hidden // heads) ** -0.5 if layers == _27B else None,
        **settings(hidden),
    )


def settings(hidden: int) -> dict[str, Any]:
    """What all models of the family have in common."""
    return {"qk_norm": True, "outer_norms": True, "activation": "gelu", "embedding_scale": hidden**0.5}


def _rotations(fields: Fields) -> tuple[float, LinearScaling | None, float]:
    """The base and the scaling of layers that see the whole text, and the base of the others."""
    rules = fields.part("rope_parameters")
    if any(kind in rules.values for kind in KINDS):
        local, full = (rules.part(kind) for kind in KINDS)
        demand(
            local.get("rope_type", "default") == "default", "rope_type", "be 'default' in layers with a window", "other"
        )
        return (
            full.number("rope_theta", 1e6, above=0),
            _linear(full),
            local.number("rope_theta", LOCAL_THETA, above=0),
        )
    theta = rules.number("rope_theta", fields.number("rope_theta", 1e6, above=0), above=0)
    local_theta = fields.number("rope_local_base_freq", LOCAL_THETA, above=0)
    return theta, _linear(fields.part("rope_scaling") if fields.get("rope_scaling") else rules), local_theta


def _linear(rope: Fields) -> LinearScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    demand(kind in ("default", "linear"), "rope_type", "be default or linear", shown(kind))
    return None if kind == "default" else LinearScaling(rope.number("factor", minimum=1))


def layout(config: TransformerConfig) -> Layout:
    """The tensors of a folder with this configuration."""

    def parts() -> Iterator[tuple[str, Parts]]:
        return _parts(config, _PUBLISHED)

    return Layout(parts, config.layers, "model.embed_tokens.weight", "lm_head.weight", config.tied_head, turned=_plain)


def gguf_layout(config: TransformerConfig, file: str) -> Layout:
    """The tensors of a GGUF file, whose writer has added 1 to the weights of norms."""

    def parts() -> Iterator[tuple[str, Parts]]:
        return _parts(config, _GGUF)

    return Layout(parts, config.layers, "token_embd.weight", "output.weight", config.tied_head, file)


def _plain(name: str, rows: torch.Tensor) -> torch.Tensor:
    return rows + 1 if name.rpartition(".")[2] in _NORMS else rows


# Of the outside, of a layer's beginning, and of its tensors.
_PUBLISHED = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "layer": "model.layers.{}.",
    **{name: f"self_attn.{name}_proj.weight" for name in ("q", "k", "v")},
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "output": "self_attn.o_proj.weight",
    **{name: f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    "attention_norm": "input_layernorm.weight",
    "attention_out_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_out_norm": "post_feedforward_layernorm.weight",
}
_GGUF = {
    "embedding": "token_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
    "layer": "blk.{}.",
    **{name: f"attn_{name}.weight" for name in ("q", "k", "v", "q_norm", "k_norm", "output")},
    **{name: f"ffn_{name}.weight" for name in ("gate", "up", "down")},
    "attention_norm": "attn_norm.weight",
    "attention_out_norm": "post_attention_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "mlp_out_norm": "post_ffw_norm.weight",
}


def _parts(config: TransformerConfig, names: Mapping[str, str]) -> Iterator[tuple[str, Parts]]:
    hidden, inner, matrix = config.hidden_size, config.intermediate_size, (config.vocab_size, config.hidden_size)
    query, key_value = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, Parts] = {
        "qkv": {"q": (query, hidden), "k": (key_value, hidden), "v": (key_value, hidden)},
        "q_norm": {"q_norm": (config.head_dim,)},
        "k_norm": {"k_norm": (config.head_dim,)},
        "output": {"output": (hidden, query)},
        "gate_up": {"gate": (inner, hidden), "up": (inner, hidden)},
        "down": {"down": (hidden, inner)},
    }
    shapes |= {name: {name: (hidden,)} for name in _NORMS[1:5]}
    yield "embedding", {names["embedding"]: matrix}
    for index in range(config.layers):
        prefix = names["layer"].format(index)
        for parameter, sources in shapes.items():
            yield (
                f"layers.{index}.{parameter}",
                {f"{prefix}{names[source]}": shape for source, shape in sources.items()},
            )
    yield "norm", {names["norm"]: (hidden,)}
    if not config.tied_head:
        yield "head", {names["head"]: matrix}
