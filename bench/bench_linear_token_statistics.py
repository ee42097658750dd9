"""Statistics of a head's logits: ours, and PyTorch's product followed by statistics.

A head of 1024 by 32768, 1, 32 and 256 rows, greedy: argmax, its probability, the five most probable tokens, margin, entropy and
log-sum-exp. On a GPU the sizes are LLaDA's, 4096 by 126464. `torch.compile` sees product and statistics together; it runs next to
every round as the baseline. Each candidate is compared with float64, or with ours, before it is timed.
"""

from __future__ import annotations

from functools import lru_cache, partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

import pdkernels as pd
from bench.devices import by_device, sizes
from bench.timing import compare
from tests.ops import linear_token_cases as cases

SIZES = {"cpu": (1024, 32768), "cuda": (4096, 126464), "dry": (64, 1000)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROWS = {"cpu": (1, 32, 256), "cuda": (1, 32, 256, 1024), "dry": (32,)}
CANDIDATES = (
    "pdkernels",
    "F.linear + pd.token_statistics",
    "F.linear + torch eager",
    "F.linear + torch, torch.compile",
)


def plain(hidden: Tensor, weight: Tensor) -> pd.TokenStatistics:
    """What a sampler writes in PyTorch."""
    logits = linear(hidden, weight).float()
    log_distribution = logits.log_softmax(-1)
    distribution = log_distribution.exp()
    top = distribution.topk(5, -1)
    ids = logits.argmax(-1)
    entropy = -(distribution * log_distribution).sum(-1)
    probs = distribution.gather(-1, ids[:, None])[:, 0]
    margin = top.values[:, 0] - top.values[:, 1]
    return pd.TokenStatistics(ids, probs, top.indices, top.values, margin, entropy, logits.logsumexp(-1))


@lru_cache(maxsize=2)
def head(dtype: str, device: str) -> Tensor:
    depth, width = sizes(device, SIZES)
    return cases.inputs(1, width, depth, DTYPES[dtype])[1].to(device)


def inputs(rows: int, dtype: str, device: str) -> tuple[Tensor, Tensor]:
    depth, _ = sizes(device, SIZES)
    return cases.inputs(rows, 1, depth, DTYPES[dtype])[0].to(device), head(dtype, device)


@by_device("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CANDIDATES)
def test_linear_token_statistics(benchmark, name: str, dtype: str, rows: int, device: str) -> None:
    benchmark.group = f"linear_token_statistics, {dtype}, {rows} rows, {device}"
    hidden, weight = inputs(rows, dtype, device)
    torch._dynamo.reset()
    compiled = partial(torch.compile(plain, dynamic=False), hidden, weight)
    calls = {
        "pdkernels": partial(pd.linear_token_statistics, hidden, weight),
        "F.linear + pd.token_statistics": lambda: pd.token_statistics(linear(hidden, weight)),
        "F.linear + torch eager": partial(plain, hidden, weight),
        "F.linear + torch, torch.compile": compiled,
    }
    with torch.inference_mode():
        found = calls[name]()
        if rows == 32 and name == "pdkernels":
            cases.check(pd.TokenStatistics(*(t.cpu() for t in found)), hidden.cpu(), weight.cpu())
        tolerance = 1e-5 if dtype == "fp32" else 3e-2
        for actual, wanted in zip(found, calls["pdkernels"]()):
            if actual.dtype.is_floating_point:
                torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=tolerance)
        compare(
            benchmark,
            calls[name],
            baseline=compiled,
            baseline_name="torch.compile",
            device=device,
            rounds=max(10, 100 // rows),
            warmup=3,
            bytes_moved=(hidden.numel() + weight.numel()) * weight.itemsize // 2,
            flops=2 * rows * weight.numel(),
            op="linear_token_statistics",
            candidate=name,
            dtype=dtype,
            rows=rows,
        )
