"""Stand-ins for `triton.experimental.gluon`, its language and its instructions for Hopper."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from triton.experimental.gluon import language as real
from triton.experimental.gluon.language.nvidia import hopper as real_hopper

from tests.gluonsim.memory import View
from tests.gluonsim.program import Program
from tests.gluonsim.scheduler import Fault
from tests.gluonsim.values import DTYPES, Pointer, Value, elementwise, reduced, reshaped, scalar, together, wrap

TYPES = ("bfloat16", "float16", "float32", "float64", "int1", "int8", "int32", "int64")
_thread = threading.local()


def running() -> Program:
    """The program that this thread executes."""
    program: Program | None = getattr(_thread, "program", None)
    if program is None:
        raise Fault("an instruction is used outside of a kernel")
    return program


def enter(program: Program | None) -> None:
    _thread.program = program


def _where(condition: Any, a: Any, b: Any) -> Value:
    (chosen, first, second), layout = together(condition, a, b)
    return Value(torch.where(chosen, first, second), layout)


def _split(x: Value) -> tuple[Value, Value]:
    if x.shape[-1] != 2:
        raise Fault(f"a tensor of shape {x.shape} is split")
    return tuple(Value(x.value[..., i], ("split", x.layout)) for i in (0, 1))  # type: ignore[return-value]


def _join(a: Value, b: Value) -> Value:
    values, layout = together(a, b)
    if layout is None:
        raise Fault("scalars are joined")
    return Value(torch.stack(values, -1), ("join", layout))


def _convert(x: Value, layout: Any, assert_trivial: bool = False) -> Value:
    return Value(x.value, layout)


def _full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Value:
    return Value(torch.full(tuple(shape), 0, dtype=DTYPES[dtype]) + wrap(value).value.to(DTYPES[dtype]), layout)


def _arange(start: int, end: int, layout: Any = None) -> Value:
    return Value(torch.arange(start, end, dtype=torch.int32), layout)


def _pair_of(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    def pack(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return torch.stack([first.to(dtype), second.to(dtype)], -1).view(torch.int32).squeeze(-1)

    return pack


def _test(s: torch.Tensor, words: torch.Tensor, tested: torch.Tensor) -> torch.Tensor:
    return torch.where((words & tested) != 0, s, float("-inf"))


# Assembly that kernels contain, without its white space, and what it does.
_ASSEMBLY: dict[str, Callable[..., torch.Tensor]] = {
    "cvt.rn.bf16x2.f32 $0, $2, $1;": _pair_of(torch.bfloat16),
    "cvt.rn.f16x2.f32 $0, $2, $1;": _pair_of(torch.float16),
    "mov.b32 $0, 0;": torch.zeros_like,
    "{ .reg .pred seen; .reg .b32 bit; and.b32 bit, $2, $3; setp.ne.b32 seen, bit, 0; "
    "selp.f32 $0, $1, 0fFF800000, seen; }": _test,
}


def _assembly(asm: str, constraints: str, args: Any, dtype: Any, is_pure: bool, pack: int) -> Any:
    asm = " ".join(asm.split())
    values, layout = together(*args)
    if asm == "mov.b32 {$0, $1}, $2;":
        halves = values[0].unsqueeze(-1).contiguous().view(DTYPES[dtype[0]])
        return tuple(Value(halves[..., i], layout) for i in (0, 1))
    if asm not in _ASSEMBLY:
        raise Fault(f"the simulator does not know this assembly: {asm}")
    found = _ASSEMBLY[asm](*torch.broadcast_tensors(*values))
    if found.dtype != DTYPES[dtype]:
        raise Fault(f"assembly makes {found.dtype}, {dtype} is asked for")
    return Value(found, layout)


def _specialize(parts: Any, warps: Any, registers: Any) -> None:
    program = running()

    def part(f: Any, given: Any) -> None:
        enter(program)
        f(*given)

    program.fork([lambda f=f, given=given: part(f, given) for f, given in parts], warps, registers)


def _load(pointer: Pointer, mask: Any = None, other: Any = None, **_: Any) -> Value:
    _touch(pointer, mask, write=False)
    return pointer.load(mask, other)


def _store(pointer: Pointer, value: Any, mask: Any = None, **_: Any) -> None:
    _touch(pointer, mask, write=True)
    pointer.store(value, mask)


def _touch(pointer: Pointer, mask: Any, write: bool) -> None:
    world = running().world
    if world is not None:
        at, chosen, _ = pointer.checked(mask)
        world.accessed(running(), pointer.memory, at[chosen], write)


def _atomic_add(pointer: Pointer, value: Any, mask: Any = None, sem: str = "acq_rel", scope: str = "gpu") -> Value:
    if scope != "gpu":
        raise Fault(f"a sum of programs has the scope {scope}")
    world = running().world
    if world is not None and pointer.offset.layout is None:
        at = int(pointer.checked(mask)[0])
        return Value(scalar(world.count(running(), pointer.memory, at, int(value), sem)))
    _touch(pointer, mask, write=True)
    before = pointer.load(mask)
    pointer.store(before + value, mask)
    return before


language = SimpleNamespace(
    **{name: getattr(real, name) for name in dir(real) if name.endswith("Layout")},
    **{name: getattr(real, name) for name in TYPES},
    constexpr=lambda x: x,
    static_range=range,
    static_assert=lambda condition, message="": None,
    program_id=lambda axis: Value(scalar(running().number if axis == 0 else 0)),
    num_programs=lambda axis: Value(scalar(running().programs if axis == 0 else 1)),
    load=_load,
    store=_store,
    atomic_add=_atomic_add,
    allocate_shared_memory=lambda dtype, shape, layout: running().allocate(dtype, shape, layout),
    warp_specialize=_specialize,
    where=_where,
    maximum=lambda a, b: elementwise(torch.maximum, a, b),
    minimum=lambda a, b: elementwise(torch.minimum, a, b),
    exp2=lambda x: elementwise(torch.exp2, x),
    exp=lambda x: elementwise(torch.exp, x),
    log2=lambda x: elementwise(torch.log2, x),
    log=lambda x: elementwise(torch.log, x),
    max=lambda x, axis: reduced(x, axis, lambda value, dim: value.amax(dim)),
    sum=lambda x, axis: reduced(x, axis, lambda value, dim: value.sum(dim, dtype=value.dtype)),
    full=_full,
    zeros=lambda shape, dtype, layout=None: _full(shape, 0, dtype, layout),
    zeros_like=lambda x: Value(torch.zeros_like(x.value), x.layout),
    arange=_arange,
    convert_layout=_convert,
    reshape=reshaped,
    permute=lambda x, order: Value(x.value.permute(*order), ("permute", tuple(order), x.layout)),
    split=_split,
    join=_join,
    inline_asm_elementwise=_assembly,
    thread_barrier=lambda: running().meet(),
    cdiv=lambda a, b: (a + b - 1) // b,
)


def _wait(barrier: View, phase: Any, pred: Any = True, deps: Any = ()) -> None:
    parity, program = int(phase), running()
    if parity not in (0, 1):
        raise Fault(f"{barrier.name} is waited for with the parity {parity}")
    if pred:
        target = barrier.barrier
        target.known()
        program.scheduler.pause(lambda: target.passed(parity))
        program.learn(target.passed_on)


def _expect(barrier: View, amount: int, pred: Any = True) -> None:
    if pred:
        barrier.barrier.expect(amount, running().known)
    running().scheduler.pause()


def _arrive(barrier: View, *, count: int = 1, pred: Any = True) -> None:
    if running().me in running().apart:
        raise Fault(f"one thread arrives at {barrier.name}, and others may still wait for their copies")
    if pred:
        barrier.barrier.arrive(count, running().known)
    running().scheduler.pause()


def _copy_in(desc: Any, at: Any, barrier: View, result: View, pred: Any = True) -> None:
    if pred:
        running().load_block(desc, at, barrier, result)


def _copy_rows(smem: View, pointer: Pointer, mask: Any = None, **_: Any) -> None:
    values = pointer.load(mask, 0)
    if values.shape != smem.shape or values.dtype != smem.dtype:
        raise Fault(f"{values.shape} of {values.dtype} are copied into {smem.name}, {smem.shape} of {smem.dtype}")
    running().load_rows(values.value, smem)


def _wait_for_products(num_outstanding: int = 0, deps: Any = None) -> Any:
    if not deps:
        raise Fault("a wait for products names no results")
    found = running().wait_for_products(num_outstanding, deps)
    return found[0] if len(found) == 1 else tuple(found)


def _multiply(a: Any, b: Any, acc: Any, *, use_acc: Any = True, is_async: bool = False, **_: Any) -> Any:
    return running().multiply(a, b, acc, bool(use_acc), is_async)


hopper = SimpleNamespace(
    fence_async_shared=lambda cluster=False: running().fence(),
    warpgroup_mma=_multiply,
    warpgroup_mma_wait=_wait_for_products,
    async_copy=SimpleNamespace(
        async_copy_global_to_shared=_copy_rows,
        commit_group=lambda: running().commit(),
        wait_group=lambda num_outstanding=0: running().wait_for_groups(num_outstanding),
    ),
    mbarrier=SimpleNamespace(
        MBarrierLayout=real_hopper.mbarrier.MBarrierLayout,
        init=lambda barrier, count: barrier.barrier.start(count),
        wait=_wait,
        expect=_expect,
        arrive=_arrive,
    ),
    tma=SimpleNamespace(
        async_copy_global_to_shared=_copy_in,
        async_copy_shared_to_global=lambda desc, at, source: running().store_block(desc, at, source),
        store_wait=lambda pendings: running().wait_for_stores(pendings),
    ),
)


def _view_load(self: View, layout: Any) -> Value:
    program = running()
    value = Value(self.read(program.operation(known=True), program.known), layout)
    program.scheduler.pause()
    return value


def _view_store(self: View, value: Value) -> None:
    if list(value.shape) != self.shape or value.dtype != self.dtype:
        raise Fault(
            f"a tensor of shape {value.shape} and {value.dtype} is stored to {self.name}, {self.shape} of {self.dtype}"
        )
    program = running()
    self.write(value.value, program.me, program.operation(known=True), program.known)
    program.scheduler.pause()


View.load, View.store = _view_load, _view_store  # type: ignore[attr-defined]
