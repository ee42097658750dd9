"""Nothing of the size of all pairs is ever held: at 16384 tokens a boolean mask of them takes 256 MiB, scores a GiB."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from pdkernels import backends

PROMPT, BLOCK = 512, 32
MOST_BYTES = 64 * 2**20
MOST_PLAN_BYTES = 1_000_000

# A separate process, whose peak resident memory comes from the system, so that what compiled code allocates counts too. Inputs
# exist before the peak is reset; results are subtracted from its growth.
PROGRAM = """
import json, resource, sys, time
import torch, pdkernels as pd

def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))

def call(mask, plan):
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, mask.q_len, 1, head_dim, generator=generator) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    resident = status("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    start = time.perf_counter()
    out = pd.block_sparse_attention(*leaves, plan, backend=backend)
    gradients = torch.autograd.grad(out, leaves, grad)
    seconds = time.perf_counter() - start
    results = sum(x.nbytes for x in (out, *gradients)) + 4 * mask.q_len
    return status("VmHWM") - resident - results, seconds, all(bool(x.isfinite().all()) for x in (out, *gradients))

prompt, block, blocks, head_dim = map(int, sys.argv[1:5])
backend = sys.argv[5]
torch.set_num_threads(2)
small = pd.masks.noise_aware_causal(32, 32, 4)
call(small, small.plan())  # loads code, starts threads
mask = pd.masks.noise_aware_causal(prompt, block, blocks)
plan = mask.plan(128, 128)
extra, seconds, finite = call(mask, plan)
print(json.dumps({"length": mask.q_len, "plan": plan.nbytes, "extra": extra, "seconds": seconds, "finite": finite}))
"""


def peak_can_be_reset() -> bool:
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return False
    return True


def measure(blocks: int, head_dim: int, backend: str = "native") -> dict[str, float]:
    arguments = [sys.executable, "-c", PROGRAM, *map(str, (PROMPT, BLOCK, blocks, head_dim)), backend]
    # Freed blocks go back to the system at once: results must not reuse memory that is already counted as resident.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    answer = subprocess.run(arguments, capture_output=True, text=True, check=False, env=environment)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


pytestmark = [
    pytest.mark.skipif(
        ("native", "cpu") not in backends.CHOICES.get("block_sparse_attention", {}),
        reason="no compiled kernel for the CPU",
    ),
    pytest.mark.skipif(not peak_can_be_reset(), reason="the system does not let a process forget its peak of memory"),
]


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [16, 64])
def test_memory_grows_with_tiles_and_not_with_pairs(head_dim: int) -> None:
    found = measure(248, head_dim)
    extra, plan = found["extra"], found["plan"]
    print(f"head_dim {head_dim}: {extra / 2**20:.1f} MiB beside results, plan {plan:,} bytes, {found['seconds']:.1f} s")
    assert found["length"] == 16384 and found["finite"]
    assert plan < MOST_PLAN_BYTES
    assert extra < MOST_BYTES


@pytest.mark.slow
def test_the_measurement_sees_what_the_reference_holds() -> None:
    found = measure(56, 16, "reference")
    assert found["length"] == 4096 and found["extra"] > 4 * 4096**2
