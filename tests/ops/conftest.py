from __future__ import annotations

import pytest

from tests.ops.implementations import NAMES, Public, Simulated, implementation


@pytest.fixture(params=NAMES, scope="session")
def impl(request: pytest.FixtureRequest) -> Public | Simulated:
    """Every implementation of the ops in turn: see tests/ops/implementations.py."""
    return implementation(request.param)


@pytest.fixture(params=[name for name in NAMES if name != "cpu"], scope="session")
def device_impl(request: pytest.FixtureRequest) -> Public | Simulated:
    """The implementations that find their values on the device and cannot raise."""
    return implementation(request.param)
