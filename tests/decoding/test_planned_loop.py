"""Planned diffusion: what ends a text, invalid plans, lengths at the limit, streams, counts and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels.decoding import BAD_PLANS, BadPlan, ChunkTokens, generate
from pdkernels.models import Transformer, TransformerConfig
from pdkernels.reference import planned as reference
from tests.harness.pretended_gpu import pretended_gpu
from tests.harness.sessions import error_of
from tests.support.plans import CLOSE, END, MASK, OPEN, SYNC, TAGS, Scripted, planning_model, written

BEGIN, STOP, PAD = TAGS.chunk_open, TAGS.chunk_close, TAGS.pad


def item(number: int, *topic: int) -> list[int]:
    return [OPEN, *(topic or (12,)), *(int(digit) for digit in str(number)), CLOSE]


def chunk(length: int, token: int = 10) -> list[int]:
    return [BEGIN, *[token] * length, STOP]


@pytest.mark.parametrize(
    ("script", "tokens", "reason", "rounds"),
    [
        ([END], [END], "end", 1),
        ([13, 14, END], [13, 14, END], "end", 1),
        ([SYNC, END], [SYNC, END], "end", 2),
        ([SYNC, SYNC], [SYNC, SYNC], "no items", 2),
        ([SYNC, 13, SYNC, SYNC, 13, END], [SYNC, 13, SYNC, SYNC, 13, END], "end", 4),
        ([*item(2), END], [*item(2), *chunk(2), END], "end", 1),
        ([*item(2), *item(3), END], [*item(2), *item(3), *chunk(2), *chunk(3), END], "end", 1),
        ([*item(0), END], [*item(0), *chunk(0), END], "end", 1),
        ([*item(0), *item(0), SYNC, END], [*item(0), *item(0), *chunk(0), *chunk(0), SYNC, END], "end", 2),
        ([*item(0), *item(1), SYNC, END], [*item(0), *item(1), *chunk(0), *chunk(1), SYNC, END], "end", 2),
        ([13, *item(1), 14, *item(1), END], [13, *item(1), 14, *item(1), *chunk(1) * 2, END], "end", 1),
        ([*item(1), SYNC, END], [*item(1), *chunk(1), SYNC, END], "end", 2),
        ([*item(1), SYNC] * 2 + [END], (item(1) + chunk(1) + [SYNC]) * 2 + [END], "end", 3),
        ([OPEN, 12, CLOSE, END], [OPEN, 12, CLOSE, END], "no number", 1),
        ([OPEN, 12, 3, SYNC], [OPEN, 12, 3, SYNC], "not closed", 1),
        ([3, CLOSE, END], [3, CLOSE, END], "not opened", 1),
        ([OPEN, 3, OPEN, 2, CLOSE, END], [OPEN, 3, OPEN, 2, CLOSE, END], "nested", 1),
    ],
)
def test_what_a_script_becomes(script: list[int], tokens: list[int], reason: str, rounds: int) -> None:
    actual, report = written(script)
    assert actual == tokens and report.reason == reason and len(report.rounds) == rounds
    if reason in BAD_PLANS:
        with pytest.raises(
            BadPlan, match=f"plan must say what to write, got {reason!r} in round {rounds - 1} of seq"
        ) as bad:
            written(script, on_bad_plan="raise")
        assert bad.value.reason == reason


@pytest.mark.parametrize(
    ("limit", "tokens", "reason"),
    [
        (0, [], "length"),
        (3, item(6)[:3], "length"),  # in the plan
        (4, item(6), "length"),  # its stop token would exceed the limit
        (5, [*item(6), END], "length"),  # no room for the tags of a chunk
        (7, [*item(6), *chunk(0), END], "end"),
        (10, [*item(6), *chunk(3), END], "end"),
        (13, [*item(6), *chunk(6), END], "end"),  # exactly
        (14, [*item(6), *chunk(6), END], "end"),
    ],
)
def test_the_limit(limit: int, tokens: list[int], reason: str) -> None:
    assert (
        written([*item(6), END], max_new_tokens=limit)[0],
        written([*item(6), END], max_new_tokens=limit)[1].reason,
    ) == (tokens, reason)


def test_a_round_that_was_cut_is_the_last_one() -> None:
    script = [*item(6), *item(2), SYNC, *item(1), END]
    tokens, report = written(script, max_new_tokens=18)
    assert tokens == [*item(6), *item(2), *chunk(3), *chunk(2), SYNC] and report.reason == "length"
    tokens, report = written(script, max_new_tokens=21)
    assert tokens == [*item(6), *item(2), *chunk(6), *chunk(2), SYNC] and report.reason == "length"
    tokens, report = written(script, max_rounds=1)
    assert tokens == [*item(6), *item(2), *chunk(6), *chunk(2), SYNC] and report.reason == "rounds"
    assert report.rounds[0].stop == "sync" and report.forwards["refresh"] == 0


def test_many_rounds_and_chunks() -> None:
    tokens, report = written([*item(1), SYNC] * 11 + item(2) * 12 + [END], max_new_tokens=200)
    assert tokens == (item(1) + chunk(1) + [SYNC]) * 11 + item(2) * 12 + chunk(2) * 12 + [END]
    assert [len(each.lengths) for each in report.rounds] == [1] * 11 + [12]
    assert report.forwards == {"plan": 5 + 10 * 4 + 48, "chunks": 11 + 2, "refresh": 11}


def test_numbers_of_any_size() -> None:
    _, report = written([*item(10**30), END], max_new_tokens=50)
    assert report.rounds[0].lengths == [13] and report.reason == "end"
    assert written([*item(123), END], max_new_tokens=200)[1].rounds[0].lengths == [123]
    assert written([*item(3), END], unit=4)[1].rounds[0].lengths == [12]
    assert written([*item(3), END], length_scale=0.5)[1].rounds[0].lengths == [1]


def test_neither_control_tokens_nor_masks_are_in_chunks() -> None:
    """Which this model would write anywhere; filler is allowed."""
    assert written([*item(4), END])[0][-7:] == [BEGIN, 10, 10, 10, 10, STOP, END]
    result = generate(Scripted([*item(4), END], guess=PAD), [11], "planned", max_new_tokens=30)
    assert result.tokens.tolist()[-7:] == [BEGIN, PAD, PAD, PAD, PAD, STOP, END]


def test_a_prompt_with_control_tokens() -> None:
    prompt = [*item(9), 11, *item(2), 12]
    result = generate(Scripted([*item(1), END]), prompt, "planned", max_new_tokens=60)
    assert result.stats.plans is not None and result.stats.plans[0].rounds[0].lengths == [1]


plans = st.lists(
    st.sampled_from([OPEN, CLOSE, OPEN, CLOSE, 1, 2, 0, 12, BEGIN, STOP, PAD, MASK - 1, SYNC]), max_size=14
)


@settings(max_examples=80)
@given(script=plans, stop=st.sampled_from([END, SYNC]))
def test_any_plan(script: list[int], stop: int) -> None:
    """It ends with a reason, and its items are those of the plain parser."""
    tokens, report = written([*script, stop, END, END], max_new_tokens=40)
    assert len(tokens) <= 40 and MASK not in tokens
    assert report.reason in ("end", "length", *BAD_PLANS)
    first = report.rounds[0].plan
    assert first == script[: len(first)]
    try:
        items = reference.parse_last_number(first, TAGS)
    except reference.BadPlan as bad:
        if report.rounds[0].stop != "length":
            assert report.reason == str(bad) and len(report.rounds) == 1
        return
    if report.rounds[0].stop != "length":
        assert report.rounds[0].topics == [each.topic for each in items]


# ---- streams, counts, text


def test_chunks_are_reported_as_soon_as_they_are_complete() -> None:
    heard: list[tuple[list[int], int | None, int]] = []

    def listen(sequence: int, ids: list[int], accepted: int) -> None:
        heard.append((list(ids), ids.chunk if isinstance(ids, ChunkTokens) else None, accepted))

    script = [*item(3), *item(1), *item(0), SYNC, *item(2), END]
    tokens = generate(Scripted(script), [11], "planned", max_new_tokens=60, on_tokens=listen).tokens.tolist()
    chunks = [(ids, number, accepted) for ids, number, accepted in heard if number is not None]
    assert chunks == [(chunk(0), 2, 0), (chunk(1), 1, 1), (chunk(3), 0, 3), (chunk(2), 3, 2)]
    assert [ids[0] for ids, number, _ in heard if number is None] == script
    assert sorted(token for ids, *_ in heard for token in ids) == sorted(tokens)


@pytest.mark.parametrize("sparse", [False, True])
def test_forwards_and_rows_by_formula(sparse: bool) -> None:
    for weights in range(3):
        result = generate(
            planning_model(weights), [END, 11, END], "planned", max_new_tokens=64, sparse=sparse, temperature=0.5
        )
        assert result.stats.plans is not None
        report = result.stats.plans[0]
        first, *later = report.rounds
        entered = [each for each in report.rounds[:-1] if each.lengths]
        planned = sum(len(each.plan) + (each.stop != "length") for each in report.rounds)
        assert report.forwards["plan"] + report.forwards["refresh"] == planned
        assert report.forwards["refresh"] == len(entered)
        assert report.forwards["chunks"] == sum(max(each.lengths, default=0) for each in report.rounds)
        assert report.rows == {
            "plan": 3 + planned - 1 - len(entered),
            "chunks": sum(max(each.lengths, default=0) * sum(n + 2 for n in each.lengths) for each in report.rounds),
            "refresh": sum(sum(n + 2 for n in each.lengths) + 1 for each in entered),
        }
        assert result.stats.forwards == report.critical_path and later is not None and first.plan


class Letters:
    """A tokenizer whose ids 10 .. are letters."""

    def decode(self, ids: Any) -> str:
        return "".join(str(token) if token < 10 else chr(ord("a") + token - 10) for token in ids)


@pytest.mark.parametrize(
    ("script", "guess", "joiner", "text"),
    [
        ([*item(2), *item(1), END], 11, None, "bb b"),
        ([*item(2), *item(1), END], 3, None, "33\n3"),
        ([*item(2), *item(1), END], 3, ", ", "33, 3"),
        ([*item(2), *item(1), END], PAD, None, ""),
        ([13, 14, END], 11, None, "de"),
        ([13, *item(2), SYNC, 14, END], 11, None, "d bb e"),
        ([13, OPEN, 12, 14, END], 11, None, "d"),
    ],
)
def test_text(script: list[int], guess: int, joiner: str | None, text: str) -> None:
    model = Scripted(script, guess, tokenizer=Letters())
    assert generate(model, [11], "planned", max_new_tokens=40, joiner=joiner).text == text


# ---- devices, NaN, errors


def test_same_tokens_on_a_gpu() -> None:
    model = planning_model(1, "own", 16, "float32")
    options: dict[str, Any] = {
        "max_new_tokens": 26,
        "temperature": 0.7,
        "seed": 1,
        "sparse": True,
        "cache": "drop_finished",
    }
    prompts = [[END], [10, END], [11, 3, END]]
    here = generate(model, prompts, "planned", **options)
    with pretended_gpu():
        there = generate(planning_model.__wrapped__(1, "own", 16, "float32").to("cuda"), prompts, "planned", **options)
    assert [tokens.tolist() for tokens in here.tokens] == [tokens.tolist() for tokens in there.tokens]
    assert here.stats.plans == there.stats.plans


def test_nan_in_a_chunk() -> None:
    class Broken(Scripted):
        def hidden(self, tokens: Any, **options: Any) -> torch.Tensor:
            out = super().hidden(tokens, **options)
            return out if self.left else out * torch.nan

    with pytest.raises(
        ValueError, match=r"logits leave no token to choose: NaN, \+inf or only -inf in sequence 0, after 4 new tokens"
    ):
        generate(Broken([*item(2), END]), [11], "planned", max_new_tokens=20)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"steps_ratio": 0}, ValueError, "steps_ratio must be above 0, got 0."),
        ({"steps_ratio": 1.5}, ValueError, "steps_ratio must be in 0 .. 1, got 1.5."),
        ({"sparse": 1}, TypeError, "sparse must be a bool, got int."),
        ({"cache": "drop_finished"}, ValueError, "cache must not drop chunks that others see, got 'drop_finished'."),
        (
            {"order": "margin", "threshold": 0.5},
            ValueError,
            "order must be 'confidence' with a threshold, got 'margin'.",
        ),
        ({"threshold": -1}, ValueError, "threshold must be at least 0, got -1."),
        ({"length_scale": -1.0}, ValueError, "length_scale must be in 0 .. 1000, got -1.0."),
        ({"unit": 0}, ValueError, "unit must be at least 1, got 0."),
        ({"max_rounds": 0}, ValueError, "max_rounds must be at least 1, got 0."),
        ({"joiner": 1}, TypeError, "joiner must be a str or None, got int."),
        ({"top_p": 2}, ValueError, "top_p must be in 0 .. 1, got 2."),
        ({"top_k": 0}, ValueError, "top_k must be at least 1, got 0."),
        ({"mask_token": SYNC}, ValueError, f"mask_token must not be a plan token, got {SYNC}."),
        ({"end_tokens": [SYNC]}, ValueError, f"end_tokens must hold no plan token, got {SYNC}."),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as raised:
        generate(Scripted([END]), [1], "planned", max_new_tokens=4, **options)
    expected = f"pdkernels.decoding.planned: {words}" if "plan token" in words else error_of("planned", words)
    assert str(raised.value).startswith(expected)


def test_a_model_without_plans() -> None:
    config = TransformerConfig(23, 16, 1, 2, 1, 8, 24)
    with pytest.raises(TypeError, match="got 'planned', which requires plan_tokens"):
        generate(Transformer(config, mask_token=22), [1], "planned", max_new_tokens=4)
    # A bidirectional model plans too, as the released checkpoints do.
    dream = planning_model.__wrapped__(0)
    object.__setattr__(dream.config, "attention", "bidirectional")
    here = generate(dream, [END], "planned", max_new_tokens=30)
    assert torch.equal(here.tokens, generate(planning_model(0), [END], "planned", max_new_tokens=30).tokens)
