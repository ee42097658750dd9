"""Checkpoints of LLaDA2, with their own names: configuration and tensors.

Source: the configuration and modelling files of huggingface.co/inclusionAI/LLaDA2.0-mini. For the experts of LLaDA2.2, which the
rows of a block share, the words of FluxServe's guide to it (FLUX-OSS), whose gate has the numbers of the published one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from pdkernels._validation import check
from pdkernels.models.architectures.config import ExpertsConfig, TransformerConfig
from pdkernels.models.architectures.rope import PartialRotation
from pdkernels.models.checkpoints.hf_rope import require_no_rule
from pdkernels.models.checkpoints.hf_windows import require_alike
from pdkernels.models.files.fields import OP, Fields, demand, read_from, shown
from pdkernels.models.files.layout import Layout, Parts

MODEL_TYPE, MASK_TOKEN = "llada2_moe", 156895

_HEAD = "lm_head.weight"
_REQUIRED = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "moe_intermediate_size", "num_experts"),
)
_COMPUTED: dict[str, tuple[Any, Any]] = {
    # What is computed, and what its class does without the field.
    "hidden_act": ("silu", "silu"),
    "use_bias": (False, True),
    "use_qkv_bias": (False, False),
    "use_qk_norm": (True, False),
    "use_rmsnorm": (True, True),
    "norm_head": (False, False),
    "norm_topk_prob": (True, True),
    "score_function": ("sigmoid", "sigmoid"),
    "moe_router_enable_expert_bias": (True, True),
    "router_dtype": ("fp32", "fp32"),
    "use_sliding_window": (False, False),
    "rope_scaling": (None, None),
    "num_nextn_predict_layers": (0, 0),
}


def from_llada2_config(config: Mapping[str, Any]) -> TransformerConfig:
    """The `TransformerConfig` of a parsed `config.json`: block-causal, and row i predicts token i.

    Raises ValueError for fields that are missing, of the wrong kind or do not fit, NotImplementedError for what the
    transformer does not compute, so that no checkpoint gives wrong results.
    """
    fields = Fields(config)
    fields.require(_REQUIRED)
    require_alike(fields)
    for name, (computed, default) in _COMPUTED.items():
        actual = fields.values.get(name, default)
        if actual == computed and computed and name in fields.null:
            actual = None  # to its class, none of these
        demand(actual == computed, name, f"be {shown(computed)}", shown(actual))
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = fields.maybe_integer("head_dim") or max(hidden // heads, 1)
    share = fields.number("partial_rotary_factor", 0.5, above=0)
    rotated = int(head_dim * share)
    stated = fields.maybe_integer("rotary_dim") or rotated
    valid = stated == rotated and rotated % 2 == 0 and rotated <= head_dim
    demand(valid, "partial_rotary_factor", f"rotate an even part of {head_dim} components", shown(share))
    theta = fields.number("rope_theta", 10000.0, above=0)
    require_no_rule(fields, theta, share)
    with read_from("config.json"):
        return TransformerConfig(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden,
            layers=fields.integer("num_hidden_layers"),
            heads=heads,
            kv_heads=fields.integer("num_key_value_heads"),
            head_dim=head_dim,
            intermediate_size=fields.integer("intermediate_size"),
            rope_theta=theta,
            rope_scaling=None if rotated == head_dim else PartialRotation(rotated),
            norm_eps=fields.number("rms_norm_eps", 1e-5, minimum=0),
            qk_norm=True,
            tied_head=fields.flag("tie_word_embeddings", False),
            predicts="own",
            max_positions=fields.integer("max_position_embeddings", 16384),
            experts=_experts(fields),
        )


def _experts(fields: Fields) -> ExpertsConfig | None:
    layers, inner = fields.integer("num_hidden_layers"), fields.integer("moe_intermediate_size")
    dense = fields.integer("first_k_dense_replace", 0, minimum=0)
    check(dense <= layers, OP, "config.json: first_k_dense_replace", f"be at most num_hidden_layers ({layers})", dense)
    if dense == layers:
        return None
    pool = fields.integer("expert_capacity", 0, minimum=0, null=0)  # LLaDA2.2: a block's tokens share so many experts
    choice: dict[str, Any] = {"groups": fields.integer("n_group", 8), "chosen_groups": fields.integer("topk_group", 4)}
    if pool:  # which come before groups
        choice = {"pool": pool, "pool_rows": fields.integer("block_size")}
    return ExpertsConfig(
        fields.integer("num_experts"),
        fields.integer("num_experts_per_tok", 2),
        inner,
        first=dense,
        scores="sigmoid",
        biased=True,
        **choice,
        scale=fields.number("routed_scaling_factor", 2.5, above=0),
        shared_size=inner * fields.integer("num_shared_experts", 0, minimum=0),
    )


def layout(config: TransformerConfig) -> Layout:
    """The tensors of a checkpoint with this configuration."""
    count = 0 if config.experts is None else config.experts.count
    reorder = partial(turned, config) if config.rope_scaling is not None else None
    sources, embedding = partial(_parts, config), "model.word_embeddings.weight"
    return Layout(sources, config.layers, embedding, _HEAD, config.tied_head, experts=count, turned=reorder)


def turned(config: TransformerConfig, name: str, rows: torch.Tensor) -> torch.Tensor:
    """Components of q and k in our order: theirs rotates pairs within the first components of a head, and leaves the
    others."""
    parameter, scaling, size = name.rpartition(".")[2], config.rope_scaling, config.head_dim
    if parameter not in ("qkv", "q_norm", "k_norm"):
        return rows
    assert isinstance(scaling, PartialRotation)
    half, unturned = scaling.rotated // 2, (size - scaling.rotated) // 2
    index = torch.arange(size, device=rows.device)
    first, second, unrotated, last = index.split([half, half, unturned, unturned])
    order = torch.cat((first, unrotated, second, last))
    if parameter != "qkv":
        return rows[order]
    heads: torch.Tensor = rows.unflatten(0, (-1, size)).clone()
    turned = config.heads + config.kv_heads
    heads[:turned] = heads[:turned][:, order]
    flat: torch.Tensor = heads.flatten(0, 1)
    return flat


def _parts(config: TransformerConfig) -> Iterator[tuple[str, Parts]]:
    hidden, experts, matrix = config.hidden_size, config.experts, (config.vocab_size, config.hidden_size)
    width, qkv_width = config.heads * config.head_dim, (config.heads + 2 * config.kv_heads) * config.head_dim
    yield "embedding", {"model.word_embeddings.weight": matrix}
    for index in range(config.layers):
        prefix, source_prefix = f"layers.{index}.", f"model.layers.{index}."
        yield f"{prefix}qkv", {f"{source_prefix}attention.query_key_value.weight": (qkv_width, hidden)}
        for name, published in (("q_norm", "query_layernorm"), ("k_norm", "key_layernorm")):
            yield f"{prefix}{name}", {f"{source_prefix}attention.{published}.weight": (config.head_dim,)}
        yield f"{prefix}output", {f"{source_prefix}attention.dense.weight": (hidden, width)}
        if experts is None or not config.has_experts(index):
            yield from _mlp(f"{prefix}", f"{source_prefix}mlp.", hidden, config.intermediate_size)
        else:
            yield f"{prefix}router", {f"{source_prefix}mlp.gate.weight": (experts.count, hidden)}
            yield f"{prefix}router_bias", {f"{source_prefix}mlp.gate.expert_bias": (experts.count,)}
            numbers, inner = range(experts.count), experts.intermediate_size
            names = (
                f"{source_prefix}mlp.experts.{expert}.{half}_proj.weight"
                for expert in numbers
                for half in ("gate", "up")
            )
            yield f"{prefix}experts_gate_up", dict.fromkeys(names, (inner, hidden))
            names = (f"{source_prefix}mlp.experts.{expert}.down_proj.weight" for expert in numbers)
            yield f"{prefix}experts_down", dict.fromkeys(names, (hidden, inner))
            if experts.shared_size:
                yield from _mlp(f"{prefix}shared_", f"{source_prefix}mlp.shared_experts.", hidden, experts.shared_size)
        yield f"{prefix}attention_norm", {f"{source_prefix}input_layernorm.weight": (hidden,)}
        yield f"{prefix}mlp_norm", {f"{source_prefix}post_attention_layernorm.weight": (hidden,)}
    yield "norm", {"model.norm.weight": (hidden,)}
    if not config.tied_head:
        yield "head", {_HEAD: matrix}


def _mlp(prefix: str, source_prefix: str, hidden: int, inner: int) -> Iterator[tuple[str, Parts]]:
    yield f"{prefix}gate_up", {f"{source_prefix}{half}_proj.weight": (inner, hidden) for half in ("gate", "up")}
    yield f"{prefix}down", {f"{source_prefix}down_proj.weight": (hidden, inner)}
