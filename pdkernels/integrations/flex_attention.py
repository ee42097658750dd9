"""FlexAttention's function on our kernels, and conversion of masks and plans to and from its `BlockMask`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from pdkernels._attention import autocasted
from pdkernels._validation import check, check_type, message
from pdkernels.masks import SegmentMask, TilePlan, full
from pdkernels.ops import block_sparse_attention

__all__ = ["flex_attention", "from_block_mask", "to_block_mask"]


def to_block_mask(
    mask: SegmentMask, block_size: int | tuple[int, int] = 128, device: torch.device | str = "cpu"
) -> BlockMask:
    """The same mask for FlexAttention, without its pass over all pairs.

    Args:
        mask: any segment mask.
        block_size: tile size, or ``(rows, columns)``; multiples of 16.
        device: device of its tensors.

    Returns:
        What ``create_block_mask(mask.mask_mod(device), None, None, *mask.shape, BLOCK_SIZE=block_size)`` returns:
        ragged last tiles count as partial, since FlexAttention requires all pairs of a full tile.

    Raises:
        ValueError: other tile sizes, a mask without rows.
        TypeError: not a segment mask.

    Example:
        >>> import pdkernels as pd
        >>> from pdkernels.integrations.flex_attention import to_block_mask
        >>> block_mask = to_block_mask(pd.masks.causal(256), 64)
        >>> block_mask.kv_num_blocks.tolist(), block_mask.full_kv_num_blocks.tolist()
        ([[[1, 1, 1, 1]]], [[[0, 1, 2, 3]]])
    """
    op = "integrations.to_block_mask"
    check_type(isinstance(mask, SegmentMask), op, "mask", "be a SegmentMask", type(mask).__name__)
    check(mask.q_len > 0, op, "mask", "have at least one row, as FlexAttention requires", mask.shape)
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
    """A tile plan from any `BlockMask`. Its `mask_mod` is evaluated only on the pairs of partial tiles.

    Args:
        block_mask: with one head, or none, and tiles that are multiples of 16. With a batch the plan is stacked.

    Raises:
        ValueError: several heads, other tiles.
        TypeError: not a `BlockMask`.

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


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: BlockMask | SegmentMask | TilePlan | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """`block_sparse_attention` with the arguments, layouts and results of
    ``torch.nn.attention.flex_attention.flex_attention``.

    Args:
        query: ``(batch, q_heads, q_len, head_dim)``, float32, float16 or bfloat16; head_dim a multiple of 8 in ``[16,
            512]``.
        key, value: ``(batch, kv_heads, kv_len, head_dim)``, or with a batch of 1.
        score_mod: must be None: the kernels only scale and mask scores.
        block_mask: a `BlockMask` with one head, a mask or plan of ours; None: every pair. The plan of a `BlockMask` is
            made in the first call (see `from_block_mask`) and cached as long as the mask lives; replacing or writing
            tensors of the mask rebuilds it, changing tensors that only its `mask_mod` reads does not.
        scale: of the scores; None: ``head_dim ** -0.5``.
        enable_gqa: allows kv_heads that divide q_heads.
        return_lse: also return the log-sum-exp.
        kernel_options: must be None: they tune torch's kernels.
        return_aux: ``AuxRequest(lse=True)`` is the newer way to request it.

    Returns:
        ``out``, shape and dtype of query; ``(out, lse)`` with `return_lse`, ``(out, AuxOutput)`` with `return_aux`. The
        log-sum-exp is ``(batch, q_heads, q_len)`` float32, natural. Rows that see nothing are zero, with a log-sum-exp
        of -inf.

    Raises:
        NotImplementedError: a score_mod, kernel options, maximal scores.
        ValueError, TypeError: as in `block_sparse_attention` and `from_block_mask`.

    Under ``torch.compile`` pass a plan: making one from a `BlockMask` breaks the graph.

    Example:
        >>> import torch
        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> from pdkernels.integrations.flex_attention import flex_attention
        >>> block_mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 100, 100, device="cpu")
        >>> q, k, v = (torch.randn(2, heads, 100, 32) for heads in (4, 2, 2))
        >>> flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True).shape
        torch.Size([2, 4, 100, 32])
    """
    op = "integrations.flex_attention"
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_type(isinstance(tensor, Tensor), op, name, "be a tensor", type(tensor).__name__)
        check(tensor.dim() == 4, op, name, "have shape (batch, heads, length, head_dim)", tuple(tensor.shape))
    fold_remedy, omit_remedy = "Fold it into query, key or the mask, or call torch's flex_attention.", "Leave them out."
    for name, given, remedy in (("score_mod", score_mod, fold_remedy), ("kernel_options", kernel_options, omit_remedy)):
        if given is not None:
            actual = getattr(given, "__name__", type(given).__name__)
            raise NotImplementedError(message(op, name, "be None", actual, remedy))
    if return_aux is not None and return_aux.max_scores:
        raise NotImplementedError(message(op, "return_aux", "not ask for the maximal scores", "max_scores=True"))
    check(not (return_lse and return_aux is not None), op, "return_lse", "be False with return_aux", return_lse)
    q_heads, kv_heads = query.shape[1], key.shape[1]
    check(
        enable_gqa or q_heads == kv_heads,
        op,
        "key",
        f"have the {q_heads} heads of query",
        kv_heads,
        "Or give enable_gqa=True.",
    )
    query, key, value = autocasted(query, key, value)
    if key.shape[0] == 1:
        key, value = (x.expand(query.shape[0], *x.shape[1:]) for x in (key, value))
    plan = block_mask
    if plan is None:
        plan = full(query.shape[2], key.shape[2])
    if isinstance(plan, SegmentMask):
        plan = plan.plan(device=query.device)
    elif not isinstance(plan, TilePlan):
        plan = _kept_plan(plan)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, lse = block_sparse_attention(q, k, v, plan, scale=scale, return_lse=True)
    out = out.transpose(1, 2)
    if return_aux is not None:
        return out, AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


_plans: WeakKeyDictionary[BlockMask, tuple[list[tuple[int, int]], TilePlan]] = WeakKeyDictionary()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _kept_plan(block_mask: BlockMask) -> TilePlan:
    """The plan of a `BlockMask`, made once while the mask's tensors do not change."""
    check_type(
        isinstance(block_mask, BlockMask),
        "integrations.flex_attention",
        "block_mask",
        "be a BlockMask",
        type(block_mask).__name__,
    )
    tensors = (
        getattr(block_mask, f"{kind}_{tensor}") for kind in ("kv", "full_kv") for tensor in ("num_blocks", "indices")
    )
    state = [(id(tensor), 0 if tensor is None or tensor.is_inference() else tensor._version) for tensor in tensors]
    state.append((id(block_mask.mask_mod), 0))
    cached = _plans.get(block_mask)
    if cached is None or cached[0] != state:
        cached = _plans[block_mask] = state, from_block_mask(block_mask)
    return cached[1]


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
    # Indices past the lengths are clamped: a mask_mod may index tables with them.
    visible = block_mask.mask_mod(b, h, q.clamp(max=q_len - 1), k.clamp(max=kv_len - 1)).expand(
        len(rows), block_q, block_k
    )
    return TilePlan.from_tiles(full, (rows, columns), visible & (q < q_len) & (k < kv_len), q_len, kv_len)


def _tiles(counts: Tensor, indices: Tensor, batch: int, q_tiles: int, kv_tiles: int) -> Tensor:
    """``(q_tiles, kv_tiles)`` bool from counts and padded lists."""
    counts, indices = counts[min(batch, counts.shape[0] - 1), 0], indices[min(batch, indices.shape[0] - 1), 0]
    in_list = torch.arange(indices.shape[-1], device=counts.device) < counts[:, None]
    tiles = torch.zeros(q_tiles, kv_tiles + 1, dtype=torch.bool, device=counts.device)
    tiles.scatter_(1, torch.where(in_list, indices, kv_tiles).to(torch.int64), in_list)
    return tiles[:, :kv_tiles]
