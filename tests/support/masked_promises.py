"""Properties of all decoders of masked-diffusion models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pdkernels.decoding import DecodeResult, generate
from tests.harness.sessions import error_of
from tests.support.base import reads_of_the_device, streams
from tests.support.errors import kind_of
from tests.support.masked import Scripted, hashed, small_masked


def assert_same(result: DecodeResult, expected: list[Any]) -> None:
    """A batch gives what the reference gives for each of its sequences: tokens, forwards, and what each forward filled."""
    assert [tokens.tolist() for tokens in result.tokens] == [one.tokens for one in expected]
    stats = result.stats
    forwards = [one.forwards for one in expected]
    assert stats.forwards == max(forwards)
    assert stats.accepted == [[len(step.committed) for step in one.trace] for one in expected]
    for steps, one in zip(stats.trace, expected, strict=True):
        for step, plain in zip(steps, one.trace, strict=True):
            assert (step.tokens, step.committed, step.window) == (plain.tokens, plain.committed, tuple(plain.window))
            assert step.confidence == pytest.approx(plain.confidence, rel=1e-9, abs=1e-12)
    if sum(forwards):
        assert stats.tokens_per_forward == stats.tokens / sum(forwards)


def assert_same_or_waiting(result: DecodeResult, expected: list[Any], waits: bool) -> None:
    """As `assert_same`; sequences that wait for others take more forwards together than any one of them."""
    forwards, most = result.stats.forwards, max(one.forwards for one in expected)
    if waits:
        assert most <= forwards <= sum(one.forwards for one in expected)
        result = replace(result, stats=replace(result.stats, forwards=most))
    assert_same(result, expected)


def assert_alone_as_in_a_batch(method: str, **options: Any) -> None:
    batch = [[3, 1, 4, 1, 5], [9], [2, 6]]
    model = small_masked(1)
    options = {"max_new_tokens": 9, "temperature": 0.7, "trace": True, "seed": 5, "end_tokens": (2,)} | options
    together = generate(model, batch, method, **options)
    for index, (prompt, own) in enumerate(streams(batch, options)):
        alone = generate(model, prompt, method, **own)
        assert torch.equal(alone.tokens, together.tokens[index])
        assert alone.stats.accepted[0] == together.stats.accepted[index]
        for step, other in zip(alone.stats.trace[0], together.stats.trace[index], strict=True):
            assert (step.tokens, step.committed, step.window) == (other.tokens, other.committed, other.window)
            assert step.confidence == pytest.approx(other.confidence, rel=1e-9)


def assert_one_read_per_step(method: str, **options: Any) -> None:
    """And one more at the end, for the stats."""
    options = {"max_new_tokens": 12, "end_tokens": (4,)} | options
    arguments = Scripted(hashed(2)), [[1, 2], [5]], method
    forwards = generate(*arguments, **options).stats.forwards
    assert reads_of_the_device(*arguments, **options) == forwards + 1


def assert_errors(method: str, cases: list[tuple[dict[str, Any], str]]) -> None:
    """Messages begin with the method's name; options are checked even when no token is asked for."""
    for options, sentence in cases:
        error, text = kind_of(sentence)
        for limit in (4, 0):
            if "number of blocks" in text and limit == 0:
                continue
            with pytest.raises(error) as raised:
                generate(Scripted(hashed(0)), [1], method, **({"max_new_tokens": limit} | options))
            assert str(raised.value) == error_of(method, text)
    causal = Scripted(hashed(0))
    causal.config.attention = "causal"
    with pytest.raises(TypeError, match=r"method must fit the model \(block_causal, own_prediction\), got"):
        generate(causal, [1], method)
    causal.config.predicts = "next"
    with pytest.raises(TypeError, match=r"method must fit the model \(block_causal, causal\), got"):
        generate(causal, [1], method)
    causal.config.attention, causal.config.predicts, causal.mask_token = "bidirectional", "own", None
    with pytest.raises(ValueError, match="the model has no mask token"):
        generate(causal, [1], method)
