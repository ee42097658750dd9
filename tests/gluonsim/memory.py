"""Shared memory and barriers of a program, with what is under way in them.

Every element of an allocation knows whether it was ever written, whether a copy is filling it, how many products and copies read it, and
whether threads wrote it without a fence since (products and bulk copies use the asynchronous proxy, which sees such writes only after one).
An element that is being filled is NaN.

Besides what happens to be under way, a partition must *know* that it has ended: every operation has a number, knowledge is a set of numbers
(the bits of an integer) that grows by waiting for products and stores and is passed on by barriers. A copy into a buffer needs to know of
all reads of what it held, a read of what filled it. So most missing waits are found under any schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tests.gluonsim.scheduler import Fault

LARGEST_COUNT = 2**20 - 1
"""Of arrivals and of bytes that a barrier can wait for: PTX ISA, mbarrier."""


@dataclass
class Barrier:
    """An mbarrier: a phase ends when all have arrived and all expected bytes have."""

    name: str
    count: int = 0
    left: int = 0
    bytes: int = 0
    phase: int = 0
    fenced: bool = False
    gathered: int = 0
    """What those know who arrived in this phase, and the copies that did."""
    passed_on: int = 0
    """The same for the phases before."""

    def start(self, count: int) -> None:
        if self.count:
            raise Fault(f"{self.name} is initialised twice")
        if not 0 < count <= LARGEST_COUNT:
            raise Fault(f"{self.name} is initialised for {count} arrivals")
        self.count = self.left = count

    def known(self) -> None:
        if not self.count:
            raise Fault(f"{self.name} is used before it is initialised")

    def arrive(self, count: int = 1, knowledge: int = 0) -> None:
        self.known()
        self.gathered |= knowledge
        if count < 1 or count > self.left:
            raise Fault(f"{self.name}: {count} arrive in a phase that waits for {self.left} more")
        self.left -= count
        self._end()

    def expect(self, amount: int, knowledge: int = 0) -> None:
        self.known()
        self.bytes += amount
        if self.bytes > LARGEST_COUNT:
            raise Fault(f"{self.name} waits for {self.bytes} bytes, more than it can count")
        self.arrive(1, knowledge)

    def delivered(self, amount: int, knowledge: int = 0) -> None:
        self.known()
        if not self.fenced:
            raise Fault(f"{self.name} is signalled by a copy, but no fence followed its initialisation")
        if amount > self.bytes:
            raise Fault(f"{self.name}: {amount} bytes arrive, {self.bytes} are expected")
        self.bytes -= amount
        self.gathered |= knowledge
        self._end()

    def passed(self, parity: int) -> bool:
        """Whether the phase of this parity has ended."""
        self.known()
        return self.phase & 1 != parity

    def _end(self) -> None:
        if self.left == 0 and self.bytes == 0:
            self.phase += 1
            self.left = self.count
            self.passed_on |= self.gathered
            self.gathered = 0


@dataclass
class Allocation:
    """What is known of each element, in tensors of one shape."""

    data: Tensor
    written: Tensor
    filling: Tensor
    reading: Tensor
    dirty: Tensor

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype) -> Allocation:
        data = (
            torch.full(tuple(shape), math.nan).to(dtype)
            if dtype.is_floating_point
            else torch.zeros(*shape, dtype=dtype)
        )
        flags = (torch.zeros(tuple(shape), dtype=torch.int8) for _ in range(4))
        return cls(data, *flags)

    def map(self, view: Callable[[Tensor], Tensor]) -> Allocation:
        return Allocation(*(view(x) for x in (self.data, self.written, self.filling, self.reading, self.dirty)))


@dataclass
class Part:
    """One of the parts that the first dimension of an allocation counts: numbers of the operations on it."""

    filled: int | None = None
    reads: list[int] = field(default_factory=list)
    """Since it was filled."""


def _knows(knowledge: int, operation: int | None) -> bool:
    return operation is None or bool(knowledge >> operation & 1)


@dataclass
class View:
    """A shared memory descriptor: (part of) an allocation."""

    name: str
    dtype: Any
    layout: Any
    cells: Allocation
    parts: list[Part]
    barriers: list[Barrier] = field(default_factory=list)
    whole: bool = True
    """Whether its first dimension is that of the allocation."""

    @property
    def shape(self) -> list[int]:
        return list(self.cells.data.shape)

    @property
    def nbytes(self) -> int:
        return self.cells.data.numel() * self.cells.data.element_size()

    @property
    def barrier(self) -> Barrier:
        if len(self.barriers) != 1:
            raise Fault(f"{self.name} is not one barrier")
        return self.barriers[0]

    def _seen_as(self, view: Callable[[Tensor], Tensor]) -> View:
        return replace(self, cells=self.cells.map(view), whole=False)

    def index(self, at: Any) -> View:
        at = int(at)
        if not 0 <= at < self.shape[0]:
            raise Fault(f"{self.name} has {self.shape[0]} parts, part {at} is used")
        name = f"{self.name}[{at}]"
        if self.barriers:
            return replace(self, name=name, barriers=[self.barriers[at]])
        parts = [self.parts[at]] if self.whole else self.parts
        return replace(self._seen_as(lambda x: x[at]), name=name, parts=parts)

    def slice(self, start: int, length: int, dim: int = 0) -> View:
        if not 0 <= start <= self.shape[dim] - length:
            raise Fault(f"{self.name} has {self.shape[dim]} rows, {start} to {start + length} are used")
        return self._seen_as(lambda x: x.narrow(dim, start, length))

    def reshape(self, shape: Sequence[int]) -> View:
        return self._seen_as(lambda x: x.view(*shape))

    def permute(self, order: Sequence[int]) -> View:
        return self._seen_as(lambda x: x.permute(*order))

    def _may_read(self, operation: int, knowledge: int, reader: str) -> None:
        for part in self.parts:
            if not _knows(knowledge, part.filled):
                raise Fault(f"{self.name} is read by {reader} that has not waited for what fills it")
            part.reads.append(operation)

    def _may_write(self, operation: int, knowledge: int, writer: str) -> None:
        for part in self.parts:
            if part.filled == operation and not part.reads:
                continue  # another piece of the same copy
            if not _knows(knowledge, part.filled) or not all(_knows(knowledge, each) for each in part.reads):
                raise Fault(f"{self.name} is overwritten by {writer} that has not waited for all who read or fill it")
            part.filled, part.reads = operation, []

    # By threads.

    def read(self, operation: int, knowledge: int) -> Tensor:
        self._settled("is read by threads")
        self._may_read(operation, knowledge, "a partition")
        return self.cells.data.clone()

    def write(self, values: Tensor, owner: int, operation: int, knowledge: int) -> None:
        if self.cells.filling.any():
            raise Fault(f"{self.name} is written by threads while a copy fills it")
        if self.cells.reading.any():
            raise Fault(f"{self.name} is written by threads while a product or a copy reads it")
        self._may_write(operation, knowledge, "a partition")
        self.cells.data.copy_(values)
        self.cells.written.fill_(1)
        self.cells.dirty.fill_(owner + 2)

    # By products and bulk copies.

    def begin_reading(self, reader: str, operation: int, knowledge: int) -> None:
        self._settled(f"is read by {reader}")
        if self.cells.dirty.any():
            raise Fault(f"{self.name} is read by {reader} without a fence after threads wrote it")
        self._may_read(operation, knowledge, reader)
        self.cells.reading += 1

    def end_reading(self) -> Tensor:
        self.cells.reading -= 1
        return self.cells.data.clone()

    def begin_filling(self, operation: int, knowledge: int) -> None:
        if self.cells.dirty.any():
            raise Fault(f"a copy into {self.name} is issued without a fence after threads wrote it")
        self.begin_filling_by_threads(operation, knowledge)

    def begin_filling_by_threads(self, operation: int, knowledge: int) -> None:
        if self.cells.filling.any():
            raise Fault(f"a copy into {self.name} is issued while another one fills it")
        if self.cells.reading.any():
            raise Fault(f"a copy into {self.name} is issued while a product or a copy reads it")
        self._may_write(operation, knowledge, "a copy")
        self.cells.filling.fill_(1)
        self.cells.data.fill_(math.nan)

    def end_filling(self, values: Tensor) -> None:
        self.cells.data.copy_(values)
        self.cells.filling.zero_()
        self.cells.written.fill_(1)

    def _settled(self, what: str) -> None:
        if self.cells.filling.any():
            raise Fault(f"{self.name} {what} while a copy fills it")
        if not self.cells.written.all():
            raise Fault(f"{self.name} {what} before anything was written to it")
