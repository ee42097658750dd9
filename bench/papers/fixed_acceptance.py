"""Jacobi Forcing, figure 5a: how much faster than token by token a block is, if a forward over it accepts so many tokens."""

from __future__ import annotations

import time
from typing import Any

import torch

from pdkernels import models
from pdkernels.evaluation.machine import processor

BLOCK_SIZES = (1, 8, 16, 32, 64, 128, 256)
ACCEPTED = (2, 3, 4, 5)
PROMPT, GENERATED = 128, 256  # the paper's lengths; a forward is timed in the middle of the generation
REPEATS = 15


def speedups(seconds: dict[int, float]) -> list[dict[str, Any]]:
    """Rows of the table, from the seconds of a forward by the size of its block.

    >>> speedups({1: 2e-3, 8: 2e-3, 16: 4e-3})[-1]
    {'block size': 16, 'milliseconds': 4.0, '2 accepted': 1.0, '3 accepted': 1.5, '4 accepted': 2.0, '5 accepted': 2.5}
    """
    rows = []
    for size, taken in seconds.items():
        told: dict[str, Any] = {"block size": size, "milliseconds": round(1e3 * taken, 3)}
        for count in ACCEPTED:
            told[f"{count} accepted"] = round(count * seconds[1] / taken, 2) if size >= count else None
        rows.append(told)
    return rows


@torch.inference_mode()
def fixed(problems: int, progress: Any) -> dict[str, Any]:
    """The shortest of some forwards, in processor time: on a busy machine that is the time of an idle one."""
    model = models.load("tiny-jacobi")
    cache = model.new_cache(batch=1, capacity=PROMPT + GENERATED + max(BLOCK_SIZES))
    tokens = torch.arange(PROMPT + GENERATED + max(BLOCK_SIZES))[None] % 90 + 10
    model(tokens[:, : PROMPT + GENERATED // 2], cache=cache)
    cache.commit_(torch.tensor([PROMPT + GENERATED // 2]))
    seconds = dict.fromkeys(BLOCK_SIZES, float("inf"))
    for repeat in range(REPEATS):
        progress("forwards", repeat / REPEATS)
        for size in BLOCK_SIZES:
            began = time.process_time()
            model(tokens[:, :size], cache=cache)
            seconds[size] = min(seconds[size], time.process_time() - began)
    return {
        "model": "tiny-jacobi",
        "device": processor(),
        "threads": torch.get_num_threads(),
        "prompt": PROMPT,
        "generated": GENERATED,
        "repeats": REPEATS,
        "rows": speedups(seconds),
    }
