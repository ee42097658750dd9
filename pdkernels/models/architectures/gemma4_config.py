"""The configuration of Gemma 4."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

from pdkernels._attention import SCALE_BYTES, check_head_dim
from pdkernels._validation import check, check_flag, check_int, check_type
from pdkernels.models.architectures.config import TransformerConfig, _check_sizes

_FIXED: dict[str, Any] = {
    **dict.fromkeys(("qk_norm", "outer_norms", "inner_norms"), True),
    **dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias", "whole_qk_norm", "sinks"), False),
    **{"rope_style": "half", "attention": "causal", "predicts": "next"},
    **{"activation": "gelu", "query_scale": 1.0, "attention_softcap": None},
}


@dataclass(frozen=True)
class Gemma4Config(TransformerConfig):
    """Sizes and variants of a `Gemma4`, whose layers with a window have heads of `kv_heads` and `head_dim`.

    >>> from pdkernels.models import Window
    >>> config = Gemma4Config(vocab_size=11, hidden_size=32, layers=4, heads=2, kv_heads=2, head_dim=16, intermediate_size=48,
    ...                       windows=(Window(8), None) * 2, window_rope_theta=1e4, full_head_dim=64, reading_layers=2)
    >>> [config.source(layer) for layer in range(4)], config.cache_layers, config.cache_heads
    ([0, 1, 0, 1], 2, (1, 64))
    """

    qk_norm: bool = True
    outer_norms: bool = True
    activation: Literal["silu", "gelu"] = "gelu"
    query_scale: float | None = 1.0
    full_kv_heads: int = 1
    """KV heads of layers without a window."""
    full_head_dim: int = 512
    """Size of a head there."""
    keys_as_values: bool = False
    """There, values are the keys before their norm, and have no matrix."""
    reading_layers: int = 0
    """The last layers, which have no keys and values: they read those of the last earlier layer of their kind, with or
    without a window."""
    wide_readers: bool = False
    """Whether the MLPs of these are twice as wide."""
    layer_input_size: int = 0
    """Components of what each layer gets of a token itself, beside the residual; 0: nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        op = "Gemma4Config"
        _check_sizes(op, self, ("full_kv_heads", "full_head_dim"))
        for name, value in _FIXED.items():
            check(getattr(self, name) == value, op, name, f"be {value!r}", repr(getattr(self, name)))
        full = self.full_kv_heads
        check(self.heads % full == 0, op, "full_kv_heads", f"divide heads ({self.heads})", full)
        for name in ("reading_layers", "layer_input_size"):
            value = getattr(self, name)
            check_type(type(value) is int, op, name, "be an int", type(value).__name__)
            check_int(op, name, value, 0)
        for name in ("keys_as_values", "wide_readers"):
            check_flag(op, name, getattr(self, name))
        for size in (self.head_dim, self.full_head_dim):
            check_head_dim(op, size)
        turned = self.window_rope_theta is not None or not any(self.windows)
        check(turned, op, "window_rope_theta", "be a number, for layers whose heads have another size", None)
        sizes = sorted({window.size for window in self.windows if window is not None})
        check(len(sizes) < 2, op, "windows", "have one size", sizes)
        storing = self.cache_layers
        check(storing > 0, op, "reading_layers", f"be below layers ({self.layers})", self.reading_layers)
        kinds = {self._slides(layer) for layer in range(storing)}
        read = all(self._slides(layer) in kinds for layer in range(storing, self.layers))
        check(read, op, "reading_layers", "leave a layer of each kind with keys and values", self.reading_layers)
        mixture = self.experts
        softmax = mixture is None or (
            mixture.usual
            and mixture.scores == "softmax"
            and mixture.normalized
            and not mixture.shared_size
            and mixture.scale == 1
            and all(map(mixture.are_in, range(self.layers)))
        )
        check(softmax, op, "experts", "be a softmax's in all layers, with normed weights", mixture)

    def _slides(self, layer: int) -> bool:
        return bool(self.windows) and self.windows[layer] is not None

    def heads_of(self, layer: int) -> tuple[int, int]:
        """KV heads of a layer, and the size of its heads."""
        return (self.kv_heads, self.head_dim) if self._slides(layer) else (self.full_kv_heads, self.full_head_dim)

    def takes_keys(self, layer: int) -> bool:
        """Whether a layer's values are its keys."""
        return self.keys_as_values and not self._slides(layer)

    @property
    def rotary_width(self) -> int:
        return self.full_head_dim

    @property
    def cache_layers(self) -> int:
        """Layers with keys and values of their own, the first ones."""
        return self.layers - self.reading_layers

    @cached_property
    def _sources(self) -> tuple[int, ...]:
        last = {self._slides(layer): layer for layer in range(self.cache_layers)}
        return tuple(layer if layer < self.cache_layers else last[self._slides(layer)] for layer in range(self.layers))

    def source(self, layer: int) -> int:
        """The layer whose keys and values a layer reads."""
        return self._sources[layer]

    @cached_property
    def cache_heads(self) -> tuple[int, int]:
        """Heads and their size, of rows that hold those of any layer, in 8 bits too."""
        kinds = {self.heads_of(layer) for layer in range(self.cache_layers)}
        heads, size = max(kinds, key=lambda kind: kind[0] * (kind[1] + SCALE_BYTES))
        numbers = max(count * size for count, size in kinds)
        return heads, max(size, 8 * -(-numbers // (8 * heads)))

    @property
    def kind_heads(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Those of layers without and with a window, where their rows are apart."""
        return (self.full_kv_heads, self.full_head_dim), (self.kv_heads, self.head_dim)

    def of_layer(self, layer: int) -> TransformerConfig:
        """The sizes of one layer."""
        kv_heads, head_dim = self.heads_of(layer)
        wide = self.wide_readers and self.source(layer) != layer
        values = {field.name: getattr(self, field.name) for field in fields(TransformerConfig)}
        values |= {"layers": 1, "windows": (), "window_rope_theta": None, "rope_scaling": None, "experts": None}
        inner = self.intermediate_size * (1 + wide)
        return TransformerConfig(**values | {"kv_heads": kv_heads, "head_dim": head_dim, "intermediate_size": inner})
