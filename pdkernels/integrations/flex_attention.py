"""Masks and plans to and from FlexAttention's `BlockMask`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from pdkernels._validation import check, check_type
from pdkernels.masks import SegmentMask, TilePlan


def to_block_mask(
    mask: SegmentMask, block_size: int | tuple[int, int] = 128, device: torch.device | str = "cpu"
) -> BlockMask:
    """The same mask for FlexAttention, without its pass over all pairs.

    Args:
        mask: any segment mask.
        block_size: tile size, or ``(rows, columns)``; multiples of 16.
        device: where its tensors lie.

    Returns:
        What ``create_block_mask(mask.mask_mod(device), None, None, *mask.shape, BLOCK_SIZE=block_size)`` returns: ragged last
        tiles count as partial, since FlexAttention asks a full tile for all its pairs.

    Raises:
        ValueError: other tile sizes, a mask without rows.
        TypeError: no segment mask.

    Example:
        >>> import pdkernels as pd
        >>> from pdkernels.integrations.flex_attention import to_block_mask
        >>> block_mask = to_block_mask(pd.masks.causal(256), 64)
        >>> block_mask.kv_num_blocks.tolist(), block_mask.full_kv_num_blocks.tolist()
        ([[[1, 1, 1, 1]]], [[[0, 1, 2, 3]]])
    """
    op = "integrations.to_block_mask"
    check_type(isinstance(mask, SegmentMask), op, "mask", "be a SegmentMask", type(mask).__name__)
    check(mask.q_len > 0, op, "mask", "have at least one row, as FlexAttention wants", mask.shape)
    block_q, block_k = block_size if isinstance(block_size, Sequence) else (block_size, block_size)
    lists = mask.plan(block_q, block_k).block_lists(ragged_is_partial=True)
    partial_count, partial, full_count, full = (tensor[None, None].to(device) for tensor in lists)
    return BlockMask.from_kv_blocks(
        partial_count,
        partial,
        full_count,
        full,
        BLOCK_SIZE=(block_q, block_k),
        mask_mod=mask.mask_mod(device),
        seq_lengths=mask.shape,
    )


def from_block_mask(block_mask: BlockMask) -> TilePlan:
    """A tile plan out of any `BlockMask`. Its `mask_mod` is asked about the pairs of partial tiles only.

    Args:
        block_mask: with one head, or none, and tiles that are multiples of 16. With a batch the plan is stacked.

    Raises:
        ValueError: several heads, other tiles.
        TypeError: no `BlockMask`.

    Example:
        >>> import pdkernels as pd
        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> from pdkernels.integrations.flex_attention import from_block_mask
        >>> block_mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cpu", BLOCK_SIZE=64)
        >>> from_block_mask(block_mask).lists.tolist() == pd.masks.causal(256).plan(64, 64).lists.tolist()
        True
    """
    op = "integrations.from_block_mask"
    check_type(isinstance(block_mask, BlockMask), op, "block_mask", "be a BlockMask", type(block_mask).__name__)
    for size in block_mask.BLOCK_SIZE:
        check(
            size % 16 == 0 and 16 <= size <= 1024,
            op,
            "BLOCK_SIZE",
            "be multiples of 16 in [16, 1024]",
            block_mask.BLOCK_SIZE,
        )
    batch, heads = block_mask.kv_num_blocks.shape[:2]
    check(
        heads == 1,
        op,
        "block_mask",
        "have one head",
        heads,
        "Create it with H=None: tile plans are shared by all heads.",
    )
    plans = [_sample(block_mask, b) for b in range(batch)]
    return plans[0] if batch == 1 else TilePlan.stack(plans)


def _sample(block_mask: BlockMask, batch: int) -> TilePlan:
    (q_len, kv_len), (block_q, block_k) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    device = block_mask.kv_num_blocks.device
    q_tiles, kv_tiles = -(-q_len // block_q), -(-kv_len // block_k)
    partial = _tiles(block_mask.kv_num_blocks, block_mask.kv_indices, batch, q_tiles, kv_tiles)
    full = torch.zeros_like(partial)
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = _tiles(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, batch, q_tiles, kv_tiles)
    rows, columns = partial.nonzero(as_tuple=True)
    q = (rows[:, None] * block_q + torch.arange(block_q, device=device))[:, :, None]
    k = (columns[:, None] * block_k + torch.arange(block_k, device=device))[:, None, :]
    b, h = torch.tensor(batch, device=device), torch.tensor(0, device=device)
    # Indices outside the lengths are held inside: a mask_mod may look up tables by them.
    visible = block_mask.mask_mod(b, h, q.clamp(max=q_len - 1), k.clamp(max=kv_len - 1)).expand(
        len(rows), block_q, block_k
    )
    return TilePlan.from_tiles(full, (rows, columns), visible & (q < q_len) & (k < kv_len), q_len, kv_len)


def _tiles(counts: Tensor, indices: Tensor, batch: int, q_tiles: int, kv_tiles: int) -> Tensor:
    """``(q_tiles, kv_tiles)`` bool out of counts and padded lists."""
    counts, indices = counts[min(batch, counts.shape[0] - 1), 0], indices[min(batch, indices.shape[0] - 1), 0]
    listed = torch.arange(indices.shape[-1], device=counts.device) < counts[:, None]
    tiles = torch.zeros(q_tiles, kv_tiles + 1, dtype=torch.bool, device=counts.device)
    tiles.scatter_(1, torch.where(listed, indices, kv_tiles).to(torch.int64), listed)
    return tiles[:, :kv_tiles]
