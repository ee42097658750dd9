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
        plain = torch.linspace(1, 3, batch * slots, dtype=torch.float64).to(device)
        self.costs = torch.stack([plain, plain])
        self.place = torch.arange(slots, device=device)
        self.prior = torch.full((slots,), PRIOR, dtype=torch.float64, device=device)
        self.prior[0] = 1
        step, before = float(plain[batch - 1]), float(plain[batch - 2]) if batch > 1 else 0.0
        self.token = (step / batch + (min(step / batch, step - before) if batch > 1 else step)) / 2
        self.extra = (plain[batch:] - step) / self.token  # of 1, 2, .. guesses of the batch, in tokens
        self.sequence = torch.arange(batch, device=device).repeat(slots - 1)  # of guesses, place by place
        self.number = torch.arange(len(self.sequence), device=device)
        self.batch = torch.full((1,), float(batch), dtype=torch.float64, device=device)
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
    batch = len(s.lengths)
    guesses = (s.lengths - 1).sum()
    spent = torch.where(guesses > 0, s.extra[(guesses - 1).clamp(min=0)], 0.0)
    s.budget.copy_(((s.budget + s.accepted * (1 + MAX_SLOWDOWN) - 1).sum() - spent) / batch)
    chance = ((s.acceptance_counts[:, 0] + s.prior) / (s.acceptance_counts[:, 1] + 1)).cumprod(1)
    likely, order = chance[:, 1:].t().flatten().sort(descending=True, stable=True)
    tokens = torch.cat([s.batch, likely]).cumsum(0)[1:]
    affordable = s.extra <= batch * (s.budget[0] + MAX_SLOWDOWN)
    worth = torch.where(affordable, tokens / (batch + s.extra), -torch.inf)
    total = torch.where(worth.max() > 1, worth.argmax() + 1, 0)
    taken = (s.number < total).long()
    s.lengths.fill_(1).scatter_add_(0, s.sequence[order], taken)


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
