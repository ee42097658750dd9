"""The ops of a step that recomputes a quarter of its rows, in the sizes of LLaDA: ours, eager PyTorch, and torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pdkernels as pd
from bench.devices import by_device
from bench.timing import compare
from pdkernels.models.architectures.rope import rope_tables
from tests.harness.error_budget import assert_within_budget

HEADS, HEAD_DIM, WIDTH, PROMPT, CAPACITY = 32, 128, 4096, 900, 2048
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROWS = {"cpu": (64, 256, 1024), "cuda": (64, 256, 1024), "dry": (64,)}
CANDIDATES = ("pdkernels", "torch eager", "torch.compile")


class Job(NamedTuple):
    """One op on one set of tensors: how it runs, how it is checked, what resets it, and how many bytes must move."""

    ours: Callable[[], object]
    inputs: tuple[object, ...]  # of the functions that PyTorch runs
    check: Callable[[str, object], None]
    reset: Callable[[], object]
    bytes: int


def spread(index: Tensor, x: Tensor) -> Tensor:
    return index.unsqueeze(-1).expand(-1, -1, x.shape[-1])


def select(x: Tensor, v: Tensor, cached: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The published step: similarities in the model's dtype, in no order."""
    index = F.cosine_similarity(v, cached, dim=-1).topk(count, dim=-1, largest=False).indices
    cached.copy_(v)
    return index, x.gather(1, spread(index, x))


def select_job(rows: int, dtype: torch.dtype, device: str, draw: Callable[..., Tensor]) -> Job:
    x, before, change = draw(1, rows, WIDTH), draw(1, rows, WIDTH), draw(1, rows, WIDTH)
    v = (before.float() + torch.linspace(0.02, 0.4, rows, device=device)[:, None] * change.float()).to(dtype)
    cache = torch.zeros(1, CAPACITY, HEADS, HEAD_DIM, dtype=dtype, device=device)
    cached = cache[:, PROMPT : PROMPT + rows].view(1, rows, WIDTH)
    heads, starts, count = v.view(1, rows, HEADS, HEAD_DIM), torch.tensor([PROMPT], device=device), rows // 4
    similarity = F.cosine_similarity(v[0].double(), before[0].double(), dim=-1)

    def ours() -> tuple[Tensor, Tensor]:
        index = pd.select_stale_rows_(heads, cache, starts, max_selected=count)
        return index, pd.gather_rows(x, index)

    def check(name: str, result: tuple[Tensor, Tensor]) -> None:
        index, picked = result
        # bfloat16 has steps of 2**-8 below 1: by its similarities, rows that far from the cut may go either way.
        slack = 1e-6 if name == "pdkernels" or dtype == torch.float32 else 2.0**-7
        assert (
            index[0].unique().numel() == count
            and similarity[index[0]].max() <= similarity.kthvalue(count).values + slack
        )
        assert torch.equal(picked, x[:, index[0]]) and torch.equal(cached, v)

    moved = (3 * rows + 2 * count) * WIDTH * dtype.itemsize
    return Job(ours, (x, v, cached, count), check, lambda: cached.copy_(before), moved)


def add(x: Tensor, cached: Tensor, fresh: Tensor, index: Tensor) -> Tensor:
    return x + cached.scatter_(1, spread(index, x), fresh)


def add_job(rows: int, dtype: torch.dtype, device: str, draw: Callable[..., Tensor]) -> Job:
    x, cached, fresh = draw(1, rows, WIDTH), draw(1, rows, WIDTH), draw(1, rows // 4, WIDTH)
    index = (
        torch.randperm(rows, generator=torch.Generator().manual_seed(rows))[: rows // 4].sort().values[None].to(device)
    )
    expected = add(x, cached.clone(), fresh, index)

    def check(name: str, result: Tensor) -> None:
        assert torch.equal(result, expected) and torch.equal(cached[:, index[0]], fresh)

    moved = (3 * rows + rows // 4) * WIDTH * dtype.itemsize
    return Job(
        lambda: pd.add_cached_rows_(x, cached, fresh, index), (x, cached, fresh, index), check, lambda: None, moved
    )


def apply_rope_append(
    qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, starts: Tensor, slots: Tensor
) -> None:
    positions = starts[:, None] + slots
    turned = qkv[:, :, : 2 * HEADS]
    wide = turned.float()
    turned.copy_(wide * cos[positions].unsqueeze(2) + wide.roll(HEAD_DIM // 2, -1) * sin[positions].unsqueeze(2))
    sequence = torch.zeros_like(positions)
    k_cache.index_put_((sequence, positions), qkv[:, :, HEADS : 2 * HEADS])
    v_cache.index_put_((sequence, positions), qkv[:, :, 2 * HEADS :])


def apply_rope_append_job(rows: int, dtype: torch.dtype, device: str, draw: Callable[..., Tensor]) -> Job:
    picked = rows // 4
    qkv = draw(1, picked, 3 * HEADS, HEAD_DIM)
    k, v = (torch.zeros(1, CAPACITY, HEADS, HEAD_DIM, dtype=dtype, device=device) for _ in range(2))
    table, before = rope_tables(CAPACITY, HEAD_DIM, theta=500000.0, style="half", device=device), qkv.clone()
    slots = torch.randperm(rows, generator=torch.Generator().manual_seed(rows))[:picked].sort().values[None].to(device)
    tensors, starts = (table.cos, table.sin, k, v), torch.tensor([PROMPT], device=device)

    def expected(wanted: torch.dtype) -> Tensor:
        fresh, tables = (
            before.to(wanted, copy=True),
            [t.to(torch.promote_types(wanted, torch.float32)) for t in tensors[:2]],
        )
        caches = [t.to(wanted, copy=True) for t in (k, v)]
        pd.reference.transformer_ops.apply_rope_append_(
            fresh, None, *tables, *caches, starts, style="half", slots=slots
        )
        return fresh

    exact, same = expected(torch.float64), expected(dtype)

    def check(name: str, result: object) -> None:
        assert_within_budget(qkv, exact, same, name=f"{name}: apply_rope_append_")
        stored = k[:, PROMPT + slots[0]], v[:, PROMPT + slots[0]]
        assert torch.equal(stored[0], qkv[:, :, HEADS : 2 * HEADS]) and torch.equal(stored[1], qkv[:, :, 2 * HEADS :])

    ours = lambda: pd.apply_rope_append_(qkv, None, *tensors, starts, style="half", slots=slots)  # noqa: E731
    moved = 7 * picked * HEADS * HEAD_DIM * dtype.itemsize  # q, k, v read; q, k written; k, v stored
    return Job(ours, (qkv, *tensors, starts, slots), check, lambda: qkv.copy_(before), moved)


JOBS = {
    "select_stale_rows_": (select_job, select),
    "add_cached_rows_": (add_job, add),
    "apply_rope_append_": (apply_rope_append_job, apply_rope_append),
}


@by_device("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", JOBS)
@pytest.mark.parametrize("name", CANDIDATES)
def test_feature_cache(benchmark, name: str, op: str, dtype: str, rows: int, device: str) -> None:
    benchmark.group = f"{op}, {dtype}, {rows} rows, {device}"
    generator = torch.Generator().manual_seed(rows)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DTYPES[dtype]).to(device)

    build, eager = JOBS[op]
    job = build(rows, DTYPES[dtype], device, draw)
    torch._dynamo.reset()
    compiled = partial(torch.compile(eager, dynamic=False), *job.inputs)
    call = {"pdkernels": job.ours, "torch eager": partial(eager, *job.inputs), "torch.compile": compiled}[name]
    with torch.inference_mode():
        job.reset()
        job.check(name, call())
        compare(
            benchmark,
            call,
            baseline=compiled,
            baseline_name="torch.compile",
            reset=job.reset,
            device=device,
            rounds=max(20, 6000 // rows),
            bytes_moved=job.bytes // 2,
            op="feature_cache",
            kernel=op,
            candidate=name,
            dtype=dtype,
            rows=rows,
        )
