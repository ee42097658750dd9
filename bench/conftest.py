from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: object, output_json: dict) -> None:
    """Results are committed: statistics stay, single samples and the machine's name do not."""
    output_json["machine_info"].pop("node", None)
    for benchmark in output_json["benchmarks"]:
        benchmark["stats"].pop("data", None)
