"""The faults that are planted in the backward pass of five products."""

from __future__ import annotations

from tests.gluonsim import Edit
from tests.gluonsim.attention_cases import STEPS

LAUNCH, KERNEL = "pdkernels.gluon.launch_one_pass", "pdkernels.gluon.block_sparse_attention_one_pass"
TURNS = "pdkernels.gluon.block_sparse_attention_turns"
LOOK = '        while gl.atomic_add(counter, 0, sem="acquire", scope="gpu") != before:\n            pass\n'
RELEASE = '        gl.atomic_add(counter, 1, sem="release", scope="gpu")\n'
ADDED = "        mbarrier.wait(added, i & 1)\n"

MUTATIONS = {
    # These break the order in which programs add to dQ, or what they know of each other.
    "turns are not waited for": Edit(KERNEL, LOOK, ""),
    "consumers do not wait for turns": Edit(KERNEL, "    mbarrier.wait(turn_ready, count & 1)\n", ""),
    "parity of turns": Edit(KERNEL, "(turn_ready, count & 1)", "(turn_ready, count & 1 ^ 1)"),
    "one turn too early": Edit(KERNEL, LOOK, LOOK.replace('scope="gpu") != before', 'scope="gpu") + 1 < before')),
    "a turn that is seen but not acquired": Edit(KERNEL, 'sem="acquire"', 'sem="relaxed"'),
    "a turn that is handed on without a fence": Edit(KERNEL, 'sem="release"', 'sem="relaxed"'),
    "a turn that is handed on before the sums are added": Edit(KERNEL, ADDED + RELEASE, RELEASE + ADDED),
    "a turn that is never handed on": Edit(KERNEL, RELEASE, ""),
    "a turn that is handed on for the SM alone": Edit(KERNEL, RELEASE, RELEASE.replace("gpu", "cta")),
    "one consumer hands on": Edit(KERNEL, "mbarrier.init(added, count=2)", "mbarrier.init(added, count=1)"),
    "one thread arrives before the others have added": Edit(
        KERNEL, "    gl.thread_barrier()\n    mbarrier.arrive(added)", "    mbarrier.arrive(added)"
    ),
    "sums added after the turn is over": Edit(
        KERNEL, "    # One thread arrives for all.\n    gl.thread_barrier()\n    mbarrier.arrive(added)\n", ""
    ),
    "counters as they were": Edit(TURNS, "    gl.store(counters + 1 + item, 0)\n", ""),
    "tickets as they were": Edit(TURNS, "        gl.store(counters, 0)\n", "        pass\n"),
    "no tickets": Edit(
        KERNEL, 'item = gl.atomic_add(counters, 1, sem="relaxed", scope="gpu")', "item = gl.program_id(0)"
    ),
    "one place further": Edit(TURNS, "2 * before + gl", "2 * before + 2 + gl"),
    "places by the number of a tile, not by its start": Edit(
        TURNS, "listed_before(of_k + 3, key_position,", "listed_before(of_k + 3, key,"
    ),
    "the last but one is the last": Edit(TURNS, "before == visits - 1", "before == visits - 2"),
    "nobody is the last": Edit(TURNS, "gl.where(before == visits - 1, 1, 0)", "0"),
    "programs of a tile share a turn": Edit(KERNEL, "turn // 2 * CUTS + cut", "turn // 2 * CUTS"),
    "each program of the last tile is the last": Edit(KERNEL, "gl.where(cut == CUTS - 1, turn % 2, 0)", "turn % 2"),
    "the first one adds to what was there": Edit(KERNEL, "    elif turn >= 2:\n", "    elif turn >= 0:\n"),
    "the second one stores": Edit(KERNEL, "    elif turn >= 2:\n", "    elif turn >= 4:\n"),
    "the last one forgets the others": Edit(KERNEL, "mask=turn >= 2, other=0.0", "mask=turn >= 9999, other=0.0"),
    "the turn of the next step": Edit(KERNEL, "            dq, count - 1, sums,", "            dq, count, sums,"),
    # These break the protocol between the partitions.
    "a consumer does not wait for keys": Edit(KERNEL, "    mbarrier.wait(kv_ready, 0)\n", ""),
    "a consumer does not wait for queries": Edit(STEPS, "    mbarrier.wait(k_ready.index(stage), phase)\n", ""),
    "a consumer does not wait for gradients": Edit(
        KERNEL, "    mbarrier.wait(grad_ready.index(stage), phase)\n    # The", "    # The"
    ),
    "a consumer does not wait for the other one's gradients": Edit(
        KERNEL, "    mbarrier.wait(ds_ready.index(slot), phase)\n", ""
    ),
    "gradients of scores overwritten while they are read": Edit(
        KERNEL, "    slot = count % 2\n", "    slot = 0 * count\n"
    ),
    "one place for the gradients of scores": Edit(
        KERNEL, "    slot, phase = stage_of(count, 2)\n", "    slot, phase = 0, stage_of(count, 1)[1]\n"
    ),
    "gradients of one consumer are enough": Edit(
        KERNEL, "mbarrier.init(ds_ready.index(i), count=2)", "mbarrier.init(ds_ready.index(i), count=1)"
    ),
    "no fence after the gradients of scores": Edit(
        KERNEL, "    fence_async_shared()\n    gl.thread_barrier()\n", "    gl.thread_barrier()\n"
    ),
    "queries freed a step early": Edit(KERNEL, "q_free.index((count - 1) % STAGES)", "q_free.index(count % STAGES)"),
    "queries never freed": Edit(KERNEL, "        mbarrier.arrive(q_free.index((count - 1) % STAGES))\n", ""),
    "gradients freed while a product reads them": Edit(
        KERNEL,
        "    acc_v = warpgroup_mma_wait(0, deps=[acc_v])\n    mbarrier.arrive(grad_free.index(stage))\n",
        "    mbarrier.arrive(grad_free.index(stage))\n    acc_v = warpgroup_mma_wait(0, deps=[acc_v])\n",
    ),
    "sums of dQ used before they are complete": Edit(
        KERNEL, "warpgroup_mma_wait(1, deps=[acc_k, dq])", "warpgroup_mma_wait(2, deps=[acc_k, dq])"
    ),
    "the last sums of dQ used before they are complete": Edit(
        KERNEL, "warpgroup_mma_wait(0, deps=[acc_k, of_queries])", "warpgroup_mma_wait(1, deps=[acc_k, of_queries])"
    ),
    "scores used before they are complete": Edit(
        KERNEL, "    s = warpgroup_mma_wait(1, deps=[s])", "    s = warpgroup_mma_wait(2, deps=[s])"
    ),
    "their gradients used before they are complete": Edit(
        KERNEL, "warpgroup_mma_wait(0, deps=[dp])", "warpgroup_mma_wait(1, deps=[dp])"
    ),
    "the producer does not wait for free queries": Edit(
        KERNEL, "        mbarrier.wait(q_free.index(stage), phase ^ 1)\n", ""
    ),
    "the producer does not wait for free gradients": Edit(
        KERNEL, "        mbarrier.wait(grad_free.index(stage), phase ^ 1)\n", ""
    ),
    "bytes of half the keys": Edit(KERNEL, "2 * (k_desc.block_type.nbytes", "1 * (k_desc.block_type.nbytes"),
    # These give wrong values under a correct protocol.
    "gradients of the first keys for all": Edit(KERNEL, "ds_smem.index(2 * slot + half)", "ds_smem.index(2 * slot)"),
    "the first columns of the keys for both consumers": Edit(
        KERNEL, ".slice(64 * HALF, 64, dim=1)", ".slice(0, 64, dim=1)"
    ),
    "both consumers add to one half": Edit(KERNEL, "(first * q_blocks * 2 + HALF)", "(first * q_blocks * 2)"),
    "both consumers store one half": Edit(KERNEL, "first_head) * HEAD_DIM + 64 * HALF", "first_head) * HEAD_DIM"),
    "dQ is not scaled": Edit(KERNEL, "rows_of(dq + before) * scale", "rows_of(dq + before)"),
    "hidden keys are seen": Edit(KERNEL, "if (bitmap >= 0) | (", "if (bitmap < -5) | ("),
    "bits of the other consumer's keys": Edit(KERNEL, "column + 64 * HALF, keys", "column, keys"),
    "bits of other queries": Edit(KERNEL, "    queries += cut * QUERIES\n", ""),
    "one head": Edit(KERNEL, "head += gl.where(done, 1, 0)", "head += gl.where(done, num_heads, 0)"),
    "the visit of the step before": Edit(KERNEL, "visit + gl.where(done, TURN, 0), gl", "visit, gl"),
    "a visit of keys that nobody sees": Edit(
        KERNEL, "mask=seen, other=-1) if gradients is None", "mask=seen, other=7) if gradients is None"
    ),
    "dQ of queries that see nothing": Edit(TURNS, "        clear_rows(", "        0 and clear_rows("),
    "dK of keys that nobody sees": Edit(KERNEL, "gl.where(seen, acc_k * scale, 0.0)", "acc_k * scale"),
    "visits of as many tiles left out": Edit(
        TURNS, "slot += listed_before(of_q + 3, behind,", "slot += listed_before(of_q + 3, first,"
    ),
    "visits in no order": Edit(TURNS, "of_q + 3, query_position + 1,", "of_q + 3, query + 1,"),
}
