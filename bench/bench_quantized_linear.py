"""Products of few rows with packed matrices: each format beside `linear` in bfloat16, and some with rows that stay numbers."""

from __future__ import annotations

import math
from copy import deepcopy
from functools import cache, partial

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from bench.devices import by_device
from bench.timing import compare
from pdkernels.reference.quantized_linear import Layout, Quantized

# (outputs, width) of a layer's products, and how many layers are read in turn, so that no cache holds them all.
MODELS = {
    "1.7B": ([(4096, 2048), (2048, 2048), (12288, 2048), (2048, 6144)], 4),
    "8B": ([(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)], 1),
    "dry": ([(48, 256), (40, 256)], 2),
}
SHAPES = {"cpu": ("1.7B", "8B"), "cuda": ("8B",), "dry": ("dry",)}
LAYOUTS = {
    "q4_0": Layout("half", 4, 1),
    "q8_0": Layout("half", 8, 1),
    "q4_k": Layout("super", 4, 8),
    "q6_k": Layout("super16", 6, 8),
    "int8": Layout("float", 8, 0),
    "int4 in groups of 128": Layout("half_zero", 4, 4),
}
NUMBERS = ", numbers"
CANDIDATES = (*LAYOUTS, *(f"{name}{NUMBERS}" for name in ("q4_0", "q8_0", "int4 in groups of 128")))
"""Formats, and some of them with rows that stay numbers."""
ROWS = (1, 4, 8, 16, 64)


def matrix(layout: Layout, outputs: int, width: int) -> pd.QuantizedWeight:
    """Random codes, and scales near those of a matrix whose product keeps the size of a row."""
    draw = torch.Generator().manual_seed(outputs + width)
    codes = torch.randint(0, 2**layout.bits, (outputs, layout.blocks(width) * 32), generator=draw, dtype=torch.uint8)
    fields = {}
    for name, dtype, count in layout.header():
        shape = (outputs, layout.groups(width), count)
        if dtype == torch.uint8:
            fields[name] = torch.randint(1, 2**layout.bits, shape, generator=draw, dtype=dtype)
        else:
            fields[name] = (torch.rand(shape, generator=draw) / (2**layout.bits * math.sqrt(width))).to(dtype)
    return pd.QuantizedWeight.pack("random", layout, Quantized(codes, fields), width)


@cache
def weights(model: str, format: str, device: str) -> list[pd.QuantizedWeight]:
    shapes, layers = MODELS[model]
    if format.endswith(NUMBERS):
        return [weight.with_rows("numbers") for weight in weights(model, format.removesuffix(NUMBERS), device)]
    return [matrix(LAYOUTS[format], *shape).to(device) for _ in range(layers) for shape in shapes]


@cache
def numbers(model: str, device: str) -> list[Tensor]:
    shapes, layers = MODELS[model]
    return [torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(layers) for shape in shapes]


@by_device("model", SHAPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("format", CANDIDATES)
def test_quantized_linear(benchmark, format: str, rows: int, model: str, device: str) -> None:
    benchmark.group = f"quantized_linear, {model}, {rows} rows, {device}"
    packed, plain = weights(model, format, device), numbers(model, device)
    inputs = {weight.width: torch.randn(rows, weight.width, dtype=torch.bfloat16, device=device) for weight in packed}

    def products(all_weights) -> list[Tensor]:
        return [pd.linear(inputs[weight.shape[1]], weight) for weight in all_weights]

    with torch.inference_mode():
        weight = packed[0]
        x = inputs[weight.width][:2]
        expected = pd.quantized_linear(x.cpu(), deepcopy(weight).cpu(), backend="reference")
        found = pd.quantized_linear(x, weight).cpu()
        if device == "cpu" or weight.rows == "int8":
            assert torch.equal(found, expected)
        else:  # the tensor cores choose the order of sums
            torch.testing.assert_close(found, expected)
        compare(
            benchmark,
            partial(products, packed),
            baseline=partial(products, plain),
            baseline_name="linear, bf16",
            device=device,
            rounds=12,
            warmup=2,
            bytes_moved=sum(weight.nbytes for weight in packed) // 2,
            op="quantized_linear",
            candidate=format,
            model=model,
            rows=rows,
        )
