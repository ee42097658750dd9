"""The form in which a cache holds K and V: numbers as they are or in 16 bits, or rows of `pdkernels.kv_quantize`."""

from __future__ import annotations

import torch
from torch import Tensor

from pdkernels._attention import SCALE_BYTES, check_head_dim, halves
from pdkernels._validation import check_type
from pdkernels.ops.kv_cache import kv_quantize


def row_width(op: str, head_dim: int, dtype: torch.dtype) -> int:
    """Elements of a head of a row.

    >>> [row_width("cache", 64, dtype) for dtype in (torch.bfloat16, torch.int8)]
    [64, 68]
    """
    check_type(isinstance(dtype, torch.dtype), op, "dtype", "be a torch.dtype", repr(dtype))
    if dtype != torch.int8:
        return head_dim
    check_head_dim(op, head_dim)
    return head_dim + SCALE_BYTES


def stored(dtype: torch.dtype, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """New rows of K and V in the form in which a cache of this dtype holds them, and attention to it takes them."""
    if halves(k.dtype, dtype):
        return k.to(dtype), v.to(dtype)
    if dtype != torch.int8 or k.dtype == torch.int8:
        return k, v
    return kv_quantize(k), kv_quantize(v)


def narrowed(rows: Tensor, kv_heads: int, width: int) -> Tensor:
    """The part of stored rows ``(.., heads, size)`` that a layer with other heads uses, of `width` elements each.

    >>> narrowed(torch.zeros(1, 8, 4, 16), 1, 32).shape
    torch.Size([1, 8, 1, 32])
    """
    if rows.shape[-2:] == (kv_heads, width):
        return rows
    narrow: Tensor = rows.flatten(-2)[..., : kv_heads * width].unflatten(-1, (kv_heads, width))
    return narrow
