"""Finds and loads the compiled library of tensor ops.

A missing library gives one warning, because references and Triton kernels still work. A library that exists but does
not load is an error, because silence would hide a broken install.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import warnings
from functools import cache
from pathlib import Path

import torch


def library_path() -> Path:
    """``PDKERNELS_LIBRARY`` names another build, such as one with sanitizers."""
    return Path(os.environ.get("PDKERNELS_LIBRARY") or Path(__file__).with_name("_ops.so"))


def _is_cut_off(path: Path) -> bool:
    """Whether an ELF file ends before its last part, the section table. Loading such a file would crash the process."""
    with path.open("rb") as file:
        header = file.read(64)
    if len(header) < 64:
        return True
    start = struct.unpack_from("<Q", header, 40)[0]
    size, count = struct.unpack_from("<HH", header, 58)
    return bool(start + size * count > path.stat().st_size)


@cache
def has_native() -> bool:
    """Whether the compiled ops are available. Loads them on the first call."""
    path = library_path()
    if not path.exists():
        warnings.warn(
            f"pdkernels: the compiled library is missing ({path}), so CPU ops run as slow references. "
            "Build it with: pip install . (or: python setup.py build_ext --inplace)",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    try:
        if _is_cut_off(path):
            raise OSError("the file is not complete")
        torch.ops.load_library(str(path))
    except OSError as error:
        raise ImportError(
            f"pdkernels: {path} does not load with torch {torch.__version__}: {error}. Rebuild it with: pip install --force-reinstall ."
        ) from error
    return True


@cache
def build_info() -> dict[str, str]:
    """How the library was built: version, torch, compiler, cuda_archs. Empty when it is missing."""
    if not has_native():
        return {}
    entry = ctypes.CDLL(str(library_path())).pdkernels_build_info
    entry.restype = ctypes.c_char_p
    info: dict[str, str] = json.loads(entry())
    return info


def touch(address: int, nbytes: int) -> None:
    """Writes zeros into fresh memory, a byte of every page, from the threads that kernels run on."""
    entry = getattr(ctypes.CDLL(str(library_path())), "pdkernels_touch", None) if has_native() else None
    if entry is not None:  # not in an older library
        entry(ctypes.c_void_p(address), ctypes.c_int64(nbytes))


def cuda_archs() -> list[str]:
    """Architectures the CUDA kernels were compiled for, such as ``["80", "90a", "100"]``."""
    return [arch for arch in build_info().get("cuda_archs", "").split(";") if arch]
