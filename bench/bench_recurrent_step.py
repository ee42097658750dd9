"""A whole step of the recurrent-depth sampler, and how much of it is not matrix products and attention.

A fifth of Huginn-0125's width and all its layers (2, 4, 2; heads of 96), a prefix of 512 tokens, a wave that does not move. "torch ops"
is the same step with the plain form of everything between the products; both keep the cache in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from statistics import median
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.profiler import profile

from bench.timing import compare
from pdkernels.decoding import _recurrent_wave
from pdkernels.decoding._recurrent import Sampling, prefill
from pdkernels.decoding._recurrent_wave import Wave, WaveOptions
from pdkernels.decoding._session import Session
from pdkernels.models import sandwich
from pdkernels.models.recurrent_depth import RecurrentDepth, RecurrentDepthConfig

PREFIX = 512
INNER = 4
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "speculative_attention", "_scaled_dot_product_flash_attention_for_cpu")


@lru_cache(maxsize=1)
def model(dtype: torch.dtype, device: str) -> RecurrentDepth:
    torch.manual_seed(0)
    config = RecurrentDepthConfig(vocab_size=4096, hidden_size=1056, heads=11, head_dim=96, intermediate_size=3584)
    return RecurrentDepth(config).to(device, dtype).requires_grad_(False)


@contextmanager
def plain() -> Iterator[None]:
    """Everything between the products in torch ops."""
    with patch.object(sandwich, "fused", lambda x: False), patch.object(_recurrent_wave, "backend_of", lambda dtype: "reference"):
        yield


class Setup:
    """A wave of so many rows behind a prefix; nothing settles, and it cannot grow."""

    def __init__(self, rows: int, dtype: torch.dtype, device: str) -> None:
        prompt = torch.randint(4096, (PREFIX,), generator=torch.Generator().manual_seed(0)).tolist()
        session = Session(model(dtype, device), [prompt], 4096, (), None, False)
        sampling = Sampling(0.0, None, None, 0)
        options = WaveOptions(
            inner_recurrence=INNER, threshold=0.0, compared=1, noise=0.1, schedule="constant", horizon=32, mixer="linear", momentum=0.1,
            headway=rows, max_wavefront=rows, rule="prefix", new_state="fresh", guard=True, max_recurrences=0, stability=0,
        )  # fmt: skip
        with torch.inference_mode():
            session.recurrences = 0
            self.wave = Wave(session, prefill(session, 1, sampling, None), options, sampling)
            self.rows = rows
            self.wave.step(1, whole=True)

    def step(self) -> torch.Tensor:
        with torch.inference_mode():
            return self.wave.step(self.rows, whole=True)[0]


def share_between_products(call: Any) -> float:
    """Of the time of a call, the median of three."""
    shares = []
    for _ in range(3):
        with profile() as seen:
            call()
        times = {event.key: event.self_cpu_time_total for event in seen.key_averages() if not event.key.startswith("profiler")}
        products = sum(time for name, time in times.items() if name.rpartition("::")[2] in PRODUCTS)
        shares.append(1 - products / sum(times.values()))
    return median(shares)


@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("name", ["pdkernels", "torch ops"])
def test_recurrent_step(benchmark, name: str, rows: int, device: str) -> None:
    if device != "cpu":
        pytest.skip("the share is read from the CPU's profile")
    benchmark.group = f"recurrent step, {rows} rows, {device}"
    ours, theirs = Setup(rows, torch.float32, device), Setup(rows, torch.float32, device)

    def torch_ops() -> torch.Tensor:
        with plain():
            return theirs.step()

    for _ in range(2):
        assert torch.equal(ours.step(), torch_ops())
    call = ours.step if name == "pdkernels" else torch_ops
    call()
    share = share_between_products(call)
    compare(
        benchmark, call, baseline=torch_ops, baseline_name="torch ops", device=device, rounds=15, warmup=2, op="recurrent_step",
        contender=name, rows=rows, dtype="fp32", between_products=round(share, 4),
    )  # fmt: skip
