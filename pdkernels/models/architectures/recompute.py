"""Rows that are recomputed in a cache: their slots, and the attention over the updated cache.

A masked-diffusion model revises rows anywhere in a text, and each row attends to the whole text. So K and V are stored
first, and attention reads only the cache: `speculative_attention` with a plan without new tokens. Inputs that no kernel
supports (fp64, head dimensions that are not a multiple of 8 in 16 .. 512) use PyTorch's attention under a dense mask.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from pdkernels._attention import takes_head_dim
from pdkernels._validation import KERNEL_DTYPES, check, check_index
from pdkernels.cache import Cache, WindowedCache
from pdkernels.cache.stored import stored
from pdkernels.masks import TilePlan, pack
from pdkernels.models.architectures.attention import Visibility, attend
from pdkernels.models.architectures.caches import rewrite_
from pdkernels.models.architectures.config import ExpertsConfig
from pdkernels.models.architectures.experts import Pools
from pdkernels.models.architectures.lora import AdaptedRows
from pdkernels.models.architectures.rope import RopeStyle, Rotation, apply_rope
from pdkernels.models.architectures.windows import Window, Windows, hide
from pdkernels.ops.speculative_attention import speculative_attention
from pdkernels.ops.transformer_ops import apply_rope_, apply_rope_append_

_OP = "Transformer.recompute"


class RecomputedRows(NamedTuple):
    """The slots and the visibility of recomputed rows. `recomputed_rows` makes it, once for all layers."""

    cache: Cache
    starts: torch.Tensor
    slots: torch.Tensor
    """`(batch, rows)`, relative to `starts`; -1 for padding."""
    visible: torch.Tensor
    keys: int
    """The maximum of `visible` over the sequences, or the capacity where the host does not know it."""
    table: Rotation
    """For all positions of the cache."""
    style: RopeStyle
    windows: Windows = ()
    """Of each layer."""
    lora: AdaptedRows | None = None
    """Those with adapters of their own."""
    pools: Pools | None = None
    """Of experts, for blocks of rows that share them."""

    def attend_(self, qkv: torch.Tensor, layer: int) -> torch.Tensor:
        """Stores K and V of `qkv` `(batch, rows, heads + 2 * kv_heads, head_dim)`, not yet rotated, and attends; q's
        shape."""
        kv_heads = self.cache.kv_heads
        sizes = (qkv.shape[2] - 2 * kv_heads, kv_heads, kv_heads)
        if self.cache.dtype != qkv.dtype:
            positions = self._positions()
            apply_rope_(qkv[:, :, :-kv_heads], self.table.cos, self.table.sin, positions, style=self.style)
            q, k, v = qkv.split(sizes, -2)
            k, v = stored(self.cache.dtype, k, v)
            self._store_(k, v, positions, layer)
            return self._read(q, k, v, layer)
        if self.cache.dtype in KERNEL_DTYPES and takes_head_dim(self.cache.head_dim):
            k_cache, v_cache = self.cache.k[layer], self.cache.v[layer]
            apply_rope_append_(
                qkv,
                None,
                self.table.cos,
                self.table.sin,
                k_cache,
                v_cache,
                self.starts,
                slots=self.slots,
                block_table=self.cache.table(layer),
                style=self.style,
            )
            q, k, v = qkv.split(sizes, -2)
            return self._read(q, k, v, layer)
        q, k, v = qkv.split(sizes, -2)
        positions = self._positions()
        rotation = self.table.at(positions)
        self._store_(apply_rope(k, rotation, self.style), v, positions, layer)
        keys = torch.arange(self.keys, device=qkv.device)
        seen = keys < self.visible[:, None, None, None]
        window = self._window(layer)
        seen = seen if window is None else hide(seen, window, positions[:, None], keys)
        q = self._scaled(apply_rope(q, rotation, self.style))
        return attend(q, *self.cache.layer(layer, self.keys), Visibility(seen))

    def _read(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        """Attention to what is stored; `k` and `v` are not read."""
        cache, nothing = self.cache, nothing_new(q.shape[1], q.device)
        caches = cache.k[layer], cache.v[layer]
        window = self._window(layer)
        starts = None if window is None else window.first(self._positions())
        return speculative_attention(
            self._scaled(q), k, v, *caches, self.visible, nothing, starts=starts, block_table=cache.table(layer)
        )

    def _window(self, layer: int) -> Window | None:
        return self.windows[layer] if self.windows else None

    def pooled(self, experts: ExpertsConfig | None) -> RecomputedRows:
        """With pools of experts, if blocks of rows share them."""
        if experts is None or not experts.pool:
            return self
        pools = Pools.of(self.starts[:, None] + self.slots, self.slots >= 0, experts.pool_rows)
        return self._replace(pools=pools)

    def _positions(self) -> torch.Tensor:
        """`(batch, rows)` positions; those of padding are arbitrary positions of the cache."""
        return (self.starts[:, None] + self.slots).clamp(0, self.cache.capacity - 1)

    def _scaled(self, q: torch.Tensor) -> torch.Tensor:
        if self.table.query_scale is None:
            return q
        return q * self.table.query_scale[self._positions(), :, None].to(q.dtype)

    def _store_(self, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, layer: int) -> None:
        sequences, rows = (self.slots >= 0).nonzero(as_tuple=True)
        offsets = positions[sequences, rows].long()
        table, pages = self.cache.table(layer), sequences
        if table is not None:
            page_size = self.cache.k[layer].shape[1]
            pages, offsets = table[sequences, offsets // page_size].long(), offsets % page_size
        self.cache.k[layer][pages, offsets] = k[sequences, rows]
        self.cache.v[layer][pages, offsets] = v[sequences, rows]


def recomputed_rows(
    cache: Cache,
    table: Rotation,
    style: RopeStyle,
    shape: torch.Size,
    starts: torch.Tensor,
    slots: torch.Tensor | None,
    counts: torch.Tensor | None,
    visible: torch.Tensor,
    windows: Windows = (),
) -> RecomputedRows:
    """Makes the `RecomputedRows` for rows of this `shape` `(batch, rows)`; see `Transformer.recompute`."""
    batch, rows = shape
    check(cache.batch == batch, _OP, "tokens", f"have the batch size of the cache ({cache.batch})", batch)
    device = cache.lengths.device
    check_index(_OP, "starts", starts, (batch,), device)
    check_index(_OP, "visible", visible, (batch,), device)
    order = torch.arange(rows, device=device)
    if slots is None:
        slots = order.expand(batch, -1)
    else:
        check_index(_OP, "slots", slots, (batch, rows), device)
    if counts is not None:
        check_index(_OP, "counts", counts, (batch,), device)
        slots = torch.where(order < counts[:, None], slots, -1)
    keys = cache.capacity
    if device.type == "cpu" and batch and not torch.compiler.is_compiling():
        keys = _check_values(cache, starts, slots, visible)
    rewrite_(cache, starts, slots)
    lora = AdaptedRows.of(cache.adapters, rows, None, device)
    return RecomputedRows(cache, starts, slots, visible, keys, table, style, windows, lora)


def _check_values(cache: Cache, starts: torch.Tensor, slots: torch.Tensor, visible: torch.Tensor) -> int:
    """Checks the values on the host, before any layer writes. Returns the maximum of `visible`."""
    minimum, maximum = (int(value) for value in visible.aminmax())
    check(
        minimum >= 0 and maximum <= cache.capacity,
        _OP,
        "visible",
        f"lie in [0, {cache.capacity}], the cache's capacity",
        f"{minimum}..{maximum}",
    )
    low = int(starts.min())
    check(low >= 0, _OP, "starts", "not be negative", low)
    needed = visible
    if slots.numel():
        low = int(slots.min())
        check(low >= -1, _OP, "slots", "be -1 or more", low)
        ends = torch.where(slots >= 0, starts[:, None] + slots + 1, 0).amax(1)
        last = int(ends.max()) - 1
        check(last < cache.capacity, _OP, "slots", f"stay below the cache's capacity ({cache.capacity})", last)
        needed = torch.maximum(needed, ends)
    full = cache.full if isinstance(cache, WindowedCache) else cache
    if full is not None and full.block_table is not None:
        owned = (full.block_table >= 0).sum(1) * full.k.shape[2]
        check(
            bool((needed <= owned).all()),
            _OP,
            "cache",
            f"own pages of {needed.tolist()} positions",
            owned.tolist(),
            "Call cache.reserve_ before.",
        )
    return maximum


@lru_cache(maxsize=256)
def nothing_new(rows: int, device: torch.device) -> TilePlan:
    """A plan that masks all new rows, because the cache already holds them."""
    return pack([], length=rows).plan(64, 64, device)
