"""What the attention ops check alike."""

from __future__ import annotations

import torch
from torch import Tensor

from pdkernels._validation import check, check_type, fail, message

LARGEST = torch.finfo(torch.float32).max


def takes_head_dim(head_dim: int) -> bool:
    """Whether the kernels are made for heads of that size.

    >>> [size for size in (8, 16, 20, 96, 256, 264) if takes_head_dim(size)]
    [16, 96, 256]
    """
    return head_dim % 8 == 0 and 16 <= head_dim <= 256


def given_scale(op: str, scale: float | None, q: Tensor) -> float:
    """`scale`, or what None stands for. Kernels multiply in float32, where a larger one is infinite and makes NaN of a zero."""
    if scale is None:
        return q.shape[-1] ** -0.5 if q.dim() > 0 and q.shape[-1] > 0 else 1.0
    check_type(isinstance(scale, (int, float)), op, "scale", "be a number", type(scale).__name__)
    check(-LARGEST <= scale <= LARGEST, op, "scale", "be finite in float32", scale)
    return scale


def check_plan(
    op: str,
    q: Tensor,
    kv_len: int,
    lists: tuple[Tensor, ...],
    orders: tuple[Tensor, ...],
    bitmaps: Tensor,
    block_q: int,
    block_k: int,
) -> None:
    """The tensors of a `TilePlan` of the rows of `q` ``(batch, q_len, heads, head_dim)`` and `kv_len` columns: all but values.

    Args:
        op: whose arguments they are.
        lists: kv_offsets, kv_tiles and kv_bitmaps; then, for ops that read them, q_offsets, q_tiles and q_bitmaps.
        orders: q_order and k_order, or nothing.
    """
    for part in (*lists, *orders, bitmaps):
        if part.device != q.device:
            fail(op, "plan", f"be on {q.device} like q", part.device, f"Move it with plan.to({str(q.device)!r}).")
        if part.dtype != torch.int32 or not part.is_contiguous():
            raise TypeError(
                message(op, "plan", "hold contiguous int32 tensors", f"{part.dtype} with strides {part.stride()}")
            )
    for name, size in (("block_q", block_q), ("block_k", block_k)):
        if size % 16 != 0 or size < 16 or size > 1024:
            fail(op, name, "be a multiple of 16 in [16, 1024]", size)
    stacked = tuple(lists[0].shape[:-1])
    if len(stacked) == 1 and stacked[0] != q.shape[0]:
        remedy = "Stack one plan for each sample, or pass a single plan that all samples share."
        fail(op, "plan", f"have {q.shape[0]} samples like q", stacked[0], remedy)
    rows, columns = -(-q.shape[1] // block_q), -(-kv_len // block_k)
    for part, size in (*zip(lists[::3], (rows + 1, columns + 1)), *zip(orders, (rows, columns))):
        if tuple(part.shape) != (*stacked, size) or len(stacked) > 1:
            wanted = f"have {rows} x {columns} tiles of {block_q} x {block_k} in all its offsets and orders"
            fail(op, "plan", wanted, tuple(part.shape))
    for part in (*lists[1::3], *lists[2::3]):
        if tuple(part.shape) != (lists[1].numel(),):
            fail(op, "plan", "have as many entries in all its lists", tuple(part.shape))
    if bitmaps.dim() != 3 or tuple(bitmaps.shape[1:]) != (block_q, -(-block_k // 32)):
        fail(op, "plan", f"have bitmaps of shape (any, {block_q}, {-(-block_k // 32)})", tuple(bitmaps.shape))
