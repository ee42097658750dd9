"""dQ of attention over a tile plan for Hopper, in Gluon: `_dq_kernel` of `pdkernels.triton.block_sparse_attention`.

Programs, producer and the order of tiles are those of the forward kernel; the producer brings the gradients of the
results along with the queries. A step of 64 keys starts its two products with keys and with values, and then the
product that adds the step before to dQ. The weights are computed beside the last two of these, their gradients beside
the last. Keys are freed a step later than values.

Every sum has one order, so gradients repeat bit for bit.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from pdkernels.gluon._steps import add_values, hide, next_scores, packed, ring_barriers, rows_layout, scores_layout
from pdkernels.gluon.block_sparse_attention import LOG2_E, produce, tile_of, turns_of, words_of_step


@gluon.jit
def weights_of(s, mask, row_lse, score_scale, FOLD_SCALE: gl.constexpr):
    """The weights of scores. Rows that saw nothing have a log-sum-exp of +inf here, and weights of 0."""
    factor = score_scale
    if not FOLD_SCALE:
        s *= score_scale
        factor = 1.0
    if mask is not None:
        s = hide(s, mask)
    return gl.exp2(s * factor - row_lse[:, None])


@gluon.jit
def dq_step(
    acc, gradients, q_smem, grad_smem, k_smem, v_smem, k_ready, v_ready, k_free, v_free, count, mask, row_lse, delta,
    score_scale, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, FOLD_SCALE: gl.constexpr,
):  # fmt: skip
    """Adds the step before to dQ, and computes the gradients of the scores of step `count`."""
    s = next_scores(q_smem, k_smem, k_ready, count, BLOCK_N, STAGES)
    dp = next_scores(grad_smem, v_smem, v_ready, count, BLOCK_N, STAGES)
    acc = add_values(acc, gradients, k_smem, k_ready, count - 1, BLOCK_N, STAGES)
    s = warpgroup_mma_wait(2, deps=[s])
    p = weights_of(s, mask, row_lse, score_scale, FOLD_SCALE)
    dp = warpgroup_mma_wait(1, deps=[dp])
    mbarrier.arrive(v_free.index(count % STAGES))
    gradients = packed(p * (dp - delta[:, None]), k_smem.dtype)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(k_free.index((count - 1) % STAGES))
    return acc, gradients


@gluon.jit
def saved_rows(
    grad_out, out, lse, grad_lse, lse_b, delta, in_grad, in_out, in_rows, in_saved, grad_stride, out_stride, rows_left,
    HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """(log-sum-exp in base 2, delta = rowsum(dO * O) - dLSE) of 64 rows, which are stored too, for dK and dV."""
    LOADED: gl.constexpr = rows_layout(HEAD_DIM, 4)
    ROWS: gl.constexpr = gl.SliceLayout(1, scores_layout(BLOCK_N))
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, LOADED))
    columns = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LOADED))
    there = (rows < rows_left)[:, None]
    of_grad = rows.to(gl.int64) * grad_stride + in_grad
    of_out = rows.to(gl.int64) * out_stride + in_out
    grad = gl.load(grad_out + (of_grad[:, None] + columns[None, :]), mask=there, other=0.0)
    result = gl.load(out + (of_out[:, None] + columns[None, :]), mask=there, other=0.0)
    row_delta = gl.convert_layout(gl.sum(grad.to(gl.float32) * result.to(gl.float32), 1), ROWS)
    rows = gl.arange(0, 64, layout=ROWS)
    there = rows < rows_left
    if grad_lse is not None:
        row_delta -= gl.load(grad_lse + in_rows + rows, mask=there, other=0.0)
    row_lse = gl.load(lse + in_rows + rows, mask=there, other=float("-inf"))
    row_lse = gl.where(row_lse == float("-inf"), float("inf"), row_lse * LOG2_E)
    gl.store(lse_b + in_saved + rows, row_lse)
    gl.store(delta + in_saved + rows, row_delta)
    return row_lse, row_delta


@gluon.jit
def consume_dq(
    dq_desc, grad_out, out, lse, grad_lse, lse_b, delta, q_smem, grad_smem, k_smem, v_smem, dq_smem,
    q_ready, k_ready, v_ready, q_free, k_free, v_free, plan_rows, lists, bitmaps,
    grad_stride_b, grad_stride, grad_stride_h, rows_stride, num_tiles, saved_stride, q_len, kv_len, kv_heads,
    sequences, section, items, score_scale, scale,
    HALF: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, FOLD_SCALE: gl.constexpr,
):  # fmt: skip
    OWN_ROW: gl.constexpr = 0 if BLOCK_Q < 128 else 64 * HALF
    OWN_HEAD: gl.constexpr = HALF if BLOCK_Q < 128 else 0
    SUMS: gl.constexpr = scores_layout(HEAD_DIM)
    query = q_smem.reshape([64, HEAD_DIM])
    grad = grad_smem.reshape([64, HEAD_DIM])
    heads = kv_heads * GROUP
    count = 0
    for turn in range(0, turns_of(items)):
        batch, kv_head, in_group, start, row, begin, middle, masked, full = tile_of(
            turn, plan_rows, lists, rows_stride, num_tiles, kv_heads, sequences, section,
            GROUP, BLOCK_Q, BLOCK_K, BLOCK_N,
        )  # fmt: skip
        head = kv_head * GROUP + in_group + OWN_HEAD
        start += OWN_ROW
        row += OWN_ROW
        sequence, first = batch.to(gl.int64), start.to(gl.int64)
        row_lse, row_delta = saved_rows(
            grad_out, out, lse, grad_lse, lse_b, delta,
            sequence * grad_stride_b + first * grad_stride + head.to(gl.int64) * grad_stride_h,
            ((sequence * q_len + first) * heads + head) * HEAD_DIM, (sequence * heads + head) * q_len + first,
            (sequence * heads + head) * saved_stride + first, grad_stride, heads * HEAD_DIM, q_len - start,
            HEAD_DIM, BLOCK_N,
        )  # fmt: skip
        mbarrier.wait(q_ready, turn & 1)
        acc = gl.zeros([64, HEAD_DIM], gl.float32, SUMS)
        # The first step looks at its mask whatever it is.
        s = next_scores(query, k_smem, k_ready, count, BLOCK_N, STAGES)
        dp = next_scores(grad, v_smem, v_ready, count, BLOCK_N, STAGES)
        only = gl.where(masked > 0, 0, gl.where(full > 0, -1, -2))
        mask = words_of_step(lists, bitmaps, only, middle, row, kv_len, BLOCK_Q, BLOCK_K, BLOCK_N)
        s = warpgroup_mma_wait(1, deps=[s])
        p = weights_of(s, mask, row_lse, score_scale, FOLD_SCALE)
        dp = warpgroup_mma_wait(0, deps=[dp])
        mbarrier.arrive(v_free.index(count % STAGES))
        gradients = packed(p * (dp - row_delta[:, None]), k_smem.dtype)
        count += 1
        for i in range(1, masked):
            mask = words_of_step(lists, bitmaps, i, middle, row, kv_len, BLOCK_Q, BLOCK_K, BLOCK_N)
            acc, gradients = dq_step(
                acc, gradients, query, grad, k_smem, v_smem, k_ready, v_ready, k_free, v_free, count, mask, row_lse,
                row_delta, score_scale, BLOCK_N, STAGES, FOLD_SCALE,
            )  # fmt: skip
            count += 1
        for _ in range(gl.maximum(masked, 1), masked + full):
            acc, gradients = dq_step(
                acc, gradients, query, grad, k_smem, v_smem, k_ready, v_ready, k_free, v_free, count, None, row_lse,
                row_delta, score_scale, BLOCK_N, STAGES, FOLD_SCALE,
            )  # fmt: skip
            count += 1
        # No product reads the queries and the gradients any more.
        mbarrier.arrive(q_free)
        acc = add_values(acc, gradients, k_smem, k_ready, count - 1, BLOCK_N, STAGES)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(k_free.index((count - 1) % STAGES))

        nothing = gl.convert_layout(row_lse == float("inf"), gl.SliceLayout(1, SUMS))
        acc = gl.where(nothing[:, None], 0.0, acc * scale)
        tma.store_wait(0)
        dq_smem.reshape([64, HEAD_DIM]).store(acc.to(k_smem.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dq_desc, [batch, start, head, 0], dq_smem)
    tma.store_wait(0)


_CHANGING = ["rows_stride", "num_tiles", "saved_stride", "q_len", "kv_len", "kv_heads", "sequences", "section", "items"]


@gluon.jit(do_not_specialize=_CHANGING)
def dq_kernel(
    q_desc, grad_desc, k_desc, v_desc, dq_desc, grad_out, out, lse, grad_lse, lse_b, delta, plan_rows, lists, bitmaps,
    grad_stride_b, grad_stride, grad_stride_h, rows_stride, num_tiles, saved_stride, q_len, kv_len, kv_heads,
    sequences, section, items, score_scale, scale,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, FOLD_SCALE: gl.constexpr,
):  # fmt: skip
    """dQ, and for the kernel of dK and dV the log-sum-exp of each row in base 2 and delta = rowsum(dO * O) - dLSE."""
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2, 1, 64, 1, HEAD_DIM], q_desc.layout)
    grad_smem = gl.allocate_shared_memory(q_desc.dtype, [2, 1, 64, 1, HEAD_DIM], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, BLOCK_N, 1, HEAD_DIM], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, BLOCK_N, 1, HEAD_DIM], v_desc.layout)
    dq_smem = gl.allocate_shared_memory(dq_desc.dtype, [2, 1, 64, 1, HEAD_DIM], dq_desc.layout)
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
                consume_dq,
                (
                    dq_desc, grad_out, out, lse, grad_lse, lse_b, delta, q_smem.index(0), grad_smem.index(0), k_smem,
                    v_smem, dq_smem.index(0), q_ready.index(0), k_ready, v_ready, q_free.index(0), k_free, v_free,
                    plan_rows, lists, bitmaps, grad_stride_b, grad_stride, grad_stride_h, rows_stride, num_tiles,
                    saved_stride, q_len, kv_len, kv_heads, sequences, section, items, score_scale, scale, 0, GROUP,
                    HEAD_DIM, BLOCK_Q, BLOCK_K, BLOCK_N, STAGES, FOLD_SCALE,
                ),
            ),
            (
                consume_dq,
                (
                    dq_desc, grad_out, out, lse, grad_lse, lse_b, delta, q_smem.index(1), grad_smem.index(1), k_smem,
                    v_smem, dq_smem.index(1), q_ready.index(1), k_ready, v_ready, q_free.index(1), k_free, v_free,
                    plan_rows, lists, bitmaps, grad_stride_b, grad_stride, grad_stride_h, rows_stride, num_tiles,
                    saved_stride, q_len, kv_len, kv_heads, sequences, section, items, score_scale, scale, 1, GROUP,
                    HEAD_DIM, BLOCK_Q, BLOCK_K, BLOCK_N, STAGES, FOLD_SCALE,
                ),
            ),
            (
                produce,
                (
                    q_desc, grad_desc, k_desc, v_desc, q_smem, grad_smem, k_smem, v_smem, q_ready, k_ready, v_ready,
                    q_free, k_free, v_free, plan_rows, lists, rows_stride, num_tiles, kv_heads, sequences, section,
                    items, GROUP, BLOCK_Q, BLOCK_K, BLOCK_N, STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
