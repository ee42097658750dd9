"""One layer of the transformer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import nn

from pdkernels._validation import check, check_type, fail
from pdkernels.models.architectures.fused import add_norm, gated, linear, rms_norm
from pdkernels.models.architectures.lora import Added
from pdkernels.ops.quantized_weight import QuantizedWeight

if TYPE_CHECKING:
    from pdkernels.models.architectures.config import TransformerConfig

Matrix: TypeAlias = nn.Parameter | QuantizedWeight


class Layer(nn.Module):
    """Attention and SwiGLU, each with a norm before and a residual around it.

    Projections of the same input are one matrix. The layer holds its parameters directly, because calls of submodules
    take a noticeable share of a small model's step. `adapted` is a factor of the adapter's output that broadcasts to
    `x`, None if no row uses the adapter.
    """

    qkv: Matrix
    output: Matrix
    gate_up: Matrix
    down: Matrix
    qkv_bias: nn.Parameter | None
    output_bias: nn.Parameter | None
    gate_up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None
    q_norm: nn.Parameter | None
    k_norm: nn.Parameter | None
    attention_norm: nn.Parameter | None
    mlp_norm: nn.Parameter | None
    sinks: nn.Parameter | None
    attention_out_norm: nn.Parameter | None
    mlp_out_norm: nn.Parameter | None
    adapter_in: nn.Parameter | None
    adapter_out: nn.Parameter | None

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        hidden, width = config.hidden_size, config.heads * config.head_dim
        qkv_width = width + 2 * config.kv_heads * config.head_dim
        inner = hidden * config.inner_norms
        self._add_vectors({"attention_norm": inner})
        self.qkv = nn.Parameter(torch.empty(qkv_width, hidden))
        norms = {name: config.qk_norm_sizes.get(name, 0) for name in ("q_norm", "k_norm")}
        self._add_vectors({"qkv_bias": qkv_width * config.qkv_bias, **norms, "sinks": config.heads * config.sinks})
        self.output = nn.Parameter(torch.empty(hidden, width))
        self._add_vectors({"mlp_norm": inner})
        self._add_mlp(config)
        outer = hidden * config.outer_norms
        self._add_vectors(
            {"output_bias": hidden * config.output_bias, "attention_out_norm": outer, "mlp_out_norm": outer}
        )
        self.register_parameter("adapter_in", None)
        self.register_parameter("adapter_out", None)

    def _add_mlp(self, config: TransformerConfig) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up = nn.Parameter(torch.empty(2 * inner, hidden))
        self.down = nn.Parameter(torch.empty(hidden, inner))
        self._add_vectors({"gate_up_bias": 2 * inner * config.mlp_bias, "down_bias": hidden * config.mlp_bias})

    def _add_vectors(self, sizes: dict[str, int]) -> None:
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(size)) if size else None)

    def forward(
        self,
        x: torch.Tensor,
        added: torch.Tensor | None,
        attend: Callable[..., torch.Tensor],
        adapted: torch.Tensor | None,
        lora: Added | None = None,
        **routing: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual and the output of the MLP, which the next layer adds up.

        `added` is the MLP's output of the previous layer, which is still to be added to `x`, None for the first layer;
        `attend` maps the output of `project`, and `sinks` where there are some, to the input of `project_out`; `lora` adds
        what the adapters of rows make of a product; `routing` is for the MLP. A layer reads only its own parameters, because FSDP holds them only while it runs.
        """
        x, normed = (x, self.normed(x)) if added is None else self._sum(added, x, self.attention_norm)
        qkv = self.project(normed, lora=lora)
        mixed = attend(qkv) if self.sinks is None else attend(qkv, sinks=self.sinks)
        x, normed = self._sum(self.project_out(mixed, adapted, lora), x, self.mlp_norm)
        return x, self._outer(self._mlp(normed, **routing) if lora is None else self._mlp(normed, lora, **routing))

    def _sum(
        self, added: torch.Tensor, x: torch.Tensor, norm: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual with what is added to it, and what follows takes."""
        if norm is None:
            x = added + x
            return x, x
        return add_norm(added, x, None, norm, self.config.norm_eps)

    def _normed(self, x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        return x if norm is None else rms_norm(x, norm, self.config.norm_eps)

    # ---- the parts, `x` always (batch, rows, hidden_size)

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """The input of attention's projections for `x`."""
        return self._normed(x, self.attention_norm)

    def project(
        self, normed: torch.Tensor, which: Literal["qkv", "qk", "v"] = "qkv", lora: Added | None = None
    ) -> torch.Tensor:
        """q, k and v, or some of them, before the rotation: `(batch, rows, heads, head_dim)`.

        q and k are normed if the model norms them.
        """
        config = self.config
        weight: torch.Tensor | QuantizedWeight = self.qkv
        bias: torch.Tensor | None = self.qkv_bias
        if which != "qkv":
            middle = (config.heads + config.kv_heads) * config.head_dim
            rows = slice(middle) if which == "qk" else slice(middle, None)
            weight, bias = weight[rows], None if bias is None else bias[rows]
        product = linear(normed, weight, bias)
        if lora is not None:
            product = lora(product, normed, which)
        heads: torch.Tensor = product.unflatten(-1, (-1, config.head_dim))
        if self.q_norm is None or self.k_norm is None or which == "v":
            return heads
        q, k, *v = heads.split([config.heads, *[config.kv_heads] * (len(which) - 1)], -2)
        if config.whole_qk_norm:
            normed_pairs = (q, self.q_norm), (k, self.k_norm)
            wide = (rms_norm(x.flatten(-2), weight, config.norm_eps) for x, weight in normed_pairs)
            q, k = (x.unflatten(-1, (-1, config.head_dim)) for x in wide)
            return torch.cat((q, k, *v), -2)
        return torch.cat((rms_norm(q, self.q_norm, config.norm_eps), rms_norm(k, self.k_norm, config.norm_eps), *v), -2)

    def project_out(
        self, mixed: torch.Tensor, adapted: torch.Tensor | None = None, lora: Added | None = None
    ) -> torch.Tensor:
        """The output projection of attention, of `mixed` `(batch, rows, heads, head_dim)`, which is added to the
        residual."""
        mixed = mixed.flatten(-2)
        out = linear(mixed, self.output, self.output_bias)
        if lora is not None:
            out = lora(out, mixed, "output")
        if adapted is not None:
            assert self.adapter_in is not None and self.adapter_out is not None
            out = out + linear(linear(mixed, self.adapter_in), self.adapter_out) * adapted
        return self._normed(out, self.attention_out_norm)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """The MLP's output for the residual `x`, to which it is added."""
        return self._outer(self._mlp(self._normed(x, self.mlp_norm)))

    def _outer(self, out: torch.Tensor) -> torch.Tensor:
        return self._normed(out, self.mlp_out_norm)

    def _mlp(self, normed: torch.Tensor, lora: Added | None = None) -> torch.Tensor:
        gate_up = linear(normed, self.gate_up, self.gate_up_bias)
        if lora is None:
            return linear(gated(gate_up, self.config.activation), self.down, self.down_bias)
        inner = gated(lora(gate_up, normed, "gate_up"), self.config.activation)
        return lora(linear(inner, self.down, self.down_bias), inner, "down")

    @torch.no_grad()
    def attach_adapter_(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """A low-rank alternative `output + b @ a` to the output projection, see `Transformer.attach_adapter_`."""
        op, width = "Transformer.attach_adapter_", self.output.shape[1]
        check(a.dim() == 2 and a.shape[1] == width, op, "pairs", f"hold a of shape (rank, {width})", tuple(a.shape))
        check(
            b.shape == (len(self.output), len(a)),
            op,
            "pairs",
            f"hold b of shape ({len(self.output)}, {len(a)})",
            tuple(b.shape),
        )
        like = next(self.parameters()) if isinstance(self.output, QuantizedWeight) else self.output
        self.adapter_in = nn.Parameter(a.detach().to(like), like.requires_grad)
        self.adapter_out = nn.Parameter(b.detach().to(like), like.requires_grad)

    def gate(self, adapted: Literal[True] | torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Factor of the drafting adapter's output that broadcasts to `(batch, T, hidden_size)`, for rows of this
        `shape`; see `adapted` of a forward."""
        op, remedy = "Transformer", "Give it one with attach_adapter_."
        if self.adapter_in is None:
            fail(op, "adapted", "be False for a model without an adapter", adapted, remedy)
        if adapted is True:
            return self.adapter_in.new_ones(())
        valid, actual = isinstance(adapted, torch.Tensor), getattr(adapted, "dtype", type(adapted).__name__)
        check_type(valid and adapted.dtype == torch.bool, op, "adapted", "be a bool or a bool tensor", actual)
        expectation = f"have shape ({shape[1]},) or {tuple(shape)}"
        check(adapted.shape in (shape, shape[1:]), op, "adapted", expectation, tuple(adapted.shape))
        return adapted.to(self.adapter_in.dtype)[..., None]
