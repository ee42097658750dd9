from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext

import pytest

from bench.devices import DEVICES, DRY_RUN
from bench.gpu_clock import floors, gpu_clock


@pytest.fixture(
    params=[
        pytest.param(device, marks=[pytest.mark.benchmark(timer=gpu_clock)] * (device == "cuda")) for device in DEVICES
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    """For benchmarks with the same sizes everywhere; others use `bench.devices.by_device`."""
    return request.param


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """FlexAttention is compiled for every case, which may take all the time there is: after all others."""
    items.sort(key=lambda item: "FlexAttention" in item.name)


def gpu() -> AbstractContextManager[None]:
    """The GPU of this machine, or the pretended one of a dry run."""
    if not DRY_RUN:
        return nullcontext()
    from bench.dry_run import dry_run

    return dry_run()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    with gpu():
        return (yield)


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict) -> None:
    if "cuda" in DEVICES:
        with gpu():
            machine_info["gpu"] = floors()


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: object, output_json: dict) -> None:
    """Results are committed: keep statistics, drop single samples and the machine's name."""
    output_json["machine_info"].pop("node", None)
    for benchmark in output_json["benchmarks"]:
        benchmark["stats"].pop("data", None)
