"""The collectives that our code calls, with a fixed order of sums, and a counter of their traffic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Renamed in torch 2.13.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)

SMALL = 1 << 16
"""Tensors up to this many bytes are summed in one exchange, larger ones in two (scatter and gather)."""


@dataclass
class Traffic:
    """The traffic of the collectives of this process while it was counted.

    >>> Traffic()
    Traffic(calls=0, bytes=0)
    """

    calls: int = 0
    """Collectives that ran; a sum of many rows is two, a scatter and a gather."""
    bytes: int = 0
    """Received by this rank from others; its own share is not included."""


_counters: list[Traffic] = []


@contextmanager
def count_communication() -> Iterator[Traffic]:
    """Counts calls and bytes of the collectives that our code runs in this process while the block runs.

    >>> with count_communication() as traffic:
    ...     pass
    >>> traffic.calls
    0
    """
    traffic = Traffic()
    _counters.append(traffic)
    try:
        yield traffic
    finally:
        # By identity: equal counts must not end another count.
        _counters[:] = [counter for counter in _counters if counter is not traffic]


def _count(received: int) -> None:
    for counter in _counters:
        counter.calls += 1
        counter.bytes += received


def gathered(x: Tensor, group: Any) -> Tensor:
    """`x` of every rank, stacked: ``(ranks, *x.shape)``. Shapes and dtypes must be the same on all."""
    ranks = dist.get_world_size(group)
    out = x.new_empty((ranks, *x.shape))
    if x.numel():
        _count((ranks - 1) * x.numel() * x.element_size())
        _all_gather(out.view(-1), x.contiguous().view(-1), group=group)
    return out


def summed(x: Tensor, group: Any) -> Tensor:
    """The sum of `x` over the ranks, with the same bits on all of them; an element's bits do not depend on the others.

    A backend's all-reduce adds in an order that depends on an element's position in the tensor, so a row would round
    differently in another batch. Here elements are added in the order of the ranks; 16-bit ones are added in float32
    and rounded once. With two ranks there is only one order.
    """
    ranks = dist.get_world_size(group)
    size = x.numel() * x.element_size()
    if ranks == 1 or size == 0:
        return x
    if ranks == 2:
        x = x.contiguous()
        _count(size)
        dist.all_reduce(x, group=group)
        return x
    if size <= SMALL:
        return _added(gathered(x, group)).to(x.dtype)
    flat = x.contiguous().view(-1)
    share = -(-len(flat) // ranks)
    if share * ranks != len(flat):
        flat = torch.cat((flat, flat.new_zeros(share * ranks - len(flat))))
    shares = torch.empty_like(flat)
    _count((ranks - 1) * share * x.element_size())
    dist.all_to_all_single(shares, flat, group=group)
    reduced = _added(shares.view(ranks, share)).to(x.dtype)
    return gathered(reduced, group).view(-1)[: x.numel()].view(x.shape)


def _added(stacked: Tensor) -> Tensor:
    """Sum over the first dimension, in order."""
    total = stacked[0].to(torch.promote_types(stacked.dtype, torch.float32))
    for term in stacked[1:]:
        total = total + term
    return total


def scattered(shares: Tensor, group: Any) -> Tensor:
    """Reduce-scatter of ``(ranks, ...)``: rank r gets the sum of part r of all ranks, in the order of the ranks."""
    got = torch.empty_like(shares)
    if shares.numel():
        _count((len(shares) - 1) * shares[0].numel() * shares.element_size())
        dist.all_to_all_single(got.view(-1), shares.contiguous().view(-1), group=group)
    return _added(got).to(shares.dtype)


def passed_on(x: Tensor, group: Any) -> Tensor:
    """Sends `x` to the previous rank of a ring and returns that of the next, of the same shape and dtype."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    got = torch.empty_like(x)
    if x.numel():
        _count(x.numel() * x.element_size())
        to, of = (dist.get_global_rank(group, (rank + by) % ranks) for by in (-1, 1))
        pair = [dist.P2POp(dist.isend, x, to, group), dist.P2POp(dist.irecv, got, of, group)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
    return got
