"""Lookup drafts in one launch, compared with the same rules in torch ops without a sync."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from bench.devices import by_device
from bench.timing import compare

SIZES = [(1, 500), (1, 2000), (8, 2000)]
SLOTS, REACH, LEAST, GROWTH, POOL = 16, 5, 2, 3, 4


class Setup:
    """Texts of 300 different tokens after a pool of others, as in a decoder: matches of one token everywhere, of two in some places."""

    def __init__(self, batch: int, width: int, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.start = REACH - 1 + POOL * (SLOTS + 1)
        self.tokens = torch.randint(0, 300, (batch, self.start + width), generator=generator).to(device)
        self.tokens[:, REACH - 2 : self.start : SLOTS + 1] = -1
        self.tokens[:, : REACH - 1] = -1
        self.draft = torch.zeros(batch, SLOTS, dtype=torch.int64, device=device)
        self.draft[:, 0] = 7
        self.ends = self.start + torch.randint(width - 100, width, (batch,), generator=generator).to(device)
        self.lengths = torch.full((batch,), SLOTS, device=device)
        # What a decoder makes once.
        self.after = torch.arange(REACH, self.tokens.shape[1], device=device)
        self.slot, self.last = torch.arange(SLOTS - 1, device=device), torch.arange(-REACH, 0, device=device)

    def reset(self) -> None:
        self.lengths.fill_(SLOTS)


def ours(s: Setup) -> None:
    pd.lookup_draft_(s.draft, s.lengths, s.tokens, s.ends, start=s.start)


def searched(
    tokens: Tensor, start: int, stops: Tensor, after: Tensor, slot: Tensor, last_slots: Tensor
) -> tuple[Tensor, Tensor]:
    """Guesses after the texts ``tokens[:, start:stops]``, and how many count. `REACH` - 1 tokens of -1 begin each row."""
    source = stops[:, None] + last_slots
    last = tokens.gather(1, source).masked_fill(source < start, -2)
    matched = torch.zeros_like(tokens[:, : len(after)], dtype=torch.int32)
    for token in range(REACH):  # oldest first, so that the run left over ends at the last token
        matched = (matched + 1) * (tokens[:, token : token + len(after)] == last[:, token : token + 1])
    matched = matched * ((tokens[:, REACH:] != -1) & (after < stops[:, None]))
    size = tokens.shape[1]
    best = (matched * size + after).amax(1, keepdim=True)
    length, place = best // size, best % size
    followed = tokens.gather(1, place + slot % (stops[:, None] - place).clamp(min=1))
    there = (followed != -1).long().cumprod(1).sum(1)
    grown = torch.where(length < REACH, GROWTH * length, len(slot)) * (length >= LEAST)
    return followed, torch.minimum(there, grown[:, 0])


def torch_ops(s: Setup) -> None:
    s.tokens.scatter_(1, s.ends[:, None], s.draft[:, :1])
    guesses, found = searched(s.tokens, s.start, s.ends + 1, s.after, s.slot, s.last)
    s.draft[:, 1:] = guesses * (s.slot < found[:, None])
    s.lengths.copy_(torch.minimum(1 + found, s.lengths))


CANDIDATES: dict[str, Callable[[Setup], None]] = {"pdkernels": ours, "torch ops": torch_ops}


@by_device("batch, width", {"cpu": SIZES, "cuda": SIZES, "dry": SIZES[:1]})
@pytest.mark.parametrize("name", CANDIDATES)
def test_lookup_draft(benchmark, name: str, batch: int, width: int, device: str) -> None:
    benchmark.group = f"lookup_draft_ batch {batch}, {width} tokens, {device}"
    setup, expected = Setup(batch, width, device), Setup(batch, width, "cpu")
    CANDIDATES[name](setup)
    reference = {"start": expected.start, "backend": "reference"}
    pd.lookup_draft_(expected.draft, expected.lengths, expected.tokens, expected.ends, **reference)
    written = ("draft", "lengths", "tokens")
    assert all(torch.equal(getattr(setup, name).cpu(), getattr(expected, name)) for name in written)
    compare(
        benchmark,
        lambda: CANDIDATES[name](setup),
        baseline=lambda: torch_ops(setup),
        baseline_name="torch ops",
        reset=setup.reset,
        device=device,
        rounds=500,
        op="lookup_draft_",
        candidate=name,
        batch=batch,
        width=width,
    )
