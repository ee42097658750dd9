"""A decoder whose layers have attention or a recurrent state; Qwen3.5 and LFM2 are instances."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdkernels._attention import takes_head_dim
from pdkernels._validation import KERNEL_DTYPES, check, check_flag, check_type, fail
from pdkernels.backends import backend_of
from pdkernels.cache import Cache, HybridCache, PagePool, StateShape
from pdkernels.masks import TilePlan, causal
from pdkernels.models.architectures import fused, hybrid_step, mixer_ops, packing, tree_scan, whole_step
from pdkernels.models.architectures.attention import (  # fmt: skip
    Seen,
    Visibility,
    attend,
    attend_cached,
    cached_visibility,
    check_mask,
    check_positions,
    check_tokens,
    seen_by_layer,
    uncached_visibility,
)
from pdkernels.models.architectures.caches import new_cache, new_pool
from pdkernels.models.architectures.config import TransformerConfig, _check_sizes
from pdkernels.models.architectures.fused import linear
from pdkernels.models.architectures.layer import Matrix
from pdkernels.models.architectures.rope import RopeTables, Rotation, apply_rope
from pdkernels.models.architectures.states import Activation, States
from pdkernels.models.architectures.taps import Tapped, checked_taps
from pdkernels.models.architectures.transformer import select_rows
from pdkernels.models.architectures.windows import Window
from pdkernels.ops.linear_token_statistics import linear_token_statistics
from pdkernels.ops.token_statistics import TokenStatistics
from pdkernels.ops.transformer_ops import apply_rope_

if TYPE_CHECKING:
    from pdkernels.models.text.tokenizers import Tokenizer

__all__ = ["Hybrid", "HybridConfig"]

Mixer = Literal["attention", "delta", "conv"]
L2NORM_EPS = 1e-6


@dataclass(frozen=True)
class HybridConfig(TransformerConfig):
    """Sizes and variants of a `Hybrid`.

    >>> config = HybridConfig(vocab_size=11, hidden_size=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate_size=48,
    ...                       mixers=("delta", "attention"), key_heads=2, value_heads=4, key_dim=8, value_dim=8)
    >>> config.conv_channels
    64
    """

    mixers: tuple[Mixer, ...] = ()
    """What each layer has before its MLP: attention, a gated delta rule after a convolution, or a gated convolution."""
    conv_width: int = 4
    key_heads: int = 1
    """Heads of q and k of the delta rule; `value_heads` is a multiple of it."""
    value_heads: int = 1
    key_dim: int = 16
    value_dim: int = 16
    rotary_dim: int | None = None
    """Components of a head that RoPE rotates, the first ones; None: all."""
    gated_attention: bool = False
    """Attention's output is multiplied by the sigmoid of a gate, which is projected with q (Qwen3.5)."""
    centred_norms: bool = False
    """Norms multiply by 1 plus their weight (Qwen3.5)."""
    tiled_values: bool = False
    """Value head h reads key head ``h % key_heads``, as in GGUF files; otherwise those of a key head are side by
    side."""
    plain_decay: bool = False
    """The parameter `decay` is the factor of the softplus, as in GGUF files; otherwise the logarithm of its
    negative."""

    def __post_init__(self) -> None:
        super().__post_init__()
        op = "HybridConfig"
        object.__setattr__(self, "mixers", tuple(self.mixers))
        check(len(self.mixers) == self.layers, op, "mixers", f"name one for each of {self.layers} layers", self.mixers)
        mixers = get_args(Mixer)
        for mixer in self.mixers:
            check(mixer in mixers, op, "mixers", f"be of {', '.join(mixers)}", repr(mixer))
        check("attention" in self.mixers, op, "mixers", "have a layer with attention", self.mixers)
        check(set(self.mixers) != {"attention"}, op, "mixers", "have a recurrent layer", "none", "Use a Transformer.")
        _check_sizes(op, self, "conv_width key_heads value_heads key_dim value_dim".split())
        check(self.conv_width >= 2, op, "conv_width", "be at least 2", self.conv_width)
        valid = self.value_heads % self.key_heads == 0
        check(valid, op, "value_heads", f"be a multiple of key_heads ({self.key_heads})", self.value_heads)
        width = self.rotary_width
        check(
            0 < width <= self.head_dim and width % 2 == 0, op, "rotary_dim", f"be even in 2 .. {self.head_dim}", width
        )
        for name in ("gated_attention", "centred_norms", "tiled_values", "plain_decay"):
            check_flag(op, name, getattr(self, name))
        check(self.attention == "causal", op, "attention", "be 'causal'", repr(self.attention))
        check(self.experts is None, op, "experts", "be None", self.experts)
        allowed = self.usual and self.embedding_scale == 1
        check(allowed, op, "config", "be without settings of Gemma's layers", "some", "Use a Transformer.")
        check(self.predicts == "next", op, "predicts", "be 'next'", repr(self.predicts))

    @property
    def rotary_width(self) -> int:
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def cache_layers(self) -> int:
        """How many layers have keys and values."""
        return self.mixers.count("attention")

    @property
    def cache_windows(self) -> tuple[Window | None, ...]:
        """Their windows; empty: none has one."""
        of_attention = (mixer == "attention" for mixer in self.mixers)
        return tuple(window for window, attends in zip(self.windows, of_attention) if attends)

    @property
    def read_heads(self) -> int:
        """Key heads, as the delta rule takes them."""
        return self.value_heads if self.tiled_values else self.key_heads

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution before a delta rule: q, k and v."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


class Rows:
    """The rows of one forward, as the layers need them."""

    def __init__(
        self,
        rotation: Rotation,
        visibility: Visibility,
        cache: HybridCache | None,
        counts: Tensor | None,
        states: States | None,
        pieces: tree_scan.Pieces | None,
        seen: Sequence[Seen] = (),
    ) -> None:
        self.rotation, self.visibility, self.cache, self.counts = rotation, visibility, cache, counts
        self.states, self.pieces, self.seen = states, pieces, seen

    def rotated(self, x: Tensor, config: HybridConfig) -> Tensor:
        width, (cos, sin, _, positions) = config.rotary_width, self.rotation
        if positions is not None:
            apply_rope_(x[..., :width], cos, sin, positions, style=config.rope_style)
            return x
        turned = apply_rope(x[..., :width], self.rotation, config.rope_style)
        return turned if width == x.shape[-1] else torch.cat([turned, x[..., width:]], -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, slot: int) -> Tensor:
        """Attention of a layer, which is number `slot` of those with attention."""
        visibility, starts, _ = self.seen[layer] if self.seen else (self.visibility, None, None)
        if self.cache is None:
            return attend(q, k, v, visibility)
        return attend_cached(q, k, v, visibility, cast(Cache, self.cache), slot, self.counts, starts)

    def convolved(self, layer: int, x: Tensor, weight: Tensor, activation: Activation) -> Tensor:
        if self.states is not None:
            return self.states.short_conv((layer, "conv"), x, weight, None, activation)
        assert self.pieces is not None
        out = torch.stack([tree_scan.convolved(row, weight, None, self.pieces) for row in x])
        return F.silu(out) if activation == "silu" else out

    def delta(self, layer: int, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gates: tuple[Tensor, Tensor]) -> Tensor:  # fmt: skip
        """`gates`: the factor of the decay, and what is added to `a`."""
        factor, bias = gates
        if self.states is not None:
            return self.states.gated_delta(
                (layer, "delta"), q, k, v, a, b, L2NORM_EPS, A=factor, dt_bias=bias, sigmoid_beta=True
            )
        assert self.pieces is not None
        wide = torch.promote_types(q.dtype, torch.float32)
        q, k, v, a, b = (x.to(wide) for x in (q, k, v, a, b))
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
        g, beta = factor * F.softplus(a + bias), b.sigmoid()
        with torch.autocast(q.device.type, enabled=False):
            rows = [tree_scan.gated_delta(*row, self.pieces, L2NORM_EPS) for row in zip(q, k, v, g, beta)]
        return torch.stack(rows)


class HybridLayer(nn.Module):
    """A mixer and a SwiGLU MLP, each with a norm before and a residual around it. The layer holds its parameters
    directly."""

    mixer_norm: nn.Parameter
    mlp_norm: nn.Parameter
    q_norm: nn.Parameter | None
    k_norm: nn.Parameter | None
    conv: nn.Parameter
    decay: nn.Parameter
    decay_bias: nn.Parameter
    value_norm: nn.Parameter
    qkv: Matrix
    inputs: Matrix
    output: Matrix
    gate_up: Matrix
    down: Matrix

    def __init__(self, config: HybridConfig, index: int) -> None:
        super().__init__()
        self.config, self.index, self.mixer = config, index, config.mixers[index]
        self.slot = config.mixers[:index].count("attention")
        for name, shape in _shapes(config, self.mixer).items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        for name in ("q_norm", "k_norm") if self.mixer == "attention" and not config.qk_norm else ():
            self.register_parameter(name, None)

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        mix = {"attention": self._attention, "delta": self._delta, "conv": self._conv}[self.mixer]
        x = x + mix(self._norm(x, self.mixer_norm), rows)
        return x + linear(fused.gated(linear(self._norm(x, self.mlp_norm), self.gate_up)), self.down)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return norm(x, weight, self.config)

    def _attention(self, x: Tensor, rows: Rows) -> Tensor:
        config = self.config
        width, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
        gated = config.gated_attention
        q, k, v = linear(x, self.qkv).split([width * (1 + gated), narrow, narrow], -1)
        k, v = k.unflatten(-1, (-1, config.head_dim)), v.unflatten(-1, (-1, config.head_dim))
        q, *gate = q.unflatten(-1, (config.heads, -1)).split(config.head_dim, -1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self._norm(q, self.q_norm), self._norm(k, self.k_norm)
        # Under autocast norms are wider than products.
        q, k = (rows.rotated(x, config).to(v.dtype) for x in (q, k))
        mixed = rows.attend(q, k, v.contiguous(), self.index, self.slot)
        return linear((mixer_ops.gated_by(mixed, gate[0], "sigmoid") if gate else mixed).flatten(-2), self.output)

    def _conv(self, x: Tensor, rows: Rows) -> Tensor:
        gate, out_gate, x = linear(x, self.inputs).chunk(3, -1)
        convolved = rows.convolved(self.index, mixer_ops.gated_by(x, gate), self.conv, "none")
        return linear(mixer_ops.gated_by(convolved, out_gate), self.output)

    def _delta(self, x: Tensor, rows: Rows) -> Tensor:
        config = self.config
        values, keys = config.value_heads * config.value_dim, config.key_heads * config.key_dim
        sizes = [config.conv_channels, values, config.value_heads, config.value_heads]
        qkv, z, b, a = linear(x, self.inputs).split(sizes, -1)
        q, k, v = rows.convolved(self.index, qkv, self.conv, "silu").split([keys, keys, values], -1)
        q, k = (t.unflatten(-1, (config.key_heads, -1)) for t in (q, k))
        if config.tiled_values:
            q, k = (t.repeat(1, 1, config.value_heads // config.key_heads, 1) for t in (q, k))
        v = v.unflatten(-1, (config.value_heads, -1))
        exact = torch.promote_types(self.decay.dtype, torch.float32)
        factor = self.decay.to(exact) if config.plain_decay else mixer_ops.decay_factors(self.decay)
        out = rows.delta(self.index, q, k, v, a, b, (factor, self.decay_bias.to(exact)))
        normed = fused.rms_norm(out.to(x.dtype), self.value_norm, config.norm_eps)
        return linear(mixer_ops.gated_by(normed.flatten(-2), z, "silu"), self.output)


def norm(x: Tensor, weight: Tensor, config: HybridConfig) -> Tensor:
    """The RMS norm of a model with this configuration."""
    normed = mixer_ops.centred_rms_norm if config.centred_norms else fused.rms_norm
    return normed(x, weight, config.norm_eps)


def _followed(mask: TilePlan, positions: Tensor | None) -> list[int]:
    """The row that each row of a text follows: of those that it sees, the one at the position before its own. -1:
    none."""
    single = mask.batch is None and (positions is None or positions.dim() == 1 or len(positions) == 1)
    check(
        single, "Hybrid", "mask", "be one plan for all samples, at the same positions, without a cache", "stacked ones"
    )
    at = torch.arange(mask.kv_len, device="cpu") if positions is None else positions.view(-1).cpu()
    before = mask.dense().cpu() & (at == at[:, None] - 1)
    check(not bool((before.sum(1) > 1).any()), "Hybrid", "mask", "show one row before each row", "several")
    return torch.where(before.any(1), before.long().argmax(1), -1).tolist() if mask.kv_len else []


def _shapes(config: HybridConfig, mixer: Mixer) -> dict[str, tuple[int, ...]]:
    """The parameters of a layer."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"mixer_norm": (hidden,), "mlp_norm": (hidden,)}
    if mixer == "attention":
        width = config.heads * config.head_dim
        shapes["qkv"] = (width * (1 + config.gated_attention) + 2 * config.kv_heads * config.head_dim, hidden)
        if config.qk_norm:
            shapes |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
        shapes["output"] = (hidden, width)
    elif mixer == "conv":
        shapes |= {"inputs": (3 * hidden, hidden), "conv": (hidden, config.conv_width), "output": (hidden, hidden)}
    else:
        values = config.value_heads * config.value_dim
        shapes["inputs"] = (config.conv_channels + values + 2 * config.value_heads, hidden)
        shapes["conv"] = (config.conv_channels, config.conv_width)
        shapes |= {"decay": (config.value_heads,), "decay_bias": (config.value_heads,)}
        shapes |= {"value_norm": (config.value_dim,), "output": (hidden, values)}
    return {**shapes, "gate_up": (2 * inner, hidden), "down": (hidden, inner)}


whole_step.LAYERS[HybridLayer] = hybrid_step.NAMES
whole_step.METHODS.update(name for name, value in vars(HybridLayer).items() if callable(value))
# What an instance may have replaced.
_PARTS = ("forward", "hidden", "embed", "logits", "rotation_table", "_forward", "_inferred", "_rotation", "_run")


class Hybrid(nn.Module):
    """A decoder-only language model with attention in some layers and recurrent states in others.

    The attributes are those of a `Transformer`, and so are the arguments of a forward. A forward with gradients has no
    cache.

    >>> config = HybridConfig(vocab_size=11, hidden_size=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate_size=48,
    ...                       mixers=("delta", "attention"), key_heads=2, value_heads=4, key_dim=8, value_dim=8)
    >>> model = Hybrid(config).requires_grad_(False)
    >>> tokens = torch.tensor([[1, 2, 3, 4]])
    >>> cache = model.new_cache(batch=1, capacity=8)
    >>> first = model(tokens[:, :3], cache=cache)
    >>> cache.commit_(torch.tensor([3]))
    >>> last = model(tokens[:, 3:], cache=cache)
    >>> torch.allclose(torch.cat((first, last), 1), model(tokens), atol=1e-5)
    True
    """

    head: Matrix | None
    keeps_rows = False  # rows of recurrent layers cannot be computed anew
    has_adapter = False
    matrices = ("embedding", "head", "qkv", "inputs", "output", "gate_up", "down")
    l2norm_eps = L2NORM_EPS
    cache_dtype: torch.dtype | None = None
    """As that of `Transformer`, of keys and values."""

    def __init__(
        self,
        config: HybridConfig,
        *,
        tokenizer: Tokenizer | None = None,
        end_tokens: Sequence[int] = (),
        mask_token: int | None = None,
    ) -> None:
        super().__init__()
        op = "Hybrid"
        check_type(isinstance(config, HybridConfig), op, "config", "be a HybridConfig", type(config).__name__)
        bound = f"below vocab_size ({config.vocab_size})"
        for token in end_tokens:
            check(0 <= token < config.vocab_size, op, "end_tokens", f"be ids {bound}", token)
        valid = mask_token is None or 0 <= mask_token < config.vocab_size
        check(valid, op, "mask_token", f"be an id {bound}", mask_token)
        self.config, self.tokenizer, self.end_tokens = config, tokenizer, tuple(end_tokens)
        self.generation_config: dict[str, Any] = {}
        self.mask_token, self.plan_tokens = mask_token, None
        self.binding = hybrid_step.HybridBinding()
        self.embedding: Matrix = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(HybridLayer(config, index) for index in range(config.layers))
        self.norm = nn.Parameter(torch.empty(config.hidden_size))
        head = None if config.tied_head else nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.register_parameter("head", head)
        self._tables = RopeTables(
            config.rotary_width,
            config.max_positions,
            theta=config.rope_theta,
            style=config.rope_style,
            scaling=config.rope_scaling,
        )
        if not self.norm.is_meta:
            self.initialize_()

    @torch.no_grad()
    def initialize_(self) -> None:
        """Weights from N(0, 0.02^2), smaller where they write to the residual stream; decays between 0.3 and 0.999 a
        token."""
        neutral = 0.0 if self.config.centred_norms else 1.0
        for name, parameter in self.named_parameters():
            if name.endswith("conv"):
                parameter.uniform_(-1, 1).mul_(parameter.shape[1] ** -0.5)
            elif parameter.dim() == 2:
                deep = name.endswith(("output", "down"))
                parameter.normal_(std=0.02 / math.sqrt(2 * self.config.layers) if deep else 0.02)
            elif name.endswith("decay"):
                factor = torch.linspace(1, 16, len(parameter))
                parameter.copy_(-factor if self.config.plain_decay else factor.log())
            elif name.endswith("decay_bias"):
                step = torch.linspace(math.log(1e-3), math.log(1e-1), len(parameter)).exp()
                parameter.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
            elif name.endswith("value_norm"):
                parameter.fill_(1.0)
            else:
                parameter.fill_(neutral)

    def quantized(self, format: str = "int8", *, group: int | None = None, skip: str | Collection[str] = ()) -> Hybrid:
        """The same model with quantised matrices, see `pdkernels.quantize`. What stays as numbers is shared."""
        return packing.quantized(self, format, group, skip)

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.dtype

    @property
    def device(self) -> torch.device:
        return self.norm.device

    def new_cache(
        self,
        batch: int,
        capacity: int,
        *,
        kind: Literal["contiguous", "paged"] = "contiguous",
        page_size: int = 16,
        dtype: torch.dtype | None = None,
        pool: PagePool | None = None,
        drafts: int | None = None,
    ) -> HybridCache:
        """As `Transformer.new_cache`, of keys, values and states; `dtype`, `pool` and `drafts` are those of keys and
        values."""
        windows, layers = self.config.cache_windows, self.config.cache_layers
        kv = new_cache(self, batch, capacity, kind, page_size, layers, dtype, pool, windows, drafts)
        return HybridCache(kv, dict(self._states()))

    def new_pool(self, num_pages: int, page_size: int, *, window_pages: Mapping[int, int] | None = None) -> PagePool:
        """As `Transformer.new_pool`, for keys and values."""
        return new_pool(self, num_pages, page_size, window_pages)

    def _states(self) -> Iterator[tuple[Any, StateShape]]:
        config, dtype = self.config, self.dtype
        for index, mixer in enumerate(config.mixers):
            if mixer == "attention":
                continue
            channels = config.hidden_size if mixer == "conv" else config.conv_channels
            yield (index, "conv"), StateShape((config.conv_width - 1, channels), dtype, (((channels,), dtype),))
            if mixer == "delta":
                k, v, gate = (
                    (config.read_heads, config.key_dim),
                    (config.value_heads, config.value_dim),
                    (config.value_heads,),
                )
                exact = torch.promote_types(dtype, torch.float32)
                inputs = ((k, dtype), (v, exact), (gate, dtype))
                yield (
                    (index, "delta"),
                    StateShape((config.value_heads, config.key_dim, config.value_dim), exact, inputs),
                )

    def forward(
        self,
        tokens: Tensor,
        *,
        cache: HybridCache | None = None,
        counts: Tensor | None = None,
        positions: Tensor | None = None,
        mask: Tensor | TilePlan | None = None,
        rows: Tensor | Sequence[int] | slice | None = None,
        adapted: bool = False,
    ) -> Tensor:
        """As `Transformer.forward`, with plans for masks.

        On a cache, a row of a recurrent layer follows the last earlier row that it sees; without one, the row that it
        sees at the position before its own."""
        refused = False
        if cache is not None and rows is None and adapted is False:
            results = self._at_once(tokens, cache, counts, positions, mask, with_logits=True)
            if results is not None:
                return results[1]
            refused = not torch.compiler.is_compiling() and self._is_unchanged
        if refused:  # `hidden` would ask again
            x = self._forward(tokens, cache, counts, positions, mask, adapted, {})
        else:
            x = self.hidden(tokens, cache=cache, counts=counts, positions=positions, mask=mask, adapted=adapted)
        x = x if rows is None else select_rows("Hybrid", x, rows)
        if cache is None:
            return self.logits(x)
        with torch.no_grad():  # the rows have no gradient, so the head's alone would be a part of it
            return self.logits(x)

    def hidden(
        self,
        tokens: Tensor,
        *,
        cache: HybridCache | None = None,
        counts: Tensor | None = None,
        positions: Tensor | None = None,
        mask: Tensor | TilePlan | None = None,
        adapted: bool = False,
    ) -> Tensor:
        """The input of `logits` for all rows, `(batch, T, hidden_size)`."""
        if cache is not None and adapted is False:
            results = self._at_once(tokens, cache, counts, positions, mask, with_logits=False)
            if results is not None:
                return results[0]
        return self._forward(tokens, cache, counts, positions, mask, adapted, {})

    @property
    def _is_unchanged(self) -> bool:
        """Whether no part of a forward is another one in this instance."""
        return type(self) is Hybrid and vars(self).keys().isdisjoint(_PARTS)

    def _at_once(
        self,
        tokens: Tensor,
        cache: HybridCache,
        counts: Tensor | None,
        positions: Tensor | None,
        mask: Tensor | TilePlan | None,
        with_logits: bool,
        taps: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """`hybrid_step.run_forward`, where no part of the forward is another one."""
        if torch.compiler.is_compiling() or not self._is_unchanged:
            return None
        if mask is not None and not isinstance(mask, TilePlan):
            return None
        with nullcontext() if torch.is_inference_mode_enabled() else torch.no_grad():
            return hybrid_step.run_forward(self, tokens, cache, counts, positions, mask, with_logits, taps)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Hybrid:
        self.binding.drop()  # or what moves would stay where it was too
        return cast(Hybrid, super()._apply(fn, recurse))  # type: ignore[no-untyped-call]

    def tapped(
        self,
        tokens: Tensor,
        taps: Sequence[int],
        *,
        cache: HybridCache | None = None,
        counts: Tensor | None = None,
        positions: Tensor | None = None,
        mask: Tensor | TilePlan | None = None,
        adapted: bool = False,
    ) -> Tapped:
        """As `Transformer.tapped`."""
        taps = checked_taps("Hybrid.tapped", taps, self.config.layers)
        if cache is not None and adapted is False:
            results = self._at_once(tokens, cache, counts, positions, mask, False, taps)
            if results is not None:
                return Tapped(results[0], results[2])
        states: dict[int, Tensor | None] = dict.fromkeys(taps)
        return Tapped.of(self._forward(tokens, cache, counts, positions, mask, adapted, states), states, taps)

    def _forward(
        self,
        tokens: Tensor,
        cache: HybridCache | None,
        counts: Tensor | None,
        positions: Tensor | None,
        mask: Tensor | TilePlan | None,
        adapted: bool,
        states: dict[int, Tensor | None],
    ) -> Tensor:
        """The input of `logits`. `states` gets the inputs of the layers that are its keys."""
        op = "Hybrid"
        check(adapted is False, op, "adapted", "be False, for a model without an adapter", adapted)
        check_tokens(op, tokens, self.device)
        check_type(mask is None or isinstance(mask, TilePlan), op, "mask", "be a TilePlan", type(mask).__name__, "Call mask.plan().")  # fmt: skip
        batch, length = tokens.shape
        check_mask(op, mask, batch, length, self.device)
        if cache is None:
            check(counts is None, op, "counts", "be None without a cache", "a tensor", "Pass a cache too.")
        else:
            check_type(isinstance(cache, HybridCache), op, "cache", "be one of `new_cache`", type(cache).__name__)
            if cache.batch != batch:
                fail(op, "tokens", f"have the batch size of the cache ({cache.batch})", batch)
        plan = cast("TilePlan | None", mask)
        # A graph of the whole model has no calls of the planner.
        if cache is None and (torch.is_grad_enabled() or plan is not None or torch.compiler.is_compiling()):
            return self._run(tokens, self._whole(tokens, positions, plan), states)
        with torch.no_grad():
            return self._run(tokens, self._inferred(tokens, cache, counts, positions, plan), states)

    def rotation_table(self, limit: int) -> Rotation:
        """The rotation of at least `limit` positions."""
        return self._tables.covering(limit, self.device, self.dtype)

    def _rotation(self, positions: Tensor, limit: int) -> Rotation:
        table = self.rotation_table(limit)
        return table.kept_for(positions) if fused.enabled(self.norm) else table.at(positions)

    def _uncached(self, tokens: Tensor, positions: Tensor | None) -> Rotation:
        length = tokens.shape[1]
        if positions is None:
            return self._rotation(torch.arange(length, device=self.device), length)
        return self._rotation(positions, max(self.config.max_positions, length))

    def _whole(self, tokens: Tensor, positions: Tensor | None, mask: TilePlan | None) -> Rows:
        """Rows that nothing precedes, and that may have gradients."""
        length = tokens.shape[1]
        parents = list(range(-1, length - 1)) if mask is None else _followed(mask, positions)
        pieces = tree_scan.pieces_of(parents, self.config.conv_width - 1)
        visibility = uncached_visibility(mask if mask is None or self._has_kernels() else mask.dense())
        seen = self._seen(visibility, length, None, positions)
        return Rows(self._uncached(tokens, positions), visibility, None, None, None, pieces, seen)

    def _seen(
        self, visibility: Visibility, rows: int, lengths: Tensor | None, offsets: Tensor | None
    ) -> Sequence[Seen]:
        windows = self.config.windows
        if windows and visibility.mask is None and not self._has_kernels():
            visibility = uncached_visibility(causal(rows).plan(64, 64, self.device).dense())
        return seen_by_layer(windows, visibility, rows, self.device, lengths, offsets)

    def _inferred(
        self,
        tokens: Tensor,
        cache: HybridCache | None,
        counts: Tensor | None,
        positions: Tensor | None,
        mask: TilePlan | None,
    ) -> Rows:
        batch, length = tokens.shape
        if cache is None:
            states = States(None, batch, length, self.device, counts, mask)
            plan = causal(length).plan(64, 64, self.device)
            visibility = uncached_visibility(plan if self._has_kernels() else plan.dense())
            seen = self._seen(visibility, length, None, positions)
            return Rows(self._uncached(tokens, positions), visibility, None, None, states, None, seen)
        lengths = cache.lengths.tolist() if cache.device.type == "cpu" else None
        visibility = cached_visibility(cast(Cache, cache), lengths, counts, length, mask)
        offsets = torch.arange(length, device=self.device) if positions is None else positions
        places = cache.lengths[:, None] + offsets
        if lengths is not None:
            check_positions("Hybrid", places, offsets, cache.capacity + length)
        rotation = self._rotation(places, cache.capacity + length)
        seen = self._seen(visibility, length, cache.lengths, positions)
        states = States(cache, batch, length, self.device, counts, mask)  # last: it changes the cache
        return Rows(rotation, visibility, cache, counts, states, None, seen)

    def _has_kernels(self) -> bool:
        return self.dtype in KERNEL_DTYPES and takes_head_dim(self.config.head_dim)

    def embed(self, tokens: Tensor) -> Tensor:
        """As `Transformer.embed`."""
        try:
            return fused.embed(tokens, self.embedding, self.dtype)
        except IndexError:
            fail(
                "Hybrid",
                "tokens",
                f"hold ids in [0, {self.config.vocab_size})",
                f"{int(tokens.min())}..{int(tokens.max())}",
            )

    def _run(self, tokens: Tensor, rows: Rows, states: dict[int, Tensor | None]) -> Tensor:
        x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            if index in states:
                states[index] = x
            x = layer(x, rows)
        if len(self.layers) in states:
            states[len(self.layers)] = x
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """The language model head: logits `(..., vocab_size)` of rows of `hidden`."""
        return linear(norm(hidden, self.norm, self.config), self.embedding if self.head is None else self.head)

    def statistics(self, hidden: Tensor, **options: Any) -> TokenStatistics:
        """As `Transformer.statistics`."""
        head = self.embedding if self.head is None else self.head
        normed = norm(hidden, self.norm, self.config)
        return linear_token_statistics(normed, head, backend=backend_of(self.dtype), **options)
