"""Appends the entry of a decoding step to a log, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor


def log_step_(log: Tensor, count: Tensor, condition: Tensor, entry: Tensor, handle: int | None = None) -> None:
    """Shapes as in ``pdkernels.log_step_``. Only a kernel can set a graph's condition: `handle` must be None."""
    at, steps = int(count), len(log)
    if handle is not None:
        raise NotImplementedError(
            "pdkernels.log_step_: handle must be None for the reference, which no graph can hold."
        )
    if not 0 <= at < steps:
        raise ValueError(f"pdkernels.log_step_: count must be in [0, {steps - 1}], got {at}.")
    log[at] = entry
    count += 1
    condition.fill_(bool((entry[:, 0] > 0).any()) and at + 1 < steps)
