"""Checkpoints with Hugging Face names: configuration and tensors, both ways.

Qwen2, Qwen3, MiMo, Llama, Mistral, Ministral3, OLMo 2, OLMo 3, and the diffusion models Dream, Fast-dLLM v2, SDAR and
Nemotron-Labs-Diffusion; and with experts Qwen3-MoE, Mixtral, OLMoE, gpt-oss, SDAR-MoE and LLaDA-MoE.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from pdkernels._validation import check
from pdkernels.models.architectures.config import TransformerConfig
from pdkernels.models.architectures.rope import PartialRotation
from pdkernels.models.architectures.windows import MAX_LAYERS, Window
from pdkernels.models.checkpoints.hf_experts import GPT_OSS, LLADA_MOE, READERS, expert_parts, read_experts, turned
from pdkernels.models.checkpoints.hf_rope import GPT_OSS as GPT_OSS_ROPE
from pdkernels.models.checkpoints.hf_rope import MINISTRAL3, read_rope
from pdkernels.models.checkpoints.hf_windows import (
    SLIDING,
    layer_kinds,
    require_alike,
    require_causal,
    rules_by_kind,
    windows_of,
)
from pdkernels.models.files.fields import OP, Fields, demand, read_from, shown
from pdkernels.models.files.layout import Layout, Parts

NEMOTRON = "nemotron_labs_diffusion"
MIMO, MTP_LAYERS = "mimo", "model.mtp_layers."


class _Defaults(NamedTuple):
    """A published class: its defaults for fields that a config.json omits, and what no field says."""

    positions: int
    kv_heads: int | None = None
    """None: one for each query head."""
    null_kv_heads: bool = True
    """A null is one for each query head too, not an error."""
    head_dim: int | None = None
    """None: that of hidden_size."""
    null_head_dim: bool = True
    """A null is that of hidden_size too, not an error."""
    eps: float = 1e-6
    windows: bool = False
    """Whether windows are computed; otherwise one that hides something is refused."""
    window: int | None = None
    switched: bool = False
    """Whether use_sliding_window enables windows, from layer max_window_layers on."""
    unswitched: bool = False
    """Whether sliding_window alone enables windows."""
    all_slide: bool = False
    """Windows are then those of all layers, whatever max_window_layers and layer_types say."""
    every: int | None = None
    """Windows are those of layers by their kind: each layer of this number has none, unless layer_types says so."""
    rules_by_kind: bool = False
    """Layers with a window have a rotation of their own."""
    bias: bool = False
    """attention_bias may be true."""
    biased: bool = False
    """attention_bias is true where a file does not say it."""
    mask_token: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    whole_qk_norm: bool = False
    outer_norms: bool = False
    """Norms follow attention and the MLP, and do not precede them."""
    attention: Literal["causal", "bidirectional"] = "causal"
    predicts: Literal["next", "own"] = "next"
    theta: float = 10000.0
    rope: Mapping[str, Any] | None = None
    """The rule of a file without one."""


_QWEN2 = _Defaults(
    positions=32768, kv_heads=32, null_head_dim=False, window=4096, switched=True, bias=True, qkv_bias=True
)
_QWEN3 = _QWEN2._replace(head_dim=128, qkv_bias=False, qk_norm=True)
_QWEN3_MOE = _QWEN3._replace(kv_heads=4, null_kv_heads=False, head_dim=None, all_slide=True)
_OLMO2 = _Defaults(
    positions=2048, null_head_dim=False, eps=1e-5, bias=True, qk_norm=True, whole_qk_norm=True, outer_norms=True
)
# Dream has Qwen2's layers without a causal mask; row i still predicts token i + 1, which may be a mask. Fast-dLLM v2
# has the same layers and is causal except for the block that it fills. So is SDAR, with Qwen3's layers and rows that
# predict their own token.
_DEFAULTS = {
    "qwen2": _QWEN2._replace(windows=True),
    "qwen3": _QWEN3._replace(windows=True),
    "llama": _Defaults(positions=2048, bias=True),
    "mistral": _Defaults(positions=131072, kv_heads=8, null_kv_heads=False, windows=True, window=4096, unswitched=True),
    "ministral3": _Defaults(
        positions=262144,
        kv_heads=8,
        null_kv_heads=False,
        head_dim=128,
        null_head_dim=False,
        eps=1e-5,
        windows=True,
        unswitched=True,
        rope=MINISTRAL3,
    ),
    MIMO: _QWEN2,
    "Dream": _QWEN2._replace(attention="bidirectional"),
    "Fast_dLLM_Qwen": _QWEN2._replace(mask_token=151665),
    "sdar": _QWEN3._replace(mask_token=151669, predicts="own"),
    NEMOTRON: _Defaults(positions=262144, kv_heads=8, eps=1e-5),
    "qwen3_moe": _QWEN3_MOE._replace(windows=True),
    "mixtral": _Defaults(
        positions=131072, kv_heads=8, null_kv_heads=False, eps=1e-5, theta=1e6, windows=True, unswitched=True
    ),
    "olmoe": _Defaults(positions=4096, null_head_dim=False, eps=1e-5, bias=True, qk_norm=True, whole_qk_norm=True),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2._replace(theta=500000.0, window=4096, every=4, rules_by_kind=True),
    GPT_OSS: _Defaults(
        positions=131072,
        kv_heads=8,
        null_kv_heads=False,
        head_dim=64,
        null_head_dim=False,
        eps=1e-5,
        window=128,
        every=2,
        bias=True,
        biased=True,
        theta=150000.0,
        rope=GPT_OSS_ROPE,
    ),
    "sdar_moe": _QWEN3_MOE._replace(mask_token=151669, predicts="own"),
    # Its config.json names no mask token.
    LLADA_MOE: _Defaults(
        positions=8192,
        kv_heads=16,
        eps=1e-5,
        mask_token=156895,
        attention="bidirectional",
        predicts="own",
        theta=50000.0,
    ),
}
ARCHITECTURES = tuple(_DEFAULTS)
MASK_TOKENS = {kind: entry.mask_token for kind, entry in _DEFAULTS.items() if entry.mask_token is not None}

_HEAD = "lm_head.weight"
_INNER = {LLADA_MOE: "dense_intermediate_size"}
_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_OUTER_NORMS = {"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}
_REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


def from_hf_config(config: Mapping[str, Any]) -> TransformerConfig:
    """The `TransformerConfig` of a parsed `config.json`.

    Raises ValueError for fields that are missing or of the wrong kind, NotImplementedError for what the transformer
    does not compute (another architecture, activation or RoPE scaling), so that no checkpoint gives wrong results.

    >>> from_hf_config({"model_type": "qwen2", "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2,
    ...                 "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}).qkv_bias
    True
    """
    fields = Fields(config)
    fields.require(_REQUIRED)
    kind = fields.get("model_type")
    demand(kind in ARCHITECTURES, "model_type", f"be one of {', '.join(ARCHITECTURES)}", shown(kind))
    defaults, inner = _DEFAULTS[str(kind)], _INNER.get(str(kind), "intermediate_size")
    if kind != LLADA_MOE:
        fields.require((inner,))
    if kind in ("sdar", "sdar_moe"):  # their code comes with the checkpoint, so nothing here says its default
        fields.require(("head_dim",))
    activation = fields.get("hidden_act", "silu")
    demand(activation in ("silu", "swish"), "hidden_act", "be 'silu'", shown(activation))
    if defaults.attention == "causal" and defaults.mask_token is None and kind != NEMOTRON:
        require_causal(fields)
    demand(not fields.flag("use_mrope", False, null=False), "use_mrope", "be false", True)
    require_alike(fields)
    stated = fields.integer("max_position_embeddings", defaults.positions)
    layers = fields.integer("num_hidden_layers")
    kinds = layer_kinds(fields, layers, defaults.every) if defaults.every else []
    rotating, local_theta = fields, None
    if defaults.rules_by_kind:
        rotating, local_theta = rules_by_kind(fields, defaults.theta)
    with read_from("config.json"):
        scaled_queries = kind in ("ministral3", NEMOTRON)
        theta, scaling = read_rope(rotating, stated, scaled_queries, defaults.rope, defaults.theta)
    positions = stated if scaling is None else scaling.reach(stated)
    size = defaults.window if defaults.every else None
    windows = _windows(fields, defaults, positions) if size is None else windows_of(fields, kinds, size)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = max(hidden // heads, 1)
    llama, reads_bias = kind == "llama", kind == "llama" or defaults.qk_norm or defaults.biased
    biased = fields.flag("attention_bias", defaults.biased, null=None if reads_bias else False)
    mlp_biased = fields.flag("mlp_bias", False, null=None if llama else False)
    demand(not mlp_biased or llama, "mlp_bias", "be false", True)
    demand(not biased or defaults.bias, "attention_bias", "be false", True)
    if kind == NEMOTRON:  # the default of its class is no token
        fields.require(("mask_token_id",))
    experts = read_experts(fields, str(kind)) if kind in READERS else None
    qk_norm = fields.flag("qk_layernorm", True) if kind == LLADA_MOE else defaults.qk_norm
    with read_from("config.json"):
        return TransformerConfig(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden,
            layers=layers,
            heads=heads,
            kv_heads=fields.integer(
                "num_key_value_heads", defaults.kv_heads or heads, null=heads if defaults.null_kv_heads else None
            ),
            head_dim=fields.integer(
                "head_dim", defaults.head_dim or head_dim, null=head_dim if defaults.null_head_dim else None
            ),
            intermediate_size=fields.integer(inner, 8192 if kind == LLADA_MOE else None),
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=fields.number("rms_norm_eps", defaults.eps, minimum=0),
            qkv_bias=biased or defaults.qkv_bias,
            output_bias=biased and reads_bias,
            mlp_bias=mlp_biased,
            qk_norm=qk_norm,
            whole_qk_norm=defaults.whole_qk_norm,
            tied_head=fields.flag("tie_word_embeddings", False),
            attention=defaults.attention,
            predicts=defaults.predicts,
            max_positions=positions,
            experts=experts,
            windows=windows,
            window_rope_theta=local_theta if SLIDING in kinds else None,
            outer_norms=defaults.outer_norms,
            inner_norms=not defaults.outer_norms,
            sinks=kind == GPT_OSS,
        )


def _windows(fields: Fields, defaults: _Defaults, positions: int) -> tuple[Window | None, ...]:
    """Of each layer; empty: none is shorter than the longest text."""
    layers = fields.integer("num_hidden_layers")
    types = fields.get("layer_types") or []
    valid = isinstance(types, list) and all(isinstance(kind, str) for kind in types)
    check(valid, OP, "config.json: layer_types", "be a list of names", shown(types))
    allowed = {"full_attention", "attention"} | (
        {"sliding_attention"} if defaults.switched and not defaults.all_slide else set()
    )
    other = next((kind for kind in types if kind not in allowed), "full_attention")
    demand(other in allowed, "layer_types", "be 'full_attention' for every layer", shown(other))
    size = fields.maybe_integer("sliding_window") if "sliding_window" in fields.given else defaults.window
    short = size is not None and size < positions
    switched = not defaults.switched or fields.flag("use_sliding_window", False)
    listed = layers if short and switched else 0
    # Nothing is made for each layer of a config that no file holds.
    check(listed <= MAX_LAYERS, OP, "num_hidden_layers", f"be at most {MAX_LAYERS} with windows", layers)
    slides = [defaults.unswitched or fields.flag("use_sliding_window", True, null=False)] * listed
    if defaults.switched:
        first = fields.integer("max_window_layers", 28, minimum=0, null=0 if defaults.all_slide else None)
        slides = [defaults.all_slide or first <= layer for layer in range(listed)]
        if types and not defaults.all_slide:
            slides = [kind == "sliding_attention" for kind in types]
            check(len(slides) == layers, OP, "config.json: layer_types", f"name {layers} layers", len(slides))
            expectation = "be 'full_attention' without use_sliding_window"
            demand(switched or not any(slides), "layer_types", expectation, "other layers")
    if size is None or not short or not any(slides):
        return ()
    demand(defaults.windows, "sliding_window", f"be absent or cover all {positions} positions", size)
    # Their classes differ in which of the two they follow.
    demand(not (types and defaults.unswitched), "layer_types", f"be absent beside a sliding_window of {size}", "one")
    return tuple(Window(size) if slide else None for slide in slides)


def layout(config: TransformerConfig, kind: str = "") -> Layout:
    """The tensors of a checkpoint with this configuration; `kind` is its model_type if its tensors have other names."""
    body, head = ("encoder.", "diffusion_head.weight") if kind == NEMOTRON else ("model.", _HEAD)
    sources = partial(_parts, config, body, head, kind)
    count = 0 if config.experts is None else config.experts.count
    apart = (MTP_LAYERS,) if kind == MIMO else ()
    embedding = f"{body}embed_tokens.weight"
    stacked = kind == GPT_OSS
    return Layout(
        sources,
        config.layers,
        embedding,
        head,
        config.tied_head,
        experts=count,
        separate_experts=not stacked,
        apart=apart,
        turned=partial(turned, count) if stacked else None,
    )


def _parts(config: TransformerConfig, body: str, head: str, kind: str) -> Iterator[tuple[str, Parts]]:
    hidden, inner, matrix = config.hidden_size, config.intermediate_size, (config.vocab_size, config.hidden_size)
    query, key_value = config.heads * config.head_dim, config.kv_heads * config.head_dim
    yield "embedding", {f"{body}embed_tokens.weight": matrix}
    for index in range(config.layers):
        prefix, source_prefix = f"layers.{index}.", f"{body}layers.{index}."
        widths = {"q": query, "k": key_value, "v": key_value}
        yield (
            f"{prefix}qkv",
            {f"{source_prefix}self_attn.{name}_proj.weight": (width, hidden) for name, width in widths.items()},
        )
        if config.qkv_bias:
            yield (
                f"{prefix}qkv_bias",
                {f"{source_prefix}self_attn.{name}_proj.bias": (width,) for name, width in widths.items()},
            )
        for name, size in config.qk_norm_sizes.items():
            yield f"{prefix}{name}", {f"{source_prefix}self_attn.{name}.weight": (size,)}
        yield f"{prefix}output", {f"{source_prefix}self_attn.o_proj.weight": (hidden, query)}
        if config.output_bias:
            yield f"{prefix}output_bias", {f"{source_prefix}self_attn.o_proj.bias": (hidden,)}
        if config.has_experts(index):
            yield from expert_parts(config, kind, prefix, source_prefix)
        else:
            yield (
                f"{prefix}gate_up",
                {f"{source_prefix}mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")},
            )
            yield f"{prefix}down", {f"{source_prefix}mlp.down_proj.weight": (hidden, inner)}
        if config.mlp_bias and not config.has_experts(index):
            yield f"{prefix}gate_up_bias", {f"{source_prefix}mlp.{name}_proj.bias": (inner,) for name in ("gate", "up")}
            yield f"{prefix}down_bias", {f"{source_prefix}mlp.down_proj.bias": (hidden,)}
        if config.sinks:
            yield f"{prefix}sinks", {f"{source_prefix}self_attn.sinks": (config.heads,)}
        for name, source in (_NORMS if config.inner_norms else _OUTER_NORMS).items():
            yield f"{prefix}{name}", {f"{source_prefix}{source}.weight": (hidden,)}
    yield "norm", {f"{body}norm.weight": (hidden,)}
    if not config.tied_head:
        yield "head", {head: matrix}


def from_hf_state_dict(state: Mapping[str, torch.Tensor], config: TransformerConfig) -> dict[str, torch.Tensor]:
    """Our state dict from one with Hugging Face names: q, k, v and gate, up become one matrix each.

    Raises ValueError for tensors that are missing, left over or of another shape, NotImplementedError for tensors that
    are not floating point. A stored `lm_head` of a tied model must equal the embedding.
    """
    return _usual_layout(config).gather(state)


def to_hf_state_dict(state: Mapping[str, torch.Tensor], config: TransformerConfig) -> dict[str, torch.Tensor]:
    """The inverse of `from_hf_state_dict`; the tensors are views of ours. No model of Hugging Face with these names rotates
    adjacent components, so a config that does is refused."""
    pairs = config.rope_style == "interleaved"
    demand(not pairs, "model_type", "be one whose tensors are parts of ours", "a rotation of adjacent components")
    return _usual_layout(config).scatter(state)


def _usual_layout(config: TransformerConfig) -> Layout:
    """Refuses families whose tensors are stored in another form than ours."""
    experts = config.experts
    stored_otherwise = {
        "gpt-oss or Gemma": config.sinks or (config.inner_norms and config.outer_norms),
        "LLaDA2": isinstance(config.rope_scaling, PartialRotation)
        or (experts is not None and (experts.scores == "sigmoid" or experts.shared_size > 0)),
        "a hybrid": type(config) is not TransformerConfig and not config.outer_norms,
    }
    other = next((name for name, is_one in stored_otherwise.items() if is_one), "")
    demand(not other, "model_type", "be one whose tensors are parts of ours", other)
    return layout(config)
