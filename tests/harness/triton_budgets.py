"""Compiles the block-sparse Triton kernels for an architecture without a GPU and reads what they take.

    python -m tests.harness.triton_budgets sm_90:bf16:128 sm_80:bf16:64      a JSON object on stdout

Runs as a separate process: in a test session Triton interprets, which it decides when it is imported. A driver that
only names its target replaces the GPU's, and a launch ends once the kernel is compiled; so what is compiled is what
`pdkernels.triton` launches, down to the specialization by alignment. Budgets are in `tests/triton_budgets.json`:
registers per thread, bytes of shared memory, and bytes of spills, which are 0 if left out.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

from tests.cudasim.build import ROOT, build_once, digest_text
from tests.harness import budgets, sass
from tests.harness.budgets import parse_ptxas
from tests.harness.kept_figures import PACKAGE, digest_code, kept, with_imports

BUDGET_FILE = ROOT / "tests" / "triton_budgets.json"
CACHE = ROOT / "build" / "triton_budgets"
# Dynamic shared memory a block may take, in bytes: CUDA programming guide, table of technical specifications.
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "sm_120": 99 * 1024}
# The instructions of the tensor cores.
TENSOR_CORES = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")


def measure(
    cases: list[str], module: str = "tests.harness.triton_budgets", others: Sequence[Path] = ()
) -> dict[str, dict[str, Any]]:
    """`{"sm_90:bf16:128 forward": figures}`, from `module` run as a separate process; what it needs of the package besides kernels and
    ops, and its other helpers, are `others`. Kept by the sources that go into it."""
    import triton

    own = {Path(__file__), Path(sass.__file__), Path(budgets.__file__), ROOT / f"{module.replace('.', '/')}.py"}
    sources = {*own, *package_files(), *others}
    key = digest_text(triton.__version__, *cases, digest_code(sources))

    def compile_cases(target: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        command = [sys.executable, "-m", module, *cases]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{module}: {done.stderr}")
        target.write_text(done.stdout)

    name = f"{module.rpartition('.')[2].removeprefix('test_')}-{digest_text(*cases)[:8]}"
    return kept(name, key, lambda: json.loads(build_once(CACHE / f"{key}.json", compile_cases).read_text()))


def package_files() -> set[Path]:
    """What decides how our ops launch which kernel."""
    return with_imports(
        [file for part in ("triton/*.py", "gluon/*.py", "ops/*.py", "backends.py") for file in PACKAGE.glob(part)]
    )


def problems(name: str, figures: dict[str, Any], budget: dict[str, int] | None) -> list[str]:
    """One sentence for everything that is over budget; spills have no budget unless one is written down."""
    if budget is None:
        return [f"{name} has no budget. Look at its figures, then add one: {json.dumps(figures)}"]
    architecture, dtype, _ = name.split(":")
    found = []
    for what in ("registers", "spill", "in loops", "shared"):
        if figures[what] > budget.get(what, 0):
            found.append(f"{name} takes {figures[what]} of {what}, its budget is {budget.get(what, 0)}")
    if figures["shared"] > SHARED_LIMIT[architecture]:
        limit = SHARED_LIMIT[architecture]
        found.append(f"{name} takes {figures['shared']} bytes of shared memory, {architecture} has {limit}")
    wanted = {"sm_80": TENSOR_CORES[:1], "sm_90": TENSOR_CORES[:2], "sm_100": TENSOR_CORES}[architecture]
    if dtype != "fp32" and not any(figures[instruction] for instruction in wanted):
        found.append(f"{name} holds none of {', '.join(wanted)}")
    if figures["serialized"]:
        found.append(f"{name}: {figures['serialized']}")
    return found


def _report_of(ptx: str) -> Path:
    return CACHE / "reports" / f"{digest_text(ptx)}.txt"


@cache
def _keep_reports() -> None:
    """Triton's runs of ptxas leave its report where `read_figures` finds it."""
    from triton import knobs
    from triton.backends.nvidia.compiler import CUDABackend

    knobs.cache.dir = str(CACHE / "compiled")  # what is in other caches was compiled without a report
    assemble = CUDABackend.make_cubin

    def assemble_and_keep(self: Any, ptx: str, *given: Any) -> Any:
        with redirect_stdout(io.StringIO()) as said, knobs.nvidia.scope():
            knobs.nvidia.dump_ptxas_log = True
            cubin = assemble(self, ptx, *given)
        build_once(_report_of(ptx), lambda target: target.write_text(said.getvalue()))
        return cubin

    CUDABackend.make_cubin = assemble_and_keep


class _Driver:
    """As much of Triton's driver as compiling needs."""

    def __init__(self, architecture: str) -> None:
        from triton.backends.compiler import GPUTarget

        _keep_reports()
        self.target = GPUTarget("cuda", int(architecture[3:]), 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch  # kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_case(case: str) -> dict[str, Any]:
    """Kernel name -> compiled kernel, for `architecture:dtype:head_dim`, tiles of 128 x 128 and groups of 4 heads."""
    import torch
    import triton
    from triton.runtime.jit import JITFunction

    from pdkernels._attention import AttentionArguments, GradientArguments
    from pdkernels.masks import Segment, SegmentMask
    from pdkernels.triton import block_sparse_attention as kernels
    from pdkernels.triton import blocking as _blocking

    architecture, dtype, head_dim = case.split(":")
    compiled: dict[str, Any] = {}
    launch = JITFunction.run

    def compile_only(self: Any, *arguments: Any, warmup: bool, **options: Any) -> None:
        compiled[self.__name__] = launch(self, *arguments, warmup=True, **options)

    triton.runtime.driver.set_active(_Driver(architecture))
    JITFunction.run, chosen = compile_only, _blocking.architecture
    _blocking.architecture = lambda device: architecture
    try:
        element = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
        q, k = (torch.zeros(1, 256, heads, int(head_dim), dtype=element) for heads in (8, 2))
        plan = SegmentMask([Segment(256, "causal")]).plan(128, 128).arguments
        given = AttentionArguments(q, k, k, *plan, 0.1)
        out, lse = kernels.forward(given)
        kernels.backward(GradientArguments(out, None, out, lse, given))
    finally:
        JITFunction.run, _blocking.architecture = launch, chosen
    return compiled


def read_figures(kernel: Any, architecture: str) -> dict[str, Any]:
    """The output of ptxas for a compiled kernel, its shared memory and the tensor-core instructions of its PTX.

    ``in loops``: loads and stores of spilled registers in innermost loops.
    """
    ptx = kernel.asm["ptx"]
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)[1]
    report = _report_of(ptx).read_text()
    ((_, per_target),) = parse_ptxas(report).items()
    spill = per_target[target].spill
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(kernel.asm["cubin"])
        (code,) = sass.disassemble(cubin, target).values() if spill else [[]]
    serialized = re.search(r"wgmma.mma_async instructions are serialized.*", report)
    return {
        "registers": per_target[target].registers,
        "spill": spill,
        "in loops": sum(sass.mix(loop)["LDL"] + sass.mix(loop)["STL"] for loop in sass.steady_loops(code)),
        "shared": kernel.metadata.shared,
        "serialized": serialized[0] if serialized else "",
        **{instruction: ptx.count(instruction) for instruction in TENSOR_CORES},
    }


def main(cases: list[str]) -> None:
    found = {}
    for case in cases:
        for name, kernel in compile_case(case).items():
            found[f"{case} {name.strip('_').removesuffix('_kernel')}"] = read_figures(kernel, case.split(":")[0])
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
