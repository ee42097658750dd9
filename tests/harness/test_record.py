"""The outcome of a run is known even if it is cut off, and a GPU broken by one test does not affect the next."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.proof_summaries import test_summary as summary

ROOT = Path(__file__).resolve().parents[2]

# `ends` leaves the GPU unusable: every call after it fails in that process.
TESTS = """
import pytest, torch

def synchronize():
    if state["broken"]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

state = {"broken": False}
torch.cuda.is_available, torch.cuda.synchronize = lambda: True, synchronize

@pytest.mark.parametrize("i", range(6))
def test_before(i):
    torch.cuda.synchronize()

def test_ends():
    state["broken"] = True
    torch.cuda.synchronize()

def test_wrong():
    assert 1 == 2, "one is not two"

def test_skipped():
    pytest.skip("no reason")

@pytest.mark.parametrize("i", range(6))
def test_after(i):
    torch.cuda.synchronize()
"""


@pytest.mark.slow
def test_a_broken_gpu_ends_its_worker_alone(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    record = tmp_path / "record.jsonl"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.harness.record",
        "-p",
        "no:cacheprovider",
        "-n",
        "1",
        "--rootdir",
        tmp_path,
        tmp_path,
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PDKERNELS_TEST_RECORD": str(record)}
    ran = subprocess.run(
        [str(part) for part in command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    found = summary(record)
    assert ran.returncode == 1 and (found["passed"], found["failed"], found["skipped"]) == (12, 2, 1), ran.stdout
    said = {name.partition("::")[2]: text for name, text in found["failures"].items()}
    assert said["test_wrong"].startswith("AssertionError: one is not two") and found["skips"] == {"no reason": 1}
    assert "illegal memory access" in said["test_ends"] and "worker 'gw0' crashed" in said["test_ends"]


def test_nothing_was_run(tmp_path: Path) -> None:
    assert summary(tmp_path / "none.jsonl")["passed"] == 0
