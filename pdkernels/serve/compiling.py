"""The threads that compile the grammars of requests. A request that has gone leaves them at once."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor

from pdkernels.decoding import Grammar
from pdkernels.engine import EngineFull
from pdkernels.grammar.budget import bounded
from pdkernels.serve.errors import Refused
from pdkernels.serve.threads import called

_THREADS = 2
_MAX_WAITING = 64
_MAX_KEPT = 1 << 28  # bytes of the automata of earlier requests
_LATE = 3.0  # times its limit that a compile may take before the threads count as stuck: others use the processor too


class _Job:
    """The compile of one grammar."""

    def __init__(self) -> None:
        self.requests, self.abandoned, self.started = 0, False, float("inf")
        self.result: asyncio.Future[tuple[Grammar, int]] | None = None


class GrammarPool:
    """Grammars by what requests ask for, compiled in threads of their own. For the event loop alone.

    Args:
        prepare: makes what requests need of a new grammar; returns the bytes that it holds.
        seconds: of CPU time that a compile may take.
    """

    def __init__(self, prepare: Callable[[Grammar], int], seconds: float) -> None:
        self._prepare, self._seconds, self._closed = prepare, seconds, False
        self._threads = ThreadPoolExecutor(_THREADS, "pdkernels-grammars")
        self._kept: OrderedDict[Hashable, tuple[Grammar, int]] = OrderedDict()
        self._jobs: dict[Hashable, _Job] = {}
        self._running: list[_Job] = []

    async def get(self, key: Hashable, make: Callable[[], Grammar], timeout: float | None) -> Grammar:
        """The grammar that is asked for: of an earlier request, or by `make`. If all who wait for it leave, it is given
        up.

        Raises:
            Refused: the time is over, or the server stops.
            EngineFull: too many wait.
            ValueError, NotImplementedError: as `Grammar`.
        """
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key][0]
        job = self._jobs.get(key) or self._submitted(key, make)
        assert job.result is not None
        job.requests += 1
        try:
            await asyncio.wait([job.result], timeout=timeout)
            if self._closed:
                raise Refused("the server is stopping", 503)
            if not job.result.done():
                raise Refused(f"the grammar was not compiled within the request's {timeout:g} seconds", 408, "timeout")
            self._keep(key, *job.result.result())
            return job.result.result()[0]
        finally:
            job.requests -= 1
            if job.requests == 0:
                self._leave(key, job)

    def _submitted(self, key: Hashable, make: Callable[[], Grammar]) -> _Job:
        if self._closed:
            raise Refused("the server is stopping", 503)
        if self.counts[1] >= _MAX_WAITING:
            raise EngineFull(f"{_MAX_WAITING} grammars wait to be compiled: try again later")
        job = self._jobs[key] = _Job()

        def compiled() -> tuple[Grammar, int]:
            job.started = time.monotonic()
            self._running.append(job)
            try:
                with bounded(seconds=self._seconds, abandoned=lambda: job.abandoned):
                    grammar = make()
                    return grammar, self._prepare(grammar)
            finally:
                self._running.remove(job)

        job.result = asyncio.get_running_loop().run_in_executor(self._threads, called, compiled)
        return job

    def _leave(self, key: Hashable, job: _Job) -> None:
        job.abandoned = True
        if self._jobs.get(key) is job:
            del self._jobs[key]
        assert job.result is not None
        job.result.cancel()

    def _keep(self, key: Hashable, grammar: Grammar, size: int) -> None:
        self._kept[key] = grammar, size + len(str(key))
        while sum(size for _, size in self._kept.values()) > _MAX_KEPT:
            self._kept.popitem(last=False)

    @property
    def counts(self) -> tuple[int, int]:
        """How many grammars are being compiled, and how many wait."""
        return len(self._running), sum(job.started == float("inf") for job in self._jobs.values())

    @property
    def stuck(self) -> bool:
        """Whether no thread has been free for long while grammars wait."""
        late = time.monotonic() - _LATE * self._seconds
        return self.counts[1] > 0 and sum(job.started < late for job in [*self._running]) == _THREADS

    def close(self) -> None:
        """Takes no more; what is being compiled ends at its next look, which nothing waits for."""
        self._closed = True
        for key, job in [*self._jobs.items()]:
            self._leave(key, job)
        self._threads.shutdown(wait=False, cancel_futures=True)
