"""Pages of K and V, which sequences of several caches may have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from pdkernels import _memory
from pdkernels._host import PageAllocator
from pdkernels._validation import check_fits_memory, integer
from pdkernels.cache.stored import row_width


class PagePool:
    """`num_pages` pages of `page_size` tokens, each with a count of its holders, and one for rows without a sequence.

    A page that several hold is only read: who writes to it takes a copy of the slots in front (`copy_slots_`). So two
    texts share the pages of what they have in common.

    Args:
        layers, num_pages, page_size, kv_heads, head_dim: sizes. ``.k`` and ``.v`` have shape
            ``(layers, num_pages + 1, page_size, kv_heads, head_dim)``.
        dtype, device: of the rows; int8 as in `ContiguousKVCache`.

    Raises:
        ValueError: a size below 1, or more than fits in memory.
        TypeError: a size that is not an int.

    Example:
        >>> from pdkernels.cache import PagedKVCache, PagePool
        >>> pool = PagePool(layers=1, num_pages=4, page_size=2, kv_heads=1, head_dim=4)
        >>> first, second = (PagedKVCache.on(pool, batch=1, capacity=8) for _ in range(2))
        >>> first.resize_row_(0, 5)
        >>> second.hold_row_(0, first.pages(0)[:2]); second.resize_row_(0, 6)
        >>> first.block_table.tolist(), second.block_table.tolist(), pool.available
        ([[0, 1, 2, 4]], [[0, 1, 3, 4]], 0)
    """

    def __init__(
        self,
        layers: int,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        op = "cache.PagePool"
        self._allocate(op, integer(op, "layers", layers, 1), num_pages, page_size, kv_heads, head_dim, dtype, device)

    def _allocate(
        self,
        op: str,
        layers: int,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.num_pages, self.page_size = integer(op, "num_pages", num_pages, 1), integer(op, "page_size", page_size, 1)
        shape = [layers, self.num_pages + 1, self.page_size, integer(op, "kv_heads", kv_heads, 1)]
        self.head_dim = integer(op, "head_dim", head_dim, 1)
        shape.append(row_width(op, self.head_dim, dtype))
        nbytes = 2 * dtype.itemsize * torch.Size(shape).numel()
        check_fits_memory(op, "num_pages", num_pages, nbytes, torch.device(device))
        self.k, self.v = (_memory.zeros(shape, dtype, device) for _ in range(2))
        self._free = PageAllocator(self.num_pages)
        self._holders = [0] * self.num_pages

    @property
    def scratch(self) -> int:
        """The page for rows without a sequence, whose content does not matter."""
        return self.num_pages

    @property
    def available(self) -> int:
        """Pages that nobody holds."""
        return self._free.available

    @property
    def shared(self) -> int:
        """Pages with several holders."""
        return sum(count > 1 for count in self._holders)

    @property
    def nbytes(self) -> int:
        """Of all pages."""
        return self.k.nbytes + self.v.nbytes

    def holders(self, page: int) -> int:
        """How many hold a page."""
        return self._holders[page]

    def allocate(self, count: int) -> list[int]:
        """The lowest free pages, with one holder. MemoryError, if there are too few."""
        pages = self._free.allocate(count)
        self.hold(pages)
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """Adds a holder to each page but `scratch`."""
        for page in pages:
            if page != self.scratch:
                self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Takes a holder from each page but `scratch`; one without is free."""
        for page in pages:
            if page == self.scratch:
                continue
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.release([page])

    def copy_slots_(self, page: int, source: int, slots: int) -> None:
        """Copies the first `slots` tokens of page `source`."""
        for side in (self.k, self.v):
            side[:, page, :slots] = side[:, source, :slots]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_free"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._free = PageAllocator(self.num_pages)
        self._free.allocate(self.num_pages)
        self._free.release([page for page, count in enumerate(self._holders) if count == 0])
