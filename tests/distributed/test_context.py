"""Attention whose rows are split over ranks: results and gradients of one process, in both forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import pdkernels as pd
from pdkernels.distributed import context_parallel_attention, count_communication, slice_context
from tests.distributed.ranks import COUNTS, FOUR
from tests.support.errors import refused

MASKS: dict[str, Any] = {
    "causal": lambda: pd.masks.causal(300),
    "noise_aware": lambda: pd.masks.noise_aware_causal(prompt_len=30, block_size=16, num_blocks=8),
    "dual_stream": lambda: pd.masks.dual_stream(130, 16),
    # Rows without visible keys.
    "packed": lambda: pd.masks.pack([pd.masks.causal(150), pd.masks.full(60)], length=260),
}


def tensors(mask: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = [(2, mask.q_len, heads, 32) for heads in (4, 2, 2, 4)]
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def attended(group: Any, name: str, exchange: Any, dtype: torch.dtype, pieces: int) -> list[torch.Tensor]:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    slices = slice_context(MASKS[name](), ranks, block_q=16, block_k=32, pieces=pieces)
    q, k, v, grad = (slices.take(x, rank).clone() for x in tensors(slices.mask, dtype))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = context_parallel_attention(*leaves, slices, group, exchange=exchange)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves)]  # type: ignore[misc]


@pytest.mark.parametrize("exchange", ["gather", "ring"])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(
    "count, pieces, dtype",
    [(2, 2, torch.float32), pytest.param(4, 3, torch.float32, marks=FOUR), (2, 1, torch.bfloat16)],
)
def test_results_and_gradients(ranks, name: str, exchange: str, count: int, pieces: int, dtype: torch.dtype) -> None:
    mask = MASKS[name]()
    slices = slice_context(mask, count, block_q=16, block_k=32, pieces=pieces)
    *leaves, grad = tensors(mask, dtype)
    leaves = [x.requires_grad_() for x in leaves]
    out = pd.block_sparse_attention(*leaves, mask.plan(16, 32))
    out.backward(grad)
    found = ranks.run(count, attended, name, exchange, dtype, pieces)
    expected = [out.detach(), *(x.grad for x in leaves)]
    bound = 2e-6 if dtype == torch.float32 else 1.6e-2
    for what, whole, *parts in zip(("out", "dq", "dk", "dv"), expected, *found):
        joined = slices.join(parts)
        assert joined.dtype == dtype
        difference = (joined - whole).abs().max() / whole.abs().max()
        assert difference <= bound, (what, difference)


def test_rows_are_dealt_by_tiles() -> None:
    """A causal text in halves would give the second rank three quarters of the work."""
    for ranks in (2, 4, 8):
        slices = slice_context(pd.masks.causal(4096), ranks, block_q=64, block_k=64)
        assert slices.balance <= 1.02 and max(slices.lengths) - min(slices.lengths) <= 64
        assert sum(slices.tiles) == slices.mask.plan(64, 64).visited_tiles
    for mask in (pd.masks.dual_stream(1000, 32), pd.masks.noise_aware_causal(100, 32, 40)):
        rough, fine = (slice_context(mask, 4, block_q=32, block_k=32, pieces=pieces) for pieces in (1, 4))
        assert fine.balance <= 1.05 < 1.3 <= rough.balance
        x = torch.arange(mask.q_len)
        assert torch.equal(fine.join([fine.take(x, rank, 0) for rank in range(4)], 0), x)
        assert torch.equal(torch.cat([fine.index(rank) for rank in range(4)]).sort().values, x)


def traffic(group: Any, exchange: Any) -> tuple[int, int]:
    slices = slice_context(pd.masks.causal(256), dist.get_world_size(group), block_q=32, block_k=32)
    q, k, v, _ = (slices.take(x, dist.get_rank(group)) for x in tensors(slices.mask, torch.float32))
    with count_communication() as counted:
        context_parallel_attention(q, k, v, slices, group, exchange=exchange)
    return counted.calls, counted.bytes


@pytest.mark.parametrize("count", COUNTS)
def test_each_key_is_received_once(ranks, count: int) -> None:
    keys = 2 * 2 * (256 - 256 // count) * 2 * 32 * 4  # of the other ranks
    assert ranks.run(count, traffic, "gather") == [(1, keys)] * count
    assert ranks.run(count, traffic, "ring") == [(count - 1, keys)] * count


def test_refusals(ranks) -> None:
    with refused("distributed.slice_context: mask must be square, got 2 x 4"):
        slice_context(pd.masks.causal(4)[:2], 1)
    with refused("distributed.slice_context: mask must have at least 4 tiles of 16 rows, got 3"):
        slice_context(pd.masks.causal(48), 2, block_q=16)
    with refused("TypeError: distributed.slice_context: mask must be a SegmentMask, got Tensor"):
        slice_context(torch.ones(4, 4), 2)  # type: ignore[arg-type]
    assert ranks.run(2, misfits) == [True, True]


def misfits(group: Any) -> bool:
    slices = slice_context(pd.masks.causal(64), 2, block_q=16, block_k=16)
    x = torch.zeros(1, 31, 2, 16)
    with refused("distributed.context_parallel_attention: q must have 32 rows in dimension 1"):
        context_parallel_attention(x, x, x, slices, group)
    with refused("distributed.context_parallel_attention: slices must be for 2 ranks, got 1"):
        context_parallel_attention(x, x, x, slice_context(slices.mask, 1, block_q=16), group)
    with refused("distributed.context_parallel_attention: exchange must be"):
        context_parallel_attention(x, x, x, slices, group, exchange="all")  # type: ignore[arg-type]
    return True
