"""The cached autoregressive decoder against the plain one."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels.decoding import generate
from pdkernels.reference.autoregressive import autoregressive
from pdkernels.reference.sampling import sampled_autoregressive
from tests.support.base import Plain, streams
from tests.support.causal import SCRIPTS, VOCABULARY, FakeModel
from tests.support.tri_mode import small_transformer

token = st.integers(0, VOCABULARY - 1)
prompts = st.lists(st.lists(token, min_size=1, max_size=8), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(
    script=st.sampled_from(sorted(SCRIPTS)),
    ties=st.booleans(),
    batch=prompts,
    limit=st.integers(0, 20),
    ends=st.lists(token, max_size=3),
    page_size=st.sampled_from([None, 1, 3, 16]),
)
def test_equals_the_reference(
    script: str, ties: bool, batch: list[list[int]], limit: int, ends: list[int], page_size: int | None
) -> None:
    model = FakeModel(SCRIPTS[script], ties=ties)
    result = generate(model, batch, max_new_tokens=limit, end_tokens=ends, page_size=page_size, trace=True)
    expected = [autoregressive(model.plain, prompt, limit, end_tokens=ends) for prompt in batch]
    assert [tokens.tolist() for tokens in result.tokens] == [one.tokens for one in expected]
    stats = result.stats
    assert stats.forwards == max(one.forwards for one in expected)
    assert stats.tokens == sum(len(one.tokens) for one in expected)
    assert stats.tokens_per_forward == (1.0 if limit else 0.0)
    assert stats.accepted == [[1] * (len(one.tokens) - 1) for one in expected]
    for steps, one in zip(stats.trace, expected, strict=True):
        assert [(step.draft, step.predictions) for step in steps] == [
            ([before], [after]) for before, after in zip(one.tokens, one.tokens[1:], strict=False)
        ]
    if limit:  # a finished sequence does not change
        lengths = [len(prompt) + len(one.tokens) - 1 for prompt, one in zip(batch, expected, strict=True)]
        assert model.cache.lengths.tolist() == lengths
    assert set(model.rows_seen) <= {1}  # the head only ever runs on the rows that are needed


@pytest.mark.covering
@pytest.mark.parametrize("temperature", [1e-30, 0.4, 1.3])
@pytest.mark.parametrize("seed", [0, -7, 2**70])
def test_draws_equal_those_of_the_reference_and_of_speculation(temperature: float, seed: int) -> None:
    model, batch = small_transformer(6), [[1, 2, 3], [4]]
    options = {"max_new_tokens": 9, "temperature": temperature, "seed": seed, "end_tokens": (5,)}
    tokens = [sequence.tolist() for sequence in generate(model, batch, **options).tokens]
    expected = [
        sampled_autoregressive(Plain(model), prompt, 9, temperature=temperature, end_tokens=(5,), **own)
        for prompt, own in streams(batch, {"seed": seed})
    ]
    assert tokens == [one.tokens for one in expected]
    for method in ("linear_self_speculation", "quadratic_self_speculation"):
        assert [sequence.tolist() for sequence in generate(model, batch, method, **options).tokens] == tokens


def test_sampling_options_are_checked() -> None:
    with pytest.raises(ValueError, match="decoding.generate: temperature must be finite and at least 0, got -1"):
        generate(small_transformer(6), [1], temperature=-1)


@pytest.mark.parametrize("method", ["autoregressive", "jacobi"])
def test_options_are_named(method: str) -> None:
    words = r"^pdkernels\.decoding\.generate: options must be named, got 2 after the method\. Write max_new_tokens=5, not 5\.$"
    with pytest.raises(TypeError, match=words):
        generate(small_transformer(0), [1, 2], method, 5, 4)  # type: ignore[call-overload]
    assert "unnamed" not in inspect.signature(generate).parameters
