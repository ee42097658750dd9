"""Products of few rows with the matrices of a model: ours, PyTorch's, and the time of reading the matrices."""

from __future__ import annotations

import math
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pdkernels as pd
from bench.devices import by_device
from bench.timing import compare
from pdkernels.reference.linear import linear as reference
from tests.harness.error_budget import assert_within_budget

# (outputs, width) of a layer's products, and how many layers are read in turn, so that no cache holds them all.
MODELS = {
    "SmolLM2-135M": ([(960, 576), (576, 576), (3072, 576), (576, 1536)], 12),
    "8B": ([(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)], 1),
    "dry": ([(48, 40), (40, 40)], 2),
}
SHAPES = {"cpu": ("SmolLM2-135M", "8B"), "cuda": ("SmolLM2-135M", "8B"), "dry": ("dry",)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROWS = (1, 2, 4, 8, 16, 32, 64)


@cache
def weights(model: str, dtype: torch.dtype, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes, layers = MODELS[model]
    return [
        (torch.randn(shape, generator=generator) / math.sqrt(shape[1])).to(dtype).to(device)
        for _ in range(layers)
        for shape in shapes
    ]


CANDIDATES = ("pdkernels", "F.linear", "a read of the weights")


@by_device("model", SHAPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CANDIDATES)
def test_linear(benchmark, name: str, dtype: str, rows: int, model: str, device: str) -> None:
    benchmark.group = f"linear, {model}, {dtype}, {rows} rows, {device}"
    all_weights = weights(model, DTYPES[dtype], device)
    widths = {weight.shape[1] for weight in all_weights}
    inputs = {width: torch.randn(rows, width).to(DTYPES[dtype]).to(device) for width in widths}

    def products(linear) -> list[Tensor]:
        return [linear(inputs[weight.shape[1]], weight) for weight in all_weights]

    def read() -> list[Tensor]:
        return [weight.view(torch.float32).sum() for weight in all_weights]

    baseline = partial(products, F.linear)
    call = {"pdkernels": partial(products, pd.linear), "F.linear": baseline, "a read of the weights": read}[name]
    with torch.inference_mode():
        if name != "a read of the weights":
            for found, weight in zip(call()[:4], all_weights):
                x = inputs[weight.shape[1]]
                exact, plain = reference(x.double(), weight.double()), reference(x, weight)
                assert_within_budget(found, exact, plain, name=name)
        compare(
            benchmark,
            call,
            baseline=baseline,
            baseline_name="F.linear",
            device=device,
            rounds=12,
            warmup=2,
            bytes_moved=sum(weight.nbytes for weight in all_weights) // 2,
            op="linear",
            candidate=name,
            model=model,
            dtype=dtype,
            rows=rows,
        )
