"""The tile plan: the form of a mask that block-sparse kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from pdkernels import _host, _memory
from pdkernels._attention import PlanArguments
from pdkernels._validation import check

# Every tensor of a plan begins at a multiple of this many words (128 bytes), for wide loads.
ALIGNMENT = 32


def numbered(device: torch.device | str) -> torch.device:
    """The device with its index: ``"cuda"`` means another GPU after ``torch.cuda.set_device``."""
    device = torch.device(device)
    return device if device.type == "cpu" or device.index is not None else torch.empty(0, device=device).device


def packed_words(visible: Tensor) -> Tensor:
    """``(n, rows, columns)`` bool as int32 words of 32 columns."""
    padded = torch.nn.functional.pad(visible, (0, -visible.shape[-1] % 32)).unflatten(-1, (-1, 8))
    weights = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=visible.device)
    packed: Tensor = (padded * weights).sum(-1, dtype=torch.uint8).view(torch.int32)
    return packed


def _concatenated(begin: Tensor, end: Tensor) -> Tensor:
    """The numbers in all ranges ``[begin, end)``, concatenated."""
    sizes = end - begin
    return torch.arange(int(sizes.sum()), device=begin.device) + torch.repeat_interleave(end - sizes.cumsum(0), sizes)


class BlockLists(NamedTuple):
    """Full and partial key tiles of each query tile, padded, int32, as FlashAttention 4 and FlexAttention read them."""

    mask_block_cnt: Tensor
    """(..., q_tiles) partial key tiles of each query tile."""
    mask_block_idx: Tensor
    """(..., q_tiles, kv_tiles) their indices, ascending, padded with 0."""
    full_block_cnt: Tensor
    """(..., q_tiles) full key tiles, which need no mask."""
    full_block_idx: Tensor
    """(..., q_tiles, kv_tiles) their indices, ascending, padded with 0."""


class Visits(NamedTuple):
    """For each tile of one side, the tiles of the other side that it visits, in the order of the kernels. All int32."""

    offsets: Tensor
    """(tiles + 1,): tile t visits entries ``offsets[t] .. offsets[t + 1]`` of the next two."""
    tiles: Tensor
    """(visits,): tiles of the other side; for each tile the full ones, ascending, then the partial ones, ascending."""
    bitmaps: Tensor
    """(visits,): -1 where all pairs within the lengths are visible, else the index of a bitmap."""


@dataclass(frozen=True, eq=False)
class TilePlan:
    """The tiles with a visible pair, and the bitmaps of those that need a mask, one bit per pair.

    A tile is `block_q` rows by `block_k` columns; tiles without a visible pair take no space. Full tiles come in runs,
    so each tile has ranges of full tiles of the other side, and a list of the tiles that need a mask: partial tiles,
    and a full tile that extends past the end. Identical bitmaps are stored once. All tensors are int32 and share one
    block of memory. `visits` lists every tile.
    """

    rows: Tensor
    """(q_tiles + kv_tiles, 4), a row for each query tile, then one for each key tile: its ranges are
    ``lists[row[0] : row[1]]``, its list is ``lists[row[1] : row[2]]``. ``row[3]`` is a tile of the same side, in
    descending order of visits. A stacked plan has a leading batch dimension here."""
    lists: Tensor
    """(n, 2): ranges ``[first, last)`` of full tiles, entirely within the lengths; and tiles with the index of their
    bitmap, or -1. Ranges and lists ascend, except that a tile with -1 comes first."""
    bitmaps: Tensor
    """(n, block_q, ceil(block_k / 32)): bit ``c % 32`` of word ``[r, c // 32]`` is the pair of row r and column c of
    the tile. Bits outside the lengths are 0."""
    q_len: int
    """Rows of the mask."""
    kv_len: int
    """Columns of the mask."""
    block_q: int
    """Rows of a tile, a multiple of 16."""
    block_k: int
    """Columns of a tile, a multiple of 16."""
    visible_pairs: int
    """Visible pairs, over all samples."""
    visited_tiles: int
    """Tiles that hold a visible pair, over all samples."""

    @property
    def tile_efficiency(self) -> float:
        """Visible pairs divided by the pairs of visited tiles; ragged tiles count in full. 1 if no tile is visited."""
        return self.visible_pairs / (self.visited_tiles * self.block_q * self.block_k) if self.visited_tiles else 1.0

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors())

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.rows.device

    @property
    def batch(self) -> int | None:
        """The number of samples of a stacked plan; None for a plan that all samples share."""
        return self.rows.shape[0] if self.rows.dim() == 3 else None

    @property
    def grid(self) -> tuple[int, int]:
        """Query tiles and key tiles."""
        return -(-self.q_len // self.block_q), -(-self.kv_len // self.block_k)

    @property
    def arguments(self) -> PlanArguments:
        """The arguments of the attention ops."""
        return PlanArguments(self.rows, self.lists, self.bitmaps, self.block_q, self.block_k)

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.rows, self.lists, self.bitmaps

    def _facts(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self) if field.type != "Tensor"}

    def to(self, device: torch.device | str) -> TilePlan:
        """The plan on another device, moved in one copy; `self` if it is already there."""
        device = numbered(device)
        if self.device == device:
            return self
        return TilePlan._laid_out(self._tensors(), self._facts(), device)

    def visits(self, transposed: bool = False, sample: int = 0) -> Visits:
        """Every visited tile, unpacked from the ranges. For checks and pictures: there may be very many.

        Args:
            transposed: list the query tiles of each key tile instead of the key tiles of each query tile.
            sample: index of a sample of a stacked plan.

        Example:
            >>> import pdkernels as pd
            >>> visits = pd.masks.causal(96).plan(32, 32).visits()
            >>> visits.offsets.tolist(), visits.tiles.tolist(), visits.bitmaps.tolist()
            ([0, 1, 3, 6], [0, 0, 1, 0, 1, 2], [0, -1, 0, -1, -1, 0])
        """
        side = slice(self.grid[0], None) if transposed else slice(self.grid[0])
        rows = self.rows if self.batch is None else self.rows[sample]
        begin, middle, end, _ = rows[side].T.to(torch.int64)
        owner = torch.repeat_interleave(end - begin)
        pairs = _concatenated(begin, end)
        first, second = self.lists[pairs].T
        is_range = pairs < middle[owner]
        counts = torch.where(is_range, second - first, 1)
        tiles = _concatenated(first, first + counts).to(torch.int32)
        bitmaps = torch.repeat_interleave(torch.where(is_range, -1, second), counts)
        totals = torch.zeros_like(begin).index_add_(0, owner, counts.to(torch.int64))
        offsets = torch.cat([totals.new_zeros(1), totals.cumsum(0)])
        return Visits(offsets.to(torch.int32), tiles, bitmaps)

    def dense(self) -> Tensor:
        """``(q_len, kv_len)`` bool, or ``(batch, q_len, kv_len)`` of a stack: True where the row sees the column.

        Unpacks the plan pair by pair, on its device, without a sync. For checks: it stores every pair.

        Example:
            >>> import pdkernels as pd
            >>> mask = pd.masks.dual_stream(40, 8)
            >>> bool((mask.plan(16, 32).dense() == mask.dense()).all())
            True
        """
        samples, (q_tiles, kv_tiles) = 1 if self.batch is None else self.batch, self.grid
        if q_tiles == 0:
            return self.lists.new_zeros((*self.rows.shape[:-2], 0, self.kv_len), dtype=torch.bool)
        rows = self.rows.view(samples, -1, 4)[:, :q_tiles]
        begin, middle, end = (rows[..., i].contiguous() for i in range(3))
        numbers = torch.arange(len(self.lists), dtype=torch.int32, device=self.device).repeat(samples, 1)
        # The row of each pair in the lists, if any: most pairs belong to key tiles, or to other samples.
        row_of_pair = (torch.searchsorted(begin, numbers, right=True) - 1).clamp(min=0)
        in_row = (numbers >= begin.gather(1, row_of_pair)) & (numbers < end.gather(1, row_of_pair))
        is_range = in_row & (numbers < middle.gather(1, row_of_pair))
        first, second = self.lists.T
        # The content of each tile: nothing, all, or a bitmap. Pairs without a row go to an extra column.
        width = kv_tiles + 1
        edges = torch.zeros(samples, q_tiles * width, dtype=torch.int32, device=self.device)
        for column, step in ((first, 1), (second, -1)):
            at = row_of_pair * width + torch.where(is_range, column, kv_tiles)
            edges.scatter_add_(1, at, torch.where(is_range, step, 0).to(torch.int32))
        contents = (edges.view(samples, q_tiles, width).cumsum(-1) > 0).to(torch.int64).flatten(1)
        is_other = in_row & ~is_range
        at = row_of_pair * width + torch.where(is_other, first, kv_tiles)
        contents.scatter_(1, at, torch.where(is_other, second + 2, 0).to(torch.int64))
        contents = contents.view(samples, q_tiles, width)[..., :-1]
        bits = (self.bitmaps[..., None] >> torch.arange(32, dtype=torch.int32, device=self.device)) & 1
        bits = bits.to(torch.bool).flatten(2)[..., : self.block_k]
        table = torch.cat([bits.new_zeros(1, *bits.shape[1:]), bits.new_ones(1, *bits.shape[1:]), bits])
        dense = table[contents].transpose(2, 3).flatten(3).flatten(1, 2)[:, : self.q_len, : self.kv_len]
        return dense[0] if self.batch is None else dense

    def block_lists(self, ragged_is_partial: bool = False) -> BlockLists:
        """Counts and padded lists of partial and of full key tiles: the block-sparsity tensors of FlashAttention 4.

        Args:
            ragged_is_partial: list full tiles that extend past the lengths as partial, as FlexAttention does.

        Example:
            >>> import pdkernels as pd
            >>> lists = pd.masks.causal(96).plan(32, 32).block_lists()
            >>> lists.mask_block_idx.tolist(), lists.full_block_cnt.tolist()
            ([[0, 0, 0], [1, 0, 0], [2, 0, 0]], [0, 1, 2])
        """
        if self.batch is not None:
            samples = [replace(self, rows=rows).block_lists(ragged_is_partial) for rows in self.rows]
            return BlockLists(*(torch.stack(tensors) for tensors in zip(*samples)))
        (q_tiles, kv_tiles), visits = self.grid, self.visits()
        rows = torch.repeat_interleave(torch.arange(q_tiles, device=self.device), visits.offsets.diff())
        full = visits.bitmaps < 0
        if ragged_is_partial:
            full &= ((rows + 1) * self.block_q <= self.q_len) & ((visits.tiles + 1) * self.block_k <= self.kv_len)
        order = torch.argsort(rows * kv_tiles + visits.tiles)
        rows, full, tiles = rows[order], full[order], visits.tiles[order]
        lists = []
        for chosen in (~full, full):
            counts = torch.bincount(rows[chosen], minlength=q_tiles)
            before = counts.cumsum(0) - counts
            at = torch.arange(int(counts.sum()), device=self.device) - torch.repeat_interleave(before, counts)
            index = torch.zeros(q_tiles, kv_tiles, dtype=torch.int32, device=self.device)
            index[rows[chosen], at] = tiles[chosen]
            lists += [counts.to(torch.int32), index]
        return BlockLists(*lists)

    @staticmethod
    def _laid_out(tensors: Sequence[Tensor], attributes: dict[str, int], device: torch.device | str) -> TilePlan:
        """A plan from its three tensors, copied to one new block of memory."""
        sizes = [-(-tensor.numel() // ALIGNMENT) * ALIGNMENT for tensor in tensors]
        begins = list(accumulate(sizes, initial=0))
        with _memory.lasting():
            memory = torch.zeros(sum(sizes), dtype=torch.int32, device="cpu")
            for begin, tensor in zip(begins, tensors):
                memory[begin : begin + tensor.numel()] = tensor.flatten()
            memory = memory.to(device)
            parts = (memory[begin : begin + x.numel()].view(x.shape) for begin, x in zip(begins, tensors))
            rows, lists, bitmaps = parts
        return TilePlan(rows, lists, bitmaps, **attributes)

    @staticmethod
    def _from_host(host: _host.TilePlan, q_len: int, kv_len: int, block_q: int, block_k: int) -> TilePlan:
        with _memory.lasting():
            memory = torch.frombuffer(host, dtype=torch.int32)
            rows, lists, bitmaps = (memory[begin : begin + size] for begin, size in host.extents)
            tensors = rows.view(-1, 4), lists.view(-1, 2), bitmaps.view(-1, block_q, -(-block_k // 32))
        return TilePlan(*tensors, q_len, kv_len, block_q, block_k, host.visible_pairs, host.visits)

    @staticmethod
    def from_tiles(full: Tensor, partial: tuple[Tensor, Tensor], visible: Tensor, q_len: int, kv_len: int) -> TilePlan:
        """A plan from tiles classified by something other than a segment mask.

        Args:
            full: ``(q_tiles, kv_tiles)`` bool, True where all pairs within the lengths are visible.
            partial: query tile and key tile of the ``n`` tiles in `visible`, row by row, none of them in `full`. Tiles
                whose pairs are all visible become full, and empty ones are dropped.
            visible: ``(n, block_q, block_k)`` bool, False past the lengths.
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
        rows_of = (q_len - torch.arange(full.shape[0], device=full.device) * block_q).clamp(max=block_q)
        columns = (kv_len - torch.arange(full.shape[1], device=full.device) * block_k).clamp(max=block_k)
        areas = rows_of[:, None] * columns
        pairs = torch.where(full, areas, 0)
        pairs[partial] = visible.flatten(1).sum(1)
        # Bitmaps are numbered in the order of their first occurrence.
        numbers = torch.full_like(areas, -1)
        needed = (pairs[partial] > 0) & (pairs[partial] < areas[partial])
        contents, content = torch.unique(packed_words(visible[needed]), dim=0, return_inverse=True)
        met = torch.full((len(contents),), len(content), device=full.device).scatter_reduce(
            0, content, torch.arange(len(content), device=full.device), "amin"
        )
        rank = torch.argsort(met)
        numbers[partial[0][needed], partial[1][needed]] = torch.argsort(rank)[content]

        rows, lists, begin = [], [], 0
        for pair_counts, number, ragged in (
            (pairs, numbers, columns < block_k),
            (pairs.T, numbers.T, rows_of < block_q),
        ):
            full = (pair_counts > 0) & (number < 0) & ~ragged
            steps = torch.nn.functional.pad(full.to(torch.int8), (1, 1)).diff()
            (owner, first), last = (steps > 0).nonzero(as_tuple=True), (steps < 0).nonzero(as_tuple=True)[1]
            masked_tiles = ((pair_counts > 0) & ~full).nonzero(as_tuple=True)
            first_of_masked = torch.where(number[masked_tiles] < 0, -1, masked_tiles[1])
            key = torch.cat([owner * 2, masked_tiles[0] * 2 + 1]) * (full.shape[1] + 1)
            order = torch.argsort(key + torch.cat([first, first_of_masked + 1]))
            ends = torch.stack([torch.bincount(of, minlength=len(full)) for of in (owner, masked_tiles[0])], 1)
            ends = begin + ends.flatten().cumsum(0).view(-1, 2)
            begins = torch.cat([ends.new_tensor([begin]), ends[:, 1]])[:-1]
            longest = torch.argsort((pair_counts > 0).sum(1), descending=True, stable=True)
            rows.append(torch.stack([begins, *ends.T, longest], 1))
            pairs_of = torch.cat(
                [torch.stack([first, last], 1), torch.stack([masked_tiles[1], number[masked_tiles]], 1)]
            )
            lists.append(pairs_of[order])
            begin += len(order)
        attributes = {
            "q_len": q_len,
            "kv_len": kv_len,
            "block_q": block_q,
            "block_k": block_k,
            "visible_pairs": int(pairs.sum()),
            "visited_tiles": int((pairs > 0).sum()),
        }
        return TilePlan._laid_out([torch.cat(rows), torch.cat(lists), contents[rank]], attributes, full.device)

    @staticmethod
    def stack(plans: Sequence[TilePlan]) -> TilePlan:
        """Stacks the plans of a batch with one mask per sample: `rows` gets a leading batch dimension.

        Args:
            plans: one per sample, of equal lengths and tile sizes, on one device, none of them stacked.

        Raises:
            ValueError: no plans, or plans that differ in lengths, tile sizes or device.

        Example:
            >>> import pdkernels as pd
            >>> masks = [pd.masks.causal(64), pd.masks.full(64)]
            >>> plan = pd.masks.TilePlan.stack([mask.plan(32, 32) for mask in masks])
            >>> [plan.visits(sample=sample).tiles.tolist() for sample in (0, 1)]
            [[0, 0, 1], [0, 1, 0, 1]]
        """
        op = "masks.TilePlan.stack"
        check(len(plans) > 0, op, "plans", "hold at least one plan", "none")
        first = plans[0]
        for plan in plans:
            check(plan.batch is None, op, "plans", "be plans of single samples", "a stacked plan")
            for name in ("q_len", "kv_len", "block_q", "block_k", "device"):
                expected, actual = getattr(first, name), getattr(plan, name)
                remedy = (
                    "Lengthen the shorter masks with pack([mask], length=...)." if name in ("q_len", "kv_len") else ""
                )
                check(actual == expected, op, "plans", f"agree in {name} ({expected})", actual, remedy)
        # Samples that share a plan share its lists and bitmaps.
        distinct = list({id(plan): plan for plan in plans}.values())
        before = dict(zip(map(id, distinct), accumulate((len(plan.lists) for plan in distinct), initial=0)))
        shift = torch.tensor([[1], [1], [1], [0]], device=first.device).T
        rows = torch.stack([plan.rows + before[id(plan)] * shift for plan in plans])
        lists = []
        for plan, bitmaps in zip(distinct, accumulate((len(plan.bitmaps) for plan in distinct), initial=0)):
            steps = torch.zeros(len(plan.lists) + 1, dtype=torch.int64, device=plan.device)
            for column, step in ((1, 1), (2, -1)):
                steps.index_add_(0, plan.rows[:, column].to(torch.int64), steps.new_full((len(plan.rows),), step))
            numbered_pair = (steps.cumsum(0)[:-1] > 0) & (plan.lists[:, 1] >= 0)
            lists.append(torch.stack([plan.lists[:, 0], plan.lists[:, 1] + bitmaps * numbered_pair], 1))
        counts = {name: sum(getattr(plan, name) for plan in plans) for name in ("visible_pairs", "visited_tiles")}
        tensors = rows, torch.cat(lists), torch.cat([plan.bitmaps for plan in distinct])
        return TilePlan._laid_out(tensors, {**first._facts(), **counts}, first.device)


def dense_plan(plan: PlanArguments, q_len: int, kv_len: int) -> Tensor:
    """The pairs that a plan of this many rows and columns shows."""
    rows, lists, bitmaps, block_q, block_k = plan
    return TilePlan(rows, lists, bitmaps, q_len, kv_len, block_q, block_k, visible_pairs=0, visited_tiles=0).dense()
