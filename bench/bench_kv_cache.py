"""KV-cache commit, compared with the usual ways to do it and with a plain copy of the same bytes.

36 layers x [B, 4096, 8 heads, 128] bf16 (the shape of an 8B model with grouped-query attention), 3000 rows committed, every
n-th of a draft accepted: 5 of 81 (quadratic, width 8), 16 of 256, 32 of 1024. The first accepted row is in its slot already.
On a GPU up to 64 sequences.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from bench.devices import DEVICES, by_device, sizes
from bench.timing import compare
from pdkernels.reference.kv_cache import kv_commit_ as reference

FULL = (36, 4096, 8, 128, 3000)
LAYERS, CAPACITY, HEADS, DIM, LENGTH = sizes(DEVICES[0], {"cpu": FULL, "cuda": FULL, "dry": (2, 2200, 2, 16, 60)})
CASES = [(5, 81), (16, 256), (32, 1024)]
BATCHES = {"cpu": (1, 4), "cuda": (1, 8, 64), "dry": (1, 2)}
# New caches are as large as the old ones.
MOST_COPIED = 8


@lru_cache(maxsize=2)
def make_caches(batch: int, device: str, capacity: int) -> tuple[Tensor, Tensor]:
    """K and V of all layers, shared by the candidates: 604 MB at batch 1."""
    shape = (LAYERS, batch, capacity, HEADS, DIM)
    rows = torch.randn(shape[1:], generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    k, v = (
        torch.empty(shape, dtype=torch.bfloat16, device=device),
        torch.empty(shape, dtype=torch.bfloat16, device=device),
    )
    for i, layer in enumerate([*k, *v]):
        layer.copy_(rows.roll(i, 1))
    return k, v


class Setup:
    """The arguments of one case, the cache as one stacked tensor per side and as its layers."""

    def __init__(
        self, batch: int, accepted: int, drafted: int, device: str, capacity: int = CAPACITY, length: int = LENGTH
    ) -> None:
        self.k, self.v = make_caches(batch, device, capacity)
        self.accepted, self.length = accepted, length
        self.source = torch.arange(accepted, device=device) * (drafted // accepted)
        self.sources = self.source.expand(batch, accepted).contiguous()
        self.counts = torch.full((batch,), accepted, device=device)
        self.lengths = torch.full((batch,), length, device=device)
        self.layers = [*self.k.unbind(0), *self.v.unbind(0)]
        self.bytes_moved = (accepted - 1) * batch * 2 * LAYERS * HEADS * DIM * 2
        self.block = torch.randint(0, 256, (2, self.bytes_moved), dtype=torch.uint8).to(device)

    def reset(self) -> None:
        self.lengths.fill_(self.length)

    def memcpy(self) -> None:
        """The baseline: one call of memcpy on one thread (on a GPU: one device-to-device copy)."""
        if self.block.is_cuda:
            self.block[1].copy_(self.block[0])
        else:
            ctypes.memmove(self.block[1].data_ptr(), self.block[0].data_ptr(), self.bytes_moved)


def ours(s: Setup) -> None:
    pd.kv_commit_(s.k, s.v, s.lengths, s.counts, s.sources)


def ours_layers_apart(s: Setup) -> None:
    pd.kv_commit_(s.layers[:LAYERS], s.layers[LAYERS:], s.lengths, s.counts, s.sources)


def stacked_index_select(s: Setup) -> None:
    """The best form in torch: K and V in one tensor each, one gather and one copy."""
    rows = s.source + s.length
    for side in (s.k, s.v):
        side[:, :, s.length : s.length + s.accepted] = side.index_select(2, rows)
    s.lengths += s.counts


def per_layer_index_select(s: Setup) -> None:
    rows = s.source + s.length
    for layer in s.layers:
        layer[:, s.length : s.length + s.accepted] = layer.index_select(1, rows)
    s.lengths += s.counts


def per_layer_advanced_index(s: Setup) -> None:
    rows = s.source + s.length
    for layer in s.layers:
        layer[:, s.length : s.length + s.accepted] = layer[:, rows]
    s.lengths += s.counts


def new_cache_by_cat(s: Setup) -> list[Tensor]:
    """Like a list of growing tensors: prefix and accepted rows are concatenated into new ones."""
    rows = s.source + s.length
    return [torch.cat([layer[:, : s.length], layer.index_select(1, rows)], dim=1) for layer in s.layers]


def new_cache_by_index_select(s: Setup) -> list[Tensor]:
    rows = torch.cat([torch.arange(s.length, device=s.source.device), s.source + s.length])
    return [layer.index_select(1, rows) for layer in s.layers]


def block_copy(s: Setup) -> list[Tensor]:
    """No commit at all: the same number of bytes as one block, on all threads."""
    s.block[1].copy_(s.block[0])
    return []


CANDIDATES: dict[str, Callable[[Setup], object]] = {
    "pdkernels": ours,
    "pdkernels, layers apart": ours_layers_apart,
    "stacked index_select + copy": stacked_index_select,
    "per layer index_select + copy": per_layer_index_select,
    "per layer advanced index": per_layer_advanced_index,
    "new cache: cat": new_cache_by_cat,
    "new cache: index_select": new_cache_by_index_select,
    "a block of the same bytes, all threads": block_copy,
}


def check(candidate: Callable[[Setup], object], accepted: int, drafted: int, device: str) -> None:
    """The candidate's rows are the reference's, on a short cache of the same kind."""
    expected, actual = (Setup(1, accepted, drafted, device, capacity=1100, length=60) for _ in range(2))
    actual.k, actual.v = expected.k.clone(), expected.v.clone()
    actual.layers = [*actual.k.unbind(0), *actual.v.unbind(0)]
    reference(expected.k, expected.v, expected.lengths, expected.counts, expected.sources)
    result = candidate(actual) or actual.layers
    end = expected.length + accepted
    assert all(torch.equal(a[:, :end], b[:, :end]) for a, b in zip(result, expected.layers, strict=True))


@pytest.mark.parametrize("name", CANDIDATES)
@pytest.mark.parametrize("accepted, drafted", CASES, ids=[f"{a}of{d}" for a, d in CASES])
@by_device("batch", BATCHES)
def test_kv_commit(benchmark, name: str, accepted: int, drafted: int, batch: int, device: str) -> None:
    benchmark.group = f"kv_commit_ {accepted} of {drafted}, batch {batch}, {device}"
    candidate, copies = CANDIDATES[name], name.startswith("new cache")
    if copies and batch > MOST_COPIED:
        pytest.skip("no room for another cache")
    if batch == 1 and candidate is not block_copy:
        check(candidate, accepted, drafted, device)
    setup = Setup(batch, accepted, drafted, device)
    compare(
        benchmark,
        lambda: candidate(setup),
        baseline=setup.memcpy,
        baseline_name="memcpy of the same bytes",
        reset=setup.reset,
        device=device,
        rounds=15 if copies else 200,
        graph=not copies,
        bytes_moved=setup.bytes_moved,
        op="kv_commit_",
        candidate=name,
        accepted=accepted,
        drafted=drafted,
        batch=batch,
    )
