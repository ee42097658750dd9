"""Jacobi Forcing, figure 4 and section 3.2: what of a draft that is not converged yet is right already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdkernels import decoding, models
from pdkernels.evaluation.tasks import make_task

BLOCK_SIZE = 32
LONGER_THAN = 3  # consecutive tokens


def in_segments(noisy: Sequence[int], fixed: Sequence[int], longer_than: int = LONGER_THAN) -> int:
    """How many tokens of `noisy` are in runs of more than `longer_than` that occur anywhere in the fixed point.

    >>> in_segments([9, 1, 2, 3, 4, 9, 2, 3], fixed=[0, 0, 1, 2, 3, 4])
    4
    """
    size = longer_than + 1
    known = {tuple(fixed[n : n + size]) for n in range(len(fixed) - size + 1)}
    marked = set[int]()
    for n in range(len(noisy) - size + 1):
        if tuple(noisy[n : n + size]) in known:
            marked.update(range(n, n + size))
    return len(marked)


def count(problems: int, progress: Any) -> dict[str, Any]:
    """Averages over the forwards of Jacobi decoding, block by block, that leave something to converge."""
    task, rows = make_task("sums", problems), []
    for number, name in enumerate(("tiny-code", "tiny-jacobi")):
        model: Any = models.load(name)
        forwards, accepted, noisy, stationary, segments = 0, 0, 0, 0, 0
        for done, prompt in enumerate(task.prompts):
            progress(name, (number + done / problems) / 2)
            options: dict[str, Any] = {"max_new_tokens": task.limit, "block_size": BLOCK_SIZE, "trace": True}
            result = decoding.generate(model, prompt, "jacobi", **options)
            text, cursor = result.tokens.tolist(), 0
            trace: Any = result.stats.trace
            for step in trace[0]:
                left = list(step.draft[step.accepted :])
                fixed = text[cursor : cursor + len(step.draft)]
                cursor += step.accepted
                if not left or len(fixed) < len(step.draft):  # the text ends inside of the block
                    continue
                forwards, accepted, noisy = forwards + 1, accepted + step.accepted, noisy + len(left)
                stationary += sum(own == right for own, right in zip(left, fixed[step.accepted :], strict=True))
                segments += in_segments(left, fixed)
        rows.append(
            {
                "": name,
                "accepted": round(accepted / forwards, 2),
                "not converged": round(noisy / forwards, 2),
                "of these right in place": round(stationary / forwards, 2),
                f"in runs of more than {LONGER_THAN}, anywhere": round(segments / forwards, 2),
            }
        )
    return {"task": "sums", "problems": problems, "block size": BLOCK_SIZE, "rows": rows}
