"""``python -m pdkernels doctor``: versions, compiled kernels, huge pages, and whether another number of threads would
currently be faster."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import median

import torch
import typer

from pdkernels import _memory
from pdkernels.cli._terminal import errors_reported
from pdkernels.config import show_config
from pdkernels.ops import linear

_SECONDS = 0.15  # of each count of threads
_CLEARLY = 1.2


def doctor() -> None:
    """Show versions, what was compiled, and what each op uses.

    Also huge pages, and whether another number of threads would be faster.
    """
    with errors_reported():
        typer.echo(show_config())
        typer.echo("\n".join(memory_lines()))
        for line in thread_advice(torch.get_num_threads()):
            typer.echo(line)


def memory_lines() -> list[str]:
    """Whether weights and caches lie in huge pages.

    >>> memory_lines()[0]
    'memory'
    """
    return ["memory", *(f"  {name:<12}{value}" for name, value in _memory.report().items()), ""]


def thread_advice(threads: int, measure: Callable[[int], float] | None = None) -> list[str]:
    """The time of a decoding step on one thread, and on all that torch uses or, if that is one, on all cores; with
    advice.

    >>> thread_advice(2, {1: 0.002, 2: 0.1}.__getitem__)[-1]
    'Fewer threads are faster: pass --threads 1, or set OMP_NUM_THREADS=1.'
    """
    lines = ["threads"]
    if hasattr(os, "getloadavg"):
        lines.append(f"  load        {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if threads == cores == 1:
        return [*lines, "  one thread on one core"]
    times = {count: (measure or _step_seconds)(count) for count in (1, cores if threads == 1 else threads)}
    lines += [
        f"  {count} {'thread ' if count == 1 else 'threads'}   {1e3 * each:.2f} ms a step"
        for count, each in times.items()
    ]
    if times[1] * _CLEARLY < times[threads]:
        return [*lines, "Fewer threads are faster: pass --threads 1, or set OMP_NUM_THREADS=1."]
    if threads == 1 and times[cores] * _CLEARLY < times[1]:
        return [
            *lines,
            f"One thread is in use, more are faster: pass --threads {cores}, or set OMP_NUM_THREADS={cores}.",
        ]
    return lines


def _step_seconds(threads: int) -> float:
    """Times products with one row, as in a forward of one token."""
    before = torch.get_num_threads()
    weights, row = torch.ones(1024, 1024), torch.ones(1, 1024)
    times = list[float]()
    try:
        torch.set_num_threads(threads)
        stop = time.perf_counter() + _SECONDS
        while len(times) < 3 or time.perf_counter() < stop:
            start = time.perf_counter()
            for _ in range(10):
                linear(row, weights)
            times.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return median(times)
