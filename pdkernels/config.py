"""The installed versions, what is missing, the compiled kernels, and the implementation of each op on each device."""

from __future__ import annotations

import importlib.metadata
import os
import platform

import torch

from pdkernels import _native, backends
from pdkernels._extras import missing_extras
from pdkernels._host import cpu_isa
from pdkernels._version import __version__

__all__ = ["__version__", "show_config"]

# Every environment variable that the package reads at run time.
ENVIRONMENT = {
    "PDKERNELS_BACKEND": "default backend of every op: auto, native, triton or reference",
    "PDKERNELS_CPU_ISA": "portable, avx2, avx2_vnni, avx512, avx512_vnni, avx512_bf16 or amx; on arm64 portable, neon_dot or neon_i8mm: "
    "lowers what CPU kernels may use",
    "PDKERNELS_DEBUG_CHECKS": "1: read values back from the GPU and check them, one sync per call",
    "PDKERNELS_GLUON": "0: Triton kernels on Hopper too, in place of the Gluon kernels; one-pass: gradients of attention in one pass there",
    "PDKERNELS_HUGE_PAGES": "0: no huge pages for weights and KV caches on the CPU",
    "PDKERNELS_LIBRARY": "path of another build of the compiled ops",
    "PDKERNELS_WHOLE_STEP": "0: the layers of a model run one by one on the CPU too",
}


def show_config() -> str:
    """Versions, what was compiled, which extras are missing, and the implementation of each op on each device, as text.

    Never starts a CUDA context.

    Example:
        >>> import pdkernels as pd
        >>> pd.show_config().splitlines()[0].split()[0]
        'pdkernels'
    """
    info = _native.build_info()
    lines = [f"pdkernels {__version__}", ""]
    lines += _section("versions", _versions())
    lines += _section(
        "compiled ops",
        {
            "library": str(_native.library_path()) if info else "missing: CPU ops run as slow references",
            "built with": f"{info['compiler']}, against torch {info['torch']}" if info else "-",
            "CUDA": ", ".join(f"sm_{arch}" for arch in _native.cuda_archs()) or "not compiled",
        },
    )
    lines += _section(
        "extras", missing_extras() or {"-": "this copy is not installed, so its requirements are unknown"}
    )
    lines += _section("devices", _devices())
    width = max(len(op) for op in backends.CHOICES) + 4
    lines.append(f"{'op':<{width}}{'cpu':<14}{'cuda':<14}")
    for op in sorted(backends.CHOICES):
        lines.append(f"  {op:<{width - 2}}{_choice(op, 'cpu'):<14}{_choice(op, 'cuda'):<14}")
    lines.append("")
    lines += _section("environment", {name: os.environ.get(name, "-") for name in ENVIRONMENT})
    return "\n".join(lines).rstrip() + "\n"


def _section(title: str, entries: dict[str, str]) -> list[str]:
    width = max(len(name) for name in entries) + 2
    return [title, *(f"  {name:<{width}}{value}" for name, value in entries.items()), ""]


def _versions() -> dict[str, str]:
    def installed(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "not installed"

    optional = {name: installed(name) for name in ("triton", "safetensors", "cuda-bindings")}
    return {"python": platform.python_version(), "torch": torch.__version__, **optional}


def _devices() -> dict[str, str]:
    cpu = f"{platform.machine()}, {torch.get_num_threads()} threads, kernels may use {cpu_isa()}"
    if torch.version.cuda is None:
        return {"cpu": cpu, "cuda": "this torch is built without CUDA"}
    return {"cpu": cpu, "cuda": f"torch for CUDA {torch.version.cuda}, {torch.cuda.device_count()} devices"}


def _choice(op: str, device: str) -> str:
    return backends.CHOICES[op].get((backends.DEFAULT, device), "none")
