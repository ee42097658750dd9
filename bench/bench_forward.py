"""A forward of a transformer on its cache, with our ops between the matrix products, and with plain PyTorch instead.

The shipped tiny-trimode after 40 tokens, on one thread; on a GPU 8 layers of an 8B model in bf16 after 1024.
"""

from __future__ import annotations

from functools import lru_cache
from unittest.mock import patch

import pytest
import torch

from bench.devices import by_device, sizes
from bench.timing import compare
from pdkernels.models import Transformer, TransformerConfig, load
from pdkernels.models.architectures import fused

ROWS = {"cpu": (1, 4, 16, 72), "cuda": (1, 8, 72), "dry": (2,)}
PREFIX = {"cpu": 40, "cuda": 1024, "dry": 5}


@lru_cache(maxsize=1)
def model(device: str) -> Transformer:
    if sizes(device, {"cpu": True, "cuda": False, "dry": True}):
        return load("tiny-trimode").to(device)
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=32000, hidden_size=4096, layers=8, heads=32, kv_heads=8, head_dim=128, intermediate_size=14336
    )
    with torch.device(device):
        return Transformer(config).to(torch.bfloat16).requires_grad_(False)


@by_device("rows", ROWS)
@pytest.mark.parametrize("name", ["pdkernels", "torch ops"])
def test_forward(benchmark, name: str, rows: int, device: str) -> None:
    benchmark.group = f"forward, {rows} rows, {device}"
    transformer, threads = model(device), torch.get_num_threads()
    prefix = sizes(device, PREFIX)
    cache = transformer.new_cache(1, prefix + rows)
    drawn = torch.randint(0, 250, (1, prefix + rows), generator=torch.Generator().manual_seed(0)).to(device)
    transformer(drawn[:, :prefix], cache=cache)
    cache.commit_(torch.tensor([prefix], device=device))

    def ours() -> torch.Tensor:
        with torch.inference_mode():
            return transformer.hidden(drawn[:, prefix:], cache=cache)

    def torch_ops() -> torch.Tensor:
        with patch.object(fused, "enabled", lambda x: False):
            return ours()

    torch.testing.assert_close(
        ours(), torch_ops(), rtol=0.02, atol=0.02 if transformer.dtype == torch.bfloat16 else 1e-3
    )
    torch.set_num_threads(1)
    try:
        compare(
            benchmark,
            ours if name == "pdkernels" else torch_ops,
            baseline=torch_ops,
            baseline_name="torch ops",
            device=device,
            rounds=200,
            warmup=10,
            op="forward",
            candidate=name,
            rows=rows,
        )
    finally:
        torch.set_num_threads(threads)
