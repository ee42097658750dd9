"""`linear` on weights in huge and in ordinary pages, from one row to 64, beside the time of reading the weights from the same pages.

The weights are those of several layers in turn, more than any cache holds.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from bench.devices import DRY_RUN
from bench.timing import compare
from pdkernels import _memory

# (outputs, width) of products, and the bytes of weights that are read in turn.
MODELS = {
    "SmolLM2-135M": ([(576, 576), (1536, 576), (576, 1536), (49152, 576)], 1 << 28),
    "1.7B": ([(2048, 2048), (6144, 2048), (2048, 6144)], 1 << 28),
}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
PAGES = ("huge", "ordinary")

pytestmark = pytest.mark.skipif(DRY_RUN, reason="on the CPU alone")


@cache
def weights(model: str, dtype: torch.dtype, pages: str) -> list[Tensor]:
    shapes, min_bytes = MODELS[model]
    layer = sum(outputs * width for outputs, width in shapes) * dtype.itemsize
    drawn = [(torch.randn(shape) / math.sqrt(shape[1])).to(dtype) for shape in shapes]
    make = _memory.empty if pages == "huge" else torch.empty
    return [make(one.shape, dtype=dtype).copy_(one) for _ in range(-(-min_bytes // layer)) for one in drawn]


@pytest.mark.parametrize("pages, rows", list(product(PAGES, ROWS)))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_linear_pages(benchmark, model: str, dtype: str, pages: str, rows: int) -> None:
    if pages == "huge" and not _memory.enabled():
        pytest.skip("the system gives no huge pages")
    benchmark.group = f"linear, {model}, {dtype}, {pages} pages"
    all_weights = weights(model, DTYPES[dtype], pages)
    inputs = {width: torch.randn(rows, width).to(DTYPES[dtype]) for width in {w.shape[1] for w in all_weights}}

    def products() -> list[Tensor]:
        return [pd.linear(inputs[weight.shape[1]], weight) for weight in all_weights]

    def read() -> list[Tensor]:
        return [weight.view(torch.float32).sum() for weight in all_weights]

    with torch.inference_mode():
        compare(
            benchmark,
            products,
            baseline=read,
            baseline_name="a read of the weights",
            rounds=12,
            warmup=2,
            bytes_moved=sum(weight.nbytes for weight in all_weights) // 2,
            op="linear_pages",
            model=model,
            dtype=dtype,
            pages=pages,
            rows=rows,
        )
