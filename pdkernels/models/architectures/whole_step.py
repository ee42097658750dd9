"""All layers of a forward on a cache as one op of the CPU.

It calls the kernels that `Layer` calls, in the same order, so that every number has the same bits; what it saves is the
Python between them, a noticeable share of a small model's step. The layers themselves stay the definition: they run on
GPUs, in training, in a compiled graph, in fp64, with adapted rows, and wherever a layer is not simply ours.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.modules import module

from pdkernels._attention import PlanArguments
from pdkernels._structures import flat
from pdkernels._validation import refuse
from pdkernels.backends import resolve
from pdkernels.masks import TilePlan
from pdkernels.models.architectures import fused
from pdkernels.models.architectures.attention import NewRows
from pdkernels.models.architectures.config import ExpertsConfig
from pdkernels.models.architectures.experts import ExpertLayer
from pdkernels.models.architectures.layer import Layer
from pdkernels.ops.library import LIBRARY, NAMESPACE, counts_writes, run_counted, schema_of
from pdkernels.ops.quantized_weight import QuantizedWeight

OP = "transformer_layers_"

# In the order of `ParameterReader` in python_bindings/transformer_layers.h: a bias follows its matrix.
NAMES = (
    *("attention_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "output", "output_bias"),
    *("mlp_norm", "gate_up", "gate_up_bias", "down", "down_bias"),
)
# Those of a layer with experts.
EXPERT_NAMES = (
    *NAMES[: NAMES.index("gate_up")],
    *("router", "router_bias", "experts_gate_up", "experts_down", "shared_gate_up", "shared_down"),
)
_MATRICES = {"qkv", "output", "gate_up", "down", "experts_gate_up", "experts_down", "shared_gate_up", "shared_down"}


class Kind:
    """The names of a kind of layer's parameters."""

    def __init__(self, *names: str) -> None:
        self.names, self.of_layer = names, itemgetter(*names)
        self.unpacked = (0,) * sum(name in _MATRICES for name in names)


class LayerParameters(NamedTuple):
    """The parameters of all layers, one after the other; `ParameterInputs` in python_bindings/transformer_layers.h."""

    tensors: list[Tensor | None]
    parts: list[int]
    """For each matrix the number of its quantised parts; 0 for one that is not quantised."""
    layouts: list[int]
    outputs: list[int]
    mixtures: list[int]
    """The layers with experts, by their places among these."""

    def add(self, attributes: dict[str, Any], kind: Kind) -> None:
        """Appends the parameters of a layer with these `attributes`. KeyError: it keeps some in another way."""
        if not attributes["_modules"]:
            self.tensors.extend(kind.of_layer(attributes["_parameters"]))
            self.parts.extend(kind.unpacked)
            return
        every = attributes["_parameters"] | attributes["_modules"]
        for name in kind.names:
            value = every[name]
            if type(value) is QuantizedWeight:
                self.tensors.extend(value._buffers.values())  # its `data`, which looks each up by name
                self.layouts.extend(value.layouts)
                self.outputs.extend(value.outputs)
                self.parts.append(len(value.outputs))
            else:
                self.tensors.append(value)
                if name in _MATRICES:
                    self.parts.append(0)


class RoutingArguments(NamedTuple):
    """How experts are chosen, from `ExpertsConfig`; `RoutingInputs` in python_bindings/experts.h."""

    per_token: int = 0
    normalized: bool = False
    by_sigmoid: bool = False
    groups: int = 1
    chosen_groups: int = 1
    routing_scale: float = 1.0

    @classmethod
    def of(cls, experts: ExpertsConfig | None) -> RoutingArguments:
        if experts is None:
            return cls()
        by_sigmoid, groups = experts.scores == "sigmoid", experts.groups
        return cls(experts.per_token, experts.normalized, by_sigmoid, groups, experts.chosen_groups, experts.scale)


class LayersArguments(NamedTuple):
    """The arguments of the op; `LayersInputs` in python_bindings/transformer_layers.h."""

    x: Tensor
    parameters: LayerParameters
    k_cache: Tensor
    v_cache: Tensor
    lengths: Tensor
    counts: Tensor | None
    cu_seqlens: Tensor | None
    block_table: Tensor | None
    longest: int
    heads: int
    cos: Tensor
    sin: Tensor
    positions: Tensor
    interleaved: bool
    plan: PlanArguments
    scale: float
    eps: float
    routing: RoutingArguments
    starts: list[Tensor | None]
    """Of each layer; empty: all see their rows from the first one on."""


# Not one of the public ops: it serves the models alone, has no other device, and its reference is `Layer`.
LIBRARY.define(f"{OP}({schema_of(LayersArguments, mutated=['k_cache', 'v_cache'])}) -> (Tensor residual, Tensor added)")
_run = getattr(getattr(torch.ops, NAMESPACE), OP).default
_WRITES = counts_writes(_run)

_TYPES = {Tensor, torch.nn.Parameter, type(None)}
# What an instance may have replaced.
_METHODS = {name for name, value in vars(Layer).items() if callable(value)} | {"_compiled_call_impl"}


def asked() -> bool:
    """What ``PDKERNELS_WHOLE_STEP`` says: on unless it is 0."""
    value = os.environ.get("PDKERNELS_WHOLE_STEP", "")
    refuse(value not in ("", "0", "1"), "WHOLE_STEP", f"PDKERNELS_WHOLE_STEP must be 0 or 1, got {value!r}")
    return value != "0"


def run_layers(
    layers: Iterable[Layer], x: Tensor, rows: NewRows, span: slice | None = None
) -> tuple[Tensor, Tensor] | None:
    """What the last of `layers` returns for `x`; None: they must run one by one. `span`: their numbers; None: they are
    all."""
    if not _serves(x, rows):
        return None
    if not next(iter(layers)).config.usual:
        return None
    parameters = _parameters(layers)
    if parameters is None:
        return None
    cache, rotation, plan = rows.cache, rows.rotation, rows.visibility.mask
    assert cache is not None and isinstance(plan, TilePlan) and rotation.positions is not None
    config = next(iter(layers)).config
    arguments = LayersArguments(
        x=x,
        parameters=parameters,
        k_cache=cache.k if span is None else cache.k[span],
        v_cache=cache.v if span is None else cache.v[span],
        lengths=cache.lengths,
        counts=rows.counts,
        cu_seqlens=rows.cu_seqlens,
        block_table=cache.block_table,
        longest=plan.q_len,
        heads=config.heads,
        cos=rotation.cos,
        sin=rotation.sin,
        positions=rotation.positions,
        interleaved=rows.style == "interleaved",
        plan=plan.arguments,
        scale=cache.head_dim**-0.5,
        eps=config.norm_eps,
        routing=RoutingArguments.of(config.experts),
        starts=[seen.starts for seen in (rows.seen if span is None else rows.seen[span])],
    )
    try:
        results: tuple[Tensor, Tensor] = run_counted(_run, flat(arguments), _WRITES)
    except RuntimeError:  # nothing is written yet, and the layers say what does not fit
        return None
    return results


def _serves(x: Tensor, rows: NewRows) -> bool:
    """Whether the op computes such rows, and nobody watches, changes or records the ops of a layer."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state():
        return False
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0 or module._has_any_global_hook():
        return False
    if rows.cache is None or type(x) is not Tensor or x.device.type != "cpu" or not fused.enabled(x):
        return False
    fits = isinstance(rows.visibility.mask, TilePlan) and rows.rotation.positions is not None
    fits = fits and rows.rotation.query_scale is None and type(rows.cache.k) is type(rows.cache.v) is Tensor
    return fits and resolve("linear", "auto", x.device) == "native" and asked()


_KINDS = {Layer: Kind(*NAMES), ExpertLayer: Kind(*EXPERT_NAMES)}


def _parameters(layers: Iterable[Layer]) -> LayerParameters | None:
    """None where a layer is another class, has hooks, or keeps its parameters in another way."""
    parameters = LayerParameters([], [], [], [], [])
    try:
        for number, layer in enumerate(layers):
            attributes, kind = vars(layer), _KINDS.get(type(layer))
            if kind is None or layer._forward_hooks or layer._forward_pre_hooks:
                return None
            if not _METHODS.isdisjoint(attributes):
                return None
            if type(layer) is ExpertLayer:
                parameters.mixtures.append(number)
            parameters.add(attributes, kind)
    except KeyError:
        return None
    return parameters if _TYPES.issuperset(map(type, parameters.tensors)) else None
