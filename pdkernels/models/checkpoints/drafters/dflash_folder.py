"""Folders of DFlash, DSpark, DFlash 2 and XPress heads: their config.json and the names of their tensors.

Sources: speculators 0.9 (models/dflash, convert/dflash); the released checkpoints (``dflash_config``), which have
neither embedding nor head, and count the layers of the target from its first layer's output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pdkernels._validation import check
from pdkernels.models.checkpoints.drafters import dflash_kinds
from pdkernels.models.checkpoints.drafters.dflash_kinds import (  # fmt: skip
    DFLASH2,
    DSPARK,
    KINDS,
    OWN_FIELDS,
    XPRESS,
    refuse_others,
)
from pdkernels.models.checkpoints.hf import from_hf_config
from pdkernels.models.drafters.dflash import DFlashConfig
from pdkernels.models.drafters.parts import DEFAULTS, layer_config, layer_parts, proposals, window_config
from pdkernels.models.files.fields import OP, Fields, demand, read_from, shown
from pdkernels.models.files.folder import Weights
from pdkernels.models.files.layout import Layout, Parts

_MOST_POSITIONS = 2**31 - 1


def describes(fields: Fields) -> bool:
    """Whether a config.json is that of a head that fills blocks."""
    return fields.get("speculators_model_type") in KINDS or "dflash_config" in fields.values


_FIELDS = (
    "draft_vocab_size",
    "block_size",
    "target_hidden_size",
    "aux_hidden_state_layer_ids",
    "mask_token_id",
    "sliding_window_non_causal",
    "sample_from_anchor",
)
_RELEASED = ("mask_token_id", "target_layer_ids", "block_size")
_NEUTRAL = {
    "input_embedding_scale": 1,
    "output_multiplier": 1,
    "logit_scale": 1,
    "final_logit_softcapping": 0,
    "is_causal": False,
}
"""What the code of released checkpoints, or vLLM, reads besides, and the values that change nothing."""


def _checked_fields(fields: Fields, head_fields: Fields, published: bool, kind: str, layers: int) -> None:
    """Refuses what is not followed."""
    kind_fields = OWN_FIELDS.get(kind, ())
    if not published:
        refuse_others(fields, (*_FIELDS, *kind_fields))
        return
    for section in (fields, head_fields):
        for name, neutral in _NEUTRAL.items():
            value = section.values.get(name, neutral)
            demand(value == neutral, name, f"be absent or {neutral}", shown(value))
    refuse_others(head_fields, (*_RELEASED, *OWN_FIELDS[DFLASH2], *_NEUTRAL))
    made_for = fields.integer("num_target_layers", layers)
    check(made_for == layers, OP, "drafter", f"be for {layers} layers, the target's", made_for)


def config_of(fields: Fields, weights: Weights, target: Any) -> DFlashConfig:
    """The sizes of a head, checked against its target."""
    sizes = target.config
    published = fields.get("speculators_model_type") is None
    kind = "dflash" if published else str(fields.get("speculators_model_type"))
    inner, head_fields = (
        (fields, fields.part("dflash_config")) if published else (fields.part("transformer_layer_config"), fields)
    )
    if published and any(name in section.values for section in (fields, head_fields) for name in OWN_FIELDS[DFLASH2]):
        kind = DFLASH2
    _checked_fields(fields, head_fields, published, kind, sizes.layers)
    body_fields = _layer_fields(inner)
    body = from_hf_config(body_fields)
    whole_blocks = fields.flag("sliding_window_non_causal", kind == DFLASH2)
    if not (any(body.windows) or whole_blocks or published):
        # Rows of a block see none after them in layers with a window, also with one that is longer than all texts.
        unbounded = from_hf_config({**body_fields, "max_position_embeddings": _MOST_POSITIONS})
        body = replace(body, windows=unbounded.windows)
    # What a window means for a block is for the attention library to say that runs the published code.
    expectation = "be full_attention alone without a speculators_model_type"
    demand(not (any(body.windows) and published), "layer_types", expectation, shown(inner.get("layer_types")))
    width = fields.maybe_integer("target_hidden_size") or body.hidden_size
    demand(width == body.hidden_size, "target_hidden_size", f"be the head's own, {body.hidden_size}", width)
    check(
        width == sizes.hidden_size, OP, "drafter", f"be for a hidden size of {sizes.hidden_size}, the target's", width
    )
    vocabulary = body.vocab_size
    check(vocabulary == sizes.vocab_size, OP, "drafter", f"be for {sizes.vocab_size} tokens, the target's", vocabulary)
    blocks = head_fields if "block_size" in head_fields.values else fields
    merged = Fields({**fields.given, **head_fields.given})
    with read_from("config.json"):
        return dflash_kinds.config_class(kind)(
            body=body,
            taps=_taps(
                head_fields, "target_layer_ids" if published else "aux_hidden_state_layer_ids", sizes.layers, published
            ),
            block_size=blocks.integer("block_size"),
            mask_token=head_fields.integer("mask_token_id", minimum=0),
            draft_vocab_size=fields.integer("draft_vocab_size", vocabulary),
            sample_from_anchor=fields.flag("sample_from_anchor", kind == DSPARK),
            own_embedding="embed_tokens.weight" in weights.stored,
            own_head=any(name.startswith("lm_head.") for name in weights.stored),
            whole_blocks=any(body.windows) and whole_blocks,
            **dflash_kinds.own_options(kind, merged),
        )


def _layer_fields(inner: Fields) -> dict[str, Any]:
    """What `from_hf_config` reads of the layers, which are those of Qwen3, also where the class of their sizes is
    Llama's."""
    family = inner.get("model_type", "qwen3")
    demand(
        isinstance(family, str) and family in DEFAULTS, "model_type", f"be one of {', '.join(DEFAULTS)}", shown(family)
    )
    # Their blocks see themselves whole, and what is said of that is checked before.
    sizes = {name: value for name, value in inner.given.items() if name != "is_causal"}
    if family == "llama":  # whose sizes of heads follow from others
        heads = inner.integer("num_attention_heads", DEFAULTS[family]["num_attention_heads"])
        width = inner.integer("hidden_size", DEFAULTS[family]["hidden_size"]) // heads
        for name, default in (("num_key_value_heads", heads), ("head_dim", width)):
            sizes[name] = inner.values.get(name, default)
        sizes = {"max_position_embeddings": 2048, **sizes}
    return {**DEFAULTS[family], **sizes, "model_type": "qwen3", "tie_word_embeddings": False}


def _taps(fields: Fields, name: str, layers: int, published: bool) -> tuple[int, ...]:
    """Layers whose inputs are read. Released checkpoints name those whose outputs are."""
    layers_read, most = fields.get(name), layers - 2 if published else layers
    valid = (
        isinstance(layers_read, list)
        and layers_read
        and all(type(tap) is int and 0 <= tap <= most for tap in layers_read)
    )
    check(bool(valid), OP, f"{fields.where}: {name}", f"be layers in 0 .. {most}, the target's", shown(layers_read))
    return tuple(tap + published for tap in layers_read)


def layout(config: DFlashConfig) -> Layout:
    def parts() -> Iterator[tuple[str, Parts]]:
        return _parts(config)

    return Layout(parts, config.body.layers, "embed_tokens.weight", "lm_head.weight", False)


def _parts(config: DFlashConfig) -> Iterator[tuple[str, Parts]]:
    body, hidden = config.body, config.body.hidden_size
    if config.own_embedding:
        yield "embedding", {"embed_tokens.weight": (body.vocab_size, hidden)}
    yield "fc", {"fc.weight": (hidden, len(config.taps) * hidden)}
    yield "hidden_norm", {"hidden_norm.weight": (hidden,)}
    for index in range(body.layers):
        prefix = f"layers.{index}."
        yield from layer_parts(body, prefix, prefix, hidden)
        yield from dflash_kinds.layer_additions(config, prefix, prefix)
    yield "norm", {"norm.weight": (hidden,)}
    if config.own_head:
        yield "head", {"lm_head.weight": (config.draft_vocab_size, hidden)}
    yield from dflash_kinds.head_additions(config)


_ARCHITECTURES = {
    "dflash": "DFlashSpeculator",
    DSPARK: "DSparkSpeculator",
    DFLASH2: "DFlash2DraftModel",
    XPRESS: "XPressSpeculator",
}


def written(config: DFlashConfig, dtype: str, target: str, tokens: int | None) -> Mapping[str, Any]:
    """The config.json, in the format of the speculators library."""
    demand(config.body.qk_norm, "qk_norm", "be True, as in the layers of Qwen3", False)
    drafted, kind = config.block_size - config.first, dflash_kinds.kind_of(config)
    return {
        "architectures": [_ARCHITECTURES[kind]],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.block_size,
        "target_hidden_size": config.body.hidden_size,
        "aux_hidden_state_layer_ids": list(config.taps),
        "mask_token_id": config.mask_token,
        "sliding_window_non_causal": config.whole_blocks,
        "sample_from_anchor": config.sample_from_anchor,
        **dflash_kinds.written_options(config),
        "torch_dtype": dtype,
        "transformer_layer_config": layer_config(config.body) | window_config(config.body),
        "speculators_config": proposals(kind, target, drafted if tokens is None else tokens),
    }
