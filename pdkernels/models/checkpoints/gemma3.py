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
from pdkernels.models.checkpoints.gguf_windows import check_windows_unscaled
from pdkernels.models.checkpoints.gguf_windows import windows_of as windows_of_keys
from pdkernels.models.checkpoints.hf_windows import (
    KINDS,
    SLIDING,
    layer_kinds,
    require_alike,
    require_causal,
    windows_of,
)
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
    require(fields)
    pattern = fields.integer("sliding_window_pattern", EVERY)
    kinds = layer_kinds(fields, fields.integer("num_hidden_layers"), pattern)
    theta, scaling, local = _rotations(fields)
    with read_from("config.json"):
        return TransformerConfig(
            **sizes_of(fields),
            rope_theta=theta,
            rope_scaling=scaling,
            max_positions=fields.integer("max_position_embeddings", 131072),
            windows=windows_of(fields, kinds, 4096),
            window_rope_theta=local if SLIDING in kinds else None,
            qk_norm=True,
            **caps_of(fields),
        )


def require(fields: Fields) -> None:
    """Refuses a config.json of the family that lacks a size, or asks for what its models do not compute."""
    fields.require(("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"))
    for name in ("hidden_activation", "hidden_act"):
        activation = fields.get(name, "gelu_pytorch_tanh")
        demand(activation in ("gelu_pytorch_tanh", None), name, "be 'gelu_pytorch_tanh'", shown(activation))
    require_alike(fields)
    require_causal(fields)
    for name in ("attention_bias", "use_bidirectional_attention"):
        demand(not fields.flag(name, False, null=False), name, "be false", True)


def sizes_of(fields: Fields) -> dict[str, Any]:
    """What config.json says in the same way for all models of the family."""
    hidden = fields.integer("hidden_size")
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden,
        "layers": fields.integer("num_hidden_layers"),
        "heads": fields.integer("num_attention_heads"),
        "kv_heads": fields.integer("num_key_value_heads", 4),
        "head_dim": fields.integer("head_dim", 256),
        "intermediate_size": fields.integer("intermediate_size"),
        "norm_eps": fields.number("rms_norm_eps", 1e-6, minimum=0),
        "tied_head": fields.flag("tie_word_embeddings", True),
        "query_scale": fields.number("query_pre_attn_scalar", 256, above=0) ** -0.5,
        **_settings(hidden),
    }


def caps_of(fields: Fields, attention: float | None = None, logits: float | None = None) -> dict[str, Any]:
    """The caps of scores and of logits; null is none. Without a default cap of scores, transformers reads the field and
    computes none."""
    defaults = {"attn_logit_softcapping": attention, "final_logit_softcapping": logits}
    stated = fields.get("attn_logit_softcapping")
    demand(attention is not None or stated is None, "attn_logit_softcapping", "be null", shown(stated))
    caps = [
        None if fields.get(name, default) is None else fields.number(name, default, above=0)
        for name, default in defaults.items()
    ]
    return dict(zip(("attention_softcap", "logits_softcap"), caps, strict=True))


def from_keys(fields: Keys, vocab_size: int, scaling: RopeScaling | None, tied: bool) -> TransformerConfig:
    """The `TransformerConfig` of a GGUF file's keys."""
    # Without a window in the file, no layer has one, as in Rnj-1.
    size = fields.integer("attention.sliding_window", minimum=0)
    windows = windows_of_keys(fields, size, EVERY) if size else ()
    if any(windows):
        check_windows_unscaled(fields, scaling)
    cap = fields.number("final_logit_softcapping", minimum=0)
    return TransformerConfig(
        **sizes_of_keys(fields, vocab_size, tied, _27B),
        rope_theta=fields.number("rope.freq_base", above=0),
        rope_scaling=scaling,
        windows=windows,
        window_rope_theta=fields.number("rope.freq_base_swa", above=0) if any(windows) else None,
        qk_norm=True,
        logits_softcap=cap or None,
    )


def sizes_of_keys(fields: Keys, vocab_size: int, tied: bool, largest: int) -> dict[str, Any]:
    """What a GGUF file says in the same way for all models of the family; one of `largest` layers scales its queries by
    the share of a head in the hidden size."""
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim, layers = fields.integer("attention.key_length"), fields.integer("block_count")
    for name in ("attention.value_length", "rope.dimension_count"):
        width = fields.integer(name)
        check(width == head_dim, OP, f"{fields.where}.{name}", f"be the size of a head ({head_dim})", width)
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": fields.integer("attention.head_count_kv"),
        "head_dim": head_dim,
        "intermediate_size": fields.integer("feed_forward_length"),
        "norm_eps": fields.number("attention.layer_norm_rms_epsilon", minimum=0),
        "tied_head": tied,
        "max_positions": fields.integer("context_length"),
        "query_scale": (hidden // heads) ** -0.5 if layers == largest else None,
        **_settings(hidden),
    }


def _settings(hidden: int) -> dict[str, Any]:
    return {"outer_norms": True, "activation": "gelu", "embedding_scale": hidden**0.5}


def _rotations(fields: Fields) -> tuple[float, LinearScaling | None, float]:
    """The base and the scaling of layers that see the whole text, and the base of the others."""
    rules = fields.part("rope_parameters")
    field = next((name for name in rules.values if name not in KINDS), None)
    demand(field is None, f"rope_parameters: {shown(field)}", "be inside the rule of a kind of layers", "outside")
    local, full = (rules.part(kind) for kind in KINDS)
    check_named(local)
    kind = local.get("rope_type", "default")
    demand(kind == "default", "rope_type", "be 'default' in layers with a window", shown(kind))
    # A rule outside adds to that of full layers, as its class in transformers reads it.
    outer = fields.part("rope_scaling")
    full = Fields({**full.given, **outer.given}, (full if full.given else outer).where)
    theta = _base(full, fields, "rope_theta", 1e6)
    return theta, _linear(full, fields), _base(local, fields, "rope_local_base_freq", LOCAL_THETA)


def _base(rule: Fields, fields: Fields, outside: str, default: float) -> float:
    """Of a rule, or of all rules where it has none."""
    has_own = rule.get("rope_theta") is not None
    return rule.number("rope_theta", above=0) if has_own else fields.number(outside, default, above=0)


def check_named(rope: Fields) -> None:
    """Refuses `type` alone: releases of transformers differ in whether they read it."""
    is_named = "rope_type" in rope.values or "type" not in rope.values
    label = f"{rope.where.removeprefix('config.json: ')}: type"
    demand(is_named, label, "be called rope_type", shown(rope.get("type")))


def share_of(rule: Fields, fields: Fields) -> float:
    """The share of a head that turns by a rule, or by all rules where it has none."""
    name = "partial_rotary_factor"
    return rule.number(name, fields.number(name, 1.0, minimum=0, null=1.0), minimum=0)


def _linear(rope: Fields, fields: Fields) -> LinearScaling | None:
    check_named(rope)
    kind = rope.get("rope_type", "default")
    demand(kind in ("default", "linear"), "rope_type", "be default or linear", shown(kind))
    if kind == "default":
        return None
    share = share_of(rope, fields)
    demand(share == 1.0, "partial_rotary_factor", "be 1", share)
    return LinearScaling(rope.number("factor", minimum=1))


def layout(config: TransformerConfig) -> Layout:
    """The tensors of a folder with this configuration."""

    def parts() -> Iterator[tuple[str, Parts]]:
        return _parts(config, _PUBLISHED)

    return Layout(parts, config.layers, "model.embed_tokens.weight", "lm_head.weight", config.tied_head, shifted=_plain)


def gguf_layout(config: TransformerConfig, file: str) -> Layout:
    """The tensors of a GGUF file, whose writer has added 1 to the weights of norms."""

    def parts() -> Iterator[tuple[str, Parts]]:
        return _parts(config, _GGUF)

    return Layout(parts, config.layers, "token_embd.weight", "output.weight", config.tied_head, file)


def _plain(name: str, rows: torch.Tensor) -> torch.Tensor:
    """Norms plus 1, which 16 bits would round before a model's dtype is known."""
    return rows.to(torch.promote_types(rows.dtype, torch.float32)) + 1 if name.rpartition(".")[2] in _NORMS else rows


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
        **({name: {name: (config.head_dim,)} for name in ("q_norm", "k_norm")} if config.qk_norm else {}),
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
