"""The cache of planned diffusion: exact after every round, without extra forwards; dropped rows; parts of a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pdkernels.cache import ContiguousKVCache, PagedKVCache
from pdkernels.decoding import generate
from pdkernels.generation.cache_rows import rows_of
from pdkernels.masks import Stage, planned
from tests.support.base import KeepsCache
from tests.support.plans import END, assert_same, planning_model, references

PROMPTS = [[END], [11, 3, END], [12, 12, 12, END], [10, END]]


def stages_of(prompt: list[int], report: Any, length: int) -> list[Stage]:
    """The rounds among the first `length` tokens of a text."""
    stages, plan, left = [], len(prompt), length
    for each in report.rounds:
        plan += len(each.plan)
        chunks = tuple(n + 2 for n in each.lengths)
        if left < plan + sum(chunks) + 1:
            break
        stages.append(Stage(plan, chunks, True))
        left, plan = left - plan - sum(chunks) - 1, 0
    return [*stages, Stage(left, (), False)]


@pytest.mark.parametrize(
    ("sparse", "cache", "page_size"), [(False, "exact", None), (True, "exact", 3), (True, "drop_finished", None)]
)
def test_it_equals_a_full_forward_after_every_round(sparse: bool, cache: str, page_size: int | None) -> None:
    compared = 0
    for rounds in (3, 4):
        keeper = KeepsCache(planning_model(rounds % 2))
        options: dict[str, Any] = {"max_new_tokens": 80, "temperature": 0.7, "seed": 1, "max_rounds": rounds}
        result = generate(keeper, PROMPTS, "planned", sparse=sparse, cache=cache, page_size=page_size, **options)
        for index, (prompt, tokens) in enumerate(zip(PROMPTS, result.tokens, strict=True)):
            length = int(keeper.cache.lengths[index])
            report = result.stats.plans[index]
            stages = stages_of(prompt, report, length)
            fresh = keeper.model.new_cache(1, length)
            text = torch.tensor([prompt + tokens.tolist()])[:, :length]
            keeper.model(text, cache=fresh, mask=planned(stages, sparse).dense())
            compared += sum(len(stage.chunks) > 0 for stage in stages)
            for layer in range(keeper.model.config.layers):
                for actual, expected in zip(keeper.cache.layer(layer, length), fresh.layer(layer, length), strict=True):
                    torch.testing.assert_close(actual[index], expected[0], rtol=1e-10, atol=1e-10)
    assert compared >= 4


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("predicts", ["own", "next"])
def test_rows_that_are_dropped_change_nothing(predicts: str, dtype: str) -> None:
    """Except the number of rows; on the kernels too."""
    model = planning_model(2, predicts, 16, dtype)
    options: dict[str, Any] = {"max_new_tokens": 80, "temperature": 0.7, "seed": 1, "sparse": True, "trace": True}
    whole = generate(model, PROMPTS, "planned", **options)
    less = generate(model, PROMPTS, "planned", cache="drop_finished", **options)
    assert [a.tolist() for a in whole.tokens] == [b.tolist() for b in less.tokens]
    assert whole.stats.trace == less.stats.trace
    assert whole.stats.plans is not None and less.stats.plans is not None
    for a, b in zip(whole.stats.plans, less.stats.plans, strict=True):
        assert a.rounds == b.rounds and a.forwards == b.forwards and a.rows["chunks"] >= b.rows["chunks"]
    assert sum(p.rows["chunks"] for p in whole.stats.plans) > sum(p.rows["chunks"] for p in less.stats.plans)


@pytest.mark.parametrize("sparse", [False, True])
def test_kernels_give_the_tokens_of_the_reference(sparse: bool) -> None:
    model = planning_model(0, "next", 16, "float32")
    options: dict[str, Any] = {"sparse": sparse, "temperature": 0.7, "seed": 1, "steps_ratio": 0.5}
    expected = references(model, PROMPTS[:3], 40, **options)
    for page_size in (None, 16):
        result = generate(model, PROMPTS[:3], "planned", max_new_tokens=40, page_size=page_size, trace=True, **options)
        assert_same(result, expected)


@pytest.mark.parametrize("paged", [False, True])
def test_some_sequences_of_a_cache(paged: bool) -> None:
    sizes = {"kv_heads": 1, "head_dim": 2}
    cache: Any = ContiguousKVCache(1, 3, 6, **sizes)
    if paged:
        cache = PagedKVCache(1, 3, 9, 2, **sizes)
        cache.reserve_(6)
    cache.append_(0, *(torch.arange(12.0).view(3, 2, 1, 2) + shift for shift in (0, 100)))
    cache.commit_(torch.tensor([2, 1, 0]))
    assert rows_of(cache, [0, 1, 2]) is cache
    part = rows_of(cache, [0, 2])
    assert part.lengths.tolist() == [2, 0] and part.batch == 2
    new = torch.full((2, 2, 1, 2), 7.0)
    part.append_(0, new, new + 1, torch.tensor([2, 1]))
    cache.commit_(torch.tensor([2, 0, 1]))
    assert cache.layer(0, 4)[0][0, :, 0, 0].tolist() == [0, 2, 7, 7]
    assert cache.layer(0, 1)[1][2, :, 0, 0].tolist() == [8] and cache.layer(0, 1)[0][1, :, 0, 0].tolist() == [4]
    assert part.layer(0, 1)[0][:, 0, 0, 0].tolist() == [0, 7]
