"""The rows of a drafter's forward on its own cache: their rotation and visibility."""

from __future__ import annotations

import torch
from torch import Tensor

from pdkernels.cache import Cache
from pdkernels.masks import TilePlan
from pdkernels.models import fused
from pdkernels.models.attention import NewRows, cached_visibility
from pdkernels.models.config import TransformerConfig
from pdkernels.models.rope import RopeTables, Rotation

DRAFTER_MATRICES = ("fc", "head", "qkv", "output", "gate_up", "down")
"""Those that `quantized` of a drafter quantises."""


def tables_of(config: TransformerConfig) -> RopeTables:
    return RopeTables(
        config.head_dim,
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
    """`count` rows after the committed ones: causal among each other, or as `mask` says at `offsets` from the cached length."""
    lengths = cache.lengths.tolist() if cache.lengths.device.type == "cpu" else None
    visibility = cached_visibility(cache, lengths, counts, count, mask)
    if offsets is None:
        offsets = torch.arange(count, device=cache.lengths.device)
    # Padding rows may lie past the capacity, but not past capacity + rows.
    rotation = rotation_at(tables, like, cache.capacity + count, cache.lengths[:, None] + offsets)
    return NewRows(rotation, config.rope_style, config.kv_heads, visibility, cache, counts)
