"""Modes by concurrency: one set of weights, and the tokens a second of each of its modes with few and many clients.

Source: "Nemotron-Labs-Diffusion", section 1 and figure 9a.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from bench.engine_drafts import speeds
from bench.papers.runs import Progress
from pdkernels import models
from pdkernels.evaluation.machine import processor
from pdkernels.evaluation.tasks import make_task

CLIENTS = (1, 2, 4, 8, 16, 32)
ROUNDS, TOKENS = 3, 64
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "autoregressive": ("autoregressive", {}),
    "linear self-speculation, 8": ("linear_self_speculation", {"block_size": 8}),
    "linear self-speculation, 16": ("linear_self_speculation", {"block_size": 16}),
    "linear self-speculation, 32": ("linear_self_speculation", {"block_size": 32}),
    "quadratic self-speculation, 4": ("quadratic_self_speculation", {"block_size": 4}),
    "block diffusion, 8": ("block_diffusion", {"block_size": 8}),
    "auto": ("linear_self_speculation", {"block_size": "auto"}),
}


def modes(problems: int, progress: Progress) -> dict[str, Any]:
    """Tokens a second of all clients together, in CPU time of one thread, the least of interleaved rounds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    started = time.process_time()
    try:
        model: Any = models.load("tiny-trimode")
        prompts = [model.tokenizer.encode(prompt) for prompt in make_task("sums", problems).prompts]
        lossless = [name for name in MODES if "diffusion" not in name]
        rows: list[dict[str, Any]] = []
        measured: dict[str, dict[str, float]] = {name: {} for name in MODES}
        for number, size in enumerate(CLIENTS):
            progress(f"{size} clients", number / len(CLIENTS))
            for name, cells in speeds(model, MODES, prompts, [size], ROUNDS, TOKENS, lossless).items():
                measured[name] |= cells
    finally:
        torch.set_num_threads(threads)
    for name, cells in measured.items():
        rows.append({"": name} | {f"{size} clients": round(cells[str(size)]) for size in CLIENTS})
    best = {size: max(measured[name][str(size)] for name in lossless if name != "auto") for size in CLIENTS}
    ratios = {f"{size} clients": f"{measured['auto'][str(size)] / best[size]:.2f}x" for size in CLIENTS}
    rows.append({"": "auto over the best other lossless mode"} | ratios)
    facts = {"tokens of an answer": TOKENS, "rounds": ROUNDS, "machine": processor()}
    seconds = {"processor seconds": round(time.process_time() - started)}
    return {"model": "tiny-trimode", "task": "sums", "problems": problems, **facts, **seconds, "rows": rows}
