from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from bench.devices import DEVICES, DRY_RUN
from bench.gpu_clock import floors, gpu_clock


@pytest.fixture(params=[pytest.param(device, marks=[pytest.mark.benchmark(timer=gpu_clock)] * (device == "cuda")) for device in DEVICES])
def device(request: pytest.FixtureRequest) -> str:
    """For benchmarks with the same sizes everywhere; the others have `bench.devices.by_device`."""
    return request.param


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    if DRY_RUN:
        from bench.dry_run import dry_run
    with dry_run() if DRY_RUN else nullcontext():
        return (yield)


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict) -> None:
    if torch.cuda.is_available():
        machine_info["gpu"] = floors()


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: object, output_json: dict) -> None:
    """Results are committed: statistics stay, single samples and the machine's name do not."""
    output_json["machine_info"].pop("node", None)
    for benchmark in output_json["benchmarks"]:
        benchmark["stats"].pop("data", None)
