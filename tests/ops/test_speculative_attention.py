"""speculative_attention on every backend against the dense reference in float64, tail by tail, over cached prefixes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import pdkernels as pd
from pdkernels import masks
from pdkernels.masks import SegmentMask, TilePlan
from tests.harness.error_budget import assert_within_budget
from tests.masks.strategies import random_masks
from tests.ops.attention_cases import DTYPES, backend, kernels, on_device
from tests.ops.speculative_cases import NAN, OP, TAILS, Inputs, check, in_pages, make_inputs, raw, run

__all__ = ["backend", "kernels"]  # fixtures

HEAD_DIMS = [16, 24, 64, 80, 96, 128, 256]
GROUPS = [(1, 1), (4, 2), (4, 1), (7, 1), (3, 3)]
TILES = [(32, 32), (64, 32), (16, 48), (128, 128), (16, 16), (64, 64)]
PAGES = [0, 16, 1, 64]
LENGTHS = [37, 0, 300, 128, 5, 64, 1, 200]


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tail", TAILS)
def test_tails(backend: str, tail: str, dtype: torch.dtype) -> None:
    """All tails in all dtypes; head dimensions, groups, tiles and pages cycle independently."""
    mask, turn = TAILS[tail], list(TAILS).index(tail) * len(DTYPES) + DTYPES.index(dtype)
    heads, kv_heads = GROUPS[turn % len(GROUPS)]
    inputs = make_inputs(
        mask.q_len,
        LENGTHS,
        page_size=PAGES[turn % len(PAGES)],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=HEAD_DIMS[turn % len(HEAD_DIMS)],
        dtype=dtype,
    )
    check(backend, inputs, mask, TILES[turn % len(TILES)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 40, 112, 200])
def test_head_dims(backend: str, head_dim: int, dtype: torch.dtype) -> None:
    mask = masks.quadratic(4)
    check(backend, make_inputs(mask.q_len, [70, 0, 33, 130], head_dim=head_dim, dtype=dtype), mask)


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("heads, kv_heads", [*GROUPS, (14, 2), (32, 8)])
def test_groups(backend: str, heads: int, kv_heads: int, page_size: int) -> None:
    mask = masks.quadratic(5)
    inputs = make_inputs(
        mask.q_len, [70, 0, 261], heads=heads, kv_heads=kv_heads, page_size=page_size, dtype=torch.bfloat16
    )
    check(backend, inputs, mask, (16, 16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [0, 1, 16])
def test_lengths(backend: str, page_size: int, dtype: torch.dtype) -> None:
    """All in one batch, on both sides of the sizes that kernels work in."""
    lengths = [0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300]
    check(backend, make_inputs(3, lengths, slots=300, page_size=page_size, dtype=dtype), masks.causal(3))


@pytest.mark.parametrize("page_size", [1, 5, 16, 64])
def test_pages_give_the_bits_of_one_piece(backend: str, page_size: int) -> None:
    mask = masks.quadratic(3)
    inputs = make_inputs(mask.q_len, [150, 0, 64, 320], slots=320, dtype=torch.float16)
    paged, contiguous = (check(backend, each, mask) for each in (in_pages(inputs, page_size), inputs))
    assert all(torch.equal(a, b) for a, b in zip(paged, contiguous))


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("lengths, slots", [([2100, 700], 2101), ([9000, 0, 4096, 4097, 8191, 8193], 9000)])
def test_long_prefixes(backend: str, lengths: list[int], slots: int, page_size: int, dtype: torch.dtype) -> None:
    """Kernels cut long prefixes into splits; capacity and length fall into different ones."""
    mask = masks.quadratic(3)
    check(backend, make_inputs(mask.q_len, lengths, slots=slots, page_size=page_size, dtype=dtype), mask)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Inputs, list[SegmentMask], tuple[int, int]]:
    """Any square mask, shared or one per sequence, any lengths, any pages, tiles of any shape."""
    mask = draw(random_masks(60))
    new = min(mask.shape)
    mask = mask[:new, :new]
    heads, kv_heads = draw(st.sampled_from([(1, 1), (2, 1), (4, 2), (7, 1)]))
    # Some hundred values of each kind: see assert_within_budget.
    batch = draw(st.integers(1, 3)) + 300 // (heads * max(1, new))
    lengths = draw(st.lists(st.integers(0, 90), min_size=batch, max_size=batch))
    inputs = make_inputs(
        new,
        lengths,
        slots=max(lengths) + draw(st.integers(0, 40)),
        page_size=draw(st.sampled_from([0, 0, 1, 3, 16])),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([16, 24, 32])),
        dtype=draw(st.sampled_from(DTYPES)),
    )
    others = [mask, masks.full(new), masks.causal(new)]
    stacked = draw(st.booleans())
    chosen = [others[draw(st.integers(0, 2)) if stacked and b < 4 else 0] for b in range(batch)]
    return inputs, chosen, tuple(draw(st.sampled_from([16, 32, 48, 64, 128])) for _ in range(2))


@settings(max_examples=60)
@given(case=cases())
def test_any_shape(backend: str, case: tuple[Inputs, list[SegmentMask], tuple[int, int]]) -> None:
    inputs, chosen, tiles = case
    check(backend, inputs, chosen[0] if all(mask is chosen[0] for mask in chosen) else chosen, tiles)


def test_a_plan_for_each_sequence(backend: str) -> None:
    check(backend, make_inputs(40, [5, 300, 0]), [masks.causal(40), masks.candidates(4, 10), masks.full(40)])


@pytest.mark.parametrize("scale", [None, 0.0, -0.3, 1, 100.0])
def test_scale(backend: str, scale: float | None) -> None:
    check(backend, make_inputs(20, [290, 30, 0]), masks.quadratic(4), scale=scale)


def test_without_log_sum_exp(backend: str) -> None:
    device, name = on_device(backend)
    mask, inputs = masks.causal(5), make_inputs(5, [30, 7])
    *tensors, _ = inputs.map(lambda x: x.to(device))
    out = pd.speculative_attention(*tensors, mask.plan(16, 16, device), backend=name)
    assert torch.equal(out.cpu(), run(backend, inputs, mask.plan(16, 16)).out)


def prefix_and_tail(inputs: Inputs) -> list[Tensor]:
    """K and V of a single sequence, contiguous, from a contiguous cache."""
    length = int(inputs.lengths)
    return [torch.cat([cache[:, :length], new], 1) for cache, new in zip(inputs[3:5], inputs[1:3])]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [0, 61, 300])
def test_equals_block_sparse_attention_over_prefix_and_tail(backend: str, length: int, dtype: torch.dtype) -> None:
    inputs = make_inputs(70, [length], dtype=dtype)
    device, name = on_device(backend)
    q, k, v = (x.to(device) for x in (inputs.q, *prefix_and_tail(inputs)))
    plan = masks.causal(70, length + 70).plan(64, 64, device)
    expected = pd.block_sparse_attention(q, k, v, plan, return_lse=True, backend=name)
    exact = pd.block_sparse_attention(q.double(), k.double(), v.double(), plan, return_lse=True, backend="reference")
    actual = run(backend, inputs, masks.causal(70).plan(64, 64))
    for which, *tensors in zip(("out", "lse"), actual, exact, expected):
        assert_within_budget(*tensors, name=which)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_pytorch_with_a_dense_mask(kernels: str, dtype: torch.dtype) -> None:
    mask = masks.quadratic(6)
    inputs = make_inputs(mask.q_len, [133], dtype=dtype)
    seen = F.pad(mask.dense(), (133, 0), value=True)

    def sdpa(dtype: torch.dtype) -> Tensor:
        q, k, v = (x.to(dtype).transpose(1, 2) for x in (inputs.q, *prefix_and_tail(inputs)))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2)

    assert_within_budget(run(kernels, inputs, mask.plan(32, 32)).out, sdpa(torch.float64), sdpa(dtype), name="out")


@pytest.mark.parametrize("paged", [False, True])
def test_one_plan_as_the_prefix_grows(backend: str, paged: bool) -> None:
    """A prompt read in steps, through our caches, gives the rows of one causal attention."""
    device, _ = on_device(backend)
    steps, new = 9, 12
    inputs = make_inputs(steps * new, [0, 0])
    q, k, v = (x.to(device) for x in inputs[:3])
    kinds = {"layers": 2, "batch": 2, "kv_heads": 2, "head_dim": 32, "device": device}
    if paged:
        cache = pd.cache.PagedKVCache(num_pages=20, page_size=16, **kinds)
        cache.reserve_([steps * new] * 2)
    else:
        cache = pd.cache.ContiguousKVCache(capacity=steps * new, **kinds)
    plan, rows = masks.causal(new).plan(16, 16, device), []
    for first in range(0, steps * new, new):
        step = slice(first, first + new)
        news, table = (x[:, step] for x in (q, k, v)), cache.block_table if paged else None
        rows.append(run(backend, Inputs(*news, cache.k[1], cache.v[1], cache.lengths, table), plan))
        cache.append_(1, k[:, step], v[:, step])
        cache.commit_(torch.full((2,), new, device=device))
    whole = masks.causal(steps * new)
    exact, same = (
        pd.block_sparse_attention(
            *(x.cpu().to(dtype) for x in (q, k, v)), whole.plan(), return_lse=True, backend="reference"
        )
        for dtype in (torch.float64, torch.float32)
    )
    assert_within_budget(torch.cat([row.out for row in rows], 1), exact[0], same[0], name="out")
    assert_within_budget(torch.cat([row.lse for row in rows], 2), exact[1], same[1], name="lse")


# --- memory ------------------------------------------------------------------------------------------------------------


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def strided(inputs: Inputs, how: str) -> Inputs:
    """Equal values in other strides."""
    if how == "heads before tokens":
        return Inputs(*(heads_first(x) for x in inputs[:5]), *inputs[5:])
    if how == "a layer of a stacked cache":
        caches = torch.stack([torch.full_like(inputs.k_cache, NAN), inputs.k_cache, inputs.v_cache], 2)
        return inputs._replace(k_cache=caches[:, :, 1], v_cache=caches[:, :, 2])
    if how == "sliced from one projection":
        q, k_new, v_new = torch.cat(inputs[:3], 2).split([x.shape[2] for x in inputs[:3]], 2)
        return inputs._replace(
            q=q, k_new=k_new, v_new=v_new, v_cache=F.pad(inputs.v_cache, (8, 16), value=NAN)[..., 8:-16]
        )
    apart = lambda x: x.repeat_interleave(3, -1)[..., ::3]  # noqa: E731
    table = None if inputs.block_table is None else apart(inputs.block_table.T.contiguous().T)
    return inputs._replace(lengths=apart(inputs.lengths), block_table=table)


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize(
    "how", ["heads before tokens", "a layer of a stacked cache", "sliced from one projection", "index tensors"]
)
def test_strides(backend: str, how: str, page_size: int) -> None:
    mask = masks.quadratic(5)
    plain = make_inputs(mask.q_len, [37, 0, 300], page_size=page_size, dtype=torch.float16)
    inputs = strided(plain, how)
    assert not all(x.is_contiguous() for x in inputs if x is not None)
    results = check(backend, inputs, mask)
    assert results.out.is_contiguous()
    assert all(torch.equal(a, b) for a, b in zip(results, run(backend, plain, mask.plan(32, 32))))


def test_sequences_may_split_their_prefix(backend: str) -> None:
    """A cache expanded over the batch, or one page in many tables."""
    one = make_inputs(9, [70])
    many = one.map(lambda x: x.expand(3, *x.shape[1:]))
    check(backend, many, masks.causal(9))
    paged = in_pages(one, 16)
    shared = many._replace(k_cache=paged.k_cache, v_cache=paged.v_cache, block_table=paged.block_table.expand(3, -1))
    check(backend, shared, masks.causal(9))


def test_rows_that_see_nothing(backend: str) -> None:
    """Without a prefix there are some; with one, such rows see it."""
    mask = TAILS["rows that see the prefix alone"]
    for tiles in ((16, 16), (64, 32)):
        out, lse = check(backend, make_inputs(mask.q_len, [0, 290, 0], page_size=16), mask, tiles)
        for b in (0, 2):
            assert (out[b, :20] == 0).all() and lse[b, :, :20].isneginf().all()
        assert out[1].any(-1).all() and lse[1].isfinite().all()


@pytest.mark.parametrize("batch, new, slots", [(0, 4, 8), (2, 0, 8), (2, 4, 0), (0, 0, 0), (1, 1, 1)])
@pytest.mark.parametrize("page_size", [0, 4])
def test_empty(backend: str, batch: int, new: int, slots: int, page_size: int) -> None:
    results = run(
        backend, make_inputs(new, [0] * batch, slots=slots, page_size=page_size), masks.causal(new).plan(16, 16)
    )
    assert results.out.shape == (batch, new, 4, 32) and results.lse.shape == (batch, 4, new)
    assert not results.out.isnan().any() and results.lse.dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", [-32.0, 32.0])
def test_extreme_scores(backend: str, factor: float, dtype: torch.dtype) -> None:
    inputs = make_inputs(20, [290, 30, 0], dtype=dtype)
    inputs = inputs._replace(q=inputs.q * factor, k_cache=inputs.k_cache * 4)
    out, lse = check(backend, inputs, masks.causal(20), scale=4.0)
    assert out.isfinite().all() and lse.isfinite().all()


def test_nothing_is_read_outside_and_everything_written(kernels: str) -> None:
    """NaN around the inputs and in fresh outputs stays out of the results."""
    mask = TAILS["rows that see the prefix alone"]
    clean = make_inputs(mask.q_len, [300, 0, 4100], page_size=16, slots=4112, dtype=torch.float16)

    def surrounded(x: Tensor) -> Tensor:
        around = torch.full([size + 2 * 16 for size in x.shape], NAN, dtype=x.dtype)
        return around[tuple(slice(16, 16 + size) for size in x.shape)].copy_(x)

    torch.use_deterministic_algorithms(True)  # fresh memory is NaN
    try:
        actual = run(kernels, Inputs(*(surrounded(x) for x in clean[:5]), *clean[5:]), mask.plan(32, 32))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(actual, run(kernels, clean, mask.plan(32, 32))))
    assert not any(x.isnan().any() for x in actual)


def test_skipped_tiles_are_not_read(kernels: str) -> None:
    mask = masks.pack([masks.causal(32)], length=64)
    inputs = make_inputs(64, [50, 0])
    for x in inputs[:3]:
        x[:, 32:] = NAN
    out, lse = run(kernels, inputs, mask.plan(32, 32))
    assert not any(x.isnan().any() for x in (out[:, :32], lse[..., :32])) and (out[1, 32:] == 0).all()


def test_inputs_stay_as_they_are(backend: str) -> None:
    mask = masks.quadratic(4)
    inputs, plan = make_inputs(mask.q_len, [40, 3], page_size=16), mask.plan(32, 32)
    before = [x.clone() for x in (*inputs, *plan._tensors())]
    run(backend, inputs, plan)
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(before, (*inputs, *plan._tensors())))


# --- the same bits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bits_whatever_the_threads(kernels: str, dtype: torch.dtype) -> None:
    mask = masks.quadratic(8)
    inputs = make_inputs(mask.q_len, [4200, 61], dtype=dtype)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            results.append(run(kernels, inputs, mask.plan(32, 32)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size, slots", [(0, 600), (16, 8200)])
def test_a_sequence_does_not_depend_on_its_batch(kernels: str, page_size: int, slots: int, dtype: torch.dtype) -> None:
    """Nor on the lengths of the others, nor on what is stored past its own."""
    both, lengths = [masks.causal(40), masks.candidates(4, 10)], [300, 0, 600, 77, 511]
    inputs = make_inputs(40, lengths, slots=slots, page_size=page_size, dtype=dtype)
    plans = [both[b % 2].plan(32, 32) for b in range(len(lengths))]
    together = run(kernels, inputs, TilePlan.stack(plans))
    for b, plan in enumerate(plans):
        for alone in (plan, TilePlan.stack([plan])):
            result = run(kernels, inputs.sequence(b), alone)
            assert all(torch.equal(a[b : b + 1], r) for a, r in zip(together, result))


# --- torch integration -------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not pd.has_native(), reason="needs the compiled library")
def test_the_library_holds_the_cpu_kernel() -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(OP.name(), "CPU")


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(kernels: str, dtype: torch.dtype, page_size: int) -> None:
    mask = masks.quadratic(4)
    arguments = raw(make_inputs(mask.q_len, [70, 0, 21], page_size=page_size, dtype=dtype), mask, on_device(kernels)[0])
    torch.library.opcheck(OP, arguments)
    if not page_size:
        torch.library.opcheck(OP, arguments[:-1])


# Otherwise sizes that happen to be equal in the first call have to stay equal, offsets into the plan's memory among
# them.
@torch.fx.experimental._config.patch(use_duck_shape=False)
@pytest.mark.parametrize("page_size", [16, pytest.param(0, marks=pytest.mark.slow)])
def test_fullgraph_without_recompiles(kernels: str, page_size: int) -> None:
    """One op in the graph, one graph for all prefixes, and for all batches, heads, capacities and plans."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def step(inputs: Inputs, plan: TilePlan) -> tuple[Tensor, Tensor]:
        *tensors, table = inputs
        out, lse = pd.speculative_attention(*tensors, plan, block_table=table, return_lse=True)
        return out.sin(), lse

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    device, _ = on_device(kernels)
    for draft, lengths, heads, kv_heads in [(6, [20, 70], 4, 2), (9, [9, 130, 60], 9, 3), (7, [44, 8, 10, 220], 6, 2)]:
        mask = masks.quadratic(draft)
        plan = mask.plan(32, 32, device)
        inputs = make_inputs(mask.q_len, lengths, page_size=page_size, heads=heads, kv_heads=kv_heads)
        # int32 and int64 would be two graphs.
        inputs = inputs.map(lambda x: x.to(device) if x.is_floating_point() else x.to(device, torch.int64))
        for shorter in (0, 1, 3):
            inputs.lengths.sub_(shorter)
            assert all(torch.equal(a, b) for a, b in zip(compiled(inputs, plan), step(inputs, plan)))
    assert counter.frame_count == 1
    called = [node.target for node in counter.graphs[0].graph.nodes if node.op == "call_function"]
    assert called.count(OP) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_one_cuda_graph_serves_all_lengths() -> None:
    mask = masks.quadratic(4)
    inputs = make_inputs(mask.q_len, [900, 900], slots=1024, page_size=16, dtype=torch.bfloat16).map(Tensor.cuda)
    plan = mask.plan(32, 32, "cuda")
    *tensors, table = inputs
    pd.speculative_attention(*tensors, plan, block_table=table)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = pd.speculative_attention(*tensors, plan, block_table=table, return_lse=True)
    for lengths in ([900, 0], [1, 600], [512, 300]):
        inputs.lengths.copy_(torch.tensor(lengths))
        graph.replay()
        assert all(torch.equal(a.cpu(), b) for a, b in zip((out, lse), run("cuda", inputs, plan)))
