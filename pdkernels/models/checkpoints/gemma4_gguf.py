"""Gemma 4 in GGUF files: configuration and tensors.

Sources: github.com/ggml-org/llama.cpp, src/models/gemma4.cpp and conversion/gemma.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from pdkernels._validation import check, message
from pdkernels.models.architectures.config import ExpertsConfig
from pdkernels.models.architectures.gemma4_config import Gemma4Config
from pdkernels.models.architectures.rope import FactorScaling, ProportionalRotation, RopeScaling
from pdkernels.models.architectures.windows import MAX_LAYERS, Window
from pdkernels.models.checkpoints import gemma4
from pdkernels.models.files.fields import OP, Fields, Kept, shown
from pdkernels.models.files.gguf_file import GgufFile
from pdkernels.models.files.gguf_keys import Keys
from pdkernels.models.files.layout import Layout, Parts

GGUF = "gemma4"
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
LOGITS_CAP = 30.0
"""llama.cpp's, of a file that does not say it; 0 is none."""
_STILL = 1e29
"""Factors of pairs that do not turn are larger."""


def config_of(file: GgufFile, fields: Keys, scaling: RopeScaling | None) -> Gemma4Config:
    """The configuration of a file; `scaling` is that of its layers that see the whole text."""
    layers = fields.integer("block_count")
    check(layers <= MAX_LAYERS, OP, f"{fields.where}.block_count", f"be at most {MAX_LAYERS}", layers)
    slides = _of_layers(fields, "attention.sliding_window_pattern", layers, bool)
    size, narrow = _width(fields, "key_length", "rope.dimension_count"), _width(fields, "key_length_swa", "")
    heads = _of_layers(fields, "attention.head_count_kv", layers, int)
    inner = _of_layers(fields, "feed_forward_length", layers, int)
    reading = fields.integer("attention.shared_kv_layers", minimum=0)
    check(
        reading <= layers,
        OP,
        f"{fields.where}.attention.shared_kv_layers",
        f"be at most block_count ({layers})",
        reading,
    )
    storing = layers - reading
    kinds = {kind: {count for count, of in zip(heads, slides, strict=True) if of is kind} for kind in (True, False)}
    for counts in kinds.values():
        _alike(fields, "attention.head_count_kv", counts, "be the same in all layers of a kind")
    # There the last layers read the last two before them, a window's and another's.
    if 0 < reading < layers and slides[max(storing - 2, 0) : storing] != [True, False]:
        label, expectation = f"{fields.where}.attention.sliding_window_pattern", "end with a window and none in the layers with keys and values"  # fmt: skip
        raise NotImplementedError(message(OP, label, expectation, shown(slides[:storing])))
    wide = reading > 0 and set(inner[storing:]) == {2 * inner[0]}
    expected = [inner[0]] * storing + [inner[0] * (1 + wide)] * reading
    check(inner == expected, OP, f"{fields.where}.feed_forward_length", "be one size, or twice it in the last layers", shown(inner))  # fmt: skip
    window = Window(fields.integer("attention.sliding_window", minimum=1))
    raw, hidden = Fields(fields.given, fields.where), fields.integer("embedding_length")
    first_full = next((layer for layer in range(storing) if not slides[layer]), None)
    return Gemma4Config(
        vocab_size=file.tensors[_EMBEDDING].shape[0],
        hidden_size=hidden,
        layers=layers,
        heads=fields.integer("attention.head_count"),
        kv_heads=next(iter(kinds[True] or kinds[False])),
        head_dim=narrow,
        intermediate_size=inner[0],
        rope_theta=fields.number("rope.freq_base", above=0),
        rope_scaling=_rotation(fields, scaling),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon", minimum=0),
        tied_head=_HEAD not in file.tensors,
        max_positions=fields.integer("context_length"),
        experts=_experts(fields),
        windows=tuple(window if slide else None for slide in slides),
        window_rope_theta=fields.number("rope.freq_base_swa", above=0) if any(slides) else None,
        embedding_scale=hidden**0.5,
        logits_softcap=raw.number("final_logit_softcapping", LOGITS_CAP, minimum=0) or None,
        full_kv_heads=next(iter(kinds[False] or kinds[True])),
        full_head_dim=size,
        keys_as_values=first_full is not None and f"blk.{first_full}.attn_v.weight" not in file.tensors,
        reading_layers=reading,
        wide_readers=wide,
        layer_input_size=fields.integer("embedding_length_per_layer_input", minimum=0),
    )


def _width(fields: Keys, name: str, rotated: str) -> int:
    """The size of a head, of which all is rotated, though pairs may stand still."""
    width = fields.integer(f"attention.{name}")
    for other in (f"attention.{name.replace('key', 'value')}", rotated or "rope.dimension_count_swa"):
        size = fields.integer(other)
        check(size == width, OP, f"{fields.where}.{other}", f"be the size of a head ({width})", size)
    return width


def _of_layers(fields: Keys, name: str, layers: int, kind: type) -> list[Any]:
    """One value for each layer, or the same for all; flags may be numbers."""
    value = fields.get(name)
    is_list = isinstance(value, (list, Kept))
    values = [value] * layers if not is_list else list(value) if len(value) == layers else []
    valid = all(type(each) in (int, kind) and 0 <= each <= (1 if kind is bool else 2**31 - 1) for each in values)
    noun = "flag" if kind is bool else "number"
    valid_values = bool(values) and valid and (kind is bool or all(values))
    check(valid_values, OP, f"{fields.where}.{name}", f"be a {noun}, or one for each of {layers} layers", shown(value))
    return [kind(each) for each in values]


def _alike(fields: Keys, name: str, values: set[Any], expectation: str) -> None:
    if len(values) > 1:
        raise NotImplementedError(message(OP, f"{fields.where}.{name}", expectation, shown(sorted(values))))


def _rotation(fields: Keys, scaling: RopeScaling | None) -> ProportionalRotation | None:
    """By factors, which are 1 of pairs that turn and very large of those that stand still."""
    if scaling is None:
        return None
    factors = scaling.factors if isinstance(scaling, FactorScaling) else ()
    turning = sum(factor < _STILL for factor in factors)
    plain_factors = bool(factors) and all(factor == 1 for factor in factors[:turning])
    plain_factors = plain_factors and all(factor >= _STILL for factor in factors[turning:])
    if not plain_factors:
        label = f"{fields.where}: rope_freqs.weight"
        raise NotImplementedError(message(OP, label, "be 1 for the first pairs and 1e30 for the others", "others"))
    return ProportionalRotation(turning)


def _experts(fields: Keys) -> ExpertsConfig | None:
    count = fields.integer("expert_count", minimum=0)
    if not count:
        return None
    return ExpertsConfig(count, fields.integer("expert_used_count"), fields.integer("expert_feed_forward_length"))


_NAMES = {
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    **{f"self_attn.{name}_norm": f"attn_{name}_norm" for name in "qk"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "layer_scalar": "layer_output_scale.weight",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "embed_tokens_per_layer": "per_layer_token_embd",
    "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
}
"""Published names, without their beginning and a last ``.weight``."""


def layout(config: Gemma4Config, file: GgufFile) -> Layout:
    """The tensors of a file with this configuration."""
    unread = [
        f"blk.{layer}.attn_{name}."
        for layer in range(config.cache_layers, config.layers)
        for name in ("k", "v", "k_norm")
    ]
    count = 0 if config.experts is None else config.experts.count
    parts = partial(_parts, config, "blk.0.ffn_gate_up_exps.weight" in file.tensors)
    return Layout(
        parts,
        config.layers,
        _EMBEDDING,
        _HEAD,
        config.tied_head,
        file.name,
        count,
        separate_experts=False,
        apart=tuple(unread),
    )


def _parts(config: Gemma4Config, joined: bool) -> Iterator[tuple[str, Parts]]:
    """`joined`: whether gates and what they multiply are one tensor for all experts."""
    for name, sources in gemma4.layout(config, gemma4.TEXT).parts():
        tensors = {_name(source): shape for source, shape in sources.items()}
        if name.endswith(".experts_gate_up") and not joined:
            ((source, (count, rows, width)),) = tensors.items()
            halves = (source.replace("gate_up", half) for half in ("gate", "up"))
            tensors = dict.fromkeys(halves, (count, rows // 2, width))
        yield name, tensors


def _name(published: str) -> str:
    if published == "lm_head.weight":
        return _HEAD
    suffix, begin = published.removeprefix("model."), ""
    if suffix.startswith("layers."):
        _, index, suffix = suffix.split(".", 2)
        begin = f"blk.{index}."
    if suffix in _NAMES:
        return begin + _NAMES[suffix]
    return f"{begin}{_NAMES[suffix.removesuffix('.weight')]}.weight"
