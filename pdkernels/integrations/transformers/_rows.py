"""Rows of a cache as attention functions take them: gathered from pages only if they are read, and padded to the width
of our kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

WHOLE = "_pdkernels_whole"
"""The attribute on keys or values that names the same rows in the width of the cache."""


class Pages(NamedTuple):
    """The rows of one layer of a paged cache: `first` of them in pages, and the new ones ``(batch, rows, kv_heads,
    head_dim)`` as well."""

    k: Tensor
    v: Tensor
    block_table: Tensor
    first: int
    new_k: Tensor
    new_v: Tensor

    def gathered(self, side: int) -> Tensor:
        """All keys (0) or values (1), ``(batch, kv_heads, rows, head_dim)``."""
        pool, length = (self.k, self.v)[side], self.first + self.new_k.shape[1]
        table = self.block_table[:, : -(-length // pool.shape[1])].to(torch.int64)
        return pool[table].flatten(1, 2)[:, :length].transpose(1, 2)


class PagedRows(Tensor):
    """All keys or values of a layer. Our attention reads `pages`; any other operation gets the gathered rows."""

    pages: Pages
    side: int
    _rows: Tensor | None

    @staticmethod
    def __new__(cls, pages: Pages, side: int, width: int) -> PagedRows:
        pool, new = (pages.k, pages.v)[side], pages.new_k
        shape = (new.shape[0], new.shape[2], pages.first + new.shape[1], width)
        slots = -(-shape[2] // pool.shape[1]) * pool.shape[1]
        strides = (slots * pool[0, 0].numel(), pool.shape[3], pool[0, 0].numel(), 1)  # those of `gathered`
        self = torch.Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=pool.dtype, device=pool.device)
        self.pages, self.side = pages, side
        self._rows = None
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def gathered(self) -> Tensor:
        if self._rows is None:
            self._rows = self.pages.gathered(self.side)[..., : self.shape[3]]
        return self._rows

    def data_ptr(self) -> int:  # of kernels that are launched without the dispatcher
        return self.gathered().data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map(lambda x: x.gathered() if isinstance(x, PagedRows) else x, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PagedRows({tuple(self.shape)})"


def narrowed(rows: Tensor, width: int) -> Tensor:
    """The first `width` columns, from which `widened` finds the others again."""
    if rows.shape[3] == width:
        return rows
    cut = PagedRows(rows.pages, rows.side, width) if isinstance(rows, PagedRows) else rows[..., :width]
    setattr(cut, WHOLE, rows)
    return cut


def widened(rows: Tensor, width: int) -> Tensor:
    """The rows ``(.., head_dim)`` with zeros up to `width`: those of a cache as they are, others as a copy."""
    whole = getattr(rows, WHOLE, rows)
    return whole if whole.shape[-1] == width else F.pad(rows, (0, width - rows.shape[-1]))
