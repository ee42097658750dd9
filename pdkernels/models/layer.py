"""One layer of the transformer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from pdkernels._validation import check
from pdkernels.models.attention import Visibility, attend, attend_cached
from pdkernels.models.rope import Rotation, rotate

if TYPE_CHECKING:
    from pdkernels.models.transformer import Cache, TransformerConfig


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm: statistics in fp32 (fp64 for fp64 input), cast to the dtype of `x`, then the weight."""
    return F.rms_norm(x, weight.shape, None, eps) * weight


class Layer(nn.Module):
    """Attention and SwiGLU, each behind a norm and a residual.

    Projections of the same input are one matrix. Its parameters stand here without modules around them, whose calls
    take a noticeable share of a small model's step. `adapted` is a factor of the adapter's output that broadcasts to `x`,
    None where no row takes the adapter.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        hidden, width = config.hidden_size, config.heads * config.head_dim
        qkv_width = width + 2 * config.kv_heads * config.head_dim
        self.attention_norm = nn.Parameter(torch.empty(hidden))
        self.qkv = nn.Parameter(torch.empty(qkv_width, hidden))
        self.register_parameter("qkv_bias", nn.Parameter(torch.empty(qkv_width)) if config.qkv_bias else None)
        self.output = nn.Parameter(torch.empty(hidden, width))
        self.mlp_norm = nn.Parameter(torch.empty(hidden))
        self.gate_up = nn.Parameter(torch.empty(2 * config.intermediate_size, hidden))
        self.down = nn.Parameter(torch.empty(hidden, config.intermediate_size))
        self.register_parameter("adapter_in", None)
        self.register_parameter("adapter_out", None)

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation,
        visibility: Visibility,
        index: int,
        cache: Cache | None,
        counts: torch.Tensor | None,
        adapted: torch.Tensor | None,
    ) -> torch.Tensor:
        config = self.config
        heads, kv_heads = config.heads, config.kv_heads
        qkv = F.linear(rms_norm(x, self.attention_norm, config.norm_eps), self.qkv, self.qkv_bias)
        qkv = qkv.view(*x.shape[:2], heads + 2 * kv_heads, config.head_dim)
        qk, v = qkv.split((heads + kv_heads, kv_heads), -2)
        q, k = rotate(qk, rotation, config.rope_style).split((heads, kv_heads), -2)
        if rotation.query_scale is not None:
            q = q * rotation.query_scale.to(q.dtype)
        if cache is None:
            mixed = attend(q, k, v, visibility).flatten(-2)
        else:
            mixed = attend_cached(q, k, v, visibility, cache, index, counts).flatten(-2)
        x = x + F.linear(mixed, self.output)
        if adapted is not None:
            x = x + F.linear(F.linear(mixed, self.adapter_in), self.adapter_out) * adapted
        gate, up = F.linear(rms_norm(x, self.mlp_norm, config.norm_eps), self.gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down)

    @torch.no_grad()
    def attach_adapter_(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """A low-rank rival `output + b @ a` of the output projection, see `Transformer.attach_adapter_`."""
        op, width = "Transformer.attach_adapter_", self.output.shape[1]
        check(a.dim() == 2 and a.shape[1] == width, op, "pairs", f"hold a of shape (rank, {width})", tuple(a.shape))
        check(b.shape == (len(self.output), len(a)), op, "pairs", f"hold b of shape ({len(self.output)}, {len(a)})",
              tuple(b.shape))
        self.adapter_in = nn.Parameter(a.detach().to(self.output), self.output.requires_grad)
        self.adapter_out = nn.Parameter(b.detach().to(self.output), self.output.requires_grad)
