"""Attention of many new tokens over a cached prefix and a planned tail for Hopper, in Gluon: the splits of
`pdkernels.triton.speculative_attention`.

Rows are packed, and prefixes split, as there. A program has 128 packed rows, 64 for each of two consumers, and a
producer that copies keys and values into two rings. Steps that need a mask come first: over the new tokens, if the
split is the last one in use, then over what is left of the prefix after its whole steps. The producer copies these by
cp.async, which leaves out what lies past the end and puts zeros there. Whole steps are copied by TMA, so each has to
lie within a page. Copies of whole steps by cp.async from pages of 16 were measured too: 104 us where Triton's kernel
takes 91 (H200, 81 tokens after 16,384, 32 heads of 128).

A copy by cp.async belongs to the generic proxy. The threads wait for their copies, fence, and meet before one of them
signals the consumers, while the next copy is under way already.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from pdkernels.gluon._steps import (
    add_values,
    next_scores,
    packed,
    ring_barriers,
    rows_layout,
    scores_layout,
    shifted,
    softmax,
    stage_of,
    step,
    words_layout,
)
from pdkernels.triton import speculative_attention as as_triton_does

LN_2, LOG2_E = gl.constexpr(0.6931471805599453), gl.constexpr(1.4426950408889634)
SHORTEST_SPLIT = gl.constexpr(as_triton_does.SHORTEST_SPLIT.value)
SPLIT_STEP = gl.constexpr(as_triton_does.SPLIT_STEP.value)
ROWS = gl.constexpr(128)
"""Packed rows of a program."""


@gluon.constexpr_function
def ring_layout(rows, head_dim, dtype):
    """The layout of a step of keys or values, as TMA writes and products read it."""
    return gl.NVMMASharedLayout.get_default_for([1, rows, 1, head_dim], dtype)


@gluon.constexpr_function
def query_layout(head_dim, dtype):
    return gl.NVMMASharedLayout.get_default_for([64, head_dim], dtype)


@gluon.jit
def work_of(
    lengths, begins, plan_rows, lists, rows_stride, batch_size, new, kv_heads, capacity, splits, row_tiles,
    GROUP: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """The work of this program: (sequence, KV head, split, first packed row; where the sequence's new tokens begin and
    how many they are; first and last key of the prefix; steps over new tokens, steps with a mask, all steps). A program
    without work has no step.

    Tiles of rows that read the same keys are adjacent, for the L2 cache. The split with the new tokens starts first."""
    program = gl.program_id(0)
    row_start = program % row_tiles * ROWS
    program = program // row_tiles
    kv_head = program % kv_heads
    program = program // kv_heads
    batch = program % batch_size
    split = splits - 1 - program // batch_size
    length = gl.minimum(gl.maximum(gl.load(lengths + batch), 0), capacity).to(gl.int32)
    keys = gl.cdiv(gl.cdiv(length, splits), SPLIT_STEP) * SPLIT_STEP
    keys = gl.maximum(keys, SHORTEST_SPLIT)
    in_use = gl.maximum(gl.cdiv(length, keys), 1)
    first = gl.minimum(split * keys, length)
    end = gl.minimum(first + keys, length)
    begin = batch.to(gl.int64) * new
    if begins is not None:
        begin = gl.load(begins + batch).to(gl.int64)
        new = gl.minimum(gl.load(begins + batch + 1).to(gl.int64) - begin, new).to(gl.int32)
    tail = 0
    if split == in_use - 1:
        seen = 0
        rows = plan_rows + batch.to(gl.int64) * rows_stride
        first_tile, end_tile = tiles_of(row_start, new, ROWS, GROUP, BLOCK_Q)
        for tile in range(first_tile, end_tile):
            at, middle, last = gl.load(rows + tile * 4), gl.load(rows + tile * 4 + 1), gl.load(rows + tile * 4 + 2)
            seen = gl.maximum(seen, gl.load(lists + (2 * middle - 1), mask=middle > at, other=0))
            # The list ascends, except that a tile past the end comes first.
            seen = gl.maximum(seen, gl.load(lists + 2 * middle, mask=last > middle, other=-1) + 1)
            seen = gl.maximum(seen, gl.load(lists + (2 * last - 2), mask=last > middle, other=-1) + 1)
        # Rows that see nothing take one step, whose keys are all hidden.
        tail = gl.maximum(gl.cdiv(gl.minimum(seen * BLOCK_K, new), BLOCK_N), 1)
    masked = tail + gl.where((end - first) % BLOCK_N > 0, 1, 0)
    steps = masked + (end - first) // BLOCK_N
    steps = gl.where((split < in_use) & (row_start < new * GROUP), steps, 0)
    return batch, kv_head, split, row_start, begin, new, first, end, tail, masked, steps


@gluon.jit
def tiles_of(row_start, new, COUNT: gl.constexpr, GROUP: gl.constexpr, BLOCK_Q: gl.constexpr):
    """The plan's tiles of queries that COUNT packed rows from `row_start` on belong to: (first, end)."""
    last = gl.minimum(row_start + COUNT, new * GROUP) - 1
    return row_start // GROUP // BLOCK_Q, last // GROUP // BLOCK_Q + 1


@gluon.jit
def copy_rows(
    source, stride, page_stride, table, start, rows_left, smem,
    BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Starts copying positions from `start` on, zeros from row `rows_left` on."""
    LAYOUT: gl.constexpr = rows_layout(HEAD_DIM, WARPS)
    PART: gl.constexpr = 16 * WARPS
    columns = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LAYOUT))
    for chunk in gl.static_range(BLOCK_N // PART):
        rows = chunk * PART + gl.arange(0, PART, layout=gl.SliceLayout(1, LAYOUT))
        mask = rows < rows_left
        slot = (start + rows).to(gl.int64)
        at = slot * stride
        if PAGE_SIZE > 0:
            page = gl.load(table + slot // PAGE_SIZE, mask=mask, other=0).to(gl.int64)
            at = page * page_stride + slot % PAGE_SIZE * stride
        async_copy.async_copy_global_to_shared(
            smem.slice(chunk * PART, PART), source + (at[:, None] + columns[None, :]), mask=mask[:, None]
        )


@gluon.jit
def load_step(
    desc, new_rows, new_stride, cache, page_stride, stride, table, smem, ready, i,
    batch, kv_head, new, first, end, tail, masked,
    BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Starts copying the keys, or the values, of step i."""
    rows = smem.reshape([BLOCK_N, HEAD_DIM])
    start = first + gl.where(i < masked, (end - first) // BLOCK_N, i - masked) * BLOCK_N
    if i < tail:
        copy_rows(new_rows, new_stride, 0, None, i * BLOCK_N, new - i * BLOCK_N, rows, BLOCK_N, HEAD_DIM, 0, WARPS)
    elif i < masked:
        copy_rows(cache, stride, page_stride, table, start, end - start, rows, BLOCK_N, HEAD_DIM, PAGE_SIZE, WARPS)
    else:
        page, slot = batch, start
        if PAGE_SIZE > 0:
            page, slot = gl.load(table + start // PAGE_SIZE).to(gl.int32), start % PAGE_SIZE
        mbarrier.expect(ready, desc.block_type.nbytes)
        tma.async_copy_global_to_shared(desc, [page, slot, kv_head, 0], ready, smem)
    async_copy.commit_group()


@gluon.jit
def complete(ready):
    """Signals that the copies of the last group but one have arrived."""
    async_copy.wait_group(1)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(ready)


@gluon.jit
def produce(
    k_desc, v_desc, k_new, v_new, k_cache, v_cache, lengths, table, begins, plan_rows, lists,
    kn_stride_b, kn_stride, kn_stride_h, vn_stride_b, vn_stride, vn_stride_h,
    kc_stride_b, kc_stride, kc_stride_h, vc_stride_b, vc_stride, vc_stride_h, table_stride, rows_stride,
    batch_size, new, kv_heads, capacity, splits, row_tiles, k_smem, v_smem, k_ready, v_ready, k_free, v_free,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, PAGE_SIZE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    batch, kv_head, split, row_start, begin, new, first, end, tail, masked, steps = work_of(
        lengths, begins, plan_rows, lists, rows_stride, batch_size, new, kv_heads, capacity, splits, row_tiles,
        GROUP, BLOCK_Q, BLOCK_K, BLOCK_N,
    )  # fmt: skip
    head, sequence = kv_head.to(gl.int64), batch.to(gl.int64)
    if begins is None:
        k_new += sequence * kn_stride_b
        v_new += sequence * vn_stride_b
    else:
        k_new += begin * kn_stride
        v_new += begin * vn_stride
    k_new += head * kn_stride_h
    v_new += head * vn_stride_h
    k_cache += head * kc_stride_h
    v_cache += head * vc_stride_h
    if PAGE_SIZE > 0:
        table += sequence * table_stride
    else:
        k_cache += sequence * kc_stride_b
        v_cache += sequence * vc_stride_b
    # Steps that threads copy come first.
    for i in range(0, steps):
        stage, phase = stage_of(i, STAGES)
        mbarrier.wait(k_free.index(stage), phase ^ 1)
        load_step(
            k_desc, k_new, kn_stride, k_cache, kc_stride_b, kc_stride, table, k_smem.index(stage),
            k_ready.index(stage), i, batch, kv_head, new, first, end, tail, masked, BLOCK_N, HEAD_DIM, PAGE_SIZE,
            WARPS,
        )  # fmt: skip
        if (i > 0) & (i <= masked):
            complete(v_ready.index((i + STAGES - 1) % STAGES))
        mbarrier.wait(v_free.index(stage), phase ^ 1)
        load_step(
            v_desc, v_new, vn_stride, v_cache, vc_stride_b, vc_stride, table, v_smem.index(stage),
            v_ready.index(stage), i, batch, kv_head, new, first, end, tail, masked, BLOCK_N, HEAD_DIM, PAGE_SIZE,
            WARPS,
        )  # fmt: skip
        if i < masked:
            complete(k_ready.index(stage))
    if (steps > 0) & (masked == steps):
        async_copy.commit_group()
        complete(v_ready.index((steps + STAGES - 1) % STAGES))


@gluon.jit
def words_of_step(
    i, tail, masked, new, last_keys, tokens, rows, lists, bitmaps, first_tile, end_tile,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Which keys of step i each row sees. `tokens`: of the rows; `last_keys`: keys in the last step over the prefix."""
    WORDS: gl.constexpr = words_layout(BLOCK_N)
    TILE_WORDS: gl.constexpr = BLOCK_K // 32
    mask = gl.full([64, BLOCK_N // 32], -1, gl.int32, WORDS)
    if i < tail:
        mask = gl.zeros([64, BLOCK_N // 32], gl.int32, WORDS)
        word = i * (BLOCK_N // 32) + gl.arange(0, BLOCK_N // 32, layout=gl.SliceLayout(0, WORDS))
        of_tile = word // TILE_WORDS
        for tile in range(first_tile, end_tile):
            row = tokens - tile * BLOCK_Q
            in_tile = (row >= 0) & (row < BLOCK_Q)
            middle = gl.load(rows + tile * 4 + 1)
            for pair in range(gl.load(rows + tile * 4), middle):
                full = (of_tile >= gl.load(lists + 2 * pair)) & (of_tile < gl.load(lists + 2 * pair + 1))
                mask = gl.where(in_tile[:, None] & full[None, :], -1, mask)
            for visit in range(middle, gl.load(rows + tile * 4 + 2)):
                here = in_tile[:, None] & (of_tile == gl.load(lists + 2 * visit))[None, :]
                bitmap = gl.load(lists + 2 * visit + 1)
                at = bitmaps + bitmap.to(gl.int64) * (BLOCK_Q * TILE_WORDS)
                loaded = gl.load(
                    at + row[:, None] * TILE_WORDS + (word % TILE_WORDS)[None, :], mask=here & (bitmap >= 0), other=-1
                )
                mask = gl.where(here, loaded, mask)
    in_step = gl.where(i < tail, new - i * BLOCK_N, gl.where(i < masked, last_keys, BLOCK_N))
    return shifted(mask, in_step, BLOCK_N)


@gluon.jit
def consume(
    q, out, lse, sinks, lengths, begins, plan_rows, lists, bitmaps, q_stride_b, q_stride, q_stride_h, rows_stride,
    batch_size, new, all_rows, kv_heads, capacity, splits, row_tiles, score_scale,
    q_smem, k_smem, v_smem, k_ready, v_ready, k_free, v_free,
    HALF: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, FOLD_SCALE: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = scores_layout(BLOCK_N)
    SUMS: gl.constexpr = scores_layout(HEAD_DIM)
    LOADED: gl.constexpr = rows_layout(HEAD_DIM, 4)
    longest = new
    batch, kv_head, split, row_start, begin, new, first, end, tail, masked, steps = work_of(
        lengths, begins, plan_rows, lists, rows_stride, batch_size, new, kv_heads, capacity, splits, row_tiles,
        GROUP, BLOCK_Q, BLOCK_K, BLOCK_N,
    )  # fmt: skip
    row_start += 64 * HALF
    if (steps > 0) & (row_start < new * GROUP):
        rows = row_start + gl.arange(0, 64, layout=gl.SliceLayout(1, LOADED))
        columns = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LOADED))
        of_row = (rows // GROUP).to(gl.int64) * q_stride + (kv_head * GROUP + rows % GROUP).to(gl.int64) * q_stride_h
        of_row += begin * q_stride if begins is not None else batch.to(gl.int64) * q_stride_b
        query = gl.load(q + (of_row[:, None] + columns[None, :]), mask=(rows < new * GROUP)[:, None], other=0.0)
        q_smem.store(query)
        fence_async_shared()

        m_i = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        l_i = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
        heads = kv_head * GROUP + (row_start + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))) % GROUP
        if sinks is not None:  # counts once: in the first split, which is always in use
            m_i = gl.where(split == 0, gl.load(sinks + heads) * LOG2_E, m_i)
            l_i = gl.where(m_i == float("-inf"), 0.0, 1.0)
        acc = gl.zeros([64, HEAD_DIM], gl.float32, SUMS)
        tokens = (row_start + gl.arange(0, 64, layout=gl.SliceLayout(1, words_layout(BLOCK_N)))) // GROUP
        plan = plan_rows + batch.to(gl.int64) * rows_stride
        last_keys = (end - first) % BLOCK_N
        first_tile, end_tile = tiles_of(row_start, new, 64, GROUP, BLOCK_Q)
        # The first step looks at its mask whatever it is.
        s = next_scores(q_smem, k_smem, k_ready, 0, BLOCK_N, STAGES)
        mask = words_of_step(
            0, tail, masked, new, last_keys, tokens, plan, lists, bitmaps, first_tile, end_tile,
            BLOCK_Q, BLOCK_K, BLOCK_N,
        )  # fmt: skip
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_free.index(0))
        p, alpha, m_i, l_i = softmax(s, mask, m_i, l_i, score_scale, FOLD_SCALE)
        weights = packed(p, v_smem.dtype)
        for count in range(1, masked):
            mask = words_of_step(
                count, tail, masked, new, last_keys, tokens, plan, lists, bitmaps, first_tile, end_tile,
                BLOCK_Q, BLOCK_K, BLOCK_N,
            )  # fmt: skip
            acc, weights, m_i, l_i = step(
                acc, weights, q_smem, k_smem, v_smem, k_ready, v_ready, k_free, v_free, count, mask, m_i, l_i,
                score_scale, BLOCK_N, STAGES, FOLD_SCALE,
            )  # fmt: skip
        for count in range(gl.maximum(masked, 1), steps):
            acc, weights, m_i, l_i = step(
                acc, weights, q_smem, k_smem, v_smem, k_ready, v_ready, k_free, v_free, count, None, m_i, l_i,
                score_scale, BLOCK_N, STAGES, FOLD_SCALE,
            )  # fmt: skip
        acc = add_values(acc, weights, v_smem, v_ready, steps - 1, BLOCK_N, STAGES)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_free.index((steps - 1) % STAGES))

        nothing = l_i == 0.0
        inverse = gl.convert_layout(1.0 / gl.where(nothing, 1.0, l_i), gl.SliceLayout(1, SUMS))
        # A row without weights is 0, even if its zeros met infinite values.
        acc = gl.where(gl.convert_layout(nothing, gl.SliceLayout(1, SUMS))[:, None], 0.0, acc * inverse[:, None])
        # (splits, batch, new, heads, head_dim) and (splits, batch, heads, new); packed (splits, rows, heads, head_dim),
        # (splits, heads, rows)
        all_heads = kv_heads * GROUP
        before = split * all_rows.to(gl.int64)
        rows = row_start + gl.arange(0, 64, layout=gl.SliceLayout(1, SUMS))
        columns = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, SUMS))
        to_row = ((before + begin + rows // GROUP) * all_heads + kv_head * GROUP + rows % GROUP) * HEAD_DIM
        gl.store(
            out + (to_row[:, None] + columns[None, :]), acc.to(out.dtype.element_ty), mask=(rows < new * GROUP)[:, None]
        )
        rows = row_start + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
        to_lse = before * all_heads + rows // GROUP
        if begins is not None:
            to_lse += heads * all_rows.to(gl.int64) + begin
        else:
            to_lse += (batch * all_heads + heads).to(gl.int64) * longest
        gl.store(lse + to_lse, (m_i + gl.log2(l_i)) * LN_2, mask=rows < new * GROUP)
    else:  # a consumer without rows lets the other one go on
        for count in range(0, steps):
            stage, phase = stage_of(count, STAGES)
            mbarrier.wait(k_ready.index(stage), phase)
            mbarrier.arrive(k_free.index(stage))
            mbarrier.wait(v_ready.index(stage), phase)
            mbarrier.arrive(v_free.index(stage))


_CHANGING = [
    "table_stride",
    "rows_stride",
    "batch_size",
    "new",
    "all_rows",
    "kv_heads",
    "capacity",
    "splits",
    "row_tiles",
]


@gluon.jit(do_not_specialize=_CHANGING)
def split_kernel(
    k_desc, v_desc, q, k_new, v_new, k_cache, v_cache, lengths, table, plan_rows, lists, bitmaps, out, lse, begins,
    sinks, q_stride_b, q_stride, q_stride_h, kn_stride_b, kn_stride, kn_stride_h, vn_stride_b, vn_stride, vn_stride_h,
    kc_stride_b, kc_stride, kc_stride_h, vc_stride_b, vc_stride, vc_stride_h, table_stride, rows_stride, batch_size,
    new, all_rows, kv_heads, capacity, splits, row_tiles, score_scale, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    PAGE_SIZE: gl.constexpr, WARPS: gl.constexpr, FOLD_SCALE: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = q.dtype.element_ty
    RING: gl.constexpr = ring_layout(BLOCK_N, HEAD_DIM, DTYPE)
    q_smem = gl.allocate_shared_memory(DTYPE, [2, 64, HEAD_DIM], query_layout(HEAD_DIM, DTYPE))
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, BLOCK_N, 1, HEAD_DIM], RING)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, BLOCK_N, 1, HEAD_DIM], RING)
    k_ready, v_ready, k_free, v_free = ring_barriers(STAGES)
    # TMA signals the barriers through the asynchronous proxy.
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                consume,
                (
                    q, out, lse, sinks, lengths, begins, plan_rows, lists, bitmaps, q_stride_b, q_stride, q_stride_h,
                    rows_stride, batch_size, new, all_rows, kv_heads, capacity, splits, row_tiles, score_scale,
                    q_smem.index(0), k_smem, v_smem, k_ready, v_ready, k_free, v_free, 0, GROUP, HEAD_DIM, BLOCK_Q,
                    BLOCK_K, BLOCK_N, STAGES, FOLD_SCALE,
                ),
            ),
            (
                consume,
                (
                    q, out, lse, sinks, lengths, begins, plan_rows, lists, bitmaps, q_stride_b, q_stride, q_stride_h,
                    rows_stride, batch_size, new, all_rows, kv_heads, capacity, splits, row_tiles, score_scale,
                    q_smem.index(1), k_smem, v_smem, k_ready, v_ready, k_free, v_free, 1, GROUP, HEAD_DIM, BLOCK_Q,
                    BLOCK_K, BLOCK_N, STAGES, FOLD_SCALE,
                ),
            ),
            (
                produce,
                (
                    k_desc, v_desc, k_new, v_new, k_cache, v_cache, lengths, table, begins, plan_rows, lists,
                    kn_stride_b, kn_stride, kn_stride_h, vn_stride_b, vn_stride, vn_stride_h, kc_stride_b, kc_stride,
                    kc_stride_h, vc_stride_b, vc_stride, vc_stride_h, table_stride, rows_stride, batch_size, new,
                    kv_heads, capacity, splits, row_tiles, k_smem, v_smem, k_ready, v_ready, k_free, v_free, GROUP,
                    HEAD_DIM, BLOCK_Q, BLOCK_K, BLOCK_N, STAGES, PAGE_SIZE, WARPS,
                ),
            ),
        ],
        [4, WARPS],
        [224, 56],
    )  # fmt: skip
