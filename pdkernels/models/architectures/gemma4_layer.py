"""One layer of Gemma 4, and the attention of a forward whose layers differ in their heads, or read the keys of others."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from pdkernels._attention import SCALE_BYTES
from pdkernels.cache import Cache
from pdkernels.cache.stored import narrowed, stored
from pdkernels.masks import TilePlan
from pdkernels.models.architectures.attention import NewRows, Visibility, attend, rotated
from pdkernels.models.architectures.experts import mixture
from pdkernels.models.architectures.fused import gated, linear, rms_norm
from pdkernels.models.architectures.layer import Layer, Matrix
from pdkernels.models.architectures.lora import Added
from pdkernels.ops.kv_cache import kv_append_
from pdkernels.ops.speculative_attention import speculative_attention, speculative_attention_append_

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdkernels.models.architectures.gemma4_config import Gemma4Config


class Gemma4Layer(Layer):
    """A layer whose values are normed too, of the size of one kind or the other.

    `layer_scale` multiplies all that it returns. With experts, these and the MLP each have a norm of their own before
    they are added up. `input_gate` and what follows it are for what the layer gets of a token itself.
    """

    layer_scale: nn.Parameter
    input_gate: Matrix | None
    input_projection: Matrix | None
    input_norm: nn.Parameter | None
    router: nn.Parameter | None
    router_scale: nn.Parameter | None
    experts_gate_up: Matrix | None
    experts_down: Matrix | None
    expert_scale: nn.Parameter | None
    """Factors of the weights of experts."""
    dense_out_norm: nn.Parameter | None
    mixture_norm: nn.Parameter | None
    mixture_out_norm: nn.Parameter | None

    def __init__(self, config: Gemma4Config, index: int) -> None:
        super().__init__(config.of_layer(index))
        hidden, size, sizes = config.hidden_size, config.layer_input_size, self.config
        self.reads, self.takes_keys = config.source(index) != index, config.takes_keys(index)
        self.experts = config.experts
        if self.reads:
            self.register_parameter("k_norm", None)
        heads = sizes.heads + sum(self._kv_heads)
        self.qkv = nn.Parameter(torch.empty(heads * sizes.head_dim, hidden))
        self.layer_scale = nn.Parameter(torch.empty(1))
        count, inner = (0, 0) if config.experts is None else (config.experts.count, config.experts.intermediate_size)
        shapes: dict[str, tuple[int, ...]] = {
            "input_gate": (size, hidden),
            "input_projection": (hidden, size),
            "input_norm": (hidden * (size > 0),),
            "router": (count, hidden),
            "router_scale": (hidden * (count > 0),),
            "expert_scale": (count,),
            "experts_gate_up": (count, 2 * inner, hidden),
            "experts_down": (count, hidden, inner),
            **dict.fromkeys(("dense_out_norm", "mixture_norm", "mixture_out_norm"), (hidden * (count > 0),)),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)) if 0 not in shape else None)

    @property
    def _kv_heads(self) -> list[int]:
        """Of each of keys and values that are projected."""
        return [self.config.kv_heads] * (0 if self.reads else 1 if self.takes_keys else 2)

    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor,
        attend: Callable[..., torch.Tensor],
        adapted: torch.Tensor | None,
        lora: Added | None,
        inputs: torch.Tensor | None,
    ) -> torch.Tensor:
        """The residual after the layer. `inputs`: what it gets of the tokens themselves, ``(batch, rows, size)``."""
        mixed = attend(self.project(self.normed(x), lora=lora))
        x, normed = self._sum(self.project_out(mixed, adapted, lora), x, self.mlp_norm)
        out = self._mlp(normed, lora)
        if self.router is not None:
            out = self._normed(out, self.dense_out_norm) + self._normed(self._mixture(x), self.mixture_out_norm)
        x = x + self._outer(out)
        if inputs is not None and self.input_gate is not None and self.input_projection is not None:
            gate = F.gelu(linear(x, self.input_gate), approximate="tanh")
            x = x + self._normed(linear(gate * inputs, self.input_projection), self.input_norm)
        return x * self.layer_scale

    def project(
        self, normed: torch.Tensor, which: Literal["qkv", "qk", "v"] = "qkv", lora: Added | None = None
    ) -> torch.Tensor:
        """q, k and v before the rotation, or q of a layer that reads the others'; all normed."""
        assert which == "qkv" and self.q_norm is not None
        product, eps = linear(normed, self.qkv), self.config.norm_eps
        if lora is not None:
            product = lora(product, normed, "qkv")
        q, *kv = product.unflatten(-1, (-1, self.config.head_dim)).split([self.config.heads, *self._kv_heads], -2)
        q = rms_norm(q, self.q_norm, eps)
        if self.k_norm is None:
            return q
        k, v = kv[0], kv[-1]
        return torch.cat((q, rms_norm(k, self.k_norm, eps), rms_norm(v, torch.ones_like(self.k_norm), eps)), -2)

    def _mixture(self, x: torch.Tensor) -> torch.Tensor:
        """The experts' output for the residual before the MLP, from which the router chooses them."""
        assert self.experts is not None and self.router is not None and self.router_scale is not None
        assert self.experts_gate_up is not None and self.experts_down is not None and self.expert_scale is not None
        rows = x.flatten(0, -2)
        chosen_by = rms_norm(rows, self.router_scale, self.config.norm_eps) * x.shape[-1] ** -0.5
        logits = linear(chosen_by, self.router)
        weights, ids = logits.softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32)).topk(
            self.experts.per_token
        )
        weights = weights / weights.sum(-1, keepdim=True) * self.expert_scale[ids]
        inputs, gate = self._normed(rows, self.mixture_norm), partial(gated, activation="gelu")
        return mixture(inputs, weights, ids, self.experts_gate_up, self.experts_down, gate=gate).view_as(x)


class LayerRows:
    """The rows of a forward, `rows`, in layers whose heads differ, and of which some read others' keys and values.

    `inputs` ``(batch, rows, layers, size)``: what each layer gets of the tokens themselves; None: nothing.
    """

    def __init__(self, rows: NewRows, config: Gemma4Config, inputs: torch.Tensor | None) -> None:
        self.rows, self.lora, self.inputs, self._config = rows, rows.lora, inputs, config
        self._read = {config.source(layer) for layer in range(config.cache_layers, config.layers)}
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Keys and values of these rows in layers that others read, in the form of the cache."""

    def attend_(self, qkv: torch.Tensor, layer: int) -> torch.Tensor:
        """Attention of what `Gemma4Layer.project` returns: q's shape."""
        rows, source = self.rows, self._config.source(layer)
        visibility, starts, rotation = rows.seen[layer] if rows.seen else (rows.visibility, None, None)
        rotation = rows.rotation if rotation is None else rotation
        if source != layer:
            q = rotated(qkv, rotation, rows.style)
            k, v = self._kept[source]
        else:
            kv_heads, _ = self._config.heads_of(layer)
            qk, v = qkv.split_with_sizes((qkv.shape[2] - kv_heads, kv_heads), -2)
            q, k = rotated(qk, rotation, rows.style).split_with_sizes((qk.shape[2] - kv_heads, kv_heads), -2)
            k, v = (k, v) if rows.cache is None else stored(rows.cache.dtype, k, v)
            if source in self._read:
                self._kept[source] = k, v
        if rows.cache is None:
            return attend(q * q.shape[3] ** 0.5, k, v, visibility)
        return self._on_cache(q, k, v, visibility, starts, rows.cache, source, source == layer)

    def _on_cache(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        visibility: Visibility,
        starts: torch.Tensor | None,
        cache: Cache,
        source: int,
        stores: bool,
    ) -> torch.Tensor:
        """Attention to the rows of layer `source` and to new ones, which it may store."""
        counts, table, (kv_heads, size) = self.rows.counts, cache.table(source), self._config.heads_of(source)
        width = size + SCALE_BYTES if cache.dtype == torch.int8 else size
        k_cache, v_cache = (narrowed(side[source], kv_heads, width) for side in (cache.k, cache.v))
        if isinstance(visibility.mask, TilePlan):
            tensors = q, k, v, k_cache, v_cache, cache.lengths, visibility.mask
            options: dict[str, Any] = {"starts": starts, "block_table": table, "scale": 1.0}
            op: Any = partial(speculative_attention_append_, counts=counts) if stores else speculative_attention
            mixed: torch.Tensor = op(*tensors, **options)
            return mixed
        if stores:
            kv_append_(k_cache, v_cache, k, v, cache.lengths, counts=counts, block_table=table)
        # The new K and V come from the forward: the cache may not store all of them.
        prefix = (narrowed(rows, kv_heads, width) for rows in cache.layer(source, visibility.prefix))
        keys, values = (torch.cat([old, new], 1).to(q.dtype) for old, new in zip(prefix, (k, v), strict=True))
        return attend(q * size**0.5, keys, values, visibility)
