"""Global memory that programs share while they run at once, and the programs themselves.

A program stores or adds to global memory at once here, but whoever accesses the same elements after it must *know* that it did: by a
counter that is handed on with "release" and read with "acquire", and by barriers within a program, as for shared memory (`memory`).
Otherwise a GPU might show the one before the other, and the access is a `Fault`. So are two programs that add to one element in an order
that nothing decides. A partition that reads a counter again without a change in between waits for one, so that a wait without end is found.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tests.gluonsim.scheduler import Fault, Scheduler

if TYPE_CHECKING:
    from tests.gluonsim.program import Program


class World:
    """The programs of a launch, `resident` of which run at once."""

    def __init__(self, source: random.Random, resident: int) -> None:
        self.scheduler, self.resident = Scheduler(source), resident
        self.operations = -1
        self.writers: dict[int, Tensor] = {}
        """By memory, the number of the operation that last wrote an element, and the program and partition that did; 0: none in this launch."""
        self.counters: dict[tuple[int, int], int] = {}
        """What those knew who released a counter."""
        self.changes = 0
        self.looked: dict[Any, int] = {}

    def run(self, count: int, run_program: Callable[[int], None]) -> None:
        """Runs so many programs; which of those that wait for room comes next is random, as nothing promises an order."""
        waiting = list(range(count))
        self.scheduler.random.shuffle(waiting)

        def server() -> None:
            while waiting:
                run_program(waiting.pop())

        self.scheduler.run([server for _ in range(min(self.resident, count))], whole=True)

    def _writers(self, memory: Tensor) -> Tensor:
        key = memory.data_ptr()
        if key not in self.writers:
            self.writers[key] = torch.zeros(3, memory.numel(), dtype=torch.int64)
        return self.writers[key]

    def accessed(self, program: Program, memory: Tensor, at: Tensor, write: bool) -> None:
        """Elements of a tensor, by all threads of a partition."""
        numbers, programs, partitions = self._writers(memory)[:, at.flatten()]
        others = (programs != program.number) | (partitions != program.me)
        for number in numbers[others & (numbers != 0)].unique().tolist():
            if not program.known >> number & 1:
                raise Fault(f"program {program.number} accesses what another one wrote, and does not know that it has")
        if write:
            self.operations += 2
            program.stored[program.me] = program.stored.get(program.me, 0) | 1 << self.operations
            values = torch.tensor([[self.operations], [program.number], [program.me]])
            self._writers(memory)[:, at.flatten()] = values.expand(3, at.numel())
        self.scheduler.pause()

    def count(self, program: Program, memory: Tensor, at: int, amount: int, semantics: str) -> int:
        """Adds to a counter, and returns what it was."""
        key, who = (memory.data_ptr(), at), (id(program), program.me)
        if amount == 0:
            seen = self.looked.get(who)
            self.scheduler.pause(lambda: self.changes != seen)
            self.looked[who] = self.changes
        before = int(memory[at])
        if semantics in ("acquire", "acq_rel"):
            program.learn(self.counters.get(key, 0))
        if semantics in ("release", "acq_rel"):
            self.counters[key] = self.counters.get(key, 0) | program.known & ODD
        if amount:
            memory[at] += amount
            self.changes += 1
        self.scheduler.pause()
        return before


ODD = int("10" * (1 << 16), 2)
"""The operations of the world among those that a program knows."""
