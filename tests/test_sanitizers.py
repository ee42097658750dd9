"""The op tests once more, in a separate process, on a CPU library built with ASan and UBSan."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # a separate build, and minutes more

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "build/native-sanitize/_ops.so"

# The guards around the tests' buffers would hide accesses just outside them from ASan.
OP_TESTS = """
import sys, pytest
from tests.ops import kv_cases
kv_cases.GUARD = 0
sys.exit(pytest.main(["tests/ops", "-q", "-x", "--capture=sys", "-p", "no:cacheprovider", "-p", "no:xdist",
    "--ignore=tests/ops/test_cuda_graphs.py", *sys.argv[1:]]))
"""

# A write one byte past a tensor, through a function that ASan intercepts in every library.
OVERFLOW = "import ctypes, torch; t = torch.zeros(4); ctypes.memset(t.data_ptr(), 0, 17); print('not noticed')"


def run(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    runtimes = []
    # Torch's own libraries are not instrumented, so the runtime has to be loaded first, and the C++ library with it, or
    # it would miss exceptions.
    for name in ("libasan.so", "libstdc++.so"):
        answer = subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=False)
        runtimes.append(answer.stdout.strip())
    if not all(Path(runtime).is_absolute() for runtime in runtimes):
        pytest.skip(f"{compiler[0]} comes without libasan.so")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    built = run("setup.py", "-q", "build_ext", environment=clean | {"PDKERNELS_SANITIZE": "1"})
    assert built.returncode == 0, built.stdout + built.stderr
    return clean | {
        "LD_PRELOAD": " ".join(runtimes),
        # Python itself keeps memory until the end, and tests ask torch for more memory than there is.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PDKERNELS_LIBRARY": str(LIBRARY),
        "OMP_NUM_THREADS": "2",
        "CUDA_VISIBLE_DEVICES": "",  # this library has no kernels for one, and CUDA does not start under ASan
    }


def test_a_write_past_a_tensor_is_noticed(environment: dict[str, str]) -> None:
    assert b"__asan_init" in LIBRARY.read_bytes()
    answer = run("-c", OVERFLOW, environment=environment)
    assert answer.returncode != 0 and "heap-buffer-overflow" in answer.stderr, answer.stdout + answer.stderr


def test_the_layers_of_a_model(environment: dict[str, str]) -> None:
    """And greedy steps: ops that are not among those of tests/ops."""
    tests = [f"tests/models/test_whole_step{kind}.py" for kind in ("", "_experts", "_hybrid", "_settings")]
    tests += [
        "tests/decoding/test_next_token.py",
        "tests/decoding/test_draft_model.py",  # greedy steps, some tokens banned
        "tests/models/test_request_adapters.py",
        "tests/models/test_halved_cache.py",
        "tests/models/test_drafter_steps.py",
    ]
    arguments = ("-m", "pytest", *tests, "-q", "-x", "-m", "not slow", "-k", "not compiled")
    answer = run(*arguments, "-p", "no:cacheprovider", "-p", "no:xdist", "--capture=sys", environment=environment)
    report = re.search("(==[0-9]+==ERROR|[^\n]+runtime error:).{,4000}", answer.stderr, re.DOTALL)
    assert answer.returncode == 0, report[0] if report else answer.stdout[-8000:] + answer.stderr[-2000:]


def test_ops(environment: dict[str, str]) -> None:
    # Simulated and Triton kernels have their own checks, and compiling kernels and graphs does not touch our memory.
    others = ("cudasim", "inductor", "fullgraph", "triton", "compiled", "steady", "levels", "reference", "memory")
    # Attention is slow here: this build emulates the widest vector unit. All masks and tails are enough of it, and what
    # reads a cache or scores in a form of its own.
    kept = ("test_masks", "test_tails", "softcap", "halves")
    wanted = " and ".join(f"not {word}" for word in others) + f" and (not attention or {' or '.join(kept)})"
    chosen = ["-m", "not slow", "-k", wanted]
    answer = run("-c", OP_TESTS, *chosen, environment=environment)
    report = re.search("(==[0-9]+==ERROR|[^\n]+runtime error:).{,4000}", answer.stderr, re.DOTALL)
    assert answer.returncode == 0, report[0] if report else answer.stdout[-8000:] + answer.stderr[-2000:]
    assert " passed" in answer.stdout
