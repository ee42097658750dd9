from __future__ import annotations

import pytest

from tests.ops.implementations import LEVELS, NAMES, Public, Simulated, emulated_ops, implementation


@pytest.fixture(params=NAMES, scope="session")
def impl(request: pytest.FixtureRequest) -> Public | Simulated:
    """Every implementation of the ops in turn: see tests/ops/implementations.py."""
    return implementation(request.param)


@pytest.fixture(params=[name for name in NAMES if name != "cpu"], scope="session")
def device_impl(request: pytest.FixtureRequest) -> Public | Simulated:
    """The implementations that find their values on the device and cannot raise."""
    return implementation(request.param)


@pytest.fixture(params=LEVELS)
def level_ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> object:
    """The CPU ops at every level of vector units."""
    monkeypatch.setenv("PDKERNELS_CPU_ISA", request.param)
    return emulated_ops()
