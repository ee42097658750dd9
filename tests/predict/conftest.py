from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def figures() -> dict[str, Any]:
    from bench.predict import gluon, loop_figures

    measured: dict[str, Any] = {**loop_figures.measure(), **gluon.measure()}
    return measured
