"""Random calls of block-sparse attention for the simulator, and the faults that are planted in its sources."""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pdkernels._attention import AttentionArguments, GradientArguments
from pdkernels.reference.block_sparse_attention import block_sparse_attention as reference
from pdkernels.triton.block_sparse_attention import Saved
from tests.gluonsim import Edit
from tests.harness.error_budget import assert_within_budget
from tests.masks.brute_force import brute_force

LAUNCH = "pdkernels.gluon.launch"
STEPS, FORWARD = "pdkernels.gluon._steps", "pdkernels.gluon.block_sparse_attention"
BACKWARD = "pdkernels.gluon.block_sparse_attention_backward"


class Call(NamedTuple):
    given: AttentionArguments
    mask: Tensor
    """(batch, q_len, kv_len)."""


def random_mask(chosen: random.Random, q_len: int, kv_len: int) -> Tensor:
    """Segments that see each other, are causal or see nothing; some rows and columns are cut out."""
    generator = torch.Generator().manual_seed(chosen.randrange(2**31))
    if chosen.random() < 0.3:  # whole tiles, in several ranges
        rows, columns = torch.arange(q_len) // 128, torch.arange(kv_len) // 128
    else:
        rows, columns = (torch.randint(0, 5, (n,), generator=generator).sort().values for n in (q_len, kv_len))
    sees = torch.rand(int(rows.max()) + 1, int(columns.max()) + 1, generator=generator) < chosen.choice((0.3, 0.6, 1.0))
    mask = sees[rows][:, columns]
    if chosen.random() < 0.5:
        mask &= torch.arange(kv_len)[None, :] <= torch.arange(q_len)[:, None] + chosen.randint(-20, 150)
    if chosen.random() < 0.3:
        mask[torch.rand(q_len, generator=generator) < 0.1] = False
        mask[:, torch.rand(kv_len, generator=generator) < 0.1] = False
    if chosen.random() < 0.2:
        mask[:128] = False
    return mask


def plan_of(masks: list[Tensor], block_q: int, block_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Plans by brute force, stacked if there are several."""
    plans = [brute_force(mask, block_q, block_k) for mask in masks]
    rows, lists, bitmaps = [], [], []
    for plan in plans:
        own = torch.tensor(plan["rows"], dtype=torch.int32).view(-1, 4)
        pairs = torch.tensor(plan["lists"], dtype=torch.int32).view(-1, 2)
        for _, middle, end, _ in own.tolist():
            pairs[middle:end, 1] += sum(map(len, bitmaps)) * (pairs[middle:end, 1] >= 0)
        rows.append(own + torch.tensor([sum(map(len, lists))] * 3 + [0], dtype=torch.int32))
        lists.append(pairs)
        bitmaps.append(torch.tensor(plan["bitmaps"], dtype=torch.int32).view(-1, block_q, -(-block_k // 32)))
    return torch.stack(rows) if len(plans) > 1 else rows[0], torch.cat(lists), torch.cat(bitmaps)


def random_call(seed: int, largest: int = 300) -> Call:
    chosen = random.Random(seed)
    head_dim = chosen.choice((64, 64, 128))
    block_q, block_k = chosen.choice((64, 128, 128, 256)), chosen.choice((128, 128, 256))
    kv_heads = chosen.randint(1, 2)
    group = chosen.choice((2, 4) if block_q == 64 else (1, 2, 3))
    batch, q_len, kv_len = chosen.randint(1, 2), chosen.randint(1, largest), chosen.randint(1, largest)
    dtype = chosen.choice((torch.bfloat16, torch.float16))
    masks = [random_mask(chosen, q_len, kv_len) for _ in range(chosen.choice((1, batch)))]
    generator = torch.Generator().manual_seed(seed)

    def randn(length: int, heads: int) -> Tensor:
        if chosen.random() < 0.5:  # heads first, and the last one belongs to somebody else
            x = torch.randn(batch, heads + 1, length, head_dim, generator=generator).to(dtype)
            return x.transpose(1, 2)[:, :, :-1]
        return torch.randn(batch, length, heads, head_dim, generator=generator).to(dtype)

    q, k, v = randn(q_len, kv_heads * group), randn(kv_len, kv_heads), randn(kv_len, kv_heads)
    scale = chosen.choice((head_dim**-0.5, head_dim**-0.5, -0.3, 0.01, 2.0))
    sinks = torch.randn(kv_heads * group, generator=generator) * 3 if chosen.random() < 0.5 else None
    if sinks is not None:
        sinks[0] = float("-inf")
    given = AttentionArguments(q, k, v, *plan_of(masks, block_q, block_k), block_q, block_k, scale, sinks)
    return Call(given, torch.stack(masks).expand(batch, q_len, kv_len))


# Of a gradient that is 0: dP - delta is then the difference of two float32 sums of some hundred products near 1.
CANCELLED = 2e-5


def assert_close(name: str, actual: Tensor, exact: Tensor, same: Tensor, atol: float = 0.0) -> None:
    """Within the budget. PyTorch is exact where no row sees two keys; kernels then round a few times in float32: to base 2 and back,
    and two sums of the backward pass, whose difference is 0, in different orders."""
    if torch.equal(same, exact.to(same.dtype)):
        torch.testing.assert_close(
            actual.double(), exact, rtol=2.0**-22, atol=atol, equal_nan=True, msg=lambda text: f"{name}: {text}"
        )
    else:
        assert_within_budget(actual, exact, same, name=name)


def check(call: Call, results: tuple[Tensor, Tensor]) -> None:
    q, k, v = call.given[:3]
    rest = call.mask, call.given.scale, call.given.sinks
    exact, same = (reference(q.to(t), k.to(t), v.to(t), *rest) for t in (torch.float64, q.dtype))
    for name, *tensors in zip(("out", "lse"), results, exact, same):
        assert_close(name, *tensors)


def launcher(simulator: Any, programs: int = 2, stages: int = 2) -> Any:
    """The module that launches the kernel, for a GPU with so many SMs; two stages, so that a ring goes round soon."""
    module = simulator.load(LAUNCH)
    module.processors = lambda device: programs
    for table in (module.STEPS, module.GRADIENT_STEPS, module.KEY_STEPS):
        table.update({size: steps._replace(stages=min(stages, steps.stages)) for size, steps in table.items()})
    return module


def gradients_of(call: Call, seed: int) -> GradientArguments:
    """Gradients of the results of a call, which are rounded as a kernel rounds them."""
    given = call.given
    generator = torch.Generator().manual_seed(seed)
    out, lse = reference(*(x.double() for x in given[:3]), call.mask, given.scale, given.sinks)
    grad_lse = torch.randn(lse.shape, generator=generator) if seed % 2 else None
    grad_out = torch.randn(out.shape, generator=generator).to(given.q.dtype)
    return GradientArguments(grad_out, grad_lse, out.to(given.q.dtype), lse.float(), given)


def check_dq(call: Call, gradients: GradientArguments, dq: Tensor, saved: Any) -> None:
    given, q_len = call.given, call.given.q.shape[1]

    def by_reference(dtype: torch.dtype) -> Tensor:
        q, k, v = (x.to(dtype) for x in given[:3])
        q.requires_grad_()
        out, lse = reference(q, k, v, call.mask, given.scale, given.sinks)
        of_lse = torch.zeros_like(lse) if gradients.grad_lse is None else gradients.grad_lse.to(lse.dtype)
        (found,) = torch.autograd.grad((out, lse), q, (gradients.grad_out.to(dtype), of_lse))
        return found

    assert_close("dq", dq, by_reference(torch.float64), by_reference(given.q.dtype), CANCELLED)
    seen = gradients.lse > -torch.inf
    in_base_2 = torch.where(seen, gradients.lse / torch.log(torch.tensor(2.0)), torch.inf)
    assert torch.allclose(saved.lse[:, :, :q_len], in_base_2, rtol=1e-6)
    assert (saved.lse[:, :, q_len:] == torch.inf).all()
    delta = (gradients.grad_out.float() * gradients.out.float()).sum(-1).transpose(1, 2)
    if gradients.grad_lse is not None:
        delta = delta - gradients.grad_lse
    assert torch.allclose(saved.delta[:, :, :q_len], delta, atol=1e-4, rtol=1e-4)


def saved_of(call: Call, gradients: GradientArguments) -> Saved:
    """What the kernel of dQ saves for the other one, with rows past the end."""
    rows = -(-call.given.q.shape[1] // call.given.block_q) * call.given.block_q
    lse, delta = (torch.zeros(*gradients.lse.shape[:2], rows) for _ in range(2))
    of_rows = slice(0, call.given.q.shape[1])
    lse[:] = torch.inf
    lse[:, :, of_rows] = torch.where(gradients.lse > -torch.inf, gradients.lse / math.log(2.0), torch.inf)
    delta[:, :, of_rows] = (gradients.grad_out.float() * gradients.out.float()).sum(-1).transpose(1, 2)
    if gradients.grad_lse is not None:
        delta[:, :, of_rows] -= gradients.grad_lse
    return Saved(lse, delta)


def check_dkv(call: Call, gradients: GradientArguments, results: tuple[Tensor, Tensor]) -> None:
    given = call.given

    def by_reference(dtype: torch.dtype) -> tuple[Tensor, ...]:
        q, k, v = (x.to(dtype).requires_grad_() for x in given[:3])
        out, lse = reference(q, k, v, call.mask, given.scale, given.sinks)
        of_lse = torch.zeros_like(lse) if gradients.grad_lse is None else gradients.grad_lse.to(lse.dtype)
        return torch.autograd.grad((out, lse), (k, v), (gradients.grad_out.to(dtype), of_lse))

    for name, *tensors in zip(("dk", "dv"), results, by_reference(torch.float64), by_reference(given.q.dtype)):
        assert_close(name, *tensors, CANCELLED)


# Every one breaks the protocol between the partitions.
MUTATIONS = {
    "a consumer does not wait for keys": Edit(STEPS, "    mbarrier.wait(k_ready.index(stage), phase)\n", ""),
    "a consumer does not wait for values": Edit(STEPS, "    mbarrier.wait(v_ready.index(stage), phase)\n", ""),
    "a consumer does not wait for queries": Edit(FORWARD, "        mbarrier.wait(q_ready, turn & 1)\n", ""),
    "parity of keys": Edit(
        STEPS, "mbarrier.wait(k_ready.index(stage), phase)", "mbarrier.wait(k_ready.index(stage), phase ^ 1)"
    ),
    "parity of values": Edit(
        STEPS, "mbarrier.wait(v_ready.index(stage), phase)", "mbarrier.wait(v_ready.index(stage), phase ^ 1)"
    ),
    "parity of queries": Edit(FORWARD, "mbarrier.wait(q_ready, turn & 1)", "mbarrier.wait(q_ready, 0)"),
    "keys freed while a product reads them": Edit(
        FORWARD,
        "        s = warpgroup_mma_wait(0, deps=[s])\n        mbarrier.arrive(k_free.index(count % STAGES))\n",
        "        mbarrier.arrive(k_free.index(count % STAGES))\n        s = warpgroup_mma_wait(0, deps=[s])\n",
    ),
    "values freed while a product reads them": Edit(
        STEPS,
        "    acc = warpgroup_mma_wait(0, deps=[acc])\n    mbarrier.arrive(v_free.index((count - 1) % STAGES))\n",
        "    mbarrier.arrive(v_free.index((count - 1) % STAGES))\n    acc = warpgroup_mma_wait(0, deps=[acc])\n",
    ),
    "queries freed while products need them": Edit(
        FORWARD,
        "        for i in range(1, masked):\n",
        "        mbarrier.arrive(q_free)\n        for i in range(1, masked):\n",
    ),
    "queries freed early, once": Edit(
        FORWARD,
        "        count += 1\n        for i in range(1, masked):\n",
        "        count += 1\n        mbarrier.arrive(q_free, pred=masked + full > 1)\n        for i in range(1, masked):\n",
    ),
    "scores used before they are complete": Edit(
        STEPS, "warpgroup_mma_wait(1, deps=[s])", "warpgroup_mma_wait(2, deps=[s])"
    ),
    "sums used before they are complete": Edit(
        STEPS, "warpgroup_mma_wait(0, deps=[acc])", "warpgroup_mma_wait(1, deps=[acc])"
    ),
    "another stage of keys freed": Edit(STEPS, "k_free.index(count % STAGES)", "k_free.index((count + 1) % STAGES)"),
    "another stage of values freed": Edit(STEPS, "v_free.index((count - 1) % STAGES)", "v_free.index(count % STAGES)"),
    "keys freed twice": Edit(
        STEPS, "mbarrier.arrive(k_free.index(count % STAGES))", "mbarrier.arrive(k_free.index(count % STAGES), count=2)"
    ),
    "values freed twice": Edit(
        STEPS,
        "mbarrier.arrive(v_free.index((count - 1) % STAGES))",
        "mbarrier.arrive(v_free.index((count - 1) % STAGES), count=2)",
    ),
    "keys never freed": Edit(STEPS, "    mbarrier.arrive(k_free.index(count % STAGES))\n", ""),
    "queries never freed": Edit(FORWARD, "        mbarrier.arrive(q_free)\n", ""),
    "values of the next step": Edit(
        STEPS,
        "add_values(acc, weights, v_smem, v_ready, count - 1,",
        "add_values(acc, weights, v_smem, v_ready, count,",
    ),
    "the last values of the step before": Edit(
        FORWARD,
        "add_values(acc, weights, v_smem, v_ready, count - 1,",
        "add_values(acc, weights, v_smem, v_ready, count - 2,",
    ),
    "the producer does not wait for free keys": Edit(
        FORWARD, "            mbarrier.wait(k_free.index(stage), phase ^ 1)\n", ""
    ),
    "the producer does not wait for free values": Edit(
        FORWARD, "            mbarrier.wait(v_free.index(stage), phase ^ 1)\n", ""
    ),
    "the producer does not wait for free queries": Edit(
        FORWARD, "            mbarrier.wait(q_free.index(half), (turn & 1) ^ 1)\n", ""
    ),
    "the producer's parity of keys": Edit(
        FORWARD, "mbarrier.wait(k_free.index(stage), phase ^ 1)", "mbarrier.wait(k_free.index(stage), phase)"
    ),
    "the producer's parity of values": Edit(
        FORWARD, "mbarrier.wait(v_free.index(stage), phase ^ 1)", "mbarrier.wait(v_free.index(stage), phase)"
    ),
    "the producer's parity of queries": Edit(FORWARD, "(turn & 1) ^ 1)", "turn & 1)"),
    "fewer bytes of keys": Edit(FORWARD, "k_desc.block_type.nbytes", "k_desc.block_type.nbytes // 2"),
    "more bytes of values": Edit(FORWARD, "v_desc.block_type.nbytes", "v_desc.block_type.nbytes + 16"),
    "bytes of queries": Edit(FORWARD, "q_desc.block_type.nbytes", "k_desc.block_type.nbytes"),
    "no bytes expected": Edit(
        FORWARD,
        "            mbarrier.expect(v_ready.index(stage), v_desc.block_type.nbytes)\n",
        "            mbarrier.arrive(v_ready.index(stage))\n",
    ),
    "keys copied where values belong": Edit(
        FORWARD,
        "k_desc, at, k_ready.index(stage), k_smem.index(stage)",
        "k_desc, at, k_ready.index(stage), v_smem.index(stage)",
    ),
    "keys signalled as values": Edit(
        FORWARD, "k_desc, at, k_ready.index(stage), k_smem", "k_desc, at, v_ready.index(stage), k_smem"
    ),
    "both halves of the queries in one place": Edit(
        FORWARD, "q_ready.index(half), q_smem.index(half)", "q_ready.index(half), q_smem.index(0)"
    ),
    "the ring of the producer does not move": Edit(
        FORWARD,
        "v_ready.index(stage), v_smem.index(stage))\n            count += 1\n",
        "v_ready.index(stage), v_smem.index(stage))\n",
    ),
    "a barrier waits for one consumer": Edit(
        STEPS, "mbarrier.init(k_free.index(i), count=2)", "mbarrier.init(k_free.index(i), count=1)"
    ),
    "a barrier waits for three": Edit(
        STEPS, "mbarrier.init(v_free.index(i), count=2)", "mbarrier.init(v_free.index(i), count=3)"
    ),
    "a barrier is not initialised": Edit(STEPS, "        mbarrier.init(v_ready.index(i), count=1)\n", ""),
    "no fence after the barriers": Edit(
        FORWARD, "    fence_async_shared()\n    gl.warp_specialize", "    gl.warp_specialize"
    ),
    "no fence before the results are stored": Edit(FORWARD, "        fence_async_shared()\n        tma", "        tma"),
    "results overwritten while they are stored": Edit(
        FORWARD, "        tma.store_wait(0)\n        o_smem", "        o_smem"
    ),
    "the program does not wait for its stores": Edit(FORWARD, "    tma.store_wait(0)\n\n\n", "\n\n"),
    "both consumers store from one place": Edit(FORWARD, "o_smem.index(1)", "o_smem.index(0)"),
    "a stage beyond the ring": Edit(STEPS, "return count % STAGES,", "return count % (STAGES + 1),"),
}
# Every one gives wrong values under a correct protocol.
WRONG_VALUES = {
    "hidden keys are seen": Edit(STEPS, "    if mask is not None:\n        s = hide(s, mask)\n", ""),
    "columns past the end are seen": Edit(
        STEPS, "    loaded &= gl.where(valid_bits == 32, -1, (1 << valid_bits) - 1)[None, :]\n", ""
    ),
    "bits of another row": Edit(FORWARD, "        row += OWN_ROW\n", ""),
    "the maximum of the step before": Edit(STEPS, "return p, alpha, m_ij, l_i", "return p, alpha, m_i, l_i"),
    "sums are not scaled": Edit(STEPS, "    alpha = gl.exp2(m_i - origin)\n", "    alpha = gl.exp2(origin - origin)\n"),
    "the sink of another head": Edit(FORWARD, "gl.load(sinks + head)", "gl.load(sinks + head // 2)"),
    "ranges are one": Edit(FORWARD, "                    pair += 1\n", ""),
    "the same tile in every turn": Edit(FORWARD, "item = turn * programs + gl.where", "item = gl.where"),
}
# The same of the kernel of dQ, in what it does not share with the forward kernel. That values are freed late enough follows from the keys, which
# the producer waits for first.
DQ_MUTATIONS = {
    "keys freed while a product reads them": Edit(
        BACKWARD,
        "    acc = warpgroup_mma_wait(0, deps=[acc])\n    mbarrier.arrive(k_free.index((count - 1) % STAGES))\n    return",
        "    mbarrier.arrive(k_free.index((count - 1) % STAGES))\n    acc = warpgroup_mma_wait(0, deps=[acc])\n    return",
    ),
    "keys freed with their values": Edit(
        BACKWARD,
        "    mbarrier.arrive(k_free.index((count - 1) % STAGES))\n    return",
        "    mbarrier.arrive(k_free.index(count % STAGES))\n    return",
    ),
    "scores used before they are complete": Edit(
        BACKWARD, "warpgroup_mma_wait(2, deps=[s])", "warpgroup_mma_wait(3, deps=[s])"
    ),
    "their gradients used before they are complete": Edit(
        BACKWARD, "warpgroup_mma_wait(1, deps=[dp])", "warpgroup_mma_wait(2, deps=[dp])"
    ),
    "values freed twice": Edit(
        BACKWARD,
        "    mbarrier.arrive(v_free.index(count % STAGES))\n    gradients",
        "    mbarrier.arrive(v_free.index(count % STAGES), count=2)\n    gradients",
    ),
    "the last keys never freed": Edit(
        BACKWARD, "        mbarrier.arrive(k_free.index((count - 1) % STAGES))\n\n", "\n"
    ),
    "queries never freed": Edit(BACKWARD, "        mbarrier.arrive(q_free)\n", ""),
    "queries freed while products need them": Edit(
        BACKWARD,
        "        for i in range(1, masked):\n",
        "        mbarrier.arrive(q_free)\n        for i in range(1, masked):\n",
    ),
    "a consumer does not wait for queries": Edit(BACKWARD, "        mbarrier.wait(q_ready, turn & 1)\n", ""),
    "bytes of the queries alone": Edit(FORWARD, "nbytes * COPIES", "nbytes"),
    "gradients where queries belong": Edit(FORWARD, "q_ready.index(half), grad_smem", "q_ready.index(half), q_smem"),
    "results overwritten while they are stored": Edit(
        BACKWARD, "        tma.store_wait(0)\n        dq_smem", "        dq_smem"
    ),
    "no fence before the results are stored": Edit(
        BACKWARD, "        fence_async_shared()\n        tma", "        tma"
    ),
    "the program does not wait for its stores": Edit(BACKWARD, "    tma.store_wait(0)\n\n\n", "\n\n"),
    "no fence after the barriers": Edit(
        BACKWARD, "    fence_async_shared()\n    gl.warp_specialize", "    gl.warp_specialize"
    ),
    "hidden keys are seen": Edit(BACKWARD, "    if mask is not None:\n        s = hide(s, mask)\n", ""),
    "rows past the end are as the others": Edit(BACKWARD, 'mask=there, other=float("-inf")', "mask=there, other=0.0"),
    "delta without the gradient of the log-sum-exp": Edit(BACKWARD, "row_delta -= gl.load", "row_delta += 0 * gl.load"),
}
