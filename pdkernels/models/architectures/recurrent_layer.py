"""One layer of a recurrent-depth model: attention and a gated MLP, each between two norms ("transformer_ops")."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from pdkernels.cache import Cache
from pdkernels.models.architectures import fused
from pdkernels.models.architectures.attention import Visibility, attend, attend_cached, attend_stored
from pdkernels.models.architectures.config import RecurrentDepthConfig
from pdkernels.models.architectures.fused import add_norm, gated, linear
from pdkernels.models.architectures.rope import Rotation, apply_rope
from pdkernels.ops.transformer_ops import apply_rope_append_


class ForwardContext(NamedTuple):
    """Positions and visibility of the rows of a forward, made once by `RecurrentDepth.context` for all parts of the
    model."""

    table: Rotation
    """For all positions."""
    rotation: Rotation
    """For the rows' positions."""
    visibility: Visibility
    cache: Cache | None
    counts: torch.Tensor | None
    recurrence: int = 0
    """Index of the next recurrence, for a cache with several slots per layer; see `RecurrentDepth.new_cache`."""


class RecurrentLayer(nn.Module):
    """``h = norm_2(attention(norm_1(x)) + x)``, then ``norm_4(mlp(norm_3(h)) + h)``. There is no residual without a
    norm.

    q and k have a bias, v has none. The first half of `gate_up` goes through SiLU and multiplies the second.
    """

    def __init__(self, config: RecurrentDepthConfig) -> None:
        super().__init__()
        self.config = config
        hidden, width = config.hidden_size, config.heads * config.head_dim
        self.norm_1 = nn.Parameter(torch.empty(hidden))
        self.qkv = nn.Parameter(torch.empty(3 * width, hidden))
        self.qk_bias = nn.Parameter(torch.empty(2 * config.heads, config.head_dim))
        self.output = nn.Parameter(torch.empty(hidden, width))
        self.norm_2 = nn.Parameter(torch.empty(hidden))
        self.norm_3 = nn.Parameter(torch.empty(hidden))
        self.gate_up = nn.Parameter(torch.empty(2 * config.intermediate_size, hidden))
        self.down = nn.Parameter(torch.empty(hidden, config.intermediate_size))
        self.norm_4 = nn.Parameter(torch.empty(hidden))

    def forward(
        self, x: torch.Tensor, normed: torch.Tensor, context: ForwardContext, slot: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The inputs of norm_4: the MLP's output and its residual. `normed` is norm_1 of `x`, `slot` the cache's
        slot."""
        qkv = linear(normed, self.qkv).view(*x.shape[:2], 3 * self.config.heads, self.config.head_dim)
        mixed = self._attention(qkv, context, slot).flatten(-2)
        h, normed = add_norm(self._project_out(mixed), x, self.norm_2, self.norm_3, self.config.norm_eps)
        return self._mlp(normed), h

    def _project_out(self, mixed: torch.Tensor) -> torch.Tensor:
        return linear(mixed, self.output)

    def _mlp(self, normed: torch.Tensor) -> torch.Tensor:
        return linear(gated(linear(normed, self.gate_up)), self.down)

    def _attention(self, qkv: torch.Tensor, context: ForwardContext, slot: int) -> torch.Tensor:
        """Attention of q, k and v `(batch, T, 3 * heads, head_dim)` over the cached prefix and each other."""
        heads, cache = self.config.heads, context.cache
        if cache is None or not fused.enabled(qkv):
            qk, v = qkv.split((2 * heads, heads), -2)
            q, k = apply_rope(qk + self.qk_bias, context.rotation, "interleaved").split((heads, heads), -2)
            if cache is None:
                return attend(q, k, v, context.visibility)
            return attend_cached(q, k, v, context.visibility, cache, slot, context.counts)
        apply_rope_append_(
            qkv,
            self.qk_bias,
            context.table.cos,
            context.table.sin,
            cache.k[slot],
            cache.v[slot],
            cache.lengths,
            counts=context.counts,
            block_table=cache.block_table,
        )
        q, k, v = qkv.split(heads, -2)
        return attend_stored(q, k, v, context.visibility, cache, slot)
