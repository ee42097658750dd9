"""Logging a step's entry in one launch, compared with torch ops that do the same without a sync."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import pdkernels as pd
from bench.timing import compare


class Setup:
    def __init__(self, batch: int, columns: int, device: str) -> None:
        self.log = torch.zeros(64, batch, columns, dtype=torch.int64, device=device)
        self.count = torch.zeros(1, dtype=torch.int64, device=device)
        self.condition = torch.zeros(1, dtype=torch.bool, device=device)
        self.entry = torch.randint(0, 50000, (batch, columns), generator=torch.Generator().manual_seed(0)).to(device)

    def reset(self) -> None:
        self.count.zero_()


def ours(s: Setup) -> None:
    pd.log_step_(s.log, s.count, s.condition, s.entry)


def torch_ops(s: Setup) -> None:
    s.log.index_copy_(0, s.count, s.entry[None])
    s.count += 1
    s.condition.copy_((s.entry[:, 0] > 0).any() & (s.count[0] < len(s.log)))


CANDIDATES: dict[str, Callable[[Setup], None]] = {"pdkernels": ours, "torch ops": torch_ops}


@pytest.mark.parametrize("batch, columns", [(1, 2), (8, 68)])
@pytest.mark.parametrize("name", CANDIDATES)
def test_log_step(benchmark, name: str, batch: int, columns: int, device: str) -> None:
    benchmark.group = f"log_step_ batch {batch}, {columns} columns, {device}"
    setup, expected = Setup(batch, columns, device), Setup(batch, columns, device)
    CANDIDATES[name](setup)
    pd.log_step_(expected.log, expected.count, expected.condition, expected.entry, backend="reference")
    assert all(torch.equal(getattr(setup, part), getattr(expected, part)) for part in ("log", "count", "condition"))
    compare(
        benchmark,
        lambda: CANDIDATES[name](setup),
        baseline=lambda: torch_ops(setup),
        baseline_name="torch ops",
        reset=setup.reset,
        device=device,
        rounds=500,
        op="log_step_",
        candidate=name,
        batch=batch,
        columns=columns,
    )
