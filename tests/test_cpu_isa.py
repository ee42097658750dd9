"""The processor's vector units, against what the operating system reports."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import setup
from pdkernels import _host
from setup import cpu_levels, simd_units

ROOT = Path(__file__).resolve().parent.parent
LEVELS = list(cpu_levels(emulate=False))
LEVELS_OF_X86 = ["portable", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx"]


def isa(wanted: str | None = None) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PDKERNELS_CPU_ISA"}
    if wanted is not None:
        environment["PDKERNELS_CPU_ISA"] = wanted
    # The module by its path: importing the package would load torch in every one of these processes.
    load = f"import importlib.machinery as m; print(m.ExtensionFileLoader('_host', {_host.__file__!r}).load_module().cpu_isa())"
    command = [sys.executable, "-W", "ignore", "-c", load]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


@pytest.mark.skipif(platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists(), reason="needs x86-64 Linux")
def test_agrees_with_cpuinfo() -> None:
    flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")).split()
    expected = "portable"
    if {"avx2", "fma"} <= set(flags):
        expected = "avx2_vnni" if "avx_vnni" in flags else "avx2"
        if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= set(flags):
            expected = "avx512_vnni" if "avx512_vnni" in flags else "avx512"
            if {"avx512_vnni", "avx512_bf16"} <= set(flags):
                expected = "amx" if {"amx_bf16", "amx_int8", "amx_tile"} <= set(flags) else "avx512_bf16"
    assert isa() == expected


def test_environment_lowers_but_never_raises() -> None:
    found = LEVELS.index(isa())
    for level, name in enumerate(LEVELS):
        assert isa(name) == LEVELS[min(level, found)]
    assert f"PDKERNELS_CPU_ISA must be {', '.join(LEVELS[:-1])} or {LEVELS[-1]}, got 'mmx'" in isa("mmx")


@pytest.mark.parametrize(
    ("machine", "features", "named"),
    [
        ("x86_64", "", {}),
        ("x86_64", "avx2 fma f16c avx512f", {level: ["-mavx2", "-mfma", "-mf16c"] for level in LEVELS_OF_X86[1:]}),
        (
            "x86_64",
            "avx2 fma f16c avx512f avx512bw avx512vl avx512dq",
            {level: ["-mavx2", "-mfma", "-mf16c"] for level in LEVELS_OF_X86[1:]}
            | {"avx512": [flag for flag in cpu_levels(emulate=False).get("avx512", ()) if flag.startswith("-m")]},
        ),
        ("aarch64", "", {}),
        ("aarch64", "asimddp i8mm", {"neon_dot": ["-march=armv8.2-a+dotprod"]}),
        (
            "aarch64",
            "asimddp i8mm bf16",
            {"neon_dot": ["-march=armv8.2-a+dotprod"], "neon_i8mm": ["-march=armv8.2-a+dotprod+i8mm+bf16"]},
        ),
    ],
)
def test_an_emulated_build_asks_for_no_instruction_that_the_processor_lacks(
    machine: str, features: str, named: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(setup, "processor_has", lambda *wanted: set(wanted) <= set(features.split()))
    found = {
        level: [flag for flag in flags if flag.startswith("-m")] for level, flags in cpu_levels(emulate=True).items()
    }
    assert {level: flags for level, flags in found.items() if flags} == named


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
@pytest.mark.parametrize("level", LEVELS)
def test_what_is_compiled_for_a_level_stays_in_its_namespace(level: str) -> None:
    """The linker keeps one copy of an inline function: a copy with AVX-512 in it would crash other processors."""
    objects = [ROOT / f"build/native/simd_{level}_{unit.stem}.o" for unit in simd_units(level)]
    assert objects
    listing = subprocess.run(
        ["nm", "-C", "--defined-only", *objects], capture_output=True, text=True, check=True
    ).stdout
    defined = [line.split(" ", 2) for line in listing.splitlines() if line.count(" ") >= 2]
    foreign = [name for _, kind, name in defined if kind in "TWVBDu" and f"pdkernels::cpu::{level}::" not in name]
    assert defined and foreign == []
