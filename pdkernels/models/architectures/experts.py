"""Layers whose MLP is a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from pdkernels.models.architectures.config import ExpertsConfig, TransformerConfig
from pdkernels.models.architectures.fused import gated, grouped_linear, linear, wide_linear
from pdkernels.models.architectures.layer import Layer, Matrix
from pdkernels.models.architectures.lora import Added


class Pools(NamedTuple):
    """Which rows of a forward share a pool of experts (`ExpertsConfig.pool`)."""

    of_rows: torch.Tensor
    """``(batch * rows,)``, the number of each row's pool."""
    pools: int

    @classmethod
    def of(cls, positions: torch.Tensor, valid: torch.Tensor | None, rows: int) -> Pools:
        """Blocks of `rows` positions of each sequence, of rows at `positions` ``(batch, T)``; those that are not `valid` have
        one of their own. Waits for the device.

        >>> Pools.of(torch.tensor([[0, 1, 2, 3], [3, 4, 5, 0]]), torch.tensor([[True] * 4, [True] * 3 + [False]]), 4)
        Pools(of_rows=tensor([1, 1, 1, 1, 2, 3, 3, 0]), pools=4)
        """
        sequence = torch.arange(len(positions), device=positions.device)[:, None]
        keys = positions.long() // rows + (sequence << 32)
        if valid is not None:
            keys = keys.masked_fill(~valid, -1)
        distinct, of_rows = keys.flatten().unique(return_inverse=True)
        return cls(of_rows, len(distinct))

    def only(self, ranked: torch.Tensor, size: int) -> torch.Tensor:
        """`ranked` scores ``(batch * rows, experts)`` without the experts that are not among the `size` best of their pool."""
        index = self.of_rows[:, None].expand_as(ranked)
        best = ranked.new_full((self.pools, ranked.shape[1]), -torch.inf).scatter_reduce(0, index, ranked, "amax")
        outside = torch.ones_like(best, dtype=torch.bool).scatter(-1, best.topk(size).indices, False)
        return ranked.masked_fill(outside[self.of_rows], -torch.inf)


class ExpertLayer(Layer):
    """Attention and a mixture of SwiGLU experts, of which the router chooses some for every row."""

    router: nn.Parameter
    router_bias: nn.Parameter | None
    experts_gate_up: Matrix
    experts_down: Matrix
    experts_gate_up_bias: nn.Parameter | None
    experts_down_bias: nn.Parameter | None
    shared_gate_up: Matrix | None
    shared_down: Matrix | None

    def _add_mlp(self, config: TransformerConfig) -> None:
        experts, hidden = config.experts, config.hidden_size
        assert experts is not None
        self.router = nn.Parameter(torch.empty(experts.count, hidden))
        self._add_vectors({"router_bias": experts.count * experts.biased})
        self.experts_gate_up = nn.Parameter(torch.empty(experts.count, 2 * experts.intermediate_size, hidden))
        self.experts_down = nn.Parameter(torch.empty(experts.count, hidden, experts.intermediate_size))
        for name, size in (("experts_gate_up_bias", 2 * experts.intermediate_size), ("experts_down_bias", hidden)):
            bias = nn.Parameter(torch.empty(experts.count, size)) if experts.matrix_biases else None
            self.register_parameter(name, bias)
        shared = experts.shared_size
        for name, shape in (("shared_gate_up", (2 * shared, hidden)), ("shared_down", (hidden, shared))):
            self.register_parameter(name, nn.Parameter(torch.empty(shape)) if shared else None)

    def _mlp(self, normed: torch.Tensor, lora: Added | None = None, pools: Pools | None = None) -> torch.Tensor:
        experts = self.config.experts
        assert experts is not None
        rows = normed.flatten(0, -2)
        if experts.scores == "softmax":
            weights, ids = chosen_experts(linear(rows, self.router, self.router_bias), experts)
        else:
            weights, ids = chosen_by_sigmoid(wide_linear(rows, self.router), self.router_bias, experts, pools)
        out = self._mixture(rows, weights, ids).view_as(normed)
        if self.shared_gate_up is None or self.shared_down is None:
            return out
        return out + linear(gated(linear(normed, self.shared_gate_up)), self.shared_down)

    def _mixture(self, rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        experts, biases = self.config.experts, (self.experts_gate_up_bias, self.experts_down_bias)
        assert experts is not None
        gate = gated if experts.clamp is None else partial(clamped_gate, limit=experts.clamp, slope=experts.gate_slope)
        return mixture(rows, weights, ids, self.experts_gate_up, self.experts_down, biases, gate)


def chosen_experts(logits: torch.Tensor, experts: ExpertsConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of each row's experts, in the dtype of the router's `logits` `(rows, count)`, and their numbers:
    `(rows, per_token)`, those with the largest probabilities first."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    weights, ids = logits.softmax(-1, dtype=wide).topk(experts.per_token)
    if experts.normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return (weights * experts.scale).to(logits.dtype), ids


def chosen_by_sigmoid(
    logits: torch.Tensor, bias: torch.Tensor | None, experts: ExpertsConfig, pools: Pools | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with a score between 0 and 1 for each expert, in groups, or pools of blocks, if there are some."""
    scores = logits.sigmoid()
    ranked = scores if bias is None else scores + bias
    if experts.groups > 1:
        groups = ranked.unflatten(-1, (experts.groups, -1))
        best = groups.topk(2).values.sum(-1).topk(experts.chosen_groups).indices
        outside = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, False)
        ranked = groups.masked_fill(outside[..., None], -torch.inf).flatten(-2)
    if experts.pool:
        assert pools is not None
        ranked = pools.only(ranked, experts.pool)
    ids = ranked.topk(experts.per_token).indices
    weights = scores.gather(-1, ids)
    if experts.normalized and experts.per_token > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * experts.scale, ids


def sorted_by_expert(ids: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The order that sorts the flat `ids` by expert, and where those of each of `count` experts end."""
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    return order, torch.searchsorted(flat[order], torch.arange(count, device=ids.device), right=True)


def in_order(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Rows sorted by expert as they were before."""
    return rows[order.argsort()]


def clamped_gate(x: torch.Tensor, limit: float, slope: float) -> torch.Tensor:
    """The gate of `ExpertsConfig.clamp`, of ``gate, up = x.chunk(2, -1)``."""
    gate, up = x.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * (slope * gate).sigmoid() * (up + 1)


def weighted_sum(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sum of `outputs` `(rows, per_token, width)` with `weights` `(rows, per_token)`, in float32 or float64."""
    wide = torch.promote_types(outputs.dtype, torch.float32)
    # One after the other: torch.sum chooses an order by sizes, layouts and threads.
    total, *terms = (outputs.to(wide) * weights.to(wide)[..., None]).unbind(1)
    for term in terms:
        total = total + term
    return total


def mixture(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: Matrix | torch.Tensor,
    down: Matrix | torch.Tensor,
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    gate: Callable[[torch.Tensor], torch.Tensor] = gated,
) -> torch.Tensor:
    """The weighted sum of the outputs of the experts `ids` `(rows, per_token)` for the rows of `x` `(rows, hidden)`.

    Rows are sorted by expert on the device. A row's experts are added up in the order of `ids`, so that its sum has the
    same bits in any batch.
    """
    order, ends = sorted_by_expert(ids, len(gate_up))
    inner = gate(grouped_linear(x[order // ids.shape[1]], gate_up, ends, biases[0]))
    outputs = in_order(grouped_linear(inner, down, ends, biases[1]), order)
    return weighted_sum(outputs.view(*ids.shape, -1), weights).to(x.dtype)
