"""Attention of a denoising step of planned diffusion: four chunks of 64 tokens, 66 with tags, after a cached prefix of 1024.

32 query heads and 8 KV heads of 128. Dense chunks attend to each other, sparse chunks do not. Candidates, checks and baseline are those of
bench_speculative_attention.py. The table has the first call of compiled candidates, because every plan has chunks of other lengths.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
import torch._inductor.config as inductor_config

import pdkernels as pd
from bench.bench_speculative_attention import (
    CANDIDATES,
    DTYPES,
    FITTED,
    GROUP,
    HEAD_DIM,
    Q_HEADS,
    TILE,
    Attention,
    Step,
    dense_mask,
    flex,
    left_out,
    sdpa_packed,
    step_of,
    two_threads,
)
from bench.devices import DRY_RUN, by_device
from bench.timing import compare
from pdkernels.reference.speculative_attention import speculative_attention as reference
from tests.harness.error_budget import assert_within_budget

__all__ = ["two_threads"]  # a fixture

CHUNKS, PREFIX = (66, 66, 66, 66), {"cpu": 1024, "cuda": 1024, "dry": 50}
KINDS = {"dense": False, "sparse": True}
CASES = {device: [(kind, dtype) for kind in KINDS for dtype in ("fp32", "bf16")] for device in ("cpu", "cuda")} | {
    "dry": [("sparse", "bf16")]
}


def flex_that_fits(step: Step) -> Attention:
    return flex(step, (step.new, 128))


PLANNED = {name: make for name, make in CANDIDATES.items() if name != FITTED} | {
    "FlexAttention, compiled, blocks that fit": flex_that_fits
}


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    """A first call compiles, whatever earlier runs left on the disk."""
    with inductor_config.patch(force_disable_caches=True):
        yield


@by_device("kind, dtype", CASES)
@pytest.mark.parametrize("name", PLANNED)
def test_planned_round(benchmark, kind: str, dtype: str, name: str, device: str) -> None:
    if reason := left_out(FITTED if name.endswith("that fit") else name, device):
        pytest.skip(reason)
    benchmark.group = f"planned round, {kind}, {dtype}, {device}"
    torch._dynamo.reset()
    prefix = PREFIX["dry" if DRY_RUN else device]
    mask = pd.masks.planned([pd.masks.Stage(0, CHUNKS, False)], KINDS[kind])
    step = step_of(mask, prefix, DTYPES[dtype], device)
    baseline = sdpa_packed(step)
    run = lambda dtype: reference(*(x.to(dtype) for x in step[:5]), step.lengths, mask.dense().to(device))[0]  # noqa: E731
    exact = run(torch.float64)
    candidate = PLANNED[name](step)
    started = time.perf_counter()
    found = candidate()
    first_call_ms = (time.perf_counter() - started) * 1e3
    if name == "pdkernels":
        assert_within_budget(found, exact, run(DTYPES[dtype]), name=name)
    else:
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=4 * torch.finfo(DTYPES[dtype]).eps)
    seen = int(dense_mask(step).sum())
    compare(
        benchmark,
        candidate,
        baseline=baseline,
        baseline_name="SDPA, dense mask, heads packed",
        device=device,
        rounds=25,
        warmup=2,
        op="planned round",
        candidate=name,
        kind=kind,
        dtype=dtype,
        group=GROUP,
        first_call_ms=round(first_call_ms, 1),
        flops=4 * HEAD_DIM * Q_HEADS * seen,
        tile=TILE,
    )
