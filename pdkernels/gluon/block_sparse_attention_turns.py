"""What `one_pass_kernel` needs before it starts, in Gluon: delta and the log-sum-exp of each row, counters of 0, and the visits of all
tiles of keys, each with its turn.

At a query tile, tiles of keys take turns in the order in which their programs start: those with the most visits first, of equals
the first. A tile of keys walks the query tiles that see it in one order too: those with the most visits first, but of equals the last.
In causal masks and in two streams each tile of keys is seen by the query tiles that see the ones after it, and by more: all programs walk
one list to different ends, and none overtakes another one that it would have to wait for. Under a window, where tiles have equally
many, a program comes to a tile when the one before it has left it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pdkernels.gluon._steps import rows_layout, steps_in_ranges
from pdkernels.gluon.block_sparse_attention_backward import saved_rows

TURN = gl.constexpr(4)
"""Words of a visit: query tile, bitmap or -1, twice the number of tiles before it and 1 if it is the last, and one unused."""


@gluon.jit
def listed_before(order, count, lists, begin, middle, end):
    """How many of the first `count` tiles of an order are in a list of ranges and tiles."""
    POSITIONS: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    total = 0
    for first in range(0, count, 128):
        position = first + gl.arange(0, 128, layout=POSITIONS)
        tile = gl.load(order + position * 4, mask=position < count, other=-1)
        in_list = gl.zeros([128], gl.int32, POSITIONS)
        for pair in range(begin, middle):
            in_range = (tile >= gl.load(lists + 2 * pair)) & (tile < gl.load(lists + 2 * pair + 1))
            in_list |= in_range.to(gl.int32)
        for entry in range(middle, end):
            in_list |= (tile == gl.load(lists + 2 * entry)).to(gl.int32)
        total += gl.sum(in_list, 0)
    return total


@gluon.jit
def as_many_visits(side, tiles, lists, visits):
    """Where the tiles with so many visits begin and end in the order of one side."""
    POSITIONS: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    above, level = 0, 0
    for first in range(0, tiles, 128):
        position = first + gl.arange(0, 128, layout=POSITIONS)
        there = position < tiles
        row = side + gl.load(side + position * 4 + 3, mask=there, other=0) * 4
        begin, middle = gl.load(row), gl.load(row + 1)
        total = gl.load(row + 2) - middle
        for i in range(0, gl.max(middle - begin, 0)):
            pair = lists + 2 * (begin + i)
            in_ranges = begin + i < middle
            total += gl.load(pair + 1, mask=in_ranges, other=0) - gl.load(pair, mask=in_ranges, other=0)
        above += gl.sum((there & (total > visits)).to(gl.int32), 0)
        level += gl.sum((there & (total == visits)).to(gl.int32), 0)
    return above, above + level


@gluon.jit(do_not_specialize=["rows_stride", "turns_stride", "q_tiles", "k_tiles"])
def describe_kernel(turns, plan_rows, lists, rows_stride, turns_stride, q_tiles, k_tiles):
    """A program for each pair of tiles of each plan: writes the visit of the tile of keys to that of queries, if there is one, to its
    place in the list of the tile of keys."""
    pair = gl.program_id(0)
    plan = (pair // (q_tiles * k_tiles)).to(gl.int64)
    query_position, key_position = pair % q_tiles, pair // q_tiles % k_tiles
    turns += plan * turns_stride
    of_q = plan_rows + plan * rows_stride
    of_k = of_q + q_tiles * 4
    query, key = gl.load(of_q + query_position * 4 + 3), gl.load(of_k + key_position * 4 + 3)
    row, column = of_q + query * 4, of_k + key * 4
    begin, middle, end = gl.load(row), gl.load(row + 1), gl.load(row + 2)
    bitmap = -2
    for each in range(begin, middle):
        in_range = (key >= gl.load(lists + 2 * each)) & (key < gl.load(lists + 2 * each + 1))
        bitmap = gl.where(in_range, -1, bitmap)
    for entry in range(middle, end):
        bitmap = gl.where(gl.load(lists + 2 * entry) == key, gl.load(lists + 2 * entry + 1), bitmap)
    if bitmap >= -1:
        before = listed_before(of_k + 3, key_position, lists, begin, middle, end)
        visits = steps_in_ranges(lists, begin, middle, 1) + end - middle
        # Of as many visits, the last one comes first.
        first, behind = as_many_visits(of_q, q_tiles, lists, visits)
        begin, middle, end = gl.load(column), gl.load(column + 1), gl.load(column + 2)
        slot = listed_before(of_q + 3, first, lists, begin, middle, end)
        slot += listed_before(of_q + 3, behind, lists, begin, middle, end)
        slot -= listed_before(of_q + 3, query_position + 1, lists, begin, middle, end)
        at = turns + (key * q_tiles + slot) * TURN
        gl.store(at, query)
        gl.store(at + 1, bitmap)
        gl.store(at + 2, 2 * before + gl.where(before == visits - 1, 1, 0))


@gluon.jit
def clear_rows(dq, rows_left, stride, HEAD_DIM: gl.constexpr):
    """Stores zeros to 64 rows."""
    LAYOUT: gl.constexpr = rows_layout(HEAD_DIM, 4)
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LAYOUT))
    at = (rows.to(gl.int64) * stride)[:, None] + columns[None, :]
    gl.store(dq + at, gl.zeros([64, HEAD_DIM], dq.dtype.element_ty, LAYOUT), mask=(rows < rows_left)[:, None])


_CHANGING = [
    "grad_stride_b", "grad_stride", "grad_stride_h", "rows_stride", "q_blocks", "q_len", "heads",
]  # fmt: skip


@gluon.jit(do_not_specialize=_CHANGING)
def prepare_kernel(
    grad_out, out, lse, grad_lse, lse_b, delta, dq, counters, plan_rows, grad_stride_b, grad_stride, grad_stride_h,
    rows_stride, q_blocks, q_len, heads, HEAD_DIM: gl.constexpr, BLOCK_Q: gl.constexpr,
):  # fmt: skip
    """A program for each 64 rows of a head."""
    item = gl.program_id(0)
    start = item % q_blocks * 64
    head = item // q_blocks % heads
    batch = item // q_blocks // heads
    sequence, first = batch.to(gl.int64), start.to(gl.int64)
    in_result = ((sequence * q_len + first) * heads + head) * HEAD_DIM
    saved_rows(
        grad_out, out, lse, grad_lse, lse_b, delta,
        sequence * grad_stride_b + first * grad_stride + head.to(gl.int64) * grad_stride_h, in_result,
        (sequence * heads + head) * q_len + first, item.to(gl.int64) * 64, grad_stride, heads * HEAD_DIM,
        q_len - start, HEAD_DIM, 64,
    )  # fmt: skip
    gl.store(counters + 1 + item, 0)
    if item == 0:
        gl.store(counters, 0)
    row = plan_rows + sequence * rows_stride + start // BLOCK_Q * 4
    if gl.load(row) == gl.load(row + 2):
        clear_rows(dq + in_result, q_len - start, heads * HEAD_DIM, HEAD_DIM)
