"""Random KV-cache calls over every layout the ops accept, inside storages whose every byte is watched."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.float64]
LAYOUTS = ["dense", "heads_first", "padded", "layers_apart", "layers_inner"]
GUARD = 64  # elements before and after every buffer


def storage(
    shape: tuple[int, ...], dtype: torch.dtype, order: tuple[int, ...], pad: int, seed: int, offset: int = 0
) -> Tensor:
    """A view of `shape` whose dimensions are in memory in `order`, rows `pad` elements apart, in a random storage."""
    sizes = [shape[dim] for dim in order]
    strides = [0] * len(shape)
    step = 1
    for size, dim in zip(reversed(sizes), reversed(order)):
        strides[dim] = step
        step *= size
        if dim == len(shape) - 1:
            step += pad
    numel = sum((size - 1) * stride for size, stride in zip(shape, strides)) + 1 if all(shape) else 0
    generator = torch.Generator().manual_seed(seed)
    width = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, ((numel + 2 * GUARD + offset) * width,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).as_strided(shape, strides, GUARD + offset)


def whole(t: Tensor) -> Tensor:
    """All bytes of a view's storage."""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


def copy_of(t: Tensor, device: torch.device | None = None) -> Tensor:
    """The same view of a copied storage."""
    raw = whole(t).clone().to(device or t.device)
    return torch.empty(0, dtype=t.dtype, device=raw.device).set_(
        raw.untyped_storage(), t.storage_offset(), t.shape, t.stride()
    )


def filled(t: Tensor, at: int | tuple[int, int], value: int) -> Tensor:
    """A copy with another value at one index."""
    t = t.clone()
    t[at] = value
    return t


@dataclass
class Case:
    """Caches and indices of one call. Values are in range unless a test spoils them."""

    k: Tensor | list[Tensor]
    v: Tensor | list[Tensor]
    lengths: Tensor
    counts: Tensor
    source_index: Tensor
    block_table: Tensor | None
    k_new: Tensor | list[Tensor]
    v_new: Tensor | list[Tensor]
    capacity: int
    label: str = field(default="", compare=False)

    def moved(self, device: torch.device) -> Case:
        """A deep copy on another device, storages included."""
        values = {}
        for name in ("k", "v", "k_new", "v_new", "lengths", "counts", "source_index", "block_table"):
            value = getattr(self, name)
            if isinstance(value, list):
                # Separate layers stay separate: each has its own storage.
                values[name] = [copy_of(t, device) for t in value]
            else:
                values[name] = None if value is None else copy_of(value, device)
        return Case(**values, capacity=self.capacity, label=self.label)

    def bytes(self) -> list[Tensor]:
        """Every byte a call could touch: caches and lengths, guards included."""
        tensors = [*as_list(self.k), *as_list(self.v), self.lengths]
        return [whole(t).cpu() for t in tensors]


def as_list(tensors: Tensor | list[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def make_case(
    seed: int,
    *,
    layers: int = 2,
    batch: int = 2,
    capacity: int = 12,
    heads: int = 2,
    head_dim: int = 4,
    v_head_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    layout: str = "dense",
    page_size: int | None = None,
    index_dtype: torch.dtype = torch.int64,
    rows: int | None = None,
    offset: int = 0,
) -> Case:
    rng = random.Random(seed)
    pages_per_sequence = -(-capacity // page_size) if page_size else 1
    capacity = pages_per_sequence * page_size if page_size else capacity
    num_pages = batch * pages_per_sequence + 2
    pages, slots = (num_pages, page_size) if page_size else (batch, capacity)
    rows = rng.randint(0, capacity) if rows is None else rows
    order = {"heads_first": (0, 1, 3, 2, 4), "layers_inner": (1, 2, 3, 0, 4)}.get(layout, (0, 1, 2, 3, 4))
    pad = rng.randint(1, 3) if layout == "padded" else 0

    def side(dim: int, row_count: int, entries: int, salt: int) -> Tensor | list[Tensor]:
        shape = (layers, entries, row_count, heads, dim)
        if layout == "layers_apart":
            return [storage(shape[1:], dtype, (0, 1, 2, 3), 0, seed + salt + i, offset) for i in range(layers)]
        return storage(shape, dtype, order, pad, seed + salt, offset)

    lengths = [rng.randint(0, capacity) for _ in range(batch)]
    counts = [rng.randint(0, min(rows, capacity - n)) for n in lengths]
    source = [pick_sources(rng, rows, count, capacity - n) for n, count in zip(lengths, counts)]
    table = None
    if page_size:
        ids = rng.sample(range(num_pages), batch * pages_per_sequence)
        table = torch.tensor(ids, dtype=torch.int32).view(batch, pages_per_sequence)
    other = v_head_dim or head_dim

    def index(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=index_dtype)

    return Case(
        k=side(head_dim, slots, pages, 1000),
        v=side(other, slots, pages, 2000),
        k_new=side(head_dim, rows, batch, 3000),
        v_new=side(other, rows, batch, 4000),
        lengths=index(lengths),
        counts=index(counts),
        source_index=index([n for row in source for n in row]).view(batch, rows),
        block_table=table,
        capacity=capacity,
    )


def pick_sources(rng: random.Random, rows: int, count: int, room: int) -> list[int]:
    """Accepted rows in one of the patterns that occur, or in none; entries past the count are garbage."""
    pattern = rng.choice(["prefix", "stride", "branch", "any", "reversed"])
    if pattern == "prefix":
        picked = list(range(count))
    elif pattern == "stride":
        step = rng.randint(1, max(1, room // max(1, count)))
        picked = [i * step for i in range(count)]
    elif pattern == "branch":
        picked = sorted(rng.sample(range(room), count))
    elif pattern == "any":
        picked = [rng.randrange(room) for _ in range(count)]
    else:
        picked = list(reversed(range(room - count, room)))
    return picked + [rng.randint(-(2**30), 2**30) for _ in range(rows - count)]


@st.composite
def cases(draw: st.DrawFn, **fixed: object) -> Case:
    head_dim = draw(st.sampled_from([1, 2, 3, 4, 5, 8, 16, 33]))
    arguments = dict(
        layers=draw(st.integers(1, 3)),
        batch=draw(st.integers(1, 3)),
        capacity=draw(st.integers(1, 24)),
        heads=draw(st.integers(1, 3)),
        head_dim=head_dim,
        v_head_dim=draw(st.sampled_from([None, None, 1, 6])),
        dtype=draw(st.sampled_from(DTYPES)),
        layout=draw(st.sampled_from(LAYOUTS)),
        page_size=draw(st.sampled_from([None, None, 1, 2, 3, 16])),
        index_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        offset=draw(st.integers(0, 3)),
    )
    arguments.update(fixed)
    return make_case(draw(st.integers(0, 2**20)), **arguments)
