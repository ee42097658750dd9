"""Inputs, tails, and ways to run speculative_attention, for its tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import pdkernels as pd
from pdkernels import masks
from pdkernels._attention import SpeculativeArguments
from pdkernels.masks import Segment, SegmentMask, Stage, TilePlan
from pdkernels.reference.speculative_attention import speculative_attention as reference
from tests.harness.error_budget import assert_within_budget
from tests.harness.triton_interpreter import triton_device
from tests.ops.attention_cases import on_device
from tests.ops.kv_cases import copy_of, whole

OP = torch.ops.pdkernels.speculative_attention.default
APPEND = torch.ops.pdkernels.speculative_attention_append_.default
NAN = float("nan")
# A page that does not exist; no entry of a table that is read holds it.
NO_PAGE = -(2**20)


class Inputs(NamedTuple):
    q: Tensor
    k_new: Tensor
    v_new: Tensor
    k_cache: Tensor
    v_cache: Tensor
    lengths: Tensor
    block_table: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> Inputs:
        return Inputs(*(None if x is None else function(x) for x in self))

    def to(self, dtype: torch.dtype) -> Inputs:
        return Inputs(*(x.to(dtype) for x in self[:5]), *self[5:])

    def sequence(self, b: int) -> Inputs:
        """One sequence by itself, with the whole pool of pages."""
        caches = (x[b : b + 1] if self.block_table is None else x for x in self[3:5])
        table = None if self.block_table is None else self.block_table[b : b + 1]
        return Inputs(*(x[b : b + 1] for x in self[:3]), *caches, self.lengths[b : b + 1], table)


class Results(NamedTuple):
    out: Tensor
    lse: Tensor


def make_inputs(
    new: int,
    lengths: Sequence[int],
    *,
    slots: int | None = None,
    page_size: int = 0,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    """NaN is wherever nothing may be read: in the cache past the lengths, and with a page size in pages that no sequence owns."""
    generator = torch.Generator().manual_seed(new + 7 * sum(lengths))
    batch, slots = len(lengths), max(lengths, default=0) + 3 if slots is None else slots

    def randn(tokens: int, heads: int) -> Tensor:
        return torch.randn(batch, tokens, heads, head_dim, generator=generator).to(dtype)

    q, k_new, v_new, k_cache, v_cache = (randn(new, heads), *(randn(n, kv_heads) for n in (new, new, slots, slots)))
    for b, length in enumerate(lengths):
        k_cache[b, length:] = v_cache[b, length:] = NAN
    # int32 and int64 alternate, with a gap between the entries of the table.
    inputs = Inputs(
        q, k_new, v_new, k_cache, v_cache, torch.tensor(lengths, dtype=torch.int64 if new % 2 else torch.int32)
    )
    return in_pages(inputs, page_size) if page_size else inputs


def in_pages(inputs: Inputs, page_size: int) -> Inputs:
    """The same cache in pages, in random order."""
    batch, slots = inputs.k_cache.shape[:2]
    columns = -(-slots // page_size)
    pages = torch.randperm(batch * columns + 3, generator=torch.Generator().manual_seed(5))
    table = pages[: batch * columns].view(batch, columns)
    pools = []
    for cache in (inputs.k_cache, inputs.v_cache):
        pool = cache.new_full((len(pages), page_size, *cache.shape[2:]), NAN)
        filled = F.pad(cache, (0, 0, 0, 0, 0, columns * page_size - slots), value=NAN)
        pool[table] = filled.unflatten(1, (columns, page_size))
        pools.append(pool)
    table[torch.arange(columns) >= -(-inputs.lengths // page_size)[:, None]] = NO_PAGE
    narrow = inputs.lengths.dtype == torch.int64
    return inputs._replace(
        k_cache=pools[0], v_cache=pools[1], block_table=table.to(torch.int32 if narrow else torch.int64)
    )


def run(backend: str, inputs: Inputs, plan: TilePlan, scale: float | None = None) -> Results:
    """`backend` as for `on_device`, or ``triton``: the kernels alone, interpreted where there is no GPU."""
    if backend == "triton":
        from pdkernels.triton.speculative_attention import forward

        *tensors, table = inputs.map(lambda x: x.to(triton_device()))
        plan, scale = plan.to(triton_device()), inputs.q.shape[-1] ** -0.5 if scale is None else scale
        return Results(*(x.cpu() for x in forward(SpeculativeArguments(*tensors, *plan.arguments, scale, table))))
    device, name = on_device(backend)
    *tensors, table = inputs.map(lambda x: x.to(device))
    options = {"block_table": table, "scale": scale, "return_lse": True, "backend": name}
    return Results(*(x.cpu() for x in pd.speculative_attention(*tensors, plan.to(device), **options)))


def check(
    backend: str,
    inputs: Inputs,
    mask: SegmentMask | Sequence[SegmentMask],
    tiles: tuple[int, int] = (32, 32),
    scale: float | None = None,
    plan: TilePlan | None = None,
) -> Results:
    """`mask` is one for all sequences, or one for each; `plan` replaces the plan by `tiles`."""
    if isinstance(mask, SegmentMask):
        made, dense = mask.plan(*tiles), mask.dense()
    else:
        made, dense = TilePlan.stack([each.plan(*tiles) for each in mask]), torch.stack([each.dense() for each in mask])
    actual = run(backend, inputs, made if plan is None else plan, scale)
    inputs = inputs.map(lambda x: x.cpu())
    exact, same = (
        reference(*typed[:6], dense, block_table=typed.block_table, scale=scale)
        for typed in (inputs.to(torch.float64), inputs)
    )
    for name, *tensors in zip(Results._fields, actual, exact, same):
        assert_within_budget(*tensors, name=name)
    return actual


class Rows(NamedTuple):
    """Which new tokens are stored: arguments of speculative_attention_append_."""

    counts: Tensor | None = None
    source_index: Tensor | None = None

    def chosen(self, new: int, b: int) -> Sequence[int]:
        every = range(new) if self.source_index is None else self.source_index[b].tolist()
        return every if self.counts is None else every[: int(self.counts[b])]


def make_rows(inputs: Inputs, how: str) -> Rows:
    """``"all"``, ``"counts"``, ``"sources"`` (any, more than once too) or ``"both"``, as many as fit; entries that are
    not read are garbage."""
    generator, (batch, new), index = torch.Generator().manual_seed(3), inputs.q.shape[:2], inputs.lengths.dtype
    room = capacity(inputs) - inputs.lengths
    counts = (torch.rand(batch, generator=generator) * (room.clamp(max=new) + 1)).to(index)
    if how in ("all", "counts"):
        return Rows(counts if how == "counts" else None)
    columns = int(room.min()) if how == "sources" else new + 2
    sources = torch.randint(max(1, new), (batch, columns), generator=generator, dtype=index)
    if how == "sources":
        return Rows(None, sources)
    return Rows(counts, sources.where(torch.arange(columns) < counts[:, None], -(2**31)))


def capacity(inputs: Inputs) -> int:
    return inputs.k_cache.shape[1] * (1 if inputs.block_table is None else inputs.block_table.shape[1])


def with_room(inputs: Inputs, rows: Rows, page_size: int) -> Inputs:
    """The same cache in pages, which exist for the prefix and the rows stored after it, and no further."""
    stored = torch.tensor(
        [len(rows.chosen(inputs.q.shape[1], b)) for b in range(len(inputs.q))], dtype=inputs.lengths.dtype
    )
    return in_pages(inputs._replace(lengths=inputs.lengths + stored), page_size)._replace(lengths=inputs.lengths)


def run_append(backend: str, inputs: Inputs, plan: TilePlan, rows: Rows) -> tuple[Results, Tensor, Tensor]:
    """Results and the caches afterwards; those of `inputs` stay as they are."""
    inputs = inputs._replace(k_cache=copy_of(inputs.k_cache), v_cache=copy_of(inputs.v_cache))
    if backend == "triton":
        from pdkernels.triton.speculative_attention import forward

        *tensors, table = inputs.map(lambda x: copy_of(x, triton_device()))
        plan = plan.to(triton_device())
        moved = {name: None if x is None else x.to(triton_device()) for name, x in rows._asdict().items()}
        given = SpeculativeArguments(*tensors, *plan.arguments, inputs.q.shape[-1] ** -0.5, table, **moved)
        results = forward(given, append=True)
    else:
        device, name = on_device(backend)
        *tensors, table = inputs.map(lambda x: copy_of(x, torch.device(device)))
        options = {name: None if x is None else x.to(device) for name, x in rows._asdict().items()}
        results = pd.speculative_attention_append_(
            *tensors, plan.to(device), **options, block_table=table, return_lse=True, backend=name
        )
    return Results(*(x.cpu() for x in results)), tensors[3], tensors[4]


def check_append(
    backend: str, inputs: Inputs, mask: SegmentMask, rows: Rows, tiles: tuple[int, int] = (32, 32)
) -> None:
    """The results are those without storing, bit for bit, and no byte of the caches changes except the slots of the chosen rows."""
    plan = mask.plan(*tiles)
    results, *caches = run_append(backend, inputs, plan, rows)
    assert all(torch.equal(a, b) for a, b in zip(results, run(backend, inputs, plan)))
    assert_stored(caches, inputs, rows)


def assert_stored(caches: Sequence[Tensor], inputs: Inputs, rows: Rows) -> None:
    """These are the caches of the inputs with the chosen rows stored, and every other byte is as it was."""
    for after, before, new in zip(caches, inputs[3:5], inputs[1:3]):
        expected, slots = copy_of(before), before.shape[1]
        for b, length in enumerate(inputs.lengths.tolist()):
            for at, token in enumerate(rows.chosen(inputs.q.shape[1], b), length):
                page = b if inputs.block_table is None else int(inputs.block_table[b, at // slots])
                expected[page, at if inputs.block_table is None else at % slots] = new[b, token]
        assert torch.equal(whole(after).cpu(), whole(expected).cpu())


TAILS: dict[str, SegmentMask] = {
    "quadratic": masks.quadratic(6),
    "quadratic, interleaved": masks.quadratic(5, in_group="causal", layout="interleaved"),
    "candidates": masks.candidates(5, 9),
    "tree": masks.tree([max(-1, i - 1 - (i * i) % 7) for i in range(50)]),
    "block": masks.full(32),
    "causal": masks.causal(67),
    "one token": masks.causal(1),
    # The chunks of a round, which are drafted together after a cached plan.
    "planned chunks": masks.planned([Stage(3, (33, 20))])[3:56, 3:56],
    "planned chunks, sparse": masks.planned([Stage(3, (33, 20))], sparse=True)[3:56, 3:56],
    "rows that see the prefix alone": SegmentMask(
        [Segment(20, "none"), Segment(16, "causal"), Segment(5, "none", (range(1, 2),))]
    ),
    "nothing": masks.pack([], length=24),
}


def raw(inputs: Inputs, mask: SegmentMask, device: str) -> tuple:
    """Arguments of the raw op."""
    *tensors, table = inputs.map(lambda x: x.to(device))
    return (*tensors, *mask.plan(32, 48, device).arguments, 0.2, table)
