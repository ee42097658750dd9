"""The rows of a drafter's forward on its own cache: their rotation and visibility."""

from __future__ import annotations

import torch
from torch import Tensor

from pdkernels.cache import Cache
from pdkernels.masks import TilePlan, TreePlans
from pdkernels.models.architectures import fused
from pdkernels.models.architectures.attention import NewRows, Visibility, attend_stored, cached_visibility, rotated
from pdkernels.models.architectures.config import TransformerConfig
from pdkernels.models.architectures.rope import RopeTables, Rotation

DRAFTER_MATRICES = ("fc", "head", "qkv", "output", "gate_up", "down", "markov_out", "refiner_out")
"""Those that `quantized` of a drafter quantises."""


def tables_of(config: TransformerConfig) -> RopeTables:
    return RopeTables(
        config.rotary_width,
        config.max_positions,
        theta=config.rope_theta,
        style=config.rope_style,
        scaling=config.rope_scaling,
    )


def rotation_at(tables: RopeTables, like: Tensor, limit: int, positions: Tensor) -> Rotation:
    """The rotation at `positions` below `limit`, for activations of the dtype and on the device of `like`."""
    table = tables.covering(limit, like.device, like.dtype)
    return table.kept_for(positions) if fused.enabled(like) else table.at(positions)


def new_rows(
    config: TransformerConfig,
    tables: RopeTables,
    like: Tensor,
    count: int,
    cache: Cache,
    counts: Tensor | None = None,
    offsets: Tensor | None = None,
    mask: TilePlan | Tensor | None = None,
) -> NewRows:
    """`count` rows after the committed ones: causal among each other, or as `mask` says at `offsets` from the cached
    length."""
    lengths = cache.lengths.tolist() if cache.lengths.device.type == "cpu" else None
    visibility = cached_visibility(cache, lengths, counts, count, mask)
    if offsets is None:
        offsets = torch.arange(count, device=cache.lengths.device)
    # Padding rows may lie past the capacity, but not past capacity + rows.
    rotation = rotation_at(tables, like, cache.capacity + count, cache.lengths[:, None] + offsets)
    return NewRows(rotation, config.rope_style, config.kv_heads, visibility, cache, counts)


class BranchRows:
    """The rows that a drafter adds in one step: they see the committed rows and some of those added before them.
    Nothing is stored.

    Args:
        config: of the drafter's layers.
        tables: their rotation.
        cache: with the committed rows.
        plans: by the number of rows, what makes the plan of a mask; kept from step to step.
    """

    def __init__(
        self, config: TransformerConfig, tables: RopeTables, cache: Cache, plans: dict[int, TreePlans]
    ) -> None:
        self._config, self._tables, self._cache, self._plans = config, tables, cache, plans
        self._keys: list[Tensor | None] = [None] * config.layers
        self._values: list[Tensor | None] = [None] * config.layers
        self._rotation: Rotation
        self._visibility: Visibility

    def add(self, like: Tensor, offset: int, seen: Tensor) -> None:
        """The next rows, at `offset` from the cached length; `seen` ``(batch, n, n)`` bool is what all rows so far and
        these see."""
        cache, count = self._cache, seen.shape[1]
        positions = (cache.lengths + offset)[:, None].expand(-1, like.shape[1])
        self._rotation = rotation_at(self._tables, like, cache.capacity + count, positions)
        if count not in self._plans:
            self._plans[count] = TreePlans(len(seen), count, cache.device)
        lengths = cache.lengths.tolist() if cache.device.type == "cpu" else None
        self._visibility = cached_visibility(cache, lengths, None, count, self._plans[count].of(seen))

    def attend_(self, qkv: Tensor, layer: int) -> Tensor:
        """Attention of the rows added last, as of `NewRows`. Queries of earlier rows are zeros: their results are
        known."""
        kv_heads = self._config.kv_heads
        qk, v = qkv.split_with_sizes((qkv.shape[2] - kv_heads, kv_heads), -2)
        qk = rotated(qk, self._rotation, self._config.rope_style)
        q, k = qk.split_with_sizes((qk.shape[2] - kv_heads, kv_heads), -2)
        keys, values = self._keys[layer], self._values[layer]
        if keys is not None and values is not None:
            q = torch.cat([q.new_zeros(len(q), keys.shape[1], *q.shape[2:]), q], 1)
            k, v = torch.cat([keys, k], 1), torch.cat([values, v], 1)
        self._keys[layer], self._values[layer] = k, v
        return attend_stored(q, k, v, self._visibility, self._cache, layer)[:, -qkv.shape[1] :]
