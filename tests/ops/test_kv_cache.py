"""kv_append_, kv_commit_ and kv_trim_ against the plain loops of the reference, byte for byte."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch._dynamo.testing import CompileCounter

import pdkernels as pd
from pdkernels.reference import kv_cache as reference
from tests.ops.implementations import NAMES, Simulated, implementation
from tests.ops.kv_cases import Case, cases, make_case


def same_bytes(actual: Case, expected: Case) -> bool:
    return all(torch.equal(a, b) for a, b in zip(actual.bytes(), expected.bytes(), strict=True))


def append(run, case: Case, with_counts: bool = True) -> None:
    counts = {"counts": case.counts} if with_counts else {}
    run(case.k, case.v, case.k_new, case.v_new, case.lengths, **counts, block_table=case.block_table)


def commit(run, case: Case, with_sources: bool = True) -> None:
    run(
        case.k,
        case.v,
        case.lengths,
        case.counts,
        case.source_index if with_sources else None,
        block_table=case.block_table,
    )


def check_equal(impl, case: Case, call) -> None:
    """One call of the implementation leaves exactly the bytes that the reference leaves, guards included."""
    expected, actual = case.moved(torch.device("cpu")), case.moved(impl.device)
    call(reference, expected)
    call(impl, actual)
    assert same_bytes(actual, expected)


# --- parity ------------------------------------------------------------------------------------------------------------


@given(case=cases())
@settings(max_examples=150)
def test_append_equals_reference(impl, case: Case) -> None:
    check_equal(impl, case, lambda ops, c: append(ops.kv_append_, c))


@given(case=cases())
@settings(max_examples=300)
def test_commit_equals_reference(impl, case: Case) -> None:
    check_equal(impl, case, lambda ops, c: commit(ops.kv_commit_, c))


@given(case=cases())
@settings(max_examples=40)
def test_commit_of_a_prefix_only_changes_lengths(impl, case: Case) -> None:
    before, actual = case.moved(torch.device("cpu")), case.moved(impl.device)
    commit(impl.kv_commit_, actual, with_sources=False)
    assert torch.equal(actual.lengths.cpu(), before.lengths + before.counts)
    before.lengths += before.counts
    assert same_bytes(actual, before)


def test_append_without_counts_writes_all_rows(impl) -> None:
    case = make_case(3, rows=4, capacity=16)
    case.lengths.copy_(torch.tensor([0, 12]))
    check_equal(impl, case, lambda ops, c: append(ops.kv_append_, c, with_counts=False))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_trim(impl, dtype: torch.dtype) -> None:
    lengths = torch.tensor([9, 7, 0, 4], dtype=dtype, device=impl.device)
    impl.kv_trim_(lengths, torch.tensor([9, 2, 0, 0], dtype=dtype, device=impl.device))
    assert lengths.tolist() == [9, 2, 0, 0]
    strided = torch.tensor([5, -1, 6, -1], device=impl.device)[::2]
    impl.kv_trim_(strided, torch.tensor([1, 6], device=impl.device))
    assert strided.tolist() == [1, 6]


# --- patterns and sizes that matter ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sources",
    [
        [1, 2, 3, 4],  # a shift by one: every target is the next one's source
        [3, 2, 1, 0],  # a reversal: two cycles
        [1, 2, 3, 0],  # one cycle
        [2, 2, 2, 2],  # one row everywhere
        [0, 1, 2, 3],  # nothing moves
        [5, 0, 5, 1],
    ],
)
def test_overlapping_moves(impl, sources: list[int]) -> None:
    case = make_case(7, batch=1, capacity=8, rows=4)
    case.lengths.fill_(2)
    case.counts.fill_(4)
    case.source_index.copy_(torch.tensor([sources]))
    check_equal(impl, case, lambda ops, c: commit(ops.kv_commit_, c))


def test_quadratic_pattern_every_nth_row(impl) -> None:
    """Width 8, interleaved layout: 72 draft rows, draft token g at 9 g."""
    case = make_case(11, layers=3, batch=2, capacity=100, heads=2, head_dim=8, dtype=torch.bfloat16, rows=8)
    case.lengths.copy_(torch.tensor([20, 5]))
    case.counts.copy_(torch.tensor([5, 8]))
    case.source_index.copy_(torch.arange(8).mul(9).expand(2, 8))
    check_equal(impl, case, lambda ops, c: commit(ops.kv_commit_, c))


@pytest.mark.parametrize(
    "head_dim, dtype", [(64, torch.float32), (65, torch.uint8), (24, torch.float16), (2, torch.float64)]
)
def test_rows_wider_than_a_tile(impl, head_dim: int, dtype: torch.dtype) -> None:
    for layout in ("dense", "heads_first"):
        case = make_case(13, heads=9, head_dim=head_dim, dtype=dtype, layout=layout, capacity=20)
        check_equal(impl, case, lambda ops, c: commit(ops.kv_commit_, c))
        check_equal(impl, case, lambda ops, c: append(ops.kv_append_, c))


def test_many_rows_leave_narrow_tiles(impl) -> None:
    """6000 rows in 48 KiB of shared memory: 8 bytes of each."""
    case = make_case(17, layers=1, batch=1, capacity=7000, heads=1, head_dim=8, rows=6000)
    case.lengths.fill_(500)
    case.counts.fill_(6000)
    case.source_index.copy_(torch.randperm(6500, generator=torch.Generator().manual_seed(0))[:6000])
    check_equal(impl, case, lambda ops, c: commit(ops.kv_commit_, c))


def test_more_layers_than_one_launch_carries(impl) -> None:
    case = make_case(19, layers=150, batch=1, capacity=6, heads=1, head_dim=2, rows=3)
    case.lengths.fill_(1)
    case.counts.fill_(2)
    case.source_index.copy_(torch.tensor([[2, 4, 0]]))
    check_equal(impl, case, lambda ops, c: commit(ops.kv_commit_, c))
    check_equal(impl, case, lambda ops, c: append(ops.kv_append_, c))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_share_the_work(threads: int) -> None:
    """Rows large enough to be split over threads, whatever the process was started with."""
    case = make_case(3, layers=5, batch=3, capacity=40, heads=8, head_dim=128, rows=16)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check_equal(implementation("cpu"), case, lambda ops, c: commit(ops.kv_commit_, c))
        check_equal(implementation("cpu"), case, lambda ops, c: append(ops.kv_append_, c))
    finally:
        torch.set_num_threads(before)


def test_offsets_beyond_32_bits(impl) -> None:
    """Rows past 4 GiB of a cache. The memory is reserved, but only the pages in use are ever touched."""
    row, length = 4096, 2**20 + 5
    k = torch.empty(1, length + 8, 1, row, dtype=torch.uint8, device=impl.device)
    v = torch.zeros(1, length + 8, 1, 1, dtype=torch.uint8, device=impl.device)
    for i in range(8):
        k[0, length + i] = i
    lengths = torch.tensor([length], device=impl.device)
    sources = torch.tensor([[7, 3]], device=impl.device)
    impl.kv_commit_(k, v, lengths, torch.tensor([2], device=impl.device), sources)
    assert [int(k[0, length + i, 0, row - 1]) for i in range(8)] == [7, 3, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("batch, rows, layers", [(0, 3, 1), (2, 0, 2), (1, 1, 1)])
def test_empty_and_single(impl, batch: int, rows: int, layers: int) -> None:
    case = make_case(23, batch=batch, rows=rows, layers=layers, capacity=1 if rows == 1 else 4, heads=1, head_dim=1)
    check_equal(impl, case, lambda ops, c: append(ops.kv_append_, c))
    check_equal(impl, case, lambda ops, c: commit(ops.kv_commit_, c))


# --- properties --------------------------------------------------------------------------------------------------------


@given(case=cases(page_size=None))
@settings(max_examples=25)
def test_a_batch_equals_its_sequences_alone(impl, case: Case) -> None:
    together = case.moved(impl.device)
    commit(impl.kv_commit_, together)
    for b in range(case.lengths.shape[0]):
        alone = case.moved(impl.device)
        k, v = (
            [t.narrow(-4, b, 1) for t in side] if isinstance(side, list) else side.narrow(-4, b, 1)
            for side in (alone.k, alone.v)
        )
        lengths = alone.lengths[b : b + 1]
        impl.kv_commit_(k, v, lengths, alone.counts[b : b + 1], alone.source_index[b : b + 1])
        for one, all_of_them in zip(
            k if isinstance(k, list) else [k], together.k if isinstance(together.k, list) else [together.k]
        ):
            assert torch.equal(
                one.contiguous().view(torch.uint8), all_of_them.narrow(-4, b, 1).contiguous().view(torch.uint8)
            )


@given(case=cases())
@settings(max_examples=25)
def test_repeated_runs_give_the_same_bytes(impl, case: Case) -> None:
    first, second = case.moved(impl.device), case.moved(impl.device)
    commit(impl.kv_commit_, first)
    commit(impl.kv_commit_, second)
    assert same_bytes(first, second)


@given(case=cases())
@settings(max_examples=25)
def test_append_commit_trim_round_trip(impl, case: Case) -> None:
    """Appending a draft, accepting nothing and trimming back leaves committed rows and lengths as they were."""
    actual = case.moved(impl.device)
    before = case.lengths.clone()
    append(impl.kv_append_, actual)
    actual.counts.zero_()
    commit(impl.kv_commit_, actual)
    impl.kv_trim_(actual.lengths, before.to(impl.device))
    assert torch.equal(actual.lengths.cpu(), before)
    expected = case.moved(torch.device("cpu"))
    append(reference.kv_append_, expected)
    assert same_bytes(actual, expected)


@given(case=cases())
@settings(max_examples=20)
def test_result_does_not_depend_on_the_order_of_threads(case: Case) -> None:
    impl = implementation("cudasim")
    assert isinstance(impl, Simulated)
    for order in impl.schedules():
        with order:
            check_equal(impl, case, lambda ops, c: commit(ops.kv_commit_, c))
            check_equal(impl, case, lambda ops, c: append(ops.kv_append_, c))


def test_tensors_keep_their_identity(impl) -> None:
    case = make_case(29).moved(impl.device)
    pointers = [t.data_ptr() for t in (case.k, case.v, case.lengths)]
    append(impl.kv_append_, case)
    commit(impl.kv_commit_, case)
    assert pointers == [t.data_ptr() for t in (case.k, case.v, case.lengths)]


# --- torch integration -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dense", "layers_apart", "heads_first"])
@pytest.mark.parametrize("page_size", [None, 3])
def test_opcheck(layout: str, page_size: int | None) -> None:
    ops = torch.ops.pdkernels
    for device in [name for name in NAMES if name != "cudasim"]:
        c = make_case(31, layout=layout, page_size=page_size, rows=3).moved(torch.device(device))
        k, v, k_new, v_new = (t if isinstance(t, list) else [t] for t in (c.k, c.v, c.k_new, c.v_new))
        torch.library.opcheck(ops.kv_append_.default, (k, v, k_new, v_new, c.lengths, c.counts, c.block_table))
        torch.library.opcheck(ops.kv_commit_.default, (k, v, c.lengths, c.counts, c.source_index, c.block_table))
        torch.library.opcheck(ops.kv_trim_.default, (c.lengths, c.lengths.clone()))


def test_fullgraph_without_recompiles() -> None:
    """One graph serves every length, count and draft width."""
    torch._dynamo.reset()
    counter = CompileCounter()

    def step(k, v, k_new, v_new, lengths, counts, source_index):
        pd.kv_append_(k, v, k_new, v_new, lengths, counts=counts)
        pd.kv_commit_(k, v, lengths, counts, source_index)
        return lengths + 1

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for seed, rows in enumerate([3, 5, 7, 4, 9]):
        case = make_case(seed, batch=2, capacity=20, rows=rows)
        expected = case.moved(torch.device("cpu"))
        append(reference.kv_append_, expected)
        commit(reference.kv_commit_, expected)
        result = compiled(case.k, case.v, case.k_new, case.v_new, case.lengths, case.counts, case.source_index)
        assert same_bytes(case, expected)
        assert torch.equal(result, expected.lengths + 1)
    assert counter.frame_count == 1


def test_inductor_runs_it(impl) -> None:
    if impl.name == "cudasim":
        pytest.skip("the simulated ops are not part of the package")
    case = make_case(37, rows=4).moved(impl.device)
    expected = case.moved(torch.device("cpu"))
    compiled = torch.compile(pd.kv_commit_, fullgraph=True)
    compiled(case.k, case.v, case.lengths, case.counts, case.source_index)
    commit(reference.kv_commit_, expected)
    assert same_bytes(case, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graph_capture_and_replay_with_changed_data() -> None:
    device = torch.device("cuda")
    case = make_case(41, batch=2, capacity=32, rows=6).moved(device)
    graph = torch.cuda.CUDAGraph()
    warm = make_case(41, batch=2, capacity=32, rows=6).moved(device)  # kernels are loaded by their first launch
    append(pd.kv_append_, warm)
    commit(pd.kv_commit_, warm)
    with torch.cuda.graph(graph):
        append(pd.kv_append_, case)
        commit(pd.kv_commit_, case)
    for seed in (43, 47):
        fresh = make_case(seed, batch=2, capacity=32, rows=6)
        for name in ("k", "v", "k_new", "v_new", "lengths", "counts", "source_index"):
            getattr(case, name).copy_(getattr(fresh, name))
        graph.replay()
        append(reference.kv_append_, fresh)
        commit(reference.kv_commit_, fresh)
        for name in ("k", "v", "lengths"):  # any bytes are values, NaN too
            found, wanted = (getattr(x, name).cpu().contiguous().view(torch.uint8) for x in (case, fresh))
            assert torch.equal(found, wanted), name


def test_reference_backend_gives_the_same() -> None:
    case = make_case(53, page_size=3)
    other = case.moved(torch.device("cpu"))
    pd.kv_commit_(case.k, case.v, case.lengths, case.counts, case.source_index, block_table=case.block_table)
    pd.kv_commit_(
        other.k,
        other.v,
        other.lengths,
        other.counts,
        other.source_index,
        block_table=other.block_table,
        backend="reference",
    )
    assert same_bytes(case, other)
