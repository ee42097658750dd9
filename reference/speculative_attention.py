"""Attention of new tokens over a cached prefix and a masked tail: each sequence separately, with the whole score matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .block_sparse_attention import block_sparse_attention
from .kv_cache import kv_append_, kv_dequantize


def speculative_attention(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    tail_mask: Tensor,
    *,
    starts: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """``(out, lse)``: each new token attends to its sequence's whole prefix and to the new tokens in its row of the mask.

    Args:
        q: ``(batch, new, q_heads, head_dim)``.
        k_new, v_new: ``(batch, new, kv_heads, head_dim)``; query head ``h`` reads KV head ``h // (q_heads // kv_heads)``.
        k_cache, v_cache: ``(batch, slots, kv_heads, head_dim)``, or pages ``(pages, page_size, kv_heads, head_dim)``.
            K and V, new and cached, may be rows of an 8-bit cache (`kv_quantize`), ``head_dim + 4`` wide. They stand for the numbers
            of `kv_dequantize`, and the arithmetic is in float32.
        lengths: ``(batch,)`` int32 or int64. The cache past a length is not read.
        tail_mask: bool ``(new, new)`` or ``(batch, new, new)``, True where a new token attends to a new token.
        starts: ``(batch, 1)`` or ``(batch, new)``: the first position that a new token sees, where cached tokens are at
            ``0 .. length - 1`` and new token ``j`` at ``length + j``. None: 0.
        cu_seqlens: ``(batch + 1,)``: sequences are packed. Then q, k_new and v_new are ``(rows, heads, head_dim)``, those of
            sequence b from row ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]``; it takes as many rows and columns of the mask.
            `starts` may be ``(1, rows)``, and the log-sum-exp is ``(q_heads, rows)``.
        block_table: ``(batch, pages_per_sequence)`` int32 or int64; position ``p`` is slot ``p % page_size`` of page
            ``block_table[b, p // page_size]``. None: the cache is contiguous.
        scale: None means ``head_dim ** -0.5``.
        sinks: ``(q_heads,)``: another score of every row of a head, not scaled, whose value is zero. None: no head has one.
        softcap: scaled scores s become ``softcap * tanh(s / softcap)``; 0: they stay.

    Returns:
        ``out`` like q, and the natural log-sum-exp ``(batch, q_heads, new)``, in float32 for half precision. Rows that see
        nothing are zero, with a log-sum-exp of -inf.

    Example:
        >>> import torch
        >>> q, k, v = torch.ones(1, 2, 1, 4), torch.zeros(1, 2, 1, 4), torch.ones(1, 2, 1, 4)
        >>> cache, causal = torch.zeros(1, 8, 1, 4), torch.ones(2, 2, dtype=torch.bool).tril()
        >>> speculative_attention(q, k, v, cache, cache, torch.tensor([1]), causal)[0][0, :, 0, 0]  # of 2 rows, of 3
        tensor([0.5000, 0.6667])
    """
    heads = q.shape[-2]
    longest = tail_mask.shape[-1]
    masks = tail_mask.expand(len(lengths), longest, longest)
    out, lse = [], []
    for b, length in enumerate(lengths.tolist()):
        own = slice(None) if cu_seqlens is None else slice(int(cu_seqlens[b]), int(cu_seqlens[b + 1]))
        queries, keys, values = ((x[b] if cu_seqlens is None else x[own]) for x in (q, k_new, v_new))
        new = len(queries)
        if block_table is None:
            prefix = [cache[b, :length] for cache in (k_cache, v_cache)]
        else:
            positions = torch.arange(length, device=q.device)
            pages = block_table[b].to(torch.int64)[positions // k_cache.shape[1]]
            prefix = [cache[pages, positions % k_cache.shape[1]] for cache in (k_cache, v_cache)]
        k, v = (torch.cat([old, x]).unsqueeze(0) for old, x in zip(prefix, (keys, values)))
        if k.dtype == torch.int8:
            queries = queries.to(torch.promote_types(q.dtype, torch.float32))
            k, v = (kv_dequantize(x, queries.dtype) for x in (k, v))
        elif k.dtype == torch.float16 != q.dtype:
            k, v = k.to(q.dtype), v.to(q.dtype)
        mask = torch.cat([masks.new_ones(new, length), masks[b, :new, :new]], dim=1)
        if starts is not None:
            packed = cu_seqlens is not None and starts.shape == (1, len(q))
            first = starts[0, own] if packed else starts[b].expand(new)
            mask = mask & (torch.arange(length + new, device=q.device) >= first[:, None])
        rows, sums = block_sparse_attention(queries.unsqueeze(0), k, v, mask, scale, sinks, softcap)
        out.append(rows.to(q.dtype))
        lse.append(sums)
    if not out:
        shape = (heads, 0) if cu_seqlens is not None else (0, heads, q.shape[1])
        return torch.empty_like(q), q.new_empty(shape, dtype=torch.promote_types(q.dtype, torch.float32))
    if cu_seqlens is not None:
        return torch.cat(out, 1)[0], torch.cat(lse, 2)[0]
    return torch.cat(out), torch.cat(lse)


def speculative_attention_append_(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    tail_mask: Tensor,
    counts: Tensor | None = None,
    source_index: Tensor | None = None,
    *,
    starts: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """As above, and new token ``source_index[b, i]`` goes to position ``lengths[b] + i`` of the cache, for ``i < counts[b]``.

    Args:
        counts: ``(batch,)``; None: all of `source_index`.
        source_index: ``(batch, rows)``, entries from ``counts[b]`` on may be anything. None: all new tokens in order.

    Example:
        >>> import torch
        >>> k, cache, full = torch.tensor([5.0, 6, 7]).view(1, 3, 1, 1), torch.zeros(1, 4, 1, 1), torch.ones(3, 3, dtype=torch.bool)
        >>> last_two = torch.tensor([[1, 2]])
        >>> _ = speculative_attention_append_(k, k, k, cache, cache.clone(), torch.tensor([1]), full, None, last_two)
        >>> cache.flatten()
        tensor([0., 6., 7., 0.])
    """
    options: dict[str, Any] = {"starts": starts, "cu_seqlens": cu_seqlens, "block_table": block_table, "scale": scale}
    options |= {"sinks": sinks, "softcap": softcap}
    results = speculative_attention(q, k_new, v_new, k_cache, v_cache, lengths, tail_mask, **options)
    if cu_seqlens is not None:  # a row of its own for each token, and padding rows after them
        tokens = cu_seqlens.diff()
        counts = tokens if counts is None and source_index is None else counts
        rows = torch.arange(tail_mask.shape[-1], device=q.device)
        own = torch.where(rows < tokens[:, None], cu_seqlens[:-1, None] + rows, 0).to(torch.int64)
        k_new, v_new = (x[own] if len(x) else x.new_zeros((*own.shape, *x.shape[1:])) for x in (k_new, v_new))
    if source_index is not None and k_new.shape[1] > 0:
        columns = torch.arange(source_index.shape[1], device=q.device)
        counted = columns < (len(columns) if counts is None else counts[:, None])
        chosen = torch.where(counted, source_index, 0).to(torch.int64)
        sequences = torch.arange(len(lengths), device=q.device)[:, None]
        k_new, v_new = (x[sequences, chosen] for x in (k_new, v_new))
    kv_append_(k_cache, v_cache, k_new, v_new, lengths, counts, block_table)
    return results
