"""The outcome of a test run, written while it runs: `pytest -p tests.harness.record`, with PDKERNELS_TEST_RECORD naming a file.

One line of JSON per test, so that a run that is cut off loses nothing; `scripts/proof_summaries.py` summarises it. A test that
leaves the GPU unusable (after an illegal access every later call of the process fails) ends its worker: the others continue in a new
one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

UNUSABLE = 86


def first_lines(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = (
        crash.message if crash else report.longrepr[-1] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    )
    return "\n".join(text.strip().splitlines()[:3])[:500]


class Record:
    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        line = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
        if report.outcome != "passed":
            line["said"] = first_lines(report)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


class Worker:
    """A hook of xdist. The test in which a worker ends is the one that xdist reports."""

    failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, Any, Any]:
        self.failed = False
        result = yield
        if self.failed and torch.cuda.is_available():
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                os._exit(UNUSABLE)
        return result


def pytest_configure(config: pytest.Config) -> None:
    plugin = Worker() if hasattr(config, "workerinput") else Record(Path(os.environ["PDKERNELS_TEST_RECORD"]))
    config.pluginmanager.register(plugin)
