"""Code that the attention kernels in Gluon share: the online softmax, bits of a tile, walks over the ranges of a plan.

A consumer is a warp group of four warps that owns 64 rows. Its scores ``(64, BLOCK_N)`` and its sums ``(64, HEAD_DIM)``
have the layout of wgmma, in which a thread holds pairs of columns of two rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait


@gluon.constexpr_function
def scores_layout(columns):
    """The layout of a product of 64 rows and so many columns."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def weights_layout(columns):
    """The layout of weights as the left operand of a product with so many columns."""
    return gl.DotOperandLayout(0, scores_layout(columns), 2)


@gluon.constexpr_function
def rows_layout(head_dim, warps):
    """The layout of whole rows, 16 bytes a thread."""
    across = head_dim // 8
    return gl.BlockedLayout([1, 8], [32 // across, across], [warps, 1], [1, 0])


@gluon.constexpr_function
def bits_layout(columns):
    """The layout of ``(64, columns / 32, 4, 4, 2)`` bits, such that a reshape to ``(64, columns)`` moves nothing
    between threads: of a word's bits ``8 i + 2 j + k`` a thread holds those of one j, in registers."""
    word_bases = [[0, 1 << i, 0, 0, 0] for i in range((columns // 32).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 0, 1], [8, 0, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 2, 0, 0], *word_bases],
        lane_bases=[[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [4, 0, 0, 0, 0]],
        warp_bases=[[16, 0, 0, 0, 0], [32, 0, 0, 0, 0]],
        block_bases=[],
        shape=[64, columns // 32, 4, 4, 2],
    )


@gluon.jit
def stage_of(count, STAGES: gl.constexpr):
    """(slot of a ring, parity of its phase) of the `count`-th use of the ring."""
    return count % STAGES, (count // STAGES) & 1


@gluon.jit
def ring_barriers(STAGES: gl.constexpr):
    """``(k_ready, v_ready, k_free, v_free)`` of rings with a producer and two consumers; a fence must follow."""
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_free.index(i), count=2)
    return k_ready, v_ready, k_free, v_free


@gluon.jit
def steps_in_ranges(lists, begin, middle, CUTS: gl.constexpr):
    """How many steps the ranges of full tiles from `begin` to `middle` take; a tile is CUTS steps."""
    tiles = 0
    for pair in range(begin, middle):
        tiles += gl.load(lists + 2 * pair + 1) - gl.load(lists + 2 * pair)
    return tiles * CUTS


@gluon.constexpr_function
def words_layout(columns):
    """The layout of the ``(64, columns / 32)`` words that hold these bits."""
    return gl.SliceLayout(2, gl.SliceLayout(2, gl.SliceLayout(4, bits_layout(columns))))


@gluon.jit
def words_of(
    bitmaps, bitmap, columns_left, row, column,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """The part ``[row : row + 64, column : column + BLOCK_N]`` of a bitmap as `shifted` words, all ones for -1."""
    WORDS: gl.constexpr = words_layout(BLOCK_N)
    TILE_WORDS: gl.constexpr = (BLOCK_K + 31) // 32
    rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, WORDS))
    word = gl.arange(0, BLOCK_N // 32, layout=gl.SliceLayout(0, WORDS))
    at = bitmaps + bitmap.to(gl.int64) * (BLOCK_Q * TILE_WORDS) + column // 32
    loaded = gl.load(at + rows[:, None] * TILE_WORDS + word[None, :], mask=bitmap >= 0, other=-1)
    return shifted(loaded, columns_left, BLOCK_N)


@gluon.jit
def shifted(loaded, columns_left, BLOCK_N: gl.constexpr):
    """Words, each shifted for the columns of its thread. Columns from `columns_left` on are 0, at no cost an
    element."""
    GROUPS: gl.constexpr = gl.SliceLayout(4, bits_layout(BLOCK_N))
    PAIRS: gl.constexpr = gl.SliceLayout(2, GROUPS)
    word = gl.arange(0, BLOCK_N // 32, layout=gl.SliceLayout(0, words_layout(BLOCK_N)))
    valid_bits = gl.minimum(gl.maximum(columns_left - 32 * word, 0), 32)
    loaded &= gl.where(valid_bits == 32, -1, (1 << valid_bits) - 1)[None, :]
    pair = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, PAIRS)))
    return loaded[:, :, None] >> (2 * pair)[None, None, :]


@gluon.jit
def hide(s, mask):
    """Scores, -inf where the bit is 0. The compiler knows the position of every bit, so a test is one instruction."""
    BLOCK_N: gl.constexpr = s.shape[1]
    BITS: gl.constexpr = bits_layout(BLOCK_N)
    GROUPS: gl.constexpr = gl.SliceLayout(4, BITS)
    group = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, GROUPS))))
    first = (1 << (8 * group))[None, None, :, None]
    bit = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, BITS)))))
    tested = first[:, :, :, :, None] << bit[None, None, None, None, :]
    zeros = gl.zeros_like(tested)
    mask = gl.reshape(mask[:, :, None, :][:, :, :, :, None] | zeros, [64, BLOCK_N])
    tested = gl.reshape(tested | gl.zeros([64, BLOCK_N // 32, 4, 4, 2], gl.int32, BITS), [64, BLOCK_N])
    SCORES: gl.constexpr = scores_layout(BLOCK_N)
    mask = gl.convert_layout(mask, SCORES, assert_trivial=True)
    tested = gl.convert_layout(tested, SCORES, assert_trivial=True)
    return hidden(s, mask, tested)


@gluon.jit
def hidden(s, mask, tested):
    """Scores, -inf where a word has none of the bits that are tested."""
    # Written out, since LLVM would gather booleans in words.
    return gl.inline_asm_elementwise(
        """
        {
        .reg .pred seen;
        .reg .b32 bit;
        and.b32 bit, $2, $3;
        setp.ne.b32 seen, bit, 0;
        selp.f32 $0, $1, 0fFF800000, seen;
        }
        """,
        "=f,f,r,r", [s, mask, tested], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def softmax(s, mask, m_i, l_i, score_scale, FOLD_SCALE: gl.constexpr):
    """``(p, alpha, m_i, l_i)`` of each row, in base 2: the weights of a step, the factor of what was added up before
    it, and the running maximum and sum. `mask` None: everything is visible."""
    factor = score_scale
    if not FOLD_SCALE:
        s *= score_scale
        factor = 1.0
    if mask is not None:
        s = hide(s, mask)
    m_ij = gl.maximum(m_i, gl.max(s, 1) * factor)
    origin = m_ij
    if mask is not None:
        # A row without a visible key so far has the maximum -inf; any finite origin keeps its weights at 0.
        origin = gl.where(m_ij == float("-inf"), 0.0, m_ij)
    p = gl.exp2(s * factor - origin[:, None])
    alpha = gl.exp2(m_i - origin)
    return p, alpha, m_ij, l_i * alpha + gl.sum(p, 1)


@gluon.jit
def next_scores(q_smem, k_smem, k_ready, count, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):
    """Starts the product of 64 rows with the keys of step `count`, once they have arrived."""
    stage, phase = stage_of(count, STAGES)
    mbarrier.wait(k_ready.index(stage), phase)
    zeros = gl.zeros([64, BLOCK_N], gl.float32, scores_layout(BLOCK_N))
    keys = k_smem.index(stage).reshape([BLOCK_N, q_smem.shape[1]]).permute((1, 0))
    return warpgroup_mma(q_smem, keys, zeros, use_acc=False, is_async=True)


@gluon.jit
def add_values(acc, weights, v_smem, v_ready, count, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):
    """Starts ``acc + weights @ values`` of step `count`, once the values have arrived; `weights` are `packed`."""
    stage, phase = stage_of(count, STAGES)
    mbarrier.wait(v_ready.index(stage), phase)
    weights = unpacked(weights, v_smem.dtype, acc.shape[1])
    return warpgroup_mma(weights, v_smem.index(stage).reshape([BLOCK_N, acc.shape[1]]), acc, is_async=True)


@gluon.jit
def step(
    acc, weights, q_smem, k_smem, v_smem, k_ready, v_ready, k_free, v_free, count, mask, m_i, l_i, score_scale,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, FOLD_SCALE: gl.constexpr,
):  # fmt: skip
    """The scores of step `count`; its softmax runs beside the product with the values of the step before."""
    s = next_scores(q_smem, k_smem, k_ready, count, BLOCK_N, STAGES)
    acc = add_values(acc, weights, v_smem, v_ready, count - 1, BLOCK_N, STAGES)
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_free.index(count % STAGES))
    p, alpha, m_i, l_i = softmax(s, mask, m_i, l_i, score_scale, FOLD_SCALE)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_free.index((count - 1) % STAGES))
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, scores_layout(acc.shape[1])))[:, None]
    return acc, packed(p, v_smem.dtype), m_i, l_i


@gluon.jit
def packed(p, DTYPE: gl.constexpr):
    """Weights in the dtype of the values, two in a word, so that a loop carries them without taking them apart."""
    first, second = gl.split(gl.reshape(p, [64, p.shape[1] // 2, 2]))
    if DTYPE == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [first, second], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [first, second], dtype=gl.int32, is_pure=True, pack=1
        )


@gluon.jit
def unpacked(packed_weights, DTYPE: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Unpacks such weights as an operand."""
    return gl.convert_layout(unpacked_pairs(packed_weights, DTYPE), weights_layout(HEAD_DIM), assert_trivial=True)


@gluon.jit
def unpacked_pairs(packed_weights, DTYPE: gl.constexpr):
    """Such weights in their own dtype, where they were computed."""
    if DTYPE == gl.bfloat16:
        first, second = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [packed_weights], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
        )
    else:
        first, second = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [packed_weights], dtype=(gl.float16, gl.float16), is_pure=True, pack=1
        )
    return gl.reshape(gl.join(first, second), [64, 2 * packed_weights.shape[1]])
