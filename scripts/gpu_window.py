"""What tells most in ten minutes on a GPU: part 7 of scripts/gpu_proof.py. Each step has a limit of its own, the time to be cut off included, and keeps what it found, so that one which is
cut off costs no other."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from scripts.gpu_proof import Part

ROOT = Path(__file__).resolve().parent.parent
AVAILABLE = "import sys; from pdkernels.integrations.device_loop import available; sys.exit(not available())"
"""Without cuda-python the tests and times of device loops would be skipped silently."""
# Kernels in CUDA C++ that were written or changed since a GPU ran them, as the sanitizer's driver calls them, and what selects their tests.
NEW = {
    "quantized_linear": "quantized_linear",
    "token_statistics": "token_statistics",
    "draft_lengths_": "draft_lengths",
    "lookup_draft_": "lookup_draft",
    "gelu_and_mul": "transformer_ops",
    "silu_and_mul": "transformer_ops",
    "recurrence_inject": "inject",
    "select_stale_rows_": "feature_cache",
}
# Others that changed: of the same ops, in Triton and in Gluon.
CHANGED = ("quantized_numbers", "recurrent_state_triton", "one_pass")


def failed_before() -> list[str]:
    """The names of the tests that failed when a GPU last ran all."""
    steps = json.loads((ROOT / "bench/results/h200/part-1.json").read_text())["steps"]
    names = (test.partition("::")[2].partition("[")[0] for step in steps for test in step["found"]["failures"])
    return list(dict.fromkeys(names))


def test_again(part: Part) -> None:
    names = [*failed_before(), *dict.fromkeys(NEW.values()), *CHANGED]
    workers = max(1, min(8, (os.cpu_count() or 1) - 1))
    options = ["-n", str(workers), "--dist", "worksteal", "--max-worker-restart", "9", "-m", "not slow"]
    files = ["tests/ops", "tests/integrations/test_device_loop.py"]
    selected = f"({' or '.join(names)}) and (cuda or triton or captured or capture) and not cudasim and not budgets"
    part.test("tests that failed, and those of new kernels", *options, *files, selected=selected)


def whole_model(part: Part) -> None:
    result = part.out / "verified_tokens.json"
    mode = ["--dry-run"] if part.dry else []
    part.run("8B, token by token and verified", [part.python, "-m", "bench.verified_tokens", "--to", result, *mode])


def benchmarks(letter: str, selected: str, *names: str) -> Callable[[Part], None]:
    """`selected` is for a GPU: the cases of a rehearsal are few."""
    return lambda part: part.benchmark(f"benchmarks-{letter}", names, "" if part.dry else selected)


def without_host(part: Part) -> None:
    nodes = ["-m", "tests.harness.launches", "--json", part.out / "device_loop_nodes.json"]
    part.run("what a device loop needs", [part.python, "-c", "" if part.dry else AVAILABLE])
    part.run("kernels of a captured step", [part.python, *nodes, *([] if part.dry else ["--captured"])])
    result = [] if part.dry else ["--benchmark-only", f"--benchmark-json={part.out / 'device_loop.json'}"]
    part.test(
        "generations without a host", "bench/bench_device_loop.py", *(result or ["--benchmark-disable"]), selected=""
    )


def checked(checker: str) -> Callable[[Part], None]:
    return lambda part: part.check(checker, "--calls", "12", "--op", *NEW)


class Timed(NamedTuple):
    name: str
    seconds: float
    run: Callable[[Part], None]


WINDOW = (
    Timed("A", 60, test_again),
    Timed("B", 90, whole_model),
    Timed("C", 110, benchmarks("C", "", "quantized_linear", "linear", "token_statistics", "filter_logits")),
    Timed("D", 100, without_host),
    Timed("E", 60, benchmarks("E", "", "recurrent_state", "recurrent_step", "kv_cache", "verify_draft")),
    Timed("F", 90, benchmarks("F", "bwd and (pdkernels or cuDNN)", "block_sparse_attention")),
    Timed("G", 30, checked("memcheck")),
    Timed("H", 30, checked("racecheck")),
)


def run_window(part: Part) -> None:
    for step in WINDOW:
        print(f"{step.name}, at most {step.seconds:.0f} s", flush=True)
        with part.within(step.seconds):
            step.run(part)
        part.keep()
