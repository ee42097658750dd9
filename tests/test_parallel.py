"""The threads of CPU loops, without torch: callers at once, nested loops, exceptions, forks, and other work on the cores."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [ROOT / "tests/harness/parallel_driver.cpp", ROOT / "csrc/cpu/parallel.cpp"]


def build(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    compiler = [*shlex.split(os.environ.get("CXX") or "c++"), "-std=c++20", "-pthread", "-I", str(ROOT / "csrc/cpu")]
    command = [*compiler, *flags, *map(str, SOURCES), "-o", str(folder / "driver")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def drive(folder: Path, *arguments: str) -> None:
    answer = subprocess.run(
        [str(folder / "driver"), *arguments], capture_output=True, text=True, check=False, timeout=300
    )
    assert answer.returncode == 0 and answer.stdout == "done\n", answer.stdout + answer.stderr[:4000]


def test_loops_alone_and_beside_other_work(tmp_path: Path) -> None:
    built = build(tmp_path, "-O2", "-Wall", "-Wextra", "-Werror")
    assert built.returncode == 0, built.stderr
    drive(tmp_path)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        drive(tmp_path)
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_no_races(tmp_path: Path) -> None:
    built = build(tmp_path, "-O1", "-g", "-fsanitize=thread")
    if built.returncode != 0:
        pytest.skip(f"the compiler has no thread sanitizer: {built.stderr[-200:]}")
    drive(tmp_path, "without forks")
