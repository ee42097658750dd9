"""A forward on a cache as one op of the CPU: the embedding, all layers and the head.

It calls the kernels that `Layer` calls, in the same order, so that every number has the same bits; what it saves is the
Python between them, a noticeable share of a small model's step. The layers themselves stay the definition: they run on
GPUs, in training, in a compiled graph, in fp64, with adapted rows, and wherever a layer is not simply ours.

The op works on parameters that were bound to it once (`Binding`). Every forward looks whether they are still the same
objects, and the op whether these still have the same memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module

from pdkernels._attention import PlanArguments
from pdkernels._host import dictionary_versions, unchanged
from pdkernels._structures import flat
from pdkernels._validation import refuse
from pdkernels.backends import resolve
from pdkernels.cache import Cache, WindowedCache
from pdkernels.masks import TilePlan
from pdkernels.models.architectures import fused
from pdkernels.models.architectures.attention import NewRows, check_mask, plan_of
from pdkernels.models.architectures.caches import expect_
from pdkernels.models.architectures.config import ExpertsConfig, TransformerConfig
from pdkernels.models.architectures.experts import ExpertLayer
from pdkernels.models.architectures.layer import Layer
from pdkernels.models.architectures.lora import AdaptedArguments, AdaptedRows
from pdkernels.models.architectures.rope import Rotation
from pdkernels.models.architectures.windows import Window
from pdkernels.ops.library import LIBRARY, NAMESPACE, counts_writes, run_counted, schema_of
from pdkernels.ops.quantized_weight import QuantizedWeight

OP = "transformer_layers_"
BIND = "bind_transformer"

# In the order of `ParameterReader` in python_bindings/transformer_parameters.h: a bias follows its matrix.
NAMES = (
    *("attention_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "sinks", "output", "output_bias"),
    *("attention_out_norm", "mlp_norm", "mlp_out_norm", "gate_up", "gate_up_bias", "down", "down_bias"),
)
# Those of a layer with experts.
EXPERT_NAMES = (
    *NAMES[: NAMES.index("gate_up")],
    *("router", "router_bias", "experts_gate_up", "experts_down", "shared_gate_up", "shared_down"),
)
_MATRICES = {
    "qkv",
    "inputs",
    "output",
    "gate_up",
    "down",
    "experts_gate_up",
    "experts_down",
    "shared_gate_up",
    "shared_down",
}


class TransformerParameters(NamedTuple):
    """The embedding, the head, what pairs rows for a drafter, and the parameters of all layers, one after the other;
    `ParameterInputs` in python_bindings/transformer_parameters.h."""

    tensors: list[Tensor | None]
    parts: list[int]
    """For each matrix the number of its quantised parts; 0 for one that is not quantised."""
    layouts: list[int]
    outputs: list[int]
    mixtures: list[int]
    """The layers with experts, by their places among these."""

    def add_layer(self, layer: Layer) -> None:
        """KeyError: it keeps some in another way."""
        every: dict[Any, Any] = dict(layer._parameters | layer._modules)
        every[None] = None
        names = LAYERS[type(layer)]
        for name in names if isinstance(names, tuple) else names[cast(Any, layer).mixer]:
            if name in _MATRICES:
                self.add_matrix(every[name])
            else:
                self.tensors.append(every[name])

    def add_matrix(self, weight: Any) -> None:
        """None: there is none."""
        if type(weight) is QuantizedWeight:
            self.tensors.extend(weight.data)
            self.layouts.extend(weight.layouts)
            self.outputs.extend(weight.outputs)
            self.parts.append(len(weight.outputs))
        else:
            self.tensors.append(weight)
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


class PairedArguments(NamedTuple):
    """How the layers of a drafter begin, with `Parts.paired`; `PairedInputs` in
    python_bindings/transformer_parameters.h."""

    paired: bool = False
    x_first: bool = False
    """Whether x is on the left of the embedding's row."""
    normed_residual: bool = False
    """Whether what the first layer adds to is x after its norm."""
    normed_out: bool = False
    """Whether the rows after the last layer are returned normed, as the head reads them."""


class SettingsArguments(NamedTuple):
    """What layers do beside their parameters, as a model's configuration says; `SettingsInputs` in
    python_bindings/transformer_parameters.h."""

    embedding_scale: float = 1.0
    query_factor: float = 1.0
    softcap: float = 0.0
    """Of scores; 0: they have none."""
    whole_qk_norm: bool = False
    gelu: bool = False
    windows: list[int] = []
    """Of each layer, 0: none; empty: no layer has one. They count where rows follow the cached ones; of others it is said
    for each forward what they see (`LayersArguments.starts`)."""
    chunks: list[int] = []
    """The same of windows that are `chunked`."""

    @classmethod
    def of(cls, config: TransformerConfig) -> SettingsArguments:
        scales = config.embedding_scale, config.query_factor or 1.0, config.attention_softcap or 0.0
        sizes = ([size_of(window) for window in config.windows] for size_of in (_slides, _chunks))
        return cls(*scales, config.whole_qk_norm, config.activation == "gelu", *sizes)


def _slides(window: Window | None) -> int:
    return 0 if window is None or window.chunked else window.size


def _chunks(window: Window | None) -> int:
    return 0 if window is None or not window.chunked else window.size


class MixerArguments(NamedTuple):
    """What layers have before their MLPs, from `HybridConfig`; `MixerInputs` in python_bindings/state_mixer.h."""

    mixers: list[int] = []
    """Of each layer, attention, a convolution between gates or a delta rule; empty: all have attention."""
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    rotary_dim: int = 0
    """Components of a head that are rotated; 0: all."""
    gated: bool = False
    """Whether a gate of attention's output lies beside each head of q."""
    centred: bool = False
    """Whether norms multiply by 1 plus their weight."""
    tiled: bool = False
    plain_decay: bool = False
    l2norm_eps: float = 0.0


class Parts(NamedTuple):
    """What is bound of a model beside its layers."""

    config: Any
    """A `TransformerConfig`, of the layers."""
    embedding: Any
    """A matrix; None: the op is not given ids."""
    head: Any
    """A matrix; None: the op gives no logits."""
    paired: tuple[Tensor | None, Tensor | None, Any] | None = None
    """Of a drafter whose layers begin with a row of the embedding and one of x side by side: the norms of both, and the
    matrix that makes one row of them; None: attention of the first layer reads them."""
    pairs: PairedArguments = PairedArguments()
    settings: SettingsArguments | None = None
    """None: those of layers as of Llama and Qwen3; others are not bound."""
    mixer: MixerArguments = MixerArguments()


class BindArguments(NamedTuple):
    """The arguments of `BIND`; `BindInputs` in python_bindings/transformer_parameters.h."""

    norm: Tensor
    parameters: TransformerParameters
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    interleaved: bool
    scale: float
    eps: float
    routing: RoutingArguments
    pairs: PairedArguments
    settings: SettingsArguments
    mixer: MixerArguments


class StateStepArguments(NamedTuple):
    """What a forward does to all states, see `pdkernels.gated_delta_`; `StateStepInputs` in
    python_bindings/state_mixer.h."""

    pending_index: Tensor | None = None
    parents: Tensor | None = None
    state_counts: Tensor | None = None
    keep: int | None = None


class StatesArguments(NamedTuple):
    """The states of layers without attention, one after the other, and what is kept of pending rows of each."""

    states: list[Tensor] = []
    pending: list[Tensor] = []
    state_lengths: Tensor | None = None
    """``(states, batch)``."""
    step: StateStepArguments = StateStepArguments()


_NO_STATES = StatesArguments()


class LayersArguments(NamedTuple):
    """The arguments of `OP`; `LayersInputs` in python_bindings/transformer_layers.h."""

    bound: Tensor
    x: Tensor
    """Rows, or ids of the embedding's."""
    beside: Tensor | None
    """Rows of the embedding, where a drafter's layers begin with pairs of rows."""
    taps: list[int]
    """Layers whose inputs are returned too; then `first` is 0."""
    first: int
    end: int
    with_logits: bool
    k_cache: Tensor
    v_cache: Tensor
    lengths: Tensor
    counts: Tensor | None
    cu_seqlens: Tensor | None
    block_table: Tensor | None
    more_k: list[Tensor]
    """Of further groups of layers, which have tables of their own; then those before are the first group's."""
    more_v: list[Tensor]
    more_tables: list[Tensor]
    groups: list[int]
    """That of each layer; empty: there is one."""
    longest: int
    cos: Tensor
    sin: Tensor
    window_cos: Tensor | None
    """Tables of layers with a window, if they have others."""
    window_sin: Tensor | None
    positions: Tensor | None
    """None: those after the cached rows."""
    starts: list[Tensor | None]
    """Of each layer; empty: as their windows say, without positions."""
    adapted: AdaptedArguments
    plan: PlanArguments
    states: list[Tensor]
    """As in `StatesArguments`."""
    pending: list[Tensor]
    state_lengths: Tensor | None
    step: StateStepArguments


_WRITTEN = ["k_cache", "v_cache", "more_k", "more_v", "states", "pending", "state_lengths"]
# Not among the public ops: they serve the models alone, have no other device, and their reference is `Layer`.
LIBRARY.define(f"{BIND}({schema_of(BindArguments)}) -> Tensor bound")
LIBRARY.define(
    f"{OP}({schema_of(LayersArguments, mutated=_WRITTEN)}) -> (Tensor hidden, Tensor logits, Tensor features)"
)
_bind = getattr(getattr(torch.ops, NAMESPACE), BIND).default
_run = getattr(getattr(torch.ops, NAMESPACE), OP).default
_WRITES = counts_writes(_run)

Names: TypeAlias = tuple[str | None, ...]
LAYERS: dict[type, Names | dict[str, Names]] = {Layer: NAMES, ExpertLayer: EXPERT_NAMES}
"""The classes of layers that are bound, and the names of their parameters, or these by the layer's mixer."""
_TYPES = {Tensor, torch.nn.Parameter, type(None)}
# What an instance may have replaced.
METHODS = {name for name, value in vars(Layer).items() if callable(value)} | {"_compiled_call_impl"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class Seen(NamedTuple):
    """What parameters were read from, as `unchanged` takes it."""

    dictionaries: tuple[dict[str, Any], ...]
    entries: tuple[Any, ...]
    versions: bytes
    layers: tuple[nn.Module, ...]
    classes: tuple[type, ...]

    @classmethod
    def of(cls, model: Any, holders: Sequence[nn.Module] = ()) -> Seen:
        dictionaries: list[dict[str, Any]] = [model._parameters, model._modules, model.layers._modules]
        for holder in holders:
            dictionaries += [holder._parameters, holder._modules]
        for layer in model.layers:
            dictionaries += [vars(layer), layer._parameters, layer._modules]
            dictionaries += [getattr(layer, name) for name in _HOOKS]
        for owner in (model, *holders, *model.layers):
            for weight in filter(None, owner._modules.values()):
                if type(weight) is QuantizedWeight:
                    dictionaries.append(weight._buffers)
        entries = tuple(entry for dictionary in dictionaries for pair in dictionary.items() for entry in pair)
        looked_at, layers = tuple(dictionaries), tuple(model.layers)
        return cls(looked_at, entries, dictionary_versions(looked_at), layers, tuple(map(type, layers)))


class Binding:
    """The parameters of a model as the op works on them.

    They are bound again after a change of the objects that hold them: a parameter, a buffer or a layer that was
    replaced, a hook or a method of a layer, or the configuration. Tensors that got other memory (`.data`, `.to`) are
    read again by the op. What is bound stays in memory until then: `drop` forgets it. Copies of a model start without.
    """

    def __init__(self) -> None:
        # Together, because several threads may run the model.
        self._kept: tuple[Seen, Tensor | None, Any] | None = None

    def of(self, model: Any) -> Tensor | None:
        """None: some layer is another class, has hooks, or keeps its parameters in another way."""
        kept = self._kept
        if kept is None or kept[2] is not model.config or not unchanged(*kept[0]):
            config = model.config
            kept = self._kept = Seen.of(model, self.holders(model)), _bound(model, self.parts(model)), config
        return kept[1]

    def parts(self, model: Any) -> Parts:
        config, head = model.config, model.embedding if model.head is None else model.head
        return Parts(config, model.embedding, head, settings=SettingsArguments.of(config))

    def holders(self, model: Any) -> Sequence[nn.Module]:
        """The modules beside `model` that hold some of `parts`."""
        return ()

    def drop(self) -> None:
        self._kept = None

    def __reduce__(self) -> tuple[type[Binding], tuple[()]]:
        return type(self), ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Binding:
        return type(self)()


def _bound(model: Any, bindable: Parts) -> Tensor | None:
    config, settings = bindable.config, bindable.settings
    experts_differ = config.experts is not None and not config.experts.usual
    if experts_differ or (settings is None and not config.usual) or any(map(_differs, model.layers)):
        return None
    parameters = TransformerParameters([], [], [], [], [])
    parameters.add_matrix(bindable.embedding)
    parameters.add_matrix(bindable.head)
    if bindable.paired is not None:
        *norms, merge = bindable.paired
        parameters.tensors.extend(norms)
        parameters.add_matrix(merge)
    try:
        for layer in model.layers:
            parameters.add_layer(layer)
    except KeyError:
        return None
    parameters.mixtures.extend(number for number, layer in enumerate(model.layers) if type(layer) is ExpertLayer)
    if not _TYPES.issuperset(map(type, (model.norm, *parameters.tensors))):
        return None
    interleaved, scale = config.rope_style == "interleaved", config.head_dim**-0.5
    sizes = len(model.layers), config.heads, config.kv_heads, config.head_dim
    routing = RoutingArguments.of(config.experts)
    eps, pairs = config.norm_eps, bindable.pairs._replace(paired=bindable.paired is not None)
    settings, mixer = settings or SettingsArguments(), bindable.mixer
    arguments = BindArguments(model.norm, parameters, *sizes, interleaved, scale, eps, routing, pairs, settings, mixer)
    try:
        bound: Tensor = _bind(*flat(arguments))
    except RuntimeError:
        return None
    return bound


def _differs(layer: Layer) -> bool:
    hooked = any(getattr(layer, name) for name in _HOOKS)
    return type(layer) not in LAYERS or hooked or not METHODS.isdisjoint(vars(layer))


def asked() -> bool:
    """What ``PDKERNELS_WHOLE_STEP`` says: on unless it is 0."""
    value = os.environ.get("PDKERNELS_WHOLE_STEP", "")
    refuse(value not in ("", "0", "1"), "WHOLE_STEP", f"PDKERNELS_WHOLE_STEP must be 0 or 1, got {value!r}")
    return value != "0"


def run_layers(
    model: Any, x: Tensor, rows: NewRows, first: int, end: int, taps: Sequence[int] = (), beside: Tensor | None = None
) -> tuple[Tensor, Tensor] | None:
    """What layer `end` of a model gets if layer `first` gets `x`, and what the layers `taps` get, ``(batch, rows,
    len(taps), hidden_size)``; None: they must run one by one.

    `beside`: rows of the embedding beside `x`, for a drafter that reads both.
    """
    cache, rotation, plan = rows.cache, rows.rotation, rows.visibility.mask
    fits = rotation.positions is not None and x.is_floating_point()
    if cache is None or not isinstance(plan, TilePlan) or not fits:
        return None
    # One plan serves all layers, and one rotation those with a window.
    windowed = next((seen.rotation for seen in rows.seen if seen.rotation is not None), None)
    of_windows = (seen.rotation is (None if seen.starts is None else windowed) for seen in rows.seen)
    alike = all(of_windows) and all(seen.visibility.mask is plan for seen in rows.seen)
    if not alike or not fused.enabled(x) or not serves(x, cache, rotation):
        return None
    results = results_of(
        model,
        x.contiguous(),
        (None if beside is None else beside.contiguous(), [*taps], first, end, False),
        cache,
        (rows.counts, rows.cu_seqlens),
        (rotation, windowed),
        [seen.starts for seen in rows.seen[first:end]],
        plan,
        rows.lora,
    )
    return None if results is None else (results[0], results[2])


def run_forward(
    model: Any,
    tokens: Tensor,
    cache: Cache,
    counts: Tensor | None,
    mask: Tensor | TilePlan | None,
    with_logits: bool,
    taps: Sequence[int] = (),
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The input of `logits` for rows after the cached ones, with `with_logits` their logits, and what the layers `taps`
    get; None: the forward must run part by part."""
    config = model.config
    if type(tokens) is not Tensor or tokens.dim() != 2:
        return None
    batch, rows = tokens.shape
    plan = plan_of(cache, rows, mask)
    if plan is None or not fused.enabled(model.norm):
        return None
    tables = rotations(model, cache.capacity + rows)
    if not serves(tokens, cache, tables[0]):
        return None
    if not _counts_fit(cache, batch, counts):
        return None
    check_mask("Transformer", mask, batch, rows, tokens.device)
    lora = AdaptedRows.of(cache.adapters, rows, None, tokens.device)
    expect_(cache, rows, counts)
    span = None, [*taps], 0, config.layers, with_logits
    results = results_of(model, tokens, span, cache, (counts, None), tables, [], plan, lora)
    if results is None or config.logits_softcap is None:
        return results
    hidden, logits, features = results
    return hidden, fused.capped(logits, config.logits_softcap), features


def _counts_fit(cache: Cache, batch: int, counts: Tensor | None) -> bool:
    """Whether these are arguments that a cache may be prepared for."""
    indices = counts is None or (counts.shape == (batch,) and not counts.is_floating_point())
    return cache.batch == batch and indices


def results_of(
    model: Any,
    x: Tensor,
    span: tuple[Tensor | None, list[int], int, int, bool],
    cache: Cache,
    rows: tuple[Tensor | None, Tensor | None],
    rotations: tuple[Rotation, Rotation | None],
    starts: list[Tensor | None],
    plan: TilePlan,
    lora: AdaptedRows | None,
    states: StatesArguments = _NO_STATES,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Those of the op for a model; None: it does not take these arguments."""
    bound = model.binding.of(model)
    if bound is None:
        return None
    try:
        adapted = AdaptedArguments([], None, []) if lora is None else lora.arguments(model.norm)
        k, v, table, more_k, more_v, more_tables, groups = places(cache)
        cos, sin, window_cos, window_sin = tables_of(*rotations)
        arguments = LayersArguments(
            bound, x, *span, k, v, cache.lengths, *rows, table, more_k, more_v, more_tables, groups, plan.q_len,
            cos, sin, window_cos, window_sin, rotations[0].positions, starts, adapted, plan.arguments,
            states.states, states.pending, states.state_lengths, states.step,
        )  # fmt: skip
        results: tuple[Tensor, Tensor, Tensor] = run_counted(
            _run, (*arguments[:-6], *adapted, *plan.arguments, *states[:-1], *states.step), _WRITES
        )
    except RuntimeError:  # nothing is written yet, and the layers say what does not fit
        return None
    return results


def rotations(model: Any, limit: int) -> tuple[Rotation, Rotation | None]:
    """The tables of a `Transformer` for positions below `limit`, and those of layers with a window, if they have others."""
    windowed = model._window_tables
    return model._rope(limit), None if windowed is None else windowed.covering(limit, model.device, model.dtype)


def tables_of(rotation: Rotation, windowed: Rotation | None) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Cosine and sine of all layers, and of those with a window, if they have others."""
    return rotation.cos, rotation.sin, *((None, None) if windowed is None else (windowed.cos, windowed.sin))


def places(cache: Any) -> tuple[Any, ...]:
    """K, V and page table of all layers, or of the first group of them, and what the op takes of further groups."""
    if type(cache.k) is Tensor:
        return cache.k, cache.v, cache.block_table, [], [], [], []
    first, *more = cache.parts
    further = ([getattr(part, name) for part in more] for name in ("k", "v", "block_table"))
    return first.k, first.v, first.block_table, *further, cache.part_of


def serves(x: Tensor, cache: Cache, rotation: Rotation) -> bool:
    """Whether the op computes such rows, and nobody watches, changes or records the ops of a layer."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state():
        return False
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0 or module._has_any_global_hook():
        return False
    if type(x) is not Tensor or x.device.type != "cpu" or rotation.query_scale is not None:
        return False
    fits = type(cache.k) is type(cache.v) is Tensor or isinstance(cache, WindowedCache)
    return fits and resolve("linear", "auto", x.device) == "native" and asked()
