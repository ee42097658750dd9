"""Requests of one batch have temperatures and filters of their own, and the tokens that each has alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.decoding import find, generate
from pdkernels.generation.batch_sampler import BatchSampler
from pdkernels.generation.params import SamplingParams
from pdkernels.generation.sampler import Sampler
from tests.harness.sessions import open_session, running_batch
from tests.support.drafters import with_drafters

KINDS = [Sampler(0.0), Sampler(0.7), Sampler(1.3, top_k=4), Sampler(0.9, None, 0.8, 0.02), Sampler(1.0, typical_p=0.6)]
STARTS = ["class Node:", "import os\n", "def test_", "    return ", "a", "for i in range("]
CASES = [
    ("tiny-code", "autoregressive", {}),
    ("tiny-code", "jacobi", {"block_size": 4}),
    ("tiny-code", "jacobi", {"draft": "lookup"}),
    ("tiny-code", "draft_model", {"block_size": 3}),
    ("tiny-trimode", "linear_self_speculation", {"block_size": 5}),
    ("tiny-trimode", "linear_self_speculation", {"block_size": 5, "threshold": 0.7}),
    ("tiny-trimode", "quadratic_self_speculation", {"block_size": 3}),
    ("tiny-trimode", "block_diffusion", {"block_size": 4}),
]


class Head:
    """A model whose hidden rows are logits."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()


@pytest.mark.parametrize("seed", range(4))
def test_every_row_is_drawn_by_its_own_sampler(seed: int) -> None:
    torch.manual_seed(seed)
    chance, batch = random.Random(seed), 7
    logits, seeds = 3 * torch.randn(batch, 3, 200), torch.randint(2**60, (batch,))
    positions, step = torch.randint(1000, (batch, 3)), torch.randint(9, (batch, 1))
    rows = BatchSampler(batch)
    chosen: list[Any] = [chance.choice([*KINDS, None]) for _ in range(batch)]
    for row, sampler in enumerate(chosen):
        rows[row] = sampler
    for _ in range(2):
        drawn = rows.sample(logits, positions, seeds, 0, (5,))
        ids, probs = rows.guess(Head(), logits, positions, seeds, step, (5,))
        assert torch.equal(ids, rows.draw(Head(), logits, positions, seeds, step, (5,)))
        for row, sampler in enumerate(chosen):
            one = slice(row, row + 1)
            if sampler is not None:
                assert torch.equal(drawn[one], sampler.sample(logits[one], positions[one], seeds[one], 0, (5,)))
                alone = sampler.guess(Head(), logits[one], positions[one], seeds[one], step[one], (5,))
                assert torch.equal(ids[one], alone[0]) and torch.equal(probs[one], alone[1])
        chosen[2] = rows[2] = KINDS[seed]  # another request takes a row


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, (case[1], *case[2].values()))))
def test_requests_of_one_batch_with_other_settings(case: tuple[str, str, dict[str, Any]]) -> None:
    name, method, options = case
    known, model, chance = find(method), pd.models.load(name), random.Random(method)
    model, steps = with_drafters(model) if "drafter" in known.requires else model, known.steps
    assert steps is not None and steps.draws_by_row(options)
    sizes = [open_session(model, [[0] * 20] * rows, 12, ())[0] for rows in (3, 4)]
    batch = running_batch(steps, sizes[0], **options)
    other = running_batch(steps, sizes[1], batch.staging, **options)
    queue, running, moved = list(enumerate(STARTS)), {}, False
    while queue or batch.busy:
        while queue and batch.free and chance.random() < 0.7:
            number, start = queue.pop()
            sampler, row = KINDS[number % len(KINDS)], batch.free[0]
            session, _ = open_session(model, start, 12, ())
            batch.admit(row, session, number, sampler)
            settings = {key: getattr(sampler, key) for key in ("temperature", "top_k", "top_p", "min_p", "typical_p")}
            alone = generate(model, start, method, max_new_tokens=12, end_tokens=(), seed=number, **options, **settings)
            running[row] = session, alone
        for row in batch.step():
            batch.retire(row)
            session, alone = running.pop(row)
            assert session.tokens[0] == alone.tokens.tolist() and session.accepted == alone.stats.accepted
        if len(running) > 1 and not moved:
            other.take_over(batch)
            batch, running, moved = other, dict(enumerate(running[row] for row in sorted(running))), True
    assert moved


def test_settings_are_checked_and_only_taken_where_rows_are_drawn_apart() -> None:
    for options, words in (({"temperature": -1.0}, "temperature"), ({"top_p": 1.5}, "top_p"), ({"top_k": 0}, "top_k")):
        with pytest.raises(ValueError, match=f"SamplingParams: {words} must"):
            SamplingParams(**options)
    assert Sampler.of(SamplingParams(top_k=3)) == Sampler(0.0, 3)
    model = pd.models.load("tiny-trimode")
    options = {"verification": "rejection", "temperature": 0.5}
    batch = running_batch(
        find("linear_self_speculation").steps, open_session(model, [[0] * 4] * 2, 6, ())[0], **options
    )
    with pytest.raises(ValueError, match="draw all rows alike"):
        batch.admit(0, open_session(model, [1, 2], 6, ())[0], 1, Sampler(1.0))
