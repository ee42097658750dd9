"""Statistics of ``hidden @ weight^T`` over the vocabulary without storing the product, in Triton.

A program owns a tile of rows and a part of the vocabulary, which it reads one tile of columns at a time: the product
stays in registers and updates the running statistics. A second kernel merges the parts, one row per program.

Logits are compared as integers that order them like `torch.argmax` does (see `_order`), so that one maximum serves
numbers, infinities and NaN; among equals the lowest id is taken. What a row gets does not depend on how many rows there
are: parts follow from the size of the vocabulary, and where tiles have more rows for many rows, a warp still holds
whole rows of a tile in the same way, so that sums are added up in the same order. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdkernels.triton import blocking as _blocking


class Tiling(NamedTuple):
    """Blocking of the product: rows and columns of a tile, and the depth of a step along the hidden dimension."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    """Stages of the load pipeline."""
    abreast: int = 1
    """Tiles of columns that are multiplied at a time, 1 or 2; each joins the statistics by itself."""


# By architecture, for up to 64 rows, for more, and for sampling; those not listed use sm_80's, which fits into 99 KiB
# of shared memory. With few rows only the rate at which weights arrive counts: 64 rows ask less of the tensor cores
# than that rate would let them do, so no smaller tile is needed, which would round differently.   - Hopper: L2 delivers
# some 28 bytes a cycle to an SM, and tiles of 64 x 128 ask for 96 while the tensor cores are     busy, two abreast of
# 128 rows for 48. A warp holds 16 whole rows of a tile in either, and so the order of sums is     the same.   - For
# sampling 8 warps share a tile of 64 rows, which leaves registers for random words: 4 would spill them by the
# kilobyte.   - float32 runs on the plain FMA units, where large tiles spill. Registers and shared memory are in
# tests/triton_budgets.json.
_TABLE: dict[str, tuple[Tiling, Tiling, Tiling]] = {
    "sm_90": (Tiling(64, 128, 64, 4, 4, 2), Tiling(128, 128, 64, 8, 4, 2), Tiling(64, 128, 64, 8, 4)),
    "sm_100": (Tiling(64, 128, 64, 8, 4),) * 3,
    "sm_80": (Tiling(64, 128, 32, 8, 4),) * 3,
    "fp32": (Tiling(32, 64, 32, 4, 2),) * 3,
}
FEW_ROWS = 64

# Most parts of a vocabulary: about two for each SM of a large GPU, to keep the tail short.
MAX_PARTS = 256

# In the range of float32: 1 / T of a smaller temperature would be infinite.
LARGEST = torch.finfo(torch.float32).max

# The order of absent columns: below that of -inf.
NONE = tl.constexpr(-(2**31))
FAR = tl.constexpr(2**31 - 1)


@triton.jit
def _order(x):
    """int32 that compares as `torch.argmax` compares floats: NaN above infinity, -0.0 like 0.0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, FAR, bits ^ ((bits >> 31) & FAR))


@triton.jit
def _value(order):
    """The inverse of `_order`."""
    return (order ^ ((order >> 31) & FAR)).to(tl.float32, bitcast=True)


@triton.jit
def _first(order, ids, axis: tl.constexpr):
    """(largest, lowest of its ids) along an axis."""
    best = tl.max(order, axis)
    return best, tl.min(tl.where(order == tl.expand_dims(best, axis), ids, FAR), axis)


@triton.jit
def _noise(seed, step, position, start, COLUMNS: tl.constexpr):
    """``ln(-ln u)`` for the columns from `start` on, a multiple of 4, with one seed or one per row.

    u = (word + 0.5) / 2**32, accurate at both ends.
    """
    quad = start // 4 + tl.arange(0, COLUMNS // 4)
    w0, w1, w2, w3 = tl.philox(seed, quad[None, :], position[:, None], step[:, None], tl.zeros_like(quad)[None, :])
    bits = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (position.shape[0], COLUMNS)).to(
        tl.int32, bitcast=True
    )
    # Upper half: u = 1 - d, where d is known exactly and 1 - d is not.
    upper = bits < 0
    d = (tl.where(upper, ~bits, bits).to(tl.float32) + 0.5) * 2.0**-32
    u = tl.where(upper, 1.0 - d, d)
    e = -tl.log(u)
    # log1p(-d) after Kahan: rounding 1 - d affects the logarithm and the distance from 1 alike.
    e = tl.where(upper, tl.where(u == 1.0, d, e * (d / tl.where(u == 1.0, 1.0, 1.0 - u))), e)
    return tl.log(e)


@triton.jit
def _row(row_index, slot, mask, rows):
    """(row of `hidden`, whether there is one) of each slot; an index out of range is no row."""
    row = slot.to(tl.int64)
    if row_index is not None:
        row = tl.load(row_index + slot, mask=mask, other=-1).to(tl.int64)
    exists = mask & (row >= 0) & (row < rows)
    return tl.where(exists, row, 0), exists


@triton.jit
def _nothing(ROWS: tl.constexpr, TOP: tl.constexpr, TOP_WIDTH: tl.constexpr):
    """Statistics of no column: maximum, sum, weighted sum; order, id and logit of the draw; orders and ids of the TOP
    largest in any order, where padding is never the smallest."""
    rank = tl.arange(0, TOP_WIDTH)[None, :]
    zeros = tl.zeros((ROWS,), tl.float32)
    nobody = tl.zeros((ROWS,), tl.int32)
    top = tl.zeros((ROWS, TOP_WIDTH), tl.int32) + tl.where(rank < TOP, NONE, FAR)
    top_ids = tl.zeros((ROWS, TOP_WIDTH), tl.int32) - 1 - rank
    return zeros - float("inf"), zeros, zeros, nobody + NONE, nobody, zeros, top, top_ids


@triton.jit
def _join(statistics, logits, start, end, scale, temperature, seed, step, position, suppressed,
          TOP: tl.constexpr, SAMPLED: tl.constexpr, SUPPRESSED: tl.constexpr):  # fmt: skip
    """The statistics after the columns from `start` on, up to `end`, joined them."""
    m_i, l_i, weighted, best, best_id, best_logit, top, top_ids = statistics
    column = start + tl.arange(0, logits.shape[1])
    real = (column < end)[None, :]
    for i in tl.static_range(SUPPRESSED):
        logits = tl.where((2 * column + 3 == suppressed[i])[None, :], float("-inf"), logits)

    # Sums of exp(x - m_i) and of (x - m_i) exp(x - m_i), x = scale * logit. A sum of 0 must not become 0 * -inf.
    counting = tl.where(real, logits, float("-inf"))
    m_ij = tl.maximum(m_i, tl.max(counting, 1))
    origin = tl.where(m_ij == float("-inf"), 0.0, m_ij)
    x = (counting - origin[:, None]) * scale
    p = tl.exp(x)
    moved = (m_i - origin) * scale
    alpha = tl.exp(moved)
    weighted = (weighted + tl.where(moved == float("-inf"), 0.0, moved * l_i)) * alpha
    weighted += tl.sum(tl.where(x == float("-inf"), 0.0, x * p), 1)
    l_i = l_i * alpha + tl.sum(p, 1)

    if SAMPLED:
        scores = logits - temperature * _noise(seed, step, position, start, logits.shape[1])
        tile_best, tile_best_id = _first(tl.where(real, _order(scores), NONE), column[None, :], 1)
        tile_best_logit = tl.sum(tl.where(column[None, :] == tile_best_id[:, None], logits, 0.0), 1)
        better = tile_best > best
        best = tl.where(better, tile_best, best)
        best_id = tl.where(better, tile_best_id, best_id)
        best_logit = tl.where(better, tile_best_logit, best_logit)

    order = tl.where(real, _order(logits), NONE)
    for _ in tl.static_range(TOP):
        tile_best, tile_best_id = _first(order, column[None, :], 1)
        order = tl.where(column[None, :] == tile_best_id[:, None], NONE, order)
        # Replaces the smallest, of equals the one with the highest id. An equal one has a higher id still.
        smallest = tl.min(top, 1)
        last = tl.max(tl.where(top == smallest[:, None], top_ids, NONE), 1)
        replaced = (tile_best > smallest)[:, None] & (top == smallest[:, None]) & (top_ids == last[:, None])
        top = tl.where(replaced, tile_best[:, None], top)
        top_ids = tl.where(replaced, tile_best_id[:, None], top_ids)
    return m_ij, l_i, weighted, best, best_id, best_logit, top, top_ids


@triton.jit
def _weights(weight, tile, along, k, vocabulary, weight_stride, weight_step,
             COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """(COLUMNS, STEP) of a tile's weights; past the vocabulary its last row."""
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    pointers = weight + tl.minimum(column, vocabulary - 1).to(tl.int64)[:, None] * weight_stride
    pointers += ((k + along) * weight_step)[None, :]
    if DEPTH % STEP != 0:
        return tl.load(pointers, mask=(k + along < DEPTH)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit(do_not_specialize=["slots", "rows", "row_tiles", "num_parts", "tiles", "step"])
def _parts_kernel(
    hidden, weight, row_index, positions, seeds, steps, step, sums, samples, orders, ids,
    hidden_stride, hidden_step, weight_stride, weight_step, slots, rows, vocabulary, row_tiles, num_parts, tiles,
    scale, temperature, seed: "i64", suppressed,  # noqa: F821, UP037  (a type of Triton)
    DEPTH: tl.constexpr, TOP: tl.constexpr, TOP_WIDTH: tl.constexpr, SAMPLED: tl.constexpr, SUPPRESSED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, FAR_APART: tl.constexpr, ABREAST: tl.constexpr,
):  # fmt: skip
    # Tiles of rows that read the same weights are adjacent, for the L2 cache.
    slot = (tl.program_id(0) % row_tiles) * ROWS + tl.arange(0, ROWS)
    part_index = tl.program_id(0) // row_tiles
    row, exists = _row(row_index, slot, slot < slots, rows)
    if tl.max(exists.to(tl.int32), 0) == 0:
        return
    along = tl.arange(0, STEP)
    if FAR_APART:
        along = along.to(tl.int64)
    hidden_rows = hidden + row[:, None] * hidden_stride
    position = row.to(tl.int32)
    number = tl.zeros((ROWS,), tl.int32) + step
    if SAMPLED and positions is not None:
        position = tl.load(positions + slot, mask=exists, other=0).to(tl.int32)
    if SAMPLED and steps is not None:
        number = tl.load(steps + slot, mask=exists, other=0).to(tl.int32)
    key = seed
    if SAMPLED and seeds is not None:
        key = tl.load(seeds + slot, mask=exists, other=0).to(tl.int64)[:, None]

    statistics = _nothing(ROWS, TOP, TOP_WIDTH)
    end = tl.minimum((part_index + 1) * tiles, tl.cdiv(vocabulary, COLUMNS))
    last = tl.minimum(end * COLUMNS, vocabulary)
    for tile in range(part_index * tiles, end, ABREAST):
        logits = tl.zeros((ROWS, COLUMNS), tl.float32)
        second_logits = logits
        for k in range(0, DEPTH, STEP):
            mask = exists[:, None]
            if DEPTH % STEP != 0:
                mask = mask & (k + along < DEPTH)[None, :]
            w = _weights(weight, tile, along, k, vocabulary, weight_stride, weight_step, COLUMNS, DEPTH, STEP)
            h = tl.load(hidden_rows + ((k + along) * hidden_step)[None, :], mask=mask, other=0.0)
            logits = tl.dot(h, tl.trans(w), logits, input_precision="ieee")
            if ABREAST == 2:
                w = _weights(weight, tile + 1, along, k, vocabulary, weight_stride, weight_step, COLUMNS, DEPTH, STEP)
                second_logits = tl.dot(h, tl.trans(w), second_logits, input_precision="ieee")
        statistics = _join(
            statistics, logits, tile * COLUMNS, last, scale, temperature, key, number, position, suppressed,
            TOP, SAMPLED, SUPPRESSED,
        )  # fmt: skip
        if ABREAST == 2:  # past the part's end it changes nothing
            statistics = _join(
                statistics, second_logits, (tile + 1) * COLUMNS, last, scale, temperature, key, number, position,
                suppressed, TOP, SAMPLED, SUPPRESSED,
            )  # fmt: skip

    m_i, l_i, weighted, best, best_id, best_logit, top, top_ids = statistics
    result = slot.to(tl.int64) * num_parts + part_index
    tl.store(sums + 3 * result, m_i, mask=exists)
    tl.store(sums + 3 * result + 1, l_i, mask=exists)
    tl.store(sums + 3 * result + 2, weighted, mask=exists)
    if SAMPLED:
        tl.store(samples + 3 * result, best, mask=exists)
        tl.store(samples + 3 * result + 1, best_id, mask=exists)
        tl.store(samples + 3 * result + 2, best_logit.to(tl.int32, bitcast=True), mask=exists)
    rank = tl.arange(0, TOP_WIDTH)[None, :]
    tl.store(orders + result[:, None] * TOP + rank, top, mask=exists[:, None] & (rank < TOP))
    tl.store(ids + result[:, None] * TOP + rank, top_ids, mask=exists[:, None] & (rank < TOP))


@triton.jit(do_not_specialize=["slots", "rows", "num_parts"])
def _merge_kernel(
    row_index, sums, samples, orders, ids, out_ids, out_probs, out_top_ids, out_top_probs, out_margin, out_entropy,
    out_logsumexp, slots, rows, num_parts, scale, TOP: tl.constexpr, TOP_WIDTH: tl.constexpr,
    TOP_WANTED: tl.constexpr, SAMPLED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    _, exists = _row(row_index, slot, slot < slots, rows)
    first = slot.to(tl.int64) * num_parts
    part_index = tl.arange(0, PARTS)
    mask = (part_index < num_parts) & exists
    m_i = tl.load(sums + 3 * (first + part_index), mask=mask, other=float("-inf"))
    l_i = tl.load(sums + 3 * (first + part_index) + 1, mask=mask, other=0.0)
    weighted = tl.load(sums + 3 * (first + part_index) + 2, mask=mask, other=0.0)
    origin = tl.max(m_i, 0)
    origin = tl.where(origin == float("-inf"), 0.0, origin)
    moved = (m_i - origin) * scale
    alpha = tl.exp(moved)
    weighted = tl.sum((weighted + tl.where(moved == float("-inf"), 0.0, moved * l_i)) * alpha, 0)
    l_i = tl.sum(l_i * alpha, 0)
    # The sum is 0 only if all logits are -inf or there is no row: the largest adds 1.
    empty = l_i == 0.0
    divisor = tl.where(empty, 1.0, l_i)

    rank = tl.arange(0, TOP_WIDTH)[None, :]
    top_mask = mask[:, None] & (rank < TOP)
    order = tl.load(orders + (first + part_index[:, None]) * TOP + rank, mask=top_mask, other=NONE)
    id = tl.load(ids + (first + part_index[:, None]) * TOP + rank, mask=top_mask, other=FAR)
    chosen = tl.zeros((), tl.int32)
    logit = tl.zeros((), tl.float32)
    margin = tl.zeros((), tl.float32)
    for k in tl.static_range(TOP):
        best, best_id = _first(tl.reshape(order, (PARTS * TOP_WIDTH,)), tl.reshape(id, (PARTS * TOP_WIDTH,)), 0)
        order = tl.where(id == best_id, NONE, order)
        # A vocabulary of one has no second token.
        p = tl.where(best == NONE, 0.0, tl.exp((_value(best) - origin) * scale) / divisor)
        if k == 0:
            chosen = best_id
            logit = _value(best)
            margin = p
        if k == 1:
            margin -= p
        if k < TOP_WANTED:
            tl.store(out_top_ids + slot.to(tl.int64) * TOP_WANTED + k, tl.where(empty, -1, best_id).to(tl.int64))
            tl.store(out_top_probs + slot.to(tl.int64) * TOP_WANTED + k, tl.where(empty, 0.0, p))
    if SAMPLED:
        scores = tl.load(samples + 3 * (first + part_index), mask=mask, other=NONE)
        sampled_ids = tl.load(samples + 3 * (first + part_index) + 1, mask=mask, other=FAR)
        _, chosen = _first(scores, sampled_ids, 0)
        logits = tl.load(samples + 3 * (first + part_index) + 2, mask=mask, other=0).to(tl.float32, bitcast=True)
        logit = tl.sum(tl.where(sampled_ids == chosen, logits, 0.0), 0)
    tl.store(out_ids + slot, tl.where(empty, -1, chosen).to(tl.int64))
    tl.store(out_probs + slot, tl.where(empty, 0.0, tl.exp((logit - origin) * scale) / divisor))
    tl.store(out_margin + slot, tl.where(empty, 0.0, margin))
    tl.store(out_entropy + slot, tl.where(empty, 0.0, tl.log(divisor) - weighted / divisor))
    tl.store(out_logsumexp + slot, tl.where(empty, float("-inf"), origin * scale + tl.log(divisor)))


def forward(
    hidden: Tensor,
    weight: Tensor,
    temperature: float,
    seed: int,
    seeds: Tensor | None,
    step: int,
    steps: Tensor | None,
    positions: Tensor | None,
    row_index: Tensor | None,
    suppress: Sequence[int],
    top_k: int,
    distribution: str,
) -> tuple[Tensor, ...]:
    """``(ids, probs, top_ids, top_probs, margin, entropy, logsumexp)`` of ``hidden @ weight^T``, without filters.

    `hidden` is ``(rows, E)``, `weight` ``(V, E)``; `seeds`, `steps`, `positions` and `row_index` are contiguous and all
    of the size of the results.
    """
    rows, depth = hidden.shape
    vocabulary = weight.shape[0]
    slots = rows if row_index is None else row_index.numel()
    top = min(max(top_k, 2), 16)  # the margin takes two
    sampled = temperature > 0
    tiling = choose_tiling(hidden, slots, sampled)
    tiles, num_parts = choose_parts(vocabulary, tiling.columns)
    scale = min(1.0 / temperature, LARGEST) if distribution == "sampling" and sampled else 1.0

    make = lambda *size, dtype: torch.empty(size, dtype=dtype, device=hidden.device)  # noqa: E731
    ids, top_ids = make(slots, dtype=torch.int64), make(slots, top_k, dtype=torch.int64)
    probs, margin, entropy, logsumexp = (make(slots, dtype=torch.float32) for _ in range(4))
    top_probs = make(slots, top_k, dtype=torch.float32)
    results = (ids, probs, top_ids, top_probs, margin, entropy, logsumexp)
    if slots == 0:
        return results
    sums = make(slots, num_parts, 3, dtype=torch.float32)
    samples = make(slots, num_parts, 3, dtype=torch.int32) if sampled else None
    part_orders, part_ids = (make(slots, num_parts, top, dtype=torch.int32) for _ in range(2))
    row_tiles = triton.cdiv(slots, tiling.rows)
    width = triton.next_power_of_2(top)
    _parts_kernel[(row_tiles * num_parts,)](
        hidden, weight, row_index, positions, seeds, steps, _low_word(step), sums, samples, part_orders, part_ids,
        *hidden.stride(), *weight.stride(), slots, rows, vocabulary, row_tiles, num_parts, tiles,
        # Triton specializes numbers that are 1 or a multiple of 16; these must not be.
        scale, temperature, seed, tuple(2 * token + 3 for token in suppress),
        DEPTH=depth, TOP=top, TOP_WIDTH=width, SAMPLED=sampled, SUPPRESSED=len(suppress),
        ROWS=tiling.rows, COLUMNS=tiling.columns, STEP=tiling.depth,
        # Offsets along a row of a transposed matrix may not fit into 32 bits.
        FAR_APART=max(abs(hidden.stride(1)), abs(weight.stride(1))) * depth >= 2**31, ABREAST=tiling.abreast,
        num_warps=tiling.warps, num_stages=tiling.stages, **_blocking.CONTRACTED,
    )  # fmt: skip
    _merge_kernel[(slots,)](
        row_index, sums, samples, part_orders, part_ids, *results, slots, rows, num_parts, scale, TOP=top,
        TOP_WIDTH=width, TOP_WANTED=top_k, SAMPLED=sampled, PARTS=triton.next_power_of_2(num_parts), num_warps=4,
        **_blocking.CONTRACTED,
    )  # fmt: skip
    return results


def choose_tiling(hidden: Tensor, rows: int, sampled: bool) -> Tiling:
    few_rows, many_rows, for_sampling = _TABLE[
        _blocking.architecture(hidden.device) if hidden.element_size() == 2 else "fp32"
    ]
    return for_sampling if sampled else few_rows if rows <= FEW_ROWS else many_rows


def choose_parts(vocabulary: int, columns: int) -> tuple[int, int]:
    """(tiles of a part, parts): of the vocabulary alone, so that a row's sums have the same order in any batch.

    >>> choose_parts(126464, 128), choose_parts(100, 128)
    ((4, 247), (1, 1))
    """
    tiles = triton.cdiv(vocabulary, columns)
    of_a_part = triton.cdiv(tiles, MAX_PARTS)
    return of_a_part, triton.cdiv(tiles, of_a_part)


def _low_word(number: int) -> int:
    """Reinterprets the low 32 bits as an int32."""
    return (number + 2**31) % 2**32 - 2**31
