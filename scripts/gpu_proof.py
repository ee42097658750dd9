"""Proves the kernels on a GPU, part by part, and writes the results as JSON. How to call it: docs/gpu_proof.md.

Part 0  installs missing packages and builds; the other parts need it, and stop at once if it has not succeeded
Part 1  runs the tests that use the GPU; all others run anywhere
Part 2  compute-sanitizer: memcheck, racecheck, initcheck and synccheck on every op, side by side
Part 3  CUDA graphs: capture, replay with changed data, no sync; whole generations in a graph, with their times
Part 4  benchmarks of attention
Part 5  benchmarks of the vocabulary, of token selection, caches and plans
Part 6  benchmarks of recurrent depth, epilogues and feature caches
Part 7  what tells most in ten minutes, of all the others (scripts/gpu_window.py)

Results go to `bench/results/<gpu>/` (another folder: OUT): `part-N.json` and `part-N.log`, and `benchmarks-N.json` of a part with benchmarks.
PDKERNELS_COMMIT names the commit if there is no git. A step that fails does not stop the next ones, and a step that times out keeps
its findings so far. The exit code is 0 only if everything passed. `--only` takes an expression of pytest's -k and runs these tests and
benchmarks alone. `--dry-run` runs everything that works without a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from scripts.gpu_window import AVAILABLE, run_window  # noqa: E402
from scripts.proof_summaries import sanitizer_summary, test_summary  # noqa: E402

# For each part, half an hour for 0 to 6; after 0 the order in which they tell most is 3, 1, 4, 2, 5, 6.
LIMITS = {0: 240.0, 1: 390.0, 2: 270.0, 3: 270.0, 4: 360.0, 5: 180.0, 6: 90.0, 7: 570.0}
# What part 0 leaves when it has succeeded: what it was built from, and for what.
BUILT = ROOT / "build" / "gpu_proof.json"
# Tests that launch something on a GPU; Triton's kernels are compiled for it there.
ON_GPU = "(cuda or triton or capture or same_tokens) and not cudasim and not budgets and not interpreter"
# So many seconds a step that is cut off has to write what it found.
GRACE = 15.0
# Where they are: every worker collects all tests of what it is given.
WITH_GPU = ("tests/ops", "tests/decoding/test_devices.py", "tests/integrations/test_device_loop.py")
CHECKERS = ("memcheck", "racecheck", "initcheck", "synccheck")
BENCHMARKS: dict[int, tuple[str, ...]] = {
    4: ("block_sparse_attention", "speculative_attention"),
    5: ("token_statistics", "kv_cache", "linear_token_statistics", "unmask", "verify_draft", "planner"),
}
# Decoding with the tiny models, SmolLM2 and models of transformers are measured on the host; loops without one are in part 3, next to their tests.
_TAKEN = {"decoding", "decoding_step", "device_loop", "smollm2", "transformers", *BENCHMARKS[4], *BENCHMARKS[5]}
_ALL = {path.stem.removeprefix("bench_") for path in (ROOT / "bench").glob("bench_*.py")}
BENCHMARKS[6] = tuple(sorted(_ALL - _TAKEN))
FACTS = """
import importlib.metadata as metadata, json, platform, torch, pdkernels as pd
from pdkernels import _native
names = [name for name in ("pdkernels", "torch", "triton", "cuda-bindings") if any(metadata.distributions(name=name))]
print(json.dumps({"python": platform.python_version(), **{name: metadata.version(name) for name in names},
                  "cuda": torch.version.cuda, "compiled": _native.build_info()}))
"""


@dataclass
class Step:
    name: str
    command: str
    returncode: int
    seconds: float
    last_line: str
    found: dict[str, Any] = field(default_factory=dict)
    """What its output comes to."""


def plain(text: str) -> str:
    """Without the folders of this machine."""
    return text.replace(sys.executable, "python").replace(f"{ROOT}/", "")


class Part:
    def __init__(self, out: Path, number: int, ends: float, dry: bool, only: str = "") -> None:
        self.start, self.ends, self.number, self.dry, self.out = time.monotonic(), ends, number, dry, out
        self.only = only
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a shell's background, and steps would inherit it
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self.python = sys.executable
        self.steps: list[Step] = []
        self.facts: dict[str, Any] = {}
        self.log = out / f"part-{number}.log"
        self.log.write_text("")

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """A limit for what runs inside, with the time that a step has to write what it found when it is cut off."""
        whole, self.ends = self.ends, min(self.ends, time.monotonic() + seconds - GRACE)
        try:
            yield
        finally:
            self.ends = whole

    def keep(self) -> bool:
        """Writes what was found so far; whether all of it is good."""
        good = all(step.returncode == 0 for step in self.steps)
        found = {"seconds": round(time.monotonic() - self.start, 1), "ok": good, "steps": list(map(asdict, self.steps))}
        path = self.out / f"part-{self.number}.json"
        path.write_text(json.dumps(self.facts | found, indent=2) + "\n")
        print(f"part {self.number}: {'ok' if good else 'FAILED'} in {found['seconds']:.0f} s; wrote {path}", flush=True)
        return good

    def run(
        self, name: str, command: list[str | Path], *, environment: dict[str, str] | None = None, needs: str = ""
    ) -> tuple[Step, str]:
        """Runs one step in the remaining time. `needs`: what its output must contain, in addition to a good exit code."""
        command = [str(part) for part in command]
        print(f"[{time.monotonic() - self.start:4.0f} s] {name}", flush=True)
        start = time.monotonic()
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            try:
                settings = dict(os.environ, PYTHONUNBUFFERED="1", **(environment or {}))
                process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=settings,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
                code = process.wait(max(1.0, self.ends - start))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)  # pytest then writes its results
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                code = 124
            except OSError as error:
                output.write(f"{error}\n")
                code = 127
            output.seek(0)
            said = output.read()
        with self.log.open("a") as log:
            log.write(f"\n$ {' '.join(command)}\n{said}")
        if code == 0 and needs and not re.search(needs, said):
            code = 1
        last = (said.strip().splitlines() or [""])[-1]
        step = Step(name, plain(" ".join(command)), code, round(time.monotonic() - start, 1), plain(last))
        self.steps.append(step)
        print(
            f"         {name}: {'ok' if code == 0 else f'FAILED ({code})'} in {step.seconds:.0f} s: {last[:150]}",
            flush=True,
        )
        return step, said

    def test(self, name: str, *arguments: str, selected: str, environment: dict[str, str] | None = None) -> None:
        """A run of pytest, recorded test by test. `selected`: an expression of -k."""
        with tempfile.TemporaryDirectory() as folder:
            record = Path(folder) / "tests.jsonl"
            expression = " and ".join(f"({each})" for each in (selected, self.only) if each)
            command = [
                self.python,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                "-p",
                "tests.harness.record",
                *(["-k", expression] if expression else []),
                *arguments,
            ]
            environment = {"PDKERNELS_TEST_RECORD": str(record), **(environment or {})}
            step, _ = self.run(name, command, environment=environment)
            step.found = test_summary(record)
        step.returncode = step.returncode or int(step.found["passed"] == 0 and not self.dry)
        for test, text in step.found["failures"].items():
            print(f"         FAILED {test}: {text.splitlines()[0][:120] if text else ''}", flush=True)

    def benchmark(self, name: str, benchmarks: tuple[str, ...], selected: str = "") -> None:
        """All in one process, which takes seconds to start. `name`: of the file with the results."""
        result = self.out / f"{name}.json"
        mode = ["--benchmark-disable"] if self.dry else ["--benchmark-only", f"--benchmark-json={result}"]
        files = [f"bench/bench_{benchmark}.py" for benchmark in benchmarks]
        environment = {"PDKERNELS_BENCH_DRY": "1"} if self.dry else {}
        expression = f"cuda and not fp32{' and ' * bool(selected)}{selected}"
        self.test(name, *files, *mode, selected=expression, environment=environment)

    def check(self, checker: str, *arguments: str) -> None:
        """Calls of ops under a checker of compute-sanitizer; without a GPU the calls alone."""
        driver = [self.python, "scripts/sanitizer_driver.py", "--device", "cpu" if self.dry else "cuda", *arguments]
        if self.dry:
            self.run(f"calls for {checker}", driver)
            return
        tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        # Every kernel is checked, also after one that fails.
        goes_on = ["--destroy-on-device-error", "kernel"] if "--destroy-on-device-error" in ask(tool, "--help") else []
        options = ["--tool", checker, "--error-exitcode", "9", *(goes_on if checker == "memcheck" else [])]
        none = r"ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards"
        step, said = self.run(checker, [tool, *options, *driver], needs=none)
        step.found = sanitizer_summary(said)


def ask(*command: str | Path) -> str:
    try:
        return subprocess.run(
            [str(c) for c in command], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()
    except OSError:
        return ""


def commit() -> str:
    return os.environ.get("PDKERNELS_COMMIT") or ask("git", "rev-parse", "HEAD") or "unknown"


def sources() -> str:
    """Of what is compiled, edits since the commit included."""
    known = hashlib.sha256()
    for path in sorted([ROOT / "setup.py", *ROOT.glob("csrc/**/*.*"), *ROOT.glob("python_bindings/*.*")]):
        known.update(path.read_bytes())
    return known.hexdigest()[:16]


def not_built(dry: bool) -> str:
    """Why no other part can run here; "" if it can."""
    remedy = "Run: scripts/gpu_proof.sh --part 0"
    if not BUILT.is_file():
        return f"part 0, which installs and builds, has not succeeded here. {remedy}"
    built = json.loads(BUILT.read_text())
    for what, now in (("commit", commit()), ("sources", sources())):
        if built[what] != now:
            return f"part 0 built {what} {built[what]}, but this is {now}. {remedy}"
    if not dry and not built["cuda"]:
        return f"part 0 ran with --dry-run and built no CUDA kernels. {remedy}"
    if not Path(built["python"]).is_file():
        return f"the environment of part 0, {built['python']}, is gone. {remedy}"
    return ""


def run_build(part: Part) -> None:
    """Writes the mark that the other parts look for."""
    BUILT.unlink(missing_ok=True)
    cuda = {"MAX_JOBS": str(os.cpu_count() or 1)} | ({} if part.dry else {"PDKERNELS_BUILD_CUDA": "1"})
    bootstrap = [sys.executable, "scripts/bootstrap.py", "--for", "gpu"]
    step, said = part.run("build", [*bootstrap, "-c", "import sys; print(sys.executable)"], environment=cuda)
    if step.returncode:
        return
    part.python = said.strip().splitlines()[-1]
    # Imports it, so that a library that cannot be loaded fails here.
    step, said = part.run("what was built", [part.python, "-c", FACTS], needs="" if part.dry else '"cuda_archs": "[^"]')
    if step.returncode:
        return
    found = {"commit": commit(), "sources": sources(), "cuda": not part.dry, "python": part.python}
    BUILT.parent.mkdir(exist_ok=True)
    BUILT.write_text(json.dumps({**found, "versions": json.loads(said.strip().splitlines()[-1])}, indent=2) + "\n")


def run_tests(part: Part) -> None:
    cores = os.cpu_count() or 1
    workers = max(1, min(12, cores - 2))
    # A kernel that never ends takes down its worker, not the run.
    options = [
        "-n",
        str(workers),
        "--dist",
        "worksteal",
        "--max-worker-restart",
        "50",
        "-o",
        "faulthandler_timeout=200",
        "-o",
        "faulthandler_exit_on_timeout=true",
        "-m",
        "not slow",
    ]
    # Every worker would start its own compilers for torch.compile.
    threads = {"OMP_NUM_THREADS": str(max(1, cores // workers)), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    part.test("tests that use the GPU", *options, *WITH_GPU, selected=ON_GPU, environment=threads)


def run_checkers(part: Part) -> None:
    driver = [part.python, "scripts/sanitizer_driver.py", "--device", "cpu" if part.dry else "cuda"]
    ops = part.run("ops", [*driver, "--list"])[1].split()
    # First without a checker, side by side: Triton compiles here, and the checkers find its kernels in the cache.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda op: part.run(f"calls of {op}", [*driver, "--op", op]), ops))
    if not part.dry:
        with ThreadPoolExecutor() as pool:
            list(pool.map(part.check, CHECKERS))


def run_captures(part: Part) -> None:
    part.run("what a device loop needs", [part.python, "-c", "" if part.dry else AVAILABLE])
    part.test("capture and replay", "tests/ops", "tests/integrations", selected="capture or cuda_graph or device_loop")
    nodes = ["-m", "tests.harness.launches", "--json", part.out / "device_loop_nodes.json"]
    part.run("kernels of a captured step", [part.python, *nodes, *([] if part.dry else ["--captured"])])
    times = ["--benchmark-only", f"--benchmark-json={part.out / 'device_loop.json'}"]
    part.test(
        "generations with and without a host",
        "bench/bench_device_loop.py",
        *(["--benchmark-disable"] if part.dry else times),
        selected="",
    )


def run_benchmarks(part: Part) -> None:
    part.benchmark(f"benchmarks-{part.number}", BENCHMARKS[part.number])


PARTS = {0: run_build, 1: run_tests, 2: run_checkers, 3: run_captures, **dict.fromkeys(BENCHMARKS, run_benchmarks)}
PARTS[7] = run_window


def prove(part: Part, gpu: str, driver: str) -> bool:
    nvcc = ask(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc", "--version")
    part.facts = {
        "part": part.number,
        "command": " ".join(["scripts/gpu_proof.sh", *sys.argv[1:]]),
        "commit": commit(),
        "gpu": gpu or None,
        "driver": driver or None,
        "nvcc": (re.search(r"release ([\d.]+)", nvcc) or [None, None])[1],
    }
    if part.number > 0:
        built = json.loads(BUILT.read_text())
        part.python, part.facts["versions"] = built["python"], built["versions"]
    PARTS[part.number](part)
    part.facts["finished"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return part.keep()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=tuple(PARTS), nargs="+", required=True)
    parser.add_argument("--seconds", type=float, help=f"for all parts together (default: for each its own, {LIMITS})")
    parser.add_argument("--only", default="", help="of the tests and benchmarks, an expression of pytest's -k")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    gpu, _, driver = (
        ask("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").partition("\n")[0].partition(", ")
    )
    if not gpu and not options.dry_run:
        sys.exit("gpu_proof: nvidia-smi shows no GPU. What can be done without one: --dry-run")
    folder = re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia ")).strip("-") or "local"
    out = Path(os.environ.get("OUT") or ROOT / "bench/results" / folder).resolve()
    out.mkdir(parents=True, exist_ok=True)
    together = options.seconds and time.monotonic() + options.seconds
    good = True
    for number in options.part:
        if number > 0 and (reason := not_built(options.dry_run)):
            sys.exit(f"gpu_proof: {reason}")
        ends = together or time.monotonic() + LIMITS[number]
        good = prove(Part(out, number, ends, options.dry_run, options.only), gpu, driver) and good
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
