"""Jacobi decoding against greedy decoding on the tiny trained model: tokens per forward, tokens per second.

One thread: the model is so small that more threads cost more than they save. Every candidate's tokens are compared
with greedy decoding's before it is timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import pytest
import torch

import pdkernels as pd
from bench.timing import compare

PROMPTS = [
    "class Node:",
    "import os",
    "def test_",
    "    if self.",
    "for i in range(",
    "def read_csv(",
    "    return ",
    "try:\n",
]
LIMIT = 64

CANDIDATES: dict[str, dict[str, object]] = {
    "autoregressive": {"method": "autoregressive"},
    **{f"jacobi, blocks of {n}": {"method": "jacobi", "block_size": n} for n in (4, 8, 16, 32)},
    **{f"jacobi, window of {n}": {"method": "jacobi", "window": n} for n in (4, 8, 16)},
}


@lru_cache
def model() -> pd.models.Transformer:
    return pd.models.load("tiny-code")


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def generate(options: dict[str, object]) -> list[pd.decoding.DecodeResult]:
    return [pd.decoding.generate(model(), prompt, max_new_tokens=LIMIT, **options) for prompt in PROMPTS]


@pytest.mark.parametrize("name", CANDIDATES)
def test_decoding(benchmark, name: str, one_thread: None) -> None:
    benchmark.group = "decoding, tiny-code, batch 1"
    greedy, results = generate(CANDIDATES["autoregressive"]), generate(CANDIDATES[name])
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(greedy, results, strict=True))
    tokens = sum(result.stats.tokens for result in results)
    compare(
        benchmark,
        lambda: generate(CANDIDATES[name]),
        baseline=lambda: generate(CANDIDATES["autoregressive"]),
        baseline_name="autoregressive",
        rounds=5,
        warmup=1,
        op="decoding",
        candidate=name,
        tokens=tokens,
        tokens_per_forward=round(tokens / sum(result.stats.forwards for result in results), 3),
    )
