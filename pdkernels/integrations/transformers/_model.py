"""A decoder of transformers as a model of `pdkernels.decoding`, and its weights as one of `pdkernels.models`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from pdkernels._validation import check, check_choice, check_type, integer, message
from pdkernels.cache import Cache, HybridCache, StateShape
from pdkernels.generation.generation_config import fields_of
from pdkernels.integrations.transformers._attention import attention
from pdkernels.integrations.transformers._experts import NAME, register_experts
from pdkernels.integrations.transformers._given import check_loaded, ids_of, in_vocabulary, without_adapter
from pdkernels.integrations.transformers._plans import PlanMask, mask_function
from pdkernels.integrations.transformers._probe import (
    TOKENS,
    UNBOUNDED,
    proof_length,
    prove,
    prove_converted,
    random_tokens,
    reach_of,
    refuse,
    remembered,
    shape_of,
    undisturbed,
)
from pdkernels.integrations.transformers._quantized import is_quantised, quantize_linears_
from pdkernels.integrations.transformers._shadow import body_of, head_of, noting_input, shadow, structure_of
from pdkernels.integrations.transformers._states import exchange_, other_scans, using
from pdkernels.integrations.transformers._tokenizer import adapted
from pdkernels.masks import TilePlan, causal, full
from pdkernels.models import Hybrid, RecurrentDepth, Transformer
from pdkernels.models.architectures.caches import expect_, new_cache, rewrite_
from pdkernels.models.architectures.recompute import nothing_new
from pdkernels.models.architectures.states import States
from pdkernels.models.architectures.taps import Tapped, checked_taps
from pdkernels.models.architectures.transformer import select_rows
from pdkernels.models.architectures.windows import Window, first_seen, windowed_plan
from pdkernels.models.checkpoints.hf_experts import separated_experts
from pdkernels.models.checkpoints.zoo import from_published
from pdkernels.ops.block_sparse_attention import block_sparse_attention
from pdkernels.ops.speculative_attention import speculative_attention, speculative_attention_append_


class Rows(NamedTuple):
    """The attention of the rows of one forward of a wrapped model; the attention function calls it in every layer."""

    plan: TilePlan
    cache: Cache | None = None
    counts: Tensor | None = None
    visible: Tensor | None = None
    """For recomputed rows, which are stored at `slots`: the number of positions that they attend to."""
    slots: Tensor | None = None
    places: dict[int, int] = {}
    """The layers of the cache by the numbers of the model's; empty: the same numbers."""
    windows: Mapping[int, Window] = {}
    """Of the layers that have one."""
    starts: Mapping[Window, Tensor] = {}
    """What rows on a cache see in layers with a window (`first_seen`)."""
    plans: Mapping[Window, TilePlan] = {}
    """What rows without a cache see there."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: int, scale: float | None, sinks: Tensor | None = None
    ) -> Tensor:
        """Attention of q ``(batch, rows, heads, head_dim)``, rotated like k."""
        cache, window = self.cache, self.windows.get(layer)
        if cache is None:
            plan = self.plan if window is None else self.plans[window]
            return block_sparse_attention(q, k, v, plan, scale=scale, sinks=sinks)
        starts = None if window is None else self.starts[window]
        place = self.places.get(layer, layer)
        k_cache, v_cache, table = cache.k[place], cache.v[place], cache.table(place)
        if self.visible is None:
            return speculative_attention_append_(
                q,
                k,
                v,
                k_cache,
                v_cache,
                cache.lengths,
                self.plan,
                counts=self.counts,
                starts=starts,
                block_table=table,
                scale=scale,
                sinks=sinks,
            )
        assert self.slots is not None
        sequences, rows = (self.slots >= 0).nonzero(as_tuple=True)
        targets = self.slots[sequences, rows]
        pages = sequences
        if table is not None:
            size = k_cache.shape[1]
            pages, targets = table[sequences, targets // size].long(), targets % size
        k_cache[pages, targets], v_cache[pages, targets] = k[sequences, rows], v[sequences, rows]
        visible = self.visible
        return speculative_attention(
            q, k, v, k_cache, v_cache, visible, self.plan, starts=starts, block_table=table, scale=scale, sinks=sinks
        )


@dataclass(frozen=True)
class WrappedConfig:
    """The config of a wrapped model, as decoding methods and caches need it."""

    vocab_size: int
    hidden_size: int
    layers: int
    kv_heads: int
    head_dim: int
    attention: Literal["causal", "bidirectional"]
    predicts: Literal["next", "own"]
    max_positions: int
    trained_positions: int
    """`max_positions` without regard to what rows see."""
    attends: tuple[int, ...] = ()
    """The layers with attention, if other layers have recurrent states."""
    states: Mapping[Any, StateShape] | None = None
    """The recurrent states, if there are any."""
    windows: Mapping[int, Window] = field(default_factory=dict)
    """Of the layers whose rows do not see the whole text before them, by their numbers."""


def run_body(
    body: Any,
    tokens: Tensor,
    positions: Tensor,
    step: Any,
    states: dict[int, Tensor | None] | None = None,
    scans: States | None = None,
) -> Tensor:
    """The last hidden states of a model whose layers attend by ``step.attend``, and whose recurrent layers take their
    `scans`; `states` gets the inputs of its keys' layers."""
    # A 4-D mask is passed on unchanged; without one transformers would look for packed texts.
    mask = PlanMask(len(tokens), tokens.shape[1], tokens.shape[1], 0, None, tokens.device)
    mask.step = step
    options = {"output_hidden_states": True} if states else {}
    with nullcontext() if scans is None else using(scans):
        out = body(input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=False, **options)
    for tap, state in (states or {}).items():
        if state is None:
            assert states is not None
            states[tap] = out.hidden_states[tap]
    hidden: Tensor = out.last_hidden_state
    return hidden


class WrappedModel:
    """The result of `wrap`: see `pdkernels.models.SelfSpeculativeModel` and `BlockCausalModel`."""

    has_adapter = False

    def __init__(
        self, model: Any, shadowed: Any, config: WrappedConfig, tokenizer: Any, mask_token: int | None
    ) -> None:
        self.model, self.config, self.tokenizer, self.mask_token = model, config, tokenizer, mask_token
        self._structure = structure_of(model)
        self._body, self._head = body_of(shadowed), head_of(shadowed)
        self.end_tokens = _ends(model)
        self.generation_config = dict(fields_of(model))
        self._places = {layer: place for place, layer in enumerate(config.attends)}

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies are wrapped anew: a tree of modules has functions of ours in it, and another process must know them."""
        copied = ("tokenizer", "mask_token", "end_tokens", "generation_config", "drafters")
        state = {name: value for name, value in vars(self).items() if name in copied}
        return _wrapped_again, (self.model, self.config.attention, self.config.predicts), state

    @property
    def keeps_rows(self) -> bool:
        """Whether `recompute` leaves the other rows of a cache as they are. Rows of recurrent layers cannot be computed
        anew."""
        return self.config.states is None

    @property
    def head(self) -> Any:
        """The matrix of the head, for drafters that share it. `logits` may have scales and caps besides."""
        return self.model.get_output_embeddings().weight

    @property
    def norm(self) -> Tensor:
        """The weight of the body's last norm, if it has one by this name."""
        weight: Tensor = self._body.norm.weight
        return weight

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    def new_cache(
        self,
        batch: int,
        capacity: int,
        *,
        kind: Literal["contiguous", "paged"] = "contiguous",
        page_size: int = 16,
        drafts: int | None = None,
    ) -> Cache:
        """As `Transformer.new_cache`; a `pdkernels.cache.HybridCache` for a model with recurrent layers."""
        self._check_structure()
        config = self.config
        slots = len(config.attends) or None
        windows = [config.windows.get(layer) for layer in config.attends or range(config.layers)]
        cache = new_cache(self, batch, capacity, kind, page_size, slots, windows=windows, drafts=drafts)
        return cache if config.states is None else cast(Cache, HybridCache(cache, config.states))

    @torch.no_grad()
    def hidden(
        self,
        tokens: Tensor,
        *,
        cache: Cache | None = None,
        counts: Tensor | None = None,
        positions: Tensor | None = None,
        mask: TilePlan | None = None,
        adapted: bool = False,
    ) -> Tensor:
        """As `Transformer.hidden`, with plans for masks."""
        return self._hidden(tokens, cache, counts, positions, mask, adapted, {})

    @torch.no_grad()
    def tapped(
        self,
        tokens: Tensor,
        taps: Sequence[int],
        *,
        cache: Cache | None = None,
        counts: Tensor | None = None,
        positions: Tensor | None = None,
        mask: TilePlan | None = None,
        adapted: bool = False,
    ) -> Tapped:
        """As `Transformer.tapped`, with plans for masks. What the last layer returns can be tapped where the body has a
        last `norm`."""
        taps = checked_taps("WrappedModel.tapped", taps, self.config.layers, last=hasattr(self, "norm"))
        states: dict[int, Tensor | None] = dict.fromkeys(taps)
        return Tapped.of(self._hidden(tokens, cache, counts, positions, mask, adapted, states), states, taps)

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        """As `Transformer.embed`."""
        rows: Tensor = self._body.get_input_embeddings()(tokens)
        return rows

    def _hidden(
        self,
        tokens: Tensor,
        cache: Cache | None,
        counts: Tensor | None,
        positions: Tensor | None,
        mask: TilePlan | None,
        adapted: bool,
        states: dict[int, Tensor | None],
    ) -> Tensor:
        check(
            adapted is False,
            "WrappedModel",
            "adapted",
            "be False",
            adapted,
            "Merge the adapter, or use from_transformers.",
        )
        if cache is None:
            self._check_structure()
        rows = tokens.shape[1]
        if mask is None:
            sees_all = cache is None and self.config.attention == "bidirectional"
            mask = (full(rows) if sees_all else causal(rows)).plan(64, 64, tokens.device)
        check_type(isinstance(mask, TilePlan), "WrappedModel", "mask", "be a TilePlan", type(mask).__name__)
        offsets = torch.arange(rows, device=tokens.device) if positions is None else positions
        where = offsets.expand(tokens.shape) if cache is None else cache.lengths[:, None] + offsets
        scans = None
        if self.config.states is not None:
            hybrid_cache = cache if isinstance(cache, HybridCache) else None
            check(hybrid_cache is cache, "WrappedModel", "cache", "be one of `new_cache`", type(cache).__name__)
            scans = States(hybrid_cache, len(tokens), rows, tokens.device, counts, mask)
        windows = self.config.windows
        seen = Rows(mask, cache, counts, places=self._places, windows=windows)
        expect_(cache, rows, counts)
        if windows and cache is None:
            plan = partial(windowed_plan, rows=rows, device=tokens.device, mask=mask, positions=positions)
            seen = seen._replace(plans={window: plan(window) for window in set(windows.values())})
        elif windows and cache is not None:
            starts = first_seen(windows.values(), cache.lengths, rows, positions, mask)
            seen = seen._replace(starts=starts)
        return self._run(tokens, where, seen, states, scans)

    @torch.no_grad()
    def recompute(
        self,
        tokens: Tensor,
        cache: Cache,
        starts: Tensor,
        *,
        slots: Tensor | None = None,
        counts: Tensor | None = None,
        visible: Tensor,
    ) -> Tensor:
        """As `Transformer.recompute`, of models without recurrent layers."""
        if self.config.states is not None:
            expectation = "have rows that can be computed anew, without the ones before them"
            raise NotImplementedError(message("recompute", "model", expectation, "one with recurrent states"))
        rows = tokens.shape[1]
        order = torch.arange(rows, device=tokens.device)
        slots = order.expand(tokens.shape) if slots is None else slots
        if counts is not None:
            slots = torch.where(order < counts[:, None], slots, -1)
        rewrite_(cache, starts, slots)
        targets = torch.where(slots >= 0, starts[:, None] + slots, -1)
        plan = nothing_new(rows, tokens.device)
        where, windows = targets.clamp(min=0), self.config.windows
        first = {window: window.first(where) for window in set(windows.values())}
        seen = Rows(plan, cache, None, visible, targets, windows=windows, starts=first)
        return self._run(tokens, where, seen)

    def quantized(
        self, format: str = "int8", *, group: int | None = None, skip: str | Collection[str] = ()
    ) -> WrappedModel:
        """The same model with quantised linear layers, see `pdkernels.quantize`. The model that was wrapped stays as it
        is."""
        copied = quantize_linears_(shadow(self.model), format, group=group, skip=skip)
        config = self.config
        wrapped = wrap(copied, mask_token=self.mask_token, attention=config.attention, predicts=config.predicts)
        wrapped.tokenizer, wrapped.end_tokens = self.tokenizer, self.end_tokens
        wrapped.generation_config = self.generation_config
        return wrapped

    def _check_structure(self) -> None:
        """Raises ValueError if the model has become another one."""
        same = structure_of(self.model) == self._structure
        expectation = "have the modules and adapters that it had when it was wrapped"
        check(same, "WrappedModel", "model", expectation, "others", "Wrap it again.")

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        rows: Rows,
        states: dict[int, Tensor | None] | None = None,
        scans: States | None = None,
    ) -> Tensor:
        # Drafts may extend past the last position; only padding rows attend to these tokens.
        places, last = positions.clamp(max=self.config.trained_positions - 1), self.config.layers
        with noting_input(self._body.norm, states, last) if states and last in states else nullcontext():
            return run_body(self._body, tokens, places, rows, states, scans)

    def logits(self, hidden: Tensor) -> Tensor:
        """The computation of the model's class after its body: the head, with scales and caps if it has them."""
        with torch.no_grad():
            out = self._head(hidden.reshape(1, -1, hidden.shape[-1]))
        logits: Tensor = out.logits
        return logits.view(*hidden.shape[:-1], logits.shape[-1])

    def __call__(self, tokens: Tensor, *, rows: Any = None, **options: Any) -> Tensor:
        """As a forward of `Transformer`."""
        hidden = self.hidden(tokens, **options)
        return self.logits(hidden if rows is None else select_rows("WrappedModel", hidden, rows))


def register() -> None:
    """Registers ``attn_implementation="pdkernels"`` and ``experts_implementation="pdkernels"`` with transformers.
    Idempotent.

    Models then attend with `pdkernels.block_sparse_attention` (training, prefill, ``model(...,
    tile_plan=mask.plan())``) and `pdkernels.speculative_attention` (decoding on any cache of transformers, and on
    `PdCache`).

    Example:
        >>> import transformers
        >>> from pdkernels.integrations.transformers import register
        >>> register()
        >>> "pdkernels" in transformers.AttentionInterface()
        True
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask_function)
    register_experts()


def wrap(
    model: Any,
    tokenizer: Any = None,
    *,
    mask_token: int | None = None,
    attention: Literal["causal", "bidirectional"] = "causal",
    predicts: Literal["next", "own"] | None = None,
) -> WrappedModel:
    """A decoder of transformers for `pdkernels.decoding.generate`. No weight is copied, and nothing of the model
    changes.

    It runs with our attention and caches in evaluation mode, as a second tree of modules with the same weights. New
    values of weights, ``model.to(...)`` and hooks are followed; after replacing modules or switching adapters, call
    `wrap` again: a text is refused until then. A few random tokens are first compared with the model's own forward, and a model whose results differ
    is refused. That happens once per model and configuration. Prompts of vision-language models are text only.

    Block-causal models that fill masks (LLaDA2) are causal ones whose rows predict their own token: ``wrap(model,
    mask_token=156895, predicts="own")``, for the method "fast_dllm_v2".

    Args:
        model: with a language model head, whose attention takes its implementation from `AttentionInterface`; remote
            code, models with PEFT's adapters and compiled ones too.
        tokenizer: one of transformers, whose chat template then renders messages; or any with ``encode(text)`` and
            ``decode(ids)``.
        mask_token: the id that the model was trained to fill in.
        attention: "causal", or "bidirectional" for masked-diffusion models.
        predicts: the token that a row's logits predict; None: "own" for a bidirectional model, else "next".

    Raises:
        TypeError: not a decoder of transformers.
        NotImplementedError: a model that keeps another state than keys and values, whose attention cannot be chosen or
            is none that the kernels compute, that depends on more than tokens and positions, or whose weights are not
            in memory.

    Example:
        >>> import torch, transformers
        >>> import pdkernels as pd
        >>> from pdkernels.integrations.transformers import wrap
        >>> config = transformers.Qwen3Config(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        ...     num_key_value_heads=1, head_dim=16, intermediate_size=48)
        >>> model = transformers.Qwen3ForCausalLM(config).eval()
        >>> ours = pd.decoding.generate(wrap(model), [1, 2, 3], "jacobi", max_new_tokens=5, end_tokens=())
        >>> theirs = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5, do_sample=False)
        >>> ours.tokens.tolist() == theirs[0, 3:].tolist()
        True
    """
    op = "wrap"
    model = _plain_model(op, model)
    check_choice(op, "attention", attention, ("causal", "bidirectional"))
    if mask_token is not None:
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        mask_token = integer(op, "mask_token", mask_token, 0)
        check(mask_token < vocabulary, op, "mask_token", f"be an id in 0 .. {vocabulary - 1}", mask_token)
    predicts = predicts or ("own" if attention == "bidirectional" else "next")
    check_choice(op, "predicts", predicts, ("next", "own"))
    register()
    shadowed = shadow(model, NAME)
    recurrent = exchange_(shadowed)
    if recurrent and (attention, predicts) != ("causal", "next"):
        expectation = "be without recurrent layers, which see only what comes before, to fill masks in a text"
        refuse(expectation, type(model).__name__)
    read, keep = remembered(model, attention, predicts)
    sizes: WrappedConfig | None = read()
    if sizes is None:
        with undisturbed(model.device):
            sizes = _measured(model, shadowed, attention, predicts, recurrent)
        keep(sizes)
    return WrappedModel(model, shadowed, sizes, adapted(tokenizer), mask_token)


def _ends(model: Any) -> tuple[int, ...]:
    return in_vocabulary(model, ids_of(getattr(model.generation_config, "eos_token_id", None)))


def _check_class(op: str, model: Any) -> None:
    is_decoder = all(hasattr(model, name) for name in ("base_model", "get_output_embeddings", "config"))
    check_type(is_decoder, op, "model", "be a decoder of transformers", type(model).__name__)


def _wrapped_again(
    model: Any, attention: Literal["causal", "bidirectional"], predicts: Literal["next", "own"]
) -> WrappedModel:
    return wrap(model, attention=attention, predicts=predicts)


def _plain_model(op: str, model: Any) -> Any:
    """The decoder without the wrappers of torch.compile and PEFT."""
    model = without_adapter(op, getattr(model, "_orig_mod", model))
    _check_class(op, model)
    name = type(model).__name__
    check_loaded(op, model)
    if getattr(model.config, "is_encoder_decoder", False):
        expectation = "be a decoder alone"
        raise NotImplementedError(message(op, "model", expectation, f"{name}, an encoder with a decoder"))
    if getattr(model.config, "expert_capacity", 0):  # LLaDA2.2
        expectation = "choose the experts of each row by itself"
        raise NotImplementedError(message(op, "model", expectation, name, "Load it with pdkernels.models.load."))
    has_head = model.get_output_embeddings() is not None and body_of(model) is not None
    check_type(has_head, op, "model", "have a language model head", name)
    return model


def _measured(
    model: Any,
    shadowed: Any,
    attention: Literal["causal", "bidirectional"],
    predicts: Literal["next", "own"],
    recurrent: bool,
) -> WrappedConfig:
    """Sizes of a model whose results with our attention equal its own; other models are refused."""
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    body = body_of(shadowed)
    states = States(None, 1, 1, model.device) if recurrent else None
    shape = shape_of(
        name,
        config,
        lambda *given: run_body(body, given[0], given[1], given[2], None, states),
        model.device,
        states,
        other_scans(shadowed),
    )
    tokens = random_tokens(model, 2, TOKENS)
    positions = int(getattr(config, "max_position_embeddings", None) or UNBOUNDED)

    def run(tokens: Tensor) -> None:
        with using(States(None, tokens.shape[0], tokens.shape[1], model.device)) if recurrent else nullcontext():
            body(input_ids=tokens, use_cache=False)

    reach = reach_of(name, config, run, tokens, positions, windows=attention == "causal")
    sizes = WrappedConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        attention=attention,
        predicts=predicts,
        max_positions=reach.positions,
        trained_positions=positions,
        attends=shape.attends if recurrent else (),
        states=states.shapes if states is not None else None,
        windows=reach.windows,
    )
    tokens = random_tokens(model, 2, max(TOKENS, proof_length(reach.windows, reach.positions)))
    implementation = getattr(model.config, "_attn_implementation", None)
    prove(
        name,
        WrappedModel(model, shadowed, sizes, None, None),
        shadow(model, "eager" if implementation == NAME else None),
        tokens,
    )
    return sizes


def from_transformers(model: Any, tokenizer: Any = None) -> Transformer | Hybrid:
    """The weights of a transformers model in a `pdkernels.models.Transformer` or `Hybrid`, with its dtype and on its
    device.

    The architectures are those of `pdkernels.models.load`. Matrices that we store fused (q, k and v) are copied, the
    others shared. The logits of a few random tokens, at early and at late positions, are compared with the model's own.

    Raises:
        NotImplementedError: an architecture or a setting that `Transformer` does not compute.

    Example:
        >>> import torch, transformers
        >>> from pdkernels.integrations.transformers import from_transformers
        >>> config = transformers.LlamaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        ...     num_key_value_heads=1, intermediate_size=48)
        >>> model = transformers.LlamaForCausalLM(config).eval()
        >>> tokens = torch.tensor([[1, 2, 3]])
        >>> torch.allclose(from_transformers(model)(tokens), model(tokens).logits, atol=1e-5)
        True
    """
    op = "from_transformers"
    model = getattr(model, "_orig_mod", model)
    if hasattr(model, "peft_config"):
        remedy = "Call merge_and_unload() first, or use wrap."
        raise NotImplementedError(message(op, "model", "be without adapters", type(model).__name__, remedy))
    _check_class(op, model)
    check_loaded(op, model)
    if is_quantised(model):
        remedy = "Convert it first and pd.quantize the result, or use wrap."
        raise NotImplementedError(message(op, "model", "hold numbers", "quantised matrices", remedy))
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    config = model.config.to_dict()
    converted = from_published(
        config,
        separated_experts(state, config.get("model_type", "")),
        model.dtype,
        model.device,
        adapted(tokenizer),
        _ends(model),
    )
    assert not isinstance(converted, RecurrentDepth)  # transformers has no such model
    converted.generation_config = dict(fields_of(model))
    with undisturbed(model.device):
        prove_converted(type(model).__name__, converted, shadow(model), random_tokens(model, 1, TOKENS))
    return converted
