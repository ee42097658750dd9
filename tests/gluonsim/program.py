"""One program of a launch: its partitions, memory, products and copies."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as real

from tests.gluonsim.memory import Allocation, Barrier, Part, View
from tests.gluonsim.scheduler import Fault, Scheduler
from tests.gluonsim.values import DTYPES, Value
from tests.gluonsim.world import World

# Of an SM with compute capability 9.0: CUDA programming guide, table of technical specifications.
SHARED_BYTES, REGISTERS, MOST_REGISTERS, BARRIERS = 227 * 1024, 65536, 255, 16


@dataclass
class Descriptor:
    """A tensor in global memory that bulk copies address by blocks; what is outside reads as zero and is not written."""

    tensor: Tensor
    block_shape: list[int]
    layout: Any
    dtype: Any

    @property
    def block_type(self) -> Any:
        return type(
            "block", (), {"nbytes": prod(self.block_shape) * self.tensor.element_size(), "shape": self.block_shape}
        )

    def inside(self, at: Sequence[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """The part of a block that lies in the tensor: where in the tensor, where in the block."""
        there, here = [], []
        for start, size, extent in zip(map(int, at), self.block_shape, self.tensor.shape, strict=True):
            first, last = max(start, 0), min(start + size, extent)
            there.append(slice(first, max(first, last)))
            here.append(slice(first - start, max(first, last) - start))
        return tuple(there), tuple(here)


@dataclass(eq=False)
class Product:
    """One wgmma under way, or what became of it."""

    shape: list[int]
    layout: Any
    registers: int
    number: int
    result: Tensor | None = None

    @property
    def ended(self) -> bool:
        return self.result is not None

    def __getattr__(self, name: str) -> Any:
        raise Fault(f"a product is used before it was waited for ({name})")


@dataclass
class Store:
    """A bulk store; it has ended when shared memory has been read."""

    number: int
    ended: bool = False


@dataclass
class Group:
    """Copies by threads that were committed together."""

    number: int
    under_way: int = 0
    copies: int = 0

    @property
    def ended(self) -> bool:
        return self.under_way == 0


@dataclass
class Program:
    number: int
    programs: int
    warps: int
    source: random.Random
    world: World | None = None
    """What it shares with programs that run at once; None: it runs alone."""
    scheduler: Scheduler = field(init=False)
    allocations: list[View] = field(default_factory=list)
    barriers: list[Barrier] = field(default_factory=list)
    shared: int = 0
    registers: list[int] = field(default_factory=list)
    products: dict[int, list[Product]] = field(default_factory=lambda: defaultdict(list))
    stores: dict[int, list[Store]] = field(default_factory=lambda: defaultdict(list))
    """By partition, those that it has not waited for."""
    groups: dict[int, list[Group]] = field(default_factory=lambda: defaultdict(list))
    open: dict[int, Group] = field(default_factory=dict)
    """By partition, the copies that it has not committed."""
    apart: set[int] = field(default_factory=set)
    """Partitions whose threads have waited for copies, each for its own, and have not met since."""
    stored: dict[int, int] = field(default_factory=dict)
    """By partition, what its threads have stored in global memory since they met: each knows of its own part alone."""
    knowledge: dict[int, int] = field(default_factory=lambda: {-1: 0})
    operations: int = 0

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.source) if self.world is None else self.world.scheduler
        self.registers = [MOST_REGISTERS]

    @property
    def me(self) -> int:
        return self.scheduler.current

    def end(self) -> None:
        """After the last instruction of a partition, and of the kernel."""
        if self.products[self.me] or self.stores[self.me]:
            raise Fault("a partition ends without waiting for its products and stores")
        if self.me in self.open or any(group.copies for group in self.groups[self.me]):
            raise Fault("a partition ends without waiting for its copies")
        if self.me < 0 and any(queue[0] == id(self) for queue in self.scheduler.queues):
            raise Fault("the program ends while copies are under way")

    def later(self, queue: object, event: Callable[[], None]) -> None:
        self.scheduler.later((id(self), queue), event)

    def operation(self, known: bool = False) -> int:
        """The number of a new operation; this partition knows at once that it has ended, or does not. Odd numbers are the world's."""
        self.operations += 2
        if known:
            self.learn(1 << self.operations)
        return self.operations

    def learn(self, knowledge: int) -> None:
        self.knowledge[self.me] |= knowledge

    @property
    def known(self) -> int:
        return self.knowledge[self.me]

    # Memory.

    def allocate(self, dtype: Any, shape: Sequence[int], layout: Any) -> View:
        kind = getattr(layout, "swizzle_byte_width", None)
        name = f"allocation {len(self.allocations)} {list(shape)}"
        self.shared += prod(shape) * DTYPES[dtype].itemsize
        if self.shared > SHARED_BYTES:
            raise Fault(f"{self.shared} bytes of shared memory are allocated, an SM has {SHARED_BYTES}")
        parts = [Part() for _ in range(shape[0])]
        view = View(name, dtype, layout, Allocation.of(shape, DTYPES[dtype]), parts)
        if kind is None:
            view.barriers = [Barrier(f"{name}[{i}]") for i in range(shape[0])]
            self.barriers += view.barriers
        self.allocations.append(view)
        return view

    def fence(self) -> None:
        """What this partition wrote becomes visible to the asynchronous proxy."""
        for view in self.allocations:
            view.cells.dirty.masked_fill_(view.cells.dirty == self.me + 2, 0)
        for barrier in self.barriers:
            barrier.fenced = barrier.fenced or barrier.count > 0
        self.scheduler.pause()

    # Partitions.

    def fork(self, bodies: Sequence[Callable[[], None]], warps: Sequence[int], registers: Sequence[int]) -> None:
        if len(bodies) != len(warps) + 1 or len(warps) != len(registers):
            raise Fault(
                f"{len(bodies)} partitions have {len(warps)} numbers of warps and {len(registers)} of registers"
            )
        if len(bodies) >= BARRIERS:
            raise Fault(f"{len(bodies)} partitions need as many named barriers, there are {BARRIERS}")
        if self.warps % 4:
            raise Fault(f"{self.warps} warps are no whole number of warp groups")
        groups = [-(-each // 4) for each in warps]  # registers are dealt out to warp groups
        used = sum(group * each for group, each in zip(groups, registers))
        own = (REGISTERS // 128 - used) // (self.warps // 4) // 8 * 8
        for each in (own, *registers):
            if each < 24 or each % 8:
                raise Fault(f"a partition gets {each} registers a thread, which are not a multiple of 8 from 24 up")
        if any(each > 256 for each in registers):
            raise Fault("a partition asks for more than 256 registers a thread")
        self.registers = [min(own, MOST_REGISTERS), *registers]
        self.partition_warps = [self.warps, *warps]
        self.knowledge |= dict.fromkeys(range(len(bodies)), self.known)
        self.scheduler.run([lambda body=body: (body(), self.end()) for body in bodies])

    # Copies.

    def load_block(self, desc: Descriptor, at: Sequence[Any], barrier: View, into: View) -> None:
        if into.shape != desc.block_shape or into.dtype != desc.dtype or into.layout != desc.layout:
            raise Fault(
                f"a block of {desc.block_shape} is copied into {into.name} of shape {into.shape}, or dtype or layout differ"
            )
        target = barrier.barrier
        target.known()
        number = self.operation()
        into.begin_filling(number, self.known)
        knowledge = self.known | 1 << number
        there, here = desc.inside(at)
        values = torch.zeros(desc.block_shape, dtype=desc.tensor.dtype)
        values[here] = desc.tensor[there]

        def arrives() -> None:
            into.end_filling(values)
            target.delivered(desc.block_type.nbytes, knowledge)

        self.later(object(), arrives)
        self.scheduler.pause()

    def load_rows(self, values: Tensor, into: View) -> None:
        """By threads: the copy belongs to the group that is committed next."""
        if self.me not in self.open:
            self.open[self.me] = Group(self.operation())
        group, owner = self.open[self.me], self.me
        into.begin_filling_by_threads(group.number, self.known)
        group.under_way += 1
        group.copies += 1

        def arrives() -> None:
            into.end_filling(values)
            into.cells.dirty.fill_(owner + 2)
            group.under_way -= 1

        self.later(object(), arrives)
        self.scheduler.pause()

    def commit(self) -> None:
        self.groups[self.me].append(self.open.pop(self.me, None) or Group(self.operation()))

    def wait_for_groups(self, pending: int) -> None:
        self._wait(self.groups[self.me], pending)
        self.apart.add(self.me)

    def meet(self) -> None:
        """All threads of this partition."""
        self.apart.discard(self.me)
        self.learn(self.stored.pop(self.me, 0))
        self.scheduler.pause()

    def store_block(self, desc: Descriptor, at: Sequence[Any], source: View) -> None:
        if source.shape != desc.block_shape or source.dtype != desc.dtype or source.layout != desc.layout:
            raise Fault(
                f"a block of {desc.block_shape} is stored from {source.name} of shape {source.shape}, or dtype or layout differ"
            )
        number = self.operation()
        source.begin_reading("a bulk store", number, self.known)
        there, here = desc.inside(at)
        store = Store(number)
        self.stores[self.me].append(store)

        def has_read() -> None:
            desc.tensor[there] = source.end_reading()[here]
            store.ended = True

        self.later(("stores", self.me), has_read)
        self.scheduler.pause()

    def wait_for_stores(self, pending: int) -> None:
        self._wait(self.stores[self.me], pending)

    def _wait(self, own: list[Any], pending: int) -> None:
        """Until all but the last `pending` have ended; that others may have ended too, this partition does not know."""
        awaited = own[: len(own) - pending] if pending < len(own) else []
        self.scheduler.pause(lambda: all(each.ended for each in awaited))
        for each in awaited:
            self.learn(1 << each.number)
        del own[: len(awaited)]

    # Products.

    def multiply(self, a: Any, b: View, acc: Any, use_acc: bool, asynchronous: bool) -> Any:
        layout = acc.layout
        shape = list(acc.shape)
        rows, columns = shape
        self._check_operands(a, b, layout, shape)
        number = self.operation()
        for view in (a, b):
            if isinstance(view, View):
                view.begin_reading("a product", number, self.known)
        pending = self.products[self.me]
        depth = b.shape[0]
        registers = rows * columns // 128 + (0 if isinstance(a, View) else rows * depth // 256)
        if sum(each.registers for each in pending) + registers > self.registers[self.me if self.me > 0 else 0]:
            raise Fault("products under way hold more registers than their partition has")
        product = Product(shape, layout, registers, number)
        pending.append(product)

        def ends() -> None:
            left = a.end_reading() if isinstance(a, View) else a.value
            right = b.end_reading()
            total = left.float() @ right.float()
            if use_acc:
                total = total + (acc.result if isinstance(acc, Product) else acc.value)
            product.result = total

        self.later(("products", self.me), ends)
        self.scheduler.pause()
        if asynchronous:
            return product
        return self.wait_for_products(0, [product])[0]

    def wait_for_products(self, pending: int, results: Sequence[Any]) -> list[Any]:
        own = self.products[self.me]
        self._wait(own, pending)
        return [
            Value(each.result, each.layout) if isinstance(each, Product) and each not in own else each
            for each in results
        ]

    def _check_operands(self, a: Any, b: Any, layout: Any, shape: Sequence[int]) -> None:
        if not isinstance(layout, real.NVMMADistributedLayout):
            raise Fault(f"a product has the layout {layout}")
        warps = self.partition_warps[max(self.me, 0)] if hasattr(self, "partition_warps") else self.warps
        if prod(layout.warps_per_cta) != warps or warps % 4:
            raise Fault(f"a product of {layout.warps_per_cta} warps is issued by a partition of {warps}")
        rows, columns, depth = layout.instr_shape
        if rows != 16 or columns % 8 or not 8 <= columns <= 256 or shape[1] % columns or shape[0] % (64 * (warps // 4)):
            raise Fault(f"no wgmma makes {list(shape)} from instructions of {layout.instr_shape}")
        if not isinstance(b, View):
            raise Fault("the right operand of a product is not in shared memory")
        wanted = [shape[0], b.shape[0]]
        if list(a.shape) != wanted or b.shape[1] != shape[1] or b.shape[0] % depth:
            raise Fault(f"{list(a.shape)} times {b.shape} is not {list(shape)}")
        if a.dtype != b.dtype:
            raise Fault(f"operands are {a.dtype} and {b.dtype}")
        if not isinstance(a, View) and a.layout != real.DotOperandLayout(0, layout, 2):
            raise Fault(f"the left operand of a product has the layout {a.layout}")
