"""Times a candidate: it is checked first, interleaved with a baseline, and timed with the clock of the device.

The baseline is timed before every round of the candidate, so that the two are always compared under the same load: machines are
shared and their speed varies. The ratio of the two medians is in ``extra_info``.

On a GPU both are replays of a captured graph where they can be captured, in a cold cache: see `bench/gpu_clock.py`.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import pdkernels as pd
from bench.devices import DRY_RUN
from bench.gpu_clock import gpu_clock, replay, replay_several
from pdkernels.evaluation.machine import processor

Call = Callable[[], object]


def foreign_cpu_seconds() -> float:
    """CPU seconds spent by everything but this process since boot (Linux)."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:2])


def seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def on_gpu(call: Call, again: Call | None, reset: Call) -> Callable[[], float]:
    """What times a call once; `again`: the replay of its graph, if it can be captured."""
    if again is None:
        return partial(gpu_clock.run, call, ahead=False)
    reset()
    several = replay_several(call, reset, gpu_clock.run(again))
    return partial(gpu_clock.run_several, several) if several else partial(gpu_clock.run, again)


def compare(
    benchmark,
    call: Call,
    *,
    baseline: Call,
    baseline_name: str,
    reset: Call = lambda: None,
    device: str = "cpu",
    rounds: int = 200,
    warmup: int = 10,
    bytes_moved: int | None = None,
    graph: bool = True,
    **facts: object,
) -> None:
    """Times `call` with pytest-benchmark, `baseline` just before each round; `reset` and the `warmup` rounds are not timed.

    `bytes_moved`: half of what has to be read and written. `graph`: whether a GPU may replay the call; not if a call reads the
    device, or if its launches are what is measured.
    """
    target, time_baseline = call, partial(seconds, baseline)
    if device == "cuda":
        replays = [replay(some, reset) if graph else None for some in (call, baseline)]
        target, time_baseline = (on_gpu(some, again, reset) for some, again in zip((call, baseline), replays))
        facts["timed_by"] = "graph replay" if replays[0] else "calls"
    if DRY_RUN:
        rounds, warmup = 2, 0
    baselines: list[float] = []

    def before_round() -> None:
        reset()
        baselines.append(time_baseline())
        reset()

    foreign, started = foreign_cpu_seconds(), time.perf_counter()
    benchmark.pedantic(target, setup=before_round, rounds=rounds, iterations=1, warmup_rounds=warmup)
    elapsed = time.perf_counter() - started
    if benchmark.stats is None:  # --benchmark-disable: the call only ran once
        return
    median = statistics.median(baselines[warmup:])
    ours = benchmark.stats.stats.median
    benchmark.extra_info.update(
        facts,
        baseline=baseline_name,
        baseline_median_us=round(median * 1e6, 2),
        median_us=round(ours * 1e6, 2),
        ratio_to_baseline=round(ours / median, 3),
        foreign_cpu_percent=round(100 * max(0.0, foreign_cpu_seconds() - foreign) / elapsed / (os.cpu_count() or 1), 1),
        threads=torch.get_num_threads(),
        device=torch.cuda.get_device_name() if device == "cuda" else processor(),
        torch=torch.__version__,
        pdkernels=pd.__version__,
    )
    if bytes_moved:
        benchmark.extra_info.update(bytes_moved=bytes_moved, gb_per_s=round(2 * bytes_moved / ours / 1e9, 2))
