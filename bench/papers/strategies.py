"""SlowFast Sampling, tables 2 and 3: its speed and quality beside those of other orders, and on a feature cache."""

from __future__ import annotations

import time
from typing import Any

from pdkernels import decoding, models
from pdkernels.evaluation.machine import processor
from pdkernels.evaluation.tasks import make_task

# Tables 2 and 4 have K_p = 100, K_r = 5 for the cache; of the transfer ratio the paper says nothing, 0.25 is that of dLLM-Cache.
_CACHE = {"prompt_interval": 100, "gen_interval": 5, "transfer_ratio": 0.25}
STRATEGIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "left to right": ("llada", {"block_size": 1}),
    "diffusion": ("llada", {}),
    "blocks of 32 from the left": ("llada", {"block_size": 32}),
    "SlowFast": ("slowfast", {}),
    "SlowFast, tau_high 0.99": ("slowfast", {"tau_high": 0.99}),
    "SlowFast on the cache": ("slowfast", _CACHE),
}


def compare(problems: int, progress: Any) -> dict[str, Any]:
    """Right answers, forwards, and tokens per second of processor time."""
    model: Any = models.load("tiny-masked")
    task = make_task("sums", problems, canvas=128)
    rows, began = [], time.process_time()
    for number, (name, (method, options)) in enumerate(STRATEGIES.items()):
        progress(name, number / len(STRATEGIES))
        right, tokens, forwards, start = 0, 0, 0, time.process_time()
        for prompt, problem in zip(task.prompts, task.problems or (), strict=True):
            given: dict[str, Any] = {"max_new_tokens": task.limit, "end_tokens": task.end_tokens, **options}
            found = decoding.generate(model, prompt, method, **given)
            right += problem.is_solved_by(str(found.text))
            tokens, forwards = tokens + found.stats.tokens, forwards + found.stats.forwards
        rows.append(
            {
                "": name,
                "right": right,
                "forwards per prompt": round(forwards / problems, 2),
                "tokens/s": round(tokens / (time.process_time() - start)),
            }
        )
    return {
        "model": "tiny-masked",
        "task": "sums",
        "problems": problems,
        "device": processor(),
        "seconds": round(time.process_time() - began),
        "rows": rows,
    }
