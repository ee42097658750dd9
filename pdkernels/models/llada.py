"""Checkpoints of LLaDA, with its own names: configuration and tensors, both ways.

Source: the configuration and modelling files of huggingface.co/GSAI-ML/LLaDA-8B-Base.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from pdkernels._validation import check
from pdkernels.models.config import TransformerConfig
from pdkernels.models.hf import demand, gather, require, scatter

MODEL_TYPE = "llada"

_OP = "models.load"
_REQUIRED = ("vocab_size", "d_model", "n_layers", "n_heads")
_HEAD = "model.transformer.ff_out.weight"
# Where a config.json leaves these out, LLaDA's class would take something else.
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
"""Choices that a config.json may name and the only values of them that the model computes; absent means those too."""


def from_llada_config(config: Mapping[str, Any]) -> TransformerConfig:
    """The `TransformerConfig` of a parsed `config.json`: bidirectional, and row i predicts token i.

    The vocabulary has as many ids as the embedding has rows (`embedding_size`): those behind the tokenizer's last id take
    part in every softmax, as in the published samplers.

    Raises ValueError for sizes that are missing or do not fit, NotImplementedError for what the transformer does not compute
    (other blocks, norms or activations, biases outside q, k and v, scaled logits), so that no checkpoint is run wrongly.

    >>> config = from_llada_config({"model_type": "llada", "vocab_size": 100, "embedding_size": 128, "d_model": 64,
    ...                             "n_layers": 2, "n_heads": 4, "mlp_hidden_size": 96, "block_type": "llama",
    ...                             "layer_norm_type": "rms", "activation_type": "silu", "rope": True, "weight_tying": False})
    >>> config.vocab_size, config.kv_heads, config.attention, config.predicts
    (128, 4, 'bidirectional', 'own')
    """
    require(config, _REQUIRED)
    for field, computed in _NAMED.items():
        demand(config.get(field) == computed, field, f"be {computed!r}", repr(config.get(field)))
    for field, computed in _COMPUTED.items():
        actual = config.get(field, computed)
        demand(actual == computed, field, f"be {computed!r}", repr(actual))
    hidden, heads = config["d_model"], config["n_heads"]
    check(hidden % heads == 0, _OP, "config.json: n_heads", f"divide d_model ({hidden})", heads)
    one_for_all = config.get("multi_query_attention")
    return TransformerConfig(
        vocab_size=config.get("embedding_size") or config["vocab_size"],
        hidden_size=hidden,
        layers=config["n_layers"],
        heads=heads,
        kv_heads=config.get("n_kv_heads") or (1 if one_for_all else heads),
        head_dim=hidden // heads,
        intermediate_size=config.get("mlp_hidden_size") or config.get("mlp_ratio", 4) * hidden,
        rope_theta=float(config.get("rope_theta", 10000.0)),
        norm_eps=config.get("rms_norm_eps", 1e-5),
        qkv_bias=bool(config.get("include_qkv_bias", False)),
        tied_head=config.get("weight_tying", True),
        attention="bidirectional",
        predicts="own",
        max_positions=config.get("max_sequence_length", 1024),
    )


def _names(config: TransformerConfig) -> Iterator[tuple[str, list[str]]]:
    """Each of our parameters, and the tensors that stand one after the other in it."""
    yield "embedding", ["model.transformer.wte.weight"]
    for index in range(config.layers):
        ours, theirs = f"layers.{index}.", f"model.transformer.blocks.{index}."
        yield f"{ours}qkv", [f"{theirs}{name}_proj.weight" for name in "qkv"]
        if config.qkv_bias:
            yield f"{ours}qkv_bias", [f"{theirs}{name}_proj.bias" for name in "qkv"]
        yield f"{ours}output", [f"{theirs}attn_out.weight"]
        yield f"{ours}gate_up", [f"{theirs}{name}_proj.weight" for name in ("ff", "up")]
        yield f"{ours}down", [f"{theirs}ff_out.weight"]
        yield f"{ours}attention_norm", [f"{theirs}attn_norm.weight"]
        yield f"{ours}mlp_norm", [f"{theirs}ff_norm.weight"]
    yield "norm", ["model.transformer.ln_f.weight"]
    if not config.tied_head:
        yield "head", [_HEAD]


def from_llada_state_dict(state: Mapping[str, torch.Tensor], config: TransformerConfig) -> dict[str, torch.Tensor]:
    """Our state dict from one with LLaDA's names: q, k, v and gate, up become one matrix each.

    Raises ValueError if tensors are missing or left over. A stored head of a tied model must equal the embedding.
    """
    return gather(state, _names(config), tied=config.tied_head, head=_HEAD)


def to_llada_state_dict(state: Mapping[str, torch.Tensor], config: TransformerConfig) -> dict[str, torch.Tensor]:
    """The inverse of `from_llada_state_dict`; the tensors are views of ours."""
    check(
        not config.qk_norm,
        "models.to_llada_state_dict",
        "config",
        "have no qk_norm (LLaDA has no such tensors)",
        "qk_norm=True",
    )
    return scatter(state, _names(config), config)
