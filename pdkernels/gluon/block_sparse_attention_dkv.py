"""dK and dV of attention over a tile plan for Hopper, in Gluon: what `_dkv_kernel` of
`pdkernels.triton.block_sparse_attention` computes.

A program takes 128 keys, 64 for each of two consumers, whose dK and dV stay in registers. The producer brings keys and
values once, then queries and gradients of the results, 64 rows a step, with the log-sum-exp and delta of these rows
that the kernel of dQ wrote. Scores are transposed, keys by queries, so that weights and their gradients are left
operands straight from registers. A step starts its two products with queries and with gradients, and then the one that
adds the step before to dK. The weights are computed beside the last two of these, their gradients beside the product
that adds the weights to dV. Queries are freed a step later than gradients.

Each tile has a program, and the longest start first: persistent programs would keep what they need for the next tile in
registers, of which there are none left. Where keys are few, the query heads that share them are dealt out to several
programs, as the Triton kernel does, whose sums are added up in order. Every sum has one order, so gradients repeat bit
for bit.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from pdkernels.gluon._steps import (
    add_values,
    hidden,
    next_scores,
    packed,
    ring_barriers,
    scores_layout,
    stage_of,
    steps_in_ranges,
)


@gluon.constexpr_function
def columns_layout(queries):
    """The layout of ``(2, 32, queries)`` scores that a reshape to ``(64, queries)`` keeps in their threads."""
    columns = [[0, 0, 8 << i] for i in range((queries // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 8, 0], *columns],
        lane_bases=[[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[[0, 16, 0], [1, 0, 0]],
        block_bases=[],
        shape=[2, 32, queries],
    )


@gluon.jit
def key_tile_of(
    item, plan_rows, lists, rows_stride, kv_heads, sequences, pieces, piece,
    GROUP: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """The work of the item-th program: (batch, KV head, part of its query heads, first of them, how many; first key, and in
    the plan the offset of that key in its tile, where the ranges start, where the tiles that need a mask start; steps
    of a head with a mask, and without)."""
    CUTS: gl.constexpr = BLOCK_K // 128
    sequence = item % sequences
    item = item // sequences
    column = item % CUTS * 128
    item = item // CUTS
    piece_index = item % pieces
    batch = sequence // kv_heads
    rows = plan_rows + batch.to(gl.int64) * rows_stride
    tile = gl.load(rows + item // pieces * 4 + 3)
    rows += tile * 4
    begin, middle, end = gl.load(rows), gl.load(rows + 1), gl.load(rows + 2)
    masked = (end - middle) * (BLOCK_Q // BLOCK_M)
    full = steps_in_ranges(lists, begin, middle, BLOCK_Q // BLOCK_M)
    kv_head = sequence % kv_heads
    num_heads = gl.minimum(piece, GROUP - piece_index * piece)
    head = kv_head * GROUP + piece_index * piece
    return batch, kv_head, piece_index, head, num_heads, tile * BLOCK_K + column, column, begin, middle, masked, full


@gluon.jit
def produce_queries(
    q_desc, grad_desc, lse_desc, delta_desc, k_desc, v_desc, q_smem, grad_smem, lse_smem, delta_smem, k_smem, v_smem,
    kv_ready, q_ready, grad_ready, q_free, grad_free,
    plan_rows, lists, rows_stride, kv_heads, sequences, pieces, piece,
    GROUP: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    CUTS: gl.constexpr = BLOCK_Q // BLOCK_M
    batch, kv_head, piece_index, first_head, num_heads, start, column, begin, middle, masked, full = key_tile_of(
        gl.program_id(0), plan_rows, lists, rows_stride, kv_heads, sequences, pieces, piece, GROUP, BLOCK_Q, BLOCK_K,
        BLOCK_M,
    )  # fmt: skip
    for half in gl.static_range(2):
        mbarrier.expect(kv_ready.index(half), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        at = [batch, start + half * 64, kv_head, 0]
        tma.async_copy_global_to_shared(k_desc, at, kv_ready.index(half), k_smem.index(half))
        tma.async_copy_global_to_shared(v_desc, at, kv_ready.index(half), v_smem.index(half))
    pair = begin
    query = gl.load(lists + 2 * begin, mask=full > 0, other=0) * CUTS
    last = gl.load(lists + 2 * begin + 1, mask=full > 0, other=0) * CUTS
    # Keys that nobody sees take one step, which the consumers forget.
    for i in range(0, gl.maximum((masked + full) * num_heads, 1)):
        position, head = query, first_head
        if i < masked * num_heads:
            head += i // masked
            visit = i % masked
            position = gl.load(lists + (middle + visit // CUTS) * 2) * CUTS + visit % CUTS
        else:
            head += (i - masked * num_heads) // gl.maximum(full, 1)
            query += 1
            if (query == last) & (i + 1 < (masked + full) * num_heads):
                pair += 1
                if pair == middle:  # the next head
                    pair = begin
                query = gl.load(lists + 2 * pair) * CUTS
                last = gl.load(lists + 2 * pair + 1) * CUTS
        # Gradients are freed first.
        stage, phase = stage_of(i, STAGES)
        at = [batch, position * BLOCK_M, head, 0]
        at_row = [batch, head, position * BLOCK_M]
        mbarrier.wait(grad_free.index(stage), phase ^ 1)
        mbarrier.expect(grad_ready.index(stage), grad_desc.block_type.nbytes + delta_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(grad_desc, at, grad_ready.index(stage), grad_smem.index(stage))
        tma.async_copy_global_to_shared(delta_desc, at_row, grad_ready.index(stage), delta_smem.index(stage))
        mbarrier.wait(q_free.index(stage), phase ^ 1)
        mbarrier.expect(q_ready.index(stage), q_desc.block_type.nbytes + lse_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_desc, at, q_ready.index(stage), q_smem.index(stage))
        tma.async_copy_global_to_shared(lse_desc, at_row, q_ready.index(stage), lse_smem.index(stage))


@gluon.jit
def words_of_queries(
    lists, bitmaps, i, middle, column, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_M: gl.constexpr
):
    """Which of 64 keys each query sees in the i-th step that needs a mask, as ``(2, BLOCK_M)`` words; -1: all."""
    WORDS: gl.constexpr = gl.SliceLayout(1, columns_layout(BLOCK_M))
    CUTS: gl.constexpr = BLOCK_Q // BLOCK_M
    TILE_WORDS: gl.constexpr = (BLOCK_K + 31) // 32
    row = gl.maximum(i, 0) % CUTS * BLOCK_M
    bitmap = gl.load(lists + (middle + i // CUTS) * 2 + 1, mask=i >= 0, other=-1)
    word = gl.arange(0, 2, layout=gl.SliceLayout(1, WORDS))
    queries = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, WORDS))
    at = bitmaps + (bitmap.to(gl.int64) * (BLOCK_Q * TILE_WORDS) + row * TILE_WORDS + column // 32)
    return gl.load(at + (queries[None, :] * TILE_WORDS + word[:, None]), mask=bitmap >= 0, other=-1)


@gluon.jit
def hide_transposed(s, mask):
    """Scores, -inf where the bit of the key is 0."""
    BLOCK_M: gl.constexpr = s.shape[1]
    BITS: gl.constexpr = columns_layout(BLOCK_M)
    bit = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, BITS)))
    tested = (1 << bit)[None, :, None] | gl.zeros([2, 32, BLOCK_M], gl.int32, BITS)
    mask = gl.reshape(mask[:, None, :] | gl.zeros([2, 32, BLOCK_M], gl.int32, BITS), [64, BLOCK_M])
    SCORES: gl.constexpr = scores_layout(BLOCK_M)
    mask = gl.convert_layout(mask, SCORES, assert_trivial=True)
    tested = gl.convert_layout(gl.reshape(tested, [64, BLOCK_M]), SCORES, assert_trivial=True)
    return hidden(s, mask, tested)


@gluon.jit
def dkv_step(
    dk, dv, gradients, key, value, q_smem, grad_smem, lse_smem, delta_smem, q_ready, grad_ready, q_free, grad_free,
    count, mask, score_scale, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, FOLD_SCALE: gl.constexpr,
):  # fmt: skip
    """Adds the step before to dK and step `count` to dV, and computes the gradients of its scores. `gradients` None:
    there is no step before."""
    SCORES: gl.constexpr = scores_layout(BLOCK_M)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    stage, phase = stage_of(count, STAGES)
    if gradients is not None:
        dk = add_values(dk, gradients, q_smem, q_ready, count - 1, BLOCK_M, STAGES)
    s = next_scores(key, q_smem, q_ready, count, BLOCK_M, STAGES)
    mbarrier.wait(grad_ready.index(stage), phase)
    # The product starts from -delta, which takes fewer registers than to subtract it afterwards.
    delta = delta_smem.index(stage).reshape([BLOCK_M]).load(COLUMNS)
    dp = gl.zeros([64, BLOCK_M], gl.float32, SCORES) - delta[None, :]
    grads = grad_smem.index(stage).reshape([BLOCK_M, value.shape[1]]).permute((1, 0))
    dp = warpgroup_mma(value, grads, dp, is_async=True)
    if gradients is not None:
        dk, s = warpgroup_mma_wait(1, deps=[dk, s])
        mbarrier.arrive(q_free.index((count - 1) % STAGES))
    else:
        s = warpgroup_mma_wait(1, deps=[s])
    # Rows that saw nothing have a log-sum-exp of +inf here, and weights of 0.
    row_lse = lse_smem.index(stage).reshape([BLOCK_M]).load(COLUMNS)
    factor = score_scale
    if not FOLD_SCALE:
        s *= score_scale
        factor = 1.0
    if mask is not None:
        s = hide_transposed(s, mask)
    p = gl.exp2(s * factor - row_lse[None, :])
    dp = warpgroup_mma_wait(0, deps=[dp])
    dv = add_values(dv, packed(p, grad_smem.dtype), grad_smem, grad_ready, count, BLOCK_M, STAGES)
    gradients = packed(p * dp, q_smem.dtype)
    dv = warpgroup_mma_wait(0, deps=[dv])
    mbarrier.arrive(grad_free.index(stage))
    return dk, dv, gradients


@gluon.jit
def store_rows(out, acc, rows_left, stride):
    """Stores the first `rows_left` of 64 rows."""
    SUMS: gl.constexpr = scores_layout(acc.shape[1])
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, SUMS))
    columns = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, SUMS))
    gl.store(
        out + (rows[:, None] * stride + columns[None, :]),
        acc.to(out.dtype.element_ty),
        mask=(rows < rows_left)[:, None],
    )


@gluon.jit
def consume_queries(
    dk, dv, k_smem, v_smem, q_smem, grad_smem, lse_smem, delta_smem, kv_ready, q_ready, grad_ready, q_free, grad_free,
    plan_rows, lists, bitmaps, rows_stride, kv_len, kv_heads, sequences, pieces, piece, score_scale, scale,
    HALF: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, FOLD_SCALE: gl.constexpr,
):  # fmt: skip
    SUMS: gl.constexpr = scores_layout(HEAD_DIM)
    key = k_smem.reshape([64, HEAD_DIM])
    value = v_smem.reshape([64, HEAD_DIM])
    batch, kv_head, piece_index, head, num_heads, start, column, begin, middle, masked, full = key_tile_of(
        gl.program_id(0), plan_rows, lists, rows_stride, kv_heads, sequences, pieces, piece, GROUP, BLOCK_Q, BLOCK_K,
        BLOCK_M,
    )  # fmt: skip
    start += 64 * HALF
    column += 64 * HALF
    steps = gl.maximum((masked + full) * num_heads, 1)
    in_result = (piece_index * (sequences // kv_heads) + batch).to(gl.int64) * kv_len + start
    in_result = (in_result * kv_heads + kv_head) * HEAD_DIM
    mbarrier.wait(kv_ready, 0)
    acc_k = gl.zeros([64, HEAD_DIM], gl.float32, SUMS)
    acc_v = gl.zeros([64, HEAD_DIM], gl.float32, SUMS)
    # The first step looks at its mask whatever it is.
    mask = words_of_queries(lists, bitmaps, gl.where(masked > 0, 0, -1), middle, column, BLOCK_Q, BLOCK_K, BLOCK_M)
    acc_k, acc_v, gradients = dkv_step(
        acc_k, acc_v, None, key, value, q_smem, grad_smem, lse_smem, delta_smem, q_ready, grad_ready, q_free, grad_free,
        0, mask, score_scale, BLOCK_M, STAGES, FOLD_SCALE,
    )  # fmt: skip
    for count in range(1, masked * num_heads):
        mask = words_of_queries(lists, bitmaps, count % masked, middle, column, BLOCK_Q, BLOCK_K, BLOCK_M)
        acc_k, acc_v, gradients = dkv_step(
            acc_k, acc_v, gradients, key, value, q_smem, grad_smem, lse_smem, delta_smem, q_ready, grad_ready, q_free,
            grad_free, count, mask, score_scale, BLOCK_M, STAGES, FOLD_SCALE,
        )  # fmt: skip
    for count in range(gl.maximum(masked * num_heads, 1), steps):
        acc_k, acc_v, gradients = dkv_step(
            acc_k, acc_v, gradients, key, value, q_smem, grad_smem, lse_smem, delta_smem, q_ready, grad_ready, q_free,
            grad_free, count, None, score_scale, BLOCK_M, STAGES, FOLD_SCALE,
        )  # fmt: skip
    acc_k = add_values(acc_k, gradients, q_smem, q_ready, steps - 1, BLOCK_M, STAGES)
    acc_k = warpgroup_mma_wait(0, deps=[acc_k])
    seen = masked + full > 0
    acc_k = gl.where(seen, acc_k * scale, 0.0)
    acc_v = gl.where(seen, acc_v, 0.0)
    store_rows(dk + in_result, acc_k, kv_len - start, kv_heads * HEAD_DIM)
    store_rows(dv + in_result, acc_v, kv_len - start, kv_heads * HEAD_DIM)


_CHANGING = ["rows_stride", "kv_len", "kv_heads", "sequences", "pieces", "piece"]


@gluon.jit(do_not_specialize=_CHANGING)
def dkv_kernel(
    q_desc, grad_desc, lse_desc, delta_desc, k_desc, v_desc, dk, dv, plan_rows, lists, bitmaps,
    rows_stride, kv_len, kv_heads, sequences, pieces, piece, score_scale, scale,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr, FOLD_SCALE: gl.constexpr,
):  # fmt: skip
    """dK and dV, or the sums of `pieces` parts of the query heads, `piece` of them or what is left."""
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [2, 1, 64, 1, HEAD_DIM], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [2, 1, 64, 1, HEAD_DIM], v_desc.layout)
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, BLOCK_M, 1, HEAD_DIM], q_desc.layout)
    grad_smem = gl.allocate_shared_memory(grad_desc.dtype, [STAGES, 1, BLOCK_M, 1, HEAD_DIM], grad_desc.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, BLOCK_M], lse_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, BLOCK_M], delta_desc.layout)
    kv_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(kv_ready.index(i), count=1)
    q_ready, grad_ready, q_free, grad_free = ring_barriers(STAGES)
    # TMA signals the barriers through the asynchronous proxy.
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                consume_queries,
                (
                    dk, dv, k_smem.index(0), v_smem.index(0), q_smem, grad_smem, lse_smem, delta_smem,
                    kv_ready.index(0), q_ready, grad_ready, q_free, grad_free, plan_rows, lists, bitmaps, rows_stride,
                    kv_len, kv_heads, sequences, pieces, piece, score_scale, scale, 0, GROUP, HEAD_DIM, BLOCK_Q,
                    BLOCK_K, BLOCK_M, STAGES, FOLD_SCALE,
                ),
            ),
            (
                consume_queries,
                (
                    dk, dv, k_smem.index(1), v_smem.index(1), q_smem, grad_smem, lse_smem, delta_smem,
                    kv_ready.index(1), q_ready, grad_ready, q_free, grad_free, plan_rows, lists, bitmaps, rows_stride,
                    kv_len, kv_heads, sequences, pieces, piece, score_scale, scale, 1, GROUP, HEAD_DIM, BLOCK_Q,
                    BLOCK_K, BLOCK_M, STAGES, FOLD_SCALE,
                ),
            ),
            (
                produce_queries,
                (
                    q_desc, grad_desc, lse_desc, delta_desc, k_desc, v_desc, q_smem, grad_smem, lse_smem, delta_smem,
                    k_smem, v_smem, kv_ready, q_ready, grad_ready, q_free, grad_free, plan_rows, lists, rows_stride,
                    kv_heads, sequences, pieces, piece, GROUP, BLOCK_Q, BLOCK_K, BLOCK_M, STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
