"""The tile plan: all that a block-sparse kernel knows about a mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from pdkernels import _host
from pdkernels._validation import check

# Every tensor of a plan begins at a multiple of this many words (128 bytes), for wide loads.
ALIGNMENT = 32


def numbered(device: torch.device | str) -> torch.device:
    """With its number, since ``"cuda"`` is another GPU after ``torch.cuda.set_device``."""
    device = torch.device(device)
    return device if device.type == "cpu" or device.index is not None else torch.empty(0, device=device).device


def _words(visible: Tensor) -> Tensor:
    """``(n, rows, columns)`` bool as int32 words of 32 columns."""
    padded = torch.nn.functional.pad(visible, (0, -visible.shape[-1] % 32)).unflatten(-1, (-1, 8))
    weights = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=visible.device)
    return (padded * weights).sum(-1, dtype=torch.uint8).view(torch.int32)


class BlockLists(NamedTuple):
    """Full and partial key tiles of each query tile, padded: what FlashAttention 4 and FlexAttention read. All int32."""

    mask_block_cnt: Tensor
    """(..., q_tiles) partial key tiles of each query tile."""
    mask_block_idx: Tensor
    """(..., q_tiles, kv_tiles) their numbers, ascending, then 0."""
    full_block_cnt: Tensor
    """(..., q_tiles) key tiles that need no mask."""
    full_block_idx: Tensor
    """(..., q_tiles, kv_tiles) their numbers, ascending, then 0."""


@dataclass(frozen=True, eq=False)
class TilePlan:
    """Which tiles hold a visible pair, which of those need a mask, and those masks, one bit a pair.

    A tile is `block_q` rows by `block_k` columns; tiles that hold nothing visible are not listed. Each list holds its full
    tiles first, then its partial ones, both ascending. The bits of partial tiles are stored once for all tiles that look the
    same. All tensors are int32 and share one block of memory. A stacked plan has a leading batch dimension on the offsets and
    orders; offsets then count over the lists of all samples.
    """

    kv_offsets: Tensor
    """(q_tiles + 1,): query tile t visits entries ``kv_offsets[t] .. kv_offsets[t + 1]`` of the next two."""
    kv_tiles: Tensor
    """(visits,): key tiles; for each query tile the full ones ascending, then the partial ones ascending."""
    kv_bitmaps: Tensor
    """(visits,): -1 where all pairs inside the lengths are visible, else the number of a bitmap."""
    q_offsets: Tensor
    """(kv_tiles + 1,): the transposed lists, for the gradients of keys and values."""
    q_tiles: Tensor
    """(visits,): query tiles; for each key tile the full ones ascending, then the partial ones ascending."""
    q_bitmaps: Tensor
    """(visits,): as `kv_bitmaps`; bitmaps are not transposed."""
    q_order: Tensor
    """(q_tiles,): query tiles, those with the longest lists first."""
    k_order: Tensor
    """(kv_tiles,): key tiles, those with the longest lists first."""
    bitmaps: Tensor
    """(n, block_q, ceil(block_k / 32)): bit ``c % 32`` of word ``[r, c // 32]`` is the pair of row r and column c of the tile.
    Bits outside the lengths are 0."""
    q_len: int
    """Rows of the mask."""
    kv_len: int
    """Columns of the mask."""
    block_q: int
    """Rows of a tile, a multiple of 16."""
    block_k: int
    """Columns of a tile, a multiple of 16."""
    visible_pairs: int
    """Pairs that the mask shows, over all samples."""

    @property
    def tile_efficiency(self) -> float:
        """Visible pairs as a share of the pairs in visited tiles, ragged tiles counted whole; 1 if none is visited."""
        visits = int((self.kv_offsets[..., -1] - self.kv_offsets[..., 0]).sum())
        return self.visible_pairs / (visits * self.block_q * self.block_k) if visits else 1.0

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.kv_offsets.device

    @property
    def batch(self) -> int | None:
        """Samples of a stacked plan; None for a plan that all samples share."""
        return self.kv_offsets.shape[0] if self.kv_offsets.dim() == 2 else None

    def _tensors(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self) if field.type == "Tensor"}

    def _facts(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self) if field.type != "Tensor"}

    def to(self, device: torch.device | str) -> TilePlan:
        """The plan on another device, moved in one copy. Itself if it is there already."""
        device = numbered(device)
        if self.device == device:
            return self
        return TilePlan._laid_out(self._tensors(), self._facts(), device)

    def dense(self) -> Tensor:
        """``(q_len, kv_len)`` bool, or ``(batch, q_len, kv_len)`` of a stacked plan: True where the row sees the column.

        The plan unpacked pair by pair, on its device, without a sync. For checks and references: it holds every pair.

        Example:
            >>> import pdkernels as pd
            >>> mask = pd.masks.dual_stream(40, 8)
            >>> bool((mask.plan(16, 32).dense() == mask.dense()).all())
            True
        """
        samples, q_tiles, kv_tiles = (
            1 if self.batch is None else self.batch,
            self.q_order.shape[-1],
            self.k_order.shape[-1],
        )
        offsets = self.kv_offsets.view(samples, q_tiles + 1)
        visits = torch.arange(self.kv_tiles.shape[0], dtype=torch.int32, device=self.device).repeat(samples, 1)
        rows = torch.searchsorted(offsets, visits, right=True) - 1
        # Each tile's content: nothing, all, or a bitmap. Visits of other samples go to a column that is cut off.
        own = (rows >= 0) & (rows < q_tiles)
        contents = torch.zeros(samples, q_tiles * (kv_tiles + 1), dtype=torch.int64, device=self.device)
        places = rows.clamp(0, max(q_tiles - 1, 0)) * (kv_tiles + 1) + torch.where(own, self.kv_tiles, kv_tiles)
        contents.scatter_(1, places, torch.where(own, self.kv_bitmaps + 2, 0).to(torch.int64))
        contents = contents.view(samples, q_tiles, kv_tiles + 1)[..., :kv_tiles]
        bits = (self.bitmaps[..., None] >> torch.arange(32, dtype=torch.int32, device=self.device)) & 1
        bits = bits.to(torch.bool).flatten(2)[..., : self.block_k]
        table = torch.cat([bits.new_zeros(1, *bits.shape[1:]), bits.new_ones(1, *bits.shape[1:]), bits])
        pairs = table[contents].transpose(2, 3).flatten(3).flatten(1, 2)[:, : self.q_len, : self.kv_len]
        return pairs[0] if self.batch is None else pairs

    def block_lists(self, ragged_is_partial: bool = False) -> BlockLists:
        """Counts and padded lists of partial and of full key tiles: the block-sparsity tensors of FlashAttention 4.

        Args:
            ragged_is_partial: lists full tiles that reach beyond the lengths as partial, as FlexAttention does.

        Example:
            >>> import pdkernels as pd
            >>> lists = pd.masks.causal(96).plan(32, 32).block_lists()
            >>> lists.mask_block_idx.tolist(), lists.full_block_cnt.tolist()
            ([[0, 0, 0], [1, 0, 0], [2, 0, 0]], [0, 1, 2])
        """
        if self.batch is not None:
            samples = [self._sample(b).block_lists(ragged_is_partial) for b in range(self.batch)]
            return BlockLists(*(torch.stack(tensors) for tensors in zip(*samples)))
        q_tiles, kv_tiles = len(self.kv_offsets) - 1, len(self.q_offsets) - 1
        rows = torch.repeat_interleave(torch.arange(q_tiles, device=self.device), self.kv_offsets.diff())
        full = self.kv_bitmaps < 0
        if ragged_is_partial:
            full &= ((rows + 1) * self.block_q <= self.q_len) & ((self.kv_tiles + 1) * self.block_k <= self.kv_len)
        order = torch.argsort(rows * kv_tiles + self.kv_tiles)
        rows, full, tiles = rows[order], full[order], self.kv_tiles[order]
        lists = []
        for chosen in (~full, full):
            counts = torch.bincount(rows[chosen], minlength=q_tiles)
            before = counts.cumsum(0) - counts
            places = torch.arange(int(counts.sum()), device=self.device) - torch.repeat_interleave(before, counts)
            index = torch.zeros(q_tiles, kv_tiles, dtype=torch.int32, device=self.device)
            index[rows[chosen], places] = tiles[chosen]
            lists += [counts.to(torch.int32), index]
        return BlockLists(*lists)

    def _sample(self, number: int) -> TilePlan:
        """One sample of a stacked plan."""
        visits = slice(*self.kv_offsets[number, [0, -1]].tolist())
        parts = {name: getattr(self, name)[visits] for name in ("kv_tiles", "kv_bitmaps", "q_tiles", "q_bitmaps")}
        parts |= {name: getattr(self, name)[number] - visits.start for name in ("kv_offsets", "q_offsets")}
        return replace(self, q_order=self.q_order[number], k_order=self.k_order[number], **parts)

    @staticmethod
    def _laid_out(tensors: dict[str, Tensor], facts: dict[str, int], device: torch.device | str) -> TilePlan:
        """A plan of these tensors in one fresh block of memory."""
        sizes = [-(-tensor.numel() // ALIGNMENT) * ALIGNMENT for tensor in tensors.values()]
        words = torch.zeros(sum(sizes), dtype=torch.int32, device="cpu")
        begins = list(accumulate(sizes, initial=0))
        for begin, tensor in zip(begins, tensors.values()):
            words[begin : begin + tensor.numel()] = tensor.flatten()
        words = words.to(device)
        views = {
            name: words[begin : begin + tensor.numel()].view(tensor.shape)
            for begin, (name, tensor) in zip(begins, tensors.items())
        }
        return TilePlan(**views, **facts)

    @staticmethod
    def _from_host(host: _host.TilePlan, q_len: int, kv_len: int, block_q: int, block_k: int) -> TilePlan:
        words = torch.frombuffer(host, dtype=torch.int32)
        *lists, bitmaps = (words[begin : begin + size] for begin, size in host.extents)
        return TilePlan(
            *lists, bitmaps.view(-1, block_q, -(-block_k // 32)), q_len, kv_len, block_q, block_k, host.visible_pairs
        )

    @staticmethod
    def from_tiles(full: Tensor, partial: tuple[Tensor, Tensor], visible: Tensor, q_len: int, kv_len: int) -> TilePlan:
        """A plan out of tiles that something else than a segment mask has judged.

        Args:
            full: ``(q_tiles, kv_tiles)`` bool, True where all pairs inside the lengths are visible.
            partial: query tile and key tile of ``n`` tiles whose pairs follow, row by row, none of them full. Those that turn
                out to show all their pairs become full, those that show none are left out.
            visible: ``(n, block_q, block_k)`` bool, False outside the lengths.
            q_len, kv_len: rows and columns.

        Example:
            >>> import torch
            >>> from pdkernels.masks import TilePlan
            >>> triangle = torch.ones(1, 16, 16, dtype=torch.bool).tril()
            >>> zero = torch.tensor([0])
            >>> TilePlan.from_tiles(torch.tensor([[False]]), (zero, zero), triangle, 16, 16).visible_pairs
            136
        """
        block_q, block_k = visible.shape[1:]
        rows = (q_len - torch.arange(full.shape[0], device=full.device) * block_q).clamp(max=block_q)
        columns = (kv_len - torch.arange(full.shape[1], device=full.device) * block_k).clamp(max=block_k)
        areas = rows[:, None] * columns
        pairs = torch.where(full, areas, 0)
        pairs[partial] = visible.flatten(1).sum(1)
        # The number of a partial tile's bitmap is the order in which such a bitmap is met first.
        numbers = torch.full_like(areas, -1)
        needed = (pairs[partial] > 0) & (pairs[partial] < areas[partial])
        contents, content = torch.unique(_words(visible[needed]), dim=0, return_inverse=True)
        met = torch.full((len(contents),), len(content), device=full.device).scatter_reduce(
            0, content, torch.arange(len(content), device=full.device), "amin"
        )
        rank = torch.argsort(met)
        numbers[partial[0][needed], partial[1][needed]] = torch.argsort(rank)[content]

        def lists(pairs: Tensor, numbers: Tensor) -> list[Tensor]:
            counts = (pairs > 0).sum(1)
            offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
            order = torch.argsort(counts, descending=True, stable=True)
            lines, tiles = (pairs > 0).nonzero(as_tuple=True)
            full_first = torch.argsort(2 * lines + (numbers[lines, tiles] >= 0), stable=True)
            visits = tiles[full_first], numbers[lines, tiles][full_first]
            return [part.to(torch.int32) for part in (offsets, *visits, order)]

        kv_offsets, kv_tiles, kv_bitmaps, q_order = lists(pairs, numbers)
        q_offsets, q_tiles, q_bitmaps, k_order = lists(pairs.T, numbers.T)
        tensors = [kv_offsets, kv_tiles, kv_bitmaps, q_offsets, q_tiles, q_bitmaps, q_order, k_order, contents[rank]]
        names = [field.name for field in fields(TilePlan) if field.type == "Tensor"]
        facts = {
            "q_len": q_len,
            "kv_len": kv_len,
            "block_q": block_q,
            "block_k": block_k,
            "visible_pairs": int(pairs.sum()),
        }
        return TilePlan._laid_out(dict(zip(names, tensors)), facts, full.device)

    @staticmethod
    def stack(plans: Sequence[TilePlan]) -> TilePlan:
        """One plan for a batch whose samples have masks of their own: offsets and orders get a leading batch dimension.

        Args:
            plans: one a sample, of equal lengths and tile sizes, on one device, none of them stacked.

        Raises:
            ValueError: no plans, or plans that differ in more than their mask.

        Example:
            >>> import pdkernels as pd
            >>> masks = [pd.masks.causal(64), pd.masks.full(64)]
            >>> plan = pd.masks.TilePlan.stack([mask.plan(32, 32) for mask in masks])
            >>> plan.kv_offsets.tolist(), plan.kv_tiles.tolist()
            ([[0, 1, 3], [3, 5, 7]], [0, 0, 1, 0, 1, 0, 1])
        """
        op = "masks.TilePlan.stack"
        check(len(plans) > 0, op, "plans", "hold at least one plan", "none")
        first = plans[0]
        for plan in plans:
            check(plan.batch is None, op, "plans", "be plans of single samples", "a stacked plan")
            for name in ("q_len", "kv_len", "block_q", "block_k", "device"):
                wanted, have = getattr(first, name), getattr(plan, name)
                remedy = (
                    "Lengthen the shorter masks with pack([mask], length=...)." if name in ("q_len", "kv_len") else ""
                )
                check(have == wanted, op, "plans", f"agree in {name} ({wanted})", have, remedy)
        # Samples that share a plan share its lists and bitmaps.
        distinct = list({id(plan): plan for plan in plans}.values())
        visits = dict(zip(map(id, distinct), accumulate((plan.kv_tiles.numel() for plan in distinct), initial=0)))
        bitmaps = dict(zip(map(id, distinct), accumulate((plan.bitmaps.shape[0] for plan in distinct), initial=0)))
        shifted = lambda plan, tensor: torch.where(tensor < 0, tensor, tensor + bitmaps[id(plan)])  # noqa: E731
        tensors = {
            "kv_offsets": torch.stack([plan.kv_offsets + visits[id(plan)] for plan in plans]),
            "kv_tiles": torch.cat([plan.kv_tiles for plan in distinct]),
            "kv_bitmaps": torch.cat([shifted(plan, plan.kv_bitmaps) for plan in distinct]),
            "q_offsets": torch.stack([plan.q_offsets + visits[id(plan)] for plan in plans]),
            "q_tiles": torch.cat([plan.q_tiles for plan in distinct]),
            "q_bitmaps": torch.cat([shifted(plan, plan.q_bitmaps) for plan in distinct]),
            "q_order": torch.stack([plan.q_order for plan in plans]),
            "k_order": torch.stack([plan.k_order for plan in plans]),
            "bitmaps": torch.cat([plan.bitmaps for plan in distinct]),
        }
        facts = {**first._facts(), "visible_pairs": sum(plan.visible_pairs for plan in plans)}
        return TilePlan._laid_out(tensors, facts, first.device)
