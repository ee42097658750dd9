"""LLaDA's sampler on a feature cache: tokens, forwards and filled positions of the plain reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdkernels.decoding import generate
from pdkernels.models.architectures.feature_cache import FeatureCache
from pdkernels.reference.dllm_cache import FeatureCache as Reference
from pdkernels.reference.dllm_cache import dllm_cache
from pdkernels.reference.llada import unmask_by_quota
from pdkernels.reference.masked_sampling import Canvas
from tests.support import masked_promises as shared
from tests.support.base import page_sizes, reads_of_the_device, seeds, streams
from tests.support.masked import MASK, deep_masked, small_masked, with_parts
from tests.support.masked_promises import assert_same
from tests.support.tri_mode import prompts

METHOD = "dllm_cache"
EXACT: dict[str, Any] = {"prompt_interval": 1, "gen_interval": 1}


def reference(model: Any, batch: list[list[int]], limit: int, **options: Any) -> list[Any]:
    return [
        dllm_cache(with_parts(model), prompt, limit, mask_token=MASK, **options)
        for prompt, options in streams(batch, options)
    ]


@settings(max_examples=100)
@given(
    model=st.tuples(st.integers(0, 1), st.sampled_from(["own", "own", "next"])),
    batch=prompts(MASK + 2),  # a mask token inside a prompt is part of it
    limit=st.integers(1, 10),
    intervals=st.sampled_from([(25, 5), (3, 2), (2, 3), (1, 4), (100, 100)]),
    ratio=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    baseline=st.sampled_from(["last", "recomputed"]),
    block_size=st.sampled_from([None, 3, 4]),
    per_block=st.sampled_from([None, None, 2, 5]),
    order=st.sampled_from(
        [{}, {}, {"late_end": True}, {"no_end": True}, {"remasking": "random"}, {"temperature": 0.8}]
    ),
    ends=st.lists(st.integers(0, MASK - 1), max_size=2),
    seed=seeds,
    page_size=page_sizes,
)
def test_equals_the_reference(
    model, batch, limit, intervals, ratio, baseline, block_size, per_block, order, ends, seed, page_size
) -> None:
    steps = None if per_block is None else per_block * -(-limit // (block_size or limit))
    options: dict[str, Any] = {
        "prompt_interval": intervals[0],
        "gen_interval": intervals[1],
        "transfer_ratio": ratio,
        "baseline": baseline,
        "block_size": block_size,
        "steps": steps,
        "end_tokens": ends,
        "seed": seed,
        **order,
    }
    transformer = deep_masked(*model)
    result = generate(transformer, batch, METHOD, max_new_tokens=limit, trace=True, page_size=page_size, **options)
    assert_same(result, reference(transformer, batch, limit, **options))


@pytest.mark.parametrize("predicts", ["own", "next"])
def test_texts_that_guidance_compares_have_a_cache_each(predicts: str) -> None:
    """And both count the same steps."""
    model, batch, guidance = deep_masked(0, predicts), [[3, 1, 4], [5]], 1.5
    intervals: dict[str, Any] = {"prompt_interval": 4, "gen_interval": 3, "transfer_ratio": 0.5}
    ends = {"no_end": False, "late_end": False}
    schedule: dict[str, Any] = {"block_size": 5, "steps": None, "temperature": 0.0, "seed": 0, **ends}
    expected = []
    for prompt in batch:
        canvas = Canvas(prompt, 10, MASK)
        given_, free = (Reference(with_parts(model), len(prompt), **intervals) for _ in range(2))

        def forward(tokens: list[int], canvas: Canvas = canvas, given_: Any = given_, free: Any = free) -> Tensor:
            without = free([MASK] * canvas.start + list(tokens[canvas.start :]))
            return without + (1 + guidance) * (given_(tokens) - without)

        expected.append(unmask_by_quota(canvas, forward, op=METHOD, remasking="low_confidence", **schedule))
    result = generate(model, batch, METHOD, max_new_tokens=10, trace=True, guidance=guidance, **intervals, **schedule)
    assert_same(result, expected)


@pytest.mark.covering
@pytest.mark.parametrize("interval", [2, 3, 7, 100])
@pytest.mark.parametrize(
    "options", [{}, {"block_size": 4, "page_size": 3}, {"remasking": "random", "temperature": 0.7}]
)
@pytest.mark.parametrize("predicts", ["own", "next"])
def test_guidance_at_intervals_equals_the_reference(predicts: str, options: dict[str, Any], interval: int) -> None:
    """Forwards of the text without the prompt count for its own cache only."""
    model, batch, limit = deep_masked(0, predicts), [[3, 1, 4], [5]], 14
    kinds = dict(prompt_interval=4, gen_interval=3, transfer_ratio=0.5, guidance=2.5, guidance_interval=interval)
    result = generate(model, batch, METHOD, max_new_tokens=limit, trace=True, **kinds, **options)
    assert_same(
        result, reference(model, batch, limit, **kinds, **{k: v for k, v in options.items() if k != "page_size"})
    )


@pytest.mark.parametrize(("interval", "free"), [(1, 14), (4, 7), (100, 5)])
def test_an_interval_saves_forwards_of_the_text_without_the_prompt(
    monkeypatch: pytest.MonkeyPatch, interval: int, free: int
) -> None:
    """The first five forwards have one each, which counts; at interval 1 both texts are rows of one forward."""
    rows: list[int] = []
    forward = FeatureCache.forward
    monkeypatch.setattr(
        FeatureCache, "forward", lambda self, tokens, *rest: rows.append(len(tokens)) or forward(self, tokens, *rest)
    )
    result = generate(deep_masked(0), [[3, 1, 4]], METHOD, max_new_tokens=14, guidance=2.5, guidance_interval=interval)
    assert result.stats.forwards == len(rows) == 14 + (interval > 1) * free and sum(rows) == 14 + free
    assert result.stats.tokens_per_forward == 14 / len(rows)


@pytest.mark.parametrize(
    "options", [{}, {"block_size": 4, "steps": 6}, {"guidance": 1.5}, {"temperature": 0.7, "remasking": "random"}]
)
@pytest.mark.parametrize("predicts", ["own", "next"])
def test_without_intervals_it_is_llada(predicts: str, options: dict[str, Any]) -> None:
    model, batch = deep_masked(1, predicts), [[3, 1, 4], [5]]
    options = {"max_new_tokens": 9, "trace": True, **options}
    cached, plain = generate(model, batch, METHOD, **EXACT, **options), generate(model, batch, "llada", **options)
    assert all(map(torch.equal, cached.tokens, plain.tokens)) and cached.stats.trace == plain.stats.trace


def test_the_interval_and_the_ratio_matter() -> None:
    """Random weights: stale rows change tokens, so that the tests above test something."""
    model, batch = deep_masked(0), [[3, 1, 4], [5]]
    kinds = [
        EXACT,
        {},
        {"prompt_interval": 2},
        {"gen_interval": 2},
        {"transfer_ratio": 0.5},
        {"baseline": "recomputed"},
    ]
    guided = [{"guidance": 2.5, "guidance_interval": interval} for interval in (1, 4, 100)]
    tokens = [generate(model, batch, METHOD, max_new_tokens=16, **kind).tokens for kind in [*kinds, *guided]]
    assert len({str(one) for one in tokens}) == len(kinds) + len(guided)


def test_new_rows_may_be_so_few_that_none_is_chosen() -> None:
    """A quarter of three rows: their values are replaced nevertheless, which the prompt sees when it is refreshed."""
    model, batch = deep_masked(0), [[3, 1, 4], [5]]
    options: dict[str, Any] = {"prompt_interval": 2, "gen_interval": 100, "transfer_ratio": 0.25}
    result = generate(model, batch, METHOD, max_new_tokens=3, trace=True, **options)
    assert_same(result, reference(model, batch, 3, **options))


def test_no_read_where_the_schedule_alone_decides() -> None:
    assert reads_of_the_device(small_masked(0), [[1, 2], [5]], METHOD, max_new_tokens=12) == 2


def test_errors() -> None:
    shared.assert_errors(
        METHOD,
        [
            ({"prompt_interval": 0}, "prompt_interval must be at least 1, got 0."),
            ({"gen_interval": 2.0}, "TypeError: gen_interval must be an int, got float."),
            ({"transfer_ratio": 1.5}, "transfer_ratio must be in 0 .. 1, got 1.5."),
            ({"transfer_ratio": "all"}, "TypeError: transfer_ratio must be a number, got str."),
            ({"baseline": "first"}, "baseline must be one of 'last', 'recomputed', got 'first'."),
            ({"block_size": 0}, "block_size must be at least 1, got 0."),
            ({"steps": 3, "block_size": 2}, "steps must be a multiple of the number of blocks (2), got 3."),
            ({"remasking": "low"}, "remasking must be one of 'low_confidence', 'random', got 'low'."),
            ({"guidance": -1}, "guidance must be at least 0, got -1."),
            ({"guidance_interval": 0, "guidance": 1.0}, "guidance_interval must be at least 1, got 0."),
            ({"guidance_interval": 2}, "guidance_interval must be 1 without guidance, got 2."),
            ({"temperature": -1.0}, "temperature must be finite and at least 0, got -1.0."),
            ({"mask_token": 13}, "mask_token must be an id in 0 .. 12, got 13."),
        ],
    )
