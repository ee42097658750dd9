"""Which guesses for masked tokens are committed, as plain loops over sequences and segments.

Sources of the rules: LLaDA (a quota per step), Fast-dLLM (threshold, and factor as in the released code), LLaDA2 and SlowFast
Sampling (all that pass a threshold if they are enough, else the best few).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .philox import WORD, philox4x32

# The fourth word of a counter: token draws have 0 there, latent noise 1.
ORDER = 2


def random_order(seed: int, step: int, positions: Sequence[int]) -> list[float]:
    """The uniform number in (0, 1) of each position, exact in float64: word 0 of ``philox4x32((0, position, step, 2), seed)``.

    >>> [round(u, 3) for u in random_order(0, 1, [7, 8])]
    [0.812, 0.626]
    """
    counter = torch.tensor([[0, position, step & WORD, ORDER] for position in positions], dtype=torch.int64).reshape(
        -1, 4
    )
    words = philox4x32(counter, torch.tensor([seed & WORD, (seed >> 32) & WORD]))[:, 0]
    return ((words.double() + 0.5) / 2**32).tolist()


def ranked(confidence: Sequence[float]) -> list[int]:
    """Indices by confidence, high ones first, NaN last, the lower index first on ties.

    >>> ranked([0.5, float("nan"), 0.9, 0.5, float("-inf")])
    [2, 0, 3, 4, 1]
    """
    return sorted(range(len(confidence)), key=lambda r: (math.isnan(confidence[r]), -confidence[r], r))


def count_to_commit(
    best_first: Sequence[float],
    *,
    quota: int,
    threshold: float | None,
    min_count: int,
    factor: float | None,
    strict: bool,
) -> int:
    """How many candidates, given their ranked confidences, a rule commits.

    >>> rule = {"quota": 1, "min_count": 1, "strict": False}
    >>> count_to_commit([0.95, 0.9, 0.4], threshold=0.9, factor=None, **rule)
    2
    >>> count_to_commit([0.5, 0.4], threshold=0.9, factor=None, **rule)
    1
    >>> count_to_commit([0.99, 0.01], threshold=None, factor=1.0, **rule)  # the failure is at the last rank
    2
    """
    m = len(best_first)
    if factor is not None:
        # Rank 1 never fails; NaN has no confidence.
        fails = [k for k in range(2, m + 1) if not best_first[k - 1] >= 1 - factor / (k + 1)]
        return m if not fails or fails[0] == m else fails[0] - 1
    if threshold is not None:
        passing = sum(c > threshold if strict else c >= threshold for c in best_first)
        return passing if passing >= min_count else min(quota, m)
    return min(quota, m)


def unmask_(
    tokens: Tensor,
    ids: Tensor,
    confidence: Tensor | None,
    mask_token: int,
    positions: Tensor | None = None,
    windows: Tensor | None = None,
    quota: int = 1,
    quotas: Tensor | None = None,
    threshold: float | None = None,
    min_count: int = 1,
    min_counts: Tensor | None = None,
    factor: float | None = None,
    strict: bool = False,
    seed: int = 0,
    seeds: Tensor | None = None,
    step: int = 0,
    steps: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(committed, remaining, done)``; as `pdkernels.unmask_`, which also takes tensors for `quota`, `min_count`, `seed` and `step`."""
    batch, length = tokens.shape
    shape = (batch,) if windows is None or windows.dim() == 2 else tuple(windows.shape[:2])
    spans: list[list[list[int]]] = (
        [[[0, length]] for _ in range(batch)]
        if windows is None
        else (windows if windows.dim() == 3 else windows[:, None]).tolist()
    )
    at = [list(range(length)) for _ in range(batch)] if positions is None else positions.tolist()

    def numbers(tensor: Tensor | None, value: int) -> list[list[int]]:
        return (
            [[value] * len(row) for row in spans]
            if tensor is None
            else (tensor if tensor.dim() == 2 else tensor[:, None]).tolist()
        )

    own_quotas, own_min_counts = numbers(quotas, quota), numbers(min_counts, min_count)
    for b in range(batch):
        _check(b, length, at[b], spans[b], own_quotas[b], own_min_counts[b])

    committed: list[int] = []
    remaining: list[int] = []
    for b in range(batch):
        row, guesses = tokens[b].tolist(), ids[b].tolist()
        if confidence is None:
            own, moment = seed if seeds is None else int(seeds[b]), step if steps is None else int(steps[b])
            scores = random_order(own, moment, [max(p, 0) for p in at[b]])
        else:
            scores = confidence[b].tolist()
        for (start, end), own_quota, own_min_count in zip(spans[b], own_quotas[b], own_min_counts[b]):
            eligible = [
                r
                for r, p in enumerate(at[b])
                if start <= p < end and row[p] == mask_token and guesses[r] >= 0 and guesses[r] != mask_token
            ]
            order = [eligible[i] for i in ranked([scores[r] for r in eligible])]
            n = count_to_commit(
                [scores[r] for r in order],
                quota=own_quota,
                threshold=threshold,
                min_count=own_min_count,
                factor=factor,
                strict=strict,
            )
            for r in order[:n]:
                row[at[b][r]] = guesses[r]
                tokens[b, at[b][r]] = guesses[r]
            committed.append(n)
            remaining.append(row[start:end].count(mask_token))
    done = [left == 0 for left in remaining]
    columns = ((committed, torch.int64), (remaining, torch.int64), (done, torch.bool))
    first, second, third = (
        torch.tensor(column, dtype=dtype, device=tokens.device).reshape(shape) for column, dtype in columns
    )
    return first, second, third


def _check(
    b: int, length: int, at: list[int], spans: list[list[int]], quotas: list[int], min_counts: list[int]
) -> None:
    def fail(what: str, actual: object) -> None:
        raise ValueError(f"pdkernels.unmask_: {what}, got {actual} for sequence {b}.")

    seen: set[int] = set()
    for p in at:
        if not -1 <= p < length:
            fail(f"positions must be in [-1, {length - 1}]", p)
        if p >= 0 and p in seen:
            fail("positions must be distinct in a sequence", f"{p} twice")
        seen.add(p)
    for start, end in spans:
        if not 0 <= start <= end <= length:
            fail(f"windows must lie in [0, {length}] and not end before they start", [start, end])
    filled = sorted([start, end] for start, end in spans if start < end)
    for before, after in zip(filled, filled[1:]):
        if after[0] < before[1]:
            fail("windows must not overlap", f"{before} and {after}")
    for name, numbers in (("quota", quotas), ("min_count", min_counts)):
        for number in numbers:
            if number < 0:
                fail(f"{name} must not be negative", number)
