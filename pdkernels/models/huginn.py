"""Checkpoints of recurrent-depth models with the names of Huginn-0125: configuration and tensors, both ways.

Source: the configuration and modelling files of huggingface.co/tomg-group-umd/huginn-0125.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from pdkernels._validation import check
from pdkernels.models.hf import demand, gather, require
from pdkernels.models.recurrent_depth import RecurrentDepthConfig

MODEL_TYPE, ARCHITECTURE = "huginn_raven", "RavenForCausalLM"

_OP = "models.load"
_REQUIRED = (
    "vocab_size",
    "n_embd",
    "n_heads",
    "intermediate_size",
    "n_layers_in_prelude",
    "n_layers_in_recurrent_block",
    "n_layers_in_coda",
)
_OTHER_NAMES = {"hidden_size": "n_embd", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}
_COMPUTED = {
    "block_class_name": "SandwichBlock",
    "norm_class_name": "RMSNorm_llama",
    "mlp_class_name": "GatedMLP",
    "nonlin_name": "SiLU",
    "injection_type": "linear",
    "state_init": "like-init",
    "bias": False,
    "qk_bias": True,
    "tie_embeddings": True,
    "test_time_noise": 0,
}
"""Choices that a config.json names and the only values of them that the model computes; absent means those too."""


def is_huginn(config: Mapping[str, Any]) -> bool:
    """Whether a parsed `config.json` is of this kind."""
    return config.get("model_type") == MODEL_TYPE or ARCHITECTURE in (config.get("architectures") or ())


def from_huginn_config(config: Mapping[str, Any]) -> RecurrentDepthConfig:
    """The `RecurrentDepthConfig` of a parsed `config.json`.

    Raises ValueError for sizes that are missing or contradict each other, NotImplementedError for what the model does not
    compute (another block, norm or injection, biases, an untied head, noise in the core), so that no checkpoint is run wrongly.

    >>> from_huginn_config({"model_type": "huginn_raven", "vocab_size": 65536, "n_embd": 5280, "n_heads": 55,
    ...                     "intermediate_size": 17920, "n_layers_in_prelude": 2, "n_layers_in_recurrent_block": 4,
    ...                     "n_layers_in_coda": 2}).head_dim
    96
    """
    config = {_OTHER_NAMES.get(name, name): value for name, value in config.items()}
    require(config, _REQUIRED)
    for field, computed in _COMPUTED.items():
        actual = config.get(field, computed)
        demand(actual == computed, field, f"be {computed!r}", repr(actual))
    hidden, heads = config["n_embd"], config["n_heads"]
    check(hidden % heads == 0, _OP, "config.json: n_heads", f"divide n_embd ({hidden})", heads)
    for field, implied in (("num_key_value_heads", heads), ("head_dim", hidden // heads)):
        actual = config.get(field, implied)
        demand(actual == implied, field, f"be {implied}", actual)
    scale = config.get("init_values", {}).get("embed_scale", math.sqrt(hidden))
    demand(
        math.isclose(scale, math.sqrt(hidden), rel_tol=1e-5), "init_values: embed_scale", "be the root of n_embd", scale
    )
    ours = RecurrentDepthConfig(
        vocab_size=config.get("padded_vocab_size") or config["vocab_size"],
        hidden_size=hidden,
        heads=heads,
        head_dim=hidden // heads,
        intermediate_size=config["intermediate_size"],
        prelude_layers=config["n_layers_in_prelude"],
        core_layers=config["n_layers_in_recurrent_block"],
        coda_layers=config["n_layers_in_coda"],
        mean_recurrence=config.get("mean_recurrence", 32),
        rope_theta=float(config.get("rope_base", 50000)),
        norm_eps=config.get("norm_eps", 1e-6),
        max_positions=config.get("block_size", 4096),
    )
    layers = config.get("n_layers", ours.layers)
    check(layers == ours.layers, _OP, "config.json: n_layers", f"be the sum of its three parts ({ours.layers})", layers)
    return ours


def to_huginn_config(config: RecurrentDepthConfig) -> dict[str, Any]:
    """The fields of a `config.json` that `from_huginn_config` reads.

    >>> config = RecurrentDepthConfig(vocab_size=11, hidden_size=8, heads=2, head_dim=4, intermediate_size=12)
    >>> from_huginn_config(to_huginn_config(config)) == config
    True
    """
    check(
        config.heads * config.head_dim == config.hidden_size,
        "models.to_huginn_config",
        "head_dim",
        f"be hidden_size / heads ({config.hidden_size} / {config.heads})",
        config.head_dim,
    )
    return {
        "model_type": MODEL_TYPE,
        "architectures": [ARCHITECTURE],
        "vocab_size": config.vocab_size,
        "padded_vocab_size": config.vocab_size,
        "n_embd": config.hidden_size,
        "n_heads": config.heads,
        "intermediate_size": config.intermediate_size,
        "n_layers": config.layers,
        "n_layers_in_prelude": config.prelude_layers,
        "n_layers_in_recurrent_block": config.core_layers,
        "n_layers_in_coda": config.coda_layers,
        "mean_recurrence": config.mean_recurrence,
        "rope_base": config.rope_theta,
        "norm_eps": config.norm_eps,
        "block_size": config.max_positions,
        **_COMPUTED,
    }


def _names(config: RecurrentDepthConfig) -> Iterator[tuple[str, str]]:
    """Each of our parameters and its published name."""
    yield "embedding", "transformer.wte.weight"
    yield "adapter", "transformer.adapter.weight"
    yield "norm", "transformer.ln_f.weight"
    parts = (
        ("prelude_layers", "prelude", config.prelude_layers),
        ("core_layers", "core_block", config.core_layers),
        ("coda_layers", "coda", config.coda_layers),
    )
    for our_part, their_part, layers in parts:
        for index in range(layers):
            ours, theirs = f"{our_part}.{index}.", f"transformer.{their_part}.{index}."
            yield f"{ours}qkv", f"{theirs}attn.Wqkv.weight"
            yield f"{ours}qk_bias", f"{theirs}attn.qk_bias"
            yield f"{ours}output", f"{theirs}attn.proj.weight"
            yield f"{ours}gate_up", f"{theirs}mlp.fc.weight"
            yield f"{ours}down", f"{theirs}mlp.proj.weight"
            for norm in range(1, 5):
                yield f"{ours}norm_{norm}", f"{theirs}norm_{norm}.weight"


def from_huginn_state_dict(state: Mapping[str, torch.Tensor], config: RecurrentDepthConfig) -> dict[str, torch.Tensor]:
    """Our state dict from one with published names.

    Raises ValueError if tensors are missing or left over. The head is tied: it may stand beside the embedding or in its place.
    """
    embedding, head = "transformer.wte.weight", "lm_head.weight"
    if embedding not in state and head in state:
        state = {**state, embedding: state[head]}
    ours = gather(state, ((name, [theirs]) for name, theirs in _names(config)), tied=True)
    shape = (2, 1, config.heads, config.head_dim)
    for name, theirs in _names(config):
        if name.endswith("qk_bias"):
            check(ours[name].shape == shape, _OP, theirs, f"have shape {shape}", tuple(ours[name].shape))
            ours[name] = ours[name].reshape(2 * config.heads, config.head_dim)
    return ours


def to_huginn_state_dict(state: Mapping[str, torch.Tensor], config: RecurrentDepthConfig) -> dict[str, torch.Tensor]:
    """The inverse of `from_huginn_state_dict`, without the tied head; the tensors are views of ours."""
    shape = (2, 1, config.heads, config.head_dim)
    return {
        theirs: state[name].view(shape) if name.endswith("qk_bias") else state[name] for name, theirs in _names(config)
    }
