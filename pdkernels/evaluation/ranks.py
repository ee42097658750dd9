"""Work shared by the ranks of a `torch.distributed` group, with results on all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


@contextmanager
def launched_group() -> Iterator[Any]:
    """The group of all processes that `torchrun` started, in gloo; None if this process is alone."""
    if not (dist.is_available() and dist.is_torchelastic_launched()):
        yield None
        return
    from pdkernels.distributed import init_process_group

    init_process_group("gloo")
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def is_first(group: Any) -> bool:
    """Whether this process prints for all."""
    return group is None or dist.get_rank(group) == 0


def own_numbers(count: int, group: Any) -> range:
    """This rank's share of the numbers below `count`, strided by the number of ranks.

    >>> list(own_numbers(3, None))
    [0, 1, 2]
    """
    return range(count) if group is None else range(dist.get_rank(group), count, dist.get_world_size(group))


def of_first(value: T, group: Any) -> T:
    """The first rank's `value`, on all ranks."""
    if group is None:
        return value
    values = [value]
    dist.broadcast_object_list(values, dist.get_global_rank(group, 0), group=group)
    return values[0]


def in_order(results: Sequence[T], count: int, group: Any) -> list[T]:
    """The results for all numbers below `count`, from each rank's results for its `own_numbers`."""
    if group is None:
        return list(results)
    everywhere: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, list(results), group=group)
    return [everywhere[number % len(everywhere)][number // len(everywhere)] for number in range(count)]
