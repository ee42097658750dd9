"""Vocabulary statistics over the 126464 tokens of LLaDA: ours, the float64 paths of the published samplers, eager PyTorch, torch.compile.

python -m bench.bench_token_statistics      the cost of filters in CPU time of one thread, as a table for docs/ops/token_statistics.md
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from bench.bench_filter_logits import filters_of
from bench.devices import by_device
from bench.records import write
from bench.timing import compare
from pdkernels.evaluation.machine import processor

VOCABULARY = 126_464
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROWS = {"cpu": (1, 32, 256), "cuda": (1, 32, 64, 256, 1024), "dry": (3,)}


def eager(logits: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Token, probability, entropy and margin."""
    distribution = logits.to(dtype).softmax(-1)
    probs, ids = distribution.max(-1)
    top = distribution.topk(2).values
    return ids, probs, -(distribution * (distribution + 1e-10).log()).sum(-1), top[:, 0] - top[:, 1]


def without_margin(logits: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """As fast as PyTorch's ops get: one logarithm per row, and the distribution is not stored."""
    x = logits.to(dtype)
    largest, ids = x.max(-1)
    below = x - largest[:, None]
    e = below.exp()
    total = e.sum(-1)
    return ids, 1 / total, total.log() - (below * e).sum(-1) / total


def float64(logits: Tensor) -> tuple[Tensor, ...]:
    """Token and confidence as Fast-dLLM computes them."""
    ids = logits.argmax(-1)
    return ids, logits.double().softmax(-1).gather(-1, ids[:, None])[:, 0]


def float64_gumbel(logits: Tensor) -> tuple[Tensor, ...]:
    """A draw and its confidence as LLaDA computes them."""
    noise = -torch.rand_like(logits, dtype=torch.float64).log()
    ids = (logits.double().exp() / noise).argmax(-1)
    return ids, logits.float().softmax(-1).gather(-1, ids[:, None])[:, 0]


def ours(logits: Tensor, temperature: float = 0.0) -> tuple[Tensor, ...]:
    found = pd.token_statistics(logits, temperature=temperature)
    return found.ids, found.probs, found.entropy, found.margin


def by_sorting(logits: Tensor, top_p: float = 0.95) -> Tensor:
    """A draw from what top-p keeps, as samplers write it."""
    probs, order = logits.float().softmax(-1).sort(-1, descending=True)
    probs[probs.cumsum(-1) - probs >= top_p] = 0
    drawn = (probs / -torch.rand_like(probs).log()).argmax(-1, keepdim=True)
    return order.gather(-1, drawn)[:, 0]


CANDIDATES = ("pdkernels", "torch.compile, no margin", "torch.compile", "torch eager", "float64", "float64, no margin")
SAMPLERS = ("pdkernels", "float64 Gumbel")


def logits_of(rows: int, dtype: str, device: str, vocabulary: int = VOCABULARY) -> Tensor:
    logits = 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(rows))
    return logits.to(DTYPES[dtype]).to(device)


@by_device("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CANDIDATES)
def test_token_statistics(benchmark, name: str, dtype: str, rows: int, device: str) -> None:
    benchmark.group = f"token_statistics, {dtype}, {rows} rows, {device}"
    logits = logits_of(rows, dtype, device)
    torch._dynamo.reset()
    compiled = partial(torch.compile(without_margin, dynamic=False), logits)
    call = {
        "pdkernels": partial(ours, logits),
        "torch.compile, no margin": compiled,
        "torch.compile": partial(torch.compile(eager, dynamic=False), logits),
        "torch eager": partial(eager, logits),
        "float64": partial(float64, logits),
        "float64, no margin": partial(without_margin, logits, torch.float64),
    }[name]
    with torch.inference_mode():
        exact = [torch.cat(parts) for parts in zip(*(eager(part, torch.float64) for part in logits.split(32)))]
        # All but the ids: among equal logits peers may take any.
        for found, expected in zip(call()[1:], exact[1:]):
            torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-5)
        compare(
            benchmark,
            call,
            baseline=compiled,
            baseline_name="torch.compile, no margin",
            device=device,
            rounds=max(10, 200 // rows),
            warmup=3,
            bytes_moved=rows * VOCABULARY * DTYPES[dtype].itemsize,
            op="token_statistics",
            candidate=name,
            dtype=dtype,
            rows=rows,
        )


@by_device("rows", ROWS)
@pytest.mark.parametrize("name", ("pdkernels", "sort"))
def test_top_p(benchmark, name: str, rows: int, device: str) -> None:
    """Of rows as peaked as those of models: random ones that are 5 times as wide are."""
    benchmark.group = f"token_statistics with top-p, bf16, {rows} rows, {device}"
    logits = (5 * logits_of(rows, "fp32", device)).bfloat16()
    peer = partial(by_sorting, logits)
    call = partial(pd.token_statistics, logits, temperature=1.0, top_p=0.95) if name == "pdkernels" else peer
    with torch.inference_mode():
        ids = pd.token_statistics(logits, temperature=1.0, top_p=0.95).ids
        probs = logits.double().softmax(-1)
        chosen = probs.gather(-1, ids[:, None])
        assert (torch.where(probs > chosen, probs, 0).sum(-1) < 0.95 + 1e-6).all()
        compare(
            benchmark,
            call,
            baseline=peer,
            baseline_name="sort",
            device=device,
            rounds=max(5, 100 // rows),
            warmup=2,
            bytes_moved=rows * VOCABULARY * 2,
            op="token_statistics top-p",
            candidate=name,
            dtype="bf16",
            rows=rows,
        )


@by_device("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SAMPLERS)
def test_sampling(benchmark, name: str, dtype: str, rows: int, device: str) -> None:
    benchmark.group = f"token_statistics at temperature 1, {dtype}, {rows} rows, {device}"
    logits = logits_of(rows, dtype, device)
    peer = partial(float64_gumbel, logits)
    call = partial(ours, logits, 1.0) if name == "pdkernels" else peer
    with torch.inference_mode():
        ids, probs = call()[:2]
        torch.testing.assert_close(
            probs, logits.float().softmax(-1).gather(-1, ids[:, None])[:, 0], rtol=1e-4, atol=1e-7
        )
        compare(
            benchmark,
            call,
            baseline=peer,
            baseline_name="float64 Gumbel",
            device=device,
            rounds=max(5, 100 // rows),
            warmup=2,
            bytes_moved=rows * VOCABULARY * DTYPES[dtype].itemsize,
            op="token_statistics sampling",
            candidate=name,
            dtype=dtype,
            rows=rows,
        )


# ------------------------------------------------------------------------------------------------------------ filters

RESULT = Path(__file__).parent / "results/token_filters.json"
VOCABULARIES, FILTERED_ROWS, TEMPERATURE = (32_768, 151_936), (1, 16), 0.7
PLAIN, EVERYTHING = "temperature alone", "all of them"


def filtered(rows: int, vocabulary: int) -> dict[str, dict[str, Any]]:
    """Options of a draw by what they filter."""
    filters = filters_of(rows, vocabulary)
    cuts = {"keep_top_k": 50, "top_p": 0.95, "min_p": 0.02}
    return {
        PLAIN: {},
        "penalties": {"filters": filters._replace(bias=None, allowed=None, banned=None)},
        "allowed tokens": {"filters": pd.LogitFilters(allowed=filters.allowed)},
        "a bias": {"filters": pd.LogitFilters(bias=filters.bias)},
        "`keep_top_k`, `top_p`, `min_p`": cuts,
        "`top_p`": {"top_p": 0.95},
        "`min_p`": {"min_p": 0.02},
        "`typical_p`": {"typical_p": 0.9},
        "`keep_top_k`, `typical_p`": {"keep_top_k": 50, "typical_p": 0.9},
        EVERYTHING: {"filters": filters, **cuts, "typical_p": 0.9},
    }


def seconds(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


def measured(rounds: int = 60) -> dict[str, Any]:
    """The minimum CPU time of a draw with each of the filters, in µs; they take turns. Logits are bfloat16 with the spread of a model's."""
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {}
    with torch.inference_mode():
        for vocabulary in VOCABULARIES:
            for rows in FILTERED_ROWS:
                logits = logits_of(rows, "bf16", "cpu", vocabulary)
                calls = {
                    name: partial(pd.token_statistics, logits, temperature=TEMPERATURE, top_k=1, **options)
                    for name, options in filtered(rows, vocabulary).items()
                }
                times: dict[str, list[float]] = {name: [] for name in calls}
                for _ in range(rounds):
                    for name, call in calls.items():
                        times[name].append(seconds(call))
                for name in calls:
                    found.setdefault(name, []).append(round(1e6 * min(times[name]), 1))
    cases = [[vocabulary, rows] for vocabulary in VOCABULARIES for rows in FILTERED_ROWS]
    return {"rounds": rounds, "processor": processor(), "cases": cases, "us": found}


def markdown(found: dict[str, Any]) -> str:
    """The table of docs/ops/token_statistics.md."""
    titles = (f"{vocabulary}, {rows} row{'s' * (rows > 1)}" for vocabulary, rows in found["cases"])
    lines = [
        f"| µs (times a draw without filters) | {' | '.join(titles)} |",
        "| --- |" + " ---: |" * len(found["cases"]),
    ]
    for name, row in found["us"].items():
        cells = (f"{us:,.0f} ({us / plain:.2f}x)" for us, plain in zip(row, found["us"][PLAIN]))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    place = f"CPU time, minimum of {found['rounds']} rounds; {found['processor']}, 1 thread"
    return "\n".join([*lines, "", f"Draws at temperature {TEMPERATURE} from bfloat16 logits, {place}"])


if __name__ == "__main__":
    result = measured()
    write(RESULT, result)
    print(markdown(result))
