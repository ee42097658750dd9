"""The reference decoders against each other and against steps written out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkernels.reference.autoregressive import autoregressive
from pdkernels.reference.jacobi import JacobiStep, accepted_length, filler_words, fillers, jacobi, jacobi_window
from tests.support.causal import SCRIPTS, VOCABULARY, FakeModel, from_list

token = st.integers(0, VOCABULARY - 1)


@given(
    script=st.sampled_from(sorted(SCRIPTS)),
    ties=st.booleans(),
    prompt=st.lists(token, min_size=1, max_size=8),
    limit=st.integers(0, 24),
    length=st.integers(1, 12),
    ends=st.lists(token, max_size=3),
    seed=st.integers(0, 2**64 - 1),
)
def test_jacobi_equals_greedy(
    script: str, ties: bool, prompt: list[int], limit: int, length: int, ends: list[int], seed: int
) -> None:
    model = FakeModel(SCRIPTS[script], ties=ties).plain
    greedy = autoregressive(model, prompt, limit, end_tokens=ends)
    assert len(greedy.tokens) == limit or greedy.tokens[-1] in ends
    assert greedy.forwards == len(greedy.tokens)
    for result in (
        jacobi(model, prompt, limit, block_size=length, end_tokens=ends, seed=seed),
        jacobi_window(model, prompt, limit, window=length, end_tokens=ends, seed=seed),
    ):
        assert result.tokens == greedy.tokens
        assert result.forwards == len(result.trace) + (limit > 0)
        assert result.forwards <= greedy.forwards
        assert all(1 <= step.accepted <= len(step.draft) <= length for step in result.trace)


def test_a_block_shrinks_and_the_next_one_starts_from_the_seed_token() -> None:
    prompt, written = [9, 8], [1, 2, 3, 4, 5, 6, 7]
    result = jacobi(FakeModel(from_list(written, 2)).plain, prompt, 7, block_size=3, seed=5)
    assert result.tokens == written
    # Off the script the model predicts 0, so no filler is ever confirmed.
    first, second, third, fourth = result.trace[:4]
    assert (first.draft, first.accepted) == ([1, 0, 0], 1)
    assert second.draft == first.predictions[:2]  # shifted by the accepted token, its last prediction dropped
    assert (third.draft, third.accepted) == ([3], 1)
    assert fourth.draft[0] == 4 == third.predictions[-1]
    assert fourth.draft[1:] == fillers(filler_words(5, 4, 3)[3], [*prompt, 1, 2])[1:]


def test_the_window_is_refilled_after_every_forward() -> None:
    prompt, written = [9, 8], [1, 2, 3, 4, 5, 6, 7, 8]
    result = jacobi_window(FakeModel(from_list(written, 2)).plain, prompt, 8, window=3, seed=5)
    assert result.tokens == written
    assert [len(step.draft) for step in result.trace] == [3, 3, 3, 3, 3, 2, 1]
    for step, following in zip(result.trace, result.trace[1:], strict=False):
        kept = step.predictions[step.accepted - 1 :]
        assert following.draft[: len(kept)] == kept[: len(following.draft)]


def test_a_right_draft_is_accepted_whole() -> None:
    result = jacobi(FakeModel(SCRIPTS["position"]).plain, [3], 9, block_size=4)
    assert [step.accepted for step in result.trace] == [4, 1, 3]
    assert result.trace[0].predictions[:3] == result.trace[0].draft[1:]
    assert result.forwards == 4


@pytest.mark.parametrize(
    ("draft", "predictions", "ends", "accepted"),
    [
        ([5], [6], (), 1),
        ([5, 6, 7], [6, 7, 8], (), 3),
        ([5, 6, 7], [6, 9, 8], (), 2),
        ([5, 9, 7], [6, 7, 8], (), 1),
        ([5, 6, 7], [6, 7, 8], (5,), 1),
        ([5, 6, 7], [6, 7, 8], (6, 7), 2),
        ([5, 6, 9], [6, 7, 9], (9,), 2),
    ],
)
def test_accepted_length(draft: list[int], predictions: list[int], ends: tuple[int, ...], accepted: int) -> None:
    assert accepted_length(draft, predictions, ends) == accepted


def test_steps_are_plain_tuples() -> None:
    step = jacobi(FakeModel(SCRIPTS["bigram"]).plain, [3], 2, block_size=1).trace[0]
    assert isinstance(step, JacobiStep) and step == ([10], [8], 1)
