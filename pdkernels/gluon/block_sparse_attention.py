"""The forward pass of `pdkernels.triton.block_sparse_attention` for Hopper, in Gluon.

A program has a producer, one warp that copies queries, keys and values to shared memory by TMA, and two consumers, warp
groups of 64 rows each. A consumer's softmax runs beside its product with the values of the step before, and beside the
products of the other consumer. Tiles that need a mask come first: the first step looks at its mask anyway, and the loop
over full tiles has none.

Programs are persistent. They take tiles in descending order of visits, in turns of alternating direction: a program
that got the longest of one turn gets the shortest of the next. While a consumer stores its results, the producer has
begun to load the next tile.

A plan of 64 query rows pairs two heads that share keys and values, one for each consumer.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from pdkernels.gluon._steps import (
    add_values,
    next_scores,
    packed,
    ring_barriers,
    scores_layout,
    softmax,
    stage_of,
    step,
    steps_in_ranges,
    words_of,
)

LN_2, LOG2_E = gl.constexpr(0.6931471805599453), gl.constexpr(1.4426950408889634)


@gluon.jit
def turns_of(items):
    """How many tiles this program takes."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    turns = items // programs
    position = gl.where(turns % 2 == 0, program, programs - 1 - program)
    return turns + gl.where(position < items - turns * programs, 1, 0)


@gluon.jit
def tile_of(
    turn, plan_rows, lists, rows_stride, num_tiles, kv_heads, sequences, section,
    GROUP: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """The work of this program in its `turn`: (batch, kv head, first query head within its group, first row, and in the
    plan the offset of that row in its tile, where the ranges start, where the tiles that need a mask start; steps with
    a mask, steps without).

    Of `sequences` pairs of a sample and a KV head, `section` at a time are worked on, so that their keys and values
    stay in the L2 cache.
    """
    HEADS: gl.constexpr = 128 // BLOCK_Q if BLOCK_Q < 128 else 1
    CUTS: gl.constexpr = BLOCK_Q // 128 if BLOCK_Q > 128 else 1
    PARTS: gl.constexpr = GROUP // HEADS * CUTS
    program, programs = gl.program_id(0), gl.num_programs(0)
    item = turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)
    index = item % PARTS
    item = item // PARTS
    first = item // (section * num_tiles) * section
    item = item % (section * num_tiles)
    size = gl.minimum(section, sequences - first)
    sequence = first + item % size
    batch = sequence // kv_heads
    rows = plan_rows + batch.to(gl.int64) * rows_stride
    tile = gl.load(rows + item // size * 4 + 3)
    rows += tile * 4
    begin, middle, end = gl.load(rows), gl.load(rows + 1), gl.load(rows + 2)
    masked = (end - middle) * (BLOCK_K // BLOCK_N)
    full = steps_in_ranges(lists, begin, middle, BLOCK_K // BLOCK_N)
    row = index % CUTS * 128
    return batch, sequence % kv_heads, index // CUTS * HEADS, tile * BLOCK_Q + row, row, begin, middle, masked, full


@gluon.jit
def produce(
    q_desc, grad_desc, k_desc, v_desc, q_smem, grad_smem, k_smem, v_smem, q_ready, k_ready, v_ready, q_free, k_free,
    v_free, plan_rows, lists, rows_stride, num_tiles, kv_heads, sequences, section, items, GROUP: gl.constexpr,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies queries, gradients of their results if there are any, keys and values."""
    CUTS: gl.constexpr = BLOCK_K // BLOCK_N
    COPIES: gl.constexpr = 1 if grad_desc is None else 2
    ROWS: gl.constexpr = 0 if BLOCK_Q < 128 else 64
    HEADS: gl.constexpr = 1 if BLOCK_Q < 128 else 0
    count = 0
    for turn in range(0, turns_of(items)):
        batch, kv_head, in_group, start, row, begin, middle, masked, full = tile_of(
            turn, plan_rows, lists, rows_stride, num_tiles, kv_heads, sequences, section,
            GROUP, BLOCK_Q, BLOCK_K, BLOCK_N,
        )  # fmt: skip
        head = kv_head * GROUP + in_group
        for half in gl.static_range(2):
            mbarrier.wait(q_free.index(half), (turn & 1) ^ 1)
            mbarrier.expect(q_ready.index(half), q_desc.block_type.nbytes * COPIES)
            at = [batch, start + half * ROWS, head + half * HEADS, 0]
            tma.async_copy_global_to_shared(q_desc, at, q_ready.index(half), q_smem.index(half))
            if grad_desc is not None:
                tma.async_copy_global_to_shared(grad_desc, at, q_ready.index(half), grad_smem.index(half))
        pair = begin
        key = gl.load(lists + 2 * begin, mask=full > 0, other=0) * CUTS
        last = gl.load(lists + 2 * begin + 1, mask=full > 0, other=0) * CUTS
        # A tile that sees nothing takes one step, whose keys are all hidden.
        for i in range(0, gl.maximum(masked + full, 1)):
            position = key
            if i < masked:
                position = gl.load(lists + (middle + i // CUTS) * 2) * CUTS + i % CUTS
            else:
                key += 1
                if (key == last) & (i + 1 < masked + full):
                    pair += 1
                    key = gl.load(lists + 2 * pair) * CUTS
                    last = gl.load(lists + 2 * pair + 1) * CUTS
            stage, phase = stage_of(count, STAGES)
            at = [batch, position * BLOCK_N, kv_head, 0]
            mbarrier.wait(k_free.index(stage), phase ^ 1)
            mbarrier.expect(k_ready.index(stage), k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(k_desc, at, k_ready.index(stage), k_smem.index(stage))
            mbarrier.wait(v_free.index(stage), phase ^ 1)
            mbarrier.expect(v_ready.index(stage), v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(v_desc, at, v_ready.index(stage), v_smem.index(stage))
            count += 1


@gluon.jit
def words_of_step(
    lists, bitmaps, i, middle, row, kv_len, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_N: gl.constexpr
):
    """Which keys each row sees in the i-th of the steps that need a mask; -1: all of them, -2: none."""
    CUTS: gl.constexpr = BLOCK_K // BLOCK_N
    has_bitmap = i >= 0
    column = gl.maximum(i, 0) % CUTS * BLOCK_N
    tile = gl.load(lists + (middle + i // CUTS) * 2, mask=has_bitmap, other=0)
    bitmap = gl.load(lists + (middle + i // CUTS) * 2 + 1, mask=has_bitmap, other=-1)
    columns_left = gl.where(has_bitmap, kv_len - tile * BLOCK_K - column, gl.where(i == -1, BLOCK_N, 0))
    return words_of(bitmaps, bitmap, columns_left, row, column, BLOCK_Q, BLOCK_K, BLOCK_N)


@gluon.jit
def consume(
    o_desc, lse, sinks, q_smem, k_smem, v_smem, o_smem, q_ready, k_ready, v_ready, q_free, k_free, v_free,
    plan_rows, lists, bitmaps, rows_stride, num_tiles, q_len, kv_len, kv_heads, sequences, section, items, score_scale,
    HALF: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    FOLD_SCALE: gl.constexpr,
):  # fmt: skip
    OWN_ROW: gl.constexpr = 0 if BLOCK_Q < 128 else 64 * HALF
    OWN_HEAD: gl.constexpr = HALF if BLOCK_Q < 128 else 0
    SCORES: gl.constexpr = scores_layout(BLOCK_N)
    SUMS: gl.constexpr = scores_layout(HEAD_DIM)
    query = q_smem.reshape([64, HEAD_DIM])
    count = 0
    for turn in range(0, turns_of(items)):
        batch, kv_head, in_group, start, row, begin, middle, masked, full = tile_of(
            turn, plan_rows, lists, rows_stride, num_tiles, kv_heads, sequences, section,
            GROUP, BLOCK_Q, BLOCK_K, BLOCK_N,
        )  # fmt: skip
        head = kv_head * GROUP + in_group + OWN_HEAD
        start += OWN_ROW
        row += OWN_ROW
        mbarrier.wait(q_ready, turn & 1)
        m_i = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        l_i = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
        if sinks is not None:  # a score without a value, before all others
            sink = gl.load(sinks + head) * LOG2_E
            m_i = l_i + sink
            l_i = gl.where(m_i == float("-inf"), 0.0, 1.0)
        acc = gl.zeros([64, HEAD_DIM], gl.float32, SUMS)
        # The first step looks at its mask whatever it is.
        s = next_scores(query, k_smem, k_ready, count, BLOCK_N, STAGES)
        only = gl.where(masked > 0, 0, gl.where(full > 0, -1, -2))
        mask = words_of_step(lists, bitmaps, only, middle, row, kv_len, BLOCK_Q, BLOCK_K, BLOCK_N)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_free.index(count % STAGES))
        p, alpha, m_i, l_i = softmax(s, mask, m_i, l_i, score_scale, FOLD_SCALE)
        weights = packed(p, v_smem.dtype)
        count += 1
        for i in range(1, masked):
            mask = words_of_step(lists, bitmaps, i, middle, row, kv_len, BLOCK_Q, BLOCK_K, BLOCK_N)
            acc, weights, m_i, l_i = step(
                acc, weights, query, k_smem, v_smem, k_ready, v_ready, k_free, v_free, count, mask, m_i, l_i,
                score_scale, BLOCK_N, STAGES, FOLD_SCALE,
            )  # fmt: skip
            count += 1
        for _ in range(gl.maximum(masked, 1), masked + full):
            acc, weights, m_i, l_i = step(
                acc, weights, query, k_smem, v_smem, k_ready, v_ready, k_free, v_free, count, None, m_i, l_i,
                score_scale, BLOCK_N, STAGES, FOLD_SCALE,
            )  # fmt: skip
            count += 1
        # No product reads the queries any more.
        mbarrier.arrive(q_free)
        acc = add_values(acc, weights, v_smem, v_ready, count - 1, BLOCK_N, STAGES)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_free.index((count - 1) % STAGES))

        nothing = l_i == 0.0
        inverse = gl.convert_layout(1.0 / gl.where(nothing, 1.0, l_i), gl.SliceLayout(1, SUMS))
        # A row without weights is 0, even if its zeros met infinite values.
        acc = gl.where(gl.convert_layout(nothing, gl.SliceLayout(1, SUMS))[:, None], 0.0, acc * inverse[:, None])
        tma.store_wait(0)
        o_smem.reshape([64, HEAD_DIM]).store(acc.to(v_smem.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(o_desc, [batch, start, head, 0], o_smem)
        rows = gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
        lse_rows = lse + ((batch * kv_heads * GROUP + head).to(gl.int64) * q_len + start)
        gl.store(lse_rows + rows, (m_i + gl.log2(l_i)) * LN_2, mask=start + rows < q_len)
    tma.store_wait(0)


_CHANGING = ["rows_stride", "num_tiles", "q_len", "kv_len", "kv_heads", "sequences", "section", "items"]


@gluon.jit(do_not_specialize=_CHANGING)
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, lse, sinks, plan_rows, lists, bitmaps,
    rows_stride, num_tiles, q_len, kv_len, kv_heads, sequences, section, items, score_scale,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, FOLD_SCALE: gl.constexpr,
):  # fmt: skip
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2, 1, 64, 1, HEAD_DIM], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, BLOCK_N, 1, HEAD_DIM], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, BLOCK_N, 1, HEAD_DIM], v_desc.layout)
    o_smem = gl.allocate_shared_memory(o_desc.dtype, [2, 1, 64, 1, HEAD_DIM], o_desc.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_free.index(i), count=1)
    k_ready, v_ready, k_free, v_free = ring_barriers(STAGES)
    # TMA signals the barriers through the asynchronous proxy.
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                consume,
                (
                    o_desc, lse, sinks, q_smem.index(0), k_smem, v_smem, o_smem.index(0), q_ready.index(0), k_ready,
                    v_ready, q_free.index(0), k_free, v_free, plan_rows, lists, bitmaps, rows_stride, num_tiles,
                    q_len, kv_len, kv_heads, sequences, section, items, score_scale, 0, GROUP, HEAD_DIM, BLOCK_Q,
                    BLOCK_K, BLOCK_N, STAGES, FOLD_SCALE,
                ),
            ),
            (
                consume,
                (
                    o_desc, lse, sinks, q_smem.index(1), k_smem, v_smem, o_smem.index(1), q_ready.index(1), k_ready,
                    v_ready, q_free.index(1), k_free, v_free, plan_rows, lists, bitmaps, rows_stride, num_tiles,
                    q_len, kv_len, kv_heads, sequences, section, items, score_scale, 1, GROUP, HEAD_DIM, BLOCK_Q,
                    BLOCK_K, BLOCK_N, STAGES, FOLD_SCALE,
                ),
            ),
            (
                produce,
                (
                    q_desc, None, k_desc, v_desc, q_smem, None, k_smem, v_smem, q_ready, k_ready, v_ready, q_free,
                    k_free, v_free, plan_rows, lists, rows_stride, num_tiles, kv_heads, sequences, section, items,
                    GROUP, BLOCK_Q, BLOCK_K, BLOCK_N, STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
