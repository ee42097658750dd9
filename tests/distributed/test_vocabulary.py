"""Statistics of a vocabulary in slices against those of one device."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pdkernels as pd
from pdkernels.distributed import count_communication
from tests.distributed.ranks import COUNTS, FOUR
from tests.support.errors import refused

WIDTH = 1031
OPTIONS: list[dict[str, Any]] = [
    {},
    {"top_k": 1, "suppress": (3, 700)},
    {"top_k": 16},
    {"temperature": 1.0, "seed": 5, "step": 3},
    {"temperature": 0.7, "seed": torch.arange(24), "step": torch.arange(24) + 2, "positions": 9 + torch.arange(24)},
    {"temperature": 1.3, "seed": -4, "distribution": "sampling"},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 2.0, "top_p": 0.95, "distribution": "sampling"},
    {"temperature": 1.5, "min_p": 0.2, "distribution": "sampling", "suppress": 17},
    {"temperature": 3.0, "top_p": 0.999, "min_p": 0.001},
    {"top_p": 0.5, "distribution": "sampling"},
    {"temperature": 1.0, "row_index": torch.tensor([3, -1, 0, 23, 3])},
]


def rows() -> torch.Tensor:
    """Rows of all kinds: flat, peaked, with ties, with a single token, without any, and with NaN and infinity."""
    x = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(1))
    x[0] *= 8
    x[1] = x[1].round()
    x[2] = 0
    x[3, :600] = -torch.inf
    x[4] = -torch.inf
    x[5] = -torch.inf
    x[5, 900] = 1.0
    x[6, 1000] = torch.nan
    x[7, 20] = torch.inf
    x[8, 400:404] = torch.inf
    x[9, 4:] = -torch.inf
    return x


def bounds(count: int, rank: int, width: int = WIDTH) -> slice:
    share = -(-width // count) + 3 & ~3
    return slice(rank * share, min(width, (rank + 1) * share))


def statistics(group: Any, dtype: torch.dtype, backend: str) -> list[tuple[torch.Tensor, ...]]:
    x, mine = rows().to(dtype), bounds(dist.get_world_size(group), dist.get_rank(group))
    options = {"group": group, "first_id": mine.start, "backend": backend}
    return [tuple(pd.token_statistics(x[:, mine], **given, **options)) for given in OPTIONS]


@pytest.mark.parametrize(
    "count, dtype, backend",
    [
        (2, torch.float32, "auto"),
        (2, torch.bfloat16, "auto"),
        pytest.param(4, torch.float32, "auto", marks=FOUR),
        pytest.param(4, torch.bfloat16, "auto", marks=FOUR),
        (2, torch.float64, "reference"),
    ],
)
def test_they_are_those_of_one_device(ranks, count: int, dtype: torch.dtype, backend: str) -> None:
    everywhere = ranks.run(count, statistics, dtype, backend)
    for number, given in enumerate(OPTIONS):
        whole = pd.token_statistics(rows().to(dtype), backend=backend, **given)
        found = pd.TokenStatistics(*everywhere[0][number])
        for other in everywhere[1:]:
            assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found, other[number])), given
        for name, a, b in zip(found._fields, found, whole):
            assert a.dtype == b.dtype and a.shape == b.shape, (given, name)
            if name in ("ids", "top_ids"):
                assert torch.equal(a, b), (given, name, (a != b).nonzero()[:5])
            else:
                assert torch.allclose(a, b, rtol=3e-6, atol=1e-6, equal_nan=True), (given, name)


def products(group: Any, blocks: int) -> list[tuple[torch.Tensor, ...]]:
    module = importlib.import_module("pdkernels.ops.linear_token_statistics")
    generator = torch.Generator().manual_seed(2)
    hidden, head = torch.randn(24, 48, generator=generator), torch.randn(WIDTH, 48, generator=generator)
    mine, saved = bounds(dist.get_world_size(group), dist.get_rank(group)), module.BLOCK_LOGITS
    module.BLOCK_LOGITS = blocks
    try:
        options = {"group": group, "first_id": mine.start}
        return [tuple(pd.linear_token_statistics(hidden, head[mine], **given, **options)) for given in OPTIONS]
    finally:
        module.BLOCK_LOGITS = saved


@pytest.mark.parametrize("count, blocks", [(2, 2**24), (2, 2600), pytest.param(4, 1300, marks=FOUR)])
def test_products_with_a_head_in_slices(ranks, count: int, blocks: int) -> None:
    """In one block, and in blocks of rows that differ on the rank with the shortest slice."""
    generator = torch.Generator().manual_seed(2)
    hidden, head = torch.randn(24, 48, generator=generator), torch.randn(WIDTH, 48, generator=generator)
    for number, found in enumerate(ranks.run(count, products, blocks)[0]):
        whole = pd.linear_token_statistics(hidden, head, **OPTIONS[number])
        for name, a, b in zip(whole._fields, found, whole):
            assert torch.equal(a, b) if "ids" in name else torch.allclose(a, b, rtol=1e-5, atol=1e-6), (number, name)


def draws(group: Any) -> torch.Tensor:
    x = torch.randn(500, WIDTH, generator=torch.Generator().manual_seed(3))
    mine = bounds(dist.get_world_size(group), dist.get_rank(group))
    found = pd.token_statistics(x[:, mine], temperature=1.0, seed=11, top_k=1, group=group, first_id=mine.start)
    return found.ids


@pytest.mark.parametrize("count", COUNTS)
def test_draws_are_equal(ranks, count: int) -> None:
    x = torch.randn(500, WIDTH, generator=torch.Generator().manual_seed(3))
    whole = pd.token_statistics(x, temperature=1.0, seed=11, top_k=1).ids
    assert len(whole.unique()) > 200
    assert torch.equal(ranks.run(count, draws)[0], whole)


def traffic(group: Any) -> list[tuple[int, int]]:
    x = torch.randn(7, 4096)
    counts = []
    for top_k in (1, 5):
        with count_communication() as counted:
            first = 4096 * dist.get_rank(group)
            pd.token_statistics(x, top_k=top_k, temperature=1.0, group=group, first_id=first)
        counts.append((counted.calls, counted.bytes))
    return counts


@pytest.mark.parametrize("count", COUNTS)
def test_one_record_a_row_is_exchanged(ranks, count: int) -> None:
    one, five = (8 * (7 + 3 * max(top_k, 2)) * 7 * (count - 1) for top_k in (1, 5))
    assert ranks.run(count, traffic) == [[(1, one), (1, five)]] * count


def misplaced(group: Any) -> str:
    x = torch.zeros(2, 64)
    try:
        pd.token_statistics(x, group=group, first_id=0)
    except ValueError as error:
        return str(error)
    return ""


def test_slices_must_follow_each_other(ranks) -> None:
    found = ranks.run(2, misplaced)
    assert found[0] == found[1]
    assert found[0].startswith("pdkernels.token_statistics: first_id must be the ids of the ranks before")


def test_refusals() -> None:
    x = torch.zeros(2, 64)
    with refused("token_statistics: first_id must be 0 without a group, got 4"):
        pd.token_statistics(x, first_id=4)
    with refused("linear_token_statistics: first_id must be 0 without a group, got 4"):
        pd.linear_token_statistics(x, torch.zeros(8, 64), first_id=4)
    with refused("token_statistics: first_id must be a multiple of 4, got 3"):
        pd.token_statistics(x, group=object(), first_id=3)
    with refused("TypeError: token_statistics: first_id must be an int, got float"):
        pd.token_statistics(x, group=object(), first_id=4.0)  # type: ignore[arg-type]
    with refused("token_statistics: top_k must be in 1 .. 16, got 17"):
        pd.token_statistics(x, group=object(), top_k=17)


@pytest.mark.parametrize("first", [0, 4, 40, 8192])
def test_noise_belongs_to_ids_of_the_whole_vocabulary(first: int) -> None:
    """The op's own argument: a slice draws what a whole row draws if its other tokens are impossible."""
    from pdkernels.ops.token_statistics import Options, token_statistics_op

    x = torch.full((40, 9000), -torch.inf)
    x[:, first : first + 300] = torch.randn(40, 300, generator=torch.Generator().manual_seed(first))
    whole = pd.token_statistics(x, temperature=1.0, seed=2, top_k=1).ids
    slices = token_statistics_op(x[:, first : first + 300].contiguous(), *Options(1.0, 2, top_k=1), first)
    assert torch.equal(slices[0] + first, whole)
    for wrong in (-4, 2, 2**32):
        with pytest.raises((RuntimeError, ValueError)):
            token_statistics_op(x, *Options(), wrong)
