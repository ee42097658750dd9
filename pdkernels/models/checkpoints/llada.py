"""Checkpoints of LLaDA, with its own names: configuration and tensors, both ways.

Source: the configuration and modelling files of huggingface.co/GSAI-ML/LLaDA-8B-Base.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from pdkernels._validation import check
from pdkernels.models.architectures.config import TransformerConfig
from pdkernels.models.checkpoints.hf_rope import require_no_rule
from pdkernels.models.checkpoints.hf_windows import require_alike
from pdkernels.models.files.fields import OP, Fields, demand, read_from, shown
from pdkernels.models.files.layout import Layout, Parts

MODEL_TYPE = "llada"

_REQUIRED = ("vocab_size", "d_model", "n_layers", "n_heads")
# The names of these fields in transformers, which LLaDA's class also accepts.
_OTHER_NAMES = {"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}
_HEAD = "model.transformer.ff_out.weight"
# If a config.json omits these, LLaDA's class uses other values.
_NAMED = {"block_type": "llama", "layer_norm_type": "rms", "activation_type": "silu", "rope": True}
_COMPUTED = {
    "include_bias": False,
    "bias_for_layer_norm": False,
    "attention_layer_norm": False,
    "input_emb_norm": False,
    "scale_logits": False,
    "alibi": False,
    "clip_qkv": None,
}
"""Fields of a config.json with their only supported values, which are also the defaults."""


def from_llada_config(config: Mapping[str, Any]) -> TransformerConfig:
    """The `TransformerConfig` of a parsed `config.json`: bidirectional, and row i predicts token i.

    The vocabulary has as many ids as the embedding has rows (`embedding_size`): those past the tokenizer's last id take
    part in every softmax, as in the published samplers.

    Raises ValueError for fields that are missing, of the wrong kind or do not fit, NotImplementedError for what the
    transformer does not compute (other blocks, norms or activations, biases outside q, k and v, scaled logits), so that
    no checkpoint gives wrong results.

    >>> config = from_llada_config({"model_type": "llada", "vocab_size": 100, "embedding_size": 128, "d_model": 64,
    ...                             "n_layers": 2, "n_heads": 4, "mlp_hidden_size": 96, "block_type": "llama",
    ...                             "layer_norm_type": "rms", "activation_type": "silu", "rope": True, "weight_tying": False})
    >>> config.vocab_size, config.kv_heads, config.attention, config.predicts
    (128, 4, 'bidirectional', 'own')
    """
    fields = Fields(config)
    fields.require(_REQUIRED)
    require_alike(fields)
    for name, published in _OTHER_NAMES.items():
        same = fields.values.get(name, fields.get(published)) == fields.get(published)
        check(same, OP, f"config.json: {name}", f"equal {published}, which means the same", shown(fields.get(name)))
    for field, computed in _NAMED.items():
        actual = fields.get(field)
        demand(actual == computed, field, f"be {computed!r}", shown(actual))
    for field, computed in _COMPUTED.items():
        actual = fields.get(field, computed)
        demand(actual == computed or (actual is None and not computed), field, f"be {computed!r}", shown(actual))
    hidden, heads = fields.integer("d_model"), fields.integer("n_heads")
    check(hidden % heads == 0, OP, "config.json: n_heads", f"divide d_model ({hidden})", heads)
    one_for_all = fields.flag("multi_query_attention", False, null=False)
    theta = fields.number("rope_theta", 10000.0, above=0)
    require_no_rule(fields, theta)
    with read_from("config.json"):
        return TransformerConfig(
            vocab_size=fields.maybe_integer("embedding_size") or fields.integer("vocab_size"),
            hidden_size=hidden,
            layers=fields.integer("n_layers"),
            heads=heads,
            kv_heads=fields.maybe_integer("n_kv_heads") or (1 if one_for_all else heads),
            head_dim=hidden // heads,
            intermediate_size=fields.maybe_integer("mlp_hidden_size") or fields.integer("mlp_ratio", 4) * hidden,
            rope_theta=theta,
            norm_eps=fields.number("rms_norm_eps", 1e-5, minimum=0),
            qkv_bias=fields.flag("include_qkv_bias", False, null=False),
            tied_head=fields.flag("weight_tying", True),
            attention="bidirectional",
            predicts="own",
            max_positions=fields.integer("max_sequence_length", 1024),
        )


def layout(config: TransformerConfig) -> Layout:
    """The tensors of a checkpoint with this configuration."""
    return Layout(partial(_parts, config), config.layers, "model.transformer.wte.weight", _HEAD, config.tied_head)


def _parts(config: TransformerConfig) -> Iterator[tuple[str, Parts]]:
    hidden, inner, matrix = config.hidden_size, config.intermediate_size, (config.vocab_size, config.hidden_size)
    query, key_value = config.heads * config.head_dim, config.kv_heads * config.head_dim
    yield "embedding", {"model.transformer.wte.weight": matrix}
    for index in range(config.layers):
        prefix, source_prefix = f"layers.{index}.", f"model.transformer.blocks.{index}."
        widths = {"q": query, "k": key_value, "v": key_value}
        yield f"{prefix}qkv", {f"{source_prefix}{name}_proj.weight": (width, hidden) for name, width in widths.items()}
        if config.qkv_bias:
            yield f"{prefix}qkv_bias", {f"{source_prefix}{name}_proj.bias": (width,) for name, width in widths.items()}
        yield f"{prefix}output", {f"{source_prefix}attn_out.weight": (hidden, query)}
        yield f"{prefix}gate_up", {f"{source_prefix}{name}_proj.weight": (inner, hidden) for name in ("ff", "up")}
        yield f"{prefix}down", {f"{source_prefix}ff_out.weight": (hidden, inner)}
        yield f"{prefix}attention_norm", {f"{source_prefix}attn_norm.weight": (hidden,)}
        yield f"{prefix}mlp_norm", {f"{source_prefix}ff_norm.weight": (hidden,)}
    yield "norm", {"model.transformer.ln_f.weight": (hidden,)}
    if not config.tied_head:
        yield "head", {_HEAD: matrix}


def from_llada_state_dict(state: Mapping[str, torch.Tensor], config: TransformerConfig) -> dict[str, torch.Tensor]:
    """Our state dict from one with LLaDA's names: q, k, v and gate, up become one matrix each.

    Raises ValueError for tensors that are missing, left over or of another shape, NotImplementedError for tensors that
    are not floating point. A stored head of a tied model must equal the embedding.
    """
    return layout(config).gather(state)


def to_llada_state_dict(state: Mapping[str, torch.Tensor], config: TransformerConfig) -> dict[str, torch.Tensor]:
    """The inverse of `from_llada_state_dict`; the tensors are views of ours."""
    for name in ("qk_norm", "output_bias", "mlp_bias"):
        expectation = f"have no {name} (LLaDA has no such tensors)"
        check(not getattr(config, name), "models.to_llada_state_dict", "config", expectation, f"{name}=True")
    return layout(config).scatter(state)
