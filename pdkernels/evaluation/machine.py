"""The machine and the versions of a measurement."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

from pdkernels._host import cpu_isa
from pdkernels._version import __version__


def facts() -> dict[str, Any]:
    """Machine and versions, for the JSON of every measurement."""
    return {
        "device": processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pdkernels": __version__,
    }


def processor() -> str:
    """Name of this machine's CPU, and the instruction set that kernels use on it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    name = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
    return f"{name} ({cpu_isa()})"
