"""Vocabulary statistics over the 126464 tokens of LLaDA: ours, the float64 paths of the published samplers, eager PyTorch, torch.compile."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from bench.devices import by_device
from bench.timing import compare

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


CANDIDATES = ("pdkernels", "torch.compile, no margin", "torch.compile", "torch eager", "float64", "float64, no margin")
SAMPLERS = ("pdkernels", "float64 Gumbel")


def logits_of(rows: int, dtype: str, device: str) -> Tensor:
    return (
        (3 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(rows))).to(DTYPES[dtype]).to(device)
    )


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
