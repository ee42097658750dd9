"""The simulator itself: what it computes, and what it refuses."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.gluonsim import Fault, Simulator

# A producer copies blocks of 64 rows into a ring of two; a consumer adds 1 and stores them, by TMA from another buffer.
RING = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

@gluon.jit
def produce(source, ring, ready, free, blocks):
    for i in range(0, blocks):
        mbarrier.wait(free.index(i % 2), (i // 2 & 1) ^ 1)
        mbarrier.expect(ready.index(i % 2), source.block_type.nbytes)
        tma.async_copy_global_to_shared(source, [i * 64, 0], ready.index(i % 2), ring.index(i % 2))

@gluon.jit
def consume(result, sums, ring, staging, ready, free, blocks):
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    for i in range(0, blocks):
        mbarrier.wait(ready.index(i % 2), i // 2 & 1)
        x = ring.index(i % 2).load(ROWS)
        mbarrier.arrive(free.index(i % 2))
        tma.store_wait(0)
        staging.store((x.to(gl.float32) + 1).to(gl.float16))
        fence_async_shared()
        tma.async_copy_shared_to_global(result, [i * 64, 0], staging)
        rows = gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))
        gl.store(sums + i * 64 + rows, gl.sum(x.to(gl.float32), 1), mask=rows < 64)
    tma.store_wait(0)

@gluon.jit
def kernel(source, result, sums, blocks):
    ring = gl.allocate_shared_memory(source.dtype, [2, 64, 32], source.layout)
    staging = gl.allocate_shared_memory(source.dtype, [64, 32], source.layout)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [(consume, (result, sums, ring, staging, ready, free, blocks)), (produce, (source, ring, ready, free, blocks))],
        [1], [24],
    )
"""


def run(seed: int, *edits: tuple[str, str], blocks: int = 5) -> None:
    text = RING
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    simulator = Simulator()
    module: Any = simulator.execute(text, "ring")
    x = torch.randn(blocks * 64 - 10, 32, generator=torch.Generator().manual_seed(seed)).half()
    result, sums = torch.zeros_like(x), torch.zeros(blocks * 64)
    layout = gl.NVMMASharedLayout.get_default_for([64, 32], gl.float16)
    source, target = (TensorDescriptor.from_tensor(tensor, [64, 32], layout) for tensor in (x, result))
    with simulator.schedule(seed):
        module.kernel[(1,)](source, target, sums, blocks)
    assert torch.equal(result, (x.float() + 1).half())
    assert torch.allclose(sums[: len(x)], x.float().sum(1), atol=1e-4) and (sums[len(x) :] == 0).all()


def test_a_right_protocol_is_right_under_every_schedule() -> None:
    for seed in range(100):
        run(seed, blocks=seed % 7 + 1)


def test_a_seed_repeats_its_schedule() -> None:
    fault = ("        mbarrier.wait(free.index(i % 2), (i // 2 & 1) ^ 1)\n", "")

    def outcome(seed: int) -> str:
        with pytest.raises(Fault) as found:
            run(seed, fault)
        return str(found.value)

    assert [outcome(seed) for seed in range(20)] == [outcome(seed) for seed in range(20)]
    assert len({outcome(seed) for seed in range(20)}) > 1


WAIT, ARRIVE = "        mbarrier.wait(ready.index(i % 2), i // 2 & 1)\n", "        mbarrier.arrive(free.index(i % 2))\n"
FAULTS = {
    "no wait": ([(WAIT, "")], "is read by"),
    "parity": ([("i // 2 & 1)\n        x", "(i // 2 & 1) ^ 1)\n        x")], "is read by|deadlock"),
    "a parity that is none": ([("i // 2 & 1)\n        x", "2)\n        x")], "parity 2"),
    "freed before it is read": (
        [(ARRIVE, ""), (WAIT, WAIT + ARRIVE)],
        "overwritten by a copy|while a copy fills it|issued while",
    ),
    "never freed": ([(ARRIVE, "")], "deadlock"),
    "freed twice": ([(ARRIVE, ARRIVE + ARRIVE)], "arrive in a phase|deadlock|overwritten|over"),
    "too many arrive": ([(ARRIVE, ARRIVE.replace("2))", "2), count=2)"))], "2 arrive in a phase that waits for 1 more"),
    "too few bytes": (
        [("source.block_type.nbytes", "source.block_type.nbytes - 16")],
        "4096 bytes arrive, 4080 are expected",
    ),
    "too many bytes": ([("source.block_type.nbytes", "source.block_type.nbytes + 16")], "deadlock"),
    "more bytes than a barrier counts": ([("source.block_type.nbytes", "2**20")], "more than it can count"),
    "a barrier that does not exist": (
        [("ready.index(i % 2), source.block", "ready.index(2), source.block")],
        "has 2 parts",
    ),
    "a barrier without start": ([("        mbarrier.init(free.index(i), count=1)\n", "")], "before it is initialised"),
    "a barrier started twice": (
        [("        mbarrier.init(free.index(i), count=1)\n", "        mbarrier.init(free.index(0), count=1)\n")],
        "twice",
    ),
    "no fence after barriers": ([("    fence_async_shared()\n    gl.warp", "    gl.warp")], "no fence followed"),
    "no fence after writing": ([("        fence_async_shared()\n        tma", "        tma")], "without a fence"),
    "overwritten while stored": (
        [("        tma.store_wait(0)\n        staging", "        staging")],
        "written by|overwritten",
    ),
    "stores at the end": (
        [("    tma.store_wait(0)\n\n@gluon.jit\ndef kernel", "\n@gluon.jit\ndef kernel")],
        "ends without waiting",
    ),
    "too much shared memory": (
        [("[2, 64, 32], source.layout", "[60, 64, 32], source.layout")],
        "bytes of shared memory",
    ),
    "too many registers": ([("[1], [24]", "[1], [512]")], "registers a thread"),
    "registers that are not dealt out": ([("[1], [24]", "[1], [30]")], "multiple of 8"),
    "warps without registers": ([("[1], [24]", "[1, 1], [24]")], "numbers of warps"),
    "a store outside": ([("sums + i * 64 + rows", "sums + i * 64 + rows + 1")], "is accessed"),
    "another layout": (
        [
            (
                "rows = gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))",
                "rows = gl.arange(0, 64, layout=gl.SliceLayout(0, ROWS))",
            )
        ],
        "layout",
    ),
    "a layout of another rank": (
        [("rows = gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))", "rows = gl.arange(0, 64, layout=ROWS)")],
        "rank",
    ),
    "a dimension that a layout does not have": ([("rows < 64", "rows[None, :] < 64")], "slice of dimension"),
    "a tensor as a condition": (
        [
            (
                "        tma.store_wait(0)\n        staging",
                "        if x:\n            pass\n        tma.store_wait(0)\n        staging",
            )
        ],
        "as a condition",
    ),
    "another dtype": ([(".to(gl.float16))", ")")], "is stored to"),
    "a block of another shape": ([("[2, 64, 32], source.layout", "[2, 32, 32], source.layout")], "is copied into"),
    "assembly it does not know": (
        [
            (
                "gl.sum(x.to(gl.float32), 1)",
                'gl.inline_asm_elementwise("nop;", "", [x], dtype=gl.float32, is_pure=True, pack=1)',
            )
        ],
        "does not know",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str) -> None:
    """Under every schedule, or in case of a race under some."""
    edits, wanted = FAULTS[name]
    found = set()
    for seed in range(10):
        try:
            run(seed, *edits)
        except Fault as fault:
            found.add(str(fault))
        except AssertionError:
            found.add("wrong values")
    assert any(re.search(wanted, each) for each in found), found


PRODUCT = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

@gluon.jit
def kernel(a_desc, b_desc, out):
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    a = gl.allocate_shared_memory(a_desc.dtype, [64, 64], a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [64, 64], b_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    fence_async_shared()
    mbarrier.expect(bar, 2 * a_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(a_desc, [0, 0], bar, a)
    tma.async_copy_global_to_shared(b_desc, [0, 0], bar, b)
    mbarrier.wait(bar, 0)
    first = warpgroup_mma(a, b.permute((1, 0)), gl.zeros([64, 64], gl.float32, ACC), is_async=True)
    second = warpgroup_mma(a, b, first, is_async=True)
    second = warpgroup_mma_wait(0, deps=[second])
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, ACC))
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, ACC))
    gl.store(out + rows[:, None] * 64 + columns[None, :], second)
"""


def multiply(*edits: tuple[str, str]) -> None:
    text = PRODUCT
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    simulator = Simulator()
    module: Any = simulator.execute(text, "product")
    a, b = (torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)).half() for seed in (0, 1))
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    out = torch.zeros(64, 64)
    module.kernel[(1,)](*(TensorDescriptor.from_tensor(x, [64, 64], layout) for x in (a, b)), out)
    assert torch.allclose(out, a.float() @ b.float().T + a.float() @ b.float(), atol=1e-3)


def test_products() -> None:
    multiply()


@pytest.mark.parametrize(
    "edit, wanted",
    [
        (("instr_shape=[16, 64, 16]", "instr_shape=[16, 48, 16]"), "no wgmma"),
        (("warps_per_cta=[4, 1]", "warps_per_cta=[8, 1]"), "8, 1"),
        (("wait(0, deps=[second])", "wait(1, deps=[second])"), "a value is expected"),
        (("    mbarrier.wait(bar, 0)\n", ""), "is read by"),
        (("warpgroup_mma(a, b, first", "warpgroup_mma(first, b, first"), "product is used before"),
        (("    second = warpgroup_mma_wait(0, deps=[second])\n", ""), "a value is expected"),
    ],
)
def test_products_that_are_refused(edit: tuple[str, str], wanted: str) -> None:
    with pytest.raises(Fault, match=wanted):
        multiply(edit)
