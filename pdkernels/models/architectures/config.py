"""Sizes and variants of a `Transformer`, and of a `RecurrentDepth` model."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pdkernels._validation import FINITE, check, check_flag, check_int, check_number, check_type
from pdkernels.models.architectures.rope import FactorScaling, RopeScaling, RopeStyle, YarnScaling
from pdkernels.models.architectures.windows import Window, checked_windows


def _check_sizes(op: str, config: TransformerConfig | RecurrentDepthConfig, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(config, name)
        check_type(type(value) is int, op, name, "be an int", type(value).__name__)
        check_int(op, name, value, 1)


def _check_numbers(op: str, config: TransformerConfig | RecurrentDepthConfig) -> None:
    check_number(op, "rope_theta", config.rope_theta, 0, FINITE, "be positive")
    check(config.rope_theta > 0, op, "rope_theta", "be positive", config.rope_theta)
    check_number(op, "norm_eps", config.norm_eps, 0, FINITE, "not be negative")


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in place of the MLP of a layer: SwiGLUs, of which a router chooses some for every row.

    A row's weights are the softmax of the router's logits, of the `per_token` experts with the largest. Or the logits
    become scores between 0 and 1 each (LLaDA2), and the choice may be of the experts of a few groups, or of those that a
    block of rows shares (LLaDA2.2).

    >>> ExpertsConfig(count=8, per_token=2, intermediate_size=16).normalized
    True
    """

    count: int
    per_token: int
    """Experts of a row."""
    intermediate_size: int
    """Of an expert."""
    normalized: bool = True
    """Whether the weights of a row's experts are divided by their sum."""
    every: int = 1
    """Each layer of this number has experts, the others an MLP: 2 is every second layer, from the second on."""
    first: int = 0
    """The first layer that has experts."""
    dense_layers: tuple[int, ...] = ()
    """Layers with an MLP all the same."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    biased: bool = False
    """Whether the router has a bias: of its logits, or with sigmoid of the scores by which experts are chosen, not of
    their weights."""
    groups: int = 1
    """Groups of consecutive experts. A row's experts are of `chosen_groups` of them, those whose two largest scores
    have the largest sum."""
    chosen_groups: int = 1
    pool: int = 0
    """Experts that the rows of a block share: those with the largest scores of any of its rows. 0: there is no block. A
    forward waits for its device to count the blocks."""
    pool_rows: int = 0
    """Rows of such a block, counted from the text's first position."""
    scale: float = 1.0
    """Factor of the weights."""
    shared_size: int = 0
    """Intermediate size of an MLP whose output is added for every row; 0: none."""
    matrix_biases: bool = False
    """Biases of the experts' matrices."""
    clamp: float | None = None
    """Gates are at most this large, and what they multiply lies between its negative and it; 1 is then added to the
    latter, and the gate is ``x * sigmoid(gate_slope * x)`` (gpt-oss). None: a SwiGLU."""
    gate_slope: float = 1.702

    def __post_init__(self) -> None:
        op = "ExpertsConfig"
        for name in ("count", "per_token", "intermediate_size", "every", "groups", "chosen_groups"):
            value = getattr(self, name)
            check_type(type(value) is int, op, name, "be an int", type(value).__name__)
            check_int(op, name, value, 1)
        check(self.per_token <= self.count, op, "per_token", f"be at most count ({self.count})", self.per_token)
        for name in ("normalized", "biased", "matrix_biases"):
            check_flag(op, name, getattr(self, name))
        for name in ("first", "shared_size", "pool", "pool_rows"):
            check_type(type(getattr(self, name)) is int, op, name, "be an int", type(getattr(self, name)).__name__)
            check_int(op, name, getattr(self, name), 0)
        check(self.scores in ("softmax", "sigmoid"), op, "scores", "be 'softmax' or 'sigmoid'", repr(self.scores))
        check_number(op, "scale", self.scale, 0, FINITE, "be positive")
        each = self.count // self.groups
        valid = self.count % self.groups == 0 and (self.groups == 1 or each >= 2)
        check(valid, op, "groups", f"divide count ({self.count}) into groups of at least 2 experts", self.groups)
        valid = self.chosen_groups <= self.groups and self.per_token <= self.chosen_groups * each
        check(
            valid,
            op,
            "chosen_groups",
            f"hold {self.per_token} experts, {each} each, and be at most groups",
            self.chosen_groups,
        )
        scores_fit = self.scores == "sigmoid" or self.groups == 1
        check(scores_fit, op, "scores", "be 'sigmoid' with groups", repr(self.scores))
        is_pooled = self.pool > 0
        fits = not is_pooled or (self.per_token <= self.pool <= self.count and self.groups == 1)
        check(
            fits and (not is_pooled or self.scores == "sigmoid"),
            op,
            "pool",
            f"be 0, or hold {self.per_token} of {self.count} experts, for sigmoid scores without groups",
            self.pool,
        )
        check(
            is_pooled == (self.pool_rows > 0), op, "pool_rows", "be above 0 with a pool, and 0 without", self.pool_rows
        )
        for name in ("clamp", "gate_slope"):
            value = getattr(self, name)
            check_number(op, name, 1.0 if value is None else value, 0, FINITE, "not be negative")
        valid = isinstance(self.dense_layers, tuple) and all(
            type(layer) is int and layer >= 0 for layer in self.dense_layers
        )
        check(valid, op, "dense_layers", "be a tuple of numbers of layers", self.dense_layers)

    @property
    def usual(self) -> bool:
        """Whether experts are plain SwiGLUs, each row chooses its own, and a softmax of logits has no bias."""
        return (
            not self.pool
            and self.clamp is None
            and not self.matrix_biases
            and (self.scores == "sigmoid" or not self.biased)
        )

    def are_in(self, layer: int) -> bool:
        """Whether the layer of this number has experts."""
        return layer >= self.first and (layer + 1) % self.every == 0 and layer not in self.dense_layers

    def are_in_any(self, layers: int) -> bool:
        """Whether one of so many layers has experts."""
        begin = (self.first + self.every) // self.every * self.every - 1
        candidates = range(begin, layers, self.every)[: len(self.dense_layers) + 1]
        return any(map(self.are_in, candidates))


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and variants of a `Transformer`. `head_dim` does not have to be `hidden_size / heads`.

    >>> TransformerConfig(vocab_size=257, hidden_size=64, layers=2, heads=4, kv_heads=2, head_dim=16,
    ...                   intermediate_size=96).group_size
    2
    """

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float = 10000.0
    rope_style: RopeStyle = "half"
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    output_bias: bool = False
    """Bias of attention's output projection."""
    mlp_bias: bool = False
    """Biases of the MLP's three matrices."""
    qk_norm: bool = False
    """An RMS norm over each head of q and k before RoPE, with one weight for all heads of q and one for those of k
    (Qwen3)."""
    whole_qk_norm: bool = False
    """With `qk_norm`: over all heads together, with a weight for each component (OLMoE)."""
    tied_head: bool = True
    attention: Literal["causal", "bidirectional"] = "causal"
    """The attention of a forward without a cache and without a mask."""
    predicts: Literal["next", "own"] = "next"
    """The token that the logits of row i predict: i + 1, or i itself, which is then a mask."""
    max_positions: int = 2048
    """Positions the model was trained for: `generate` refuses longer texts, unless `overflow="warn"`; a forward takes
    them."""
    experts: ExpertsConfig | None = None
    """None: every layer has an MLP of `intermediate_size`."""
    windows: tuple[Window | None, ...] = ()
    """What each layer's rows see of the text before them, None: all; empty: no layer has a window."""
    window_rope_theta: float | None = None
    """The base of RoPE, without scaling, in layers with a window; None: as in the others (Gemma 3)."""
    outer_norms: bool = False
    """Norms of what attention and the MLP return, before it is added to the residual (Gemma 3)."""
    inner_norms: bool = True
    """Norms of what attention and the MLP take (OLMo 3 has none)."""
    sinks: bool = False
    """A score of each head that takes its part of the softmax and has no value (gpt-oss)."""
    activation: Literal["silu", "gelu"] = "silu"
    """Of the MLP's gate; "gelu" by its approximation with tanh."""
    embedding_scale: float = 1.0
    """Factor of the token embedding, in the dtype of the model."""
    query_scale: float | None = None
    """Factor of queries before their product with keys; None: ``head_dim ** -0.5``."""
    attention_softcap: float | None = None
    """Scores s of attention become ``cap * tanh(s / cap)``; None: they stay (Gemma 2)."""
    logits_softcap: float | None = None
    """The same for logits."""

    def __post_init__(self) -> None:
        op = "TransformerConfig"
        sizes = "vocab_size hidden_size layers heads kv_heads head_dim intermediate_size max_positions"
        _check_sizes(op, self, sizes.split())
        check(self.heads % self.kv_heads == 0, op, "kv_heads", f"divide heads ({self.heads})", self.kv_heads)
        check(self.head_dim % 2 == 0, op, "head_dim", "be even (RoPE rotates pairs)", self.head_dim)
        check(
            self.rope_style in ("half", "interleaved"),
            op,
            "rope_style",
            "be 'half' or 'interleaved'",
            repr(self.rope_style),
        )
        check(
            self.attention in ("causal", "bidirectional"),
            op,
            "attention",
            "be 'causal' or 'bidirectional'",
            repr(self.attention),
        )
        check(self.predicts in ("next", "own"), op, "predicts", "be 'next' or 'own'", repr(self.predicts))
        scaling = self.rope_scaling
        check_type(
            scaling is None or isinstance(scaling, RopeScaling),
            op,
            "rope_scaling",
            "be a RopeScaling or None",
            type(scaling).__name__,
        )
        flags = "qkv_bias output_bias mlp_bias qk_norm whole_qk_norm tied_head outer_norms inner_norms sinks"
        for name in flags.split():
            check_flag(op, name, getattr(self, name))
        check(self.qk_norm or not self.whole_qk_norm, op, "whole_qk_norm", "be False without qk_norm", True)
        _check_numbers(op, self)
        experts = self.experts
        is_config = experts is None or isinstance(experts, ExpertsConfig)
        check_type(is_config, op, "experts", "be an ExpertsConfig or None", type(experts).__name__)
        if experts is not None:
            last = max(experts.dense_layers, default=0)
            check(last < self.layers, op, "experts.dense_layers", f"be below layers ({self.layers})", last)
            check(experts.are_in_any(self.layers), op, "experts", "be in one of the layers", "none")
        if isinstance(scaling, FactorScaling):
            pairs = len(scaling.factors)
            expected = self.rotary_width // 2
            check(pairs == expected, op, "rope_scaling", f"have {expected} factors", pairs)
        checked_windows(op, self.windows, self.layers)
        check(self.activation in ("silu", "gelu"), op, "activation", "be 'silu' or 'gelu'", repr(self.activation))
        for name in ("window_rope_theta", "embedding_scale", "query_scale", "attention_softcap", "logits_softcap"):
            value = getattr(self, name)
            if value is not None:
                check_number(op, name, value, 0, FINITE, "be positive")
                check(value > 0, op, name, "be positive", value)
        local = self.window_rope_theta is None or self.attention == "causal"
        check(local, op, "window_rope_theta", "be None for a bidirectional model", self.window_rope_theta)
        valid = self.attention == "causal" or not any(self.windows)
        check(valid, op, "windows", "be None where rows see what comes after them", self.windows)
        turns = not isinstance(scaling, YarnScaling) or self.rope_theta > 1
        check(turns, op, "rope_theta", "be more than 1 with a YarnScaling", self.rope_theta)

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def query_factor(self) -> float | None:
        """Factor of queries beside ``head_dim ** -0.5``; None: 1."""
        factor = None if self.query_scale is None else self.query_scale * self.head_dim**0.5
        return None if factor == 1 else factor

    @property
    def rotary_width(self) -> int:
        """Components of a head that RoPE rotates."""
        return self.head_dim

    @property
    def qk_norm_sizes(self) -> dict[str, int]:
        """Components of the norms of q and k; none if there are no norms."""
        heads = {"q_norm": self.heads, "k_norm": self.kv_heads} if self.qk_norm else {}
        return {name: self.head_dim * (count if self.whole_qk_norm else 1) for name, count in heads.items()}

    @property
    def usual(self) -> bool:
        """Whether layers are those of Llama and Qwen3: two norms, SwiGLU, one rotation, queries scaled by the width of a
        head, no cap."""
        two_norms = self.inner_norms and not (self.outer_norms or self.whole_qk_norm)
        one_rotation = self.query_scale is None and self.window_rope_theta is None
        experts = self.experts is None or self.experts.usual
        if self.attention_softcap is not None or self.logits_softcap is not None:
            return False
        return two_norms and one_rotation and experts and self.activation == "silu" and not self.sinks

    def has_experts(self, layer: int) -> bool:
        """Whether the layer of this number has experts in place of an MLP."""
        return self.experts is not None and self.experts.are_in(layer)


@dataclass(frozen=True)
class RecurrentDepthConfig:
    """Sizes of a `RecurrentDepth` model. The defaults other than sizes are those of Huginn-0125.

    >>> RecurrentDepthConfig(vocab_size=257, hidden_size=64, heads=4, head_dim=16, intermediate_size=96,
    ...                      prelude_layers=1, core_layers=2, coda_layers=1).layers
    4
    """

    vocab_size: int
    hidden_size: int
    heads: int
    head_dim: int
    intermediate_size: int
    prelude_layers: int = 2
    core_layers: int = 4
    coda_layers: int = 2
    """0: the head reads the state, after the norm."""
    mean_recurrence: int = 32
    """Recurrences that the model was trained for, the default of a forward."""
    rope_theta: float = 50000.0
    norm_eps: float = 1e-6
    max_positions: int = 4096
    """Positions the model was trained for: `generate` refuses longer texts, unless `overflow="warn"`; a forward takes
    them."""

    def __post_init__(self) -> None:
        op = "RecurrentDepthConfig"
        sizes = "vocab_size hidden_size heads head_dim intermediate_size prelude_layers core_layers"
        _check_sizes(op, self, [*sizes.split(), "mean_recurrence", "max_positions"])
        check_type(type(self.coda_layers) is int, op, "coda_layers", "be an int", type(self.coda_layers).__name__)
        check_int(op, "coda_layers", self.coda_layers, 0)
        check(self.head_dim % 2 == 0, op, "head_dim", "be even (RoPE rotates pairs)", self.head_dim)
        _check_numbers(op, self)

    @property
    def layers(self) -> int:
        """Layers with a slot in the cache: those of the prelude, the core and the coda, in this order."""
        return self.prelude_layers + self.core_layers + self.coda_layers

    @property
    def kv_heads(self) -> int:
        """The number of KV heads, equal to that of query heads."""
        return self.heads

    @property
    def embedding_scale(self) -> float:
        """Factor of the token embedding."""
        return math.sqrt(self.hidden_size)
