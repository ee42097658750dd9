"""Proves the kernels on a GPU, part by part, and writes what happened as JSON. See `scripts/gpu_proof.sh`.

Part 1  builds and runs all tests with CUDA tensors
Part 2  compute-sanitizer: memcheck, racecheck, initcheck and synccheck on every op
Part 3  CUDA graphs: capture, replay with changed data; whole generations in a graph, with their times
Part 4  benchmarks

Results go to `bench/results/<gpu>/part-N.json` and `part-N.log` (another folder: OUT). PDKERNELS_COMMIT names the commit
where there is no git. A step that fails does not stop the next ones; the exit code is 0 only if all went well.
`--dry-run` does on a machine without a GPU whatever can be done there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUDGET = 570.0  # seconds for a part

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


def plain(text: str) -> str:
    """Without the folders of this machine."""
    return text.replace(sys.executable, "python").replace(f"{ROOT}/", "")


class Part:
    def __init__(self, out: Path, number: int) -> None:
        self.start = time.monotonic()
        self.steps: list[Step] = []
        self.log = out / f"part-{number}.log"
        self.log.write_text("")

    def run(self, name: str, command: list[str | Path], *, environment: dict[str, str] | None = None, needs: str = "") -> str:
        """Runs one step in what is left of the budget. `needs`: what its output has to hold beside a good exit code."""
        command = [str(part) for part in command]
        print(f"[{time.monotonic() - self.start:4.0f} s] {name}", flush=True)
        start, left = time.monotonic(), max(1.0, BUDGET - (time.monotonic() - self.start))
        with self.log.open("a+") as log:
            log.write(f"\n$ {' '.join(command)}\n")
            log.flush()
            begin = log.tell()
            try:
                settings = dict(os.environ, PYTHONUNBUFFERED="1", **(environment or {}))
                process = subprocess.Popen(
                    command, cwd=ROOT, env=settings, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
                code = process.wait(left)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                code = process.wait() and 124
            except OSError as error:
                log.write(f"{error}\n")
                code = 127
            log.flush()
            log.seek(begin)
            said = log.read()
        if code == 0 and needs and not re.search(needs, said):
            code = 1
        last = (said.strip().splitlines() or [""])[-1]
        self.steps.append(Step(name, plain(" ".join(command)), code, round(time.monotonic() - start, 1), plain(last)))
        print(f"         {'ok' if code == 0 else f'FAILED ({code})'}: {last[:150]}", flush=True)
        return said


def ask(*command: str | Path) -> str:
    try:
        return subprocess.run([str(c) for c in command], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def tests(python: str, *arguments: str) -> list[str]:
    return [python, "-m", "pytest", "-p", "no:cacheprovider", *arguments]


def run_part(part: Part, number: int, python: str, out: Path, dry: bool) -> None:
    ran = "" if dry else r"\b[1-9]\d* passed"
    cores = os.cpu_count() or 1
    if number == 1:
        workers = min(4, cores)
        threads = {"OMP_NUM_THREADS": str(max(1, cores // workers))}
        command = tests(python, "-n", str(workers), "--dist", "worksteal", "-m", "not slow")
        part.run("tests", command, environment=threads, needs=ran)
    elif number == 2:
        driver = [python, "scripts/sanitizer_driver.py", "--device", "cpu" if dry else "cuda"]
        part.run("calls without a checker", driver)
        tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        for name in () if dry else ("memcheck", "racecheck", "initcheck", "synccheck"):
            checker = [tool, "--tool", name, "--error-exitcode", "9"]
            part.run(name, [*checker, *driver], needs=r"ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards")
    elif number == 3:
        # Without cuda-python the tests and times of device loops would be skipped, and nobody would see it.
        looked = "import sys; from pdkernels.integrations.device_loop import available; sys.exit(not available())"
        part.run("what a device loop needs", [python, "-c", "" if dry else looked])
        part.run("capture and replay", tests(python, "tests", "-k", "capture", "-v"), needs=ran)
        bench = tests(python, "bench/bench_device_loop.py", "--benchmark-only", f"--benchmark-json={out / 'device_loop.json'}")
        part.run("generations with and without a host", bench, needs=ran)
    else:
        result, rest = out / "benchmarks.json", ["--ignore=bench/bench_device_loop.py"]
        part.run("benchmarks", tests(python, "bench", *rest, "--benchmark-only", f"--benchmark-json={result}"), needs=ran)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=(1, 2, 3, 4), required=True)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    gpu, _, driver = ask("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").partition("\n")[0].partition(", ")
    if not gpu and not options.dry_run:
        sys.exit("gpu_proof: nvidia-smi shows no GPU. What can be done without one: --dry-run")
    folder = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") or "local"
    out = Path(os.environ.get("OUT") or ROOT / "bench/results" / folder).resolve()
    out.mkdir(parents=True, exist_ok=True)

    part = Part(out, options.part)
    cuda = {"MAX_JOBS": str(os.cpu_count() or 1)} | ({} if options.dry_run else {"PDKERNELS_BUILD_CUDA": "1"})
    said = part.run("build", [sys.executable, "scripts/bootstrap.py", "-c", "import sys; print(sys.executable)"], environment=cuda)
    python = said.strip().splitlines()[-1] if part.steps[0].returncode == 0 else sys.executable
    run_part(part, options.part, python, out, options.dry_run)
    facts = ask(python, "-c", FACTS)
    report = {
        "part": options.part,
        "command": " ".join(["scripts/gpu_proof.sh", *sys.argv[1:]]),
        "commit": os.environ.get("PDKERNELS_COMMIT") or ask("git", "rev-parse", "HEAD") or "unknown",
        "gpu": gpu or None,
        "driver": driver or None,
        "versions": json.loads(facts) if facts else None,
        "nvcc": (re.search(r"release ([\d.]+)", ask(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc", "--version")) or [None, None])[1],
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - part.start, 1),
        "ok": all(step.returncode == 0 for step in part.steps),
        "steps": [asdict(step) for step in part.steps],
    }
    (out / f"part-{options.part}.json").write_text(json.dumps(report, indent=2) + "\n")
    print(f"wrote {out / f'part-{options.part}.json'}")
    sys.exit(0 if report["ok"] else 1)


if __name__ == "__main__":
    main()
