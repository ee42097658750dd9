"""What calls leave behind: after many of unlike sizes a process has the memory that it had, but for what docs/threads.md names."""

from __future__ import annotations

import subprocess
import sys

import pytest

# In a process of its own, whose resident memory is that of these calls.
CALLS = """
import ctypes, random, sys
import torch
import pdkernels as pd
from tests.ops import fuzz
from tests.ops.examples import PUBLIC, example, run

calls, threads = map(int, sys.argv[1:])
torch.set_num_threads(threads)
trim = ctypes.CDLL(None).malloc_trim

def resident():
    trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

def larger(rng, arguments):
    sizes = sorted({n for name in fuzz.tensors_of(arguments) for n in arguments[name].shape})
    old, new = rng.choice(sizes), rng.choice([33, 64, 200, 500, 1100])
    for name in fuzz.tensors_of(arguments):
        for dim, n in enumerate(arguments[name].shape):
            if n == old and arguments[name].numel() // max(n, 1) * new < 10**6:
                arguments[name] = fuzz.resized(arguments[name], dim, new)

def round_of(seed):
    for number in range(calls):
        rng = random.Random(seed * 10**6 + number)
        arguments = example(PUBLIC[number % len(PUBLIC)], 1, dtype=rng.choice(fuzz.DTYPES))
        larger(rng, arguments)
        try:
            run(PUBLIC[number % len(PUBLIC)], arguments)
        except fuzz.HOUSE:
            pass

def long_row():
    for width in (30_000_000, 10):
        pd.add_rms_norm(torch.zeros(1, width), torch.zeros(1, width), torch.ones(width))

round_of(0)
first = resident()
for seed in (1, 2):
    round_of(seed)
long_row()
print(resident() - first)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("calls", "threads"), [(120, 1), pytest.param(1500, 2, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_memory_is_given_back(calls: int, threads: int) -> None:
    command = [sys.executable, "-c", CALLS, str(calls), str(threads)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr[-2000:]
    assert float(found.stdout) < 40, found.stdout  # MiB
