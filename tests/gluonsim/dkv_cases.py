"""The faults that are planted in the kernel of dK and dV."""

from __future__ import annotations

from tests.gluonsim import Edit
from tests.gluonsim.attention_cases import STEPS

KERNEL = "pdkernels.gluon.block_sparse_attention_dkv"
PRODUCER = "        tma.async_copy_global_to_shared"

MUTATIONS = {
    # These break the protocol between the partitions.
    "a consumer does not wait for queries": Edit(STEPS, "    mbarrier.wait(k_ready.index(stage), phase)\n", ""),
    "a consumer does not wait for gradients": Edit(KERNEL, "    mbarrier.wait(grad_ready.index(stage), phase)\n", ""),
    "a consumer does not wait for keys": Edit(KERNEL, "    mbarrier.wait(kv_ready, 0)\n", ""),
    "parity of queries": Edit(
        STEPS, "mbarrier.wait(k_ready.index(stage), phase)", "mbarrier.wait(k_ready.index(stage), phase ^ 1)"
    ),
    "parity of gradients": Edit(
        KERNEL, "mbarrier.wait(grad_ready.index(stage), phase)", "mbarrier.wait(grad_ready.index(stage), phase ^ 1)"
    ),
    "parity of keys": Edit(KERNEL, "mbarrier.wait(kv_ready, 0)", "mbarrier.wait(kv_ready, 1)"),
    "queries freed while a product reads them": Edit(
        KERNEL,
        "        dk, s = warpgroup_mma_wait(1, deps=[dk, s])\n        mbarrier.arrive(q_free.index((count - 1) % STAGES))\n",
        "        mbarrier.arrive(q_free.index((count - 1) % STAGES))\n        dk, s = warpgroup_mma_wait(1, deps=[dk, s])\n",
    ),
    "queries freed a step early": Edit(KERNEL, "q_free.index((count - 1) % STAGES)", "q_free.index(count % STAGES)"),
    "queries never freed": Edit(KERNEL, "        mbarrier.arrive(q_free.index((count - 1) % STAGES))\n", ""),
    "gradients freed while a product reads them": Edit(
        KERNEL,
        "    dv = warpgroup_mma_wait(0, deps=[dv])\n    mbarrier.arrive(grad_free.index(stage))\n",
        "    mbarrier.arrive(grad_free.index(stage))\n    dv = warpgroup_mma_wait(0, deps=[dv])\n",
    ),
    "gradients never freed": Edit(KERNEL, "    mbarrier.arrive(grad_free.index(stage))\n", ""),
    "gradients freed twice": Edit(
        KERNEL, "mbarrier.arrive(grad_free.index(stage))", "mbarrier.arrive(grad_free.index(stage), count=2)"
    ),
    "scores used before they are complete": Edit(KERNEL, "warpgroup_mma_wait(1, deps=[dk, s])", "dk, s"),
    "the first scores used before they are complete": Edit(
        KERNEL, "warpgroup_mma_wait(1, deps=[s])", "warpgroup_mma_wait(2, deps=[s])"
    ),
    "their gradients used before they are complete": Edit(
        KERNEL, "warpgroup_mma_wait(0, deps=[dp])", "warpgroup_mma_wait(1, deps=[dp])"
    ),
    "sums used before they are complete": Edit(
        KERNEL, "warpgroup_mma_wait(0, deps=[dv])", "warpgroup_mma_wait(1, deps=[dv])"
    ),
    "the last sums used before they are complete": Edit(
        KERNEL, "    acc_k = warpgroup_mma_wait(0, deps=[acc_k])\n", ""
    ),
    "the last step of the step before": Edit(KERNEL, "q_ready, steps - 1, BLOCK_M", "q_ready, steps - 2, BLOCK_M"),
    "the producer does not wait for free queries": Edit(
        KERNEL, "        mbarrier.wait(q_free.index(stage), phase ^ 1)\n", ""
    ),
    "the producer does not wait for free gradients": Edit(
        KERNEL, "        mbarrier.wait(grad_free.index(stage), phase ^ 1)\n", ""
    ),
    "the producer's parity of queries": Edit(
        KERNEL, "(q_free.index(stage), phase ^ 1)", "(q_free.index(stage), phase)"
    ),
    "the producer's parity of gradients": Edit(
        KERNEL, "(grad_free.index(stage), phase ^ 1)", "(grad_free.index(stage), phase)"
    ),
    "bytes of the queries alone": Edit(KERNEL, " + lse_desc.block_type.nbytes", ""),
    "bytes of the keys alone": Edit(KERNEL, " + v_desc.block_type.nbytes", ""),
    "more bytes of gradients": Edit(KERNEL, "delta_desc.block_type.nbytes)", "delta_desc.block_type.nbytes + 16)"),
    "keys where values belong": Edit(KERNEL, "k_smem.index(half))", "v_smem.index(half))"),
    "both halves of the keys in one place": Edit(KERNEL, "k_smem.index(half))", "k_smem.index(0))"),
    "gradients where queries belong": Edit(
        KERNEL, "grad_smem.index(stage))\n" + PRODUCER, "q_smem.index(stage))\n" + PRODUCER
    ),
    "the log-sum-exp signalled with the gradients": Edit(
        KERNEL, "(lse_desc, at_row, q_ready", "(lse_desc, at_row, grad_ready"
    ),
    "a barrier is not initialised": Edit(
        KERNEL, "        mbarrier.init(kv_ready.index(i), count=1)\n", "        pass\n"
    ),
    "a barrier waits for one consumer": Edit(
        STEPS, "mbarrier.init(k_free.index(i), count=2)", "mbarrier.init(k_free.index(i), count=1)"
    ),
    "no fence after the barriers": Edit(
        KERNEL, "    fence_async_shared()\n    gl.warp_specialize", "    gl.warp_specialize"
    ),
    # These give wrong values under a correct protocol.
    "hidden keys are seen": Edit(KERNEL, "    if mask is not None:\n        s = hide_transposed(s, mask)\n", ""),
    "bits of the other consumer's keys": Edit(KERNEL, "    column += 64 * HALF\n", ""),
    "bits of another step's queries": Edit(KERNEL, " + row * TILE_WORDS", ""),
    "bits of the first half of the keys": Edit(KERNEL, "word[:, None]), mask", "0 * word[:, None]), mask"),
    "what nobody sees is not cleared": Edit(KERNEL, "seen = masked + full > 0", "seen = masked + full >= 0"),
    "one head in steps with a mask": Edit(KERNEL, "head += i // masked", "head += 0"),
    "one head in steps without": Edit(KERNEL, "head += (i - masked * num_heads) // gl.maximum(full, 1)", "head += 0"),
    "ranges are one": Edit(KERNEL, "                pair += 1\n", ""),
    "the next head begins where the last one ended": Edit(
        KERNEL, "                    pair = begin\n", "                    pair += 0\n"
    ),
    "the same heads in every part": Edit(
        KERNEL, "head = kv_head * GROUP + piece_index * piece", "head = kv_head * GROUP"
    ),
    "results of another part": Edit(
        KERNEL, "(piece_index * (sequences // kv_heads) + batch)", "(0 * piece_index + batch)"
    ),
    "more heads than there are": Edit(KERNEL, "gl.minimum(piece, GROUP - piece_index * piece)", "piece"),
    "keys past the end are stored": Edit(KERNEL, "mask=(rows < rows_left)[:, None]", "mask=(rows < 64)[:, None]"),
    "dK is not scaled": Edit(KERNEL, "acc_k * scale", "acc_k"),
    "the scale counts twice": Edit(KERNEL, "        factor = 1.0\n", ""),
    "delta is left out": Edit(KERNEL, "- delta[None, :]", "- 0 * delta[None, :]"),
}
