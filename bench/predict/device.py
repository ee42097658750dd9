"""GPUs as the model sees them: limits that were measured or published, and numbers fitted to the times of kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

RECORD = Path(__file__).resolve().parents[1] / "results" / "h200"
RUN = RECORD / "benchmarks-4.json"
"""The run of attention, whose limits the H200 has."""
FLOPS = 4096
"""Of an SM of Hopper in a cycle, products of bf16."""
SMS = 132


class Device(NamedTuple):
    """Of a GPU under load. What has no measurement or fit behind it is an assumption, and says so."""

    name: str
    sms: int
    clock: float
    """Cycles a second while tensor cores are busy."""
    memory: float
    """Bytes a second, read."""
    launch: float
    """Seconds of a kernel that does next to nothing."""
    l2: float
    """Bytes a cycle that an SM gets from L2 while all of them ask."""
    drain: int
    """Cycles from the last product of a step until its warps go on, filling the pipe again included."""
    program: int
    """Cycles of a program outside its loops: the first loads, the last step, the results."""
    alone: float
    """Cycles that a warp takes for an instruction where no other one fills its waits."""
    latency: float
    """Seconds of an access to memory that waits for another."""
    exposed: int = 750
    """Cycles of loads that are waited for as soon as they are issued. Assumed: 500 to 1000."""
    near: int = 40
    """Cycles of an access to what is in the first-level cache. Assumed."""
    meeting: int = 400
    """Cycles of a barrier of a cluster and of what it makes visible in shared memory. Assumed."""


def limits() -> dict[str, float]:
    """What the run of attention has measured of the device: ``read_gb_per_s``, ``bf16_tflops``, ``shortest_launch_us`` and others."""
    measured: dict[str, float] = json.loads(RUN.read_text())["machine_info"]["gpu"]
    return measured


def _h200() -> Device:
    measured = limits()
    return Device(
        "H200",
        SMS,
        clock=measured["bf16_tflops"] * 1e12 / (SMS * FLOPS),
        memory=measured["read_gb_per_s"] * 1e9,
        launch=measured["shortest_launch_us"] * 1e-6,
        # By `bench.predict.fit`.
        l2=36.3,
        drain=48,
        program=5000,
        alone=3.6,
        latency=8.2e-7,
    )


DEVICES = {"h200": _h200()}
# Fitted to the published rates of bench/predict/ladder.py. What those do not show is taken from the H200, which has the same SMs.
DEVICES["h100"] = DEVICES["h200"]._replace(name="H100", clock=1.45e9, memory=3.0e12, drain=256, program=5000)
