"""Threads that end before the interpreter does, and objects that a forked child must know to be without their thread.

When the interpreter shuts down, it unwinds daemon threads that want to run Python again. Frames of C++ do not survive
that, and the process aborts. Threads that are not daemons would keep a program from ending. So these are daemons, which
`atexit` stops and waits for.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakSet

_PATIENCE = 5.0  # seconds at exit for a callback, which may wait for something that never comes


class Worker(threading.Thread):
    """A thread of the library.

    Args:
        run: its work.
        stop: makes `run` return soon; called by another thread at exit.
        name: of the thread.
    """

    def __init__(self, run: Callable[[], None], stop: Callable[[], Any], name: str) -> None:
        super().__init__(target=run, name=name, daemon=True)
        self.stop = stop
        self._calls_since: float | None = None

    @property
    def is_current(self) -> bool:
        """Whether this thread asks, which would wait for itself in vain."""
        return threading.current_thread() is self

    @contextmanager
    def callback(self) -> Iterator[None]:
        """The context of a callback, which may block."""
        self._calls_since = time.monotonic()
        try:
            yield
        finally:
            self._calls_since = None

    def finish(self) -> None:
        """Waits for its end, but for a callback only for a while: one that blocks is not in C++."""
        while self.is_alive():
            since = self._calls_since
            if since is not None and time.monotonic() - since > _PATIENCE:
                return
            self.join(0.05)


def _finish_all() -> None:
    workers = [thread for thread in threading.enumerate() if isinstance(thread, Worker)]
    main = threading.current_thread() is threading.main_thread()
    if workers and main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # another Ctrl-C ends the process, not just this wait
    for worker in workers:
        worker.stop()
    for worker in workers:
        worker.finish()


for _ in range(2):  # Ctrl-C may come when the first call begins
    atexit.register(_finish_all)


class Forked(Protocol):
    """An object whose thread and locks stay in the parent of a fork."""

    def _after_fork(self) -> None:
        """Makes it usable, or fail, in a child: a lock may be held by a thread that is not there."""


_FORKED: WeakSet[Forked] = WeakSet()
tell_forks = _FORKED.add


def _in_child() -> None:
    for forked in list(_FORKED):
        forked._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
