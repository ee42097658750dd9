"""The work that compiling a grammar may take: a number of steps, which is the same on every machine, and a time.

Everything that walks through a schema, an expression or an automaton counts its steps here. A compile that nobody waits
for any more ends at the next look, which also lets other threads run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from pdkernels._validation import sentence

OP = "decoding.Grammar"
MAX_STEPS = 1_000_000
MAX_SECONDS = 30.0
"""Of the thread's own CPU time, which other threads do not use up."""
WORK_PER_STEP = 32
"""Steps of the compiled code that take as long as one of Python."""
_REMEDY = "Use fewer alternatives, shorter repetitions, or a smaller depth."
_LOOK = 100  # steps between two looks, less than a millisecond


class Spent(ValueError):
    """Compiling took all the steps that it may take."""


class Abandoned(Exception):
    """Nobody waits for this grammar any more."""


class Budget:
    """Of one compile.

    Attributes:
        steps: taken so far.
        memo: what the compile has computed before, by keys of its parts.
    """

    def __init__(self, max_steps: int, seconds: float, abandoned: Callable[[], bool] | None) -> None:
        self.steps, self.memo = 0, dict[Any, Any]()
        self._max_steps, self._seconds, self._abandoned = max_steps, seconds, abandoned
        self._started, self._next = time.thread_time(), _LOOK

    def spend(self, steps: int) -> None:
        """Counts steps; raises if there are too many, if they took too long, or if nobody waits for them."""
        self.steps += steps
        if self.steps < self._next:
            return
        self._next = self.steps + _LOOK
        fault = f"compiling the grammar takes more than {self._max_steps} steps"
        if self.steps <= self._max_steps:
            fault = f"compiling the grammar takes more than {self._seconds:g} seconds"
            if time.thread_time() - self._started <= self._seconds:
                if self._abandoned is not None:
                    if self._abandoned():
                        raise Abandoned
                    time.sleep(1e-4)  # the interpreter would let other threads wait 5 ms for their turn
                return
        raise Spent(sentence(OP, fault, _REMEDY))

    @contextmanager
    def at_most(self, steps: int) -> Iterator[None]:
        """No more than so many steps from here on."""
        outer_steps, self._max_steps = self._max_steps, min(self._max_steps, self.steps + steps)
        try:
            yield
        finally:
            self._max_steps = outer_steps

    @property
    def work(self) -> int:
        """What is left for compiled code, in its own steps."""
        return max(0, self._max_steps - self.steps) * WORK_PER_STEP


_current: ContextVar[Budget | None] = ContextVar("budget", default=None)


@contextmanager
def bounded(
    max_steps: int = MAX_STEPS, seconds: float = MAX_SECONDS, abandoned: Callable[[], bool] | None = None
) -> Iterator[Budget]:
    """A budget for all that is compiled inside, unless there is one already.

    >>> with bounded(max_steps=1000) as budget:
    ...     spend(3)
    >>> budget.steps
    3
    """
    outer = _current.get()
    if outer is not None:
        yield outer
        return
    token = _current.set(Budget(max_steps, seconds, abandoned))
    try:
        budget = _current.get()
        assert budget is not None
        yield budget
    finally:
        _current.reset(token)


def spend(steps: int = 1) -> None:
    """Counts steps of the current compile."""
    budget = _current.get()
    if budget is not None:
        budget.spend(steps)


def current() -> Budget:
    """The budget of the current compile; outside any, a new one."""
    return _current.get() or Budget(MAX_STEPS, MAX_SECONDS, None)
