"""`custom_generate` with processors, allowed tokens and criteria of callers, and with what it returns beside texts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed", minversion="4.57")

from tests.support.custom_generate import FIVE, LATER, NEW, V, an_end, ours, prompts, theirs  # noqa: E402
from tests.support.transformers_names import VERSION  # noqa: E402


class Nothing(transformers.LogitsProcessor):  # type: ignore[misc]
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


class Never(transformers.StoppingCriteria):  # type: ignore[misc]
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Parity(transformers.LogitsProcessor):  # type: ignore[misc]
    """Depends on the padded prefix: its length and its last token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, input_ids.shape[1] % 2 :: 2] -= 3.0
        scores[torch.arange(len(scores)), input_ids[:, -1]] = -torch.inf
        return scores


class AfterSix(transformers.StoppingCriteria):  # type: ignore[misc]
    """Ends a text whose padded length is at least 15 with an even token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return (input_ids[:, -1] % 2 == 0) & (input_ids.shape[1] >= 15)


PROCESSORS: list[Any] = [
    [Nothing()],
    [Parity()],
    [transformers.TemperatureLogitsWarper(2.0), Parity()],
    [transformers.RepetitionPenaltyLogitsProcessor(1.5)],
    [transformers.RepetitionPenaltyLogitsProcessor(1.5, **({"prompt_ignore_length": 9} if FIVE else {}))],
]


@pytest.mark.covering
@pytest.mark.parametrize("number", range(len(PROCESSORS)))
@pytest.mark.parametrize("method", [None, "autoregressive", "jacobi", "jacobi_multiblock"])
def test_processors_of_callers_are_applied_to_every_row(method: str | None, number: int) -> None:
    """Beside those that transformers makes, in its order, and with the padding of a batch."""
    mask = torch.ones(3, 9, dtype=torch.int64)
    mask[1, :4] = 0
    ids = prompts(3).masked_fill(mask == 0, 0)
    processors = transformers.LogitsProcessorList(PROCESSORS[number])
    more: dict[str, Any] = {"suppress_tokens": [7], "no_repeat_ngram_size": 3, "attention_mask": mask}
    for settings in (more, more | ({"repetition_penalty": 1.2} if FIVE and number < 3 else {})):
        expected = theirs(ids, logits_processor=processors, **settings)
        assert torch.equal(ours(ids, method=method, logits_processor=processors, **settings), expected)
    if number > 0:
        assert not torch.equal(expected, theirs(ids, **settings))


@pytest.mark.parametrize("method", [None, "jacobi_multiblock"])
def test_processors_of_settings_see_the_padding(method: str | None) -> None:
    mask = torch.ones(3, 9, dtype=torch.int64)
    mask[1, :4] = 0
    ids = prompts(3).masked_fill(mask == 0, 0)
    settings: dict[str, Any] = {
        "attention_mask": mask,
        "eos_token_id": an_end(),
        "min_length": 14,
        "forced_eos_token_id": 5,
    }
    settings |= {"bad_words_ids": [[5, 6], [9]], "sequence_bias": [[[4], 2.0], [[3, 8], 5.0]]}
    settings |= {"exponential_decay_length_penalty": (2, 1.5), "begin_suppress_tokens": [11]}
    if not LATER:  # where the penalty of an end token that is not allowed yet is NaN
        with pytest.raises(ValueError, match="leave no token to choose"):
            ours(ids, method=method, **settings)
        del settings["min_length"]
    assert torch.equal(ours(ids, method=method, **settings), theirs(ids, **settings))


def test_allowed_tokens_of_each_text() -> None:
    """`prefix_allowed_tokens_fn` is asked with the number of the text."""
    settings = {"prefix_allowed_tokens_fn": lambda batch, ids: [3 + batch, 10 + len(ids) % 4, 20]}
    for method in (None, "jacobi_multiblock"):
        assert torch.equal(ours(prompts(3), method=method, **settings), theirs(prompts(3), **settings))


def test_allowed_tokens_of_copies_and_of_texts_that_have_none_left() -> None:
    """From 5.24 on, copies of a prompt have one number. Allowed tokens that others dropped come back, but not in early versions."""
    copies = {"do_sample": True, "num_return_sequences": 2, "prefix_allowed_tokens_fn": lambda batch, ids: [3 + batch]}
    assert torch.equal(ours(prompts(2), **copies), theirs(prompts(2), **copies))
    dropped = {"bad_words_ids": [[5], [6]], "prefix_allowed_tokens_fn": lambda batch, ids: torch.tensor([6, 5])}
    if VERSION >= (5, 23):
        assert torch.equal(ours(prompts(2), **dropped), theirs(prompts(2), **dropped))
    with pytest.raises(ValueError, match="empty list"):
        ours(prefix_allowed_tokens_fn=lambda batch, ids: [])


@pytest.mark.parametrize("method", [None, "autoregressive", "jacobi_multiblock"])
def test_stopping_criteria_of_callers(method: str | None) -> None:
    mask = torch.ones(3, 9, dtype=torch.int64)
    mask[1, :4] = 0
    ids = prompts(3).masked_fill(mask == 0, 0)
    for made in ([Never()], [AfterSix()], [transformers.MaxLengthCriteria(12)], [AfterSix(), Never()]):
        criteria = transformers.StoppingCriteriaList(made)
        # Without an end token transformers goes on with texts that a criterion has ended, until it has ended all.
        settings = {"attention_mask": mask, "stopping_criteria": criteria, "eos_token_id": V - 1}
        assert torch.equal(ours(ids, method=method, **settings), theirs(ids, **settings))


def test_time_is_up() -> None:
    assert ours(max_time=1e-9).shape[1] < 9 + NEW
    assert torch.equal(ours(max_time=100.0), theirs())


@pytest.mark.parametrize("drawn", [{}, {"do_sample": True, "temperature": 0.7, "top_k": 5}])
def test_scores_and_logits_are_those_of_the_texts(drawn: dict[str, Any]) -> None:
    """Recomputed with transformers from what was written; of texts that have ended they are 0."""
    ids, end = prompts(3), an_end()
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    settings = {"eos_token_id": end, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, **drawn}
    said = ours(ids, **asked, **settings)
    new = said.sequences[:, 9:]
    assert len(said.scores) == len(said.logits) == new.shape[1]
    for place in range(new.shape[1]):
        step = theirs(said.sequences[:, : 9 + place], **asked, **settings | {"max_new_tokens": 1})
        for row in range(3):
            if end in new[row, :place].tolist():
                assert not said.logits[place][row].any() and not said.scores[place][row].any()
                continue
            torch.testing.assert_close(said.logits[place][row], step.logits[0][row], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(said.scores[place][row], step.scores[0][row], atol=1e-4, rtol=1e-4)
            assert said.scores[place][row, new[row, place]] > -torch.inf
