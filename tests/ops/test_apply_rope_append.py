"""apply_rope_append_: q and k within the error budget, every stored and every other byte exactly."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import pdkernels as pd
from pdkernels.models.architectures.rope import apply_rope, rope_tables
from pdkernels.reference.kv_cache import kv_append_
from pdkernels.reference.transformer_ops import apply_rope_append_ as reference
from tests.harness.error_budget import assert_within_budget
from tests.ops.implementations import NAMES, implementation
from tests.ops.kv_cases import copy_of, filled, storage, whole
from tests.support.errors import refused

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CPU = torch.device("cpu")


@dataclass
class Case:
    """One call; values are in range unless a test changes them."""

    qkv: Tensor
    bias: Tensor | None
    cos: Tensor
    sin: Tensor
    k: Tensor
    v: Tensor
    lengths: Tensor
    counts: Tensor | None
    block_table: Tensor | None
    style: str
    capacity: int
    slots: Tensor | None

    def moved(self, device: torch.device) -> Case:
        tensors = {name: copy_of(t, device) for name, t in vars(self).items() if isinstance(t, Tensor)}
        return replace(self, **tensors)

    def doubled(self) -> Case:
        floats = {name: t.double() for name, t in vars(self).items() if isinstance(t, Tensor) and t.is_floating_point()}
        return replace(self, **floats)

    def run(self, call) -> Case:
        options = {"counts": self.counts, "block_table": self.block_table, "style": self.style, "slots": self.slots}
        call(*self.tensors, **options)
        return self

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.qkv, self.bias, self.cos, self.sin, self.k, self.v, self.lengths

    def sequence(self, b: int) -> Case:
        """One sequence of the batch, on the same memory."""
        part = {name: getattr(self, name) for name in ("qkv", "lengths", "counts", "block_table", "slots")}
        if self.block_table is None:
            part |= {"k": self.k, "v": self.v}
        return replace(self, **{name: None if t is None else t[b : b + 1] for name, t in part.items()})

    def where(self) -> tuple[Tensor, Tensor]:
        """The slot of every row, and whether it is stored."""
        rows = torch.arange(self.qkv.shape[1]).expand(self.qkv.shape[:2])
        slots = rows if self.slots is None else self.slots.cpu()
        return slots, (slots >= 0) & (True if self.counts is None else rows < self.counts.cpu()[:, None])

    @property
    def turned(self) -> Tensor:
        return self.qkv[:, :, : self.qkv.shape[2] - self.k.shape[2]]

    def bytes(self) -> list[Tensor]:
        return [whole(t).cpu() for t in (self.qkv, self.k, self.v)]


def finite(t: Tensor, seed: int) -> Tensor:
    """Random bytes are sometimes NaN: replaced by numbers, guards stay as they are."""
    return t.copy_(torch.randn(t.shape, generator=torch.Generator().manual_seed(seed)))


def make_case(
    seed: int,
    *,
    batch: int = 2,
    rows: int = 5,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    dtype: torch.dtype = torch.float32,
    style: str = "interleaved",
    page_size: int | None = None,
    capacity: int = 16,
    pad: int = 0,
    bias: bool = True,
    counts: bool = True,
    index_dtype: torch.dtype = torch.int64,
    positions: int | None = None,
    slots: bool = False,
) -> Case:
    rng = random.Random(seed)
    per_sequence = -(-capacity // page_size) if page_size else 1
    capacity = per_sequence * page_size if page_size else capacity
    pages, slots_per_page = (batch * per_sequence + 2, page_size) if page_size else (batch, capacity)
    qkv = finite(storage((batch, rows, heads + 2 * kv_heads, head_dim), dtype, (0, 1, 2, 3), pad, seed), seed)
    k, v = (
        storage(
            (pages, slots_per_page, kv_heads, head_dim), dtype, (0, 2, 1, 3) if pad else (0, 1, 2, 3), pad, seed + salt
        )
        for salt in (1, 2)
    )
    table = rope_tables(positions or capacity + rows, head_dim, theta=100.0, style=style)
    lengths = [rng.randint(0, capacity) if counts or slots else rng.randint(0, capacity - rows) for _ in range(batch)]
    numbers = [rng.randint(0, rows if slots else min(rows, capacity - n)) for n in lengths]
    picked = [pick_slots(rng, rows, n if counts else rows, capacity - length) for n, length in zip(numbers, lengths)]
    ids = rng.sample(range(pages), batch * per_sequence) if page_size else []
    added = torch.randn(heads + kv_heads, head_dim, generator=torch.Generator().manual_seed(seed)).to(dtype)
    starts = torch.tensor(lengths, dtype=index_dtype)
    counted = torch.tensor(numbers, dtype=index_dtype) if counts else None
    owned = torch.tensor(ids, dtype=torch.int32).view(batch, per_sequence) if page_size else None
    chosen = torch.tensor(picked, dtype=index_dtype).view(batch, rows) if slots else None
    added = added if bias else None
    return Case(qkv, added, table.cos, table.sin, k, v, starts, counted, owned, style, capacity, chosen)


def pick_slots(rng: random.Random, rows: int, count: int, room: int) -> list[int]:
    """Slots of rows that count, each once, padding among them; rows that do not count may have any slot."""
    free = rng.sample(range(room), min(room, count))
    picked = [free.pop() if free and rng.random() < 0.8 else -1 for _ in range(count)]
    return picked + [rng.choice([-1, 0, room, 2**31 - 1]) for _ in range(rows - count)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kv_heads = draw(st.integers(1, 3))
    rows = draw(st.integers(1, 6))
    return make_case(
        draw(st.integers(0, 2**20)),
        batch=draw(st.integers(1, 3)),
        rows=rows,
        kv_heads=kv_heads,
        heads=kv_heads * draw(st.integers(1, 4)),
        head_dim=draw(st.sampled_from([2, 6, 16, 34, 96])),
        dtype=draw(st.sampled_from(DTYPES)),
        style=draw(st.sampled_from(["half", "interleaved"])),
        page_size=draw(st.sampled_from([None, 1, 3, 16])),
        capacity=draw(st.integers(6, 20)),
        pad=draw(st.integers(0, 2)),
        bias=draw(st.booleans()),
        counts=draw(st.booleans()),
        index_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        slots=draw(st.booleans()),
    )


def check(case: Case, actual: Case) -> None:
    """The results of a call on a copy of the case."""
    expected, exact = case.moved(CPU).run(reference), case.moved(CPU).doubled().run(reference)
    if case.qkv.numel() >= 500:
        assert_within_budget(actual.turned.cpu(), exact.turned, expected.turned, name="q and k")
    else:
        eps = torch.finfo(case.qkv.dtype).eps
        assert torch.allclose(actual.turned.cpu().double(), exact.turned, rtol=4 * eps, atol=8 * eps)
    # All other bytes of the input are unchanged; the cache holds exactly the bits that the input holds now.
    left, was = actual.moved(CPU), case.moved(CPU)
    kv_heads = left.k.shape[2]
    k, v = left.qkv[:, :, -2 * kv_heads : -kv_heads].clone(), left.qkv[:, :, -kv_heads:].clone()
    slots, stored = case.where()
    for i in range(case.qkv.shape[1]):
        slots_per_page = torch.where(stored[:, i], was.lengths + slots[:, i], 0)
        kv_append_(was.k, was.v, k[:, i : i + 1], v[:, i : i + 1], slots_per_page, stored[:, i].long(), was.block_table)
    assert torch.equal(left.qkv[slots < 0], was.qkv[slots < 0])
    left.turned.zero_(), was.turned.zero_()
    assert all(torch.equal(a, b) for a, b in zip(left.bytes(), was.bytes()))


@given(case=cases())
@settings(max_examples=120)
def test_equals_reference(impl, case: Case) -> None:
    check(case, case.moved(impl.device).run(impl.apply_rope_append_))


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes_of_huginn(impl, style: str, dtype: torch.dtype) -> None:
    case = make_case(3, batch=1, rows=3, heads=55, kv_heads=55, head_dim=96, dtype=dtype, style=style, capacity=9)
    check(case, case.moved(impl.device).run(impl.apply_rope_append_))


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_is_the_rotation_of_the_models(impl, style: str) -> None:
    case = make_case(5, rows=4, head_dim=16, style=style)
    table = rope_tables(len(case.cos), 16, theta=100.0, style=style)
    expected = apply_rope(case.turned + case.bias, table.at(case.lengths[:, None] + torch.arange(4)), style)
    actual = case.moved(impl.device).run(impl.apply_rope_append_)
    assert torch.allclose(actual.turned.cpu(), expected, atol=1e-6)


def test_rows_that_do_not_count_may_be_past_the_tables(impl) -> None:
    case = make_case(7, batch=1, rows=6, capacity=8, positions=8)
    case.lengths.fill_(6)
    case.counts.fill_(2)
    actual = case.moved(impl.device).run(impl.apply_rope_append_)
    check(case, actual)
    last = case.moved(CPU)
    last.lengths.fill_(7)
    last.counts.fill_(1)
    last.run(implementation("cpu").apply_rope_append_)  # its row 0 is at 7, and so are all rows past the end
    moved = case.moved(CPU)
    moved.qkv.copy_(moved.qkv[:, [2, 3, 4, 5, 0, 1]])
    moved.lengths.fill_(7)
    moved.counts.fill_(0)
    moved.run(implementation("cpu").apply_rope_append_)
    assert torch.allclose(actual.turned[:, 2:].cpu(), moved.turned[:, :4], atol=1e-6)


@pytest.mark.parametrize("batch, rows", [(0, 3), (2, 0), (1, 1)])
def test_empty_and_single(impl, batch: int, rows: int) -> None:
    case = make_case(11, batch=batch, rows=rows, head_dim=2)
    check(case, case.moved(impl.device).run(impl.apply_rope_append_))


@given(case=cases())
@settings(max_examples=20)
def test_a_batch_equals_its_sequences_alone(impl, case: Case) -> None:
    together, again = (case.moved(impl.device).run(impl.apply_rope_append_) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(together.bytes(), again.bytes()))
    for b in range(len(case.lengths)):
        alone = case.moved(impl.device).sequence(b).run(impl.apply_rope_append_)
        assert torch.equal(alone.qkv[0], together.qkv[b])


@given(case=cases())
@settings(max_examples=10)
def test_result_does_not_depend_on_the_order_of_threads(case: Case) -> None:
    impl = implementation("cudasim")
    expected = case.moved(CPU).run(impl.apply_rope_append_)
    for order in impl.schedules():
        with order:
            actual = case.moved(CPU).run(impl.apply_rope_append_)
            assert all(torch.equal(a, b) for a, b in zip(actual.bytes(), expected.bytes()))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_share_the_work(threads: int) -> None:
    case = make_case(13, batch=3, rows=20, heads=12, kv_heads=4, head_dim=96, capacity=40)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(case, case.moved(CPU).run(pd.apply_rope_append_))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_vector_unit(level_ops: object, style: str, dtype: torch.dtype) -> None:
    for slots in (False, True):
        case = make_case(17, rows=6, head_dim=34, dtype=dtype, style=style, page_size=3, slots=slots)
        actual = case.moved(CPU)
        tensors = (*actual.tensors, actual.counts, actual.block_table)
        level_ops.apply_rope_append_(*tensors, style == "interleaved", actual.slots)
        check(case, actual)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [None, 3])
@pytest.mark.parametrize("optional", [True, False])
def test_opcheck(page_size: int | None, optional: bool) -> None:
    for device in [name for name in NAMES if name != "cudasim"]:
        c = make_case(19, page_size=page_size, bias=optional, counts=optional, slots=optional)
        c = c.moved(torch.device(device))
        call = (*c.tensors, c.counts, c.block_table, optional, c.slots)
        torch.library.opcheck(torch.ops.pdkernels.apply_rope_append_.default, call)


@pytest.mark.parametrize("slots", [False, True])
def test_fullgraph_without_recompiles(slots: bool) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()

    def step(tensors, counts, slots):
        pd.apply_rope_append_(*tensors, counts=counts, slots=slots)
        return tensors[0] + 1

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for seed, rows in enumerate([3, 5, 7, 4]):
        case = make_case(seed, rows=rows, capacity=20, slots=slots)
        expected = case.moved(CPU).run(pd.apply_rope_append_)
        result = compiled(case.tensors, case.counts, case.slots)
        assert all(torch.equal(a, b) for a, b in zip(case.bytes(), expected.bytes()))
        assert torch.equal(result, case.qkv + 1)
    assert counter.frame_count == 1


@pytest.mark.parametrize("slots", [False, True])
def test_reference_backend_gives_the_same(slots: bool) -> None:
    case = make_case(23, page_size=3, slots=slots)
    other = case.moved(CPU)
    other.run(lambda *tensors, **options: pd.apply_rope_append_(*tensors, **options, backend="reference"))
    check(case, other)


def good_case(page_size: int | None = None) -> Case:
    case = make_case(29, page_size=page_size)
    case.lengths.copy_(torch.tensor([3, 2]))
    case.counts.copy_(torch.tensor([2, 4]))
    return case


GOOD, PAGES = good_case(), good_case(4)
PAGES.lengths.copy_(torch.tensor([3, 0]))
SHORT = {"cos": GOOD.cos[:6], "sin": GOOD.sin[:6]}
SLOTS = torch.tensor([[-1, 3, -1, -1, 2**40], [0, 4, 2, -1, 99]])
TABLE = {
    r"apply_rope_append_: lengths must be in \[0, 16\], got -1 for sequence 1\. The cache holds": {
        "lengths": filled(GOOD.lengths, 1, -1)
    },
    r"counts must be in \[0, 5\], got 6 for sequence 0": {"counts": filled(GOOD.counts, 0, 6)},
    r"lengths \+ counts must be at most the capacity 16, got 17 for sequence 0": dict(
        lengths=filled(GOOD.lengths, 0, 13), counts=filled(GOOD.counts, 0, 4)
    ),
    r"lengths \+ counts must be at most the 6 positions of the tables, got 7 for sequence 0": dict(
        **SHORT, lengths=filled(GOOD.lengths, 0, 4), counts=filled(GOOD.counts, 0, 3)
    ),
    r"qkv must have shape \(B, R, heads \+ 2 \* kv_heads, D\), got \(5, 8, 8\)": {"qkv": GOOD.qkv[0]},
    r"TypeError: qkv must be float32, float16 or bfloat16, got torch\.int64": {"qkv": GOOD.qkv.long()},
    r"qkv must have heads \+ 2 \* 2 heads, heads a multiple of the cache's 2, got 5": {"qkv": GOOD.qkv[:, :, :5]},
    r"qkv must have a contiguous last dimension, got strides": {"qkv": GOOD.qkv.transpose(2, 3)},
    r"qkv must have an even head_dim of at least 2, got 7": {
        name: getattr(GOOD, name)[..., :7] for name in ("qkv", "k", "v")
    },
    r"TypeError: got torch\.float64\. Pass backend='reference'": dict(
        qkv=GOOD.qkv.double(), bias=None, k=GOOD.k.double(), v=GOOD.v.double()
    ),
    r"bias must have shape \(6, 8\), got \(4, 8\)": {"bias": GOOD.bias[:4]},
    r"TypeError: bias must be torch\.float32 like the others, got torch\.float16": {"bias": GOOD.bias.half()},
    r"cos must have shape \(P, 8\) with at least one position, got \(21, 4\)": {"cos": GOOD.cos[:, :4]},
    r"with at least one position, got \(0, 8\)": {"cos": GOOD.cos[:0], "sin": GOOD.sin[:0]},
    r"sin must have shape \(21, 8\) like cos, got \(9, 8\)": {"sin": GOOD.sin[:9]},
    r"TypeError: sin must be float32, got torch\.bfloat16": {"sin": GOOD.sin.bfloat16()},
    r"cos must be contiguous, got strides": {"cos": GOOD.cos.repeat(1, 2)[:, ::2]},
    r"TypeError: k_cache must be torch\.float32 like the others, got torch\.float16": {"k": GOOD.k.half()},
    r"v_cache must have shape \(B or pages, slots, kv_heads, 8\), got \(16, 2, 8\)": {"v": GOOD.v[0]},
    r"v_cache must have shape \(2, 16, 2, 8\) like k_cache, got \(2, 9, 2, 8\)": {"v": GOOD.v[:, :9]},
    r"k_cache must have a batch of 2 like qkv, got 1": {"k": GOOD.k[:1], "v": GOOD.v[:1]},
    r"lengths must have shape \(2\), got \(1,\)": {"lengths": GOOD.lengths[:1]},
    r"TypeError: counts must be an int32 or int64 tensor, got torch\.float32": {"counts": GOOD.counts.float()},
    r"cos must be on cpu, got meta": {"cos": GOOD.cos.to("meta")},
    r"slots must have shape \(2, 5\), got \(2, 1\)": {"slots": GOOD.lengths[:, None]},
    r"TypeError: slots must be an int32 or int64 tensor, got torch\.float32": {"slots": torch.zeros(2, 5)},
    r"slots\[1, 4\] must be in \[-1, 13\], got -2 for sequence 1\. A row is at lengths \+ slots": {
        "slots": filled(SLOTS, (1, 4), -2)
    },
    r"slots\[0, 1\] must be in \[-1, 12\], got 13 for sequence 0": {"slots": filled(SLOTS, (0, 1), 13)},
    r"lengths \+ slots must be less than the 6 positions of the tables, got 6 for sequence 0": dict(
        slots=SLOTS, **SHORT
    ),
    r"_: counts must be in \[0, 5\], got 6 for sequence 0": {"slots": SLOTS, "counts": filled(GOOD.counts, 0, 6)},
    r"style must be 'half' or 'interleaved', got 'pairs'": {"style": "pairs"},
    r"NotImplementedError: bias must not require a gradient": {"bias": GOOD.bias.clone().requires_grad_()},
}
PAGED = {
    r"block_table\[1, 0\] must be in \[0, 9\], got -1 for sequence 1\. Reserve pages": {
        "block_table": filled(PAGES.block_table, (1, 0), -1)
    },
    r"block_table\[0, 1\] must be in \[0, 9\], got 99 for sequence 0": {
        "block_table": filled(PAGES.block_table, (0, 1), 99)
    },
    r"block_table\[0, 1\] must be in \[0, 9\], got -1 for sequence 0\. Reserve pages": dict(
        slots=SLOTS, block_table=filled(PAGES.block_table, (0, 1), -1)
    ),
    r"block_table must have shape \(2, any\), got \(1, 4\)": {"block_table": PAGES.block_table[:1]},
}


@pytest.mark.parametrize("page_size", [None, 4])
def test_table_starts_from_a_good_case(page_size: int | None) -> None:
    check(case := good_case(page_size), case.moved(CPU).run(pd.apply_rope_append_))


@pytest.mark.parametrize(
    "case, text, change",
    [*((GOOD, *row) for row in TABLE.items()), *((PAGES, *row) for row in PAGED.items())],
    ids=[*TABLE, *PAGED],
)
def test_bad_call(case: Case, text: str, change: dict[str, object]) -> None:
    bad = replace(case, **change)
    before = [t.clone() for t in case.bytes()]
    with refused(text) as error:
        bad.run(pd.apply_rope_append_)
    assert str(error.value).startswith("pdkernels.apply_rope_append_: ")
    assert all(torch.equal(a, b) for a, b in zip(case.bytes(), before))


WILD = [-(2**63), -(2**31), -1, 17, 22, 2**31 - 1, 2**62, 2**63 - 1]
WAYS = {"page_size": st.sampled_from([None, 3]), "positions": st.sampled_from([None, 9]), "slots": st.booleans()}


@given(seed=st.integers(0, 2**31), ways=st.fixed_dictionaries(WAYS))
@settings(max_examples=400)
def test_a_bad_sequence_is_refused_or_left_alone(impl, seed: int, ways: dict[str, object]) -> None:
    """The CPU refuses what the reference refuses and writes nothing; CUDA serves the other sequences."""
    rng = random.Random(seed)
    case = make_case(seed, batch=3, rows=3, heads=1, kv_heads=1, head_dim=2, **ways)
    for _ in range(rng.randint(0, 2)):
        spoiled = rng.choice([case.lengths, case.counts, *([] if case.slots is None else [case.slots])])
        spoiled.view(-1)[rng.randrange(spoiled.numel())] = rng.choice([*WILD, rng.randint(0, 16)])
    if case.block_table is not None:
        case.block_table.view(-1)[rng.randrange(case.block_table.numel())] = rng.choice([-1, 10**6])
    if impl.raises:
        actual, expected = case.moved(CPU), case.moved(CPU)
        try:
            expected.run(reference)
        except ValueError:
            with pytest.raises(ValueError, match=r"pdkernels\.apply_rope_append_: "):
                actual.run(impl.apply_rope_append_)
            assert all(torch.equal(a, b) for a, b in zip(actual.bytes(), case.bytes()))
        else:
            check(case, actual.run(impl.apply_rope_append_))
        return
    actual = case.moved(impl.device).run(impl.apply_rope_append_).moved(CPU)
    expected = case.moved(CPU)
    for b in range(3):
        try:
            expected.sequence(b).run(reference)
        except ValueError:
            assert torch.equal(actual.qkv[b], case.qkv[b])
    assert torch.allclose(actual.qkv, expected.qkv, atol=1e-5)
    if case.block_table is None:
        for a, b in ((actual.k, expected.k), (actual.v, expected.v)):
            assert torch.allclose(a, b, atol=1e-5, equal_nan=True)
