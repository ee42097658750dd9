"""Rows of K and V as codes of 8 bits, in Triton: every bit as `kv_quantize` of reference/kv_cache.py has it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdkernels._attention import SCALE_BYTES
from pdkernels.triton.blocking import ROUNDED

ROWS = 8
LARGEST_FLOAT = tl.constexpr(torch.finfo(torch.float32).max)
SMALLEST_NORMAL = tl.constexpr(torch.finfo(torch.float32).smallest_normal)
# The sum with it leaves no fraction: rounded to nearest even.
ROUNDER = tl.constexpr(1.5 * 2**23)


@triton.jit(do_not_specialize=["count", "tokens"])
def _quantize_kernel(
    x, codes, scales, count, tokens, heads, stride_b, stride_t, stride_h,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, SCALE_BYTES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    head, token = row % heads, row // heads
    at = token // tokens * stride_b + token % tokens * stride_t + head * stride_h
    mask = (row < count)[:, None] & (column < HEAD_DIM)[None, :]
    number = tl.load(x + at[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    magnitude = tl.abs(number)
    finite = tl.min((magnitude <= LARGEST_FLOAT).to(tl.int32), 1) != 0
    scale = tl.div_rn(tl.max(magnitude, 1), tl.full((ROWS,), 127.0, tl.float32))
    scale = tl.where(scale < SMALLEST_NORMAL, 0.0, scale)
    scale = tl.where(finite, scale, float("nan"))
    divisor = tl.where(scale > 0, scale, 1.0)[:, None] + tl.zeros((ROWS, WIDTH), tl.float32)
    code = (tl.div_rn(number, divisor) + ROUNDER) - ROUNDER
    code = tl.where((scale > 0)[:, None], code, 0.0).to(tl.int8)
    tl.store(codes + row[:, None] * (HEAD_DIM + SCALE_BYTES) + column[None, :], code, mask=mask)
    tl.store(scales + (row * (HEAD_DIM + SCALE_BYTES) + HEAD_DIM) // SCALE_BYTES, scale, mask=row < count)


def quantize(x: Tensor) -> Tensor:
    """``(batch, tokens, heads, head_dim + 4)`` int8 of `x` ``(batch, tokens, heads, head_dim)``."""
    batch, tokens, heads, head_dim = x.shape
    rows = torch.empty((batch, tokens, heads, head_dim + SCALE_BYTES), dtype=torch.int8, device=x.device)
    count = batch * tokens * heads
    if count > 0:
        _quantize_kernel[(triton.cdiv(count, ROWS),)](
            x, rows, rows.view(torch.float32), count, tokens, heads, *x.stride()[:3],
            HEAD_DIM=head_dim, WIDTH=triton.next_power_of_2(head_dim), ROWS=ROWS, SCALE_BYTES=SCALE_BYTES, **ROUNDED,
        )  # fmt: skip
    return rows
