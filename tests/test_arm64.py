"""The vector kernels on arm64: cross-compiled and run under qemu, beside those of this processor.

Needs Debian's `g++-aarch64-linux-gnu` and `qemu-user`. Results of packed products, tokens and ranks are the same words; sums of floats
differ by rounding, because arm64 has a multiply-add where the portable level of x86-64 rounds twice.
"""

from __future__ import annotations

import platform
import shutil
import struct
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CROSS, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"
FLAGS = ["-std=c++20", "-O2", "-DPDK_ISA=portable", "-DPDK_LANES=4", "-fno-exceptions", "-Wall", "-Wno-psabi"]
FLAGS += ["-Wno-maybe-uninitialized", "-I", str(ROOT / "csrc")]


def build(folder: Path, compiler: str, *more: str) -> Path:
    """The driver with the kernels of one processor."""
    units = [*sorted((ROOT / "csrc/cpu/simd").glob("*.cpp")), ROOT / "tests/harness/kernels_driver.cpp"]
    folder.mkdir()

    def compiled(unit: Path) -> str:
        target = folder / f"{unit.stem}.o"
        command = [compiler, *FLAGS, *more, "-c", str(unit), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return str(target)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, units))
    program = folder / "driver"
    linked = subprocess.run(
        [compiler, *objects, "-static", "-o", str(program)], capture_output=True, text=True, check=False
    )
    assert linked.returncode == 0, linked.stderr[-3000:]
    return program


def results(*command: str) -> dict[tuple[str, str], list[int]]:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    lines = [line.split() for line in done.stdout.splitlines()]
    return {(kind, name): [int(value, 16) for value in values] for kind, name, *values in lines}


def floats(words: Sequence[int]) -> list[float]:
    return list(struct.unpack(f"<{len(words)}f", struct.pack(f"<{len(words)}I", *words)))


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="compares with x86-64")
def test_kernels_have_the_results_of_x86(tmp_path: Path) -> None:
    for tool in (CROSS, QEMU):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    here = results(str(build(tmp_path / "here", "c++", "-msse4.2")))
    there = results(QEMU, str(build(tmp_path / "there", CROSS)))
    assert here.keys() == there.keys() and len(here) > 70
    for (kind, name), words in here.items():
        if kind == "same":
            assert words == there[kind, name], name
            continue
        low = 2.0**-6 if name.partition("-")[2][:1] in "12" else 2.0**-18  # of 16-bit results
        mine, theirs = floats(words), floats(there[kind, name])
        largest = max(map(abs, mine))
        assert all(abs(a - b) <= low * (abs(a) + 0.01 * largest) for a, b in zip(mine, theirs, strict=True)), name
