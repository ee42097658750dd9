"""Committing guesses for masked tokens: ours, the published loops, the same rules in torch ops, and torch.compile of those."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from bench.devices import by_device
from bench.timing import compare

MASK, THRESHOLD = 126336, 0.9
MANY = [(1, 32), (1, 256), (1, 1024), (8, 32), (8, 256), (8, 1024)]
SIZES = {"cpu": MANY, "cuda": MANY, "dry": [(2, 32)]}


class Setup:
    """A block with three quarters masked. One guess in eight passes the threshold, and the quota is as many."""

    def __init__(self, batch: int, width: int, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.start = torch.randint(0, 50000, (batch, width), generator=generator)
        self.start[torch.rand(batch, width, generator=generator) < 0.75] = MASK
        self.ids = torch.randint(0, 50000, (batch, width), generator=generator).to(device)
        self.confidence = (torch.rand(batch, width, generator=generator) * 0.8 + 0.2).to(device)
        self.start = self.start.to(device)
        self.tokens = self.start.clone()
        self.quota = torch.full((batch,), width // 8, device=device)

    def reset(self) -> None:
        self.tokens.copy_(self.start)


def ours(s: Setup, rule: str) -> Tensor:
    options = {"quota": s.quota} if rule == "quota" else {"threshold": THRESHOLD}
    return pd.unmask_(s.tokens, s.ids, s.confidence, mask_token=MASK, **options).remaining


def published(s: Setup, rule: str) -> None:
    """A loop over sequences with a sync each; with a threshold, a comparison and a sync for each masked token."""
    masked = s.tokens == MASK
    confidence, guesses = torch.where(masked, s.confidence, -torch.inf), torch.where(masked, s.ids, s.tokens)
    chosen = torch.zeros_like(masked)
    for b in range(len(masked)):
        count = s.quota[b] if rule == "quota" else masked[b].sum()
        best = confidence[b].topk(k=int(count.item())).indices
        chosen[b, best] = True
        for position in best[1:] if rule == "threshold" else ():
            if confidence[b, position] < THRESHOLD:
                chosen[b, position] = False
    s.tokens[chosen] = guesses[chosen]


def whole_tensors(tokens: Tensor, ids: Tensor, confidence: Tensor, quota: Tensor, rule: str) -> Tensor:
    """No loop and no sync: the rank of every guess by a sort."""
    masked = tokens == MASK
    scores = torch.where(masked, confidence, -torch.inf)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(tokens.shape[1], device=tokens.device).expand_as(order)
    )
    count = quota if rule == "quota" else (scores >= THRESHOLD).sum(-1).clamp(min=1)
    tokens.copy_(torch.where(masked & (rank < count[:, None]), ids, tokens))
    return (tokens == MASK).sum(-1)


def candidate(name: str, s: Setup, rule: str) -> Callable[[], object]:
    tensors = (s.tokens, s.ids, s.confidence, s.quota, rule)
    if name == "torch.compile":
        torch._dynamo.reset()
        return partial(torch.compile(whole_tensors, dynamic=False), *tensors)
    loops = {"pdkernels": partial(ours, s, rule), "published loop": partial(published, s, rule)}
    return loops.get(name) or partial(whole_tensors, *tensors)


@by_device("batch, width", SIZES)
@pytest.mark.parametrize("rule", ["quota", "threshold"])
@pytest.mark.parametrize("name", ["pdkernels", "published loop", "torch ops", "torch.compile"])
def test_unmask(benchmark, name: str, rule: str, batch: int, width: int, device: str) -> None:
    benchmark.group = f"unmask_ by {rule}, batch {batch}, {width} candidates, {device}"
    setup = Setup(batch, width, device)
    call = candidate(name, setup, rule)
    call()
    wanted = setup.start.cpu()
    options = {"quota": setup.quota.cpu()} if rule == "quota" else {"threshold": THRESHOLD}
    pd.unmask_(wanted, setup.ids.cpu(), setup.confidence.cpu(), mask_token=MASK, backend="reference", **options)
    assert torch.equal(setup.tokens.cpu(), wanted)
    compare(
        benchmark,
        call,
        baseline=candidate("torch ops", setup, rule),
        baseline_name="torch ops",
        reset=setup.reset,
        device=device,
        rounds=20 if name == "published loop" and rule == "threshold" else 200,
        graph=name != "published loop",
        op="unmask_",
        candidate=name,
        rule=rule,
        batch=batch,
        width=width,
    )
