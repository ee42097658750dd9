"""How far the law of the next token moved, over the 65536 tokens of Huginn-0125: ours, eager PyTorch, and torch.compile."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from bench.devices import by_device
from bench.timing import compare
from pdkernels.reference.logit_drift import logit_drift as reference
from tests.harness.error_budget import assert_within_budget

VOCABULARY = 65536
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROWS = {"cpu": (1, 16, 64, 128), "cuda": (1, 16, 128, 512), "dry": (3,)}


def formulas(logits: Tensor, previous: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Every criterion of the published sampler, each law computed once."""
    now, then = logits.float().log_softmax(-1), previous.float().log_softmax(-1)
    p_now, p_then = now.exp(), then.exp()
    entropy = -(p_now * (p_now + 1e-10).log()).sum(-1)
    kl = (p_then * (then - now)).sum(-1)

    def levelled(p: Tensor) -> Tensor:
        kept = torch.where(p < 0.1 * p.amax(-1, keepdim=True), 1 / VOCABULARY, p)
        return kept / kept.sum(-1, keepdim=True)

    q_now, q_then = levelled(p_now), levelled(p_then)
    return logits.argmax(-1), entropy, kl, (q_then * (q_then.log() - q_now.log())).sum(-1)


CONTENDERS = ("pdkernels", "torch eager", "torch.compile")


@by_device("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONTENDERS)
def test_logit_drift(benchmark, name: str, dtype: str, rows: int, device: str) -> None:
    benchmark.group = f"logit_drift, {dtype}, {rows} rows, {device}"
    generator = torch.Generator().manual_seed(rows)
    logits, change = (torch.randn(rows, VOCABULARY, generator=generator) for _ in range(2))
    previous = (3 * logits + 0.3 * change).to(DTYPES[dtype]).to(device)
    logits = (3 * logits).to(DTYPES[dtype]).to(device)
    torch._dynamo.reset()
    compiled = partial(torch.compile(formulas, dynamic=False), logits, previous)
    ours = partial(pd.logit_drift, logits, previous)
    call = {"pdkernels": ours, "torch eager": partial(formulas, logits, previous), "torch.compile": compiled}[name]
    with torch.inference_mode():
        for found, oracle, plain in zip(call(), reference(logits.double(), previous.double()), reference(logits, previous)):
            if name == "torch.compile":  # its sums are up to thirty times as far off as the budget of a kernel of ours allows
                torch.testing.assert_close(found.double(), oracle.double(), rtol=1e-3, atol=1e-4)
            else:
                assert_within_budget(found, oracle, plain, name=name)
        compare(
            benchmark,
            call,
            baseline=compiled,
            baseline_name="torch.compile",
            device=device,
            rounds=max(10, 200 // rows),
            warmup=3,
            bytes_moved=rows * VOCABULARY * DTYPES[dtype].itemsize,
            op="logit_drift",
            contender=name,
            dtype=dtype,
            rows=rows,
        )
