"""States of a block that are computed before their step: the tokens, steps and random numbers of the plain sampler."""

from __future__ import annotations

import random
import re
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels import Engine, models
from pdkernels.decoding import generate
from pdkernels.grammar import Grammar
from pdkernels.models import Window
from tests.decoding import test_running_batch as running_batches
from tests.support.base import page_sizes, seeds, streams
from tests.support.lora import random_adapter
from tests.support.masked import MASK, deep_masked
from tests.support.tri_mode import prompts, small_transformer

METHOD = "block_diffusion"
SMALL = 13  # ids of the random model, the mask the last


@cache
def small(seed: int) -> Any:
    """In float32: rows of float64 have other bits in another batch, and so do heads smaller than 16."""
    return deepcopy(small_transformer(seed)).float()


@cache
def windowed(seed: int) -> Any:
    model = deepcopy(block_causal(seed, "own"))
    windows = (Window(16), *[None] * (model.config.layers - 1))
    own = models.Transformer(replace(model.config, windows=windows, max_positions=512), mask_token=model.mask_token)
    own.load_state_dict(model.state_dict())
    return own.requires_grad_(False).eval()


@cache
def block_causal(seed: int, predicts: str) -> Any:
    return deepcopy(deep_masked(seed, predicts, 16, "causal")).float()


def both(model: Any, batch: Any, speculate: int, **options: Any) -> tuple[Any, Any]:
    given = {"threshold": None, "trace": True, **options}
    found = [generate(model, batch, METHOD, speculate=n, **given) for n in (0, speculate)]
    return found[0], found[1]


def assert_same(plain: Any, fast: Any) -> None:
    assert [row.tolist() for row in fast.tokens] == [row.tolist() for row in plain.tokens]
    assert fast.stats.accepted == plain.stats.accepted and fast.stats.trace == plain.stats.trace
    assert fast.stats.forwards <= plain.stats.forwards


@settings(max_examples=40, deadline=None)
@given(
    model=st.integers(0, 2),
    batch=prompts(SMALL),
    speculate=st.integers(1, 9),
    limit=st.integers(1, 14),
    block_size=st.integers(1, 7),
    options=st.fixed_dictionaries(
        dict(
            temperature=st.sampled_from([0.0, 0.5, 1.0]),
            top_k=st.sampled_from([None, 3]),
            refresh=st.sampled_from(["causal", "bidirectional"]),
            rule=st.sampled_from(
                [*({"steps_per_block": n} for n in (None, 1, 2, 3)), *({"threshold": t} for t in (0.0, 0.15, 0.4, 2.0))]
            ),
            page_size=page_sizes,
        )
    ),
    ends=st.lists(st.integers(0, SMALL - 2), max_size=3),
    seed=seeds,
)
def test_tokens_of_the_plain_sampler(model, batch, speculate, limit, block_size, options, ends, seed) -> None:
    given = {"block_size": block_size, "end_tokens": ends, "seed": seed, "max_new_tokens": limit}
    assert_same(*both(small(model), batch, speculate, **given, **options.pop("rule"), **options))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_half_the_forwards_of_a_trained_model(temperature: float) -> None:
    """In a batch, and alone with other seeds."""
    model = models.load("tiny-trimode")
    texts = [f"{a} + {b} = ?\n" for a in (12, 57, 88) for b in (9, 34)]
    options = {"max_new_tokens": 32, "block_size": 16, "temperature": temperature, "end_tokens": ()}
    assert_same(*both(model, texts, 7, seed=4, **options))
    alone = [both(model, text, 7, seed=seed, **options) for seed, text in enumerate(texts)]
    for plain, fast in alone:
        assert_same(plain, fast)
    assert 2 * sum(fast.stats.forwards for _, fast in alone) <= sum(plain.stats.forwards for plain, _ in alone)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_fewer_forwards_with_a_threshold(temperature: float) -> None:
    model = models.load("tiny-trimode")
    options = {"max_new_tokens": 32, "block_size": 32, "threshold": 0.9, "temperature": temperature, "end_tokens": ()}
    texts = ["What is ", "So ", "12 - ", "7 + 5"]
    alone = [both(model, text, 7, seed=seed, **options) for seed, text in enumerate(texts)]
    for plain, fast in [*alone, both(model, texts, 7, seed=0, **options)]:
        assert_same(plain, fast)
    saved = sum(plain.stats.forwards - fast.stats.forwards for plain, fast in alone)
    assert 4 * saved >= sum(plain.stats.forwards for plain, _ in alone)


SPECULATING = [
    ("tiny-trimode", METHOD, {"block_size": 6, "speculate": 4}),
    ("tiny-trimode", METHOD, {"block_size": 5, "threshold": None, "temperature": 0.7, "speculate": 3}),
    ("tiny-trimode", METHOD, {"block_size": 6, "threshold": 0.999, "refresh": "bidirectional", "speculate": 2}),
    ("tiny-masked", "llada", {"speculate": 3, "temperature": 0.7}),
    ("tiny-masked", "llada", {"block_size": 3, "late_end": True, "speculate": 4}),
]


@pytest.mark.parametrize(("name", "method", "options"), SPECULATING)
def test_requests_of_a_running_batch_are_as_they_are_alone(name: str, method: str, options: dict[str, Any]) -> None:
    """Forwards too: no state is computed, or met, because of another row."""
    running_batches.run_requests(name, method, options, chance=random.Random(method), count=8)


def test_requests_take_their_states_into_another_batch() -> None:
    running_batches.test_batches_of_other_sizes_take_requests_over(*SPECULATING[0])


@pytest.mark.parametrize(("name", "method", "options"), SPECULATING[1:4])
def test_engine(name: str, method: str, options: dict[str, Any]) -> None:
    """Requests of other temperatures, limits, methods and numbers of states run beside each other."""
    model, chance = models.load(name), random.Random(method)
    options = {key: value for key, value in options.items() if key != "temperature"}
    plain = {key: value for key, value in options.items() if key != "speculate"}
    with Engine(model, max_running=3) as engine:
        handles = []
        for number in range(12):
            own = dict(temperature=chance.choice([0.0, 0.5, 1.0]), seed=number, end_tokens=())
            own |= {"max_new_tokens": 9 if method == "llada" else chance.choice([3, 9, 14])}
            text = f"{chance.randrange(90)} + {chance.randrange(90)} = ?\n"
            chosen = plain if number % 4 == 3 else options
            handles.append((engine.submit(text, method, **chosen, **own), text, own, chosen))
        for handle, text, own, chosen in handles:
            found = handle.result(120)
            expected, alone = (generate(model, text, method, **these, **own) for these in (plain, chosen))
            assert torch.equal(found.tokens, expected.tokens) and found.stats.accepted == expected.stats.accepted
            assert found.stats.forwards == alone.stats.forwards <= expected.stats.forwards


def test_requests_with_adapters(tmp_path: Path) -> None:
    """States are computed with the adapter of the canvas that they may follow."""
    model = deepcopy(models.load("tiny-masked"))
    models.load_adapter(model, "other", random_adapter(model, tmp_path / "other", 4, seed=1, size=1.0))
    text, given = "12 + 34 = ?\n", {"max_new_tokens": 9, "end_tokens": ()}
    names = [None, "other", "other", None]
    expected = [generate(model, text, "llada", adapter=name, **given).tokens for name in names]
    assert not torch.equal(expected[0], expected[1])
    with Engine(model, max_running=3) as engine:
        handles = [engine.submit(text, "llada", speculate=3, adapter=name, **given) for name in names]
        for handle, tokens in zip(handles, expected, strict=True):
            assert torch.equal(handle.result(120).tokens, tokens)


def test_a_model_with_windows() -> None:
    """A forward over a complete block computes rows anew, so nothing is left out of the cache."""
    model = windowed(0)
    options = {"block_size": 4, "small_block_size": 4, "threshold": 0.2, "max_new_tokens": 180, "end_tokens": ()}
    plain, fast = (generate(model, [[1, 2, 3]], "fast_dllm_v2", speculate=n, **options) for n in (0, 3))
    assert torch.equal(plain.tokens[0], fast.tokens[0]) and fast.stats.forwards < plain.stats.forwards


def test_states_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdkernels.engine.pages._free_bytes", lambda _: 60_000_000)
    with Engine(models.load("tiny-trimode"), max_running=2, cache_tokens=2000) as engine:
        options: dict[str, Any] = {"max_new_tokens": 4, "block_size": 4}
        with pytest.raises(
            ValueError, match="speculate must need at most half of the free memory, 0.0 GB, for its states"
        ):
            engine.submit("1 + 2", METHOD, speculate=64, **options)
        assert engine.submit("1 + 2", METHOD, **options).result(60).tokens.numel()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"speculate": -1, "threshold": None}, "speculate must be an int from 0 to 64, got -1"),
        ({"speculate": True, "threshold": None}, "speculate must be an int from 0 to 64, got True"),
        ({"speculate": 65, "threshold": None}, "speculate must be an int from 0 to 64, got 65"),
        (
            {"speculate": 2, "threshold": None, "repetition_penalty": 1.2},
            "speculate must be 0 with a grammar, a bias, penalties, exc",
        ),
    ],
)
def test_what_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        generate(small(0), torch.tensor([[1, 2]]), METHOD, max_new_tokens=4, **options)


@settings(max_examples=40, deadline=None)
@given(
    model=st.tuples(st.integers(0, 1), st.sampled_from(["next", "own"])),
    batch=prompts(MASK),
    speculate=st.integers(1, 9),
    limit=st.integers(1, 12),
    sizes=st.sampled_from([(4, 4, True), (4, 2, False), (6, 6, True), (5, 2, False), (1, 1, True)]),
    options=st.fixed_dictionaries(
        dict(
            threshold=st.sampled_from([0.0, 0.2, 0.35, 0.6, 1.0]),
            steps=st.sampled_from([None, None, 1, 2, 3]),
            temperature=st.sampled_from([0.0, 0.5, 1.0]),
            top_k=st.sampled_from([None, 3]),
            repetition_penalty=st.sampled_from([1.0, 1.3]),
            page_size=page_sizes,
        )
    ),
    ends=st.lists(st.integers(0, MASK - 1), max_size=2),
    seed=seeds,
)
def test_blocks_of_fast_dllm_v2(model, batch, speculate, limit, sizes, options, ends, seed) -> None:
    """The forward over a complete block may be among the computed states too."""
    options |= dict(zip(("block_size", "small_block_size", "block_cache"), sizes, strict=True))
    given = {"max_new_tokens": limit, "end_tokens": ends, "seed": seed, "trace": True, **options}
    plain, fast = (generate(block_causal(*model), batch, "fast_dllm_v2", speculate=n, **given) for n in (0, speculate))
    assert_same(plain, fast)
    for index, (prompt, own) in enumerate(streams(batch, given)):
        alone = generate(block_causal(*model), prompt, "fast_dllm_v2", speculate=speculate, **own)
        assert torch.equal(alone.tokens, fast.tokens[index])


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_fewer_forwards_of_fast_dllm_v2(temperature: float) -> None:
    """In SDAR's blocks of 4 and LLaDA2's of 32; the model is trained for neither."""
    model = models.load("tiny-trimode")
    for size, threshold in ((4, 0.85), (32, 0.95)):
        options = {"block_size": size, "small_block_size": size, "threshold": threshold, "temperature": temperature}
        options |= {"max_new_tokens": 32, "end_tokens": (), "trace": True}
        forwards = []
        for seed, text in enumerate(["What is ", "So ", "12 - ", "7 + 5"]):
            plain, fast = (generate(model, text, "fast_dllm_v2", speculate=n, seed=seed, **options) for n in (0, 7))
            assert_same(plain, fast)
            forwards.append((plain.stats.forwards, fast.stats.forwards))
        before, after = (sum(column) for column in zip(*forwards, strict=True))
        assert after < before


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"speculate": 65}, "speculate must be an int from 0 to 64, got 65"),
        ({"speculate": 2}, "speculate must be 0 with small blocks and block_cache, got 2. Pass block_cache=False."),
        (
            {"speculate": 2, "block_cache": False, "edit_threshold": 0.5},
            "edit_threshold must be None with small blocks",
        ),
        (
            {"speculate": 2, "small_block_size": 32, "edit_threshold": 0.5},
            "speculate must be 0 with edit_threshold, got 2",
        ),
    ],
)
def test_what_fast_dllm_v2_refuses(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        generate(block_causal(0, "own"), [[1, 2]], "fast_dllm_v2", max_new_tokens=4, **options)


def test_a_grammar_is_refused() -> None:
    options = {"threshold": None, "speculate": 2, "grammar": Grammar.regex("[0-9]{4,12}")}
    with pytest.raises(
        ValueError,
        match="speculate must be 0 with a grammar, a bias, penalties, excluded tokens or min_new_tokens, got 2",
    ):
        generate(models.load("tiny-trimode"), "58 + 31 = ?\n", METHOD, max_new_tokens=4, **options)
