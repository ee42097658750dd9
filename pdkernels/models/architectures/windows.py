"""Windows of layers: which part of the text before it a row sees.

Attention does not visit rows that are hidden, whether a cache keeps them or not (`cache.WindowedCache`,
`cache.WindowedPool`), and a row has the same bits however the text was split.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from pdkernels import _memory
from pdkernels._validation import check, check_flag, check_int, check_type
from pdkernels.masks import TilePlan

_TILE = 64


@dataclass(frozen=True)
class Window:
    """A row sees `size` positions at most, its own included; `chunked`: those from the last multiple of `size` on.

    >>> rows = torch.arange(6)
    >>> Window(3).first(rows).tolist(), Window(3, chunked=True).first(rows).tolist()
    ([0, 0, 0, 1, 2, 3], [0, 0, 0, 3, 3, 3])
    """

    size: int
    chunked: bool = False

    def __post_init__(self) -> None:
        check_type(type(self.size) is int, "Window", "size", "be an int", type(self.size).__name__)
        check_int("Window", "size", self.size, 1)
        check_flag("Window", "chunked", self.chunked)

    def first(self, positions: Tensor) -> Tensor:
        """The first position that rows at these `positions` see."""
        if self.chunked:
            return positions // self.size * self.size
        return (positions + (1 - self.size)).clamp(min=0)


Windows = Sequence[Window | None]
"""Of each layer; empty: no layer has one."""


MAX_LAYERS = 2**14
"""Of a file whose layers have windows: one that names more is refused before anything is made for each."""


def checked_windows(op: str, windows: Windows, layers: int) -> tuple[Window | None, ...]:
    """One for each layer, or none."""
    check_type(isinstance(windows, (tuple, list)), op, "windows", "be a tuple", type(windows).__name__)
    for window in windows:
        valid = window is None or isinstance(window, Window)
        check_type(valid, op, "windows", "hold a Window or None for each layer", type(window).__name__)
    check(len(windows) in (0, layers), op, "windows", f"be one for each of {layers} layers, or none", len(windows))
    return tuple(windows)


def first_seen(
    windows: Iterable[Window | None],
    lengths: Tensor,
    rows: int,
    offsets: Tensor | None = None,
    plan: TilePlan | None = None,
) -> dict[Window, Tensor]:
    """For each window what attention takes as `starts`: ``(batch, rows)``, the place in the text, cached and then new
    rows, of the first that a new row sees.

    Args:
        windows: of the layers.
        lengths: ``(batch,)`` cached rows.
        rows: new rows.
        offsets: ``(rows,)`` or ``(batch, rows)`` positions of the new rows after the cached ones; None: 0, 1, ..
        plan: of the new rows, of which a row sees some in the order of their positions.
    """
    different = {window for window in windows if window is not None}
    if not different:
        return {}
    positions = lengths[:, None]
    if offsets is not None or rows != 1:
        where = torch.arange(rows, device=lengths.device) if offsets is None else offsets
        positions = positions + where
    starts = {}
    for window in different:
        first = window.first(positions)
        if offsets is not None and plan is not None and (window.chunked or window.size < rows):
            first = _by_path(first, lengths, where.expand(positions.shape), _dense(plan))
        starts[window] = first
    return starts


def _by_path(first: Tensor, lengths: Tensor, offsets: Tensor, seen: Tensor) -> Tensor:
    """The places of the first rows seen where the new rows' places are not their offsets, as in a tree."""
    after = first - lengths[:, None]
    hidden = seen & (offsets[:, None, :] < after[..., None])
    places = torch.arange(1, offsets.shape[1] + 1, device=offsets.device)
    behind = torch.where(hidden, places, 0).amax(-1)  # the place after the last hidden one
    return torch.where(after > 0, lengths[:, None] + behind, first)


_DENSE: weakref.WeakKeyDictionary[TilePlan, Tensor] = weakref.WeakKeyDictionary()


def _dense(plan: TilePlan) -> Tensor:
    """What each new row sees of the others: ``(rows, rows)`` or ``(batch, rows, rows)``."""
    if plan not in _DENSE:
        _DENSE[plan] = plan.dense()
    return _DENSE[plan]


def hide(seen: Tensor, window: Window, rows: Tensor, keys: Tensor) -> Tensor:
    """A bool mask without the keys before a row's window; `rows` and `keys` are positions, ``(.., rows)`` and
    ``(.., keys)``."""
    return seen & (keys[..., None, :] >= window.first(rows)[..., None])


def windowed_plan(
    window: Window, rows: int, device: torch.device, mask: TilePlan | None, positions: Tensor | None
) -> TilePlan:
    """The plan of a whole text under a window; `mask` None: causal, `positions` None: 0, 1, .."""
    if mask is None and positions is None:
        return _causal(window, rows, device)
    seen = torch.ones(rows, rows, dtype=torch.bool, device=device).tril() if mask is None else mask.dense()
    where = torch.arange(rows, device=device) if positions is None else positions
    visible = hide(seen, window, where, where)
    plans = [_plan_of(each) for each in (visible if visible.dim() == 3 else visible[None])]
    return plans[0] if visible.dim() == 2 else TilePlan.stack(plans)


def _plan_of(seen: Tensor) -> TilePlan:
    rows, keys = seen.shape
    tall, wide = -(-rows // _TILE), -(-keys // _TILE)
    padded = F.pad(seen, (0, wide * _TILE - keys, 0, tall * _TILE - rows))
    tiles = padded.unflatten(0, (tall, _TILE)).unflatten(2, (wide, _TILE)).transpose(1, 2)
    occupied = tiles.flatten(2).any(-1).nonzero()
    nowhere = torch.zeros(tall, wide, dtype=torch.bool, device=seen.device)
    return TilePlan.from_tiles(
        nowhere, (occupied[:, 0], occupied[:, 1]), tiles[occupied[:, 0], occupied[:, 1]], rows, keys
    )


@lru_cache(maxsize=16)
def _causal(window: Window, rows: int, device: torch.device) -> TilePlan:
    """Made tile by tile: the memory is that of the tiles which the window cuts."""
    with _memory.lasting():
        return _tile_by_tile(window, rows, device)


def _tile_by_tile(window: Window, rows: int, device: torch.device) -> TilePlan:
    tiles = -(-rows // _TILE)
    begins = torch.arange(tiles, device=device) * _TILE
    ends = (begins + _TILE).clamp(max=rows) - 1
    first = window.first(torch.stack([begins, ends]))
    seen = (begins[None, :] <= ends[:, None]) & (ends[None, :] >= first[0][:, None])
    full = (ends[None, :] <= begins[:, None]) & (begins[None, :] >= first[1][:, None])
    partial = (seen & ~full).nonzero()
    within = torch.arange(_TILE, device=device)
    row, key = (begins[partial[:, side], None] + within for side in (0, 1))
    visible = (key[:, None, :] <= row[..., None]) & (key[:, None, :] >= window.first(row)[..., None])
    visible &= (row < rows)[..., None]
    return TilePlan.from_tiles(full, (partial[:, 0], partial[:, 1]), visible, rows, rows)
