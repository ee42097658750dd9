"""Random calls of speculative attention for the simulator, and the faults that are planted in its sources."""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pdkernels._attention import SpeculativeArguments
from pdkernels.reference.speculative_attention import speculative_attention as reference
from tests.gluonsim import Edit, attention_cases
from tests.gluonsim.attention_cases import LAUNCH, STEPS, plan_of, random_mask
from tests.harness.error_budget import assert_within_budget
from tests.ops.speculative_cases import Inputs, make_inputs

SPECULATIVE, KERNEL = "pdkernels.gluon.launch_speculative", "pdkernels.gluon.speculative_attention"


class Call(NamedTuple):
    given: SpeculativeArguments
    mask: Tensor
    """(batch, new, new), or (new, new)."""


def random_call(seed: int, longest: int = 700, most: int = 150) -> Call:
    """Any square mask, any lengths, pages of one or two steps or none, packed or not; so long a prefix and so many tokens
    at most."""
    chosen = random.Random(seed)
    kv_heads, group = chosen.choice(((1, 4), (1, 3), (2, 1), (2, 2), (1, 7)))
    new = chosen.choice((chosen.randint(33, most), 32 // group + chosen.randint(1, 40)))
    batch = chosen.randint(1, 2)
    lengths = [chosen.choice((0, chosen.randint(0, longest), chosen.choice((128, 256, 384)))) for _ in range(batch)]
    inputs = make_inputs(
        new,
        lengths,
        slots=max(lengths) + chosen.choice((1, 40, 300)),
        page_size=chosen.choice((0, 0, 128, 256)),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=chosen.choice((64, 64, 128)),
        dtype=chosen.choice((torch.float16, torch.bfloat16)),
    )
    masks = [random_mask(chosen, new, new) for _ in range(chosen.choice((1, batch)))]
    blocks = [chosen.choice((16, 32, 64, 128)), chosen.choice((32, 64, 128))]
    plan = plan_of(masks, *blocks)
    scale = chosen.choice((inputs.q.shape[-1] ** -0.5, inputs.q.shape[-1] ** -0.5, -0.3, 2.0))
    sinks = None
    if chosen.random() < 0.3:
        sinks = torch.randn(kv_heads * group, generator=torch.Generator().manual_seed(seed)) * 3
        sinks[0] = float("-inf")
    packed = {}
    if chosen.random() < 0.3:
        inputs, packed = pack(inputs, [new, *(chosen.randint(0, new) for _ in range(batch - 1))])
    *tensors, table = inputs
    given = SpeculativeArguments(*tensors, *plan, *blocks, scale, table, sinks=sinks, **packed)
    return Call(given, torch.stack(masks) if len(masks) > 1 else masks[0])


def cut_tile_call() -> Call:
    """The new tokens all see a tile of a second step that lies past the end and so comes first in their lists; of the first step they see some."""
    new, generator = 150, torch.Generator().manual_seed(0)
    *tensors, table = make_inputs(new, [40], slots=200, heads=2, kv_heads=1, head_dim=64, dtype=torch.float16)
    mask = torch.rand(new, new, generator=generator) < 0.5
    mask[:, 128:] = True
    return Call(SpeculativeArguments(*tensors, *plan_of([mask], 32, 128), 32, 128, 0.125, table), mask)


def pack(inputs: Inputs, counts: list[int]) -> tuple[Inputs, dict[str, Any]]:
    """The first rows of each sequence, one sequence after the other."""
    rows = (torch.cat([x[b, :count] for b, count in enumerate(counts)]) for x in inputs[:3])
    begins = F.pad(torch.tensor(counts).cumsum(0), (1, 0))
    return Inputs(*rows, *inputs[3:]), {"cu_seqlens": begins, "max_new": inputs.q.shape[1]}


def check(call: Call, results: tuple[Tensor, Tensor]) -> None:
    given = call.given
    options = {name: getattr(given, name) for name in ("cu_seqlens", "block_table", "scale", "sinks")}
    exact, same = (
        reference(*(x.to(dtype) for x in given[:5]), given.lengths, call.mask, **options)
        for dtype in (torch.float64, given.q.dtype)
    )
    # The kernel's logarithm has base 2, and so one rounding more.
    same = (same[0], same[1].mul(math.log2(math.e)).mul(math.log(2)))
    for name, *tensors in zip(("out", "lse"), results, exact, same):
        assert_within_budget(*tensors, name=name)


def launcher(simulator: Any, stages: int = 2) -> Any:
    """The module that launches the kernel, with rings that go round soon."""
    steps = simulator.load(LAUNCH).STEPS
    steps.update({size: each._replace(stages=min(stages, each.stages)) for size, each in steps.items()})
    return simulator.load(SPECULATIVE)


# Every one breaks the protocol between the partitions. What the kernel shares with that of block-sparse attention has the same faults.
MUTATIONS = {name: edit for name, edit in attention_cases.MUTATIONS.items() if edit.module == STEPS} | {
    "no fence after the queries": Edit(
        KERNEL, "        q_smem.store(query)\n        fence_async_shared()\n", "        q_smem.store(query)\n"
    ),
    "both consumers have their queries in one place": Edit(KERNEL, "q_smem.index(1)", "q_smem.index(0)"),
    "keys freed while a product reads them": Edit(
        KERNEL,
        "        s = warpgroup_mma_wait(0, deps=[s])\n        mbarrier.arrive(k_free.index(0))\n",
        "        mbarrier.arrive(k_free.index(0))\n        s = warpgroup_mma_wait(0, deps=[s])\n",
    ),
    "the first keys freed twice": Edit(
        KERNEL, "mbarrier.arrive(k_free.index(0))", "mbarrier.arrive(k_free.index(0), count=2)"
    ),
    "the first keys never freed": Edit(KERNEL, "        mbarrier.arrive(k_free.index(0))\n", ""),
    "the last values of the step before": Edit(KERNEL, "v_ready, steps - 1, BLOCK_N", "v_ready, steps - 2, BLOCK_N"),
    "a consumer without rows frees nothing": Edit(
        KERNEL,
        "            mbarrier.arrive(k_free.index(stage))\n            mbarrier.wait(v_ready",
        "            mbarrier.wait(v_ready",
    ),
    "a consumer without rows does not wait": Edit(
        KERNEL,
        "            mbarrier.wait(k_ready.index(stage), phase)\n            mbarrier.arrive(k_free.index(stage))\n"
        "            mbarrier.wait(v_ready.index(stage), phase)\n",
        "            mbarrier.arrive(k_free.index(stage))\n",
    ),
    "the producer does not wait for free keys": Edit(
        KERNEL, "        mbarrier.wait(k_free.index(stage), phase ^ 1)\n", ""
    ),
    "the producer does not wait for free values": Edit(
        KERNEL, "        mbarrier.wait(v_free.index(stage), phase ^ 1)\n", ""
    ),
    "the producer's parity of keys": Edit(
        KERNEL, "mbarrier.wait(k_free.index(stage), phase ^ 1)", "mbarrier.wait(k_free.index(stage), phase)"
    ),
    "the producer's parity of values": Edit(
        KERNEL, "mbarrier.wait(v_free.index(stage), phase ^ 1)", "mbarrier.wait(v_free.index(stage), phase)"
    ),
    "fewer bytes": Edit(KERNEL, "desc.block_type.nbytes", "desc.block_type.nbytes // 2"),
    "more bytes": Edit(KERNEL, "desc.block_type.nbytes", "desc.block_type.nbytes + 16"),
    "copies are not awaited": Edit(KERNEL, "    async_copy.wait_group(1)\n", ""),
    "the copy before is not awaited": Edit(KERNEL, "async_copy.wait_group(1)", "async_copy.wait_group(2)"),
    "copies are not committed": Edit(KERNEL, "    async_copy.commit_group()\n\n\n", "\n\n"),
    "no fence after the copies": Edit(
        KERNEL, "    async_copy.wait_group(1)\n    fence_async_shared()\n", "    async_copy.wait_group(1)\n"
    ),
    "a fence before the copies have arrived": Edit(
        KERNEL,
        "    async_copy.wait_group(1)\n    fence_async_shared()\n",
        "    fence_async_shared()\n    async_copy.wait_group(1)\n",
    ),
    "threads do not meet after their copies": Edit(KERNEL, "    gl.thread_barrier()\n", ""),
    "keys signalled as they are issued": Edit(
        KERNEL,
        "        if i < masked:\n            complete(k_ready.index(stage))\n",
        "        if i < masked:\n            mbarrier.arrive(k_ready.index(stage))\n",
    ),
    "values of the step before never signalled": Edit(
        KERNEL,
        "        if (i > 0) & (i <= masked):\n            complete(v_ready.index((i + STAGES - 1) % STAGES))\n",
        "",
    ),
    "values signalled in another stage": Edit(
        KERNEL,
        "            complete(v_ready.index((i + STAGES - 1) % STAGES))\n",
        "            complete(v_ready.index(i % STAGES))\n",
    ),
    "one step of values too many is signalled": Edit(KERNEL, "(i > 0) & (i <= masked)", "i > 0"),
    "one step of keys too many is signalled": Edit(KERNEL, "        if i < masked:\n", "        if i <= masked:\n"),
    "the last values never signalled": Edit(
        KERNEL, "    if (steps > 0) & (masked == steps):\n", "    if (steps > 0) & (masked > steps):\n"
    ),
    "the last values signalled before they arrive": Edit(
        KERNEL,
        "        async_copy.commit_group()\n        complete(v_ready.index((steps",
        "        complete(v_ready.index((steps",
    ),
    "no fence after the barriers": Edit(
        KERNEL, "    fence_async_shared()\n    gl.warp_specialize", "    gl.warp_specialize"
    ),
    "rows in another part of a step": Edit(
        KERNEL, "smem.slice(chunk * PART, PART)", "smem.slice(chunk * PART // 2, PART)"
    ),
}
# Every one gives wrong values, or reads what it must not, under a correct protocol.
WRONG_VALUES = {
    "new tokens of another tile of queries": Edit(
        KERNEL, "row = tokens - tile * BLOCK_Q", "row = tokens - 0 * BLOCK_Q"
    ),
    "full tiles are not seen": Edit(
        KERNEL,
        "mask = gl.where(in_tile[:, None] & full[None, :], -1, mask)",
        "mask = gl.where(in_tile[:, None] & full[None, :], 0, mask)",
    ),
    "every row sees the tiles of all": Edit(
        KERNEL, "here = in_tile[:, None] & (of_tile", "here = (row >= -4096)[:, None] & (of_tile"
    ),
    "words of another tile": Edit(KERNEL, "(word % TILE_WORDS)[None, :]", "(word % 1)[None, :]"),
    "what is past the prefix is seen": Edit(KERNEL, "gl.where(i < masked, last_keys, BLOCK_N)", "BLOCK_N"),
    "what is past the prefix is copied": Edit(
        KERNEL, "        mask = rows < rows_left\n", "        mask = rows < BLOCK_N\n"
    ),
    "a step of new tokens too few": Edit(
        KERNEL, "tail = gl.maximum(gl.cdiv(gl.minimum(seen * BLOCK_K, new), BLOCK_N), 1)", "tail = 1"
    ),
    "the tile past the end is forgotten": Edit(
        KERNEL,
        "            seen = gl.maximum(seen, gl.load(lists + 2 * middle, mask=last > middle, other=-1) + 1)\n",
        "",
    ),
    "the new tokens in every split": Edit(KERNEL, "    if split == in_use - 1:\n", "    if split <= in_use - 1:\n"),
    "the first split twice": Edit(
        KERNEL, "first = gl.minimum(split * keys, length)", "first = gl.minimum(0 * keys, length)"
    ),
    "the sink in every split": Edit(KERNEL, "gl.where(split == 0, gl.load", "gl.where(split >= 0, gl.load"),
    "the sink of another head": Edit(KERNEL, "gl.load(sinks + heads)", "gl.load(sinks + heads * 0)"),
    "queries of another head": Edit(KERNEL, "(kv_head * GROUP + rows % GROUP).to", "(kv_head * GROUP + rows * 0).to"),
    "the page of another slot": Edit(KERNEL, "table + slot // PAGE_SIZE", "table + slot * 0"),
    "the page of another step": Edit(KERNEL, "table + start // PAGE_SIZE", "table + first // PAGE_SIZE"),
    "slots of a page from its beginning": Edit(KERNEL, "start % PAGE_SIZE\n", "0 * start\n"),
    "results of another split": Edit(KERNEL, "before = split * all_rows", "before = 0 * all_rows"),
    "packed sequences begin at the first row": Edit(
        KERNEL, "of_row += begin * q_stride if", "of_row += 0 * q_stride if"
    ),
}
