"""Gemma 4, the language model: layers with and without a window have heads of different sizes, the last layers may read
keys and values of earlier ones, and layers may get something of a token itself, beside the residual.

A cache holds rows that are as wide as those of any layer with keys and values of its own; a layer uses a part of them.

Source: transformers, models/gemma4.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import nn

from pdkernels._validation import KERNEL_DTYPES
from pdkernels.models.architectures import fused
from pdkernels.models.architectures.attention import NewRows
from pdkernels.models.architectures.fused import linear, rms_norm
from pdkernels.models.architectures.gemma4_config import Gemma4Config
from pdkernels.models.architectures.gemma4_layer import Gemma4Layer, LayerRows
from pdkernels.models.architectures.layer import Layer, Matrix
from pdkernels.models.architectures.recompute import RecomputedRows
from pdkernels.models.architectures.rope import RopeTables
from pdkernels.models.architectures.transformer import Transformer

__all__ = ["Gemma4", "Gemma4Config"]


class Gemma4(Transformer):
    """A `Transformer` with the layers of Gemma 4.

    `layer_embedding`, `layer_projection` and `layer_norm` make what layers get of a token itself; None: they get nothing.

    >>> from pdkernels.models import Window
    >>> config = Gemma4Config(vocab_size=11, hidden_size=32, layers=4, heads=2, kv_heads=2, head_dim=16, intermediate_size=48,
    ...                       windows=(Window(8), None) * 2, window_rope_theta=1e4, full_head_dim=64,
    ...                       reading_layers=2, layer_input_size=16)
    >>> model = Gemma4(config).requires_grad_(False)
    >>> cache = model.new_cache(batch=1, capacity=8)
    >>> model(torch.tensor([[1, 2, 3, 4]]), cache=cache).shape, cache.k.shape
    (torch.Size([1, 4, 11]), torch.Size([2, 1, 8, 1, 64]))
    """

    matrices = (
        *("embedding", "head", "qkv", "output", "gate_up", "down", "experts_gate_up", "experts_down"),
        *("layer_embedding", "layer_projection", "input_gate", "input_projection"),
    )
    config: Gemma4Config
    layer_embedding: Matrix | None
    layer_projection: Matrix | None
    layer_norm: nn.Parameter | None

    def __init__(self, config: Gemma4Config, **attributes: Any) -> None:
        super().__init__(config, **attributes)
        size = config.layer_input_size
        wide = config.layers * size
        shapes = {"layer_embedding": (config.vocab_size, wide), "layer_projection": (wide, config.hidden_size)}
        for name, shape in {**shapes, "layer_norm": (size,)}.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)) if size else None)
        self._tables = RopeTables(
            config.full_head_dim,
            config.max_positions,
            theta=config.rope_theta,
            style="half",
            scaling=config.rope_scaling,
        )
        if not self.norm.is_meta:
            self.initialize_()

    def _new_layer(self, index: int) -> Layer:
        return Gemma4Layer(self.config, index)

    @property
    def packs_rows(self) -> bool:
        """No: a forward on a cache takes no `cu_seqlens`."""
        return False

    def _has_kernels(self) -> bool:
        return self.dtype in KERNEL_DTYPES

    def _run(
        self,
        tokens: torch.Tensor,
        rows: NewRows | RecomputedRows,
        gate: torch.Tensor | None,
        states: dict[int, torch.Tensor | None] | None = None,
    ) -> torch.Tensor:
        assert isinstance(rows, NewRows)
        x, states = self.embed(tokens), {} if states is None else states
        layer_rows = LayerRows(rows, self.config, self._layer_inputs(tokens, x))
        for index, layer in enumerate(cast("list[Gemma4Layer]", self.layers)):
            if index in states:
                states[index] = x
            lora = None if rows.lora is None else partial(rows.lora.add, layer=index)
            inputs = None if layer_rows.inputs is None else layer_rows.inputs[:, :, index]
            x = layer(x, partial(layer_rows.attend_, layer=index), gate, lora, inputs)
        if self.config.layers in states:
            states[self.config.layers] = x
        return x

    def _layer_inputs(self, tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """What the layers get of tokens themselves, and of their embedding `x`: ``(batch, rows, layers, size)``."""
        if self.layer_embedding is None or self.layer_projection is None or self.layer_norm is None:
            return None
        config, size = self.config, (self.config.layers, self.config.layer_input_size)
        context = (linear(x, self.layer_projection) * config.hidden_size**-0.5).unflatten(-1, size)
        scale = torch.tensor(config.layer_input_size**0.5, dtype=self.dtype, device=x.device)
        identity = fused.embed(tokens, self.layer_embedding, self.dtype).unflatten(-1, size) * scale
        inputs: torch.Tensor = (rms_norm(context, self.layer_norm, config.norm_eps) + identity) * 2**-0.5
        return inputs
