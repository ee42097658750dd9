"""Attention over a text whose rows are distributed over several ranks.

Each rank has the queries, keys and values of some rows. With `"gather"` it gathers the keys and values of all ranks.
With `"ring"` they travel around a ring, and the results of the steps are merged by log-sum-exp, so that a rank never
holds the keys of more than two ranks. Both have gradients: with gather the gradients of a key return to its owner, in a
ring they travel with it.

Rows are assigned by the tiles that a plan visits, in a few runs per rank, so that no rank waits for another.

Sources: Liu et al., "Ring attention with blockwise transformers for near-infinite context" (2023); runs of a causal
text assigned from both ends, as in Llama 3's training (Grattafiori et al., "The Llama 3 herd of models", 2024, section
3.3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from pdkernels._attention import AttentionArguments, checked_scale
from pdkernels._validation import check, check_choice, check_int, check_type
from pdkernels.distributed.mesh import group_of
from pdkernels.masks import SegmentMask, TilePlan
from pdkernels.ops import block_sparse_attention
from pdkernels.ops.block_sparse_attention import backward_op
from pdkernels.ops.collectives import gathered, passed_on, scattered

Exchange = Literal["gather", "ring"]
Range = tuple[int, int]

OP = "distributed.context_parallel_attention"
SLICE = "distributed.slice_context"


@dataclass(frozen=True)
class ContextSlices:
    """The rows of a mask that each rank holds; see `slice_context`."""

    mask: SegmentMask
    rows: tuple[tuple[Range, ...], ...]
    """The runs ``(start, stop)`` of each rank, ascending."""
    tiles: tuple[int, ...]
    """The number of tiles that the rows of each rank visit."""
    block_q: int
    block_k: int

    @property
    def balance(self) -> float:
        """The maximum number of tiles of a rank, divided by the mean: 1 is best."""
        return max(self.tiles) * len(self.tiles) / max(sum(self.tiles), 1)

    def index(self, rank: int) -> Tensor:
        """The row numbers of a rank, int64."""
        return torch.tensor(
            [row for start, stop in self.rows[rank] for row in range(start, stop)], dtype=torch.int64, device="cpu"
        )

    def take(self, x: Tensor, rank: int, dim: int = 1) -> Tensor:
        """A rank's rows of `x`, which has all rows in dimension `dim`."""
        return torch.cat([x.narrow(dim, start, stop - start) for start, stop in self.rows[rank]], dim)

    def join(self, shards: Sequence[Tensor], dim: int = 1) -> Tensor:
        """All rows in order, from those of every rank: the inverse of `take`."""
        pieces = {}
        for runs, shard in zip(self.rows, shards, strict=True):
            first = 0
            for start, stop in runs:
                pieces[start] = shard.narrow(dim, first, stop - start)
                first += stop - start
        return torch.cat([pieces[start] for start in sorted(pieces)], dim)

    @property
    def lengths(self) -> list[int]:
        """The number of rows of each rank."""
        return [sum(stop - start for start, stop in runs) for runs in self.rows]

    def _plan(self, rows: Range, columns: Range | None, device: torch.device) -> TilePlan:
        mask = self.mask[slice(*rows)] if columns is None else self.mask[slice(*rows), slice(*columns)]
        return mask.plan(self.block_q, self.block_k, device)


def slice_context(
    mask: SegmentMask, ranks: int, *, block_q: int = 128, block_k: int = 128, pieces: int = 2
) -> ContextSlices:
    """Assigns the rows of a mask to ranks, so that all have about as many rows and visit about as many tiles.

    The rows are cut into ``ranks * pieces`` runs of whole tiles, whose numbers of tiles differ by at most one. Each
    rank gets `pieces` of them: in descending order of visits, a run goes to the rank with the fewest visits so far. Two
    runs per rank are enough for a causal mask.

    Args:
        mask: square: rows are queries and keys.
        ranks: at least 1.
        block_q, block_k: of the plans, as for `SegmentMask.plan`.
        pieces: runs per rank. More runs balance an irregular mask better, but each costs a kernel call.

    Raises:
        ValueError: a mask that is not square, fewer tiles than runs.
        TypeError: something that is not a mask.

    Example:
        >>> import pdkernels as pd
        >>> from pdkernels.distributed import slice_context
        >>> slices = slice_context(pd.masks.causal(256), 2, block_q=32, block_k=32)
        >>> slices.rows, slices.tiles, slices.balance
        ((((0, 64), (192, 256)), ((64, 128), (128, 192))), (18, 18), 1.0)
        >>> slice_context(pd.masks.causal(256), 2, block_q=32, block_k=32, pieces=1).balance
        1.4444444444444444
    """
    check_type(isinstance(mask, SegmentMask), SLICE, "mask", "be a SegmentMask", type(mask).__name__)
    check(mask.q_len == mask.kv_len, SLICE, "mask", "be square", f"{mask.q_len} x {mask.kv_len}")
    for name, value in (("ranks", ranks), ("pieces", pieces)):
        check_int(SLICE, name, value, 1)
    offsets = mask.plan(block_q, block_k).visits().offsets.tolist()
    work = [stop - start for start, stop in pairwise(offsets)]
    count = ranks * pieces
    check(len(work) >= count, SLICE, "mask", f"have at least {count} tiles of {block_q} rows", len(work))
    sizes = [(len(work) + i) // count for i in range(count)]
    runs = list(pairwise(accumulate(sizes, initial=0)))
    visits = [sum(work[start:stop]) for start, stop in runs]
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    tiles = [0] * ranks
    for run in sorted(range(count), key=lambda run: (-visits[run], run)):
        rank = min((r for r in range(ranks) if len(dealt[r]) < pieces), key=lambda r: (tiles[r], r))
        dealt[rank].append(run)
        tiles[rank] += visits[run]
    order = sorted(range(ranks), key=lambda rank: min(dealt[rank]))  # the first rank has the first row
    rows = []
    for rank in order:
        ranges = [(runs[run][0] * block_q, min(runs[run][1] * block_q, mask.q_len)) for run in sorted(dealt[rank])]
        rows.append(tuple(ranges))
    return ContextSlices(mask, tuple(rows), tuple(tiles[rank] for rank in order), block_q, block_k)


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: ContextSlices,
    mesh: Any,
    *,
    scale: float | None = None,
    exchange: Exchange = "gather",
) -> Tensor:
    """`pdkernels.block_sparse_attention` of a text whose rows are distributed over the ranks of a mesh. Differentiable.

    Args:
        q: ``(batch, rows, q_heads, head_dim)``: this rank's rows, ``slices.take(whole, rank)``.
        k, v: ``(batch, rows, kv_heads, head_dim)``: the same rows.
        slices: of the mask, equal on all ranks.
        mesh: a `DeviceMesh` of one dimension or a `ProcessGroup`, with as many ranks as `slices`.
        scale: of the scores; None means ``head_dim ** -0.5``.
        exchange: ``"gather"``: every rank gathers the keys and values of all rows in one call. ``"ring"``: they travel
            from rank to rank, and a rank holds those of two ranks at a time.

    Returns:
        Of q's shape and dtype: the results of this rank's rows.

    Raises:
        ValueError: shapes or slices that do not fit.
        TypeError: dtypes that do not fit.

    Example:
        >>> import pdkernels as pd
        >>> slices = pd.distributed.slice_context(mask, ranks)                              # doctest: +SKIP
        >>> q, k, v = (slices.take(x, rank) for x in (q, k, v))                             # doctest: +SKIP
        >>> out = pd.distributed.context_parallel_attention(q, k, v, slices, mesh)          # doctest: +SKIP
    """
    group = group_of(OP, mesh)
    check_type(isinstance(slices, ContextSlices), OP, "slices", "be ContextSlices", type(slices).__name__)
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    check(len(slices.rows) == ranks, OP, "slices", f"be for {ranks} ranks", len(slices.rows))
    check_choice(OP, "exchange", exchange, get_args(Exchange))
    rows = slices.lengths[rank]
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_type(isinstance(x, Tensor), OP, name, "be a tensor", type(x).__name__)
        check(x.dim() == 4 and x.shape[1] == rows, OP, name, f"have {rows} rows in dimension 1", tuple(x.shape))
    number = checked_scale(OP, scale, q)
    if exchange == "ring":
        out: Tensor = _Ring.apply(q, k, v, slices, group, number)  # type: ignore[no-untyped-call]
        return out
    kv: Tensor = _Collected.apply(torch.cat((k, v), -1), slices, group)  # type: ignore[no-untyped-call]
    keys, values = kv.split(k.shape[-1], -1)
    outputs, first = [], 0
    for start, stop in slices.rows[rank]:
        queries, first = q[:, first : first + stop - start], first + stop - start
        plan = slices._plan((start, stop), None, q.device)
        outputs.append(block_sparse_attention(queries, keys, values, plan, scale=number))
    return torch.cat(outputs, 1)


def _padded(x: Tensor, rows: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, rows - x.shape[1])).contiguous()


class _Collected(torch.autograd.Function):
    """All rows, in order. The gradient of a row is summed on its owner."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slices: ContextSlices, group: Any) -> Tensor:
        ctx.slices, ctx.group = slices, group
        lengths = slices.lengths
        shards = gathered(_padded(x, max(lengths)), group)
        return slices.join([shard[:, :length] for shard, length in zip(shards, lengths)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        slices, lengths = ctx.slices, ctx.slices.lengths
        gradients = [_padded(slices.take(grad, rank), max(lengths)) for rank in range(len(lengths))]
        gradient = scattered(torch.stack(gradients), ctx.group)
        return gradient[:, : lengths[dist.get_rank(ctx.group)]], None, None


class _Meeting(NamedTuple):
    """A run of the rank's queries and one of the keys it holds, with offsets in both tensors."""

    rows: slice
    columns: slice
    plan: TilePlan


def _meetings(slices: ContextSlices, rank: int, source: int, device: torch.device) -> list[_Meeting]:
    """The pairs of runs with a visible pair of tokens."""
    meetings, first = [], 0
    for start, stop in slices.rows[rank]:
        low = 0
        for begin, end in slices.rows[source]:
            plan = slices._plan((start, stop), (begin, end), device)
            if plan.visited_tiles:
                meetings.append(_Meeting(slice(first, first + stop - start), slice(low, low + end - begin), plan))
            low += end - begin
        first += stop - start
    return meetings


class _Ring(torch.autograd.Function):
    """Keys and values travel around the ring, and again with their gradients in the backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, slices: ContextSlices, group: Any, scale: float) -> Tensor:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        rows = max(slices.lengths)
        total = q.new_zeros(q.shape, dtype=torch.float32)
        lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float32)
        kv = torch.stack((_padded(k, rows), _padded(v, rows)))
        for step in range(ranks):
            for rows_of, columns, plan in _meetings(slices, rank, (rank + step) % ranks, q.device):
                keys, values = kv[0][:, columns], kv[1][:, columns]
                out, run_lse = block_sparse_attention(q[:, rows_of], keys, values, plan, scale=scale, return_lse=True)
                _merge(total[:, rows_of], lse[..., rows_of], out, run_lse)
            if step + 1 < ranks:
                kv = passed_on(kv, group)
        result = total.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse)
        ctx.slices, ctx.group, ctx.scale = slices, group, scale
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        slices, group = ctx.slices, ctx.group
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        lengths = slices.lengths
        grad = grad.contiguous()
        grad_q = torch.zeros_like(q, dtype=torch.float32)
        kv = torch.stack((_padded(k, max(lengths)), _padded(v, max(lengths))))
        sums = torch.zeros_like(kv, dtype=torch.float32)
        for step in range(ranks):
            for rows, columns, plan in _meetings(slices, rank, (rank + step) % ranks, q.device):
                keys, values = kv[0][:, columns], kv[1][:, columns]
                gradients = _part_gradients(
                    grad[:, rows], q[:, rows], keys, values, out[:, rows], lse[..., rows], plan, ctx.scale
                )
                grad_q[:, rows] += gradients[0]
                sums[0][:, columns] += gradients[1]
                sums[1][:, columns] += gradients[2]
            # After as many steps as there are ranks, the sums are back at their owner.
            if step + 1 < ranks:
                kv = passed_on(kv, group)
            sums = passed_on(sums, group)
        grads = sums[:, :, : lengths[rank]].to(k.dtype)
        return grad_q.to(q.dtype), grads[0], grads[1], None, None, None


def _part_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: TilePlan, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for a part of the keys, whose result with weight ``exp(its lse - lse)`` is a part of `out`.

    The part is recomputed, because the results of all steps would take as much memory as all keys. The kernel needs the
    part's own log-sum-exp, with which its weights add up to 1. The effect of the part's weight on `out` enters the
    gradient of that log-sum-exp.
    """
    partial_out, partial_lse = block_sparse_attention(q, k, v, plan, scale=scale, return_lse=True)
    share = torch.where(partial_lse == -torch.inf, 0.0, (partial_lse - lse).exp())
    wide = grad.float()
    grad_lse = share * (wide * (partial_out.float() - out.float())).sum(-1).transpose(1, 2)
    grad_partial = (wide * share.transpose(1, 2)[..., None]).to(q.dtype)
    gradients: tuple[Tensor, Tensor, Tensor] = backward_op(
        grad_partial,
        grad_lse.contiguous(),
        partial_out,
        partial_lse,
        *AttentionArguments(q, k, v, *plan.arguments, scale),
    )
    return gradients


def _merge(total: Tensor, lse: Tensor, out: Tensor, partial_lse: Tensor) -> None:
    """Merges the results of other keys into `total` and `lse`, in place."""
    new = torch.logaddexp(lse, partial_lse)
    blind = new == -torch.inf
    weight, partial_weight = (
        torch.where(blind, 0.0, (x - new).exp()).transpose(1, 2)[..., None] for x in (lse, partial_lse)
    )
    total.copy_(total * weight + out.float() * partial_weight)
    lse.copy_(new)
