"""Logits whose vocabulary is sharded across ranks, and operations that do not gather them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from pdkernels._validation import check_number, message
from pdkernels.distributed.divergence import divergence
from pdkernels.ops import LogitDivergence, logit_divergence, token_statistics
from pdkernels.ops.collectives import gathered
from pdkernels.ops.vocabulary import VocabularyShard

_T = torch.Tensor


def _getters(*names: str) -> set[Any]:
    return {getattr(_T, name).__get__ for name in names}


# Properties that need no values.
_FACTS = _getters("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_meta", "is_cpu")
_FACTS |= {_T.dim, _T.size, _T.numel, _T.is_floating_point, _T.__len__, _T.element_size, torch.is_floating_point}
# Elementwise, and reorderings of rows.
_EACH = {
    _T.double,
    _T.float,
    _T.to,
    _T.clone,
    _T.contiguous,
    _T.detach,
    _T.exp,
    _T.log,
    _T.neg,
    _T.isnan,
    _T.isfinite,
    _T.clamp,
}
_EACH |= {_T.add, _T.sub, _T.mul, _T.div, _T.__add__, _T.__sub__, _T.__mul__, _T.__truediv__, _T.__radd__, _T.__rsub__}
_EACH |= {
    _T.__rmul__,
    _T.__lt__,
    _T.__gt__,
    _T.__le__,
    _T.__ge__,
    _T.__eq__,
    _T.__ne__,
    _T.lt,
    _T.gt,
    _T.le,
    _T.ge,
    _T.eq,
    _T.ne,
}
_EACH |= {_T.masked_fill, torch.where, _T.where, _T.__neg__, _T.__and__, _T.__or__, _T.__invert__}


class ShardedLogits(torch.Tensor):
    """Logits ``(..., vocab_size)`` of which this rank holds a slice; the output of models from `parallelize`.

    Token statistics, divergences, sampling, argmax, single logits, top-k, log-sum-exp and softmax need a few numbers
    per row from the other ranks; arithmetic needs none. Everything else gathers all logits (`full_tensor`). All ranks
    must do the same operations. In-place changes are limited to whole columns: ``logits[..., token] = value``.
    """

    local: Tensor
    """``(..., width)``: the logits of the rank's ids."""
    shard: VocabularyShard

    def __new__(cls, local: Tensor, shard: VocabularyShard, vocab_size: int) -> ShardedLogits:
        shape = (*local.shape[:-1], vocab_size)
        wrapper: Any = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        wrapper.local, wrapper.shard = local, shard
        return cast(ShardedLogits, wrapper)

    def full_tensor(self) -> Tensor:
        """All logits, on every rank."""
        # Slices are as wide as the first one, except on the last rank.
        with torch._C.DisableTorchFunctionSubclass():
            size, ranks = self.shape[-1], torch.distributed.get_world_size(self.shard.group)
        widest = -(-size // (4 * ranks)) * 4
        padded = torch.nn.functional.pad(self.local, (0, widest - self.shard.width))
        shards = gathered(padded.view(torch.uint8) if padded.dtype == torch.bool else padded, self.shard.group)
        logits = torch.cat(list(shards.unbind(0)), -1)[..., :size]
        return logits.bool() if padded.dtype == torch.bool else logits

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            first, width, shape = self.shard.first_id, self.shard.width, tuple(self.shape)
        return f"ShardedLogits{shape}, here {first} .. {first + width - 1}"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _EACH:
            return _each(func, args, kwargs)
        rule = _RULES.get(func)
        if rule is not None and isinstance(args[0], ShardedLogits):
            answer = rule(*args, **kwargs)
            if answer is not None:
                return answer
        name = getattr(func, "__name__", str(func))
        # `x.add_` and the like would change a copy.
        if (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__set__") or "out" in kwargs:
            remedy = "Change .full_tensor(), which is a copy."
            raise NotImplementedError(message("distributed", "logits", "not be changed by " + name, "a slice", remedy))
        args, kwargs = torch.utils._pytree.tree_map_only(ShardedLogits, ShardedLogits.full_tensor, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = torch.utils._pytree.tree_map_only(ShardedLogits, ShardedLogits.full_tensor, (args, kwargs or {}))
        return func(*args, **kwargs)


def _each(func: Any, args: Any, kwargs: Any) -> Any:
    """An elementwise function on the rank's own slice; tensors as wide as the vocabulary are sliced too."""
    leaves, tree = torch.utils._pytree.tree_flatten((args, kwargs))
    like = next(x for x in leaves if isinstance(x, ShardedLogits))
    shard, size = like.shard, _width(like)

    def mine(x: Any) -> Any:
        if isinstance(x, ShardedLogits):
            return x.local
        if isinstance(x, Tensor) and x.dim() and size > 1 and x.shape[-1] == size:
            return x[..., shard.first_id : shard.first_id + shard.width]
        return x

    args, kwargs = torch.utils._pytree.tree_unflatten([mine(x) for x in leaves], tree)
    return ShardedLogits(func(*args, **kwargs), shard, size)


def _width(x: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return x.shape[-1]


def _last(x: ShardedLogits, dim: Any) -> bool:
    return type(dim) is int and dim in (-1, x.local.dim() - 1)


def _shaped(x: Tensor, keepdim: bool) -> Tensor:
    return x.unsqueeze(-1) if keepdim else x


def _argmax(x: ShardedLogits, dim: Any = None, keepdim: bool = False) -> Tensor | None:
    if not _last(x, dim):
        return None
    best = x.local.argmax(-1, keepdim=True)
    pair = torch.stack((x.local.gather(-1, best)[..., 0].double(), (best[..., 0] + x.shard.first_id).double()), -1)
    values, ids = gathered(pair, x.shard.group).unbind(-1)
    # The first on ties, as in all ops; NaN is the largest.
    return _shaped(ids.gather(0, values.argmax(0, keepdim=True))[0].long(), keepdim)


def _amax(x: ShardedLogits, dim: Any = (), keepdim: bool = False) -> Tensor | None:
    return _shaped(gathered(x.local.amax(-1), x.shard.group).amax(0), keepdim) if _last(x, dim) else None


def _logsumexp(x: ShardedLogits, dim: Any = None, keepdim: bool = False) -> Tensor | None:
    if not _last(x, dim):
        return None
    return _shaped(gathered(x.local.logsumexp(-1), x.shard.group).logsumexp(0), keepdim)


def _softmax(x: ShardedLogits, dim: Any = None, dtype: torch.dtype | None = None, **options: Any) -> Any:
    if not _last(x, dim):
        return None
    local = x.local if dtype is None else x.local.to(dtype)
    # As in softmax: a row of only -inf becomes NaN.
    largest = gathered(local.amax(-1), x.shard.group).amax(0)[..., None]
    terms = (local - largest).exp()
    total = gathered(terms.sum(-1), x.shard.group).sum(0)[..., None]
    return ShardedLogits(terms / total, x.shard, _width(x))


def _gather(x: ShardedLogits, dim: Any, index: Tensor, **options: Any) -> Tensor | None:
    if not _last(x, dim):
        return None
    column = index - x.shard.first_id
    here = (column >= 0) & (column < x.shard.width)
    values = x.local.gather(-1, column.clamp(0, x.shard.width - 1))
    values = torch.where(here, values, torch.zeros_like(values))
    by_rank = gathered(values, x.shard.group)
    # The owner's value is taken instead of a sum, in which zeros of other ranks would turn an infinity into NaN.
    widest = -(-_width(x) // (4 * len(by_rank))) * 4
    return by_rank.gather(0, (index // widest)[None])[0]


def _topk(x: ShardedLogits, k: int, dim: Any = -1, largest: bool = True, sorted: bool = True) -> Any:
    if not _last(x, dim) or not largest or k > _width(x):
        return None
    local = x.local.topk(min(k, x.shard.width), -1)
    spare = k - local.values.shape[-1]
    values = torch.nn.functional.pad(local.values.double(), (0, spare), value=-torch.inf)
    ids = torch.nn.functional.pad((local.indices + x.shard.first_id).double(), (0, spare), value=-1.0)
    candidates = gathered(torch.stack((values, ids), -1), x.shard.group)
    candidates = candidates.movedim(0, -3).flatten(-3, -2)
    values, ids = candidates.unbind(-1)
    order = values.sort(dim=-1, descending=True, stable=True).indices
    order = order.gather(-1, (ids.gather(-1, order) < 0).to(torch.int8).sort(dim=-1, stable=True).indices)[..., :k]
    return torch.return_types.topk((values.gather(-1, order).to(x.local.dtype), ids.gather(-1, order).long()))


def _cumsum(x: ShardedLogits, dim: Any, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    if not _last(x, dim) or options:
        return None
    sums = x.local.cumsum(-1, dtype=dtype)
    before = gathered(sums[..., -1], x.shard.group)[: torch.distributed.get_rank(x.shard.group)]
    return ShardedLogits(sums + before.sum(0)[..., None].to(sums.dtype), x.shard, _width(x))


def _getitem(x: ShardedLogits, index: Any) -> Any:
    """Selects rows; their values stay on their ranks."""
    indices = index if isinstance(index, tuple) else (index,)
    used_dims = 0
    for item in indices:
        if item is None:
            continue
        if item is Ellipsis:
            return None
        used_dims += item.dim() if isinstance(item, Tensor) and item.dtype == torch.bool else 1
    if used_dims >= x.local.dim():
        return None
    return ShardedLogits(x.local[index], x.shard, _width(x))


def _setitem(x: ShardedLogits, index: Any, value: Any) -> Any:
    """Writes a column, which one rank holds."""
    is_column = isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis and type(index[1]) is int
    if not is_column or isinstance(value, Tensor):
        return None
    size = _width(x)
    if not -size <= index[1] < size:
        raise IndexError(f"index {index[1]} is out of bounds for dimension {x.local.dim() - 1} with size {size}")
    column = index[1] % size - x.shard.first_id
    if 0 <= column < x.shard.width:
        x.local[..., column] = value
    return x


def _split(x: ShardedLogits, sizes: Any, dim: int = 0) -> Any:
    if dim % x.local.dim() == x.local.dim() - 1:
        return None
    return tuple(ShardedLogits(piece, x.shard, _width(x)) for piece in x.local.split(sizes, dim))


def _statistics(x: ShardedLogits, **options: Any) -> Any:
    return token_statistics(x.local, group=x.shard.group, first_id=x.shard.first_id, **options)


def _divergence(
    x: ShardedLogits, previous: Tensor | None = None, *, min_p: float = 0.1, backend: Any = "auto"
) -> LogitDivergence | None:
    """None if `previous` is not sharded in the same way; the op then checks its shape."""
    check_number("logit_divergence", "min_p", min_p, 0, 1, "be in [0, 1]")
    if previous is None:
        return divergence(x.local, None, _width(x), x.shard, min_p)
    if not isinstance(previous, ShardedLogits) or previous.local.shape != x.local.shape or previous.dtype != x.dtype:
        return None
    return divergence(x.local, previous.local, _width(x), x.shard, min_p)


_RULES: dict[Any, Callable[..., Any]] = {
    _T.argmax: _argmax,
    torch.argmax: _argmax,
    _T.amax: _amax,
    torch.amax: _amax,
    _T.logsumexp: _logsumexp,
    torch.logsumexp: _logsumexp,
    _T.softmax: _softmax,
    torch.softmax: _softmax,
    _T.gather: _gather,
    torch.gather: _gather,
    _T.topk: _topk,
    torch.topk: _topk,
    _T.__getitem__: _getitem,
    _T.__setitem__: _setitem,
    _T.split: _split,
    _T.cumsum: _cumsum,
    torch.cumsum: _cumsum,
    token_statistics: _statistics,
    logit_divergence: _divergence,
}
