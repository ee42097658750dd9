"""Checkpoints of hybrid models with Hugging Face names: configuration and tensors of Qwen3.5 (dense) and LFM2.

Source: `configuration_qwen3_5.py`, `configuration_lfm2.py` and the modelling files beside them, in transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from pdkernels._validation import check
from pdkernels.models.architectures.hybrid import HybridConfig, Mixer
from pdkernels.models.checkpoints.hf_language import language_fields
from pdkernels.models.checkpoints.hf_rope import read_rope
from pdkernels.models.checkpoints.hf_windows import require_alike, require_causal
from pdkernels.models.files.fields import OP, Fields, demand, read_from, shown
from pdkernels.models.files.layout import Layout, Parts

QWEN35, QWEN35_TEXT, LFM2 = "qwen3_5", "qwen3_5_text", "lfm2"
ARCHITECTURES = (QWEN35_TEXT, QWEN35, LFM2)

_REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_MIXERS: dict[str, Mixer] = {"full_attention": "attention", "linear_attention": "delta", "conv": "conv"}
_CHECKED = {True: ("conv_bias",), False: ("hidden_act", "attention_bias")}
"""Fields of LFM2's class, and of Qwen3.5's, that must not be null. The others are not read there."""
# What a checkpoint of a model for images holds beside the language model, and what drafts several tokens.
_APART = ("model.visual.", "mtp.")


def from_hybrid_config(config: Mapping[str, Any]) -> HybridConfig:
    """The `HybridConfig` of a parsed `config.json`. Of a model for images it is that of its language model.

    Raises ValueError for fields that are missing or of the wrong kind, NotImplementedError for what a `Hybrid` does not
    compute.

    >>> from_hybrid_config({"model_type": "lfm2", "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2,
    ...                     "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
    ...                     "layer_types": ["conv", "full_attention"]}).mixers
    ('conv', 'attention')
    """
    fields = Fields(config)
    kind = fields.get("model_type")
    demand(kind in ARCHITECTURES, "model_type", f"be one of {', '.join(ARCHITECTURES)}", shown(kind))
    if kind == QWEN35:
        fields.require(("text_config",))
        fields = language_fields(fields)
    if kind == LFM2 and "block_ff_dim" in fields.given:
        fields = Fields({**fields.given, "intermediate_size": fields.integer("block_ff_dim")}, fields.where)
    fields.require(_REQUIRED)
    require_causal(fields)
    require_alike(fields)
    for name, value in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("conv_bias", False),
        ("attn_output_gate", True),
    ):
        actual = fields.get(name, value)
        ignored = actual is None and name not in _CHECKED[kind == LFM2]
        demand(actual == value or ignored, name, f"be {value!r}", shown(actual))
    with read_from("config.json"):
        return _lfm2(fields) if kind == LFM2 else _qwen(fields)


def _mixers(
    fields: Fields, default: Callable[[Fields, int], list[str]], supported: tuple[str, ...]
) -> tuple[Mixer, ...]:
    layers, types = fields.integer("num_hidden_layers"), fields.get("layer_types")
    types = default(fields, min(layers, 1 << 16)) if types is None else types
    names = isinstance(types, list) and all(isinstance(name, str) for name in types)
    check(names, OP, "config.json: layer_types", "be a list of names", shown(types))
    for name in types:
        demand(name in supported, "layer_types", f"be of {', '.join(supported)}", shown(name))
    check(len(types) == layers, OP, "config.json: layer_types", f"name one for each of {layers} layers", len(types))
    recurrent = any(name != "full_attention" for name in types)
    demand(recurrent, "layer_types", f"name a layer of {supported[-1]}", "full_attention alone")
    return tuple(_MIXERS[name] for name in types)


def _every_nth(fields: Fields, layers: int) -> list[str]:
    interval = fields.integer("full_attention_interval", 4)
    return ["linear_attention" if (index + 1) % interval else "full_attention" for index in range(layers)]


def _listed(fields: Fields, layers: int) -> list[str]:
    attends = fields.get("full_attn_idxs")
    attends = list(range(layers)) if attends is None else attends
    valid = isinstance(attends, list) and all(type(index) is int for index in attends)
    check(valid, OP, "config.json: full_attn_idxs", "be a list of ints", shown(attends))
    return ["full_attention" if index in attends else "conv" for index in range(layers)]


def _qwen(fields: Fields) -> HybridConfig:
    positions = fields.integer("max_position_embeddings", 32768)
    # A rule in `rope_scaling` takes the place of the other one, with the share of a head that turns.
    where = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    rope, part = dict(fields.part(where).given), "partial_rotary_factor"
    share = Fields(rope).number(part, fields.number(part, 0.25, above=0, null=1.0), above=0)
    # Of text alone, all three coordinates of a position are the same.
    for name in (part, "mrope_section", "mrope_interleaved"):
        rope.pop(name, None)
    rest = {name: value for name, value in fields.given.items() if name not in (part, "rope_scaling")}
    theta, scaling = read_rope(Fields({**rest, "rope_parameters": {}, where: rope}), positions, False, None)
    head_dim = fields.integer("head_dim", 256)
    return HybridConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        layers=fields.integer("num_hidden_layers"),
        heads=fields.integer("num_attention_heads"),
        kv_heads=fields.integer("num_key_value_heads", 4),
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=fields.number("rms_norm_eps", 1e-6, minimum=0),
        qk_norm=True,
        tied_head=fields.flag("tie_word_embeddings", False),
        max_positions=positions if scaling is None else scaling.reach(positions),
        mixers=_mixers(fields, _every_nth, ("full_attention", "linear_attention")),
        conv_width=fields.integer("linear_conv_kernel_dim", 4, minimum=2),
        key_heads=fields.integer("linear_num_key_heads", 16),
        value_heads=fields.integer("linear_num_value_heads", 32),
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        rotary_dim=int(head_dim * share),
        gated_attention=True,
        centred_norms=True,
    )


def _lfm2(fields: Fields) -> HybridConfig:
    heads = fields.integer("num_attention_heads")
    hidden, inner = fields.integer("hidden_size"), fields.integer("intermediate_size")
    if fields.flag("block_auto_adjust_ff_dim", True):
        inner = int(2 * inner / 3)
        if "block_ffn_dim_multiplier" not in fields.null:
            inner = int(fields.number("block_ffn_dim_multiplier", 1.0, above=0) * inner)
            unit = fields.integer("block_multiple_of", 256)
            inner = unit * -(-inner // unit)
    positions = fields.integer("max_position_embeddings", 128000)
    theta, scaling = read_rope(fields, positions, False, None, 1000000.0)
    return HybridConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        layers=fields.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", 8),
        head_dim=fields.integer("head_dim", max(hidden // heads, 1)),
        intermediate_size=inner,
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=fields.number("norm_eps", 1e-5, minimum=0),
        qk_norm=True,
        tied_head=fields.flag("tie_embedding", fields.flag("tie_word_embeddings", True)),
        max_positions=positions if scaling is None else scaling.reach(positions),
        mixers=_mixers(fields, _listed, ("full_attention", "conv")),
        conv_width=fields.integer("conv_L_cache", 3, minimum=2),
    )


def layout(config: HybridConfig, kind: str) -> Layout:
    """The tensors of a checkpoint with this configuration and `model_type`."""
    body = "model.language_model." if kind == QWEN35 else "model."
    apart = _APART if kind != LFM2 else ()
    sources = partial(_parts, config, body, kind == LFM2)
    return Layout(sources, config.layers, f"{body}embed_tokens.weight", "lm_head.weight", config.tied_head, apart=apart)


def _parts(config: HybridConfig, body: str, lfm2: bool) -> Iterator[tuple[str, Parts]]:
    matrix = (config.vocab_size, config.hidden_size)
    yield "embedding", {f"{body}embed_tokens.weight": matrix}
    for index, mixer in enumerate(config.mixers):
        yield from layer_parts(config, mixer, f"layers.{index}.", f"{body}layers.{index}.", lfm2)
    yield "norm", {f"{body}{'embedding_norm' if lfm2 else 'norm'}.weight": (config.hidden_size,)}
    if not config.tied_head:
        yield "head", {"lm_head.weight": matrix}


def layer_parts(
    config: HybridConfig, mixer: Mixer, prefix: str, source_prefix: str, lfm2: bool = False
) -> Iterator[tuple[str, Parts]]:
    """Our parameters of a layer, and their parts."""
    hidden, inner = config.hidden_size, config.intermediate_size
    mixed, fed = ("operator_norm", "ffn_norm") if lfm2 else ("input_layernorm", "post_attention_layernorm")
    gate, up, down = ("w1", "w3", "w2") if lfm2 else ("gate_proj", "up_proj", "down_proj")
    mlp = "feed_forward" if lfm2 else "mlp"
    mixers = {"attention": _attention, "delta": _delta, "conv": _conv}
    for name, sources in mixers[mixer](config, lfm2):
        yield f"{prefix}{name}", {f"{source_prefix}{source}": shape for source, shape in sources.items()}
    yield f"{prefix}mixer_norm", {f"{source_prefix}{mixed}.weight": (hidden,)}
    yield f"{prefix}mlp_norm", {f"{source_prefix}{fed}.weight": (hidden,)}
    yield f"{prefix}gate_up", {f"{source_prefix}{mlp}.{name}.weight": (inner, hidden) for name in (gate, up)}
    yield f"{prefix}down", {f"{source_prefix}{mlp}.{down}.weight": (hidden, inner)}


def _attention(config: HybridConfig, lfm2: bool) -> Iterator[tuple[str, Parts]]:
    hidden, width, narrow = config.hidden_size, config.heads * config.head_dim, config.kv_heads * config.head_dim
    widths = {"q": width * (1 + config.gated_attention), "k": narrow, "v": narrow}
    yield "qkv", {f"self_attn.{name}_proj.weight": (rows, hidden) for name, rows in widths.items()}
    yield "output", {f"self_attn.{'out' if lfm2 else 'o'}_proj.weight": (hidden, width)}
    for name in ("q", "k"):
        yield f"{name}_norm", {f"self_attn.{name}_{'layernorm' if lfm2 else 'norm'}.weight": (config.head_dim,)}


def _conv(config: HybridConfig, _: bool) -> Iterator[tuple[str, Parts]]:
    hidden = config.hidden_size
    yield "inputs", {"conv.in_proj.weight": (3 * hidden, hidden)}
    yield "conv", {"conv.conv.weight": (hidden, 1, config.conv_width)}
    yield "output", {"conv.out_proj.weight": (hidden, hidden)}


def _delta(config: HybridConfig, _: bool) -> Iterator[tuple[str, Parts]]:
    hidden, heads, channels = config.hidden_size, config.value_heads, config.conv_channels
    values = heads * config.value_dim
    widths = {"qkv": channels, "z": values, "b": heads, "a": heads}
    yield "inputs", {f"linear_attn.in_proj_{name}.weight": (rows, hidden) for name, rows in widths.items()}
    yield "conv", {"linear_attn.conv1d.weight": (channels, 1, config.conv_width)}
    yield "decay", {"linear_attn.A_log": (heads,)}
    yield "decay_bias", {"linear_attn.dt_bias": (heads,)}
    yield "value_norm", {"linear_attn.norm.weight": (config.value_dim,)}
    yield "output", {"linear_attn.out_proj.weight": (hidden, values)}
