"""Threads of which one runs at a time, and events that happen at some later moment, in an order that a seed decides."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence


class Fault(Exception):
    """What a kernel did that a GPU does not define, or that stops it for ever."""


class _Stopped(BaseException):
    """Ends the other threads after a fault."""


def _always() -> bool:
    return True


class _Partition(threading.Thread):
    def __init__(self, scheduler: Scheduler, number: int, body: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.scheduler, self.number, self.body = scheduler, number, body
        self.weight = scheduler.random.choice((0.1, 1.0, 1.0, 8.0))
        self.turn = threading.Semaphore(0)
        self.ready: Callable[[], bool] = _always
        self.ended = False

    def run(self) -> None:
        self.turn.acquire()
        try:
            if self.scheduler.failure is None:
                self.body()
        except _Stopped:
            pass
        except BaseException as failure:  # reported by the thread that runs the program
            self.scheduler.failure = self.scheduler.failure or failure
        self.ended = True
        self.scheduler.go_on()


class Scheduler:
    """Runs the partitions of one program, or of programs that an SM each runs at once (`tests.gluonsim.world`).

    Events of one queue happen in their order, as products of a warp group do; those of different queues in any. How eager events are, and
    how often each partition gets its turn, also follows from the seed: some faults show only if copies arrive late, others if they are early.
    """

    def __init__(self, source: random.Random) -> None:
        self.random = source
        self.queues: dict[object, list[Callable[[], None]]] = {}
        self.partitions: list[_Partition] = []
        self.failure: BaseException | None = None
        self.running: _Partition | None = None
        self.eager = source.choice((0.02, 0.2, 0.5, 0.95))
        self.ended = threading.Semaphore(0)

    @property
    def current(self) -> int:
        """Number of the running partition; -1 before the program forks."""
        return -1 if self.running is None else self.running.number

    def later(self, queue: object, event: Callable[[], None]) -> None:
        self.queues.setdefault(queue, []).append(event)

    def pause(self, ready: Callable[[], bool] = _always) -> None:
        """The running partition goes on at some later moment at which `ready` holds."""
        partition = self.running
        if partition is None:
            self._alone(ready)
            return
        partition.ready = ready
        self.go_on()
        partition.turn.acquire()
        if self.failure is not None:
            raise _Stopped
        self.running = partition

    def _alone(self, ready: Callable[[], bool]) -> None:
        while not ready():
            if not self.queues:
                raise Fault("deadlock: the program waits for what nothing will do")
            self._happen()

    def _happen(self) -> None:
        queue = self.random.choice(list(self.queues))
        events = self.queues[queue]
        event = events.pop(0)
        if not events:
            del self.queues[queue]
        event()

    def go_on(self) -> None:
        """Hands over to a partition that can run. Called by the one that stops."""
        chosen = None
        while self.failure is None and chosen is None:
            able = [each for each in self.partitions if not each.ended and each.ready()]
            if self.queues and (not able or self.random.random() < self.eager):
                try:
                    self._happen()
                except Exception as failure:
                    self.failure = failure
            elif able:
                chosen = self.random.choices(able, [each.weight for each in able])[0]
            elif all(each.ended for each in self.partitions):
                break
            else:
                waiting = ", ".join(str(each.number) for each in self.partitions if not each.ended)
                self.failure = Fault(f"deadlock: partitions {waiting} wait for what nothing will do")
        if self.failure is not None:
            chosen = next((each for each in self.partitions if not each.ended), None)
        if chosen is None:
            self.ended.release()
        else:
            chosen.turn.release()

    def run(self, bodies: Sequence[Callable[[], None]], whole: bool = False) -> None:
        """Runs partitions to their end; if a partition calls it, beside all others. `whole`: they are programs before they fork."""
        started = [self._partition(-1 if whole else number, body) for number, body in enumerate(bodies)]
        if self.running is not None:
            self.partitions += started
            for partition in started:
                partition.start()
            self.pause(lambda: all(each.ended for each in started))
            self.partitions = [each for each in self.partitions if each not in started]
            return
        self.partitions = started
        for partition in started:
            partition.start()
        self.go_on()
        self.ended.acquire()
        for partition in started:
            partition.join()
        self.running = None
        if self.failure is not None:
            raise self.failure

    def _partition(self, number: int, body: Callable[[], None]) -> _Partition:
        def run() -> None:
            self.running = partition
            body()

        partition = _Partition(self, number, run)
        return partition
