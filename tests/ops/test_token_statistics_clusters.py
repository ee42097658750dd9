"""Blocks that share a row: any number of them gives the same bits, and a barrier that is left out is noticed."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from pdkernels.reference.token_statistics import token_statistics as reference
from tests.cudasim.build import CACHE, HERE, ROOT, SCHEDULES, build_library, digest_text, schedule
from tests.ops.implementations import implementation
from tests.ops.token_cases import rows_of, run

KERNELS = ROOT / "csrc" / "cuda"
MEET = "    __cluster_barrier_arrive();\n    __cluster_barrier_wait();\n"
# Faults: a file, then what is replaced in it, and by what.
FAULTS: dict[str, tuple[str, dict[str, str]]] = {
    "memory of a block that has not started": (
        "cluster.h",
        {"if (size > 1) __cluster_barrier_arrive_relaxed();": "", "if (size > 1) __cluster_barrier_wait();": ""},
    ),
    "regions are read before all are written": ("cluster.h", {MEET: "    __syncthreads();\n"}),
    "regions are read after an arrival alone": ("cluster.h", {MEET: "    __cluster_barrier_arrive();\n"}),
    "each block keeps its regions": ("token_rows.h", {"cluster.shared_of(scratch.regions, 0)": "scratch.regions"}),
    "regions are in the last block": ("token_rows.h", {"(scratch.regions, 0)": "(scratch.regions, cluster.size - 1)"}),
    "regions are left out": ("token_rows.h", {"warp * size + rank, count": "warp * size, count"}),
    "the list is read while it is written": (
        "token_ranking.h",
        {"list(scratch, min_key, meanwhile);\n    __syncthreads();": "list(scratch, min_key, meanwhile);"},
    ),
    "the list is not empty at first": ("token_rows.h", {"if (threadIdx.x == 0) scratch.ranking.listed = 0;": ""}),
    "a list that is full counts as whole": ("token_ranking.h", {"scratch.listed > kListed": "false"}),
    "the largest of a warp is overwritten": (
        "token_ranking.h",
        {"      __syncthreads();  // it is overwritten next\n": ""},
    ),
    "one region less is looked through": ("token_ranking.h", {"first, ranked - 1) >> 32": "first, ranked - 2) >> 32"}),
}


def library_with(faults: dict[str, str], file: str = "cluster.h") -> ctypes.CDLL:
    """The kernel with changed lines."""
    folder = CACHE / "faults" / digest_text(file, str(faults), (KERNELS / file).read_text())
    folder.mkdir(parents=True, exist_ok=True)
    text = (KERNELS / file).read_text()
    for before, after in faults.items():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    # Copies of all headers: an include between quotes is looked for next to its file first.
    for header in KERNELS.glob("*.h"):
        (folder / header.name).write_text(text if header.name == file else header.read_text())
    path = build_library(
        "token_rows",
        [HERE / "kernels" / "token_rows.cu"],
        include_dirs=[folder],
        headers=[ROOT / "csrc" / "common", ROOT / "csrc" / "ops"],
        system_include_dirs=[ROOT / "csrc"],
    )
    return ctypes.CDLL(str(path))


def results(library: ctypes.CDLL, logits: Tensor, blocks: int, draws: bool = False, top_k: int = 5) -> list[Tensor]:
    """Ids, then floats as bits."""
    rows, width = logits.shape
    ids = torch.zeros(rows * (1 + top_k), dtype=torch.int64)
    numbers = torch.zeros(rows * (4 + top_k))
    library.run_token_rows.restype = ctypes.c_char_p
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (logits, ids, numbers)]
    message = library.run_token_rows(*pointers, rows, width, blocks, top_k, draws)
    if message is not None:
        raise RuntimeError(message.decode())
    return [ids, numbers.view(torch.int32)]


def cases() -> list[Tensor]:
    """Rows of distinct logits, of many equal ones, and in ascending order."""
    distinct = rows_of(2, 40_960, torch.bfloat16)
    equal = distinct.clamp(-4, 4).round()
    return [distinct, equal, distinct.sort(-1).values.contiguous()]


@pytest.fixture(scope="module")
def right() -> ctypes.CDLL:
    return library_with({})


def test_any_number_of_blocks_gives_the_same_bits(right: ctypes.CDLL) -> None:
    for logits in cases():
        for draws in (False, True):
            first = results(right, logits, 1, draws)
            exact = pd.TokenStatistics(*reference(logits.double(), temperature=0.8 * draws))
            assert first[0][:2].equal(exact.ids) and first[0][2:].view(2, 5).equal(exact.top_ids)
            for blocks in (2, 4, 8):
                assert all(map(torch.equal, first, results(right, logits, blocks, draws)))


@pytest.mark.parametrize("order", SCHEDULES)
def test_any_order_of_blocks_and_threads_gives_the_same_bits(right: ctypes.CDLL, order: str) -> None:
    logits = cases()[0]
    expected = results(right, logits, 1)
    with schedule(right, order):
        assert all(map(torch.equal, expected, results(right, logits, 4)))


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(right: ctypes.CDLL, fault: str) -> None:
    file, changes = FAULTS[fault]
    broken = library_with(changes, file)

    def differs(logits: Tensor, order: str) -> bool:
        with schedule(broken, order):
            try:
                changed = results(broken, logits, 4, top_k=3)
            except RuntimeError:
                return True
        return not all(map(torch.equal, results(right, logits, 4, top_k=3), changed))

    assert any(differs(logits, order) for logits in cases() for order in SCHEDULES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_alone_and_together(impl, dtype: torch.dtype) -> None:
    """On CUDA they are shared by fewer blocks the more of them there are."""
    logits, options = rows_of(12, 20_480, dtype), {"temperature": 0.8, "top_p": 0.9}
    together = run(impl, logits, **options)
    for first, count in ((0, 1), (3, 2), (5, 5)):
        rows = slice(first, first + count)
        few = run(impl, logits[rows], positions=torch.arange(first, first + count), **options)
        assert all(torch.equal(a[rows], b) for a, b in zip(together, few))


def test_more_regions_than_shared_memory_holds() -> None:
    impl, logits = implementation("cudasim"), rows_of(2, 530_000, torch.bfloat16)
    exact = pd.TokenStatistics(*reference(logits.double()))
    for rows in (logits, logits[:1]):
        assert run(impl, rows).top_ids.equal(exact.top_ids[: len(rows)])
        assert run(impl, rows).logsumexp.allclose(exact.logsumexp[: len(rows)].float())
    drawn = {"temperature": 0.7, "top_p": 0.6}
    assert run(impl, logits, **drawn).ids.equal(reference(logits.double(), **drawn)[0])
