"""Gemma 4, its language model: configuration and tensors of published folders.

Folders of a model for images or sound are read too, without what is for these.

Source: transformers, models/gemma4.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from pdkernels._validation import check
from pdkernels.models.architectures.config import ExpertsConfig
from pdkernels.models.architectures.gemma4_config import Gemma4Config
from pdkernels.models.architectures.rope import ProportionalRotation
from pdkernels.models.checkpoints.gemma3 import caps_of, check_named, share_of
from pdkernels.models.checkpoints.hf_language import language_fields
from pdkernels.models.checkpoints.hf_windows import FULL, KINDS, SLIDING, layer_kinds, require_causal, windows_of
from pdkernels.models.files.fields import OP, Fields, demand, read_from, shown
from pdkernels.models.files.layout import Layout, Parts

TEXT, UNIFIED = "gemma4_text", "gemma4_unified_text"
AROUND = {"gemma4": TEXT, "gemma4_unified": UNIFIED}
"""Of folders with a model for images and sound: the `model_type` of the language model in it."""
MODEL_TYPES = (TEXT, UNIFIED, *AROUND)
EVERY = 6
"""Each layer of this number sees the whole text, where config.json names no layers."""
_OTHER_MODELS = ("vision_tower.", "vision_embedder.", "embed_vision.", "audio_tower.", "embed_audio.")
_RULES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
"""What its class means by a config.json without rope_parameters."""
_REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_FULL_FIELDS = {"head_dim", "num_key_value_heads"}


def from_gemma4_config(config: Mapping[str, Any]) -> Gemma4Config:
    """The `Gemma4Config` of a parsed `config.json`. Of a model for images it is that of its language model.

    Raises as `from_hf_config`.

    >>> sizes = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 7, "num_attention_heads": 4, "intermediate_size": 96}
    >>> sizes |= {"layer_types": ["sliding_attention", "full_attention"] * 3 + ["full_attention"], "num_kv_shared_layers": 2}
    >>> config = from_gemma4_config({"model_type": "gemma4_text", **sizes, "vocab_size_per_layer_input": 100})
    >>> [config.heads_of(layer) for layer in (0, 1)], config.cache_layers, config.layer_input_size
    ([(4, 256), (4, 512)], 5, 256)
    """
    fields = Fields(config)
    kind = fields.get("model_type")
    demand(kind in MODEL_TYPES, "model_type", f"be one of {', '.join(MODEL_TYPES)}", shown(kind))
    if kind in AROUND:
        fields.require(("text_config",))
        fields = language_fields(fields)
    fields.require(_REQUIRED)
    _require(fields)
    unified = AROUND.get(str(kind), kind) == UNIFIED
    layers, hidden = fields.integer("num_hidden_layers"), fields.integer("hidden_size")
    kinds = layer_kinds(fields, layers, EVERY)
    demand(kinds[-1] == FULL, "layer_types", f"end with {FULL}", kinds[-1])
    full_heads, full_size = _full_heads(fields, kinds)
    local, full = _rules(fields, kinds)
    size = fields.integer("hidden_size_per_layer_input", 0 if unified else 256, minimum=0, null=0)
    vocabulary = fields.integer("vocab_size")
    if size:
        rows = fields.integer("vocab_size_per_layer_input", 262144)
        demand(rows == vocabulary, "vocab_size_per_layer_input", f"be vocab_size ({vocabulary})", rows)
    reading = fields.integer("num_kv_shared_layers", 0, minimum=0)
    with read_from("config.json"):
        return Gemma4Config(
            vocab_size=vocabulary,
            hidden_size=hidden,
            layers=layers,
            heads=fields.integer("num_attention_heads"),
            kv_heads=fields.integer("num_key_value_heads", 4),
            head_dim=fields.integer("head_dim", 256),
            intermediate_size=fields.integer("intermediate_size"),
            rope_theta=full.number("rope_theta", above=0),
            rope_scaling=_rotation(full, fields, full_size),
            norm_eps=fields.number("rms_norm_eps", 1e-6, minimum=0),
            tied_head=fields.flag("tie_word_embeddings", True),
            max_positions=fields.integer("max_position_embeddings", 262144 if unified else 131072),
            experts=_experts(fields),
            windows=windows_of(fields, kinds, 1024 if unified else 512),
            window_rope_theta=local.number("rope_theta", above=0) if local else None,
            embedding_scale=hidden**0.5,
            **caps_of(fields),
            full_kv_heads=full_heads,
            full_head_dim=full_size,
            keys_as_values=fields.flag("attention_k_eq_v", False),
            reading_layers=reading,
            wide_readers=fields.flag("use_double_wide_mlp", False),
            layer_input_size=size,
        )


def _require(fields: Fields) -> None:
    """Refuses what the model does not compute."""
    activation = fields.get("hidden_activation", "gelu_pytorch_tanh")
    demand(activation == "gelu_pytorch_tanh", "hidden_activation", "be 'gelu_pytorch_tanh'", shown(activation))
    require_causal(fields)
    demand(not fields.flag("attention_bias", False), "attention_bias", "be false", True)
    sees = fields.get("use_bidirectional_attention")  # "vision" is for tokens of images, which no text has
    demand(sees in (None, "vision"), "use_bidirectional_attention", "be null or 'vision'", shown(sees))


def _full_heads(fields: Fields, kinds: list[str]) -> tuple[int, int]:
    """KV heads of layers that see the whole text, and the size of their heads: in fields of their own, or in
    `per_layer_config`, which is then all that counts."""
    heads, size = fields.integer("num_key_value_heads", 4), fields.integer("head_dim", 256)
    if "per_layer_config" not in fields.given:
        tied = fields.flag("attention_k_eq_v", False)
        heads = fields.integer("num_global_key_value_heads", heads, null=heads) if tied else heads
        return heads, fields.integer("global_head_dim", 512)
    layers = fields.part("per_layer_config")
    if not layers.given:  # as transformers writes it if they do not differ; null is the same
        return heads, size
    numbers = [number for number, kind in enumerate(kinds) if kind == FULL]
    expectation = f"name the layers of {FULL}, in the same way"
    numbers_in_file = [name for name in layers.given if re.fullmatch("[0-9]{1,5}", str(name))]  # with zeros in front
    same = sorted(map(int, numbers_in_file)) == numbers and len(numbers_in_file) == len(layers.given)
    same = same and len({repr(value) for value in layers.given.values()}) == 1
    demand(same, "per_layer_config", expectation, shown(layers.given))
    each = layers.part(next(iter(layers.given)))
    other = next((name for name in each.given if name not in _FULL_FIELDS), None)
    demand(other is None, f"per_layer_config: {shown(other)}", "be absent", shown(each.get(str(other))))
    return each.integer("num_key_value_heads", heads), each.integer("head_dim", size)


def _rules(fields: Fields, kinds: list[str]) -> tuple[Fields, Fields]:
    """The rotations of layers with a window, which may be absent if there are none, and of the others."""
    rules = fields.part("rope_parameters")
    if not rules:
        rules = Fields({"rope_parameters": _RULES}, fields.where).part("rope_parameters")
    field = next((name for name in rules.values if name not in KINDS), None)
    demand(field is None, f"rope_parameters: {shown(field)}", "be inside the rule of a kind of layers", "outside")
    rules.require(set(kinds))
    local, full = (rules.part(kind) for kind in KINDS)
    for rule, allowed in ((local, ("default",)), (full, ("default", "proportional"))):
        check_named(rule)
        kind = rule.get("rope_type", "default")
        label = f"{rule.where.removeprefix('config.json: ')}: rope_type"
        demand(kind in allowed, label, f"be {' or '.join(allowed)}", shown(kind))
    return local, full


def _rotation(rule: Fields, fields: Fields, size: int) -> ProportionalRotation | None:
    """That of layers which see the whole text."""
    if rule.get("rope_type", "default") == "default":
        return None
    share = share_of(rule, fields)
    check(share <= 1, OP, f"{rule.where}: partial_rotary_factor", "be at most 1", share)
    return ProportionalRotation(int(share * size // 2), rule.number("factor", 1.0, above=0))


def _experts(fields: Fields) -> ExpertsConfig | None:
    if not fields.flag("enable_moe_block", False):
        return None
    count, each = fields.integer("num_experts"), fields.integer("top_k_experts")
    return ExpertsConfig(count, each, fields.integer("moe_intermediate_size"))


def layout(config: Gemma4Config, kind: str) -> Layout:
    """The tensors of a folder with this configuration and `model_type`."""
    body = "model.language_model." if kind in AROUND else "model."
    unread = [
        f"{body}layers.{layer}.self_attn.{name}"
        for layer in range(config.cache_layers, config.layers)
        for name in ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
    ]
    prefixes = [f"model.{name}" for name in _OTHER_MODELS] if kind in AROUND else []
    return Layout(
        partial(_parts, config, body),
        config.layers,
        f"{body}embed_tokens.weight",
        "lm_head.weight",
        config.tied_head,
        experts=0 if config.experts is None else config.experts.count,
        separate_experts=False,
        apart=(*unread, *prefixes),
    )


# Of a layer, by our names.
_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
_MIXTURE_NORMS = {
    "dense_out_norm": "post_feedforward_layernorm_1",
    "mixture_norm": "pre_feedforward_layernorm_2",
    "mixture_out_norm": "post_feedforward_layernorm_2",
}


def _parts(config: Gemma4Config, body: str) -> Iterator[tuple[str, Parts]]:
    hidden, matrix = config.hidden_size, (config.vocab_size, config.hidden_size)
    yield "embedding", {f"{body}embed_tokens.weight": matrix}
    for index in range(config.layers):
        for name, sources in _layer_parts(config, index):
            prefixed = {f"{body}layers.{index}.{source}": shape for source, shape in sources.items()}
            yield f"layers.{index}.{name}", prefixed
    yield "norm", {f"{body}norm.weight": (hidden,)}
    if size := config.layer_input_size:
        wide = config.layers * size
        yield "layer_embedding", {f"{body}embed_tokens_per_layer.weight": (config.vocab_size, wide)}
        yield "layer_projection", {f"{body}per_layer_model_projection.weight": (wide, hidden)}
        yield "layer_norm", {f"{body}per_layer_projection_norm.weight": (size,)}
    if not config.tied_head:
        yield "head", {"lm_head.weight": matrix}


def _layer_parts(config: Gemma4Config, index: int) -> Iterator[tuple[str, Parts]]:
    hidden, sizes = config.hidden_size, config.of_layer(index)
    query, inner = sizes.heads * sizes.head_dim, sizes.intermediate_size
    reads, takes_keys = config.source(index) != index, config.takes_keys(index)
    projected = ("q",) if reads else ("q", "k") if takes_keys else ("q", "k", "v")
    rows = {"q": query, "k": sizes.kv_heads * sizes.head_dim, "v": sizes.kv_heads * sizes.head_dim}
    yield "qkv", {f"self_attn.{name}_proj.weight": (rows[name], hidden) for name in projected}
    for name in ("q_norm",) if reads else ("q_norm", "k_norm"):
        yield name, {f"self_attn.{name}.weight": (sizes.head_dim,)}
    yield "output", {"self_attn.o_proj.weight": (hidden, query)}
    yield "gate_up", {f"mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
    yield "down", {"mlp.down_proj.weight": (hidden, inner)}
    for name, source in (_NORMS | (_MIXTURE_NORMS if config.experts else {})).items():
        yield name, {f"{source}.weight": (hidden,)}
    yield "layer_scale", {"layer_scalar": (1,)}
    if size := config.layer_input_size:
        yield "input_gate", {"per_layer_input_gate.weight": (size, hidden)}
        yield "input_projection", {"per_layer_projection.weight": (hidden, size)}
        yield "input_norm", {"post_per_layer_input_norm.weight": (hidden,)}
    if experts := config.experts:
        count, narrow = experts.count, experts.intermediate_size
        yield "router", {"router.proj.weight": (count, hidden)}
        yield "router_scale", {"router.scale": (hidden,)}
        yield "expert_scale", {"router.per_expert_scale": (count,)}
        yield "experts_gate_up", {"experts.gate_up_proj": (count, 2 * narrow, hidden)}
        yield "experts_down", {"experts.down_proj": (count, hidden, narrow)}
