"""Calls of select_stale_rows_ and add_cached_rows_ over every layout, inside storages whose every byte is watched."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from pdkernels.reference import feature_cache as reference
from tests.ops.kv_cases import copy_of, storage, whole

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CPU = torch.device("cpu")


@dataclass
class Call:
    """Tensors of a call by their names, with their storages."""

    def moved(self, device: torch.device) -> Call:
        return replace(self, **{name: copy_of(t, device) for name, t in vars(self).items() if isinstance(t, Tensor)})

    def doubled(self) -> Call:
        floats = {name: t.double() for name, t in vars(self).items() if isinstance(t, Tensor) and t.is_floating_point()}
        return replace(self, **floats)

    def bytes(self) -> list[Tensor]:
        return [whole(t).cpu() for t in vars(self).values() if isinstance(t, Tensor)]


@dataclass
class Selection(Call):
    """Values are in range unless a test spoils them."""

    v: Tensor
    v_cache: Tensor
    starts: Tensor
    max_selected: int
    quota: Tensor | None
    counts: Tensor | None
    update: str
    block_table: Tensor | None

    def run(self, select) -> Tensor:
        options = dict(
            max_selected=self.max_selected,
            quota=self.quota,
            counts=self.counts,
            update=self.update,
            block_table=self.block_table,
        )
        return select(self.v, self.v_cache, self.starts, **options)

    def sequence(self, b: int) -> Selection:
        """One sequence of the same storages."""
        parts = {
            name: t[b : b + 1]
            for name in ("v", "starts", "quota", "counts", "block_table")
            if (t := getattr(self, name)) is not None
        }
        return replace(self, **parts, v_cache=self.v_cache if self.block_table is not None else self.v_cache[b : b + 1])


def make_selection(
    seed: int,
    *,
    batch: int = 2,
    rows: int = 7,
    kv_heads: int = 2,
    head_dim: int = 8,
    dtype: torch.dtype = torch.float32,
    max_selected: int = 3,
    page_size: int | None = None,
    capacity: int = 16,
    pad: int = 0,
    quota: bool = True,
    counts: bool = True,
    update: str = "all",
    index_dtype: torch.dtype = torch.int64,
) -> Selection:
    """Cosines of a sequence are far apart, so that no rounding decides which are lowest."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    per_sequence = -(-capacity // page_size) if page_size else 1
    capacity = per_sequence * page_size if page_size else capacity
    pages, slots_per_page = (batch * per_sequence + 2, page_size) if page_size else (batch, capacity)
    order = (0, 2, 1, 3) if pad else (0, 1, 2, 3)
    v = storage((batch, rows, kv_heads, head_dim), dtype, order, pad, seed)
    v_cache = storage((pages, slots_per_page, kv_heads, head_dim), dtype, order, pad, seed + 1)
    v_cache.copy_(torch.randn(v_cache.shape, generator=generator))
    ids = (
        torch.tensor(rng.sample(range(pages), batch * per_sequence), dtype=torch.int32).view(batch, per_sequence)
        if page_size
        else None
    )
    starts, numbers = (
        [rng.randint(0, capacity - rows) for _ in range(batch)],
        [rng.randint(0, rows) for _ in range(batch)],
    )
    for b, start in enumerate(starts):
        cosines = torch.linspace(-0.95, 0.95, rows)[torch.randperm(rows, generator=generator)]
        for i in range(rows):
            old, other = torch.randn(2, kv_heads * head_dim, generator=generator, dtype=torch.float64)
            other -= old * (other @ old) / (old @ old)
            new = cosines[i] * old / old.norm() + (1 - cosines[i] ** 2).sqrt() * other / other.norm().clamp(min=1e-30)
            slot = (b, start + i) if ids is None else (ids[b, (start + i) // page_size], (start + i) % page_size)
            v_cache[slot] = old.view(kv_heads, head_dim).to(dtype)
            v[b, i] = (new * rng.uniform(1, 20)).view(kv_heads, head_dim).to(dtype)
    quotas = [rng.choice([0, max_selected // 2, max_selected, max_selected + 3]) for _ in range(batch)]
    return Selection(
        v,
        v_cache,
        torch.tensor(starts, dtype=index_dtype),
        max_selected,
        torch.tensor(quotas, dtype=index_dtype) if quota else None,
        torch.tensor(numbers, dtype=index_dtype) if counts else None,
        update,
        ids,
    )


@st.composite
def selections(draw: st.DrawFn) -> Selection:
    rows = draw(st.integers(1, 12))
    return make_selection(
        draw(st.integers(0, 2**20)),
        batch=draw(st.integers(1, 3)),
        rows=rows,
        kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([8, 16, 34, 64])),
        dtype=draw(st.sampled_from(DTYPES)),
        max_selected=draw(st.integers(0, rows + 2)),
        page_size=draw(st.sampled_from([None, 1, 3, 16])),
        capacity=draw(st.integers(rows, 20)),
        pad=draw(st.integers(0, 2)),
        quota=draw(st.booleans()),
        counts=draw(st.booleans()),
        update=draw(st.sampled_from(reference.UPDATES)),
        index_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
    )


@dataclass
class Sum(Call):
    x: Tensor
    cached: Tensor
    rows: Tensor | None
    index: Tensor | None

    def run(self, add) -> Tensor:
        return add(self.x, self.cached, self.rows, self.index)


def make_sum(
    seed: int,
    *,
    batch: int = 2,
    rows: int = 7,
    replaced: int | None = 3,
    width: int = 16,
    dtype: torch.dtype = torch.float32,
    pad: int = 0,
    index_dtype: torch.dtype = torch.int64,
) -> Sum:
    """Random bytes: NaN and infinities are among them."""
    rng = random.Random(seed)
    order = (1, 0, 2) if pad else (0, 1, 2)
    x, cached = (storage((batch, rows, width), dtype, order, pad, seed + salt) for salt in (0, 1))
    if replaced is None:
        return Sum(x, cached, None, None)
    lists = [sorted(rng.sample(range(rows), rng.randint(0, min(rows, replaced)))) for _ in range(batch)]
    index = torch.tensor([picked + [-1] * (replaced - len(picked)) for picked in lists], dtype=index_dtype).view(
        batch, replaced
    )
    return Sum(x, cached, storage((batch, replaced, width), dtype, order, pad, seed + 2), index)


@st.composite
def sums(draw: st.DrawFn) -> Sum:
    return make_sum(
        draw(st.integers(0, 2**20)),
        batch=draw(st.integers(0, 3)),
        rows=draw(st.integers(0, 9)),
        replaced=draw(st.one_of(st.none(), st.integers(0, 9))),
        width=draw(st.sampled_from([0, 1, 7, 16, 64, 130])),
        dtype=draw(st.sampled_from(DTYPES)),
        pad=draw(st.integers(0, 2)),
        index_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
    )
