"""Every method and model on a GPU, a pretended one where there is none: the tokens are those of the CPU.

In float32 the order of sums differs between devices by some 1e-6; the tiny models' choices are further apart than that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import pdkernels as pd
from tests.harness.pretended_gpu import Pretended, pretended_gpu, without_gpu
from tests.support.drafters import with_drafters
from tests.support.plans import example

PROMPTS = ["482 + 967 = ?", "7 + 12 = ?"]
MASKED = "tiny-masked"

CASES: list[tuple[str, dict[str, Any]]] = [(method, {}) for method in pd.decoding.available()]
CASES += [
    ("autoregressive", {"page_size": 16}),
    ("jacobi", {"window": 6}),
    ("jacobi", {"block_size": 8, "page_size": 16}),
    ("jacobi", {"draft": "lookup"}),
    ("jacobi", {"temperature": 0.8}),
    ("jacobi_multiblock", {"page_size": 16}),
    ("jacobi_multiblock", {"temperature": 0.8}),
    ("linear_self_speculation", {"temperature": 0.8}),
    ("linear_self_speculation", {"page_size": 16, "trace": True}),
    ("quadratic_self_speculation", {"page_size": 16}),
    ("block_diffusion", {"temperature": 0.8, "page_size": 16}),
    ("recurrent_diffusion", {"rule": "last", "noise": 0.1}),
    ("llada", {"block_size": 16, "steps": 16}),
    ("llada", {"temperature": 0.8}),
    ("dream", {"temperature": 0.8}),
    *[("fast_dllm", {"block_size": 16, "cache": cache, "threshold": 0.9}) for cache in ("none", "prefix", "dual")],
    ("slowfast", {"prompt_interval": 100, "gen_interval": 2, "transfer_ratio": 0.25}),
]


@pytest.fixture
def gpu() -> Iterator[None]:
    with nullcontext() if torch.cuda.is_available() else pretended_gpu():
        yield


def label(value: str | dict[str, Any]) -> str:
    return value if isinstance(value, str) else "-".join(value) or "plain"


def request(method: pd.decoding.Method) -> tuple[list[str], int]:
    """Prompts that suit the method's model, and the number of tokens to generate."""
    if method.example == "tiny-planned":
        return ["1x;1w;\n", "2r;5m;1u;\n"], 80
    return PROMPTS, {MASKED: 16, "tiny-recurrent": 5}.get(method.example, 8)


def generate(device: str, method: pd.decoding.Method, options: dict[str, Any]) -> pd.decoding.DecodeResult:
    prompts, limit = request(method)
    model = example(method).to(device)
    if "drafter" in method.requires:
        with_drafters(model)
    return pd.decoding.generate(model, prompts, method, max_new_tokens=limit, end_tokens=(), **options)


@pytest.mark.covering(of=["method"], share=3)
@pytest.mark.parametrize(
    ("method", "options"), [*CASES, pytest.param("planned", {"steps_ratio": 0.5}, marks=pytest.mark.slow)], ids=label
)
def test_same_tokens_on_a_gpu(method: str, options: dict[str, Any], gpu: None) -> None:
    here, there = (generate(device, pd.decoding.find(method), options) for device in ("cpu", "cuda"))
    for a, b in zip(here.tokens, there.tokens, strict=True):
        assert a.device == torch.device("cpu") == b.device and not isinstance(b, Pretended)
        assert torch.equal(a, b)
    assert here.stats.forwards == there.stats.forwards and here.text == there.text


@without_gpu
def test_the_pretended_gpu_holds_devices_apart() -> None:
    with pretended_gpu():
        x, y = torch.ones(3, device="cuda"), torch.ones(3)
        assert x.is_cuda and x[1:].device == torch.device("cuda:0") and not x.cpu().is_cuda
        assert (x + torch.tensor(2.0)).tolist() == [3, 3, 3] and (x + y.to("cuda")).sum().item() == 6
        x[y > 0] = 5
        assert x.tolist() == [5, 5, 5]
        for wrong in (
            lambda: x + y,
            lambda: y[x > 0],
            lambda: torch.cat([x, y]),
            lambda: pd.kv_trim_(x.long(), y.long()),
        ):
            with pytest.raises((RuntimeError, ValueError)):
                wrong()
