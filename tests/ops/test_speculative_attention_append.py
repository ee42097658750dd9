"""speculative_attention_append_: the bits of speculative_attention, and the chosen rows in the cache; every other byte as it was."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import pdkernels as pd
from pdkernels import masks
from pdkernels._attention import SpeculativeArguments
from pdkernels.masks import TilePlan
from tests.ops.attention_cases import DTYPES, backend, kernels, on_device
from tests.ops.kv_cases import storage, whole
from tests.ops.speculative_cases import (
    APPEND,
    OP,
    TAILS,
    Inputs,
    Rows,
    check_append,
    in_pages,
    make_inputs,
    make_rows,
    raw,
    run_append,
    with_room,
)
from tests.support.errors import kind_of

module: Any = importlib.import_module("pdkernels.ops.speculative_attention")

__all__ = ["backend", "kernels"]  # fixtures

LENGTHS = [37, 0, 300, 128, 5, 64, 1, 200]
CHOICES = ["all", "counts", "sources", "both"]


def make(
    new: int, lengths: list[int], how: str = "both", *, page_size: int = 0, slots: int | None = None, **options: Any
) -> tuple[Inputs, Rows]:
    """With room for all new tokens, unless another capacity is given."""
    inputs = make_inputs(new, lengths, slots=max(lengths, default=0) + new if slots is None else slots, **options)
    rows = make_rows(inputs, how)
    return with_room(inputs, rows, page_size) if page_size else inputs, rows


@pytest.mark.covering(2)
@pytest.mark.parametrize("how", CHOICES)
@pytest.mark.parametrize("tail", TAILS)
def test_tails(backend: str, tail: str, how: str) -> None:
    """Dtypes, groups and pages cycle independently."""
    mask, turn = TAILS[tail], list(TAILS).index(tail) * len(CHOICES) + CHOICES.index(how)
    heads, kv_heads = [(4, 2), (7, 1), (3, 3)][turn % 3]
    options = dict(page_size=[0, 16, 1, 64][turn // 3 % 4], heads=heads, kv_heads=kv_heads, dtype=DTYPES[turn // 2 % 3])
    inputs, rows = make(mask.q_len, LENGTHS, how, head_dim=[16, 24, 80, 128][turn % 4], **options)
    check_append(backend, inputs, mask, rows, [(32, 32), (16, 48), (64, 32)][turn % 3])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [0, 1, 5, 16, 64])
def test_up_to_the_capacity(backend: str, page_size: int, dtype: torch.dtype) -> None:
    """Rows on both sides of a page's end, and a cache that is full afterwards, or was before."""
    rows = Rows(torch.tensor([40, 0, 20, 40, 3, 1]))
    inputs = make_inputs(40, [280, 320, 300, 0, 317, 64], slots=320, dtype=dtype)
    check_append(
        backend, with_room(inputs, rows, page_size) if page_size else inputs, masks.quadratic(6)[:40, :40], rows
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Inputs, Rows, int]:
    new, batch = draw(st.integers(1, 50)), draw(st.integers(1, 4))
    heads, kv_heads = draw(st.sampled_from([(1, 1), (2, 1), (4, 2), (7, 1)]))
    inputs, rows = make(
        new,
        draw(st.lists(st.integers(0, 90), min_size=batch, max_size=batch)),
        draw(st.sampled_from(CHOICES)),
        page_size=draw(st.sampled_from([0, 0, 1, 3, 16])),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([16, 24, 32])),
        dtype=draw(st.sampled_from(DTYPES)),
    )
    return inputs, rows, draw(st.sampled_from([16, 32, 64]))


@settings(max_examples=60)
@given(case=cases())
def test_any_shape(backend: str, case: tuple[Inputs, Rows, int]) -> None:
    inputs, rows, tile = case
    check_append(backend, inputs, masks.causal(inputs.q.shape[1]), rows, (tile, 32))


def test_long_prefixes(backend: str) -> None:
    """Kernels cut them into splits, of which one stores."""
    inputs, rows = make(12, [9000, 0, 4096, 8191, 4095], slots=9012, heads=2, kv_heads=1)
    check_append(backend, inputs, masks.causal(12), rows)


@pytest.mark.parametrize("batch, new, slots", [(0, 4, 8), (2, 0, 8), (2, 0, 0), (2, 4, 0), (1, 1, 1)])
@pytest.mark.parametrize("page_size", [0, 4])
def test_empty(backend: str, batch: int, new: int, slots: int, page_size: int) -> None:
    for how in ["counts", "both"] if new else ["all", "counts"]:
        inputs, rows = make(new, [0] * batch, how, slots=slots, page_size=page_size)
        check_append(backend, inputs, masks.causal(new), rows)


def test_nothing_to_store(backend: str) -> None:
    """A forward that only reads: slots after the prefix need not exist, sources may be anything."""
    inputs = make_inputs(9, [33, 16, 0], slots=48, page_size=16)
    none = torch.zeros(3, dtype=torch.int64)
    for rows in (Rows(none), Rows(none, torch.full((3, 4), 2**40)), Rows(None, torch.empty(3, 0, dtype=torch.int32))):
        check_append(backend, inputs, masks.causal(9), rows)


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (1, 0, 2, 3), (0, 1, 2, 3)])
def test_strides(backend: str, order: tuple[int, ...]) -> None:
    """Heads or slots before the batch, gaps between rows, a layer of a stack; every byte around stays."""
    plain, rows = make(21, [37, 12, 50], dtype=torch.float16)
    caches = []
    for seed, cache in enumerate(plain[3:5]):
        stack = storage((2, *cache.shape), cache.dtype, (0, *(dim + 1 for dim in order)), 8 * seed, seed)
        caches.append(stack[1].copy_(cache))
    news = torch.stack(plain[1:3], dim=2)
    inputs = plain._replace(k_new=news[:, :, 0], v_new=news[:, :, 1], k_cache=caches[0], v_cache=caches[1])
    strided = Rows(rows.counts.repeat_interleave(2)[::2], rows.source_index.T.contiguous().T)
    check_append(backend, inputs, masks.quadratic(5)[:21, :21], strided)


def test_a_choice_for_all_sequences(backend: str) -> None:
    """The draft tokens of an interleaved layout, which the commit then need not move."""
    draft = 5
    mask = masks.quadratic(draft, layout="interleaved")
    inputs, _ = make(mask.q_len, [40, 7, 19])
    drafts = torch.arange(0, mask.q_len, draft + 1)[None].expand(3, -1)
    check_append(backend, inputs, mask, Rows(None, drafts))


@pytest.mark.parametrize("paged", [False, True])
def test_steps_of_a_decoder(backend: str, paged: bool) -> None:
    """Appending in the pass leaves the cache that appending before it does, and the same attention in every step."""
    device, name = on_device(backend)
    kinds = {"layers": 2, "batch": 2, "kv_heads": 2, "head_dim": 32, "device": device}
    mask, draft = masks.quadratic(4), torch.tensor([4, 4], device=device)
    plan, caches = mask.plan(32, 32, device), []
    for _ in range(2):
        cache = (
            pd.cache.PagedKVCache(num_pages=12, page_size=16, **kinds)
            if paged
            else pd.cache.ContiguousKVCache(capacity=64, **kinds)
        )
        if paged:
            cache.reserve_([64, 64])
        caches.append(cache)
    for step in range(9):
        q, k, v = (x.to(device) for x in make_inputs(mask.q_len, [step, 0])[:3])
        accepted = torch.tensor([1 + step % 4, 4 - step % 3], device=device)
        results = []
        for cache, fused in zip(caches, (False, True)):
            arguments = (q, k, v, cache.k[1], cache.v[1], cache.lengths, plan)
            options = {"block_table": cache.block_table, "return_lse": True, "backend": name}
            if fused:
                results.append(pd.speculative_attention_append_(*arguments, counts=draft, **options))
            else:
                cache.append_(1, k, v, draft)
                results.append(pd.speculative_attention(*arguments, **options))
            cache.commit_(accepted)
        assert all(torch.equal(a, b) for a, b in zip(*results))
    assert torch.equal(caches[0].k, caches[1].k) and torch.equal(caches[0].v, caches[1].v)
    assert caches[0].k.any() and torch.equal(caches[0].lengths, caches[1].lengths)


# --- the same bits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [0, 16])
def test_a_sequence_does_not_depend_on_its_batch(kernels: str, page_size: int) -> None:
    inputs, rows = make(33, [300, 0, 560, 77], page_size=page_size, dtype=torch.bfloat16)
    plan = masks.quadratic(6)[:33, :33].plan(32, 32)
    (together, k_together, v_together), table = run_append(kernels, inputs, plan, rows), inputs.block_table
    for b, length in enumerate(inputs.lengths.tolist()):
        alone, k, v = run_append(kernels, inputs.sequence(b), plan, Rows(*(x[b : b + 1] for x in rows)))
        assert all(torch.equal(a[b : b + 1], c) for a, c in zip(together, alone))
        stored = torch.arange(length, length + int(rows.counts[b]))
        for one, all_of_them in ((k, k_together), (v, v_together)):
            if page_size:
                at = (table[b].long()[stored // page_size], stored % page_size)
                assert torch.equal(one[at], all_of_them[at])
            else:
                assert torch.equal(one[0, stored], all_of_them[b, stored])


def test_the_same_bytes_whatever_the_threads(kernels: str) -> None:
    inputs, rows = make(70, [4200, 61, 3], dtype=torch.float16)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(run_append(kernels, inputs, masks.causal(70).plan(16, 16), rows))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0][0], other[0]))
        assert all(torch.equal(whole(a), whole(b)) for a, b in zip(results[0][1:], other[1:]))


# --- bad values --------------------------------------------------------------------------------------------------------

MASK = masks.causal(6)
GOOD = make_inputs(6, [17, 5], slots=24, head_dim=16)
PAGED = in_pages(GOOD, 4)  # pages for the prefixes alone
COUNTS, SOURCES = torch.tensor([3, 2]), torch.tensor([[5, 0, 1, 99], [4, 4, -7, 99]])
BAD_VALUES = {
    "count": (
        GOOD,
        Rows(torch.tensor([7, 0])),
        "counts must be in [0, 6], got 7 for sequence 0. Only the rows given can be written.",
    ),
    "negative count": (GOOD, Rows(torch.tensor([3, -1])), "counts must be in [0, 6], got -1 for sequence 1."),
    "more than sources": (GOOD, Rows(torch.tensor([3, 5]), SOURCES), "counts must be in [0, 4], got 5 for sequence 1."),
    "room": (
        GOOD._replace(lengths=torch.tensor([3, 20])),
        Rows(),
        "lengths + counts must be at most the capacity 24, got 26 for sequence 1. Make the cache larger, reserve more pages, or",
    ),
    "length": (
        GOOD._replace(lengths=torch.tensor([25, 3])),
        Rows(COUNTS),
        "lengths must be in [0, 24], got 25 for sequence 0.",
    ),
    "source": (
        GOOD,
        Rows(torch.tensor([3, 3]), SOURCES),
        "source_index[1, 2] must be in [0, 5], got -7 for sequence 1. It names one of",
    ),
    "source too far": (
        GOOD,
        Rows(None, SOURCES[:1].repeat(2, 1)),
        "source_index[0, 3] must be in [0, 5], got 99 for sequence 0.",
    ),
    "no page after the prefix": (
        PAGED,
        Rows(torch.tensor([3, 4])),
        f"block_table[1, 2] must be in [0, 14], got {-(2**20)} for sequence 1. Reserve pages for the rows before writing them.",
    ),
    "no page of the prefix": (
        PAGED._replace(lengths=torch.tensor([17, 9])),
        Rows(COUNTS),
        f"block_table[1, 2] must be in [0, 14], got {-(2**20)} for sequence 1. Every page of the prefix must exist.",
    ),
}


@pytest.mark.parametrize("case", BAD_VALUES)
@pytest.mark.parametrize("name", ["native", "reference"])
def test_bad_values_write_nothing(name: str, case: str) -> None:
    """One bad sequence, the last, keeps the first from being written."""
    inputs, rows, text = BAD_VALUES[case]
    before = [whole(x).clone() for x in inputs[3:5]]
    with pytest.raises(ValueError) as raised:
        pd.speculative_attention_append_(
            *inputs[:6], MASK.plan(16, 16), **rows._asdict(), block_table=inputs.block_table, backend=name
        )
    assert str(raised.value).startswith(f"pdkernels.speculative_attention_append_: {text}")
    assert all(torch.equal(a, whole(b)) for a, b in zip(before, inputs[3:5]))


BAD_CALLS = {
    "counts must have shape (2), got (1,)": {"counts": COUNTS[:1]},
    "TypeError: counts must be an int32 or int64 tensor, got torch.float32.": {"counts": COUNTS.float()},
    "source_index must have shape (2, any), got (4,)": {"source_index": SOURCES[0]},
    "TypeError: source_index must be an int32 or int64 tensor, got torch.int16.": {"source_index": SOURCES.short()},
    "source_index must be on cpu, got meta.": {"source_index": SOURCES.to("meta")},
    "TypeError: plan must be a TilePlan, got SegmentMask. Call mask.plan(block_q, block_k, q.device).": {"plan": MASK},
    "TypeError: k_cache must be torch.float32 like q, got torch.bfloat16.": {"k_cache": GOOD.k_cache.bfloat16()},
    "TypeError: k_new must be float16 like k_cache, got torch.float32.": {"k_cache": GOOD.k_cache.half()},
}


@pytest.mark.parametrize("case", BAD_CALLS)
@pytest.mark.parametrize("name", ["native", "reference"])
def test_bad_calls(name: str, case: str) -> None:
    kind, text = kind_of(case)
    good = dict(zip(("q", "k_new", "v_new", "k_cache", "v_cache", "lengths"), GOOD), plan=MASK.plan(16, 16))
    arguments = good | BAD_CALLS[case]
    with pytest.raises(kind, match=re.escape(f"pdkernels.speculative_attention_append_: {text}")):
        pd.speculative_attention_append_(**arguments, backend=name)


@pytest.mark.parametrize("number", range(5))
def test_it_has_no_gradient(kernels: str, number: int) -> None:
    device, _ = on_device(kernels)
    tensors = [x.to(device, copy=True) for x in GOOD[:6]]
    tensors[number].requires_grad_()
    with pytest.raises(
        NotImplementedError, match=r"speculative_attention_append_: its inputs must not require gradients"
    ):
        pd.speculative_attention_append_(*tensors, MASK.plan(16, 16, device), counts=COUNTS.to(device))
    with torch.no_grad():
        assert not pd.speculative_attention_append_(
            *tensors, MASK.plan(16, 16, device), counts=COUNTS.to(device)
        ).requires_grad


def test_debug_checks_look_at_values_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a bad sequence is left unchanged; with PDKERNELS_DEBUG_CHECKS=1 its values are read back and refused."""
    pytest.importorskip("triton")
    monkeypatch.setattr(module, "DEBUG_CHECKS", True)
    for inputs, rows, text in BAD_VALUES.values():
        with pytest.raises(ValueError, match=re.escape(text)):
            module.by_triton(module.APPEND, SpeculativeArguments(*raw(inputs, MASK, "cpu"), **rows._asdict()))


# --- torch integration -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("how", CHOICES)
def test_opcheck(kernels: str, how: str, page_size: int) -> None:
    mask, device = masks.quadratic(4), on_device(kernels)[0]
    inputs, rows = make(mask.q_len, [70, 0, 21], how, page_size=page_size, dtype=torch.bfloat16)
    torch.library.opcheck(
        APPEND,
        (*raw(inputs, mask, device), None, None, 0, None, 0.0, *(None if x is None else x.to(device) for x in rows)),
    )


def step(inputs: Inputs, plan: TilePlan, rows: Rows) -> Tensor:
    *tensors, table = inputs
    out = pd.speculative_attention_append_(*tensors, plan, **rows._asdict(), block_table=table)
    return out.sin() + tensors[3].nan_to_num().sum()  # sees what was stored


# Otherwise sizes that happen to be equal in the first call have to stay equal.
@torch.fx.experimental._config.patch(use_duck_shape=False)
@pytest.mark.parametrize("page_size", [16, pytest.param(0, marks=pytest.mark.slow)])
def test_fullgraph_without_recompiles(kernels: str, page_size: int) -> None:
    """One graph for all sizes; the cache that comes in is the one that is written."""
    torch._dynamo.reset()
    counter, device = CompileCounterWithBackend("aot_eager"), on_device(kernels)[0]
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for draft, lengths, heads, kv_heads in [(6, [20, 70], 4, 2), (9, [9, 130, 60], 9, 3), (7, [44, 8, 10, 220], 6, 2)]:
        mask = masks.quadratic(draft)
        inputs, rows = make(mask.q_len, lengths, page_size=page_size, heads=heads, kv_heads=kv_heads)
        # int32 and int64 would be two graphs.
        inputs = inputs.map(lambda x: x.to(device) if x.is_floating_point() else x.to(device, torch.int64))
        rows, twin = Rows(*(x.to(device, torch.int64) for x in rows)), inputs.map(Tensor.clone)
        plan = mask.plan(32, 32, device)
        assert torch.equal(compiled(inputs, plan, rows), step(twin, plan, rows))
        assert all(torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0)) for a, b in zip(inputs[3:5], twin[3:5]))
        assert not inputs.k_cache.isnan().all()
    assert counter.frame_count == 1


def test_the_op_that_reads_is_not_turned_into_one_that_writes() -> None:
    """In a functional graph caches that are written are results, which most backends copy; those that are read are not."""
    graphs: list[torch.fx.GraphModule] = []
    inputs, plan = make_inputs(6, [17, 5], slots=24, head_dim=16), MASK.plan(16, 16)

    def look(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    for function in (pd.speculative_attention, pd.speculative_attention_append_):
        torch._dynamo.reset()
        call = lambda *tensors: function(*tensors, plan)  # noqa: B023, E731
        with torch.no_grad():
            torch.compile(call, fullgraph=True, backend=torch._dynamo.backends.common.aot_autograd(fw_compiler=look))(
                *inputs[:6]
            )
    assert [len(graph.graph.output_node().args[0]) for graph in graphs] == [1, 3]
    assert any(node.target is OP for node in graphs[0].graph.nodes)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_one_cuda_graph_serves_all_lengths_and_choices() -> None:
    mask = masks.quadratic(4)
    inputs = with_room(make_inputs(mask.q_len, [1000, 1000], slots=1024, dtype=torch.bfloat16), Rows(), 16).map(
        Tensor.cuda
    )
    rows = Rows(
        torch.zeros(2, dtype=torch.int64, device="cuda"), torch.zeros(2, mask.q_len, dtype=torch.int64, device="cuda")
    )
    plan, (*tensors, table) = mask.plan(32, 32, "cuda"), inputs
    options = {**rows._asdict(), "block_table": table, "return_lse": True}
    pd.speculative_attention_append_(*tensors, plan, **options)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = pd.speculative_attention_append_(*tensors, plan, **options)
    for lengths, counts in (([900, 0], [4, 7]), ([1, 600], [0, 20]), ([512, 300], [1, 1])):
        inputs.lengths.copy_(torch.tensor(lengths))
        rows.counts.copy_(torch.tensor(counts))
        rows.source_index.random_(mask.q_len)
        expected, k, v = run_append("cuda", inputs, plan, rows)
        graph.replay()
        assert all(torch.equal(a.cpu(), b) for a, b in zip((out, lse), expected))
        assert all(torch.equal(whole(a), whole(b)) for a, b in ((inputs.k_cache, k), (inputs.v_cache, v)))
