"""Runs the GPU benchmarks on a machine without one: every line runs, on a simulated GPU, and nothing is timed.

Calls of torch.cuda are faked here, and torch.compile returns the function unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from tests.harness.pretended_gpu import pretended_gpu


class Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


class Stream:
    def wait_stream(self, other: Stream) -> None:
        pass


class Graph:
    def replay(self) -> None:
        pass


@contextmanager
def nothing(_: object) -> Iterator[None]:
    yield


def uncompiled(function: Any = None, **options: Any) -> Any:
    assert set(options) <= {"fullgraph", "dynamic", "mode"}, options
    return function


PLAYED = {
    "is_available": lambda: True,
    "synchronize": lambda: None,
    "get_device_name": lambda device=0: "a GPU in name only",
    "get_device_properties": lambda device=0: SimpleNamespace(
        L2_cache_size=2**12, total_memory=2**33, multi_processor_count=1
    ),
    "get_device_capability": lambda device=0: (9, 0),
    "current_stream": Stream,
    "Stream": Stream,
    "Event": Event,
    "CUDAGraph": Graph,
    "stream": nothing,
    "graph": nothing,
}


@contextmanager
def dry_run() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(pretended_gpu())
        for name, stand_in in PLAYED.items():
            stack.enter_context(patch.object(torch.cuda, name, stand_in))
        stack.enter_context(patch.object(torch, "compile", uncompiled))
        yield
