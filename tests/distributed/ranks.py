"""Ranks for tests: processes with a gloo group that run functions of test modules, two for the whole session and four for slow tests.

A function is called as ``function(group, *arguments)`` on the first ranks, each in its process, and what they return comes back in
the order of the ranks. One that raises ends all ranks, since the others may wait for it; the next call starts new ones.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest

SECONDS = 120
FOUR = pytest.mark.slow
COUNTS = [2, pytest.param(4, marks=FOUR)]


class Ranks:
    """`run(2, function, ...)` uses two processes, which `run(1, ...)` shares; `run(4, ...)` four others."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def run(self, count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        size = max(count, 2)
        pool = self._pools.setdefault(size, Pool(size))
        return pool.run(count, function, *arguments)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


class Pool:
    """Processes of one group, started when they are first needed."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder = ""

    def run(self, count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        if not self._processes:
            self._start()
        for pipe in self._pipes[:count]:
            pipe.send((count, function, arguments))
        results = []
        for rank, pipe in enumerate(self._pipes[:count]):
            try:
                fine, value = pipe.recv() if pipe.poll(SECONDS) else (False, "no answer in time")
            except EOFError:
                fine, value = False, "the process ended"
            if not fine:
                self.close()
                raise AssertionError(f"rank {rank}: {value}")
            results.append(value)
        return results

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp()
        context = multiprocessing.get_context("spawn")
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, rank, self._size, self._folder), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []
        shutil.rmtree(self._folder, ignore_errors=True)


def serve(pipe: Connection, rank: int, size: int, folder: str) -> None:
    """What a rank does: waits for functions, runs them, answers."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=SECONDS))
    groups = {count: dist.new_group(list(range(count))) for count in sorted({1, 2, size})}
    while True:
        try:
            count, function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(groups[count], *arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
