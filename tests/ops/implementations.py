"""Every way to run an op, behind one interface, so that a test body is written once.

``cpu``      the compiled CPU kernels through the public functions
``cuda``     the compiled CUDA kernels through the public functions, where there is a GPU
``cudasim``  the very same CUDA sources and bindings, executed on the CPU by tests/cudasim

`emulated_ops` are the CPU kernels of every vector unit, on any processor.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils import cpp_extension

import pdkernels as pd
from pdkernels.ops.library import OPS
from tests.cudasim.build import ROOT, SCHEDULES, build_library, schedule


class Public:
    """The public functions on one device."""

    def __init__(self, device: str) -> None:
        self.name, self.device = device, torch.device(device)
        # On the CPU bad values raise; on CUDA the sequence they belong to is left unchanged.
        self.raises = device == "cpu"

    def __getattr__(self, op: str) -> Callable[..., Any]:
        return getattr(pd, op)


class Simulated:
    """The public functions with the CUDA kernels on the CPU runtime; their refusals have no message."""

    name, device, raises = "cudasim", torch.device("cpu"), False

    def __init__(self) -> None:
        self.library, self.ops = simulated_ops()

    def __getattr__(self, op: str) -> Callable[..., Any]:
        function = getattr(pd, op)

        def simulated(overload: torch._ops.OpOverload, arguments: tuple[Any, ...], *_: object) -> Any:
            return getattr(self.ops, overload._opname)(*arguments)

        def run(*arguments: Any, **options: Any) -> Any:
            with mock.patch.object(sys.modules[function.__module__], "call", simulated):
                return function(*arguments, **options)

        return run

    def schedules(self) -> Iterator[contextlib.AbstractContextManager[None]]:
        """Orders in which threads and blocks may run: a missing barrier shows as different results."""
        return (schedule(self.library, order) for order in SCHEDULES)

    def blocks(self, run: Callable[[], object]) -> int:
        """How many blocks of threads a call launches."""
        self.library.cudasim_blocks.restype = ctypes.c_uint64
        before: int = self.library.cudasim_blocks()
        run()
        return int(self.library.cudasim_blocks()) - before


@cache
def simulated_ops() -> tuple[ctypes.CDLL, object]:
    """Builds the CUDA half of the library against the CPU runtime and registers it alongside the real ops."""
    path = build_library(
        "pdkernels_cudasim",
        [*sorted((ROOT / "csrc/cuda").glob("*.cu")), ROOT / "python_bindings/ops.cpp"],
        include_dirs=[ROOT / "csrc/cuda", ROOT / "python_bindings"],
        headers=[ROOT / "csrc" / folder for folder in ("common", "host", "ops")],
        system_include_dirs=[ROOT / "csrc", *map(Path, cpp_extension.include_paths())],
        defines=[
            "TORCH_TARGET_VERSION=0x020b000000000000",
            "PDKERNELS_DEVICE_CUDA",
            "PDKERNELS_OPS_NAMESPACE=pdkernels_cudasim",
            "PDKERNELS_OPS_KEY=CPU",
        ],
        link_flags=[f"-L{path}" for path in cpp_extension.library_paths()] + ["-ltorch_cpu"],
    )
    library = torch.library.Library("pdkernels_cudasim", "DEF")
    for spec in OPS.values():
        library.define(spec.schema)
    torch.ops.load_library(str(path))
    simulated_ops.keep_alive = library
    return ctypes.CDLL(str(path)), torch.ops.pdkernels_cudasim


@cache
def emulated_ops() -> object:
    """All CPU ops once more alongside the real ones; PDKERNELS_CPU_ISA names the level of each call."""
    environment = os.environ | {"PDKERNELS_EMULATE_ISA": "1"}
    built = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stdout + built.stderr
    library = torch.library.Library("pdkernels_emulated", "DEF")
    for spec in OPS.values():
        library.define(spec.schema)
    torch.ops.load_library(str(ROOT / "build/native/emulate/_ops.so"))
    emulated_ops.keep_alive = library
    return torch.ops.pdkernels_emulated


@cache
def implementation(name: str) -> Public | Simulated:
    return Simulated() if name == "cudasim" else Public(name)


LEVELS = ["portable", "avx2", "avx512", "amx"]
NAMES = ["cpu", "cudasim", *(["cuda"] if torch.cuda.is_available() else [])]
