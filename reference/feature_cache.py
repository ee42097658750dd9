"""Steps that recompute only the rows that changed, as plain PyTorch: pick them by the change of their values, read and write them.

Source: Liu et al., "dLLM-Cache: Accelerating Diffusion Large Language Models with Adaptive Caching", section 3 (V-verify), in the
order of operations of the published code. Similarities are computed in at least float32, not in the model's dtype: bfloat16 has
so few numbers just below 1 that its choice is little better than chance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kv_cache import _fail, _Slots

UPDATES = ("all", "selected", "none")


def select_stale_rows_(
    v: Tensor,
    v_cache: Tensor,
    starts: Tensor,
    max_selected: int,
    quota: Tensor | None = None,
    counts: Tensor | None = None,
    update: str = "all",
    block_table: Tensor | None = None,
) -> Tensor:
    """The rows of `v` least similar to their cached rows, by cosine; shapes as in ``pdkernels.select_stale_rows_``.

    >>> cached = torch.tensor([1.0, 0.0]).expand(1, 3, 1, 2).clone()
    >>> select_stale_rows_(torch.tensor([[[[2.0, 0.0]], [[0.0, 1.0]], [[1.0, 1.0]]]]), cached, torch.tensor([0]), 2)
    tensor([[1, 2]])
    """
    op = "select_stale_rows_"
    batch, rows = v.shape[:2]
    store = _Slots(op, v_cache, block_table)
    targets, limits = [], []
    for b, start in enumerate(starts.tolist()):
        number = rows if counts is None else int(counts[b])
        limit = max_selected if quota is None else int(quota[b])
        store.check(b, start, number, rows)
        if limit < 0:
            _fail(op, "quota", "be at least 0", limit, b)
        targets.append([store(b, start + i) for i in range(number)])
        limits.append(min(limit, max_selected))

    index = torch.full((batch, max_selected), -1, device=v.device)
    for b, slots in enumerate(targets):
        if not slots:
            continue
        similarity = _similarity(v[b, : len(slots)], torch.stack([v_cache[slot] for slot in slots]))
        order = similarity.nan_to_num(nan=-torch.inf).sort(stable=True).indices
        chosen = order[: limits[b]].sort().values
        index[b, : len(chosen)] = chosen
        for i in range(len(slots)) if update == "all" else chosen.tolist() if update == "selected" else ():
            v_cache[slots[i]] = v[b, i]
    return index


def _similarity(a: Tensor, b: Tensor) -> Tensor:
    """The cosine of each row, in float32 or float64; NaN where squares are not finite, infinite for rows that did not move and
    are not zero."""
    a, b = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (a, b))
    # torch's float32 root is not correctly rounded.
    length, other = (_sum(x * x).double().sqrt().to(x.dtype) for x in (a, b))
    lengths = length * other
    still = (a == b).flatten(1).all(1) & (lengths > 1e-8)
    cosine = torch.where(still, torch.inf, _sum(a * b) / lengths.clamp(min=1e-8))
    return torch.where(lengths.isfinite(), cosine, torch.nan)


def _sum(x: Tensor) -> Tensor:
    """The sum of each row, in the order of the kernels: component i of 128 of a head goes to accumulator i % 16; those of all
    pieces are added one by one, and the row's accumulators pairwise by halves."""
    numbers = x.new_zeros(x.shape[0], 16)
    for piece in (piece for head in x.unbind(1) for piece in head.split(128, dim=1) if piece.shape[1]):
        own = torch.zeros_like(numbers)
        for part in torch.nn.functional.pad(piece, (0, -piece.shape[1] % 16)).split(16, dim=1):
            own = own + part
        numbers = numbers + own
    for half in (8, 4, 2, 1):
        numbers = numbers[:, :half] + numbers[:, half:]
    return numbers[:, 0]


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """``x[b, index[b, j]]``, and zeros for an index of -1.

    >>> gather_rows(torch.tensor([[[1, 2], [3, 4]]]), torch.tensor([[1, -1]]))
    tensor([[[3, 4],
             [0, 0]]])
    """
    _check_index("gather_rows", x, index)
    rows = torch.arange(x.shape[0], device=x.device)[:, None]
    gathered = x[rows, index.clamp(min=0)] if x.shape[1] else x.new_zeros(*index.shape, *x.shape[2:])
    return torch.where((index < 0).view(*index.shape, *[1] * (x.dim() - 2)), gathered.new_zeros(()), gathered)


def add_cached_rows_(x: Tensor, cached: Tensor, rows: Tensor | None = None, index: Tensor | None = None) -> Tensor:
    """``x + cached`` after ``cached[b, index[b, j]] = rows[b, j]``, -1 skipped.

    >>> cached = torch.tensor([[[1.0], [2.0]]])
    >>> add_cached_rows_(torch.tensor([[[10.0], [20.0]]]), cached, torch.tensor([[[5.0]]]), torch.tensor([[1]]))
    tensor([[[11.],
             [25.]]])
    """
    if index is not None:
        assert rows is not None
        _check_index("add_cached_rows_", x, index)
        for b, numbers in enumerate(index.tolist()):
            for number, following in zip(numbers, numbers[1:]):
                if following >= 0 and not 0 <= number < following:
                    _fail("add_cached_rows_", "index", "ascend, with -1 at the end", following, b)
        for b, j in (index >= 0).nonzero().tolist():
            cached[b, index[b, j]] = rows[b, j]
    return x + cached


def _check_index(op: str, x: Tensor, index: Tensor) -> None:
    for b, numbers in enumerate(index.tolist()):
        for number in numbers:
            if not -1 <= number < x.shape[1]:
                _fail(op, "index", f"be in [-1, {x.shape[1] - 1}]", number, b)
