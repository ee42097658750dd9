"""Whole generations with a host in every step, with a host that replays a captured step, and without a host.

Small models show the cost of the host. A model with 8 billion random weights shows how much of it remains when a step takes milliseconds.
Tokens are compared first. Where the logits of random weights in half precision tie within rounding, the narrower steps of the host may
choose differently; then only the two candidates that run the captured step are compared.

On a machine without a GPU, or without cuda-python, only the first candidate runs, on the small models.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

import pdkernels as pd
from bench.gpu_clock import gpu_clock
from bench.timing import compare
from bench.verified_tokens import LLAMA_8B
from pdkernels.integrations.device_loop import DeviceLoop, available
from pdkernels.models.architectures.transformer import Transformer, TransformerConfig

LIMIT = 64
CASES = [
    ("tiny-code", "autoregressive", {}),
    ("tiny-code", "jacobi", {"block_size": 8}),
    ("tiny-trimode", "linear_self_speculation", {"block_size": 16}),
    ("tiny-trimode", "block_diffusion", {"block_size": 16}),
    ("tiny-recurrent", "recurrent_diffusion", {"max_wavefront": 16}),
    ("tiny-masked", "llada", {"block_size": 16}),
    ("tiny-masked", "fast_dllm", {"block_size": 16}),
    ("8B", "autoregressive", {}),
    ("8B", "jacobi", {"block_size": 16}),
    ("8B", "linear_self_speculation", {"block_size": 32}),
]
CANDIDATES = ["host in every step", "replayed by a host", "no host"]


@cache
def model(name: str, device: str) -> Any:
    if name != "8B":
        return pd.models.load(name).to(device)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return Transformer(TransformerConfig(**LLAMA_8B), mask_token=0).requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


def prompt_of(name: str) -> Any:
    return list(range(1, 129)) if name == "8B" else "class Node:"


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1]}", scope="module")
def setup(request: pytest.FixtureRequest) -> tuple[str, str, dict[str, Any], DeviceLoop | None]:
    """One loop for all candidates of a case: its graph takes seconds to make."""
    name, method, options = request.param
    if not available():
        if name == "8B":
            pytest.skip("needs a GPU and cuda-python")
        return name, method, options, None
    return (
        name,
        method,
        options,
        DeviceLoop(model(name, "cuda"), method, longest_prompt=128, max_new_tokens=LIMIT, end_tokens=(), **options),
    )


@pytest.mark.benchmark(timer=gpu_clock if available() else time.perf_counter)
@pytest.mark.parametrize("candidate", CANDIDATES)
def test_device_loop(benchmark, setup: tuple[str, str, dict[str, Any], DeviceLoop | None], candidate: str) -> None:
    name, method, options, loop = setup
    device = "cpu" if loop is None else "cuda"
    benchmark.group = f"device loop, {name}, {method}, {device}"
    prompt, where = prompt_of(name), model(name, device)
    calls: dict[str, Callable[[], pd.decoding.DecodeResult]] = {
        "host in every step": lambda: pd.decoding.generate(
            where, prompt, method, max_new_tokens=LIMIT, end_tokens=(), **options
        )
    }
    if loop is not None:
        calls["replayed by a host"] = lambda: loop.generate(prompt, on_tokens=lambda *news: None)
        calls["no host"] = lambda: loop.generate(prompt)
    if candidate not in calls:
        pytest.skip("needs a GPU and cuda-python")
    results = {each: calls[each]() for each in calls}
    comparable = CANDIDATES[1:] if name == "8B" else CANDIDATES
    tokens = [result.tokens.tolist() for each, result in results.items() if each in comparable]
    assert all(ids == tokens[0] for ids in tokens)
    forwards = results[candidate].stats.forwards
    compare(
        benchmark,
        calls[candidate],
        baseline=calls["host in every step"],
        baseline_name="host in every step",
        device=device,
        rounds=5,
        warmup=1,
        graph=False,
        op="device loop",
        candidate=candidate,
        model=name,
        method=method,
        forwards=forwards,
        tokens=LIMIT,
    )
