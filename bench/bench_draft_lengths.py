"""Choosing lengths of drafts in one launch, compared with torch ops that do the same without a sync."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import pdkernels as pd
from bench.timing import compare

DECAY, PRIOR, MAX_SLOWDOWN = 0.97, 0.75, 0.005


class Setup:
    def __init__(self, batch: int, slots: int, device: str) -> None:
        chance = torch.Generator().manual_seed(0)
        self.start = torch.randint(1, slots + 1, (batch,), generator=chance).to(device)
        self.lengths = self.start.clone()
        self.accepted = torch.ones_like(self.start)
        self.remaining = torch.full_like(self.start, 100)
        self.acceptance_counts = torch.zeros(batch, 2, slots, dtype=torch.float64, device=device)
        self.budget = torch.zeros(batch, dtype=torch.float64, device=device)
        self.ready = torch.ones(batch, dtype=torch.bool, device=device)
        self.costs = torch.linspace(1, 3, slots, dtype=torch.float64).to(device)
        self.place = torch.arange(slots, device=device)
        self.prior = torch.full_like(self.costs, PRIOR)
        self.prior[0] = 1
        self.over = self.costs - self.costs[0] * (1 + MAX_SLOWDOWN)
        self.over[0] = -torch.inf
        self.reset()

    def reset(self) -> None:
        self.lengths.copy_(self.start)
        self.acceptance_counts.zero_()
        self.budget.fill_(2.0)


def ours(s: Setup) -> None:
    pd.draft_lengths_(s.lengths, s.accepted, s.remaining, s.acceptance_counts, s.budget, s.ready, s.costs)


def torch_ops(s: Setup) -> None:
    own, right = s.lengths[:, None], s.accepted[:, None]
    reached = (s.place < own) & (s.place <= right)
    s.acceptance_counts *= DECAY
    s.acceptance_counts[:, 0] += reached & (s.place < right)
    s.acceptance_counts[:, 1] += reached
    spent = s.costs[(s.lengths - 1).clamp(min=0)]
    s.budget += (s.accepted * s.costs[0] * (1 + MAX_SLOWDOWN) - spent) * (s.lengths > 0)
    chance = ((s.acceptance_counts[:, 0] + s.prior) / (s.acceptance_counts[:, 1] + 1)).cumprod(1)
    worth = torch.where(s.over <= s.budget[:, None], chance.cumsum(1) / s.costs, -torch.inf)
    s.lengths.copy_(torch.minimum(worth.argmax(1) + 1, s.remaining))


CANDIDATES: dict[str, Callable[[Setup], None]] = {"pdkernels": ours, "torch ops": torch_ops}


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("name", CANDIDATES)
def test_draft_lengths(benchmark, name: str, batch: int, device: str) -> None:
    benchmark.group = f"draft_lengths_ batch {batch}, 16 slots, {device}"
    setup, expected = Setup(batch, 16, device), Setup(batch, 16, device)
    CANDIDATES[name](setup)
    ours(expected)
    assert torch.equal(setup.lengths, expected.lengths)
    torch.testing.assert_close(setup.acceptance_counts, expected.acceptance_counts, rtol=1e-12, atol=1e-12)
    compare(
        benchmark,
        lambda: CANDIDATES[name](setup),
        baseline=lambda: torch_ops(setup),
        baseline_name="torch ops",
        reset=setup.reset,
        device=device,
        rounds=500,
        op="draft_lengths_",
        candidate=name,
        batch=batch,
    )
