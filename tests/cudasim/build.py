"""Compiles .cu files for the CPU, together with the runtime in this folder, into one shared library (Linux, g++).

    path = build_library("pdkernels_cudasim", sources=[...], include_dirs=[...], defines=[...])
    library = ctypes.CDLL(str(path))  # the same object in memory as after torch.ops.load_library(path)
    for order in SCHEDULES:
        with schedule(library, order):
            ...  # every result must be the same

The library is cached under `build/cudasim/` by a hash of everything that goes into it, and building is safe when
several test processes ask for the same library at once.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CACHE = ROOT / "build" / "cudasim"

RUNTIME_SOURCES = sorted((HERE / "runtime").glob("*.cpp"))
RUNTIME_INCLUDE_DIRS = [HERE / "include", HERE / "runtime"]

# Every kernel test runs under each of these: order of blocks, and of threads between two barriers.
SCHEDULES = ("forward", "reverse", "random:1", "random:2")

COMMON_FLAGS = [
    "-std=c++20",
    "-O1",  # compiles fast, and the time of a simulated kernel goes into switching fibers
    "-g1",
    "-fPIC",
    "-DPDKERNELS_CUDASIM",
    # Several such libraries can live in one process, each with its own runtime.
    "-fvisibility=hidden",
    "-fno-gnu-unique",
    "-fno-strict-aliasing",  # nvcc does not use type-based aliasing either
    "-U_FORTIFY_SOURCE",  # its longjmp refuses to switch stacks, which fibers do
]
# What a GPU refuses or C++ leaves undefined; runtime/sanitizer.cpp turns a hit into an error.
CHECK_FLAGS = [
    "-fsanitize=alignment,bounds,shift-exponent,integer-divide-by-zero",
    "-fno-sanitize-recover=all",
    "-Wall",
    "-Wno-unknown-pragmas",  # `#pragma unroll`
]


class CompilerNotFound(RuntimeError):
    """No C++ compiler on this machine."""


def compiler() -> str:
    """The C++ compiler: $CXX, else g++. The checks in .cu files need GCC 11 or later."""
    compiler = os.environ.get("CXX") or "g++"
    found = shutil.which(compiler)
    if found is None:
        raise CompilerNotFound(
            f"tests.cudasim: no C++ compiler {compiler!r}. Install g++ 11 or later, or point CXX to one."
        )
    return found


def build_library(
    name: str,
    sources: Sequence[Path | str],
    *,
    include_dirs: Sequence[Path | str] = (),
    system_include_dirs: Sequence[Path | str] = (),
    headers: Sequence[Path | str] = (),
    defines: Sequence[str] = (),
    link_flags: Sequence[str] = (),
) -> Path:
    """Compile `sources` (.cu or .cpp) and the runtime into `build/cudasim/lib<name>-<hash>.so` and return its path.

    Headers under `include_dirs` are part of the hash by content; `system_include_dirs` (torch, say) by path only, except
    for those in the folders `headers`.
    `defines` are "NAME" or "NAME=VALUE". A failing compilation raises RuntimeError with the compiler's output.
    """
    own = _Compilation(
        [*RUNTIME_INCLUDE_DIRS, *map(Path, include_dirs)], system_include_dirs, map(Path, headers), defines
    )
    runtime = _Compilation(RUNTIME_INCLUDE_DIRS)  # without the caller's flags: compiled once for all
    objects = [own.object(Path(source)) for source in sources]
    objects += [runtime.object(source) for source in RUNTIME_SOURCES]

    key = digest_text(*(unit.key for unit in objects), *link_flags)
    library = CACHE / f"lib{name}-{key}.so"

    def link(target: Path) -> None:
        with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
            files = list(pool.map(lambda unit: str(unit.build()), objects))
        run_compiler([compiler(), "-shared", "-o", str(target), *files, *link_flags])

    return build_once(library, link)


class _Compilation:
    """A compiler command without its source."""

    def __init__(
        self,
        include_dirs: Sequence[Path],
        system_include_dirs: Sequence[Path | str] = (),
        headers: Iterable[Path] = (),
        defines: Sequence[str] = (),
    ) -> None:
        self.command = [compiler(), *COMMON_FLAGS, *(f"-D{define}" for define in defines)]
        for flag, directories in (("-I", include_dirs), ("-isystem", system_include_dirs)):
            for directory in directories:
                self.command += [flag, _from_root(Path(directory))]
        hashed = [*include_dirs, *headers]
        self.key = digest_text(_version(compiler()), *(digest(headers_under(directory)) for directory in hashed))

    def object(self, source: Path) -> _Object:
        arguments = [
            *self.command,
            *(CHECK_FLAGS if source.suffix == ".cu" else []),
            "-x",
            "c++",
            "-c",
            _from_root(source),
        ]
        key = digest_text(self.key, *arguments, digest([source, *headers_under(source.parent)]))
        return _Object(source.stem, arguments, key)


class _Object:
    """The object file of one source."""

    def __init__(self, stem: str, arguments: list[str], key: str) -> None:
        self.arguments = arguments
        self.key = key
        self.path = CACHE / "objects" / f"{stem}-{key}.o"

    def build(self) -> Path:
        return build_once(self.path, lambda target: run_compiler([*self.arguments, "-o", str(target)]))


@contextmanager
def schedule(library: ctypes.CDLL, text: str) -> Iterator[None]:
    """Run the kernels of a loaded library under one of SCHEDULES (or "random:SEED"), then as before."""
    library.cudasim_schedule.restype = ctypes.c_char_p
    before = library.cudasim_schedule()
    if not library.cudasim_set_schedule(text.encode()):
        raise ValueError(f"tests.cudasim.schedule: text must be forward, reverse or random:SEED, got {text!r}")
    try:
        yield
    finally:
        library.cudasim_set_schedule(before)


def build_once(path: Path, build: Callable[[Path], None]) -> Path:
    """Return `path`, which one process at a time makes by `build(temporary path)` if it does not exist."""
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(path.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
            build(temporary)
            temporary.replace(path)  # never half a file under the final name
    return path


def _from_root(path: Path) -> str:
    """The path relative to the root of the checkout, where the compiler runs: short in its reports and ours."""
    path = path.resolve()
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def headers_under(directory: Path) -> list[Path]:
    """All header files in a folder, in a fixed order."""
    return sorted(path for path in directory.rglob("*") if path.suffix in {".h", ".hpp", ".cuh"})


def digest(paths: Iterable[Path]) -> str:
    """A hash of files: their names and contents."""
    parts = []
    for path in paths:
        parts += [path.name, hashlib.sha256(path.read_bytes()).hexdigest()]
    return digest_text(*parts)


def digest_text(*parts: str) -> str:
    """A hash of strings, short enough for a file name."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@functools.cache
def _version(compiler: str) -> str:
    return run_compiler([compiler, "--version"]).splitlines()[0]


def run_compiler(command: list[str]) -> str:
    """Run it in the root of the checkout and return all it prints."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode != 0:
        raise RuntimeError(f"tests.cudasim: compilation failed.\n{' '.join(command)}\n{done.stderr.strip()}")
    return done.stdout + done.stderr
