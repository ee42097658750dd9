"""Builds the two compiled parts of pdkernels with ninja.

``pdkernels/_ops.so``   tensor ops, against torch's stable ABI: CPU always, CUDA where nvcc is found. Not tied to a Python
                        version, and one file loads on torch 2.11 and later, CPU or CUDA builds.
``pdkernels._host``     the pybind11 module.

Environment: PDKERNELS_BUILD_CUDA=auto|0|1, PDKERNELS_CUDA_ARCHS (default "80;90a;100"), MAX_JOBS, CXX, and
two for tests, which build CPU ops under ``build/`` and install nothing: PDKERNELS_SANITIZE=1, with ASan and UBSan, and
PDKERNELS_EMULATE_ISA=1, with all vector units on any processor.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
VERSION = re.search('"(.+)"', (ROOT / "pdkernels/_version.py").read_text()).group(1)
OLDEST_TORCH = (2, 11)
USUAL_CUDA_HOME = "/usr/local/cuda"
STABLE_ABI = f"0x{OLDEST_TORCH[0]:02x}{OLDEST_TORCH[1]:02x}000000000000"


def fail(sentence: str) -> None:
    sys.exit(f"\npdkernels: {sentence}\n")


def check_python(version: tuple[int, ...], setuptools_version: str) -> None:
    if tuple(version[:2]) < (3, 10):
        found = ".".join(str(part) for part in version[:3])
        fail(f"Python 3.10 or newer is needed, but this is {found}. Run the build with a newer Python.")
    if int(setuptools_version.split(".")[0]) < 77:
        fail(f"setuptools 77 or newer is needed, but this is {setuptools_version}. Run: pip install 'setuptools>=77'")


def package_folders() -> Iterator[str]:
    """Where packages are installed. An isolated build hides the environment's packages from imports but not from the disk."""
    yield from (path or "." for path in sys.path)
    configuration = Path(sys.prefix) / "pyvenv.cfg"
    bases = [sys.prefix]
    if configuration.is_file() and re.search(r"include-system-site-packages\s*=\s*true", configuration.read_text()):
        bases.append(sys.base_prefix)
    for base in bases:
        for name in ("purelib", "platlib"):
            yield sysconfig.get_path(name, vars={"base": base, "platbase": base})
    if sys.prefix == sys.base_prefix:
        yield site.getusersitepackages()


def locate_torch() -> Path | None:
    return next(
        (Path(folder) / "torch" for folder in package_folders() if (Path(folder) / "torch/version.py").is_file()), None
    )


def find_torch() -> tuple[Path, str]:
    """The installed torch package and its version."""
    torch = locate_torch()
    if torch is None:
        fail("torch must be installed before pdkernels is built. Run: pip install 'torch>=2.11'")
    version = re.search(r"__version__ = '(.+?)'", (torch / "version.py").read_text()).group(1)
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TORCH:
        fail(f"torch 2.11 or newer is needed, but {version} is installed. Run: pip install 'torch>=2.11'")
    if not (torch / "include/torch/csrc/stable/library.h").is_file():
        fail(f"the torch in {torch} has no C++ headers. Install a full build of torch 2.11 or newer.")
    return torch, version


def find_python_headers() -> str:
    folder = sysconfig.get_path("include")
    if not (Path(folder) / "Python.h").is_file():
        fail(f"{folder} has no Python.h. Install Python's headers (Debian or Ubuntu: apt-get install python3-dev).")
    return folder


def find_compiler() -> str:
    for name in [os.environ.get("CXX"), "c++", "g++", "clang++"]:
        if name and shutil.which(shlex.split(name)[0]):
            return name
    fail("no C++ compiler was found. Install one (Debian or Ubuntu: apt-get install g++) or name it in CXX.")


def find_nvcc() -> str | None:
    mode = os.environ.get("PDKERNELS_BUILD_CUDA", "auto")
    if mode not in ("auto", "0", "1"):
        fail(f"PDKERNELS_BUILD_CUDA must be auto, 0 or 1, got {mode!r}.")
    if mode == "0":
        return None
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), USUAL_CUDA_HOME]
    nvcc = next((str(Path(home) / "bin/nvcc") for home in homes if home and (Path(home) / "bin/nvcc").exists()), None)
    nvcc = nvcc or shutil.which("nvcc")
    if nvcc is None and mode == "1":
        fail(
            "PDKERNELS_BUILD_CUDA=1 needs nvcc, and none was found on PATH or in CUDA_HOME. Install the CUDA toolkit or unset it."
        )
    return nvcc


def cuda_archs(nvcc: str) -> list[str]:
    """Wanted architectures that this nvcc knows. The newest one is embedded as PTX too, for GPUs to come."""
    wanted = re.split(r"[;,\s]+", os.environ.get("PDKERNELS_CUDA_ARCHS", "80;90a;100").strip())
    listing = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=False).stdout
    known = set(re.findall(r"compute_(\w+)", listing))
    archs = [arch for arch in wanted if arch in known or arch.rstrip("af") in known]
    if not archs:
        fail(
            f"nvcc at {nvcc} knows none of the architectures {', '.join(wanted)}. Set PDKERNELS_CUDA_ARCHS or PDKERNELS_BUILD_CUDA=0."
        )
    return archs


def cpu_levels(*, emulate: bool) -> dict[str, list[str]]:
    """The levels of `CpuIsa` and their compiler flags. All are compiled on any x86-64 machine; one is chosen at run time.

    `emulate` leaves the choice of instructions to the compiler.
    """
    levels = {"portable": ["-DPDK_LANES=4"]}
    if platform.machine() in ("x86_64", "AMD64"):
        levels |= {"avx2": ["-DPDK_LANES=8"], "avx512": ["-DPDK_LANES=16"], "amx": ["-DPDK_LANES=16", "-DPDK_AMX"]}
    avx512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512"]
    instructions = {
        "avx2": ["-mavx2", "-mfma"],
        "avx512": avx512,
        "amx": [*avx512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
    }
    # No vector crosses a call in these units, so how one would be passed does not matter; and nothing in them throws.
    common = ["-Wno-psabi", "-fno-exceptions"]
    return {
        level: [f"-DPDK_ISA={level}", *common, *sizes, *([] if emulate else instructions.get(level, []))]
        for level, sizes in levels.items()
    }


class NinjaFile:
    """The few ninja statements this build needs."""

    def __init__(self) -> None:
        self.lines: list[str] = ["ninja_required_version = 1.5"]

    def rule(self, name: str, command: list[str], *, depfile: bool = False) -> None:
        subject = "$out" if name.startswith("link") else "$in"
        self.lines += [f"rule {name}", f"  command = {' '.join(command)}", f"  description = {name} {subject}"]
        if depfile:
            self.lines += ["  depfile = $out.d", "  deps = gcc"]

    def build(self, out: Path, rule: str, sources: list[Path]) -> Path:
        self.lines.append(f"build {escape(out)}: {rule} {' '.join(escape(source) for source in sources)}")
        return out


def escape(path: Path) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def quote(*arguments: object) -> list[str]:
    return [shlex.quote(str(argument)).replace("$", "$$") for argument in arguments]


def install(built: Path, target: Path) -> None:
    if target.is_file() and target.stat().st_mtime_ns == built.stat().st_mtime_ns:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    # A fresh file instead of writing into one that a running process may have mapped.
    fresh = target.with_name(target.name + ".new")
    shutil.copy2(built, fresh)
    fresh.replace(target)


class BuildNative(build_ext):
    def run(self) -> None:
        import pybind11

        # Two builds for tests, both of them with kernels of all CPU levels that run on any processor: one with sanitizers to stand
        # in for the library, one to be loaded beside it.
        sanitize = os.environ.get("PDKERNELS_SANITIZE") == "1"
        emulate = os.environ.get("PDKERNELS_EMULATE_ISA") == "1"
        for_tests = sanitize or emulate
        torch, torch_version = find_torch()
        cxx = shlex.split(find_compiler())
        nvcc = None if for_tests else find_nvcc()
        archs = cuda_archs(nvcc) if nvcc else []
        out = ROOT / "build" / ("native-sanitize" if sanitize else "native-emulate" if emulate else "native")
        out.mkdir(parents=True, exist_ok=True)

        optimise = (
            ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
            if sanitize
            else ["-O2" if emulate else "-O3"]
        )
        host = ["-std=c++20", "-fPIC", "-fvisibility=hidden", *optimise, "-Wall", "-Wextra"]
        if os.environ.get("CI"):
            host.append("-Werror")
        if for_tests:
            host.append("-DPDKERNELS_EMULATE_ISA")
        if emulate:
            host.append("-DPDKERNELS_OPS_NAMESPACE=pdkernels_emulated")
        includes = ["-I", ROOT / "csrc/include", "-I", ROOT / "csrc/cpu", "-isystem", torch / "include"]
        stable = [f"-DTORCH_TARGET_VERSION={STABLE_ABI}"]
        facts = [
            f'-DPDKERNELS_VERSION="{VERSION}"',
            f'-DPDKERNELS_TORCH_VERSION="{torch_version}"',
            f'-DPDKERNELS_CUDA_ARCHS="{";".join(archs)}"',
        ]
        ninja = NinjaFile()
        ninja.rule(
            "cxx", [*quote(*cxx, *host, *includes, *stable, *facts), "-MMD -MF $out.d -c $in -o $out"], depfile=True
        )
        host_includes = [
            "-I",
            ROOT / "csrc/include",
            "-isystem",
            pybind11.get_include(),
            "-isystem",
            find_python_headers(),
        ]
        ninja.rule("cxx_host", [*quote(*cxx, *host, *host_includes), "-MMD -MF $out.d -c $in -o $out"], depfile=True)
        libraries = ["-L", torch / "lib", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu"]
        if nvcc:
            codes = [f"arch=compute_{arch},code=sm_{arch}" for arch in archs[:-1]]
            codes.append(f"arch=compute_{archs[-1]},code=[sm_{archs[-1]},compute_{archs[-1]}]")
            cuda = [
                nvcc,
                "-std=c++20",
                "-DPDKERNELS_DEVICE_CUDA",
                "-O3",
                "-lineinfo",
                "-ccbin",
                cxx[0],
                "--threads",
                "3",
                "-Xcompiler",
                "-fPIC,-fvisibility=hidden",
                *(flag for code in codes for flag in ("-gencode", code)),
                "-I",
                ROOT / "csrc/include",
                "-I",
                ROOT / "csrc/cuda",
                "-isystem",
                torch / "include",
                *stable,
            ]
            ninja.rule("nvcc", [*quote(*cuda), "-MMD -MF $out.d -c $in -o $out"], depfile=True)
            ninja.rule(
                "link_ops",
                [
                    *quote(nvcc, "-shared", "-ccbin", cxx[0], "-cudart", "static", "--no-device-link"),
                    "-o $out $in",
                    *quote(*(f.replace("-Wl,", "-Xlinker=") if isinstance(f, str) else f for f in libraries)),
                ],
            )
        else:
            ninja.rule("link_ops", [*quote(*cxx, "-shared", *optimise), "-o $out $in", *quote(*libraries)])
        ninja.rule("link_host", [*quote(*cxx, "-shared", *optimise), "-o $out $in"])

        bindings = ROOT / "python_bindings"
        built = {}
        if not for_tests:
            # First, because it takes longest to compile.
            host_objects = [
                ninja.build(out / f"{unit.stem}.o", "cxx_host", [unit]) for unit in sorted(bindings.glob("host*.cpp"))
            ]
            host_module = out / f"_host{sysconfig.get_config_var('EXT_SUFFIX')}"
            built["pdkernels._host"] = ninja.build(host_module, "link_host", host_objects)
        units = [*sorted((ROOT / "csrc/cpu").glob("*.cpp")), bindings / "ops.cpp", bindings / "build_info.cpp"]
        objects = [ninja.build(out / f"{unit.parent.name}_{unit.stem}.o", "cxx", [unit]) for unit in units]
        for level, flags in cpu_levels(emulate=for_tests).items():
            ninja.rule(
                f"cxx_{level}", [*quote(*cxx, *host, *includes, *flags), "-MMD -MF $out.d -c $in -o $out"], depfile=True
            )
            units = sorted((ROOT / "csrc/cpu/simd").glob("*.cpp"))
            objects += [ninja.build(out / f"simd_{level}_{unit.stem}.o", f"cxx_{level}", [unit]) for unit in units]
        if nvcc:
            units = [*sorted((ROOT / "csrc/cuda").glob("*.cu")), bindings / "ops.cpp"]
            objects += [ninja.build(out / f"cuda_{unit.stem}.o", "nvcc", [unit]) for unit in units]
        built["pdkernels._ops"] = ninja.build(out / "_ops.so", "link_ops", objects)

        with (out / ".lock").open("w") as lock:  # two builds at once take turns
            fcntl.flock(lock, fcntl.LOCK_EX)
            (out / "build.ninja").write_text("\n".join(ninja.lines) + "\n")
            self.run_ninja(out)
            if not for_tests:
                for extension in self.extensions:
                    install(built[extension.name], Path(self.get_ext_fullpath(extension.name)))

    def run_ninja(self, out: Path) -> None:
        # A C++ unit with torch's headers takes about 1 GB to compile.
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**30
        jobs = os.environ.get("MAX_JOBS") or str(max(1, min(os.cpu_count() or 1, memory // 2)))
        ninja = shutil.which("ninja")
        command = [ninja] if ninja else [sys.executable, "-m", "ninja"]
        if subprocess.run([*command, "-C", str(out), "-j", jobs], check=False).returncode != 0:
            fail("the build failed; the compiler's own message stands above.")

    def get_ext_filename(self, fullname: str) -> str:
        if fullname.endswith("_ops"):  # not a Python module, so no Python version in its name
            return os.path.join(*fullname.split(".")) + ".so"
        return super().get_ext_filename(fullname)


if __name__ == "__main__":
    check_python(sys.version_info, setuptools.__version__)
    # pip asks for the build's requirements through `egg_info`: torch is one only where no torch is installed.
    wants_torch = "egg_info" in sys.argv and locate_torch() is None
    setup(
        ext_modules=[Extension("pdkernels._ops", []), Extension("pdkernels._host", [])],
        cmdclass={"build_ext": BuildNative},
        setup_requires=["torch>=2.11"] if wants_torch else [],
    )
