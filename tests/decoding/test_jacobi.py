"""Jacobi decoding: the tokens of greedy decoding, the forwards and acceptances of the plain reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels import models
from pdkernels.decoding import DecodeResult, generate
from pdkernels.models.architectures.transformer import Transformer, TransformerConfig
from pdkernels.reference.autoregressive import autoregressive
from pdkernels.reference.jacobi import JacobiResult, jacobi, jacobi_window
from tests.support.base import streams
from tests.support.causal import SCRIPTS, VOCABULARY, FakeModel, from_list

token = st.integers(0, VOCABULARY - 1)
prompts = st.lists(st.lists(token, min_size=1, max_size=8), min_size=1, max_size=4)
seeds = st.integers(0, 2**64 - 1)
# block_size or window, and its value
drafts = st.tuples(st.sampled_from(["block_size", "window"]), st.integers(1, 12))


def reference(
    model: FakeModel, prompt: list[int], limit: int, kind: str, length: int, **options: object
) -> JacobiResult:
    decode = jacobi if kind == "block_size" else jacobi_window
    return decode(model.plain, prompt, limit, **{kind: length}, **options)


def assert_same(result: DecodeResult, expected: list[JacobiResult], limit: int) -> None:
    assert [tokens.tolist() for tokens in result.tokens] == [one.tokens for one in expected]
    stats = result.stats
    assert stats.forwards == max(one.forwards for one in expected)
    assert stats.accepted == [[step.accepted for step in one.trace] for one in expected]
    assert [[tuple(step) for step in steps] for steps in stats.trace] == [
        [tuple(step) for step in one.trace] for one in expected
    ]
    if limit:
        forwards = sum(one.forwards for one in expected)
        assert stats.tokens_per_forward == sum(len(one.tokens) for one in expected) / forwards


@settings(max_examples=200, deadline=None)
@given(
    script=st.sampled_from(sorted(SCRIPTS)),
    ties=st.booleans(),
    batch=prompts,
    limit=st.integers(0, 24),
    draft=drafts,
    ends=st.lists(token, max_size=3),
    seed=seeds,
    page_size=st.sampled_from([None, None, 1, 3, 16]),
)
def test_equals_greedy_and_the_reference(script, ties, batch, limit, draft, ends, seed, page_size) -> None:
    kind, length = draft
    model = FakeModel(SCRIPTS[script], ties=ties)
    options = {kind: length, "seed": seed, "page_size": page_size}
    result = generate(model, batch, "jacobi", max_new_tokens=limit, end_tokens=ends, trace=True, **options)
    for tokens, prompt in zip(result.tokens, batch, strict=True):
        assert tokens.tolist() == autoregressive(model.plain, prompt, limit, end_tokens=ends).tokens
    alone = streams(batch, {"seed": seed})
    expected = [reference(model, prompt, limit, kind, length, end_tokens=ends, **own) for prompt, own in alone]
    assert_same(result, expected, limit)
    if limit:  # a finished sequence does not change
        committed = [sum(step.accepted for step in one.trace) for one in expected]
        lengths = [len(prompt) + count for prompt, count in zip(batch, committed, strict=True)]
        assert model.cache.lengths.tolist() == lengths
    assert max(model.rows_seen, default=0) <= length  # the head only ever runs on the rows that are needed


@settings(max_examples=30, deadline=None)
@given(batch=prompts, limit=st.integers(0, 16), seed=seeds, kind=st.sampled_from(["block_size", "window"]))
def test_a_draft_of_one_token_is_autoregressive(batch: list[list[int]], limit: int, seed: int, kind: str) -> None:
    model = FakeModel(SCRIPTS["history"])
    greedy = generate(model, batch, max_new_tokens=limit, trace=True)
    result = generate(model, batch, "jacobi", max_new_tokens=limit, seed=seed, trace=True, **{kind: 1})
    assert result.stats.trace == greedy.stats.trace
    assert result.stats.forwards == greedy.stats.forwards


END = 22


@pytest.mark.covering(2)
@pytest.mark.parametrize("kind", ["block_size", "window"])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("position", range(9))
@pytest.mark.parametrize("script", ["parallel", "sequential"])
def test_an_end_token_at_every_position(kind: str, length: int, position: int, script: str) -> None:
    """First token, inside an accepted slice, next token after a partial or a full acceptance."""
    written = [*range(1, 1 + position), END, 3, 3, 3]
    if script == "parallel":
        # Right whatever the draft holds: drafts are accepted whole, with the end in the middle of them.
        model = FakeModel(lambda history: written[min(len(history) - 2, len(written) - 1)])
    else:
        model = FakeModel(from_list(written, 2))
    for limit in (position + 1, position + 2, 12):
        result = generate(
            model, [[7, 7]], "jacobi", max_new_tokens=limit, end_tokens=(END,), trace=True, **{kind: length}
        )
        assert result.tokens[0].tolist() == written[: position + 1]
        assert_same(result, [reference(model, [7, 7], limit, kind, length, end_tokens=(END,))], limit)
    shorter = generate(model, [7, 7], "jacobi", max_new_tokens=position, end_tokens=(END,), **{kind: length})
    assert shorter.tokens.tolist() == written[:position]


@pytest.mark.parametrize("kind", ["block_size", "window"])
def test_partial_and_full_acceptance_both_happen(kind: str) -> None:
    model = FakeModel(lambda history: len(history) // 5 % 3 if len(history) % 8 < 6 else history[-1] + 1)
    trace = generate(model, [5, 1], "jacobi", max_new_tokens=60, trace=True, **{kind: 4}).stats.trace[0]
    lengths = {(step.accepted, len(step.draft)) for step in trace}
    assert any(accepted == 1 < length for accepted, length in lengths)
    assert any(1 < accepted < length for accepted, length in lengths)
    assert any(1 < accepted == length for accepted, length in lengths)


def test_one_sequence_ends_early_and_does_not_change() -> None:
    ends_soon, goes_on = [7], [7, 7]
    model = FakeModel(lambda history: END if history[:2] == [7, 3] else (3 if len(history) == 1 else len(history) % 19))
    result = generate(
        model, [ends_soon, goes_on], "jacobi", max_new_tokens=20, end_tokens=(END,), block_size=4, trace=True
    )
    assert result.tokens[0].tolist() == [3, END]
    assert len(result.tokens[1]) == 20
    assert len(result.stats.accepted[0]) < len(result.stats.accepted[1])


@pytest.mark.parametrize("limit", range(7))
def test_the_limit_is_exact_inside_a_block(limit: int) -> None:
    for options in ({"block_size": 5}, {"window": 5}):
        model = FakeModel(SCRIPTS["position"])
        result = generate(model, [3], "jacobi", max_new_tokens=limit, **options)
        assert result.tokens.tolist() == autoregressive(model.plain, [3], limit).tokens
        # One token comes from the prompt's forward; no forward and no row is spent on tokens that were not requested.
        assert sum(model.rows_seen) == (0, 1, 2, 4, 6, 8, 10)[limit]
    assert result.stats.forwards == (0 if limit == 0 else 1 if limit == 1 else 2 if limit < 7 else 3)


def small_transformer(seed: int) -> Transformer:
    """Random weights, large enough that tokens depend on the whole context; fp64, so that row counts cannot matter."""
    torch.manual_seed(seed)
    model = Transformer(
        TransformerConfig(
            vocab_size=VOCABULARY, hidden_size=16, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate_size=24
        )
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.4)
    return model.requires_grad_(False)


@settings(max_examples=40, deadline=None)
@given(
    weights=st.integers(0, 3),
    batch=prompts,
    limit=st.integers(1, 20),
    draft=drafts,
    ends=st.lists(token, max_size=2),
    seed=seeds,
    page_size=st.sampled_from([None, None, 1, 5]),
)
def test_a_random_transformer(weights, batch, limit, draft, ends, seed, page_size) -> None:
    model = small_transformer(weights)

    def plain(tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return model(tokens, positions=positions, mask=mask)

    kind, length = draft
    options = {kind: length, "seed": seed, "page_size": page_size}
    result = generate(model, batch, "jacobi", max_new_tokens=limit, end_tokens=ends, trace=True, **options)
    decode = jacobi if kind == "block_size" else jacobi_window
    alone = streams(batch, {"seed": seed, kind: length})
    expected = [decode(plain, prompt, limit, end_tokens=ends, **own) for prompt, own in alone]
    for one, prompt in zip(expected, batch, strict=True):
        assert one.tokens == autoregressive(plain, prompt, limit, end_tokens=ends).tokens
    assert_same(result, expected, limit)


SNIPPETS = ["def read_csv(", "import os\n", "class Node:\n    def __init__(self", "for i in range(", "    return ", "x"]


@settings(max_examples=12, deadline=None)
@given(
    batch=st.lists(st.sampled_from(SNIPPETS), min_size=1, max_size=3),
    limit=st.integers(1, 40),
    draft=st.tuples(st.sampled_from(["block_size", "window"]), st.integers(1, 32)),
    seed=seeds,
    page_size=st.sampled_from([None, None, 7]),
)
def test_tiny_code(batch: list[str], limit: int, draft: tuple[str, int], seed: int, page_size: int | None) -> None:
    model = models.load("tiny-code")
    greedy = generate(model, batch, max_new_tokens=limit)
    result = generate(
        model, batch, "jacobi", max_new_tokens=limit, seed=seed, page_size=page_size, **{draft[0]: draft[1]}
    )
    assert result.text == greedy.text
    assert all(torch.equal(one, other) for one, other in zip(result.tokens, greedy.tokens, strict=True))
    assert result.stats.forwards <= greedy.stats.forwards


def test_tiny_code_accepts_drafts() -> None:
    """A model trained without noise accepts few drafts, but it does: 1.25 tokens per forward when this was written."""
    model = models.load("tiny-code")
    prompts = ["class Node:", "import os", "def test_", "    if self.", "for i in range("]
    stats = generate(model, prompts, "jacobi", max_new_tokens=128).stats
    assert stats.tokens_per_forward > 1.1
