"""Products of a layer's experts: ours, and a loop of PyTorch's products over the experts that have rows.

python -m bench.bench_grouped_linear      CPU time of one thread, the minimum of many runs, as a table for docs/ops/grouped_linear.md
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pdkernels as pd
from bench.devices import by_device
from bench.records import write
from bench.timing import compare
from pdkernels.evaluation.machine import processor
from pdkernels.reference.grouped_linear import grouped_linear as reference
from tests.harness.error_budget import assert_within_budget

# (experts, experts of a token, outputs, width): the gates and up projections of a layer, and its down projections.
MODELS = {"Qwen3-30B-A3B": [(128, 8, 1536, 2048), (128, 8, 2048, 768)], "dry": [(4, 2, 48, 64), (4, 2, 64, 32)]}
SHAPES = {"cpu": ("Qwen3-30B-A3B",), "cuda": ("Qwen3-30B-A3B",), "dry": ("dry",)}
TOKENS = (1, 8, 64)
RESULT = Path(__file__).parent / "results/grouped_linear.json"
LOOP = "F.linear in a loop"
CANDIDATES = ("bf16", "q4_0", "q8_0", LOOP)


@cache
def numbers(model: str, device: str) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [
        (torch.randn(experts, outputs, width, generator=draw) / math.sqrt(width)).bfloat16().to(device)
        for experts, _, outputs, width in MODELS[model]
    ]


@cache
def packed(model: str, format: str, device: str) -> list[pd.QuantizedWeight]:
    return [pd.quantize(weight.cpu(), format).to(device) for weight in numbers(model, device)]


def sorted_rows(model: str, tokens: int, device: str) -> tuple[list[Tensor], Tensor]:
    """The rows of tokens whose experts are drawn at random, and where those of each expert end."""
    draw = torch.Generator().manual_seed(tokens)
    experts, chosen, *_ = MODELS[model][0]
    ids = torch.rand(tokens, experts, generator=draw).topk(chosen).indices.flatten()
    x = [torch.randn(len(ids), width, generator=draw).bfloat16().to(device) for *_, width in MODELS[model]]
    return x, ids.bincount(minlength=experts).cumsum(0).to(device)


def loop(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    out, first = x.new_empty(len(x), weight.shape[1]), 0
    for expert, end in enumerate(ends.tolist()):
        if end > first:
            out[first:end] = F.linear(x[first:end], weight[expert])
        first = end
    return out


def candidate(name: str, model: str, tokens: int, device: str) -> Callable[[], list[Tensor]]:
    """A call, whose results are checked."""
    inputs, ends = sorted_rows(model, tokens, device)
    weights: list = numbers(model, device) if name in ("bf16", LOOP) else packed(model, name, device)
    product = loop if name == LOOP else pd.grouped_linear

    def call() -> list[Tensor]:
        return [product(x, weight, ends) for x, weight in zip(inputs, weights)]

    for found, x, weight in zip(call(), inputs, weights):
        if name in ("bf16", LOOP):
            exact = reference(x.double(), weight.double(), ends)
            assert_within_budget(found, exact, reference(x, weight, ends), name=name)
        if name != LOOP:
            first = int((ends > 0).nonzero()[0])
            assert torch.equal(found[:1], pd.linear(x[:1], weight[first])) or device == "cuda"
    return call


@by_device("model", SHAPES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", CANDIDATES)
def test_grouped_linear(benchmark, name: str, tokens: int, model: str, device: str) -> None:
    benchmark.group = f"grouped_linear, {model}, {tokens} tokens, {device}"
    with torch.inference_mode():
        compare(
            benchmark,
            candidate(name, model, tokens, device),
            baseline=candidate(LOOP, model, tokens, device),
            baseline_name=LOOP,
            device=device,
            rounds=12,
            warmup=2,
            graph=name != LOOP,
            op="grouped_linear",
            candidate=name,
            model=model,
            tokens=tokens,
        )


def seconds(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


def measured(model: str = "Qwen3-30B-A3B", rounds: int = 15) -> dict[str, Any]:
    """The minimum CPU time of an implementation for each number of tokens, in ms; the implementations take turns."""
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    with torch.inference_mode():
        for tokens in TOKENS:
            calls = {name: candidate(name, model, tokens, "cpu") for name in CANDIDATES}
            times: dict[str, list[float]] = {name: [] for name in CANDIDATES}
            for _ in range(rounds):
                for name, call in calls.items():
                    times[name].append(seconds(call))
            for name in CANDIDATES:
                found[name].append(round(1000 * min(times[name]), 3))
    return {"model": model, "rounds": rounds, "processor": processor(), "tokens": TOKENS, "ms": found}


def markdown(found: dict[str, Any]) -> str:
    """The table of docs/ops/grouped_linear.md."""
    tokens = (f"{count} token{'s' * (count > 1)}" for count in found["tokens"])
    lines = [f"| ms | {' | '.join(tokens)} |", "| --- | " + " | ".join(["---:"] * len(found["tokens"])) + " |"]
    for name, row in found["ms"].items():
        label = f"{name}, bf16" if name == LOOP else f"grouped_linear, {name}"
        lines.append(f"| {label} | {' | '.join(f'{value:.1f}' for value in row)} |")
    place = f"CPU time, minimum of {found['rounds']} rounds; {found['processor']}, 1 thread"
    return "\n".join([*lines, "", f"{found['model']}, the experts of a layer, {place}"])


if __name__ == "__main__":
    result = measured()
    write(RESULT, result)
    print(markdown(result))
