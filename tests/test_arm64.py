"""The vector kernels on arm64: cross-compiled and run under qemu at every level, beside those of this processor.

Needs Debian's `g++-aarch64-linux-gnu` and `qemu-user`. Results of packed products, tokens and ranks are the same words; sums of floats
differ by rounding, because arm64 has a multiply-add where the portable level of x86-64 rounds twice.
"""

from __future__ import annotations

import os
import platform
import shutil
import struct
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from setup import cpu_levels, simd_units

ROOT = Path(__file__).resolve().parent.parent
CROSS, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"
FLAGS = ["-std=c++20", "-O2", "-Wall", "-I", str(ROOT / "csrc")]
# A processor of each level: Cortex-A72, Neoverse N1, and one with everything.
PROCESSORS = {"portable": "cortex-a72", "neon_dot": "neoverse-n1", "neon_i8mm": "max"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="compares with x86-64"),
    pytest.mark.skipif(not (shutil.which(CROSS) and shutil.which(QEMU)), reason=f"needs {CROSS} and {QEMU}"),
]

Results = dict[tuple[str, str], list[int]]


def build(folder: Path, compiler: str, *more: str) -> Path:
    """The driver with the kernels of all levels of one architecture."""
    folder.mkdir()
    units = [(unit, f"{level}_{unit.stem}", flags) for level, flags in levels().items() for unit in simd_units(level)]
    units += [(ROOT / "tests/harness/kernels_driver.cpp", "driver", [])]

    def compiled(unit: tuple[Path, str, list[str]]) -> str:
        source, name, flags = unit
        command = [compiler, *FLAGS, *flags, "-c", str(source), "-o", str(folder / f"{name}.o")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return command[-1]

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, units))
    return linked(folder, compiler, objects, "-static")


def linked(folder: Path, compiler: str, objects: Sequence[str], *flags: str) -> Path:
    program = folder / "driver"
    done = subprocess.run([compiler, *objects, *flags, "-o", str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return program


def levels() -> dict[str, list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "machine", lambda: "aarch64")
        return cpu_levels(emulate=False)


def built_here(folder: Path) -> Path:
    """The driver with the kernels that the library has on this processor."""
    folder.mkdir()
    driver = folder / "driver.o"
    command = ["c++", *FLAGS, "-c", str(ROOT / "tests/harness/kernels_driver.cpp"), "-o", str(driver)]
    subprocess.run(command, check=True)
    objects = sorted(map(str, (ROOT / "build/native").glob("simd_*.o")))
    return linked(folder, "c++", [str(driver), *objects])


def results(*command: str, level: str) -> Results:
    """What the driver prints at a level, which it must have chosen by itself or be allowed to choose at most."""
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=600, env={**os.environ, "PDKERNELS_CPU_ISA": level}
    )
    first, *lines = (line.split() for line in done.stdout.splitlines())
    assert first == ["level", level]
    return {(kind, name): [int(value, 16) for value in values] for kind, name, *values in lines}


def floats(words: Sequence[int]) -> list[float]:
    return list(struct.unpack(f"<{len(words)}f", struct.pack(f"<{len(words)}I", *words)))


def compare(here: Results, there: Results) -> None:
    assert here.keys() == there.keys() and len(here) > 70
    for (kind, name), words in here.items():
        if kind == "same":
            assert words == there[kind, name], name
            continue
        low = 2.0**-6 if name.partition("-")[2][:1] in "12" else 2.0**-18  # of 16-bit results
        mine, theirs = floats(words), floats(there[kind, name])
        largest = max(map(abs, mine))
        assert all(abs(a - b) <= low * (abs(a) + 0.01 * largest) for a, b in zip(mine, theirs, strict=True)), name


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build(tmp_path_factory.mktemp("arm64") / "there", CROSS))


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results(str(built_here(tmp_path_factory.mktemp("x86") / "here")), level="portable")


@pytest.mark.parametrize("level", PROCESSORS)
def test_kernels_have_the_results_of_x86(driver: str, here: Results, level: str) -> None:
    """On the most capable processor, lowered to the level."""
    compare(here, results(QEMU, "-cpu", "max", driver, level=level))


@pytest.mark.parametrize("level", PROCESSORS)
def test_a_processor_runs_the_level_that_it_has(driver: str, level: str) -> None:
    """No more is chosen than it has: another instruction would end the process. `level` would lower it at most."""
    command = [QEMU, "-cpu", PROCESSORS[level], driver]
    environment = {key: value for key, value in os.environ.items() if key != "PDKERNELS_CPU_ISA"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600, env=environment)
    assert done.stdout.partition("\n")[0] == f"level {level}"
