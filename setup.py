"""Builds the two compiled parts of pdkernels with ninja.

``pdkernels/_ops.so``   tensor ops, against torch's stable ABI: CPU always, CUDA where nvcc is found. Not tied to a Python
                        version, and one file loads on torch 2.11 and later, CPU or CUDA builds.
``pdkernels._host``     the pybind11 module.

Environment: PDKERNELS_BUILD_CUDA=auto|0|1, PDKERNELS_CUDA_ARCHS (default "80;90a;100"), MAX_JOBS, CXX,
PDKERNELS_HOST_PYTHONS (interpreters, separated by colons, that one wheel is to serve in addition to the running one),
PDKERNELS_OPS_NAMESPACE (of the ops in torch, for a copy of the package under that name: scripts/hf_kernels.py), and two for
tests, which build CPU ops under ``build/`` and install nothing: PDKERNELS_SANITIZE=1, with ASan and UBSan, and
PDKERNELS_EMULATE_ISA=1, with all vector units on any processor.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
ON_MAC = sys.platform == "darwin"  # not tested
VERSION = re.search('"(.+)"', (ROOT / "pdkernels/_version.py").read_text()).group(1)
OLDEST_TORCH = (2, 11)
USUAL_CUDA_HOME = "/usr/local/cuda"
CUDA_ARCHS = ("80", "90a", "100")
NVCC_FLAGS = ("-std=c++20", "-O3")
STABLE_ABI = f"0x{OLDEST_TORCH[0]:02x}{OLDEST_TORCH[1]:02x}000000000000"
REPOSITORY = "https://github.com/pdkernels/pdkernels"


def fail(sentence: str) -> None:
    sys.exit(f"\npdkernels: {sentence}\n")


def check_python(version: tuple[int, ...], setuptools_version: str) -> None:
    if tuple(version[:2]) < (3, 10):
        found = ".".join(str(part) for part in version[:3])
        fail(f"Python 3.10 or newer is needed, but this is {found}. Run the build with a newer Python.")
    if tuple(map(int, re.findall(r"\d+", setuptools_version)[:3])) < (78, 1, 1):
        fail(
            f"setuptools 78.1.1 or newer is needed, but this is {setuptools_version}. Run: pip install 'setuptools>=78.1.1'"
        )


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
    folders = (Path(folder) / "torch" for folder in package_folders())
    return next((torch for torch in folders if (torch / "version.py").is_file()), None)


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


def host_pythons() -> dict[str, str]:
    """For each Python that `_host` is built for, the running one first: the suffix of its modules, and its headers."""
    found = {sysconfig.get_config_var("EXT_SUFFIX"): find_python_headers()}
    code = "import sysconfig as s; print(s.get_config_var('EXT_SUFFIX'), s.get_path('include'), sep='\\n')"
    for python in filter(None, os.environ.get("PDKERNELS_HOST_PYTHONS", "").split(os.pathsep)):
        asked = shutil.which(python) and subprocess.run(
            [python, "-c", code], capture_output=True, text=True, check=False
        )
        suffix, _, headers = asked.stdout.strip().partition("\n") if asked else ("", "", "")
        if not (Path(headers) / "Python.h").is_file():
            fail(f"PDKERNELS_HOST_PYTHONS must name Pythons with their headers, got {python!r}.")
        found.setdefault(suffix, headers)
    return found


def find_compiler() -> str:
    named = os.environ.get("CXX", "").strip()
    if named and not shutil.which(shlex.split(named)[0]):
        fail(f"CXX names the compiler {named!r}, which was not found. Name another one, or unset CXX.")
    for name in filter(None, [named, "c++", "g++", "clang++"]):
        if shutil.which(shlex.split(name)[0]):
            return name
    fail("no C++ compiler was found. Install one (Debian or Ubuntu: apt-get install g++) or name it in CXX.")


def host_compiler() -> tuple[list[str], list[object]]:
    """The C++ compiler's command, and the flags of every unit that it compiles."""
    flags: list[object] = ["-std=c++20", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
    flags += ["-Werror"] if os.environ.get("CI") else []
    return shlex.split(find_compiler()), [*flags, "-I", ROOT / "csrc"]


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
        fail("PDKERNELS_BUILD_CUDA=1 needs nvcc, and none was found on PATH or in CUDA_HOME. Install the CUDA toolkit.")
    return nvcc


def smallest_code(nvcc: str) -> list[str]:
    """Compressed in the library too, so that it takes a third of the space once installed."""
    options = subprocess.run([nvcc, "--help"], capture_output=True, text=True, check=False).stdout
    return ["--compress-mode=size"] if "--compress-mode" in options else ["-Xfatbin", "-compress-all"]


def cuda_archs(nvcc: str) -> list[str]:
    """Requested architectures that this nvcc knows."""
    wanted = re.split(r"[;,\s]+", os.environ.get("PDKERNELS_CUDA_ARCHS", ";".join(CUDA_ARCHS)).strip())
    listing = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=False).stdout
    known = set(re.findall(r"compute_(\w+)", listing))
    archs = [arch for arch in wanted if arch in known or arch.rstrip("af") in known]
    if not archs:
        fail(f"{nvcc} knows none of {', '.join(wanted)}. Set PDKERNELS_CUDA_ARCHS or PDKERNELS_BUILD_CUDA=0.")
    return archs


def cuda_targets(archs: Sequence[str]) -> list[str]:
    """Code for every architecture, and PTX of the last one for later GPUs."""
    codes = [f"sm_{arch}" for arch in archs[:-1]] + [f"[sm_{archs[-1]},compute_{archs[-1]}]"]
    return [f"-gencode=arch=compute_{arch},code={code}" for arch, code in zip(archs, codes, strict=True)]


def processor_has(*features: str) -> bool:
    """Whether this processor has them, by the names of Linux; False where the system does not report it."""
    try:
        found = re.search(r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        return False
    return found is not None and set(features) <= set(found.group(1).split())


PROCESSOR_FEATURES = {
    "avx2": ("avx2", "fma", "f16c"),
    "avx2_vnni": ("avx2", "fma", "f16c", "avx_vnni"),
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"),
}
PROCESSOR_FEATURES |= {name: (*PROCESSOR_FEATURES["avx512"], name) for name in ("avx512_vnni", "avx512_bf16")}
"""What Linux calls the instructions of a level."""


def cpu_levels(*, emulate: bool) -> dict[str, list[str]]:
    """The levels of `CpuIsa` and their compiler flags. All of an architecture are compiled; one is chosen at run time.

    `emulate` asks for no instruction that this processor lacks: wide vectors become several narrow ones.
    """
    levels = {"portable": ["-DPDK_LANES=4"]}
    if platform.machine() in ("x86_64", "AMD64"):
        levels |= {"avx2": ["-DPDK_LANES=8"], "avx2_vnni": ["-DPDK_LANES=8"]}
        levels |= {"avx512": ["-DPDK_LANES=16"], "avx512_vnni": ["-DPDK_LANES=16"]}
        # PDK_BELOW: the level whose kernels take what is no product of bfloat16.
        below = ["-DPDK_LANES=16", "-DPDK_BELOW=avx512"]
        levels |= {"avx512_bf16": [*below, "-DPDK_PAIRS"], "amx": [*below, "-DPDK_AMX"]}
    elif platform.machine() in ("aarch64", "arm64"):
        levels |= {"neon_dot": ["-DPDK_LANES=4"], "neon_i8mm": ["-DPDK_LANES=4", "-DPDK_BELOW=portable", "-DPDK_PAIRS"]}
    avx512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512"]
    pairs = [*avx512, "-mavx512bf16"]
    avx2 = ["-mavx2", "-mfma", "-mf16c"]
    instructions = {"avx2": avx2, "avx2_vnni": [*avx2, "-mavxvnni"], "avx512": avx512}
    instructions |= {"avx512_vnni": [*avx512, "-mavx512vnni"], "avx512_bf16": pairs}
    instructions |= {"amx": [*pairs, "-mavx512vnni", "-mamx-tile", "-mamx-bf16", "-mamx-int8"]}
    if emulate:
        narrow = avx2 if processor_has(*PROCESSOR_FEATURES["avx2"]) else []
        for level in instructions:
            # Tiles of AMX are the system's to allow, which the usual library asks for.
            if level == "amx" or not processor_has(*PROCESSOR_FEATURES[level]):
                instructions[level] = narrow
    if not emulate or processor_has("asimddp"):
        instructions["neon_dot"] = ["-march=armv8.2-a+dotprod"]
    if not emulate or processor_has("asimddp", "i8mm", "bf16"):
        instructions["neon_i8mm"] = ["-march=armv8.2-a+dotprod+i8mm+bf16"]
    # No vector crosses a call in these units, so how one is passed does not matter; and nothing throws. GCC 12 mistakes the
    # undefined vectors of its own header for variables that were forgotten.
    common = ["-Wno-psabi", "-Wno-maybe-uninitialized", "-fno-exceptions"]
    return {
        level: [f"-DPDK_ISA={level}", *common, *sizes, *instructions.get(level, [])] for level, sizes in levels.items()
    }


def simd_units(level: str) -> list[Path]:
    """Some levels have only the kernels that gain from them, and otherwise those of a level below (platform.h)."""
    own = {"avx2_vnni": ["quantized_linear.cpp"], "avx512_vnni": ["quantized_linear.cpp"]}
    own |= {"avx512_bf16": ["linear.cpp"], "amx": ["linear.cpp", "quantized_linear.cpp", "*attention*.cpp"]}
    own |= {"neon_dot": ["quantized_linear.cpp"], "neon_i8mm": ["linear.cpp", "quantized_linear.cpp"]}
    folder = ROOT / "csrc/cpu/simd"
    return sorted(unit for names in own.get(level, ["*.cpp"]) for unit in folder.glob(names))


class NinjaFile:
    """The few ninja statements this build needs."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.lines = ["ninja_required_version = 1.5"]

    def compiler(self, name: str, *command: object) -> None:
        line = f"{' '.join(quote(*command))} -MMD -MF $out.d -c $in -o $out"
        self.lines += [f"rule {name}", f"  command = {line}", f"  description = {name} $in"]
        self.lines += ["  depfile = $out.d", "  deps = gcc"]

    def linker(self, name: str, command: Sequence[object], libraries: Sequence[object] = ()) -> None:
        line = f"{' '.join(quote(*command))} -o $out $in {' '.join(quote(*libraries))}"
        self.lines += [f"rule {name}", f"  command = {line}", f"  description = {name} $out"]

    def build(self, out: str, rule: str, *sources: Path) -> Path:
        self.lines.append(f"build {escape(self.out / out)}: {rule} {' '.join(escape(source) for source in sources)}")
        return self.out / out


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


def strip(library: Path) -> None:
    """Strips a library for a wheel down to the symbols that it exports."""
    if shutil.which("strip"):
        subprocess.run(["strip", "-x" if ON_MAC else "--strip-unneeded", str(library)], check=True)


class BuildNative(build_ext):
    def run(self) -> None:
        if self.inplace and os.environ.get("PDKERNELS_OPS_NAMESPACE"):
            fail("PDKERNELS_OPS_NAMESPACE is for a copy of the package. Build with --build-lib, not --inplace.")
        # Two builds for tests, with kernels of all CPU levels that run on any processor: one with sanitizers, to
        # replace the library, and one to be loaded alongside it.
        sanitize = os.environ.get("PDKERNELS_SANITIZE") == "1"
        emulate = os.environ.get("PDKERNELS_EMULATE_ISA") == "1"
        # The emulated library takes from the usual build what it has in common with it.
        out = ROOT / "build" / ("native-sanitize" if sanitize else "native")
        manifest = "emulate.ninja" if emulate else "build.ninja"
        out.mkdir(parents=True, exist_ok=True)
        ninja = NinjaFile(out)
        hosts = {} if sanitize or emulate else self.host_modules(ninja)
        ops = self.ops_library(ninja, sanitize=sanitize, emulate=emulate)
        with (out / ".lock").open("w") as lock:  # two builds at once take turns
            fcntl.flock(lock, fcntl.LOCK_EX)
            (out / manifest).write_text("\n".join(ninja.lines) + "\n")
            self.run_ninja(out, manifest)
            if not (sanitize or emulate):
                target = Path(self.get_ext_fullpath("pdkernels._ops"))
                for built in (ops, *hosts):
                    install(built, target.with_name(built.name))
                    if not self.inplace:
                        strip(target.with_name(built.name))

    def host_modules(self, ninja: NinjaFile) -> list[Path]:
        """They come first because they take longest to compile."""
        import pybind11

        cxx, flags = host_compiler()
        ninja.linker("link_host", [*cxx, "-shared", "-O3", *(["-undefined", "dynamic_lookup"] if ON_MAC else [])])
        modules = []
        for number, (suffix, headers) in enumerate(host_pythons().items()):
            rule = f"cxx_host{number or ''}"
            ninja.compiler(rule, *cxx, *flags, "-O2", "-isystem", pybind11.get_include(), "-isystem", headers)
            unit = ninja.build(f"host{number or ''}.o", rule, ROOT / "python_bindings/host.cpp")
            modules.append(ninja.build(f"_host{suffix}", "link_host", unit))
        return modules

    def ops_library(self, ninja: NinjaFile, *, sanitize: bool, emulate: bool) -> Path:
        for_tests = sanitize or emulate
        torch, torch_version = find_torch()
        nvcc = None if for_tests else find_nvcc()
        archs = cuda_archs(nvcc) if nvcc else []
        cxx, common = host_compiler()
        checks = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
        # At -O1 GCC 12 mistakes arrays that a constructor fills for uninitialised ones.
        optimise = checks if sanitize else ["-O1", "-Wno-maybe-uninitialized"] if emulate else ["-O3"]
        host = [*common, *optimise]
        host += ["-DPDKERNELS_EMULATE_ISA"] if for_tests else []
        host += ["-DPDKERNELS_OPS_NAMESPACE=pdkernels_emulated"] if emulate else []
        with_torch = ["-isystem", torch / "include", f"-DTORCH_TARGET_VERSION={STABLE_ABI}"]
        on_cpu = ["-I", ROOT / "csrc/cpu", *with_torch]
        facts = {"VERSION": VERSION, "TORCH_VERSION": torch_version, "CUDA_ARCHS": ";".join(archs)}
        # The bindings alone know the namespace: what is built for another one lies in a folder of that name. Of the
        # emulated library everything does, but for levels that are compiled as in the usual build.
        named = os.environ.get("PDKERNELS_OPS_NAMESPACE", "")
        namespace = [f"-DPDKERNELS_OPS_NAMESPACE={named}"] if named else []
        folder = "emulate/" if emulate else f"{named}/" if named else ""
        ninja.compiler("cxx", *cxx, *host, *on_cpu)
        ninja.compiler("cxx_bindings", *cxx, *host, *on_cpu, *namespace)
        ninja.compiler("cxx_info", *cxx, *host, *(f'-DPDKERNELS_{name}="{value}"' for name, value in facts.items()))

        bindings = ROOT / "python_bindings"
        objects = [ninja.build(f"{folder}ops_cpu.o", "cxx_bindings", bindings / "ops.cpp")]
        aside = folder if emulate else ""
        objects += [ninja.build(f"{aside}build_info.o", "cxx_info", bindings / "build_info.cpp")]
        usual = cpu_levels(emulate=False)
        for level, flags in cpu_levels(emulate=for_tests).items():
            shared = emulate and flags == usual[level]
            settings = [*common, "-O3"] if shared else host
            ninja.compiler(f"cxx_{level}", *cxx, *settings, "-I", ROOT / "csrc/cpu", *flags)
            where = "" if shared else aside
            objects += [
                ninja.build(f"{where}simd_{level}_{unit.stem}.o", f"cxx_{level}", unit) for unit in simd_units(level)
            ]
        objects += [
            ninja.build(f"{aside}cpu_{unit.stem}.o", "cxx", unit) for unit in sorted((ROOT / "csrc/cpu").glob("*.cpp"))
        ]

        needed = [] if ON_MAC else ["-Wl,--no-as-needed"]
        libraries = ["-L", torch / "lib", *needed, "-ltorch", "-ltorch_cpu"]
        if nvcc is None:
            ninja.linker("link_ops", [*cxx, "-shared", *optimise], libraries)
            return ninja.build(f"{folder}_ops.so", "link_ops", *objects)

        own = ["-I", ROOT / "csrc", "-I", ROOT / "csrc/cuda"]
        host_flags = ["-ccbin", cxx[0], "--threads", "3", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
        on_device = ["-DPDKERNELS_DEVICE_CUDA", *NVCC_FLAGS, "-lineinfo", *smallest_code(nvcc), *host_flags]
        on_device += [*cuda_targets(archs), *own, *with_torch]
        ninja.compiler("nvcc", nvcc, *on_device)
        ninja.compiler("nvcc_bindings", nvcc, *on_device, *namespace)
        on_cuda = [
            ninja.build(f"cuda_{unit.stem}.o", "nvcc", unit) for unit in sorted((ROOT / "csrc/cuda").glob("*.cu"))
        ]
        on_cuda.append(ninja.build(f"{folder}cuda_ops.o", "nvcc_bindings", bindings / "ops.cpp"))
        if not all(unit.exists() for unit in on_cuda):
            text = (
                f"pdkernels: compiling CUDA for {len(archs)} architectures ({', '.join(archs)}), which takes minutes; "
            )
            print(f"{text}PDKERNELS_BUILD_CUDA=0 leaves it out, PDKERNELS_CUDA_ARCHS chooses", flush=True)
        command = [nvcc, "-shared", "-ccbin", cxx[0], "-cudart", "static", "--no-device-link"]
        ninja.linker("link_ops", command, [str(part).replace("-Wl,", "-Xlinker=") for part in libraries])
        return ninja.build(f"{folder}_ops.so", "link_ops", *objects, *on_cuda)

    def run_ninja(self, out: Path, manifest: str) -> None:
        # A C++ unit with torch's headers takes about 1 GB to compile.
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**30
        jobs = os.environ.get("MAX_JOBS") or str(max(1, min(os.cpu_count() or 1, memory // 2)))
        ninja = shutil.which("ninja")
        command = [ninja] if ninja else [sys.executable, "-m", "ninja"]
        if subprocess.run([*command, "-C", str(out), "-f", manifest, "-j", jobs], check=False).returncode != 0:
            fail("the build failed; see the compiler's message above.")

    def get_ext_filename(self, fullname: str) -> str:
        if fullname.endswith("_ops"):  # not a Python module, so no Python version in its name
            return os.path.join(*fullname.split(".")) + ".so"
        return super().get_ext_filename(fullname)


def description() -> str:
    """README.md for the page of a package index, where a link must be whole."""

    def whole(match: re.Match[str]) -> str:
        kind = "raw" if match[1].startswith("!") else "blob"
        return f"{match[1]}({REPOSITORY}/{kind}/{'main' if 'dev' in VERSION else f'v{VERSION}'}/{match[2]})"

    return re.sub(r"(!?\[[^\]]*\])\((?!https?:|#)([^)]+)\)", whole, (ROOT / "README.md").read_text())


def in_planes(file: bytes) -> bytes:
    """The safetensors file of a model in bfloat16 with its numbers in two tensors of bytes, "exponents" after "fractions", each of these above
    its sign: a wheel's compression leaves two thirds of that, and four fifths of the numbers as they are. `_load_tiny` of
    pdkernels/models/checkpoints/zoo.py reads it. A file that has been through it stays as it is."""
    begin = 8 + int.from_bytes(file[:8], "little")
    header = json.loads(file[8:begin])
    facts = header.pop("__metadata__")
    if {entry["dtype"] for entry in header.values()} != {"BF16"}:
        return file
    shapes = {name: header[name]["shape"] for name in sorted(header, key=lambda name: header[name]["data_offsets"])}
    count = len(file[begin:]) // 2
    numbers, ones = (int.from_bytes(data, "little") for data in (file[begin:], b"\1\0" * count))
    turned = numbers << 1 & ones * 0xFFFE | numbers >> 15 & ones
    data = turned.to_bytes(2 * count, "little")
    planes = {"fractions": [0, count], "exponents": [count, 2 * count]}
    told: dict[str, object] = {"__metadata__": facts | {"shapes": json.dumps(shapes)}}
    told |= {name: {"dtype": "U8", "shape": [count], "data_offsets": place} for name, place in planes.items()}
    start = json.dumps(told).encode()
    start += b" " * (-len(start) % 8)  # as the format asks
    return len(start).to_bytes(8, "little") + start + data[::2] + data[1::2]


def commands() -> dict[str, type]:
    from setuptools.command.bdist_wheel import bdist_wheel  # older versions than `check_python` accepts lack it

    class Package(build_py):
        """Of what is installed the tiny models' weights are in planes; in a checkout they stay as they are."""

        def build_package_data(self) -> None:
            super().build_package_data()
            for path in Path(self.build_lib).glob("pdkernels/models/weights/*.safetensors"):
                path.write_bytes(in_planes(path.read_bytes()))

    class Wheel(bdist_wheel):
        """`_ops` does not depend on Python, so a wheel with `_host` for several Pythons serves them all."""

        def get_tag(self) -> tuple[str, str, str]:
            python, abi, platform_tag = super().get_tag()
            return ("py3", "none", platform_tag) if len(host_pythons()) > 1 else (python, abi, platform_tag)

    return {"build_ext": BuildNative, "build_py": Package, "bdist_wheel": Wheel}


if __name__ == "__main__":
    check_python(sys.version_info, setuptools.__version__)
    # pip asks for the build's requirements through `egg_info`: torch is one only where no torch is installed.
    wants_torch = "egg_info" in sys.argv and locate_torch() is None
    setup(
        packages=[*setuptools.find_packages(include=["pdkernels", "pdkernels.*"]), "pdkernels.reference"],
        ext_modules=[Extension("pdkernels._ops", []), Extension("pdkernels._host", [])],
        cmdclass=commands(),
        long_description=description(),
        long_description_content_type="text/markdown",
        setup_requires=["torch>=2.11"] if wants_torch else [],
    )
