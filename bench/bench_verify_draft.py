"""Draft verification, compared with the same rules in torch ops, and with the loop that syncs for every decision."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from bench.devices import by_device
from bench.timing import compare

SIZES = [(1, 16), (1, 64), (32, 64)]


class Setup:
    def __init__(self, batch: int, width: int, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.draft = torch.randint(0, 50000, (batch, width), generator=generator).to(device)
        self.predictions = self.draft.roll(-1, 1)
        broken = torch.randint(1, width, (batch, 1), generator=generator).to(device)
        self.predictions.scatter_(1, broken, 1)
        self.lengths = torch.full((batch,), width, device=device)
        self.ends = torch.tensor([0], device=device)
        self.refill = torch.randint(0, 50000, (batch, width), generator=generator).to(device)


def ours(s: Setup) -> tuple[Tensor, ...]:
    return pd.verify_draft(s.draft, s.predictions, draft_lengths=s.lengths, end_tokens=s.ends, refill=s.refill)[:4]


def torch_ops(s: Setup) -> tuple[Tensor, ...]:
    """No sync, about eighteen small ops."""
    width = s.draft.shape[1]
    position = torch.arange(width, device=s.draft.device)
    agree = (s.draft[:, 1:] == s.predictions[:, :-1]) & (position[1:] < s.lengths[:, None])
    accepted = 1 + agree.long().cumprod(1).sum(1)
    is_end = torch.isin(s.draft, s.ends) & (position < accepted[:, None])
    cut = is_end.any(1)
    accepted = torch.where(cut, is_end.long().argmax(1) + 1, accepted)
    next_token = s.predictions.gather(1, accepted[:, None] - 1)[:, 0]
    next_token = torch.where(cut, s.draft.gather(1, accepted[:, None] - 1)[:, 0], next_token)
    ended = torch.isin(next_token, s.ends)
    source = accepted[:, None] - 1 + position
    inside = source < s.lengths[:, None]
    new_draft = torch.where(inside, s.predictions.gather(1, source.clamp(max=width - 1)), s.refill)
    return accepted, next_token, ended, new_draft


CANDIDATES: dict[str, Callable[[Setup], tuple[Tensor, ...]]] = {"pdkernels": ours, "torch ops": torch_ops}


@by_device("batch, width", {"cpu": SIZES, "cuda": SIZES, "dry": SIZES[:1]})
@pytest.mark.parametrize("name", CANDIDATES)
def test_verify_draft(benchmark, name: str, batch: int, width: int, device: str) -> None:
    benchmark.group = f"verify_draft batch {batch}, width {width}, {device}"
    setup = Setup(batch, width, device)
    candidate = CANDIDATES[name]
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            candidate(setup),
            pd.verify_draft(
                setup.draft,
                setup.predictions,
                draft_lengths=setup.lengths,
                end_tokens=setup.ends,
                refill=setup.refill,
                backend="reference",
            ),
        )
    )
    compare(
        benchmark,
        lambda: candidate(setup),
        baseline=lambda: torch_ops(setup),
        baseline_name="torch ops",
        device=device,
        rounds=500,
        op="verify_draft",
        candidate=name,
        batch=batch,
        width=width,
    )
