"""Layers whose MLP is a mixture of experts."""

from __future__ import annotations

import torch
from torch import nn

from pdkernels.models.config import ExpertsConfig, TransformerConfig
from pdkernels.models.fused import gated, grouped_linear, linear
from pdkernels.models.layer import Layer, Matrix


class ExpertLayer(Layer):
    """Attention and a mixture of SwiGLU experts, of which the router chooses some for every row."""

    router: nn.Parameter
    experts_gate_up: Matrix
    experts_down: Matrix

    def _add_mlp(self, config: TransformerConfig) -> None:
        experts, hidden = config.experts, config.hidden_size
        assert experts is not None
        self.router = nn.Parameter(torch.empty(experts.count, hidden))
        self.experts_gate_up = nn.Parameter(torch.empty(experts.count, 2 * experts.intermediate_size, hidden))
        self.experts_down = nn.Parameter(torch.empty(experts.count, hidden, experts.intermediate_size))

    def _mlp(self, normed: torch.Tensor) -> torch.Tensor:
        experts = self.config.experts
        assert experts is not None
        rows = normed.flatten(0, -2)
        weights, ids = chosen_experts(linear(rows, self.router), experts)
        return mixture(rows, weights, ids, self.experts_gate_up, self.experts_down).view_as(normed)


def chosen_experts(logits: torch.Tensor, experts: ExpertsConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of each row's experts, in the dtype of the router's `logits` `(rows, count)`, and their numbers:
    `(rows, per_token)`, those with the largest probabilities first."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    weights, ids = logits.softmax(-1, dtype=wide).topk(experts.per_token)
    if experts.normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), ids


def sorted_by_expert(ids: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The order that sorts the flat `ids` by expert, and where those of each of `count` experts end."""
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    return order, torch.searchsorted(flat[order], torch.arange(count, device=ids.device), right=True)


def in_order(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Rows sorted by expert as they were before."""
    return rows[order.argsort()]


def weighted_sum(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sum of `outputs` `(rows, per_token, width)` with `weights` `(rows, per_token)`, in float32 or float64."""
    wide = torch.promote_types(outputs.dtype, torch.float32)
    # One after the other: torch.sum chooses an order by sizes, layouts and threads.
    total, *others = (outputs.to(wide) * weights.to(wide)[..., None]).unbind(1)
    for term in others:
        total = total + term
    return total


def mixture(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: Matrix | torch.Tensor,
    down: Matrix | torch.Tensor,
) -> torch.Tensor:
    """The weighted sum of the outputs of the experts `ids` `(rows, per_token)` for the rows of `x` `(rows, hidden)`.

    Rows are sorted by expert on the device. A row's experts are added up in the order of `ids`, so that its sum has the same bits in
    any batch.
    """
    order, ends = sorted_by_expert(ids, len(gate_up))
    inner = gated(grouped_linear(x[order // ids.shape[1]], gate_up, ends))
    outputs = in_order(grouped_linear(inner, down, ends), order)
    return weighted_sum(outputs.view(*ids.shape, -1), weights).to(x.dtype)
