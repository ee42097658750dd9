"""The calculator of docs/scaling.md: its counts against those of a model, its table on the page."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import pdkernels as pd
from bench.papers.scaling import EIGHT_BILLION, RECIPES, Shape, largest_batch, step_cost, table, tokens_per_second
from bench.papers.theory import DEVICES
from tests.support.errors import refused

H200 = DEVICES["H200"]
PAGE = Path(__file__).resolve().parents[2] / "docs/scaling.md"


def test_weights_are_those_of_a_model() -> None:
    sizes = {"hidden_size": 64, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate_size": 96}
    with torch.device("meta"):
        model = pd.models.Transformer(pd.models.TransformerConfig(vocab_size=300, **sizes))
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    shape = Shape(64, 3, 4, 2, 16, 96, 300)
    assert shape.products == matrices
    cost = step_cost(shape, H200, rows=5, batch=2, prefix=10)
    assert cost.weight_bytes == 2 * matrices and cost.exchanges == cost.exchanged_bytes == 0
    cache = model.new_cache(2, 10)
    assert cost.cache_bytes == 2 * 2 * sum(k.numel() for k in cache.k)
    # Two FLOPs per weight and row, and for each pair, head and component two for the score and two for the sum.
    assert cost.flops == 2 * 10 * matrices + 4 * 10 * 15 * 3 * 4 * 16


def test_exchanges_are_those_of_the_ranks() -> None:
    """What the tests of tensor-parallel models count, in 16 bits and with a record for the token: 8 (7 + 3 * 2) bytes."""
    shape, sums = Shape(256, 4, 4, 2, 64, 352, 257), 9
    for ranks in (2, 4):
        cost = step_cost(shape, H200, ranks=ranks)
        assert (cost.exchanges, cost.exchanged_bytes) == (sums + 1, (ranks - 1) * (sums * 256 * 2 + 104))
    large = step_cost(shape, H200, rows=1000, ranks=4)
    assert large.exchanges == 2 * sums + 1
    assert large.exchanged_bytes == sums * 2 * 3 * (1000 * 256 * 2 // 4) + 3 * 1000 * 104


def test_heads_that_ranks_share() -> None:
    """Two KV heads on four ranks: each reads one of them."""
    shape = Shape(256, 4, 4, 2, 64, 352, 257)
    assert step_cost(shape, H200, ranks=4).cache_bytes == step_cost(shape, H200, ranks=2).cache_bytes
    with refused("papers.scaling.step_cost: ranks must divide the heads and the inner width, got 3"):
        step_cost(shape, H200, ranks=3)
    with refused("papers.scaling.step_cost: batch must be at least 1, got 0"):
        step_cost(shape, H200, batch=0)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_wider_methods_stop_gaining_earlier(ranks: int) -> None:
    narrow, wide = (largest_batch(RECIPES[name], EIGHT_BILLION, H200, ranks=ranks) for name in list(RECIPES)[1:])
    assert wide < narrow


def test_the_page_shows_the_table() -> None:
    assert table() in PAGE.read_text()


@pytest.mark.parametrize("requests", [1, 8, 64, 208, 1024])
def test_what_eight_devices_give(requests: int) -> None:
    """The rows of the page, of which the largest is in bold."""
    model = EIGHT_BILLION
    ours, plain = (RECIPES[name] for name in ("linear self-speculation, 32", "autoregressive"))
    busy, each = min(requests, 8), max(requests // 8, 1)
    drafted, tokenwise = (busy * round(tokens_per_second(x, model, H200, batch=each)) for x in (ours, plain))
    together = round(tokens_per_second(ours, model, H200, batch=requests, ranks=8))
    speeds = (drafted, together, tokenwise)
    cells = " | ".join(f"**{speed}**" if speed == max(speeds) else str(speed) for speed in speeds)
    assert f"| {requests} | {cells} |" in PAGE.read_text(encoding="utf-8"), cells
