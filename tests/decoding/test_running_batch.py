"""Requests that join and leave a running batch, against each of them alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.cache import PagedKVCache
from pdkernels.decoding import find
from pdkernels.decoding._request import finished, open_session
from pdkernels.decoding._session import Session
from pdkernels.decoding.steps import RunningBatch
from tests.integrations.test_steps import CASES, STARTS, SUMS

MORE = [
    ("tiny-trimode", "quadratic_self_speculation", {"block_size": 3, "ensemble_weight": 0.5}),
    ("tiny-trimode", "block_diffusion", {"block_size": 1}),
    ("tiny-trimode", "block_diffusion", {"block_size": 3, "threshold": None, "steps_per_block": 2}),
    ("tiny-trimode", "linear_self_speculation", {"block_size": 1}),
    ("tiny-code", "jacobi", {"draft": "lookup", "window": 5, "temperature": 0.9}),
    ("tiny-recurrent", "recurrent_diffusion", {"kept_recurrences": 2, "headway": 3, "new_state": "copied"}),
    ("tiny-masked", "fast_dllm", {"block_size": 3, "cache": "dual"}),
]
ALL = [
    (name, method, {key: value for key, value in options.items() if key != "seed"})
    for name, method, options in CASES + MORE
]
IDS = [f"{method}-{'-'.join(map(str, options.values()))}-{name}" for name, method, options in ALL]


class Request:
    """One request, what `generate` gives for it alone, and what it has been told."""

    def __init__(
        self,
        model: Any,
        method: str,
        prompt: str,
        limit: int,
        ends: tuple[int, ...] | None,
        stops: Any,
        seed: int,
        options: dict[str, Any],
    ) -> None:
        self.seed, self.told, expected_told = seed, [], []
        self.session, _ = open_session(model, prompt, limit, ends, lambda *news: self.told.append(news), trace=True)
        self.session.stop_strings = stops
        self.expected = pd.decoding.generate(
            model, prompt, method, max_new_tokens=limit, end_tokens=ends, trace=True, stop_strings=stops, seed=seed,
            on_tokens=lambda *news: expected_told.append(news), **options,
        )  # fmt: skip
        self.expected_told = expected_told

    def compare(self, forwards: int) -> None:
        result, expected = finished(self.session, True, "running", lambda: forwards), self.expected
        assert result.tokens.tolist() == expected.tokens.tolist()
        for fact in ("accepted", "trace", "forwards", "tokens", "tokens_per_forward", "recurrences"):
            assert getattr(result.stats, fact) == getattr(expected.stats, fact), fact
        assert self.told == self.expected_told


def sizes(model: Any, batch: int, limit: int, ends: tuple[int, ...] | None, longest: int = 20) -> Session:
    return open_session(model, [[0] * longest] * batch, limit, ends)[0]


def tensors(batch: RunningBatch) -> list[torch.Tensor]:
    cache = batch.steps.cache
    table = [] if cache.block_table is None else [cache.block_table]
    return [*batch.steps.state, cache.lengths, cache.k, cache.v, *table]


def check_pages(batch: RunningBatch) -> None:
    """Pages have one owner each, and none is lost."""
    cache = batch.steps.cache
    if isinstance(cache, PagedKVCache):
        owned = cache.block_table[cache.block_table >= 0].tolist()
        assert len(set(owned)) == len(owned) == cache.num_pages - cache._pool.available


@pytest.mark.parametrize("case", ALL, ids=IDS)
def test_each_request_is_as_it_is_alone(case: tuple[str, str, dict[str, Any]]) -> None:
    name, method, options = case
    run_requests(name, method, options, chance=random.Random(IDS[ALL.index(case)]), count=6)


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=IDS)
def test_each_of_many_requests_is_as_it_is_alone(case: tuple[str, str, dict[str, Any]]) -> None:
    name, method, options = case
    for seed in range(6):
        run_requests(name, method, options, chance=random.Random(seed), count=12)


def run_requests(name: str, method: str, options: dict[str, Any], chance: random.Random, count: int) -> None:
    model, masked = pd.models.load(name), name == "tiny-masked"
    most, rows = (6 if masked else 14), chance.randint(2, 3)
    if "page_size" in find(method).options:
        options = options | {"page_size": chance.choice([None, 1, 3, 16])}
    starts = SUMS if masked else STARTS
    ends = chance.choice([None, (), (chance.randrange(5, 90),)])
    queue = []
    for _ in range(count):
        limit = most if masked else chance.choice([most, chance.randint(1, most)])
        stops = chance.choice([(), (), ("e", " = ")])
        queue.append(
            Request(model, method, chance.choice(starts), limit, ends, stops, chance.randrange(2**40), options)
        )

    batch = RunningBatch(find(method).steps, sizes(model, rows, most, ends), **options)
    pointers = [tensor.data_ptr() for tensor in tensors(batch)]
    running: dict[int, Request] = {}
    compared = 0
    while queue or batch.busy:
        for row in batch.free:
            if queue and batch.ready and chance.random() < 0.6:
                running[row] = queue.pop()
                batch.admit(row, running[row].session, running[row].seed)
                check_pages(batch)
        for row in batch.step():
            if chance.random() < 0.7:
                running.pop(row).compare(batch.retire(row))
                compared += 1
                check_pages(batch)
        if running and chance.random() < 0.05:  # a request that is withdrawn
            row = chance.choice(list(running))
            batch.retire(row)
            left = running.pop(row)
            assert left.expected.tokens.tolist()[: len(left.session.tokens[0])] == left.session.tokens[0]
    assert compared >= count // 3
    assert [tensor.data_ptr() for tensor in tensors(batch)] == pointers
