"""Checks shared by the attention ops."""

from __future__ import annotations

import torch
from torch import Tensor

from pdkernels._validation import check, check_type, fail, message
from pdkernels.masks.tile_plan import PlanArguments, TilePlan

LARGEST = torch.finfo(torch.float32).max


def takes_head_dim(head_dim: int) -> bool:
    """Whether the kernels support heads of that size.

    >>> [size for size in (8, 16, 20, 96, 256, 264) if takes_head_dim(size)]
    [16, 96, 256]
    """
    return head_dim % 8 == 0 and 16 <= head_dim <= 256


def given_scale(op: str, scale: float | None, q: Tensor) -> float:
    """`scale`, or the default for None. Kernels multiply in float32, where a larger one is infinite and turns a zero into NaN."""
    if scale is None:
        return q.shape[-1] ** -0.5 if q.dim() > 0 and q.shape[-1] > 0 else 1.0
    check_type(isinstance(scale, (int, float)), op, "scale", "be a number", type(scale).__name__)
    check(-LARGEST <= scale <= LARGEST, op, "scale", "be finite in float32", scale)
    return float(scale) if isinstance(scale, int) else scale


# The plan in the schema of an op: what `TilePlan.arguments` holds.
PLAN_SCHEMA = "Tensor plan_rows, Tensor plan_lists, Tensor bitmaps, int block_q, int block_k"


def check_plan(op: str, device: torch.device, rows_of: tuple[int, int], kv_len: int, plan: PlanArguments) -> None:
    """A plan of `rows_of` ``(batch, q_len)`` and `kv_len` columns: everything but values."""
    batch, q_len = rows_of
    rows, lists, bitmaps, block_q, block_k = plan
    for part in (rows, lists, bitmaps):
        if part.device != device:
            fail(op, "plan", f"be on {device} like q", part.device, f"Move it with plan.to({str(device)!r}).")
        if part.dtype != torch.int32 or not part.is_contiguous():
            raise TypeError(
                message(op, "plan", "hold contiguous int32 tensors", f"{part.dtype} with strides {part.stride()}")
            )
    for name, size in (("block_q", block_q), ("block_k", block_k)):
        if size % 16 != 0 or size < 16 or size > 1024:
            fail(op, name, "be a multiple of 16 in [16, 1024]", size)
    if rows.dim() == 3 and rows.shape[0] != batch:
        remedy = "Stack one plan for each sample, or pass a single plan that all samples share."
        fail(op, "plan", f"have {batch} samples like q", rows.shape[0], remedy)
    q_tiles, kv_tiles = -(-q_len // block_q), -(-kv_len // block_k)
    if rows.dim() not in (2, 3) or tuple(rows.shape[-2:]) != (q_tiles + kv_tiles, 4):
        fail(op, "plan", f"have rows for {q_tiles} x {kv_tiles} tiles of {block_q} x {block_k}", tuple(rows.shape))
    if lists.dim() != 2 or lists.shape[1] != 2:
        fail(op, "plan", "have lists of pairs", tuple(lists.shape))
    if bitmaps.dim() != 3 or tuple(bitmaps.shape[1:]) != (block_q, -(-block_k // 32)):
        fail(op, "plan", f"have bitmaps of shape (any, {block_q}, {-(-block_k // 32)})", tuple(bitmaps.shape))


def dense_plan(plan: PlanArguments, q_len: int, kv_len: int) -> Tensor:
    """The pairs that a plan of this many rows and columns shows."""
    rows, lists, bitmaps, block_q, block_k = plan
    return TilePlan(rows, lists, bitmaps, q_len, kv_len, block_q, block_k, visible_pairs=0, visited_tiles=0).dense()
