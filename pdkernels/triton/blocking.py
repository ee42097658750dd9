"""How the block-sparse kernels cut their work, by kernel, architecture, element size and head dimension."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

# Options of a launch, which each one names: Triton 3.10 has another default than those before.
ROUNDED = {"enable_fp_fusion": False}
"""Every operation is rounded by itself."""
CONTRACTED = {"enable_fp_fusion": True}
"""A product may be contracted with a sum that takes it."""


class Blocking(NamedTuple):
    """How a kernel cuts its work."""

    block_m: int
    """Query rows of a block."""
    block_n: int
    """Key rows of a block."""
    masked: int
    """Rows per step where a mask is needed, instead of `block_n` (`block_m` in the dK/dV kernel)."""
    warps: int
    stages: int
    """Stages of the load pipeline."""


# Fixed, so that no call waits for autotuning: {(kernel, architecture): {largest head dimension: blocking}}.
#   - Hopper and Blackwell: 8 warps are two warp groups of 64 rows each. 128 key columns halve the work on row maxima,
#     against 64, and fill 224 KiB of shared memory at d=128 with three stages of K and V.
#   - The masked loop takes steps of half the width, since bits take registers: at full width ptxas spills, and
#     serializes wgmma.
#   - dQ has four stages at d=128; its registers leave room for only one program per SM anyway. With two, every step
#     waited for the loads it had just issued (tests/ops/test_steady_loops.py).
#   - dK/dV holds two accumulators of 128 x d, 128 of 255 registers at d=128, so its queries come 64 at a time. On
#     Hopper that spills some words of addresses, 8 accesses per step with three stages; 32 at a time would spill
#     nothing, but read shared memory faster than it delivers.
#   - Ampere's blocks stay under 99 KiB of shared memory: architectures not listed use them (sm_86, 89, 120).
#   - float32 runs on the plain FMA units (TensorFloat-32 misses the error budget), where large blocks spill.
# Registers and shared memory of each are in tests/triton_budgets.json.
_TABLE: dict[tuple[str, str], dict[int, Blocking]] = {
    ("forward", "sm_90"): {
        128: Blocking(128, 128, 64, 8, 3),
        192: Blocking(128, 64, 32, 8, 2),
        256: Blocking(128, 32, 32, 8, 2),
        512: Blocking(64, 32, 16, 8, 2),
    },
    ("dq", "sm_90"): {
        64: Blocking(128, 128, 64, 8, 2),
        128: Blocking(128, 64, 64, 8, 4),
        256: Blocking(64, 64, 32, 8, 2),
        512: Blocking(32, 16, 16, 8, 2),
    },
    ("dkv", "sm_90"): {
        64: Blocking(64, 128, 64, 8, 2),
        128: Blocking(64, 128, 32, 8, 3),
        256: Blocking(32, 32, 32, 8, 2),
        512: Blocking(16, 16, 16, 8, 2),
    },
    ("forward", "sm_100"): {
        128: Blocking(128, 128, 64, 8, 2),
        256: Blocking(128, 64, 32, 8, 2),
        512: Blocking(64, 32, 16, 8, 2),
    },
    ("dq", "sm_100"): {
        128: Blocking(128, 64, 64, 8, 2),
        256: Blocking(64, 64, 32, 8, 2),
        512: Blocking(32, 16, 16, 8, 2),
    },
    ("dkv", "sm_100"): {
        128: Blocking(64, 128, 64, 8, 2),
        256: Blocking(32, 64, 32, 8, 2),
        512: Blocking(16, 16, 16, 8, 2),
    },
    ("forward", "sm_80"): {
        48: Blocking(64, 64, 32, 4, 3),
        64: Blocking(128, 64, 32, 4, 3),
        128: Blocking(64, 64, 32, 4, 2),
        256: Blocking(64, 32, 32, 8, 2),
        512: Blocking(32, 16, 16, 8, 2),
    },
    ("dq", "sm_80"): {
        64: Blocking(128, 64, 32, 8, 2),
        128: Blocking(64, 64, 32, 4, 2),
        256: Blocking(32, 32, 32, 4, 2),
        512: Blocking(16, 16, 16, 4, 2),
    },
    ("dkv", "sm_80"): {
        64: Blocking(64, 128, 32, 8, 2),
        128: Blocking(64, 64, 32, 8, 2),
        256: Blocking(32, 32, 32, 8, 2),
        512: Blocking(16, 16, 16, 8, 2),
    },
    ("forward", "fp32"): {
        64: Blocking(32, 32, 32, 8, 2),
        256: Blocking(16, 32, 32, 8, 2),
        512: Blocking(16, 16, 16, 8, 2),
    },
    ("dq", "fp32"): {
        64: Blocking(32, 32, 32, 4, 2),
        128: Blocking(16, 32, 32, 4, 2),
        256: Blocking(16, 16, 16, 4, 2),
        512: Blocking(16, 16, 16, 8, 2),
    },
    ("dkv", "fp32"): {64: Blocking(32, 32, 32, 8, 2), 256: Blocking(16, 16, 16, 8, 2), 512: Blocking(16, 16, 16, 8, 2)},
}


@cache
def architecture(device: torch.device) -> str:
    """The rows of the table for a device. The interpreter uses those of Hopper."""
    if device.type != "cuda":
        return "sm_90"
    major, _ = torch.cuda.get_device_capability(device)
    return {9: "sm_90", 10: "sm_100"}.get(major, "sm_80")


def choose_blocking(kernel: str, q: Tensor, block_q: int, block_k: int) -> Blocking:
    """The table's blocking, reduced to powers of two that divide the plan's tiles."""
    rows = _TABLE[kernel, architecture(q.device) if q.element_size() == 2 else "fp32"]
    entry = rows[min(limit for limit in rows if q.shape[-1] <= limit)]
    block_m, block_n = min(entry.block_m, block_q & -block_q), min(entry.block_n, block_k & -block_k)
    warps = entry.warps if (block_m, block_n) == entry[:2] else 4
    return Blocking(block_m, block_n, min(entry.masked, block_m if kernel == "dkv" else block_n), warps, entry.stages)
