"""The change of the next token's distribution, over the 65536 tokens of Huginn-0125: ours, eager PyTorch, and torch.compile."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from bench.devices import by_device
from bench.timing import compare
from pdkernels.reference.logit_divergence import logit_divergence as reference
from tests.harness.error_budget import assert_within_budget

VOCABULARY = 65536
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROWS = {"cpu": (1, 16, 64, 128), "cuda": (1, 16, 128, 512), "dry": (3,)}


def formulas(logits: Tensor, previous: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Every criterion of the published sampler, each distribution computed once, and no logarithm of a probability."""
    now, then = logits.float().log_softmax(-1), previous.float().log_softmax(-1)
    p_now, p_then = now.exp(), then.exp()
    entropy = -(p_now * now).sum(-1)
    kl = (p_then * (then - now)).sum(-1)

    def levelled(p: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dropped = p < 0.1 * p.amax(-1, keepdim=True)
        q = torch.where(dropped, 1 / VOCABULARY, p)
        return q, torch.where(dropped, -math.log(VOCABULARY), log_p), q.sum(-1)

    (_, log_now, all_now), (q_then, log_then, all_then) = levelled(p_now, now), levelled(p_then, then)
    minp_kl = (q_then * (log_then - log_now)).sum(-1) / all_then + (all_now / all_then).log()
    return logits.argmax(-1), entropy, kl, minp_kl


CANDIDATES = ("pdkernels", "torch eager", "torch.compile")


@by_device("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CANDIDATES)
def test_logit_divergence(benchmark, name: str, dtype: str, rows: int, device: str) -> None:
    benchmark.group = f"logit_divergence, {dtype}, {rows} rows, {device}"
    generator = torch.Generator().manual_seed(rows)
    logits, change = (torch.randn(rows, VOCABULARY, generator=generator) for _ in range(2))
    previous = (3 * logits + 0.3 * change).to(DTYPES[dtype]).to(device)
    logits = (3 * logits).to(DTYPES[dtype]).to(device)
    torch._dynamo.reset()
    compiled = partial(torch.compile(formulas, dynamic=False), logits, previous)
    ours = partial(pd.logit_divergence, logits, previous)
    call = {"pdkernels": ours, "torch eager": partial(formulas, logits, previous), "torch.compile": compiled}[name]
    with torch.inference_mode():
        for found, oracle, plain in zip(
            call(), reference(logits.double(), previous.double()), reference(logits, previous)
        ):
            if name == "pdkernels":
                assert_within_budget(found, oracle, plain, name=name)
            else:  # sums in fewer steps are up to thirty times as far off as the budget of a kernel of ours allows
                torch.testing.assert_close(found.double(), oracle.double(), rtol=1e-3, atol=1e-4)
        compare(
            benchmark,
            call,
            baseline=compiled,
            baseline_name="torch.compile",
            device=device,
            rounds=max(10, 200 // rows),
            warmup=3,
            bytes_moved=rows * VOCABULARY * DTYPES[dtype].itemsize,
            op="logit_divergence",
            candidate=name,
            dtype=dtype,
            rows=rows,
        )
