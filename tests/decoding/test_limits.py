"""Sizes that would hang or allocate terabytes, models whose logits are NaN: one sentence, at once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.cache import ContiguousKVCache, PagedKVCache
from pdkernels.decoding import available, find, generate
from pdkernels.decoding.methods import METHODS
from tests.support.plans import example

HUGE = 10**12
MOST = 2**24


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("linear_self_speculation", {"block_size": 10**6}),
        ("quadratic_self_speculation", {"block_size": 10**6}),
        ("jacobi", {"block_size": 10**6}),
        ("jacobi_multiblock", {"block_size": HUGE, "blocks": HUGE, "pool_size": 10**30, "verification_size": 10**30}),
        ("block_diffusion", {"block_size": 10**6, "threshold": 0.0}),
        ("fast_dllm_v2", {"block_size": 10**6}),
        ("fast_dllm", {"block_size": 10**6}),
        ("llada", {"block_size": 10**6}),
        ("dllm_cache", {"block_size": 10**6, "prompt_interval": 10**6}),
        ("slowfast", {"block_size": 10**6}),
        ("recurrent_diffusion", {"headway": 10**6, "max_wavefront": 10**6}),
        ("recurrent_self_speculation", {"block_size": HUGE}),
    ],
)
def test_sizes_are_clamped_to_the_request(method: str, options: dict[str, Any]) -> None:
    model = example(METHODS[method])
    result = generate(model, [52, 43, 49], method, max_new_tokens=3, end_tokens=(), **options)
    assert len(result.tokens) == 3
    if pd.decoding.is_lossless(method):
        assert torch.equal(result.tokens, generate(model, [52, 43, 49], max_new_tokens=3, end_tokens=()).tokens)


@pytest.mark.parametrize(
    ("method", "options", "text"),
    [
        ("jacobi", {"max_new_tokens": HUGE}, f"generate: max_new_tokens must be at most {MOST}, got {HUGE}."),
        ("jacobi", {"page_size": HUGE}, f"generate: page_size must be at most {MOST}, got {HUGE}."),
        ("jacobi", {"page_size": MOST}, "cache.PagedKVCache: page_size must fit in memory ("),
        ("linear_self_speculation", {"block_size": HUGE}, f"block_size must be at most {MOST}, got {HUGE}."),
        ("quadratic_self_speculation", {"masks_per_group": 10**9}, "block_size must keep a step within 1048576 rows"),
        ("dream", {"steps": HUGE}, f"steps must be at most {MOST}"),
        ("llada", {"steps": HUGE}, f"steps must be at most {MOST}"),
        ("slowfast", {"max_exploration": HUGE}, f"max_exploration must be at most {MOST}"),
        ("recurrent_static", {"recurrences": HUGE}, f"recurrences must be at most {MOST}"),
        ("recurrent_diffusion", {"headway": HUGE}, f"headway must be at most {MOST}"),
    ],
)
def test_sizes_are_refused(method: str, options: dict[str, Any], text: str) -> None:
    model = copy.copy(example(METHODS[method]))
    if options.get("page_size") == MOST:
        model.new_cache = lambda b, c, kind, page_size: PagedKVCache(64, b, b, page_size, 64, 128)
    with pytest.raises(ValueError) as raised:
        generate(model, [1, 2], find(method), **{"max_new_tokens": 4, **options})
    assert text in str(raised.value)


def test_texts_fit_the_model() -> None:
    model = pd.models.load("tiny-code")
    most = model.config.max_positions
    text = "pdkernels.decoding.generate: prompt must leave room for max_new_tokens in the model's {} positions, got {} tokens and {} more."
    for prompt, new in (([1] * most, 1), ([1], most), ("a" * 10**6, 4)):
        with pytest.raises(ValueError) as raised:
            generate(model, prompt, max_new_tokens=new)
        expected = text.format(most, len(prompt), new)
        assert str(raised.value) == f"{expected} Shorten the prompt, lower max_new_tokens, or pass overflow='warn'."
    assert len(generate(model, [1] * (most - 2), max_new_tokens=2, end_tokens=()).tokens) == 2
    with pytest.warns(UserWarning) as warned:
        assert len(generate(model, [1] * most, max_new_tokens=2, end_tokens=(), overflow="warn").tokens) == 2
    assert str(warned[0].message) == text.format(most, most, 2) and warned[0].filename == __file__
    with pytest.raises(ValueError, match="overflow must be one of 'error', 'warn', got 'no'"):
        generate(model, [1], find("jacobi"), overflow="no")
    with pytest.raises(ValueError, match=f"max_new_tokens in {MOST} positions"):
        generate(model, [1, 2], max_new_tokens=MOST, overflow="warn")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: ContiguousKVCache(1, 1, HUGE, 1, 64), "cache.ContiguousKVCache: capacity must fit in memory ("),
        (lambda: PagedKVCache(1, 1, 4, HUGE, 1, 64), "cache.PagedKVCache: page_size must fit in memory ("),
        (lambda: pd.models.load("tiny-code").new_cache(1, HUGE), "capacity must fit in memory ("),
        (lambda: pd.masks.quadratic(10**9), "masks.quadratic: block_size must make a mask of less than 2**31 tokens"),
        (lambda: pd.masks.quadratic(10**9, 0), "masks.quadratic: block_size must make at most 4194304 segments"),
        (lambda: pd.masks.block_causal(10**9, 1), "masks.block_causal: length must make at most 4194304 segments"),
        (lambda: pd.masks.dual_stream(10**9, 1), "masks.dual_stream: length must make at most 4194304 segments"),
        (lambda: pd.masks.candidates(10**9, 10**9), "masks.candidates: count must make a mask of less than 2**31"),
        (lambda: pd.masks.candidates(10**9, 1), "masks.candidates: count must make at most 4194304 segments"),
        (lambda: pd.masks.noise_aware_causal(1, 1, 10**9), "noise_aware_causal: num_blocks must make at most 4194304"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, text: str) -> None:
    with pytest.raises(ValueError) as raised:
        call()
    assert text in str(raised.value)


# ---- NaN


def broken(method: str) -> Any:
    model = copy.deepcopy(example(METHODS[method]))
    for parameter in model.parameters():
        parameter.fill_(torch.nan)
    return model


NAN = (
    "pdkernels.decoding.generate: the model's logits leave no token to choose: NaN, +inf or only -inf in sequence 0, "
    "after 0 new tokens. "
)


@pytest.mark.covering(share=3)
@pytest.mark.parametrize("method", available())
def test_logits_that_are_nan_are_an_error(method: str) -> None:
    for temperature in (0.0, 0.7):
        options = {"temperature": temperature} if "temperature" in METHODS[method].options else {}
        with pytest.raises(ValueError) as raised:
            generate(broken(method), [[1, 2], [3]], method, max_new_tokens=6, **options)
        assert str(raised.value).startswith(NAN)


class Spoiled:
    """A causal model whose head gives NaN from some position on."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = torch.eye(9)[(tokens + 1) % 9]
        logits[:, self.first :] = torch.nan
        return logits


@pytest.mark.parametrize("options", [{}, {"block_size": 4}, {"window": 3}])
def test_the_first_nan_token_is_named(options: dict[str, Any]) -> None:
    model = pd.models.from_callable(Spoiled(5), vocab_size=9)
    method = "jacobi" if options else "autoregressive"
    heard: list[int] = []
    with pytest.raises(ValueError, match="in sequence 1, after"):
        generate(
            model, [[1], [1, 2]], method, max_new_tokens=8, on_tokens=lambda n, ids, _: heard.extend(ids * (n == 1))
        )
    assert heard == [3, 4, 5, 6][: len(heard)] and len(heard) <= 4
    # Rows that are never read may hold anything.
    assert generate(model, [1, 2], method, max_new_tokens=4, **options).tokens.tolist() == [3, 4, 5, 6]
    assert generate(model, [1, 2], method, max_new_tokens=8, end_tokens=(5,), **options).tokens.tolist() == [3, 4, 5]
