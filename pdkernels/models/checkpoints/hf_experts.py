"""Experts in checkpoints with Hugging Face names: what a config.json says of them, and their tensors.

Source: the configuration and modelling files of Qwen3-MoE, Mixtral, OLMoE and gpt-oss in transformers, of
huggingface.co/JetLM/SDAR-30B-A3B-Chat and of huggingface.co/inclusionAI/LLaDA-MoE-7B-A1B-Base.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from pdkernels._validation import check
from pdkernels.models.architectures.config import ExpertsConfig, TransformerConfig
from pdkernels.models.files.fields import OP, Fields, demand, read_from, shown
from pdkernels.models.files.layout import Parts

GPT_OSS = "gpt_oss"
LLADA_MOE = "llada_moe"
"""LLaDA-MoE's config.json has the `model_type` of LLaDA, whose classes differ."""

_UNCOMPUTED: dict[str, tuple[Any, ...]] = {
    "shared_expert_intermediate_size": (0,),
    "n_shared_experts": (0,),
    "num_shared_experts": (0,),
    "first_k_dense_replace": (0,),
    "n_group": (1,),
    "topk_group": (1,),
    "router_num_group": (1,),
    "router_topk_group": (1,),
    "routed_scaling_factor": (1,),
    "scoring_func": ("softmax",),
    "score_function": ("softmax",),
    "moe_router_score_function": ("softmax",),
    "moe_router_enable_expert_bias": (False,),
    "router_bias": (False,),
    "clip_qkv": (),
}
"""Fields and the values, besides null, that change nothing; any other value would need a different computation."""


class _Names(NamedTuple):
    module: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


_DEFAULTS = _Names()
_OTHERS = {"mixtral": _Names("block_sparse_moe", "w1", "w3", "w2")}


def read_experts(fields: Fields, kind: str) -> ExpertsConfig | None:
    """The experts of a model of a type in `READERS`; None: every layer has an MLP."""
    for name, allowed in _UNCOMPUTED.items():
        value = fields.get(name)
        allowed_value = value is None or value in allowed
        demand(allowed_value, name, f"be {shown(allowed[0])}" if allowed else "be null", shown(value))
    return READERS[kind](fields)


def _count(fields: Fields, default: int) -> int:
    """transformers has two names for it."""
    names = [name for name in ("num_experts", "num_local_experts") if name in fields.given]
    counts = [fields.integer(name, minimum=0) for name in names]
    check(len({*counts}) < 2, OP, "config.json: num_experts", "equal num_local_experts, which means the same", counts)
    return counts[0] if counts else default


def _qwen3(fields: Fields) -> ExpertsConfig | None:
    layers, count = fields.integer("num_hidden_layers"), _count(fields, 128)
    step, dense = fields.integer("decoder_sparse_step", 1), fields.get("mlp_only_layers") or []
    valid = isinstance(dense, list) and all(type(layer) is int for layer in dense)
    check(valid, OP, "config.json: mlp_only_layers", "be a list of numbers of layers", shown(dense))
    per_token = fields.integer("num_experts_per_tok", 8)
    inner, normalized = fields.integer("moe_intermediate_size", 768), fields.flag("norm_topk_prob", False)
    dense_layers = {layer for layer in dense if 0 <= layer < layers}
    return _experts(layers, count, per_token, inner, normalized, step, tuple(sorted(dense_layers)))


def _mixtral(fields: Fields) -> ExpertsConfig | None:
    layers = fields.integer("num_hidden_layers")
    per_token, inner = fields.integer("num_experts_per_tok", 2), fields.integer("intermediate_size")
    return _experts(layers, _count(fields, 8), per_token, inner, True)


def _olmoe(fields: Fields) -> ExpertsConfig | None:
    layers, count = fields.integer("num_hidden_layers"), _count(fields, 64)
    per_token, inner = fields.integer("num_experts_per_tok", 8), fields.integer("intermediate_size")
    return _experts(layers, count, per_token, inner, fields.flag("norm_topk_prob", False))


def _gpt_oss(fields: Fields) -> ExpertsConfig | None:
    per_token = fields.integer("num_experts_per_tok", 4)
    inner, count = fields.integer("intermediate_size"), _count(fields, 128)
    clamp, slope = (fields.number(f"swiglu_{name}", usual) for name, usual in (("limit", 7.0), ("alpha", 1.702)))
    with read_from("config.json"):
        return ExpertsConfig(count, per_token, inner, biased=True, matrix_biases=True, clamp=clamp, gate_slope=slope)


def _llada(fields: Fields) -> ExpertsConfig | None:
    layers, heads = fields.integer("num_hidden_layers"), fields.integer("num_attention_heads")
    hidden = fields.integer("hidden_size")
    check(hidden % heads == 0, OP, "config.json: num_attention_heads", f"divide hidden_size ({hidden})", heads)
    normalized = fields.flag("norm_topk_prob", False)
    demand(not normalized, "norm_topk_prob", "be false", normalized)  # the published class does not read it
    frequencies = fields.get("moe_layer_freq") or []
    valid = (
        isinstance(frequencies, list)
        and len(frequencies) in (0, layers)
        and all(layer in (0, 1) for layer in frequencies)
    )
    check(valid, OP, "config.json: moe_layer_freq", f"be {layers} numbers that are 0 or 1", shown(frequencies))
    dense = tuple(layer for layer, chosen in enumerate(frequencies) if chosen == 0)
    per_token = fields.integer("num_experts_per_tok", 8)
    inner = fields.integer("expert_intermediate_size", 1024)
    return _experts(layers, _count(fields, 64), per_token, inner, False, 1, dense)


READERS: dict[str, Callable[[Fields], ExpertsConfig | None]] = {
    "qwen3_moe": _qwen3,
    "sdar_moe": _qwen3,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    GPT_OSS: _gpt_oss,
    LLADA_MOE: _llada,
}


def _experts(
    layers: int,
    count: int,
    per_token: int,
    inner: int,
    normalized: bool,
    every: int = 1,
    dense_layers: tuple[int, ...] = (),
) -> ExpertsConfig | None:
    if count == 0:
        return None
    with read_from("config.json"):
        experts = ExpertsConfig(count, per_token, inner, normalized, every=every, dense_layers=dense_layers)
    return experts if experts.are_in_any(layers) else None


def expert_parts(config: TransformerConfig, kind: str, prefix: str, source_prefix: str) -> Iterator[tuple[str, Parts]]:
    """The tensors of a layer's experts: `prefix` and `source_prefix` begin the names in that layer."""
    experts, names, hidden = config.experts, _OTHERS.get(kind, _DEFAULTS), config.hidden_size
    assert experts is not None
    each, inner = f"{source_prefix}{names.module}.experts.", experts.intermediate_size
    if kind == GPT_OSS:
        yield f"{prefix}router", {f"{source_prefix}mlp.router.weight": (experts.count, hidden)}
        yield f"{prefix}router_bias", {f"{source_prefix}mlp.router.bias": (experts.count,)}
        for name, (width, outputs) in {"gate_up": (hidden, 2 * inner), "down": (inner, hidden)}.items():
            yield f"{prefix}experts_{name}", {f"{each}{name}_proj": (experts.count, width, outputs)}
            yield f"{prefix}experts_{name}_bias", {f"{each}{name}_proj_bias": (experts.count, outputs)}
        return
    yield f"{prefix}router", {f"{source_prefix}{names.module}.gate.weight": (experts.count, hidden)}
    pairs = (f"{each}{expert}.{name}.weight" for expert in range(experts.count) for name in (names.gate, names.up))
    yield f"{prefix}experts_gate_up", dict.fromkeys(pairs, (inner, hidden))
    yield (
        f"{prefix}experts_down",
        {f"{each}{expert}.{names.down}.weight": (hidden, inner) for expert in range(experts.count)},
    )


def turned(count: int, name: str, rows: torch.Tensor) -> torch.Tensor:
    """A parameter of gpt-oss, whose matrices are stored transposed, with outputs of gates and of what they multiply in
    turns."""
    parameter = name.rpartition(".")[2]
    if parameter in ("experts_gate_up", "experts_down"):
        rows = rows.view(count, -1, rows.shape[1]).transpose(1, 2).flatten(0, 1)
    if parameter == "experts_gate_up":
        rows = rows.unflatten(0, (count, -1, 2)).transpose(1, 2).flatten(0, 2)
    elif parameter == "experts_gate_up_bias":
        rows = rows.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)
    return rows


def separated_experts(state: Mapping[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """The tensors of a model of transformers, which stacks the matrices of a layer's experts, by their published
    names."""
    if kind == GPT_OSS:  # stacked in its published form too
        return dict(state)
    names, separated = _OTHERS.get(kind, _DEFAULTS), dict[str, torch.Tensor]()
    for name, tensor in state.items():
        layer, _, suffix = name.partition(".mlp.")
        module = f"{layer}.{names.module}."
        if suffix == "experts.gate_up_proj" and tensor.dim() == 3:
            for expert, gate_up in enumerate(tensor):
                halves = zip((names.gate, names.up), gate_up.chunk(2))
                separated |= {f"{module}experts.{expert}.{half}.weight": values for half, values in halves}
        elif suffix == "experts.down_proj" and tensor.dim() == 3:
            separated |= {
                f"{module}experts.{expert}.{names.down}.weight": values for expert, values in enumerate(tensor)
            }
        else:
            separated[f"{module}gate.weight" if suffix == "gate.weight" else name] = tensor
    return separated
