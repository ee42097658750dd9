"""dQ, dK and dV of attention over a tile plan for Hopper in one pass, in Gluon: five products for each tile, where the kernels of dQ and
of dK and dV have seven.

A program takes 128 keys, as that of dK and dV does, and walks the query tiles that see them. Two consumers hold 64 keys each, with their
dK and dV. What a step of 64 queries adds to dQ needs the gradients of all 128 keys: each consumer writes its own to shared memory, and
multiplies all of them with half of the columns of the keys. So a thread holds 32 sums of dQ, while the next scores are computed.

dQ is added up in memory, in float32, by the programs of all keys that a query tile sees, in the order in which these programs took their
tickets at their start. A counter for each head and 64 queries says whose turn it is. A fourth partition waits for the turn, and hands it
on when both consumers have added. The first program stores its sums, and the last one adds those in memory to its own, scales and
rounds them. So gradients repeat bit for bit.

A program waits only for those that took a ticket before it did, which run or have ended; the one with the lowest ticket waits for nobody.
So there is no deadlock, however many programs a GPU runs at once. All programs walk query tiles in one order, those with the most visits
first (`pdkernels.gluon.block_sparse_attention_turns`): a program then follows those before it at a distance, and rarely waits.
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
    next_scores,
    packed,
    ring_barriers,
    scores_layout,
    stage_of,
    unpacked_pairs,
)
from pdkernels.gluon.block_sparse_attention_dkv import columns_layout, hide_transposed, key_tile_of, store_rows
from pdkernels.gluon.block_sparse_attention_turns import TURN

QUERIES = gl.constexpr(64)
"""Of a step."""


@gluon.constexpr_function
def fragments_layout():
    """The layout of ``(8, 128, 4)`` sums: of each thread, four of 16 bytes."""
    return gl.BlockedLayout([1, 1, 4], [1, 32, 1], [1, 4, 1], [2, 1, 0])


@gluon.jit
def fragments(dq):
    """64 x 64 sums, those of a thread together, four by four, such that nothing moves between threads."""
    split = gl.permute(gl.reshape(dq, [4, 2, 8, 8, 4, 2]), (3, 0, 2, 4, 1, 5))
    return gl.convert_layout(gl.reshape(split, [8, 128, 4]), fragments_layout())


@gluon.jit
def rows_of(sums):
    """The inverse of `fragments`."""
    split = gl.permute(gl.reshape(sums, [8, 4, 8, 4, 2, 2]), (1, 4, 2, 0, 3, 5))
    return gl.convert_layout(gl.reshape(split, [64, 64]), scores_layout(64))


@gluon.jit
def first_visit(turns, batch, start, turns_stride, q_tiles, BLOCK_K: gl.constexpr):
    """Where the first visit of a program is described."""
    return turns + batch.to(gl.int64) * turns_stride + start // BLOCK_K * (q_tiles * TURN)


@gluon.jit
def next_step(visit, head, cut, num_heads, BLOCK_Q: gl.constexpr):
    """(visit, head of the part, which 64 queries) of the step after this one: all queries of a visit for a head, then the next head."""
    cut += 1
    done = cut == BLOCK_Q // QUERIES
    cut = gl.where(done, 0, cut)
    head += gl.where(done, 1, 0)
    done = head == num_heads
    return visit + gl.where(done, TURN, 0), gl.where(done, 0, head), cut


@gluon.jit
def produce_steps(
    q_desc, grad_desc, lse_desc, delta_desc, k_desc, v_desc, q_smem, grad_smem, lse_smem, delta_smem, k_smem, v_smem,
    kv_ready, q_ready, grad_ready, q_free, grad_free,
    item, plan_rows, lists, turns, rows_stride, turns_stride, q_tiles, kv_heads, sequences, pieces, piece,
    GROUP: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    batch, kv_head, _, first_head, num_heads, start, _, _, _, masked, full = key_tile_of(
        item, plan_rows, lists, rows_stride, kv_heads, sequences, pieces, piece, GROUP, BLOCK_Q, BLOCK_K, QUERIES
    )
    visit, head, cut = first_visit(turns, batch, start, turns_stride, q_tiles, BLOCK_K), 0, 0
    mbarrier.expect(kv_ready, 2 * (k_desc.block_type.nbytes + v_desc.block_type.nbytes))
    for half in gl.static_range(2):
        at = [batch, start + half * 64, kv_head, 0]
        tma.async_copy_global_to_shared(k_desc, at, kv_ready, k_smem.index(half))
        tma.async_copy_global_to_shared(v_desc, at, kv_ready, v_smem.index(half))
    steps = (masked + full) * num_heads
    # Keys that nobody sees take one step, which the consumers forget.
    for i in range(0, gl.maximum(steps, 1)):
        row = gl.load(visit, mask=steps > 0, other=0) * BLOCK_Q + cut * QUERIES
        stage, phase = stage_of(i, STAGES)
        at = [batch, row, first_head + head, 0]
        at_row = [batch, first_head + head, row]
        # Gradients are freed first.
        mbarrier.wait(grad_free.index(stage), phase ^ 1)
        mbarrier.expect(grad_ready.index(stage), grad_desc.block_type.nbytes + delta_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(grad_desc, at, grad_ready.index(stage), grad_smem.index(stage))
        tma.async_copy_global_to_shared(delta_desc, at_row, grad_ready.index(stage), delta_smem.index(stage))
        mbarrier.wait(q_free.index(stage), phase ^ 1)
        mbarrier.expect(q_ready.index(stage), q_desc.block_type.nbytes + lse_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_desc, at, q_ready.index(stage), q_smem.index(stage))
        tma.async_copy_global_to_shared(lse_desc, at_row, q_ready.index(stage), lse_smem.index(stage))
        visit, head, cut = next_step(visit, head, cut, num_heads, BLOCK_Q)


@gluon.jit
def take_turns(
    counters, turn_ready, added, item, plan_rows, lists, turns, rows_stride, turns_stride, q_tiles, q_blocks, kv_heads,
    sequences, pieces, piece, GROUP: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Waits for the turn of each step, and hands it on when both consumers have added."""
    batch, _, _, first_head, num_heads, start, column, _, _, masked, full = key_tile_of(
        item, plan_rows, lists, rows_stride, kv_heads, sequences, pieces, piece, GROUP, BLOCK_Q, BLOCK_K, QUERIES
    )
    visit, head, cut = first_visit(turns, batch, start, turns_stride, q_tiles, BLOCK_K), 0, 0
    counters += (batch * (kv_heads * GROUP) + first_head) * q_blocks
    for i in range(0, (masked + full) * num_heads):
        counter = counters + (head * q_blocks + gl.load(visit) * (BLOCK_Q // QUERIES) + cut)
        before = turn_of(visit, column, BLOCK_K) // 2
        while gl.atomic_add(counter, 0, sem="acquire", scope="gpu") != before:
            pass
        mbarrier.arrive(turn_ready)
        mbarrier.wait(added, i & 1)
        gl.atomic_add(counter, 1, sem="release", scope="gpu")
        visit, head, cut = next_step(visit, head, cut, num_heads, BLOCK_Q)


@gluon.jit
def turn_of(visit, column, BLOCK_K: gl.constexpr):
    """Twice the number of programs that add before this one, and 1 if none does after it. A tile may have several programs."""
    CUTS: gl.constexpr = BLOCK_K // 128
    turn = gl.load(visit + 2)
    cut = column // 128
    last = gl.where(cut == CUTS - 1, turn % 2, 0)
    return (turn // 2 * CUTS + cut) * 2 + last


@gluon.jit
def words_of_visit(
    bitmaps, bitmap, cut, column, columns_left, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr
):  # fmt: skip
    """Which of 64 keys each query of a step sees, as ``(2, 64)`` words; keys from `columns_left` on are seen by none."""
    WORDS: gl.constexpr = gl.SliceLayout(1, columns_layout(QUERIES))
    TILE_WORDS: gl.constexpr = (BLOCK_K + 31) // 32
    word = gl.arange(0, 2, layout=gl.SliceLayout(1, WORDS))
    queries = gl.arange(0, QUERIES, layout=gl.SliceLayout(0, WORDS))
    queries += cut * QUERIES
    at = bitmaps + (bitmap.to(gl.int64) * (BLOCK_Q * TILE_WORDS) + column // 32)
    loaded = gl.load(at + (queries[None, :] * TILE_WORDS + word[:, None]), mask=bitmap >= 0, other=-1)
    valid = gl.minimum(gl.maximum(columns_left - 32 * word, 0), 32)
    return loaded & gl.where(valid == 32, -1, (1 << valid) - 1)[:, None]


@gluon.jit
def zero(count):
    """0, which the compiler does not know: it would keep the addresses of all operands in registers, of which there are none left."""
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [count], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def next_dq(ds_smem, k_smem, ds_ready, count, nothing, HALF: gl.constexpr):
    """Starts the product of the gradients of step `count` with half of the columns of the keys, once both consumers have written
    them."""
    slot, phase = stage_of(count, 2)
    mbarrier.wait(ds_ready.index(slot), phase)
    dq = gl.zeros([QUERIES, 64], gl.float32, scores_layout(64))
    for half in gl.static_range(2):
        keys = k_smem.index(half + nothing).reshape([64, 128]).slice(64 * HALF, 64, dim=1)
        gradients = ds_smem.index(2 * slot + half).permute((1, 0))
        dq = warpgroup_mma(gradients, keys, dq, use_acc=half > 0, is_async=True)
    return dq


@gluon.jit
def add_dq(dq, sums, out, turn, rows_left, stride, scale):
    """Adds 64 x 64 sums to those in memory, or stores them if there are none yet; the last ones become the result."""
    at = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, fragments_layout())))[:, None, None] * 512
    at += gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(2, fragments_layout())))[None, :, None] * 4
    at += gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, fragments_layout())))[None, None, :]
    dq = fragments(dq)
    if turn % 2 == 1:
        before = gl.load(sums + at, mask=turn >= 2, other=0.0)
        SUMS: gl.constexpr = scores_layout(64)
        rows = gl.arange(0, 64, layout=gl.SliceLayout(1, SUMS)) + zero(turn)
        columns = gl.arange(0, 64, layout=gl.SliceLayout(0, SUMS))
        total = (rows_of(dq + before) * scale).to(out.dtype.element_ty)
        at_rows = out + (rows.to(gl.int64) * stride)[:, None]
        gl.store(at_rows + columns[None, :], total, mask=(rows < rows_left)[:, None])
    elif turn >= 2:
        gl.atomic_add(sums + at, dq, sem="relaxed", scope="gpu")
    else:
        gl.store(sums + at, dq)


@gluon.jit
def place_of(visit, head, cut, q_blocks, q_len, heads, BLOCK_Q: gl.constexpr):
    """Of a step's queries: which 64 rows of the part's heads, the first row of the result, and rows from there to the end."""
    row = gl.load(visit) * BLOCK_Q + cut * QUERIES
    return head * q_blocks + row // QUERIES, row * heads + head, q_len - row


@gluon.jit
def hand_on_dq(
    dq, count, sums, out, turn_ready, added, block, row, rows_left, turn, stride, scale, HEAD_DIM: gl.constexpr
):  # fmt: skip
    """Adds step `count` to dQ at its turn. `sums` and `out` begin with a consumer's columns of the part's first head."""
    mbarrier.wait(turn_ready, count & 1)
    at = block.to(gl.int64) * (2 * QUERIES * 64)
    add_dq(dq, sums + at, out + row.to(gl.int64) * HEAD_DIM, turn, rows_left, stride, scale)
    # One thread arrives for all.
    gl.thread_barrier()
    mbarrier.arrive(added)


@gluon.jit
def one_pass_step(
    acc_k, acc_v, gradients, k_smem, v_smem, sums, out, q_smem, grad_smem, lse_smem, delta_smem, ds_smem,
    q_ready, grad_ready, q_free, grad_free, ds_ready, turn_ready, added, bitmaps, visit, cut, seen, block,
    row, rows_left, turn, column, keys_left, stride, count, score_scale, scale,
    HALF: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    FOLD_SCALE: gl.constexpr,
):  # fmt: skip
    """Adds the step before to dK and dQ and step `count` to dV, and computes the gradients of its scores. `gradients` None: there is
    no step before."""
    SCORES: gl.constexpr = scores_layout(QUERIES)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    stage, phase = stage_of(count, STAGES)
    nothing = zero(count)
    key = k_smem.index(HALF + nothing).reshape([64, HEAD_DIM])
    value = v_smem.index(HALF + nothing).reshape([64, HEAD_DIM])
    if gradients is not None:
        acc_k = add_values(acc_k, gradients, q_smem, q_ready, count - 1, QUERIES, STAGES)
        dq = next_dq(ds_smem, k_smem, ds_ready, count - 1, nothing, HALF)
    s = next_scores(key, q_smem, q_ready, count, QUERIES, STAGES)
    if gradients is not None:
        acc_k, dq = warpgroup_mma_wait(1, deps=[acc_k, dq])
        mbarrier.arrive(q_free.index((count - 1) % STAGES))
        hand_on_dq(
            dq, count - 1, sums, out, turn_ready, added, block, row, rows_left, turn, stride, scale, HEAD_DIM
        )  # fmt: skip
    bitmap = gl.load(visit + 1, mask=seen, other=-1) if gradients is None else gl.load(visit + 1)
    mbarrier.wait(grad_ready.index(stage), phase)
    # The product starts from -delta, which takes fewer registers than to subtract it afterwards.
    delta = delta_smem.index(stage).reshape([QUERIES]).load(COLUMNS)
    dp = gl.zeros([64, QUERIES], gl.float32, SCORES) - delta[None, :]
    grads = grad_smem.index(stage).reshape([QUERIES, HEAD_DIM])
    dp = warpgroup_mma(value, grads.permute((1, 0)), dp, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    # Rows that saw nothing have a log-sum-exp of +inf here, and weights of 0.
    row_lse = lse_smem.index(stage).reshape([QUERIES]).load(COLUMNS)
    factor = score_scale
    if not FOLD_SCALE:
        s *= score_scale
        factor = 1.0
    if (bitmap >= 0) | (keys_left < 64):
        mask = words_of_visit(bitmaps, bitmap, cut, column + 64 * HALF, keys_left, BLOCK_Q, BLOCK_K)
        s = hide_transposed(s, mask)
    p = gl.exp2(s * factor - row_lse[None, :])
    dp = warpgroup_mma_wait(0, deps=[dp])
    acc_v = add_values(acc_v, packed(p, grad_smem.dtype), grad_smem, grad_ready, count, QUERIES, STAGES)
    gradients = packed(p * dp, q_smem.dtype)
    # Who wrote the step before, which was waited for above, has read what was here two steps before.
    slot = count % 2
    ds_smem.index(2 * slot + HALF).store(unpacked_pairs(gradients, q_smem.dtype))
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(ds_ready.index(slot))
    acc_v = warpgroup_mma_wait(0, deps=[acc_v])
    mbarrier.arrive(grad_free.index(stage))
    return acc_k, acc_v, gradients


@gluon.jit
def consume_steps(
    dq, dk, dv, sums, k_smem, v_smem, q_smem, grad_smem, lse_smem, delta_smem, ds_smem, kv_ready, q_ready, grad_ready,
    q_free, grad_free, ds_ready, turn_ready, added, item, plan_rows, lists, bitmaps, turns, rows_stride,
    turns_stride, q_tiles, q_blocks, q_len, kv_len, kv_heads, sequences, pieces, piece, score_scale, scale,
    HALF: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, FOLD_SCALE: gl.constexpr,
):  # fmt: skip
    SUMS: gl.constexpr = scores_layout(HEAD_DIM)
    batch, kv_head, piece_index, first_head, num_heads, start, column, _, _, masked, full = key_tile_of(
        item, plan_rows, lists, rows_stride, kv_heads, sequences, pieces, piece, GROUP, BLOCK_Q, BLOCK_K, QUERIES
    )
    visit, head, cut = first_visit(turns, batch, start, turns_stride, q_tiles, BLOCK_K), 0, 0
    heads = kv_heads * GROUP
    stride = heads * HEAD_DIM
    keys_left = kv_len - start - 64 * HALF
    first = (batch * heads + first_head).to(gl.int64)
    sums += (first * q_blocks * 2 + HALF) * (QUERIES * 64)
    dq += (batch.to(gl.int64) * q_len * heads + first_head) * HEAD_DIM + 64 * HALF
    steps = (masked + full) * num_heads
    mbarrier.wait(kv_ready, 0)
    acc_k = gl.zeros([64, HEAD_DIM], gl.float32, SUMS)
    acc_v = gl.zeros([64, HEAD_DIM], gl.float32, SUMS)
    acc_k, acc_v, gradients = one_pass_step(
        acc_k, acc_v, None, k_smem, v_smem, sums, dq, q_smem, grad_smem, lse_smem, delta_smem, ds_smem, q_ready,
        grad_ready, q_free, grad_free, ds_ready, turn_ready, added, bitmaps, visit, cut, steps > 0, 0, 0, 0, 0,
        column, keys_left, stride, 0, score_scale, scale, HALF, HEAD_DIM, BLOCK_Q, BLOCK_K, STAGES, FOLD_SCALE,
    )  # fmt: skip
    block, row, rows_left = place_of(visit, head, cut, q_blocks, q_len, heads, BLOCK_Q)
    turn = turn_of(visit, column, BLOCK_K)
    for count in range(1, steps):
        visit, head, cut = next_step(visit, head, cut, num_heads, BLOCK_Q)
        acc_k, acc_v, gradients = one_pass_step(
            acc_k, acc_v, gradients, k_smem, v_smem, sums, dq, q_smem, grad_smem, lse_smem, delta_smem, ds_smem,
            q_ready, grad_ready, q_free, grad_free, ds_ready, turn_ready, added, bitmaps, visit, cut, True,
            block, row, rows_left, turn, column, keys_left, stride, count, score_scale, scale, HALF, HEAD_DIM, BLOCK_Q,
            BLOCK_K, STAGES, FOLD_SCALE,
        )  # fmt: skip
        block, row, rows_left = place_of(visit, head, cut, q_blocks, q_len, heads, BLOCK_Q)
        turn = turn_of(visit, column, BLOCK_K)
    last = gl.maximum(steps, 1) - 1
    acc_k = add_values(acc_k, gradients, q_smem, q_ready, last, QUERIES, STAGES)
    of_queries = next_dq(ds_smem, k_smem, ds_ready, last, 0, HALF)
    acc_k, of_queries = warpgroup_mma_wait(0, deps=[acc_k, of_queries])
    seen = steps > 0
    if seen:
        hand_on_dq(
            of_queries, last, sums, dq, turn_ready, added, block, row, rows_left, turn, stride, scale, HEAD_DIM
        )  # fmt: skip
    in_result = (piece_index * (sequences // kv_heads) + batch).to(gl.int64) * kv_len + start + 64 * HALF
    in_result = (in_result * kv_heads + kv_head) * HEAD_DIM
    store_rows(dk + in_result, gl.where(seen, acc_k * scale, 0.0), keys_left, kv_heads * HEAD_DIM)
    store_rows(dv + in_result, gl.where(seen, acc_v, 0.0), keys_left, kv_heads * HEAD_DIM)


_CHANGING = [
    "rows_stride", "turns_stride", "q_tiles", "q_blocks", "q_len", "kv_len", "kv_heads", "sequences", "pieces", "piece",
]  # fmt: skip


@gluon.jit(do_not_specialize=_CHANGING)
def one_pass_kernel(
    q_desc, grad_desc, lse_desc, delta_desc, k_desc, v_desc, dq, dk, dv, sums, counters, plan_rows, lists, bitmaps,
    turns, rows_stride, turns_stride, q_tiles, q_blocks, q_len, kv_len, kv_heads, sequences, pieces, piece, score_scale,
    scale,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    FOLD_SCALE: gl.constexpr,
):  # fmt: skip
    """dQ, and dK and dV or the sums of `pieces` parts of the query heads. `plan_rows`: of the keys. The first counter deals out tickets,
    the others count the programs that have added to 64 queries of a head."""
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [2, 1, 64, 1, HEAD_DIM], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [2, 1, 64, 1, HEAD_DIM], v_desc.layout)
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, QUERIES, 1, HEAD_DIM], q_desc.layout)
    grad_smem = gl.allocate_shared_memory(grad_desc.dtype, [STAGES, 1, QUERIES, 1, HEAD_DIM], grad_desc.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, QUERIES], lse_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, QUERIES], delta_desc.layout)
    DS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    ds_smem = gl.allocate_shared_memory(q_desc.dtype, [4, 64, QUERIES], DS)
    kv_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    turn_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    added = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ds_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_ready, count=1)
    mbarrier.init(turn_ready, count=1)
    mbarrier.init(added, count=2)
    for i in gl.static_range(2):
        mbarrier.init(ds_ready.index(i), count=2)
    q_ready, grad_ready, q_free, grad_free = ring_barriers(STAGES)
    # TMA signals the barriers through the asynchronous proxy.
    fence_async_shared()
    item = gl.atomic_add(counters, 1, sem="relaxed", scope="gpu")
    counters += 1
    gl.warp_specialize(
        [
            (
                consume_steps,
                (
                    dq, dk, dv, sums, k_smem, v_smem, q_smem, grad_smem, lse_smem, delta_smem, ds_smem, kv_ready,
                    q_ready, grad_ready, q_free, grad_free, ds_ready, turn_ready, added, item, plan_rows,
                    lists, bitmaps, turns, rows_stride, turns_stride, q_tiles, q_blocks, q_len, kv_len, kv_heads,
                    sequences, pieces, piece, score_scale, scale, 0, GROUP, HEAD_DIM, BLOCK_Q, BLOCK_K, STAGES,
                    FOLD_SCALE,
                ),
            ),
            (
                consume_steps,
                (
                    dq, dk, dv, sums, k_smem, v_smem, q_smem, grad_smem, lse_smem, delta_smem, ds_smem, kv_ready,
                    q_ready, grad_ready, q_free, grad_free, ds_ready, turn_ready, added, item, plan_rows,
                    lists, bitmaps, turns, rows_stride, turns_stride, q_tiles, q_blocks, q_len, kv_len, kv_heads,
                    sequences, pieces, piece, score_scale, scale, 1, GROUP, HEAD_DIM, BLOCK_Q, BLOCK_K, STAGES,
                    FOLD_SCALE,
                ),
            ),
            (
                produce_steps,
                (
                    q_desc, grad_desc, lse_desc, delta_desc, k_desc, v_desc, q_smem, grad_smem, lse_smem, delta_smem,
                    k_smem, v_smem, kv_ready, q_ready, grad_ready, q_free, grad_free, item, plan_rows, lists, turns,
                    rows_stride, turns_stride, q_tiles, kv_heads, sequences, pieces, piece, GROUP, BLOCK_Q, BLOCK_K,
                    STAGES,
                ),
            ),
            (
                take_turns,
                (
                    counters, turn_ready, added, item, plan_rows, lists, turns, rows_stride, turns_stride, q_tiles,
                    q_blocks, kv_heads, sequences, pieces, piece, GROUP, BLOCK_Q, BLOCK_K,
                ),
            ),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip
