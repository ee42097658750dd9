"""Time on a GPU: events around a call, cold L2 cache, launch overhead avoided by replaying the call's graph.

Before each call another buffer, several times the size of the cache, is read: no input of the call remains in the cache, no write-back
is pending, and in a replay the host is far ahead when the device begins. Starting a graph takes microseconds, so short calls are
captured many times in one graph, each after such a read, and the time of a graph with only the reads is subtracted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

Call = Callable[[], object]
GIB = 2**30
# Calls in a graph, and what they may take together in seconds.
MOST_CALLS, ENOUGH = 50, 2e-3


class Replays(NamedTuple):
    """Graphs of several calls, each with what has to come before it, and of what comes before them alone."""

    calls: Call
    before: Call
    count: int


class GpuClock:
    """Advances only while `run` has the device work: what pytest-benchmark reads before and after a round."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def run(self, call: Call, *, ahead: bool = True) -> float:
        """Its time in seconds, in a cold cache. `ahead`: the host has issued all of it before the device begins; else the device
        waits for the host, as it does for a single call."""
        evict()
        if not ahead:
            torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        took = start.elapsed_time(end) / 1e3
        self.seconds += took
        return took

    def run_several(self, replays: Replays) -> float:
        """Seconds of one of the calls, on average."""
        begun = self.seconds
        before, both = self.run(replays.before), self.run(replays.calls)
        took = max(both - before, 1e-6 * replays.count) / replays.count
        self.seconds = begun + took
        return took


gpu_clock = GpuClock()


@cache
def eviction() -> tuple[Tensor, Tensor]:
    """A buffer of four times the L2 cache, and the destination of its sum."""
    size = 4 * torch.cuda.get_device_properties(0).L2_cache_size
    with torch.inference_mode(False):  # a tensor made in inference mode could not be written outside of it
        return torch.ones(size // 4, device="cuda"), torch.zeros((), device="cuda")


def evict() -> None:
    buffer, total = eviction()
    torch.sum(buffer, dim=0, out=total)


def replay(call: Call, reset: Call = lambda: None) -> Call | None:
    """The replay of a call captured as a graph, or None if it cannot be captured because it syncs with the host."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compilation, handles and workspaces come before the capture
        for _ in range(2):
            reset()
            call()
    torch.cuda.current_stream().wait_stream(side)
    reset()
    return _captured(call)


def _captured(call: Call) -> Call | None:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph.replay


def replay_several(call: Call, reset: Call, once: float) -> Replays | None:
    """Graphs of as many calls as are worth while for one that takes `once` seconds, or None if that is one, or if `reset` cannot be
    captured. The call has been captured before."""
    count = min(MOST_CALLS, int(ENOUGH / max(once, ENOUGH / MOST_CALLS)))
    if count < 2:
        return None

    def repeat(one: Call) -> None:
        for _ in range(count):
            reset()
            evict()
            one()

    evict()
    graphs = [_captured(lambda one=one: repeat(one)) for one in (call, lambda: None)]
    return Replays(graphs[0], graphs[1], count) if graphs[0] and graphs[1] else None


def digits(value: float) -> float:
    return float(f"{value:.4g}")


@cache
def floors() -> dict[str, object]:
    """The device's measured limits: bytes per second, products per second, the shortest launch."""

    def best(call: Call, rounds: int = 12) -> float:
        call()
        return median(gpu_clock.run(call) for _ in range(rounds))

    size, side = (2 * GIB, 8192) if torch.cuda.get_device_properties(0).total_memory > 16 * GIB else (GIB // 1024, 64)
    source = torch.arange(size // 4, dtype=torch.float32, device="cuda")
    target, total = torch.empty_like(source), torch.zeros((), device="cuda")
    found: dict[str, object] = {
        "device": torch.cuda.get_device_name(),
        "copy_gb_per_s": digits(2 * size / best(lambda: target.copy_(source)) / 1e9),
        "read_gb_per_s": digits(size / best(lambda: torch.amax(source, dim=0, out=total)) / 1e9),
    }
    source = target = None
    drawn = [torch.randn(side, side).to("cuda") for _ in range(2)]
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        a, b = (x.to(dtype) for x in drawn)
        found[f"{name}_tflops"] = digits(2 * side**3 / best(lambda a=a, b=b: torch.mm(a, b)) / 1e12)
    launch = replay(lambda: total.add_(1))
    if launch is not None:
        found["shortest_launch_us"] = digits(best(launch, 50) * 1e6)
    return found
