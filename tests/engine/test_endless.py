"""Requests whose settings would run for long, or that no feature cache takes, are refused, or end alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.decoding import generate
from pdkernels.engine import Engine


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(pd.models.load("tiny-masked"), max_canvases=2, max_prompt_tokens=32, max_new_tokens=32) as made:
        yield made


PROMPT = "7 + 5 = "


def test_more_steps_than_a_request_may_take_are_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="steps must be at most 1056, got 2000"):
        engine.submit(PROMPT, "dream", max_new_tokens=8, steps=2000)


def test_a_request_that_fills_nothing_ends_alone(engine: Engine) -> None:
    expected = generate(engine.model, PROMPT, "llada", max_new_tokens=8).tokens.tolist()
    endless = engine.submit(
        PROMPT, "slowfast", max_new_tokens=8, k_slow=0, variance=0, max_exploration=2**24, window=2**24
    )
    other = engine.submit(PROMPT, "llada", max_new_tokens=8)
    assert other.result().tokens.tolist() == expected
    with pytest.raises(ValueError, match="takes more than 1056 forwards"):
        endless.result()
    assert engine.submit(PROMPT, "llada", max_new_tokens=8).result().tokens.tolist() == expected


@pytest.mark.parametrize("method", ["dllm_cache", "slowfast"])
def test_what_a_feature_cache_refuses_is_refused_at_once(method: str) -> None:
    model = pd.models.load("tiny-masked")
    model.cache_dtype = torch.int8
    options: dict[str, Any] = {} if method == "dllm_cache" else {"prompt_interval": 4}
    with Engine(model, max_prompt_tokens=32, max_new_tokens=32) as made, pytest.raises(NotImplementedError):
        made.submit(PROMPT, method, max_new_tokens=8, **options)


def test_memory_of_a_feature_cache_is_taken_when_a_request_joins(
    monkeypatch: pytest.MonkeyPatch, engine: Engine
) -> None:
    """One that does not get it ends alone."""
    from pdkernels.decoding.canvas import forward

    made, build, few = [], forward.KeptRows._allocated, 1

    def allocated(self: Any) -> Any:
        made.append(1)
        if len(made) > few:
            raise MemoryError("no room")
        return build(self)

    monkeypatch.setattr(forward.KeptRows, "_allocated", allocated)
    handles = [engine.submit(PROMPT, "dllm_cache", max_new_tokens=8, gen_interval=3) for _ in range(2)]
    results = []
    for handle in handles:
        try:
            results.append(handle.result().tokens.tolist())
        except MemoryError as error:
            results.append(str(error))
    expected = generate(engine.model, PROMPT, "dllm_cache", max_new_tokens=8, gen_interval=3).tokens.tolist()
    assert sorted(results, key=str) == sorted([expected, "no room"], key=str)


def test_states_of_a_huge_block_cost_no_more_than_its_rows() -> None:
    model = pd.models.load("tiny-trimode")
    options = {"block_size": 2**24, "small_block_size": 2**24, "max_new_tokens": 12}
    expected = generate(model, PROMPT, "fast_dllm_v2", **options).tokens
    found = generate(model, PROMPT, "fast_dllm_v2", speculate=1, **options).tokens
    assert torch.equal(found, expected)
