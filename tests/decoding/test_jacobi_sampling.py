"""Jacobi decoding above temperature 0: token by token what autoregressive sampling draws with the same seed, whatever was drafted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels import models
from pdkernels.decoding import generate
from pdkernels.reference.jacobi import jacobi, jacobi_window
from pdkernels.reference.jacobi_lookup import jacobi_lookup
from pdkernels.reference.jacobi_multiblock import jacobi_multiblock
from pdkernels.reference.sampling import sampled_autoregressive
from tests.decoding import test_jacobi, test_jacobi_multiblock
from tests.decoding.test_jacobi import small_transformer
from tests.decoding.test_jacobi_multiblock import scripted
from tests.support.base import page_sizes, seeds, streams
from tests.support.causal import SCRIPTS, FakeModel

# Options of `generate`, and the plain form of the method.
FORMS: dict[str, tuple[str, dict[str, Any], Any, dict[str, Any]]] = {
    "blocks": ("jacobi", {"block_size": 6}, jacobi, {"block_size": 6}),
    "window": ("jacobi", {"window": 5}, jacobi_window, {"window": 5}),
    "lookup": ("jacobi", {"draft": "lookup", "block_size": 7}, jacobi_lookup, {"block_size": 7}),
    "multiblock": (
        "jacobi_multiblock",
        {"block_size": 6, "spawn_ratio": 0.5},
        jacobi_multiblock,
        {"block_size": 6, "spawn_ratio": 0.5},
    ),
}
few = st.integers(0, 5)  # so that prompts repeat themselves
batches = st.lists(st.lists(few, min_size=1, max_size=12), min_size=1, max_size=3)
temperatures = st.sampled_from([0.05, 0.3, 1.0, 3.0])


def assert_same(method: str, result: Any, expected: list[Any], limit: int) -> None:
    module = test_jacobi if method == "jacobi" else test_jacobi_multiblock
    module.assert_same(result, expected, limit)


@settings(max_examples=60, deadline=None)
@given(
    form=st.sampled_from(sorted(FORMS)),
    script=st.sampled_from(sorted(SCRIPTS)),
    batch=batches,
    limit=st.integers(0, 20),
    temperature=st.sampled_from([0.05, 0.15, 0.3]),
    ends=st.lists(st.integers(0, 22), max_size=2),
    seed=seeds,
    page_size=page_sizes,
)
def test_equals_sampling_and_the_reference(
    form: str, script: str, batch: Any, limit: int, temperature: float, ends: list[int], seed: int, page_size: Any
) -> None:
    method, options, plain, own = FORMS[form]
    model, drawn = FakeModel(SCRIPTS[script]), {"temperature": temperature, "seed": seed, "end_tokens": ends}
    result = generate(model, batch, method, max_new_tokens=limit, trace=True, page_size=page_size, **options, **drawn)
    expected = []
    for prompt, alone in streams(batch, drawn):
        expected.append(plain(scripted(SCRIPTS[script]), prompt, limit, **own, **alone))
        assert expected[-1].tokens == sampled_autoregressive(model.plain, prompt, limit, **alone).tokens
    assert_same(method, result, expected, limit)
    sampled = generate(model, batch, max_new_tokens=limit, **drawn)
    assert all(torch.equal(one, other) for one, other in zip(result.tokens, sampled.tokens, strict=True))


@settings(max_examples=40, deadline=None)
@given(
    form=st.sampled_from(sorted(FORMS)),
    weights=st.integers(0, 3),
    batch=batches,
    limit=st.integers(1, 24),
    temperature=temperatures,
    ends=st.lists(st.integers(0, 22), max_size=2),
    seed=seeds,
    page_size=page_sizes,
)
def test_a_random_transformer(
    form: str, weights: int, batch: Any, limit: int, temperature: float, ends: list[int], seed: int, page_size: Any
) -> None:
    method, options, _, _ = FORMS[form]
    model = small_transformer(weights)
    drawn = {"max_new_tokens": limit, "temperature": temperature, "seed": seed, "end_tokens": ends}
    sampled = generate(model, batch, **drawn)
    result = generate(model, batch, method, page_size=page_size, **options, **drawn)
    assert all(torch.equal(one, other) for one, other in zip(result.tokens, sampled.tokens, strict=True))
    for number, (prompt, alone) in enumerate(streams(batch, drawn)):
        single = generate(model, prompt, method, **options, **alone)
        assert torch.equal(single.tokens, sampled.tokens[number])
        assert single.stats.accepted[0] == result.stats.accepted[number]


@pytest.mark.parametrize("form", sorted(FORMS))
def test_seeds_differ_and_drafts_are_accepted(form: str) -> None:
    """At a low temperature most draws are greedy, so that drafts are accepted; seeds still differ."""
    method, options, _, _ = FORMS[form]
    model = FakeModel(SCRIPTS["position"])
    texts = []
    for seed in range(4):
        drawn = {"max_new_tokens": 60, "temperature": 0.15, "seed": seed}
        result = generate(model, [1, 2, 3], method, **options, **drawn)
        assert torch.equal(result.tokens, generate(model, [1, 2, 3], **drawn).tokens)
        assert result.stats.tokens_per_forward > 1.1
        texts.append(result.tokens.tolist())
    assert len({tuple(text) for text in texts}) == 4


@pytest.mark.parametrize("form", ["blocks", "lookup"])
def test_recurrent_models(form: str) -> None:
    model = models.load("tiny-recurrent")
    drawn = {"max_new_tokens": 24, "temperature": 0.7, "seed": [5, 6]}
    batch = ["17 + 5 = ?", "3"]
    sampled = generate(model, batch, **drawn)
    assert generate(model, batch, "jacobi", **FORMS[form][1], **drawn).text == sampled.text


@pytest.mark.parametrize("method", ["jacobi", "jacobi_multiblock"])
@pytest.mark.parametrize(
    ("temperature", "words"), [(-1, "be finite and at least 0"), (1e-40, "be 0 or at least 1e-30")]
)
def test_errors(method: str, temperature: float, words: str) -> None:
    with pytest.raises(ValueError, match=f"pdkernels.decoding.generate: temperature must {words}"):
        generate(FakeModel(SCRIPTS["sticky"]), [1], method, temperature=temperature)
