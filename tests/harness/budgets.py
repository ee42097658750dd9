"""Registers, spills, stack and shared memory of every CUDA kernel, as ptxas reports them, against a checked budget.

    python -m tests.harness.budgets          a table of all kernels on all architectures
    python -m tests.harness.budgets --add    writes entries for new kernels and drops those of kernels that are gone

Needs nvcc but no GPU. Budgets are in `tests/compile_budgets.json`, one line per kernel. `registers` is a ceiling for
all architectures, or one for each: `{"sm_80": 40, "sm_90a": 48, "sm_100": 48}`. `spill`, `stack` and `shared` are
bytes, and 0 if left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from setup import CUDA_ARCHS, NVCC_FLAGS, cuda_targets
from tests.cudasim.build import ROOT, build_once, digest, digest_text, run_compiler
from tests.harness.kept_figures import digest_code, kept, with_headers

KERNEL_FOLDER = ROOT / "csrc" / "cuda"
INCLUDE_DIRS = (ROOT / "csrc", KERNEL_FOLDER)
BUDGET_FILE = ROOT / "tests" / "compile_budgets.json"
# What the fast tests compile for: every architecture takes as long again.
FAST_ARCHS = ("90a",)
CACHE = ROOT / "build" / "budgets"

# Hardware allocates registers per thread in multiples of this, so rounding up to the next multiple costs nothing.
REGISTER_STEP = 8


class Resources(NamedTuple):
    """What one kernel takes on one architecture: registers per thread, the rest in bytes."""

    registers: int
    spill: int
    stack: int
    shared: int

    def __str__(self) -> str:
        extras = [f"{size} B {what}" for what, size in zip(self._fields[1:], self[1:], strict=True) if size]
        return ", ".join([f"{self.registers} reg", *extras])


# kernel -> architecture ("sm_80") -> resources
Measured = dict[str, dict[str, Resources]]
# kernel -> its line of the budget file
Budgets = Mapping[str, Mapping[str, Any]]


def find_nvcc() -> str | None:
    """nvcc from $CUDA_HOME, $CUDA_PATH, /usr/local/cuda or PATH."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    candidates = [str(Path(home) / "bin" / "nvcc") for home in homes if home]
    return next((found for name in [*candidates, "nvcc"] if (found := shutil.which(name))), None)


def kernel_sources() -> list[Path]:
    return sorted(KERNEL_FOLDER.glob("*.cu"))


def _command(source: Path, include_dirs: Sequence[Path], archs: Sequence[str]) -> tuple[list[str], str]:
    """How setup.py compiles one .cu file for devices, and a hash of all that goes into it."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError("tests.harness.budgets: no nvcc found. Install the CUDA toolkit or set CUDA_HOME.")
    options = [*NVCC_FLAGS, "-Xptxas", "-v", *cuda_targets(archs)]
    key = digest_text(run_compiler([nvcc, "--version"]), *options, digest(with_headers(source, include_dirs)))
    return [nvcc, *options, *(f"-I{directory}" for directory in include_dirs)], key


def compile_kernels(source: Path, include_dirs: Sequence[Path], archs: Sequence[str]) -> Path:
    """The device code of one .cu file, and next to it, as .txt, the output of ptxas. Cached."""
    command, key = _command(source, include_dirs, archs)
    result = CACHE / f"{source.stem}-{key}.fatbin"

    def build(target: Path) -> None:
        report = run_compiler([*command, "-fatbin", str(source), "-o", str(target)])
        result.with_suffix(".txt").write_text(report)

    return build_once(result, build)


def kept_of(
    source: Path,
    what: str,
    read: Callable[[Path], Any],
    archs: Sequence[str],
    include_dirs: Sequence[Path] = INCLUDE_DIRS,
) -> Any:
    """What `read` finds in the compiled file, unless that is kept for these sources and for the code that reads it."""
    readers = {Path(__file__), Path(__file__).with_name("sass.py"), Path(read.__code__.co_filename)}
    name, key = f"{source.stem}-{what}-{'-'.join(archs)}", _command(source, include_dirs, archs)[1]
    return kept(
        name, digest_text(key, digest_code(readers)), lambda: read(compile_kernels(source, include_dirs, archs))
    )


def measure(
    source: Path, *, include_dirs: Sequence[Path] = INCLUDE_DIRS, archs: Sequence[str] = CUDA_ARCHS
) -> Measured:
    """What each kernel of one .cu file takes, by ptxas."""

    def read(code: Path) -> Measured:
        return parse_ptxas(code.with_suffix(".txt").read_text())

    found = kept_of(source, "resources", read, archs, include_dirs)
    return {kernel: {arch: Resources(*used) for arch, used in per_arch.items()} for kernel, per_arch in found.items()}


def code_in(file: Path, folder: Path) -> tuple[dict[str, set[str]], set[str]]:
    """Unit -> architectures it has code for, and the units with PTX, as "unit.sm_100". `folder` is an empty one."""
    tool = find_cuobjdump()
    assert tool is not None
    subprocess.run([tool, "--extract-elf", "all", str(file)], cwd=folder, capture_output=True, check=True)
    # File names may have 90 for 90a, depending on the tool; what the assembler recorded inside is exact.
    compiled: dict[str, set[str]] = {}
    for cubin in folder.glob("*.cubin"):
        arch = re.search(rb"-arch sm_(\w+)", cubin.read_bytes())[1].decode()
        compiled.setdefault(cubin.name.partition(".")[0], set()).add(arch)
    listing = run_compiler([tool, "--list-ptx", str(file)])
    return compiled, {re.sub(r"\.\d+\.sm_", ".sm_", name) for name in re.findall(r"(\S+)\.ptx", listing)}


def find_cuobjdump() -> str | None:
    """Next to nvcc, on PATH, or the one that triton ships."""
    nvcc, triton = find_nvcc(), importlib.util.find_spec("triton")
    found = [Path(nvcc).with_name("cuobjdump")] if nvcc else []
    found += [Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump"] if triton and triton.origin else []
    return next((str(path) for path in found if path.is_file()), shutil.which("cuobjdump"))


def parse_ptxas(report: str) -> Measured:
    """Read the output of `ptxas -v`.

    >>> print(parse_ptxas('''
    ... ptxas info    : Compiling entry function '_Z4copyIfEvPT_' for 'sm_80'
    ... ptxas info    : Function properties for _Z4copyIfEvPT_
    ...     16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
    ... ptxas info    : Used 24 registers, used 1 barriers, 16 bytes cumulative stack size, 512 bytes smem
    ... ''')["copy<float>"]["sm_80"])
    24 reg, 20 B spill, 16 B stack, 512 B shared
    """
    found: dict[tuple[str, str], Resources] = {}
    for part in report.split("Compiling entry function ")[1:]:
        symbol, arch = re.match(r"'(\S+)' for '(\S+)'", part).groups()
        # Functions that were not inlined report before or after the kernel's own figures.
        own = part.partition(f"Function properties for {symbol}\n")[2]
        stack, stores, loads = map(
            int, re.match(r"\D*(\d+) bytes stack\D*(\d+) bytes spill\D*(\d+) bytes", own).groups()
        )
        used = re.search(r"Used (\d+) registers.*", part)
        shared = re.search(r"(\d+) bytes smem", used[0])
        found[symbol, arch] = Resources(int(used[1]), stores + loads, stack, int(shared[1]) if shared else 0)

    names = readable_names(sorted({symbol for symbol, _ in found}))
    measured: Measured = {}
    for (symbol, arch), resources in sorted(found.items(), key=lambda item: names[item[0][0]]):
        measured.setdefault(names[symbol], {})[arch] = resources
    return measured


def readable_names(symbols: Sequence[str]) -> dict[str, str]:
    """Symbol -> `kernel<arguments>`, without namespaces and parameters; the symbol if there is no demangler."""
    demangler = shutil.which("c++filt") or shutil.which("cu++filt")
    if not symbols or demangler is None:
        return {symbol: symbol for symbol in symbols}
    demangled = run_compiler([demangler, *symbols]).splitlines()
    names = {symbol: short_name(full) for symbol, full in zip(symbols, demangled, strict=True)}
    if len(set(names.values())) < len(names):
        raise RuntimeError(
            f"tests.harness.budgets: two kernels of one file share a name: {sorted(names.values())}. Rename one."
        )
    return names


def short_name(demangled: str) -> str:
    """Drop return type, namespaces and parameters.

    >>> short_name("void pdkernels::cuda::(anonymous namespace)::move<int4, (pdkernels::Side)1>(int4*, unsigned long)")
    'move<int4, (pdkernels::Side)1>'
    """
    text = demangled.replace("(anonymous namespace)::", "")
    start, depth = 0, 0
    for at, letter in enumerate(text):
        if letter == "(" and depth == 0:
            return text[start:at]
        depth += (letter in "<(") - (letter in ">)")
        if depth == 0 and letter in " :":
            start = at + 1
    return text[start:]


def load_budgets(path: Path = BUDGET_FILE) -> dict[str, dict[str, dict[str, Any]]]:
    """File name -> kernel -> budget."""
    return json.loads(path.read_text()) if path.exists() else {}


def ceiling(budget: Mapping[str, Any], what: str, arch: str) -> int:
    value = budget.get(what, 0)
    return value.get(arch, 0) if isinstance(value, Mapping) else value


def suggest(per_arch: Mapping[str, Resources]) -> dict[str, int]:
    """The tightest budget that a kernel meets, registers rounded up to the hardware's step.

    Spills and stack are never suggested: they have to be written by hand.
    """
    registers = max(used.registers for used in per_arch.values())
    shared = max(used.shared for used in per_arch.values())
    return {"registers": -(-registers // REGISTER_STEP) * REGISTER_STEP} | ({"shared": shared} if shared else {})


def problems(file: str, measured: Measured, budgets: Budgets) -> list[str]:
    """One sentence for every kernel that is over budget or has none, and for every budget whose kernel is gone."""
    found = []
    for kernel, per_arch in measured.items():
        if kernel not in budgets:
            line = f"{json.dumps(kernel)}: {json.dumps(suggest(per_arch))}"
            found.append(f"{file}: {kernel} has no budget. Look at its figures, then add under {file!r}:  {line}")
            continue
        for arch, resources in per_arch.items():
            for what, used in resources._asdict().items():
                allowed = ceiling(budgets[kernel], what, arch)
                if used > allowed:
                    unit = "" if what == "registers" else " bytes of"
                    found.append(f"{file}: {kernel} on {arch} takes {used}{unit} {what}, its budget is {allowed}")
    found += [
        f"{file}: {kernel} has a budget but is gone. Remove its line." for kernel in budgets if kernel not in measured
    ]
    return found


def add_missing(measured: Mapping[str, Measured], path: Path = BUDGET_FILE) -> None:
    """Give new kernels the tightest budget they meet and drop those that are gone. Never loosens an existing one."""
    old = load_budgets(path)
    files = []
    for file, kernels in measured.items():
        entries = {kernel: old.get(file, {}).get(kernel) or suggest(per_arch) for kernel, per_arch in kernels.items()}
        lines = [f"    {json.dumps(kernel)}: {json.dumps(entry)}" for kernel, entry in entries.items()]
        files.append(f"  {json.dumps(file)}: {{\n" + ",\n".join(lines) + "\n  }")
    path.write_text("{\n" + ",\n".join(files) + "\n}\n")


def print_table(measured: Mapping[str, Measured]) -> None:
    from rich.console import Console
    from rich.table import Table

    budgets = load_budgets()
    table = Table(title="CUDA kernels as compiled")
    for column in ("file", "kernel", *(f"sm_{arch}" for arch in CUDA_ARCHS), "budget"):
        table.add_column(column, overflow="fold")
    for file, kernels in measured.items():
        for kernel, per_arch in kernels.items():
            budget = budgets.get(file, {}).get(kernel)
            cells = [
                f"[{'red' if problems(file, {kernel: {arch: used}}, {kernel: budget or {}}) else 'green'}]{used}[/]"
                for arch, used in per_arch.items()
            ]
            table.add_row(file, kernel, *cells, "none" if budget is None else json.dumps(budget)[1:-1].replace('"', ""))
        table.add_section()
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Resources of every CUDA kernel, from nvcc alone.")
    parser.add_argument(
        "--add", action="store_true", help="add entries for new kernels, drop those of kernels that are gone"
    )
    arguments = parser.parse_args()
    measured = {source.name: measure(source) for source in kernel_sources()}
    if arguments.add:
        add_missing(measured)
    print_table(measured)
    budgets = load_budgets()
    for file in sorted({*measured, *budgets}):
        for problem in problems(file, measured.get(file, {}), budgets.get(file, {})):
            print(problem)


if __name__ == "__main__":
    main()
