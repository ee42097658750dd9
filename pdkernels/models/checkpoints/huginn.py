"""Checkpoints of recurrent-depth models with the names of Huginn-0125: configuration and tensors, both ways.

Source: the configuration and modelling files of huggingface.co/tomg-group-umd/huginn-0125.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from pdkernels._validation import check
from pdkernels.models.architectures.config import RecurrentDepthConfig
from pdkernels.models.files.fields import OP, Fields, demand, read_from, shown
from pdkernels.models.files.layout import Layout, Parts

MODEL_TYPE, ARCHITECTURE = "huginn_raven", "RavenForCausalLM"

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
"""Fields of a config.json with their only supported values, which are also the defaults."""


def is_huginn(config: Mapping[str, Any]) -> bool:
    """Whether a parsed `config.json` is of this kind."""
    architectures = config.get("architectures")
    return config.get("model_type") == MODEL_TYPE or (isinstance(architectures, list) and ARCHITECTURE in architectures)


def from_huginn_config(config: Mapping[str, Any]) -> RecurrentDepthConfig:
    """The `RecurrentDepthConfig` of a parsed `config.json`.

    Raises ValueError for fields that are missing, of the wrong kind or contradict each other, NotImplementedError for
    what the model does not compute (another block, norm or injection, biases, an untied head, noise in the core), so
    that no checkpoint gives wrong results.

    >>> from_huginn_config({"model_type": "huginn_raven", "vocab_size": 65536, "n_embd": 5280, "n_heads": 55,
    ...                     "intermediate_size": 17920, "n_layers_in_prelude": 2, "n_layers_in_recurrent_block": 4,
    ...                     "n_layers_in_coda": 2}).head_dim
    96
    """
    stated = {name: value for name, value in config.items() if value is not None or name not in _OTHER_NAMES}
    for name, published in _OTHER_NAMES.items():
        same = name not in stated or stated.get(published, stated[name]) == stated[name]
        check(same, OP, f"config.json: {name}", f"equal {published}, which means the same", shown(stated.get(name)))
    fields = Fields({_OTHER_NAMES.get(name, name): value for name, value in stated.items()})
    fields.require(_REQUIRED)
    for field, computed in _COMPUTED.items():
        actual = fields.get(field, computed)
        demand(actual == computed or (actual is None and not computed), field, f"be {computed!r}", shown(actual))
    hidden, heads = fields.integer("n_embd"), fields.integer("n_heads")
    check(hidden % heads == 0, OP, "config.json: n_heads", f"divide n_embd ({hidden})", heads)
    for field, implied in (("num_key_value_heads", heads), ("head_dim", hidden // heads)):
        actual = fields.values.get(field, implied)
        demand(actual == implied, field, f"be {implied}", shown(actual))
    scale, root = fields.part("init_values").number("embed_scale", math.sqrt(hidden)), math.sqrt(hidden)
    demand(math.isclose(scale, root, rel_tol=1e-5), "init_values: embed_scale", "be the root of n_embd", scale)
    with read_from("config.json"):
        result = RecurrentDepthConfig(
            vocab_size=fields.integer("padded_vocab_size", fields.integer("vocab_size")),
            hidden_size=hidden,
            heads=heads,
            head_dim=hidden // heads,
            intermediate_size=fields.integer("intermediate_size"),
            prelude_layers=fields.integer("n_layers_in_prelude"),
            core_layers=fields.integer("n_layers_in_recurrent_block"),
            coda_layers=fields.integer("n_layers_in_coda"),
            mean_recurrence=fields.integer("mean_recurrence", 32),
            rope_theta=fields.number("rope_base", 50000.0, above=0),
            norm_eps=fields.number("norm_eps", 1e-6, minimum=0),
            max_positions=fields.integer("block_size", 4096),
        )
    layers, expectation = (
        fields.values.get("n_layers", result.layers),
        f"be the sum of its three parts ({result.layers})",
    )
    check(layers == result.layers, OP, "config.json: n_layers", expectation, shown(layers))
    return result


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


def layout(config: RecurrentDepthConfig) -> Layout:
    """The tensors of a checkpoint with this configuration."""
    return Layout(partial(_parts, config), config.layers, "transformer.wte.weight", "lm_head.weight", True)


def _parts(config: RecurrentDepthConfig) -> Iterator[tuple[str, Parts]]:
    hidden, inner, width = config.hidden_size, config.intermediate_size, config.heads * config.head_dim
    yield "embedding", {"transformer.wte.weight": (config.vocab_size, hidden)}
    yield "adapter", {"transformer.adapter.weight": (hidden, 2 * hidden)}
    yield "norm", {"transformer.ln_f.weight": (hidden,)}
    sources = (
        ("prelude_layers", "prelude", config.prelude_layers),
        ("core_layers", "core_block", config.core_layers),
        ("coda_layers", "coda", config.coda_layers),
    )
    for our_part, their_part, layers in sources:
        for index in range(layers):
            prefix, source_prefix = f"{our_part}.{index}.", f"transformer.{their_part}.{index}."
            yield f"{prefix}qkv", {f"{source_prefix}attn.Wqkv.weight": (3 * width, hidden)}
            yield f"{prefix}qk_bias", {f"{source_prefix}attn.qk_bias": (2, 1, config.heads, config.head_dim)}
            yield f"{prefix}output", {f"{source_prefix}attn.proj.weight": (hidden, width)}
            yield f"{prefix}gate_up", {f"{source_prefix}mlp.fc.weight": (2 * inner, hidden)}
            yield f"{prefix}down", {f"{source_prefix}mlp.proj.weight": (hidden, inner)}
            for norm in range(1, 5):
                yield f"{prefix}norm_{norm}", {f"{source_prefix}norm_{norm}.weight": (hidden,)}


def from_huginn_state_dict(state: Mapping[str, torch.Tensor], config: RecurrentDepthConfig) -> dict[str, torch.Tensor]:
    """Our state dict from one with published names.

    Raises ValueError for tensors that are missing, left over or of another shape, NotImplementedError for tensors that
    are not floating point. The head is tied: it may be stored in addition to the embedding or instead of it.
    """
    return layout(config).gather(state)


def to_huginn_state_dict(state: Mapping[str, torch.Tensor], config: RecurrentDepthConfig) -> dict[str, torch.Tensor]:
    """The inverse of `from_huginn_state_dict`, without the tied head; the tensors are views of ours."""
    return layout(config).scatter(state)
